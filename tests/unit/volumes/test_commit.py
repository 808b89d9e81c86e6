from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import VolumeError
from bridge.volumes import commit, lease
from bridge.volumes.commit import (
    Attempt,
    Marker,
    attempts,
    begin,
    collect_garbage,
    complete_attempts,
    delete_attempt,
    read_marker,
)
from bridge.volumes.storage import Storage
from bridge.volumes.stores import LocalStorage, open_storage
from tests.processes import eventually

BODY = {"name": "é", "rows": [1, 2, {"deep": None}], "digest": "not this one"}
MARKER = Marker(BODY, {})


def completed(storage: Storage, label: str = "a", body: dict[str, Any] | None = None, **files: bytes) -> Attempt:
    with begin(storage, label) as opened:
        storage.make_folder(opened.name)
        for name, content in files.items():
            storage.write(f"{opened.name}/{name}", [content])
        opened.commit(BODY if body is None else body, {name: len(content) for name, content in files.items()})
    return opened.attempt


def named(storage: Storage, generation: int, attempt_id: str, label: str = "a") -> Attempt:
    """Return a complete attempt of that name."""
    attempt = Attempt(generation, label, attempt_id)
    storage.make_folder(attempt.name)
    storage.write(f"{attempt.name}/_bridge.0.json", [Marker({"id": attempt_id}, {}).encode()])
    return attempt


def left_by_a_dead_writer(storage: Storage, *, age_s: float = 7200.0, **files: bytes) -> Attempt:
    attempt = Attempt(int((time.time() - age_s) * 1000), "a", f"{len(attempts(storage)):012x}")
    storage.make_folder(attempt.name)
    for name, content in files.items():
        storage.write(f"{attempt.name}/{name}", [content])
    return attempt


def names(storage: Storage, folder: str = "") -> list[str]:
    return sorted(entry.name for entry in storage.list(folder))


class Failing:
    """A storage of which the calls `name` fail with one error, `times` times."""

    def __init__(self, storage: Storage, call: str, name: str, error: int, times: int = 10**9) -> None:
        self._storage, self._call, self._name, self._error, self.times = storage, call, name, error, times

    def __getattr__(self, call: str) -> Any:
        method = getattr(self._storage, call)

        def failing(name: str = "", *args: Any) -> Any:
            if call == self._call and self._name in name and self.times > 0:
                self.times -= 1
                raise OSError(self._error, os.strerror(self._error))
            return method(name, *args)

        return failing if call != "folder" else method

    def __str__(self) -> str:
        return str(self._storage)


# what readers see


def test_a_marker_makes_an_attempt_complete(storage: Storage) -> None:
    with begin(storage, "a") as opened:
        storage.make_folder(opened.name)
        storage.write(f"{opened.name}/file", [b"xyz"])
        assert read_marker(storage, opened.name) is None
        assert list(complete_attempts(storage)) == []
        assert attempts(storage) == [opened.attempt]

        opened.commit(BODY, {"file": 3})

        assert list(complete_attempts(storage)) == [(opened.attempt, Marker(BODY, {"file": 3}))]
    assert list(complete_attempts(storage)) == [(opened.attempt, Marker(BODY, {"file": 3}))]
    assert storage.read(f"{opened.name}/file") == b"xyz"
    assert names(storage, "_leases") == []


def test_a_folder_that_is_one_attempt_is_read_by_itself(storage: Storage, tmp_path: Path) -> None:
    attempt = completed(storage)
    alone = (
        LocalStorage(tmp_path / "root" / attempt.name) if storage.folder else open_storage(f"{storage}/{attempt.name}")
    )

    assert read_marker(alone) == MARKER


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        assert read_marker(LocalStorage(path)) is None
        assert attempts(LocalStorage(path)) == []
        assert list(complete_attempts(LocalStorage(path))) == []
        assert collect_garbage(LocalStorage(path)) == []


@pytest.mark.parametrize(
    "name",
    [
        "1-a-0123456789ab",
        "0000000000001-A-0123456789ab",
        "0000000000001-a-0123456789a",
        "x0000000000001-a-0123456789ab",
        "0000000000001-a-0123456789ab.tmp",
        "_leases",
    ],
)
def test_other_names_are_no_attempts(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "0000000000001-a-0123456789ab").write_text("a file")

    assert attempts(LocalStorage(tmp_path)) == []
    assert Attempt.parse(name) is None


def test_a_name_says_what_it_is_made_of() -> None:
    attempt = Attempt(1_795_977_692_966, "step40000", "0123456789ab")

    assert attempt.name == "1795977692966-step40000-0123456789ab"
    assert Attempt.parse(attempt.name) == attempt


def test_a_generation_is_the_time_and_above_all_that_are_there(storage: Storage) -> None:
    before = time.time_ns() // 1_000_000
    first = completed(storage)
    second = completed(storage)
    assert before - 10 <= first.generation <= time.time_ns() // 1_000_000 + 10
    assert first.generation < second.generation

    ahead = named(storage, 9_000_000_000_000, "0" * 12)

    assert completed(storage).generation == ahead.generation + 1


def test_what_a_listing_does_not_show_yet_is_still_outranked(storage: Storage) -> None:
    older = completed(storage, body={"n": 1})

    class Lagging(Failing):
        def __getattr__(self, call: str) -> Any:
            if call == "list":
                return lambda name="": iter(())
            return getattr(self._storage, call)

    time.sleep(0.002)
    newer = completed(Lagging(storage, "", "", 0), body={"n": 2})  # type: ignore[arg-type]

    assert newer.generation > older.generation
    assert next(complete_attempts(storage)) == (newer, Marker({"n": 2}, {}))


def test_the_highest_generation_wins_then_the_smallest_id(storage: Storage) -> None:
    for generation, letter in [(2, "b"), (3, "c"), (1, "0"), (3, "a"), (2, "d")]:
        named(storage, generation, letter * 12)
    named(storage, 9, "f" * 12, label="other")

    found = [(attempt.generation, marker.body["id"][0]) for attempt, marker in complete_attempts(storage, "a")]

    assert found == [(3, "a"), (3, "c"), (2, "b"), (2, "d"), (1, "0")]
    assert next(complete_attempts(storage))[0].label == "other"


def test_an_attempt_without_a_whole_marker_does_not_hide_others(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    good, bad = completed(storage), completed(storage)
    (tmp_path / bad.name / "_bridge.0.json").write_bytes(b"{}")

    assert [attempt for attempt, _ in complete_attempts(storage)] == [good]


def test_a_marker_that_cannot_be_read_is_an_error_and_not_an_older_attempt(
    storage: Storage,
) -> None:
    completed(storage)
    newer = completed(storage)

    with pytest.raises(VolumeError, match=rf"the marker of .*/{newer.name} cannot be read: Input/output error"):
        next(complete_attempts(Failing(storage, "read", newer.name, errno.EIO)))  # type: ignore[arg-type]
    with pytest.raises(VolumeError, match="cannot be listed: Permission denied"):
        attempts(Failing(storage, "list", "", errno.EACCES))  # type: ignore[arg-type]


# markers


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"garbage", b"{}\n{}", b"[]\n{}", b"null\nnull", b'{"digest": null}\n{}', b"\xff\xfe\n\x00", b'{"dig'],
)
def test_garbage_is_no_marker(content: bytes) -> None:
    assert Marker.decode(content) is None


@pytest.mark.parametrize(("body", "sizes"), [([], {}), ("text", {}), (None, {}), ({}, []), ({}, None)])
def test_a_marker_of_another_form_is_no_marker(body: Any, sizes: Any) -> None:
    assert Marker.decode(Marker({}, {}).encode()) == Marker({}, {})
    assert Marker.decode(Marker(body, sizes).encode()) is None


def test_every_part_of_a_marker_is_no_marker() -> None:
    whole = MARKER.encode()

    assert Marker.decode(whole) == MARKER
    assert [length for length in range(len(whole)) if Marker.decode(whole[:length]) is not None] == []
    assert Marker.decode(whole + b" ") is None


@given(st.data())
def test_a_marker_with_one_wrong_bit_is_no_marker(data: st.DataObject) -> None:
    content = bytearray(MARKER.encode())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    assert Marker.decode(bytes(content)) is None


def test_a_marker_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    attempt = completed(LocalStorage(tmp_path))
    head, body = (tmp_path / attempt.name / "_bridge.0.json").read_text().split("\n")

    assert list(json.loads(head)) == ["digest"]
    assert json.loads(body) == {"body": BODY, "sizes": {}}


@pytest.mark.parametrize("torn", [b"", b'{"digest"', b"{}\n{}"])
def test_a_second_marker_counts_where_the_first_is_torn(storage: Storage, torn: bytes) -> None:
    attempt = Attempt(5, "a", "0" * 12)
    storage.make_folder(attempt.name)
    storage.write(f"{attempt.name}/_bridge.0.json", [torn])
    storage.write(f"{attempt.name}/_bridge.1.json", [MARKER.encode()])

    assert read_marker(storage, attempt.name) == MARKER


def test_a_marker_that_fails_is_written_again_under_a_new_name(storage: Storage) -> None:
    failing = Failing(storage, "write", "_bridge.", errno.EIO, times=2)

    attempt = completed(failing)  # type: ignore[arg-type]

    assert names(storage, attempt.name) == ["_bridge.2.json"]
    assert list(complete_attempts(storage)) == [(attempt, MARKER)]


def test_a_marker_that_never_succeeds_is_an_error_that_leaves_nothing(storage: Storage) -> None:
    failing = Failing(storage, "write", "_bridge.", errno.EIO)

    with pytest.raises(VolumeError, match=r"no marker could be written to .* in 4 tries: Input/output error"):
        completed(failing, file=b"x")  # type: ignore[arg-type]
    assert names(storage) == ["_leases"]
    with pytest.raises(VolumeError, match=r"/\d{13}-a-[0-9a-f]{12} cannot be completed: No space left on device"):
        completed(Failing(storage, "write", "_bridge.", errno.ENOSPC))  # type: ignore[arg-type]
    assert names(storage) == ["_leases"]


def test_a_marker_is_read_back(storage: Storage) -> None:
    class Losing(Failing):
        """Loses the end of each marker but the last."""

        def __getattr__(self, call: str) -> Any:
            if call != "write":
                return getattr(self._storage, call)

            def write(name: str, blocks: Iterable[bytes]) -> None:
                content = b"".join(blocks)
                self._storage.write(name, [content[:-1] if "_bridge." in name and "3" not in name[-6:] else content])

            return write

    attempt = completed(Losing(storage, "", "", 0))  # type: ignore[arg-type]

    assert names(storage, attempt.name) == [f"_bridge.{number}.json" for number in range(4)]
    assert list(complete_attempts(storage)) == [(attempt, MARKER)]


def test_a_marker_tells_which_files_are_missing(storage: Storage) -> None:
    attempt = completed(storage, one=b"x", two=b"yy")
    ((_, marker),) = complete_attempts(storage)
    assert marker.missing(storage, attempt.name) == []

    storage.delete(f"{attempt.name}/two")
    assert marker.missing(storage, attempt.name) == ["two"]
    storage.write(f"{attempt.name}/two", [b"yyy"])
    assert marker.missing(storage, attempt.name) == ["two"]


# committing


def commit_other_sizes(storage: Storage, sizes: dict[str, int]) -> None:
    with begin(storage, "a") as opened:
        storage.make_folder(opened.name)
        storage.write(f"{opened.name}/file", [b"abc"])
        opened.commit(BODY, sizes, timeout_s=0.1)


def test_files_are_seen_in_full_size_before_the_marker(storage: Storage) -> None:
    with pytest.raises(
        VolumeError, match=r"/file holds 3 bytes 0.1 s after 4 bytes were written\.\n  Another writer may use the same"
    ):
        commit_other_sizes(storage, {"file": 4})
    with pytest.raises(VolumeError, match=r"/gone is not there 0.1 s after 1 bytes"):
        commit_other_sizes(storage, {"file": 3, "gone": 1})
    assert names(storage) == ["_leases"]


def test_files_that_show_late_are_waited_for(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with begin(storage, "a") as opened:
        late = tmp_path / opened.name / "file"
        late.parent.mkdir()
        timer = threading.Timer(0.2, late.write_bytes, [b"abc"])
        timer.start()
        opened.commit(BODY, {"file": 3})
        timer.join()

    assert list(complete_attempts(storage)) == [(opened.attempt, Marker(BODY, {"file": 3}))]


def fail_in_an_attempt(storage: Storage, error: BaseException, *, after_commit: bool) -> None:
    with begin(storage, "a") as opened:
        storage.make_folder(f"{opened.name}/deep/er")
        storage.write(f"{opened.name}/deep/er/file", [b"x"])
        if after_commit:
            opened.commit(BODY, {})
        raise error


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt()])
def test_an_attempt_that_fails_is_deleted(storage: Storage, error: BaseException) -> None:
    earlier = completed(storage)

    with pytest.raises(type(error)):
        fail_in_an_attempt(storage, error, after_commit=False)

    assert names(storage) == sorted([earlier.name, "_leases"])
    assert names(storage, "_leases") == []


def test_a_committed_attempt_stays_whatever_follows(storage: Storage) -> None:
    with pytest.raises(KeyError):
        fail_in_an_attempt(storage, KeyError(), after_commit=True)

    assert len(list(complete_attempts(storage))) == 1


def test_an_attempt_that_was_not_committed_is_deleted(storage: Storage) -> None:
    with begin(storage, "a") as opened:
        storage.make_folder(opened.name)

    assert attempts(storage) == []


def test_what_a_server_writes_after_it_was_told_to_stop_is_deleted_too(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    late: list[threading.Thread] = []

    def write_again(folder: Path) -> None:
        eventually(lambda: not folder.exists())
        time.sleep(0.3)
        folder.mkdir()
        (folder / "part-1.parquet").write_bytes(b"x")

    with begin(storage, "a", by_server=True) as opened:
        storage.make_folder(opened.name)
        storage.write(f"{opened.name}/part-0.parquet", [b"x"])
        late.append(threading.Thread(target=write_again, args=(tmp_path / opened.name,)))
        late[0].start()

    late[0].join()
    assert names(storage) == ["_leases"]


def test_it_is_looked_for_again_however_long_the_deletion_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_LAST_FILES_S", 0.05)
    storage, delete = LocalStorage(tmp_path), LocalStorage.delete
    late: list[threading.Thread] = []

    def slow(storage: LocalStorage, name: str) -> bool:
        time.sleep(0.02)
        return delete(storage, name)

    def write_again(folder: Path) -> None:
        eventually(lambda: not folder.exists())
        time.sleep(0.3)
        folder.mkdir()

    with begin(storage, "a", by_server=True) as opened:
        storage.make_folder(opened.name)
        late.append(threading.Thread(target=write_again, args=(tmp_path / opened.name,)))
        late[0].start()
        monkeypatch.setattr(LocalStorage, "delete", slow)

    late[0].join()
    assert names(storage) == ["_leases"]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    with (
        pytest.raises(VolumeError, match=r"file cannot be written: File exists\.\n  Give a folder or volume you may"),
        begin(LocalStorage(tmp_path / "file"), "a"),
    ):
        pass
    with (
        pytest.raises(VolumeError, match=r"file/below cannot be written: Not a directory"),
        begin(LocalStorage(tmp_path / "file/below"), "a"),
    ):
        pass


@pytest.mark.parametrize("label", ["", "A", "a-b", "é", "a" * 33, "a\n"])
def test_a_label_is_what_names_can_hold(storage: Storage, label: str) -> None:
    with pytest.raises(ValueError, match="give 1 to 32 of a-z and 0-9"), begin(storage, label):
        pass


class Hiding(Failing):
    """Shows files whose names hold `name` only a while after they were written, as a mount with negative caching."""

    def __init__(self, storage: Storage, name: str, lag_s: float) -> None:
        super().__init__(storage, "", name, 0)
        self._lag_s, self._written = lag_s, {}  # type: ignore[var-annotated]

    def __getattr__(self, call: str) -> Any:
        method = getattr(self._storage, call)
        if call == "write":

            def write(name: str, blocks: Iterable[bytes]) -> None:
                self._written[name] = time.monotonic()
                method(name, blocks)

            return write
        if call not in ("read", "status", "delete"):
            return method

        def seen(name: str, *args: Any) -> Any:
            if self._name in name and time.monotonic() - self._written.get(name, -1e9) < self._lag_s:
                if call == "delete":
                    return False
                raise FileNotFoundError(name)
            return method(name, *args)

        return seen


def test_a_marker_that_shows_late_is_waited_for(storage: Storage) -> None:
    attempt = completed(Hiding(storage, "_bridge.", 0.3), file=b"x")  # type: ignore[arg-type]

    assert names(storage, attempt.name) == ["_bridge.0.json", "file"]


@pytest.mark.parametrize(("withdrawn_s", "is_kept"), [(30.0, False), (0.1, True)])
def test_a_marker_that_shows_too_late_never_stands_alone(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, withdrawn_s: float, is_kept: bool
) -> None:
    monkeypatch.setattr(commit, "_WITHDRAWN_S", withdrawn_s)
    hiding = Hiding(storage, "_bridge.", 0.6)

    def write() -> None:
        with begin(hiding, "a") as opened:  # type: ignore[arg-type]
            storage.make_folder(opened.name)
            storage.write(f"{opened.name}/file", [b"x"])
            opened.commit(BODY, {"file": 1}, timeout_s=0.1)

    with pytest.raises(VolumeError, match=r"_bridge\.0\.json is not there 0\.1 s after it was written"):
        write()

    found = list(complete_attempts(storage))
    assert len(found) == is_kept
    assert [marker.missing(storage, attempt.name) for attempt, marker in found] == [[]] * is_kept


def test_a_later_marker_is_found_by_its_name(storage: Storage) -> None:
    attempt = completed(Failing(storage, "write", "_bridge.0", errno.EIO), file=b"x")  # type: ignore[arg-type]

    class Lagging(Failing):
        """Lists folders, and no files yet."""

        def __getattr__(self, call: str) -> Any:
            if call == "list":
                return lambda name="": (entry for entry in self._storage.list(name) if entry.is_folder)
            return getattr(self._storage, call)

    lagging = Lagging(storage, "", "", 0)
    assert collect_garbage(lagging, grace_s=0) == []  # type: ignore[arg-type]
    assert [found for found, _ in complete_attempts(lagging)] == [attempt]  # type: ignore[arg-type]


def test_names_that_are_no_text_can_be_listed_in_a_marker(tmp_path: Path) -> None:
    storage, name = LocalStorage(tmp_path), os.fsdecode(b"\xff.bin")
    with begin(storage, "a") as opened:
        storage.make_folder(opened.name)
        storage.write(f"{opened.name}/{name}", [b"x"])
        opened.commit({"first": name}, {name: 1})

    ((_, marker),) = complete_attempts(storage)
    assert marker == Marker({"first": name}, {name: 1})


def test_a_generation_may_grow_longer(storage: Storage) -> None:
    named(storage, 9_999_999_999_999, "0" * 12)

    newer = completed(storage)

    assert newer.generation == 10**13
    assert next(complete_attempts(storage))[0] == newer


# deleting


def test_the_marker_goes_first_and_then_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path / "root")
    attempt = completed(storage, _SUCCESS=b"", part=b"x")
    folder = tmp_path / "root" / attempt.name
    (folder / "a/b").mkdir(parents=True)
    (folder / "a/b/file").write_text("x")
    (tmp_path / "kept").write_text("x")
    (folder / "a/link").symlink_to(tmp_path, target_is_directory=True)
    (folder / "_bridge.2.json").write_text("another")
    order: list[str] = []
    unlink = Path.unlink

    def noted(self: Path, missing_ok: bool = False) -> None:
        if self.exists() or self.is_symlink():
            order.append(self.name)
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)

    delete_attempt(storage, attempt)
    delete_attempt(storage, attempt)

    assert order[:2] == ["_bridge.0.json", "_bridge.2.json"]
    assert sorted(order[2:]) == ["_SUCCESS", "file", "link", "part"]
    assert attempts(storage) == []
    assert (tmp_path / "kept").exists()


def test_what_cannot_be_deleted_is_told(storage: Storage) -> None:
    attempt = completed(storage, file=b"x")

    with pytest.raises(VolumeError, match=r"cannot be deleted, and may still be complete: Permission denied\."):
        delete_attempt(Failing(storage, "delete", "_bridge.", errno.EACCES), attempt)  # type: ignore[arg-type]
    assert list(complete_attempts(storage)) == [(attempt, Marker(BODY, {"file": 1}))]
    with pytest.raises(VolumeError, match=r"is not complete any more, but not all of it could be deleted: Permission"):
        delete_attempt(Failing(storage, "delete", "file", errno.EACCES), attempt)  # type: ignore[arg-type]
    assert list(complete_attempts(storage)) == []
    assert attempts(storage) == [attempt]


# garbage


def test_a_link_that_is_named_as_an_attempt_is_none(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "root")
    completed(storage)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "kept").write_text("x")
    (tmp_path / "root" / "0000000000001-a-0123456789ab").symlink_to(tmp_path / "others")

    assert collect_garbage(storage, grace_s=0) == []
    assert (tmp_path / "others" / "kept").exists()


def test_garbage_that_cannot_be_deleted_does_not_keep_the_rest(storage: Storage) -> None:
    older = left_by_a_dead_writer(storage, age_s=9000.0, file=b"x")
    stuck = left_by_a_dead_writer(storage, age_s=8000.0, file=b"x")
    failing = Failing(storage, "delete", stuck.name, errno.EACCES)

    with pytest.raises(VolumeError, match=rf"{stuck.name} cannot be deleted, and may still be complete: Permission"):
        collect_garbage(failing)  # type: ignore[arg-type]

    assert attempts(storage) == [stuck]
    assert older.name not in names(storage)


@pytest.mark.parametrize("call", ["list", "status", "write"])
def test_what_fails_for_good_is_an_error_of_ours(storage: Storage, call: str) -> None:
    completed(storage, file=b"x")
    left_by_a_dead_writer(storage)
    failing = Failing(storage, call, "", errno.EIO)

    with pytest.raises(VolumeError, match="Input/output error"):
        collect_garbage(failing)  # type: ignore[arg-type]
    with pytest.raises(VolumeError, match="Input/output error"):
        completed(failing, file=b"x")  # type: ignore[arg-type]


def test_only_the_dead_are_garbage(storage: Storage) -> None:
    complete = completed(storage, file=b"x")
    old = named(storage, 5, "a" * 12)
    dead = left_by_a_dead_writer(storage, file=b"x" * 10)
    young = left_by_a_dead_writer(storage, age_s=60.0, file=b"x")
    with begin(storage, "a") as opened:
        storage.make_folder(opened.name)
        # by its name as old as the dead one, but leased
        leased = Attempt(dead.generation, "a", opened.attempt.attempt_id)
        storage.make_folder(leased.name)

        assert collect_garbage(storage) == [dead]

        assert set(attempts(storage)) == {complete, old, young, opened.attempt, leased}
    assert collect_garbage(storage) == [leased]
    assert collect_garbage(storage, grace_s=0) == [young]
    assert set(attempts(storage)) == {complete, old}


def test_an_attempt_with_a_torn_marker_is_garbage(storage: Storage) -> None:
    torn = left_by_a_dead_writer(storage, **{"_bridge.0.json": MARKER.encode()[:20]})

    assert collect_garbage(storage) == [torn]


def test_beats_that_nobody_renews_are_deleted(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    completed(storage)
    stale = tmp_path / "_leases" / f"{'a' * 12}.{'b' * 12}.3"
    stale.write_bytes(b"")
    other = tmp_path / "_leases" / "a-file-of-someone"
    other.write_bytes(b"")
    collect_garbage(storage)
    assert stale.exists()
    os.utime(stale, (time.time() - 4000,) * 2)
    os.utime(other, (time.time() - 4000,) * 2)

    collect_garbage(storage)

    assert sorted(os.listdir(tmp_path / "_leases")) == ["a-file-of-someone"]


def test_a_writer_that_stood_still_too_long_does_not_commit(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = completed(storage)
    clock = [1000.0]
    monkeypatch.setattr(lease, "_uptime", lambda: clock[0])

    def stand_still() -> None:
        with begin(storage, "a") as opened:
            clock[0] += 1801
            opened.commit(BODY, {})

    with pytest.raises(VolumeError, match=r"was not renewed for 1,801 s: this process stood still.*\n  What it was wr"):
        stand_still()

    assert list(complete_attempts(storage)) == [(earlier, MARKER)]
