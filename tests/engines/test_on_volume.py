"""Exports on a volume that refuses rename, link and append, lags, fails for a while, and fills up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.errors import BridgeError, VolumeError
from tests.engines.conftest import EngineUnderTest
from tests.volumes.mount import Volume, mounted_volume

pytestmark = pytest.mark.fuse
ROOT = "/Volumes/main/ml/exports"


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    """Let a mount stand for /Volumes."""
    with mounted_volume(tmp_path / "mount", cache_ms=0) as mounted:
        monkeypatch.setenv("BRIDGE_VOLUME_ROOT", str(mounted.path))
        yield mounted


def rows(engine: EngineUnderTest) -> Any:
    """Return rows that do not become small, in two partitions."""
    return engine.spark.range(0, 5000, 1, 2).selectExpr("id", "sha2(cast(id AS string), 256) AS text")


def check_nothing_is_left(volume: Volume) -> None:
    assert volume.counts().stored == 0
    (parent,) = volume.path.glob("main/ml/exports/*")
    assert [path.name for path in parent.iterdir()] == ["_leases"]


def test_an_export_is_written_found_reused_and_read(engine: EngineUnderTest, volume: Volume) -> None:
    name = engine.save(rows(engine))

    table = bridge.export_table(name, ROOT, spark=engine.spark)

    assert table.path is not None
    assert table.path.startswith(str(volume.path / "main/ml/exports"))
    assert sorted(table.to_arrow()["id"].to_pylist()) == list(range(5000))
    assert bridge.open_export(ROOT).to_arrow().equals(table.to_arrow())
    again = bridge.export_table(name, ROOT, spark=engine.spark)
    assert again.path == table.path
    assert sum(len(batch["id"]) for batch in table.to_loader(batch_size=512)) == 5000


def test_a_volume_that_fails_for_a_while_is_waited_for(sail: EngineUnderTest, volume: Volume) -> None:
    name = sail.save(rows(sail))
    volume.fault("eio_open", times=2, match="_bridge.")
    volume.fault("eio_list", times=2)

    table = bridge.export_table(name, ROOT, spark=sail.spark)

    volume.clear_faults()
    assert table.to_arrow().num_rows == 5000


def test_a_full_volume_fails_without_a_marker_and_has_its_room_back(engine: EngineUnderTest, volume: Volume) -> None:
    volume.set(capacity_bytes=10_000)

    with pytest.raises(VolumeError, match=r"could not be written to .*: .*No space left on device"):
        bridge.export_table(rows(engine), ROOT, spark=engine.spark)

    check_nothing_is_left(volume)


def test_what_shows_late_is_waited_for(sail: EngineUnderTest, volume: Volume) -> None:
    volume.set(listing_lag_ms=1500, lookup_lag_ms=300)

    table = bridge.export_table(rows(sail), ROOT, num_shards=3, spark=sail.spark)
    none = bridge.export_table(rows(sail).limit(0), ROOT, spark=sail.spark)

    volume.set(listing_lag_ms=0, lookup_lag_ms=0)
    assert sorted(table.to_arrow()["id"].to_pylist()) == list(range(5000))
    assert bridge.open_export(none.path or "").num_rows == 0


def test_a_server_that_cannot_do_with_listings_that_lag(
    apache: EngineUnderTest, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hadoop copies what it may not rename, and lists what it is to copy."""
    monkeypatch.setattr("bridge.tables.publish.SEEN_S", 1.0)
    volume.set(listing_lag_ms=1500)

    with pytest.raises(BridgeError, match="DataFrame"):
        bridge.export_table(rows(apache), ROOT, spark=apache.spark)

    volume.set(listing_lag_ms=0)
    check_nothing_is_left(volume)
