"""Rows and files that are loaded from a mounted volume, which lags and fails."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import bridge
from bridge.errors import VolumeError
from tests.exports import make_export
from tests.volumes.mount import Volume

pytestmark = pytest.mark.fuse


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_CACHE_DIR", str(tmp_path / "cache"))


def numbers(data: bridge.ParquetDataset) -> list[int]:
    return sorted(n for batch in data for n in batch["n"].tolist())


def test_rows_are_read_through_errors_that_pass(volume: Volume) -> None:
    folder, _ = make_export(volume.path, [pa.table({"n": range(90)})], row_group_rows=20)
    exported = bridge.ParquetDataset(folder, batch_size=16, shuffle=True)
    foreign = bridge.ParquetDataset([*folder.glob("*.parquet")], batch_size=16, shuffle=True)
    for data in (exported, foreign):
        volume.fault("eio_read", times=2, match="part-00000")
        assert numbers(data) == list(range(90))

    volume.fault("eio_read", times=10_000, match="part-00000")
    with pytest.raises(VolumeError, match=r"part-00000\.parquet cannot be read: Input/output error"):
        numbers(exported)


def test_files_are_copied_through_errors_that_pass_and_skipped_where_they_stay(volume: Volume) -> None:
    for number in range(12):
        (volume.path / f"{number:02}.bin").write_text(str(number))
    files = bridge.UCVolumeDataset(volume.path, on_error="skip")
    volume.fault("eio_read", times=2, match="03.bin")
    assert [Path(path).read_text() for path in files] == [str(number) for number in range(12)]

    (volume.path / "05.bin").unlink()
    (volume.path / "05.bin").write_text("changed")
    volume.fault("eio_read", times=10_000, match="05.bin")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [Path(path).read_text() for path in files] == [str(n - (n == 5)) for n in range(12)]
    assert "05.bin is skipped" in str(told[0].message)
    assert files.traffic.num_skipped == 1


def test_a_listing_that_lags_is_waited_for(mount_volume: Callable[..., Volume]) -> None:
    volume = mount_volume(listing_lag_ms=700)
    for number in range(3):
        (volume.path / f"{number}.bin").write_bytes(b"")

    assert len(bridge.UCVolumeDataset(volume.path)) >= 1
    assert len(bridge.UCVolumeDataset(volume.path, expected_files=3)) == 3


def test_readers_at_the_same_time_copy_each_file_once(mount_volume: Callable[..., Volume]) -> None:
    volume = mount_volume(open_us=2_000)
    for number in range(30):
        (volume.path / f"{number:02}.bin").write_bytes(bytes(1000))
    # what a copy is good for must show in its time
    threading.Event().wait(2.1)
    loaders = [
        bridge.DataLoader(bridge.UCVolumeDataset(volume.path, shuffle=True, seed=seed), batch_size=5, num_workers=2)
        for seed in (0, 1)
    ]
    before = volume.counts().opens
    readers = [threading.Thread(target=list, args=(loader,)) for loader in loaders]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads and forks
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()

    assert volume.counts().opens - before == 30
    assert [loader.stats.num_batches for loader in loaders] == [6, 6]
