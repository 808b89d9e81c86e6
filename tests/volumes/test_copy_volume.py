"""Copies from and to a mounted volume that is slow, refuses and fails."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import bridge
from bridge.cli.app import app
from bridge.errors import CopyError, ExportNotFoundError, VolumeError
from bridge.volumes.copy import CopyReport, copy_tree
from bridge.volumes.target import is_temporary
from tests.exports import make_export
from tests.volumes.mount import Volume

pytestmark = pytest.mark.fuse

Mount = Callable[..., Volume]


def make_files(root: Path, count: int, *, size: int = 3000) -> Path:
    for number in range(count):
        folder = root / f"{number % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.bin").write_bytes(number.to_bytes(4, "big") * (size // 4))
    return root


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def failed(source: Path, target: Path) -> CopyReport:
    with pytest.raises(CopyError) as caught:
        copy_tree(source, target)
    assert isinstance(caught.value.report, CopyReport)
    return caught.value.report


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.volumes.storage._RETRY_DELAYS_S", (0.01, 0.02, 0.04))


# from a volume


@pytest.mark.parametrize("fault", ["eio_open", "eio_read", "eio_stat", "eio_list"])
def test_errors_that_pass_are_retried(volume: Volume, tmp_path: Path, fault: str) -> None:
    make_files(volume.backing / "source", 40)
    volume.fault(fault, times=2)  # type: ignore[arg-type]
    assert copy_tree(volume.path / "source", tmp_path / "target").num_files == 40
    assert content(tmp_path / "target") == content(volume.backing / "source")


def test_a_file_that_always_fails_is_named_and_the_rest_is_copied(volume: Volume, tmp_path: Path) -> None:
    make_files(volume.backing / "source", 40)
    volume.fault("eio_read", match="/7/17.bin")
    report = failed(volume.path / "source", tmp_path / "target")
    assert report.failures == ((f"{volume.path}/source/7/17.bin", "Input/output error"),)
    assert report.num_files == 39
    assert not (tmp_path / "target" / "7" / "17.bin").exists()
    assert not any(is_temporary(path.name) for path in tmp_path.joinpath("target").rglob("*"))
    shown = CliRunner().invoke(app, ["cp", str(volume.path / "source"), str(tmp_path / "target")])
    assert shown.exit_code == 1
    assert "7/17.bin: Input/output error" in shown.stderr
    volume.clear_faults()
    assert copy_tree(volume.path / "source", tmp_path / "target").num_files == 1


def test_a_folder_that_cannot_be_listed_is_named(volume: Volume, tmp_path: Path) -> None:
    make_files(volume.backing / "source", 40)
    volume.fault("eio_list", match="source/7")
    report = failed(volume.path / "source", tmp_path / "target")
    assert report.failures == ((f"{volume.path}/source/7", "Input/output error"),)
    assert report.num_files == 36
    volume.fault("eio_list")
    report = failed(volume.path / "source", tmp_path / "other")
    assert report.failures == ((f"{volume.path}/source", "Input/output error"),)


@pytest.mark.slow
def test_10_000_files_of_a_slow_volume_are_all_there(mount_volume: Mount, tmp_path: Path) -> None:
    volume = mount_volume(open_us=2_000, stat_us=500, list_us=2_000, cache_ms=1000)
    make_files(volume.backing / "source", 10_000, size=100)
    report = copy_tree(volume.path / "source", tmp_path / "target")
    assert report.num_files == 10_000
    assert content(tmp_path / "target") == content(volume.backing / "source")


def test_a_file_is_opened_once_and_looked_up_once(mount_volume: Mount, tmp_path: Path) -> None:
    volume = mount_volume(cache_ms=60_000)
    make_files(volume.backing / "source", 200)
    copy_tree(volume.path / "source", tmp_path / "target")
    counts = volume.counts()
    assert counts.opens == 200
    assert counts.listings == 11
    assert counts.stats <= 2 * 200 + 11 + 10  # once more when it was read


def test_a_rerun_opens_nothing(volume: Volume, tmp_path: Path) -> None:
    make_files(volume.backing / "source", 200)
    copy_tree(volume.path / "source", tmp_path / "target")
    before = volume.counts()
    assert copy_tree(volume.path / "source", tmp_path / "target").num_skipped == 200
    after = volume.counts()
    assert (after.opens, after.bytes_read) == (before.opens, before.bytes_read)


def test_files_are_copied_while_the_rest_is_listed(mount_volume: Mount, tmp_path: Path) -> None:
    volume = mount_volume(list_us=30_000)
    make_files(volume.backing / "source", 20)
    for number in range(400):
        (volume.backing / "source" / f"empty{number}").mkdir()
    began = time.time()
    copy_tree(volume.path / "source", tmp_path / "target", num_threads=4)
    took = time.time() - began
    first = min(path.stat().st_ctime for path in tmp_path.joinpath("target").rglob("*.bin"))
    assert took > 400 * 0.03 / 4
    assert first - began < took / 2


def test_a_big_file_is_read_in_ranges_at_once(mount_volume: Mount, tmp_path: Path) -> None:
    volume = mount_volume(cache_ms=1000)
    block = os.urandom(1 << 20)
    (volume.backing / "big").write_bytes(block * 70 + b"end")
    copy_tree(volume.path / "big", tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == block * 70 + b"end"


def test_an_export_that_cannot_be_read_whole_stays_absent(volume: Volume, tmp_path: Path) -> None:
    make_export(volume.backing / "exports" / "main.ml.t", [pa.table({"x": [1, 2]}), pa.table({"x": [3]})])
    volume.fault("eio_read", match="part-00001")
    report = failed(volume.path / "exports", tmp_path / "copied")
    assert [Path(path).name for path, _ in report.failures] == ["_bridge.0.json", "part-00001.parquet"]
    with pytest.raises(ExportNotFoundError):
        bridge.open_export(tmp_path / "copied")
    volume.clear_faults()
    copy_tree(volume.path / "exports", tmp_path / "copied")
    assert bridge.open_export(tmp_path / "copied").num_rows == 3


# to a volume


def test_a_volume_is_written_without_what_it_refuses(volume: Volume, tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", 100)
    (source / "none").write_bytes(b"")
    assert copy_tree(source, volume.path / "target").num_files == 101
    assert content(volume.backing / "target") == content(source)
    before = volume.counts()
    assert copy_tree(source, volume.path / "target").num_skipped == 101
    assert volume.counts().opens == before.opens
    assert volume.counts().creates == before.creates + 1  # what asks whether the volume can rename
    changed = source / "3" / "3.bin"
    changed.write_bytes(b"changed" * 1000)
    assert copy_tree(source, volume.path / "target").num_files == 1
    assert content(volume.backing / "target") == content(source)


@pytest.mark.parametrize("fault", ["eio_write", "eio_close", "eio_stat"])
def test_writes_that_fail_and_then_work(volume: Volume, tmp_path: Path, fault: str) -> None:
    source = make_files(tmp_path / "source", 20)
    volume.fault(fault, times=2, match="5.bin")  # type: ignore[arg-type]
    assert copy_tree(source, volume.path / "target").num_files == 20
    assert content(volume.backing / "target") == content(source)


def test_a_file_that_cannot_be_written_leaves_nothing(volume: Volume, tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", 20)
    volume.fault("eio_write", match="15.bin")
    report = failed(source, volume.path / "target")
    assert report.failures == ((f"{source}/5/15.bin", "Input/output error"),)
    assert set(content(source)) - set(content(volume.backing / "target")) == {"5/15.bin"}


def test_a_volume_whose_listings_lag(mount_volume: Mount, tmp_path: Path) -> None:
    volume = mount_volume(listing_lag_ms=60_000, lookup_lag_ms=50)
    source = make_files(tmp_path / "source", 20)
    assert copy_tree(source, volume.path / "target").num_files == 20
    time.sleep(0.1)
    assert copy_tree(source, volume.path / "target").num_skipped == 20  # what no listing shows is found by its name
    assert content(volume.backing / "target") == content(source)


def test_an_export_on_a_volume_whose_listings_lag(mount_volume: Mount, tmp_path: Path) -> None:
    volume = mount_volume(listing_lag_ms=60_000)
    folder, _ = make_export(tmp_path / "exports" / "main.ml.t", [pa.table({"x": [n]}) for n in range(3)])
    copied = volume.path / "copied" / "main.ml.t" / folder.name
    copy_tree(tmp_path / "exports", volume.path / "copied")
    assert copy_tree(tmp_path / "exports", volume.path / "copied").num_skipped == 4
    time.sleep(0.01)
    (folder / "part-00001.parquet").touch()
    volume.fault("eio_write", match="part-00001")
    failed(tmp_path / "exports", volume.path / "copied")
    with pytest.raises(ExportNotFoundError):
        bridge.open_export(copied)
    volume.clear_faults()
    copy_tree(tmp_path / "exports", volume.path / "copied")
    assert bridge.open_export(copied).num_rows == 3


def test_an_update_that_cannot_be_read_leaves_the_old_copy(mount_volume: Mount) -> None:
    one, other = mount_volume(), mount_volume()
    make_files(one.backing / "source", 3)
    copy_tree(one.path / "source", other.path / "target")
    before = content(other.backing / "target")
    make_files(one.backing / "source", 3, size=4000)
    one.fault("eio_read")
    assert len(failed(one.path / "source", other.path / "target").failures) == 3
    assert content(other.backing / "target") == before


@pytest.mark.parametrize("size", [5, 300_000])
def test_a_file_rewritten_behind_the_mount_is_read_again(
    mount_volume: Mount, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = mount_volume(cache_ms=60_000), mount_volume()
    (one.backing / "f").write_bytes(b"o" * size)
    os.utime(one.backing / "f", ns=(1, 1))
    read = os.pread

    def changing(descriptor: int, count: int, start: int) -> bytes:
        found = read(descriptor, count, start)
        if found == b"o" * size:
            (one.backing / "f").write_bytes(b"n" * size)
        return found

    monkeypatch.setattr(os, "pread", changing)
    copy_tree(one.path / "f", other.path / "f")
    assert (other.backing / "f").read_bytes() == b"n" * size


def test_a_full_volume_is_told_once(mount_volume: Mount, tmp_path: Path) -> None:
    volume = mount_volume(capacity_bytes=100_000)
    source = make_files(tmp_path / "source", 200)
    report = failed(source, volume.path / "target")
    assert report.stopped == f"There is no room left in {volume.path}/target: free some. The rest was not tried."
    assert all(reason == os.strerror(errno.ENOSPC) for _, reason in report.failures)
    assert 0 < report.num_files <= 33
    whole = content(source)
    assert content(volume.backing / "target").items() <= whole.items()
    volume.set(capacity_bytes=0)
    assert copy_tree(source, volume.path / "target").num_skipped == report.num_files


def test_a_volume_that_was_full_from_the_start(mount_volume: Mount, tmp_path: Path) -> None:
    volume = mount_volume(capacity_bytes=1)
    with pytest.raises((CopyError, VolumeError), match=r"No space left on device|no room left"):
        copy_tree(make_files(tmp_path / "source", 2), volume.path / "target")


COPY = "import sys, bridge; bridge.copy_tree(sys.argv[1], sys.argv[2])"


def test_killed_while_a_volume_is_written_and_run_again(mount_volume: Mount, tmp_path: Path) -> None:
    volume = mount_volume(open_us=20_000, bytes_per_s=200_000)
    folder, _ = make_export(tmp_path / "exports" / "main.ml.t", [pa.table({"x": [n]}) for n in range(30)])
    for number in range(30):
        (folder / f"extra{number}").write_bytes(os.urandom(50_000))
    with subprocess.Popen([sys.executable, "-c", COPY, tmp_path / "exports", volume.path / "copied"]) as process:
        while volume.counts().bytes_written < 400_000:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    with pytest.raises(ExportNotFoundError):
        bridge.open_export(volume.path / "copied")
    volume.set(open_us=0, bytes_per_s=0)
    copy_tree(tmp_path / "exports", volume.path / "copied")
    assert content(volume.backing / "copied") == content(tmp_path / "exports")
    assert bridge.open_export(volume.path / "copied").num_rows == 30


def test_from_volume_to_volume(mount_volume: Mount) -> None:
    one, other = mount_volume(), mount_volume()
    make_files(one.backing / "source", 30)
    assert copy_tree(one.path / "source", other.path / "target").num_files == 30
    assert content(other.backing / "target") == content(one.backing / "source")
