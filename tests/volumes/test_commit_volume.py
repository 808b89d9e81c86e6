"""The commit protocol where a volume misbehaves, and where its writers are killed."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridge.errors import VolumeError
from bridge.volumes.commit import attempts, begin, collect_garbage, complete_attempts, delete_attempt
from bridge.volumes.lease import Lease, count_holders
from bridge.volumes.stores import LocalStorage
from tests.processes import eventually
from tests.volumes.mount import Volume

REPOSITORY = Path(__file__).parents[2]


def write(storage: LocalStorage, **files: bytes) -> str:
    with begin(storage, "a") as opened:
        storage.make_folder(opened.name)
        for name, content in files.items():
            storage.write(f"{opened.name}/{name}", [content])
        opened.commit({"files": sorted(files)}, {name: len(content) for name, content in files.items()})
    return opened.name


def complete(storage: LocalStorage) -> list[str]:
    return [attempt.name for attempt, _ in complete_attempts(storage)]


@pytest.mark.fuse
def test_a_volume_that_refuses_all_but_writing_once_is_enough(volume: Volume) -> None:
    storage = LocalStorage(volume.path / "root")

    first, second = write(storage, file=b"x" * 100_000), write(storage, file=b"y")

    assert complete(storage) == [second, first]
    for attempt in attempts(storage):
        delete_attempt(storage, attempt)
    assert [entry.name for entry in storage.list()] == ["_leases"]


@pytest.mark.fuse
def test_listings_and_names_that_lag_are_waited_for(mount_volume: Callable[..., Volume]) -> None:
    volume = mount_volume(listing_lag_ms=1500, lookup_lag_ms=300)
    storage = LocalStorage(volume.path)
    older = write(storage, file=b"x")

    newer = write(storage, file=b"y")  # begun while nothing of the older one was listed

    volume.set(listing_lag_ms=0, lookup_lag_ms=0)
    assert complete(storage) == [newer, older]


@pytest.mark.fuse
def test_errors_that_pass_are_survived(volume: Volume) -> None:
    storage = LocalStorage(volume.path)
    for kind in ("eio_stat", "eio_read", "eio_list"):
        volume.fault(kind, times=2)
    volume.fault("eio_open", times=2, match="_bridge.")
    volume.fault("eio_close", times=1, match="_bridge.")

    name = write(storage, file=b"x" * 1000)

    volume.clear_faults()
    assert complete(storage) == [name]


@pytest.mark.fuse
def test_a_volume_that_is_full_leaves_nothing_and_has_its_room_back(volume: Volume) -> None:
    storage = LocalStorage(volume.path)
    kept = write(storage, file=b"k" * 1000)
    volume.set(capacity_bytes=500_000)

    with pytest.raises(OSError, match="No space left on device") as caught:
        write(storage, one=b"x" * 300_000, two=b"x" * 300_000)
    assert caught.value.errno == errno.ENOSPC
    assert complete(storage) == [kept]
    assert [attempt.name for attempt in attempts(storage)] == [kept]
    whole = write(storage, one=b"x" * 300_000)
    assert complete(storage) == [whole, kept]


@pytest.mark.fuse
def test_a_volume_that_fails_for_good_publishes_nothing(volume: Volume) -> None:
    storage = LocalStorage(volume.path)
    kept = write(storage, file=b"k")
    volume.fault("eio_write", match="_bridge.")

    with pytest.raises(VolumeError, match=r"no marker could be written to .* in 4 tries: Input/output error"):
        write(storage, file=b"x")

    volume.clear_faults()
    assert complete(storage) == [kept]
    collect_garbage(storage, grace_s=0)
    assert [attempt.name for attempt in attempts(storage)] == [kept]


def slowly(times: int) -> Iterator[None]:
    for _ in range(times):
        time.sleep(0.01)
        yield


@pytest.mark.fuse
def test_a_lease_holds_while_listings_lag(mount_volume: Callable[..., Volume]) -> None:
    storage = LocalStorage(mount_volume(listing_lag_ms=100).path)
    held = Lease(storage, "0123456789ab", beat_s=0.2)
    held.start()

    def is_seen() -> bool:
        return set(count_holders(storage, now_ns=held.started_ns)) == {"0123456789ab"}

    try:
        eventually(is_seen)
        assert all(is_seen() for _ in slowly(150))
    finally:
        held.end()


@pytest.mark.parametrize("place", ["--on-disk", pytest.param("--on-volume", marks=pytest.mark.fuse)])
def test_killed_writers_leave_nothing_half_visible_and_lose_nothing(place: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--rounds", "50" if place == "--on-disk" else "12", place],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 half visible, 0 lost" in done.stdout
