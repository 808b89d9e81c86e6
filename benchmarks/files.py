"""Files of a slow volume: the first epoch beside copy_tree, later ones beside opening files on the mount."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import bridge
from benchmarks.copying import FILES, fill
from benchmarks.harness import Bar, Comparison, Report
from tests.volumes.mount import mounted_volume

_OPEN_US = 20_000
_STAT_US = 2_000
_FILE_BYTES = 150 << 10
_MANY_FILES = 100_000
_BATCH = 32
_COMPUTE_S = 0.005
# how long the kernel remembers names and attributes of the volume
_FORGOTTEN_S = 1.1


class Opened(torch.utils.data.IterableDataset[int]):
    """Reads the files whose paths it is given."""

    def __init__(self, paths: Any) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[int]:
        for path in self.paths:
            with open(path, "rb") as file:
                yield len(file.read())


def measure(*, engine: str, rounds: int, folder: Path) -> Report:
    """Return what epochs over a slow volume take, and how soon the first path of many files is there."""
    report = Report("files", engine)
    fill(folder / "backing" / "files", FILES, _FILE_BYTES)
    with mounted_volume(
        folder / "mount", backing=folder / "backing", open_us=_OPEN_US, stat_us=_STAT_US, cache_ms=1000
    ) as volume:
        _measure_epochs(report, volume.path / "files", folder, rounds)
    fill(folder / "many", _MANY_FILES, 1_000)
    seconds = []
    for number in range(rounds):
        began = time.perf_counter()
        next(iter(bridge.UCVolumeDataset(folder / "many", cache_dir=folder / f"first-{number}", shuffle=True)))
        seconds.append(time.perf_counter() - began)
    first = sorted(seconds)[rounds // 2]
    report.bars.append(Bar(f"first path of {_MANY_FILES:,} files on a disk", first, 3.0, "s"))
    return report


def _measure_epochs(report: Report, source: Path, folder: Path, rounds: int) -> None:
    times: dict[str, list[float]] = {
        name: [] for name in ("copy_tree", "first epoch", "first epoch, opened", "second epoch, opened", "on the mount")
    }
    shares = []
    paths = sorted(str(path) for path in source.rglob("*.bin"))
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            times["copy_tree"].append(_timed(lambda: bridge.copy_tree(source, Path(fresh) / "copied")))
            paths_of = bridge.DataLoader(_open(source, Path(fresh) / "paths"), batch_size=_BATCH)
            times["first epoch"].append(_timed(lambda loader=paths_of: sum(map(len, loader))))
            opened = bridge.DataLoader(Opened(_open(source, Path(fresh) / "opened")), batch_size=_BATCH)
            times["first epoch, opened"].append(_timed(lambda loader=opened: _read(loader)))
            times["second epoch, opened"].append(_timed(lambda loader=opened: _read(loader)))
            for _ in paths_of:
                time.sleep(_COMPUTE_S)
            shares.append(paths_of.stats.wait_share)
        part = paths[:: len(paths) // 300]
        plain = torch.utils.data.DataLoader(Opened(part), batch_size=_BATCH)
        times["on the mount"].append(_timed(lambda plain=plain: _read(plain)) * len(paths) / len(part))
    comparison = Comparison("copy_tree", times)
    report.add_comparison(
        f"{FILES:,} files of 150 KiB from a volume (open 20 ms, stat 2 ms), batches of 32", comparison
    )
    report.bars += [
        Bar("first epoch over copy_tree", comparison.ratio("first epoch").median, 1.15, "x"),
        Bar(
            "second epoch over opening on the mount",
            comparison.ratio("second epoch, opened", to="on the mount").median,
            0.1,
            "x",
        ),
        Bar("wait share, 5 ms of compute a batch", 100 * sorted(shares)[rounds // 2], 5.0, "%"),
    ]


def _open(source: Path, cache: Path) -> bridge.UCVolumeDataset:
    return bridge.UCVolumeDataset(source, shuffle=True, cache_dir=cache)


def _timed(run: Any) -> float:
    os.sync()
    time.sleep(_FORGOTTEN_S)
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _read(loader: Any) -> None:
    total = sum(int(sum(batch)) for batch in loader)
    assert total % _FILE_BYTES == 0, "each file is read whole"
