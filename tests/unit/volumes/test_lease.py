from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bridge.errors import VolumeError
from bridge.volumes import lease
from bridge.volumes.lease import Lease, count_holders, drop_stale_leases, is_lease, storage_time_ns
from bridge.volumes.storage import Entry
from bridge.volumes.stores import LocalStorage, open_storage
from tests.processes import eventually

ID = "0123456789ab"


def beats(folder: Path) -> list[int]:
    return sorted(int(name.rpartition(".")[2]) for name in os.listdir(folder / "_leases"))


def test_a_lease_is_renewed_until_it_ends(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    held = Lease(storage, ID, beat_s=0.02)
    held.start()
    assert set(count_holders(storage, now_ns=storage_time_ns(storage))) == {ID}
    assert abs(held.started_ns - time.time_ns()) < 10e9

    eventually(lambda: max(beats(tmp_path)) > 4)

    assert len(beats(tmp_path)) in (2, 3)  # the third is being written, or the first deleted
    held.end()
    assert beats(tmp_path) == []
    assert set(count_holders(storage, now_ns=storage_time_ns(storage))) == set()


def test_each_holder_has_beats_of_its_own(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    first, second = Lease(storage, ID), Lease(storage, ID)
    first.start()
    second.start()
    first.end()

    assert set(count_holders(storage, now_ns=storage_time_ns(storage))) == {ID}

    second.end()
    assert set(count_holders(storage, now_ns=storage_time_ns(storage))) == set()


def test_a_beat_is_as_old_as_the_storage_says(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    held = Lease(storage, ID)
    held.start()
    now_ns = held.started_ns

    assert set(count_holders(storage, now_ns=now_ns + int(59e9), grace_s=60)) == {ID}
    assert set(count_holders(storage, now_ns=now_ns + int(61e9), grace_s=60)) == set()
    drop_stale_leases(storage, now_ns=now_ns + int(59e9), grace_s=60)
    assert beats(tmp_path) == [1]
    drop_stale_leases(storage, now_ns=now_ns + int(61e9), grace_s=60)
    assert beats(tmp_path) == []
    held.end()


def test_a_lease_survives_a_volume_that_is_away_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    held = Lease(storage, ID, beat_s=0.02)
    held.start()
    (tmp_path / "_leases").rename(tmp_path / "away")
    time.sleep(0.1)
    (tmp_path / "away").rename(tmp_path / "_leases")
    reached = max(beats(tmp_path))

    eventually(lambda: max(beats(tmp_path)) > reached)

    held.check()
    held.end()


def test_a_lease_that_lapsed_once_stays_lapsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(lease, "_uptime", lambda: clock[0])
    storage = LocalStorage(tmp_path)
    held = Lease(storage, ID, beat_s=0.02)
    held.start()
    clock[0] += 1801
    reached = max(beats(tmp_path))
    eventually(lambda: max(beats(tmp_path)) > reached + 1)

    with pytest.raises(VolumeError, match=r"the lease .*/_leases/0123456789ab\.[0-9a-f]{12} was not renewed for 1,801"):
        held.check()
    held.end()


def test_a_beat_that_is_renewed_while_it_is_looked_at_counts(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    held = Lease(storage, ID)
    held.start()

    class Renewing(LocalStorage):
        def status(self, name: str) -> Entry:
            raise FileNotFoundError(name)

    assert set(count_holders(Renewing(tmp_path), now_ns=held.started_ns + int(1e15))) == {ID}
    held.end()


def test_the_clock_is_the_storages_even_where_it_shows_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(LocalStorage):
        looks = 0

        def status(self, name: str) -> Entry:
            self.looks += 1
            if self.looks < 3:
                raise FileNotFoundError(name)
            return super().status(name)

    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: 0)

    assert abs(storage_time_ns(Late(tmp_path)) - now_ns) < 10e9


def test_a_place_that_cannot_be_written_has_no_clock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    with pytest.raises(VolumeError, match="file cannot be written: Not a directory"):
        storage_time_ns(LocalStorage(tmp_path / "file"))


def test_addresses_have_leases_too() -> None:
    storage = open_storage("memory://leases")
    held = Lease(storage, ID)
    held.start()
    now_ns = storage_time_ns(storage)

    assert set(count_holders(storage, now_ns=now_ns)) == {ID}
    assert set(count_holders(storage, now_ns=now_ns + int(4000e9))) == set()
    held.end()
    assert list(storage.list("_leases")) == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"_leases/{ID}.{ID}.3", True),
        (f"a/b/_leases/{ID}.{ID}.12", True),
        (f"_leases/clock.{ID}", True),
        (f"a_leases/{ID}.{ID}.3", False),
        (f"{ID}.{ID}.3", False),
        ("_leases/picture.png", False),
        ("_leases", False),
    ],
)
def test_beats_are_told_from_files(path: str, expected: bool) -> None:
    assert is_lease(path) is expected


def test_holders_are_counted_by_attempt(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    other = "a" * 12
    held = [Lease(storage, ID, beat_s=0.02), Lease(storage, ID), Lease(storage, other)]
    for each in held:
        each.start()
    eventually(lambda: max(beats(tmp_path)) > 3)  # several beats of one holder count once

    now_ns = storage_time_ns(storage)
    assert count_holders(storage, now_ns=now_ns) == {ID: 2, other: 1}
    assert count_holders(storage, now_ns=now_ns + int(61e9), grace_s=60) == {}
    for each in held:
        each.end()
    assert count_holders(storage, now_ns=now_ns) == {}


def test_who_joins_in_makes_no_folder(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    with pytest.raises(FileNotFoundError):
        Lease(storage, ID).join_in()
    assert os.listdir(tmp_path) == []


def test_a_lease_that_is_told_to_stop_ends_soon(tmp_path: Path) -> None:
    held = Lease(LocalStorage(tmp_path), ID)
    held.start()

    held.stop()

    eventually(lambda: beats(tmp_path) == [])
    held.end()  # again, which changes nothing
