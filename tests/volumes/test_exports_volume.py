"""Exports on a mounted volume: what lags, what is refused, and who may only read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import bridge
from bridge.errors import VolumeError
from bridge.tables.inventory import describe_export
from bridge.volumes import hold
from bridge.volumes.commit import WITHDRAWN, collect_garbage
from bridge.volumes.hold import Hold, hold_attempt
from bridge.volumes.stores import LocalStorage
from tests.exports import make_export
from tests.processes import eventually
from tests.volumes.mount import Volume

pytestmark = pytest.mark.fuse
TABLE = pa.table({"n": range(10)})


def export(root: Path, version: int) -> Path:
    return make_export(root / "t", [TABLE], version=version, query={})[0]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Return what lets something happen after a deleter looked for readers, and before it withdraws the marker."""

    def run(act: Callable[[], object]) -> None:
        real = hold.withdraw_attempt

        def withdraw(*args: object) -> None:
            act()
            real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(hold, "withdraw_attempt", withdraw)

    return run


def test_exports_are_listed_checked_held_and_deleted(volume: Volume) -> None:
    old, newest = export(volume.path, 1), export(volume.path, 2)
    held = hold_attempt(LocalStorage(old.parent), old.name)

    assert [(info.version, info.num_holders) for info in bridge.list_exports(volume.path)] == [(2, 0), (1, 1)]
    assert bridge.verify_export(old).is_whole
    assert bridge.prune_exports(volume.path, keep_versions=1).deleted == ()
    del held
    eventually(lambda: describe_export(old).num_holders == 0)
    report = bridge.prune_exports(volume.path, keep_versions=1)

    assert [info.path for info in report.deleted] == [str(old)]
    assert sorted(os.listdir(old.parent)) == [newest.name, "_leases"]


@pytest.mark.parametrize("waits", [True, False])
def test_a_reader_that_listings_do_not_show_yet(
    mount_volume: Callable[..., Volume],
    monkeypatch: pytest.MonkeyPatch,
    late: Callable[[Callable[[], object]], None],
    waits: bool,
) -> None:
    volume = mount_volume()
    old, _ = export(volume.path, 1), export(volume.path, 2)
    time.sleep(1.1)
    volume.set(listing_lag_ms=1000)
    monkeypatch.setattr(hold, "_LAG_S", 1.5 if waits else 0.0)
    held: list[Hold | None] = []
    late(lambda: held.append(hold_attempt(LocalStorage(old.parent), old.name)))

    report = bridge.prune_exports(volume.path, keep_versions=1)

    # without the wait its files go under it: what lags here is what the wait is for
    assert held[0] is not None
    assert (old / "part-00000.parquet").exists() == waits
    assert len(report.deleted) == (not waits)


def test_another_collector_leaves_what_was_just_withdrawn(
    mount_volume: Callable[..., Volume],
    monkeypatch: pytest.MonkeyPatch,
    late: Callable[[Callable[[], object]], None],
) -> None:
    volume = mount_volume()
    old, _ = export(volume.path, 1), export(volume.path, 2)
    aged = f"1000000000000{old.name[13:]}"
    (volume.backing / "t" / old.name).rename(volume.backing / "t" / aged)
    old, storage = old.with_name(aged), LocalStorage(old.parent)
    time.sleep(1.1)
    volume.set(listing_lag_ms=1000)
    held: list[Hold | None] = []
    late(lambda: held.append(hold_attempt(storage, old.name)))
    collected = []

    def wait() -> None:
        collected.extend(collect_garbage(storage))
        time.sleep(1.5)

    monkeypatch.setattr(hold, "_wait_for_listings", wait)

    bridge.prune_exports(volume.path, keep_versions=1)

    assert collected == []
    assert (old / WITHDRAWN).exists()
    assert (old / "part-00000.parquet").exists()


def test_who_may_only_read_is_not_held_and_not_kept_from_reading(volume: Volume, tmp_path: Path) -> None:
    made = export(volume.path, 1)
    volume.fault("eio_write")
    volume.set(capacity_bytes=1)
    (volume.backing / "t" / "_leases").rmdir()

    assert hold_attempt(LocalStorage(made.parent), made.name) is None
    assert bridge.verify_export(made).is_whole
    assert [info.version for info in bridge.list_exports(volume.path)] == [1]


def test_a_volume_that_fails_for_a_while_is_waited_for(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "_LAG_S", 0.0)
    old, newest = export(volume.path, 1), export(volume.path, 2)
    for kind in ("eio_stat", "eio_read", "eio_list", "eio_delete"):
        volume.fault(kind, times=2)

    report = bridge.prune_exports(volume.path, keep_versions=1)

    assert [info.path for info in report.deleted] == [str(old)]
    assert bridge.verify_export(newest).is_whole


def test_a_volume_that_fails_for_good_loses_nothing(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "_LAG_S", 0.0)
    old, _ = export(volume.path, 1), export(volume.path, 2)
    volume.fault("eio_delete", match="_bridge.")

    ((info, why),) = bridge.prune_exports(volume.path, keep_versions=1).failed

    assert info.path == str(old)
    assert why.endswith("cannot be withdrawn, and may still be complete: Input/output error.")
    with pytest.raises(VolumeError, match="cannot be withdrawn"):
        bridge.remove_export(old)
    volume.clear_faults()
    assert bridge.verify_export(old).is_whole
