from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import VolumeError
from bridge.volumes import hold
from bridge.volumes.commit import (
    WITHDRAWN,
    Attempt,
    attempts,
    begin,
    collect_garbage,
    complete_attempts,
    delete_attempt,
    read_marker,
    withdraw_attempt,
)
from bridge.volumes.hold import delete_unheld, hold_attempt
from bridge.volumes.lease import Lease, count_holders, storage_time_ns
from bridge.volumes.stores import LocalStorage
from tests.processes import eventually


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def completed(storage: LocalStorage) -> Attempt:
    with begin(storage, "a") as opened:
        storage.make_folder(opened.name)
        storage.write(f"{opened.name}/file", [b"abc"])
        opened.commit({}, {"file": 3})
    return opened.attempt


def beats(storage: LocalStorage) -> list[str]:
    return sorted(os.listdir(storage.folder / "_leases"))


def num_holders(storage: LocalStorage, attempt: Attempt) -> int:
    return count_holders(storage, now_ns=storage_time_ns(storage)).get(attempt.attempt_id, 0)


class Refusing(LocalStorage):
    """A volume that may be read only."""

    def __init__(self, folder: Path, error: int) -> None:
        super().__init__(folder)
        self._error = error

    def write(self, name: str, blocks: Any) -> None:
        raise OSError(self._error, os.strerror(self._error), name)


def test_a_hold_lasts_as_long_as_it_is_referenced(storage: LocalStorage) -> None:
    attempt = completed(storage)
    first, second = hold_attempt(storage, attempt.name), hold_attempt(storage, attempt.name)
    assert num_holders(storage, attempt) == 2
    assert set(count_holders(storage, now_ns=storage_time_ns(storage))) == {attempt.attempt_id}

    del first
    eventually(lambda: num_holders(storage, attempt) == 1)
    del second
    eventually(lambda: beats(storage) == [])


def test_a_hold_that_is_ended_is_gone_at_once(storage: LocalStorage) -> None:
    attempt = completed(storage)
    held = hold_attempt(storage, attempt.name)
    assert held is not None

    held.end()

    assert beats(storage) == []
    held.end()


def test_a_hold_in_a_cycle_ends_wherever_it_is_collected(storage: LocalStorage) -> None:
    attempt = completed(storage)
    cycle: dict[str, Any] = {"held": hold_attempt(storage, attempt.name)}
    cycle["itself"] = cycle
    del cycle
    assert num_holders(storage, attempt) == 1

    gc.collect()

    eventually(lambda: beats(storage) == [])


def test_a_hold_is_renewed(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "_BEAT_S", 0.02)
    attempt = completed(storage)
    held = hold_attempt(storage, attempt.name)

    eventually(lambda: max(int(name.rpartition(".")[2]) for name in beats(storage)) > 3)

    assert num_holders(storage, attempt) == 1
    del held
    eventually(lambda: beats(storage) == [])


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EIO])
def test_who_may_not_write_reads_without_a_hold(storage: LocalStorage, error: int) -> None:
    attempt = completed(storage)

    assert hold_attempt(Refusing(storage.folder, error), attempt.name) is None
    assert beats(storage) == []


def test_a_copy_elsewhere_is_not_held(storage: LocalStorage, tmp_path: Path) -> None:
    attempt = completed(storage)
    copied = tmp_path / "copied"
    copied.mkdir()
    (storage.folder / attempt.name).rename(copied / attempt.name)
    (copied / attempt.name).joinpath("_leases").mkdir()

    assert hold_attempt(LocalStorage(copied), attempt.name) is None
    assert hold_attempt(storage, "renamed") is None
    assert os.listdir(copied) == [attempt.name]
    assert beats(storage) == []


@pytest.mark.parametrize("how", [withdraw_attempt, delete_attempt])
def test_what_was_deleted_since_it_was_found_is_not_opened(storage: LocalStorage, how: Any) -> None:
    attempt = completed(storage)
    assert read_marker(storage, attempt.name) is not None
    how(storage, attempt)

    with pytest.raises(
        VolumeError, match=rf"{attempt.name} was deleted while it was opened\.\n  Open what is there now"
    ):
        hold_attempt(storage, attempt.name)
    assert beats(storage) == []


def test_a_marker_that_cannot_be_looked_at_counts_as_there(storage: LocalStorage) -> None:
    attempt = completed(storage)

    class Failing(LocalStorage):
        def status(self, name: str) -> Any:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    assert hold_attempt(Failing(storage.folder), attempt.name) is not None


def test_a_pickled_copy_holds_too_if_it_can(storage: LocalStorage) -> None:
    attempt = completed(storage)
    held = hold_attempt(storage, attempt.name)
    data = pickle.dumps(held)
    assert num_holders(storage, attempt) == 1

    second, third = pickle.loads(data), copy.deepcopy(held)
    assert num_holders(storage, attempt) == 3

    del held, second, third
    eventually(lambda: beats(storage) == [])
    (storage.folder / "_leases").rmdir()
    assert pickle.loads(data) is None


READER = """
import sys
from pathlib import Path
from bridge.volumes.hold import hold_attempt
from bridge.volumes.stores import LocalStorage
held = hold_attempt(LocalStorage(Path(sys.argv[1])), sys.argv[2])
print(held is not None, flush=True)
"""


def in_another_process(storage: LocalStorage, attempt: Attempt, more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", READER + more, str(storage), attempt.name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("raise SystemExit(3)", 3), ("import threading; held = [held, held]", 0)]
)
def test_a_hold_ends_with_the_interpreter_and_does_not_keep_it(storage: LocalStorage, end: str, status: int) -> None:
    attempt = completed(storage)
    began = time.monotonic()

    with in_another_process(storage, attempt, end) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "True\n"

    assert reader.returncode == status
    assert time.monotonic() - began < hold._LAST_S
    assert beats(storage) == []


def test_a_forked_process_neither_renews_nor_ends_the_hold(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "_BEAT_S", 0.05)
    attempt = completed(storage)
    child = """
import os
from bridge.volumes import hold
pid = os.fork()
if pid == 0:
    del held
    raise SystemExit
assert os.waitpid(pid, 0)[1] == 0
print(sorted(os.listdir(sys.argv[1] + "/_leases")), flush=True)
input()
"""
    with in_another_process(storage, attempt, child) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "True\n"
        assert reader.stdout.readline() == f"{beats(storage)}\n"
        assert num_holders(storage, attempt) == 1
        reader.communicate("\n")
    assert beats(storage) == []


def test_the_hold_of_a_killed_reader_grows_old(storage: LocalStorage) -> None:
    attempt = completed(storage)
    with in_another_process(storage, attempt, "input()") as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "True\n"
        reader.kill()
    assert num_holders(storage, attempt) == 1

    for name in beats(storage):
        os.utime(storage.folder / "_leases" / name, (time.time() - 3601,) * 2)

    assert num_holders(storage, attempt) == 0


# withdrawn


def make_old(storage: LocalStorage, attempt: Attempt, age_s: float) -> Attempt:
    """Return the attempt under the name that it would have, had it begun earlier."""
    older = Attempt(attempt.generation - int(age_s * 1000), attempt.label, attempt.attempt_id)
    (storage.folder / attempt.name).rename(storage.folder / older.name)
    return older


def test_what_is_withdrawn_stays_readable_and_is_garbage_an_hour_later(storage: LocalStorage) -> None:
    attempt = make_old(storage, completed(storage), 10_000)
    withdraw_attempt(storage, attempt)
    assert list(complete_attempts(storage)) == []
    assert storage.read(f"{attempt.name}/file") == b"abc"

    # a lease may be there that no listing shows yet
    assert collect_garbage(storage) == []

    os.utime(storage.folder / attempt.name / WITHDRAWN, (time.time() - 3601,) * 2)
    held = Lease(storage, attempt.attempt_id)
    held.start()
    assert collect_garbage(storage) == []
    held.end()
    assert collect_garbage(storage) == [attempt]
    assert attempts(storage) == []


@pytest.mark.parametrize("at_once", [True, False])
def test_the_files_of_what_is_held_stay(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    monkeypatch.setattr(hold, "_LAG_S", 0.0)
    read, free = completed(storage), completed(storage)
    held = hold_attempt(storage, read.name)

    assert delete_unheld(storage, [read, free], at_once=at_once) == ({read: "in use by 1 holder"}, {})

    assert attempts(storage) == [read]
    assert storage.read(f"{read.name}/file") == b"abc"
    assert (read_marker(storage, read.name) is None) == at_once
    assert held is not None
    held.end()
    assert delete_unheld(storage, [read], at_once=at_once) == ({}, {})
    assert attempts(storage) == []


def test_withdrawing_twice_or_what_is_gone_is_no_error(storage: LocalStorage) -> None:
    attempt = completed(storage)
    withdraw_attempt(storage, attempt)
    withdraw_attempt(storage, attempt)
    delete_attempt(storage, attempt)
    withdraw_attempt(storage, attempt)

    assert attempts(storage) == []


def test_what_cannot_be_withdrawn_is_told(storage: LocalStorage) -> None:
    attempt = completed(storage)

    with pytest.raises(VolumeError, match=r"cannot be withdrawn, and may still be complete: Permission denied\."):
        withdraw_attempt(Refusing(storage.folder, errno.EACCES), attempt)
    assert [found for found, _ in complete_attempts(storage)] == [attempt]
