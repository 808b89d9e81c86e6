"""Exports on a volume that refuses rename, link and append, fails for a while, and fills up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import bridge
from bridge.errors import VolumeError
from tests.engines.conftest import EngineUnderTest
from tests.volumes.mount import Volume, mounted_volume

pytestmark = pytest.mark.fuse


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    """Let a mount stand for /Volumes."""
    with mounted_volume(tmp_path / "mount", cache_ms=0) as mounted:
        monkeypatch.setenv("BRIDGE_VOLUME_ROOT", str(mounted.path))
        yield mounted


def rows(sail: EngineUnderTest) -> str:
    return sail.save(sail.spark.range(5000).selectExpr("id", "cast(id AS string) AS text"))


def test_an_export_is_written_found_reused_and_read(sail: EngineUnderTest, volume: Volume) -> None:
    name = rows(sail)

    table = bridge.export_table(name, "/Volumes/main/ml/exports", spark=sail.spark)

    assert table.path is not None
    assert table.path.startswith(str(volume.path / "main/ml/exports"))
    assert table.to_arrow().num_rows == 5000
    assert bridge.open_export("/Volumes/main/ml/exports").to_arrow().equals(table.to_arrow())
    again = bridge.export_table(name, "/Volumes/main/ml/exports", spark=sail.spark)
    assert again.path == table.path
    assert sum(len(batch["id"]) for batch in table.to_loader(batch_size=512)) == 5000


def test_a_volume_that_fails_for_a_while_is_waited_for(sail: EngineUnderTest, volume: Volume) -> None:
    name = rows(sail)
    volume.fault("eio_open", times=2, match="_bridge.")
    volume.fault("eio_list", times=2)

    table = bridge.export_table(name, "/Volumes/main/ml/exports", spark=sail.spark)

    volume.clear_faults()
    assert table.to_arrow().num_rows == 5000


def test_a_full_volume_fails_without_a_marker_and_has_its_room_back(sail: EngineUnderTest, volume: Volume) -> None:
    name = rows(sail)
    volume.set(capacity_bytes=10_000)

    with pytest.raises(VolumeError, match=r"could not be written to .*: .*No space left on device"):
        bridge.export_table(name, "/Volumes/main/ml/exports", spark=sail.spark)

    assert volume.counts().stored == 0
    assert not list(volume.path.glob("main/ml/exports/*/*-*"))
