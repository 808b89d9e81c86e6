"""Copying: copy_tree beside cp, xargs cp and a pool of threads, from a slow volume and on a disk."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bridge
from benchmarks.harness import Bar, Comparison, Report, compare, in_child
from tests.volumes.mount import mounted_volume

_OPEN_US = 20_000
_STAT_US = 2_000
_FILE_BYTES = 150 << 10
FILES = 3_000
MANY_FILES = 15_375
SMALL_FILES = 100_000
_SMALL_BYTES = 1_000
_XARGS = [(processes, names) for processes in (64, 96, 256) for names in (1, 32)]
_FAST_XARGS = [(96, 32), (256, 32)]
_PER_FOLDER = 100
# ext4 looks for long for numbers of files that were not removed a moment ago, as those of the last round were
_MEMORY = Path("/dev/shm")
# how long the kernel remembers names and attributes of the volume
_FORGOTTEN_S = 1.1


def measure(*, engine: str, rounds: int, folder: Path) -> Report:
    """Return the times from a volume and on a disk, how soon the first file is there, and the memory it takes."""
    report = Report("copying", engine)
    backing = folder / "backing"
    fill(backing / "few", FILES, _FILE_BYTES)
    fill(backing / "many", MANY_FILES, _FILE_BYTES)
    with (
        tempfile.TemporaryDirectory(dir=_MEMORY if os.access(_MEMORY, os.W_OK) else folder) as target,
        mounted_volume(folder / "mount", backing=backing, open_us=_OPEN_US, stat_us=_STAT_US) as volume,
    ):
        copied = Path(target, "copied")
        comparison = _from_volume(volume.path / "few", copied, rounds, _XARGS)
        report.add_comparison(f"{FILES:,} files of 150 KiB from a volume (open 20 ms, stat 2 ms)", comparison)
        report.bars.append(Bar("copy_tree over the best of the others", _over_best(comparison), 1.0, "x"))
        comparison = _from_volume(volume.path / "many", copied, min(rounds, 3), _FAST_XARGS)
        report.add_comparison(f"{MANY_FILES:,} files of 150 KiB from the same volume", comparison)
    for name, what in (("few", f"{FILES:,} files of 150 KiB"), ("many", f"{MANY_FILES:,} files of 150 KiB")):
        comparison = _on_disk(backing / name, folder / "copied", rounds if name == "few" else min(rounds, 3))
        report.add_comparison(f"{what} on a disk", comparison)
        report.bars.append(Bar(f"copy_tree over cp -r, {what}", comparison.ratio("copy_tree").median, 1.3, "x"))
    shutil.rmtree(backing)
    _measure_first_and_memory(report, folder)
    return report


def fill(root: Path, count: int, size: int) -> None:
    """Write files of random bytes, a hundred to a folder."""
    block = os.urandom(size)
    for number in range(count):
        if number % _PER_FOLDER == 0:
            parent = root / f"{number // _PER_FOLDER:04d}"
            parent.mkdir(parents=True)
        (parent / f"{number:06d}.bin").write_bytes(number.to_bytes(8, "big") + block[8:])


def _from_volume(source: Path, target: Path, rounds: int, ways: Sequence[tuple[int, int]]) -> Comparison:
    contenders: dict[str, Callable[[], object]] = {"copy_tree": lambda: bridge.copy_tree(source, target)}
    for processes, names in ways:
        contenders[f"xargs -P {processes} -n {names} cp"] = _xargs(source, target, processes, names)
    contenders["shutil.copyfile, 96 threads"] = lambda: _by_threads(source, target, 96)
    return _compare(contenders, target, "copy_tree", rounds)


def _on_disk(source: Path, target: Path, rounds: int) -> Comparison:
    contenders: dict[str, Callable[[], object]] = {
        "cp -r": lambda: subprocess.run(["cp", "-r", f"{source}/.", target], check=True),
        "copy_tree": lambda: bridge.copy_tree(source, target),
    }
    return _compare(contenders, target, "cp -r", rounds)


def _into_fresh(run: Callable[[], object], target: Path) -> Callable[[], float]:
    """Return what runs into an empty folder, and gives the seconds that took without what prepared it."""

    def timed() -> float:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        os.sync()
        time.sleep(_FORGOTTEN_S)
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return timed


def _compare(contenders: Mapping[str, Callable[[], object]], target: Path, reference: str, rounds: int) -> Comparison:
    """Compare by the copying alone; each must leave as many bytes as the reference."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    timed = {name: _into_fresh(run, target) for name, run in contenders.items()}

    def kept(name: str) -> Callable[[], int]:
        def run() -> int:
            seconds[name].append(timed[name]())
            return _bytes_in(target)

        return run

    compare({name: kept(name) for name in contenders}, reference=reference, rounds=rounds)
    return Comparison(reference, {name: taken[-rounds:] for name, taken in seconds.items()})


def _bytes_in(folder: Path) -> int:
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)


def _over_best(comparison: Comparison) -> float:
    best = min((name for name in comparison.seconds if name != "copy_tree"), key=lambda n: comparison.spread(n).median)
    return comparison.ratio("copy_tree", to=best).median


def _xargs(source: Path, target: Path, processes: int, names: int) -> Callable[[], object]:
    # the folders first: workers that race to make them lose files
    there = shlex.quote(str(target))
    command = (
        f"cd {shlex.quote(str(source))} && find . -type d -print0 | (cd {there} && xargs -0 mkdir -p)"
        f" && find . -type f -print0 | xargs -0 -P {processes} -n {names} cp --parents -t {there}"
    )
    return lambda: subprocess.run(command, shell=True, check=True)


def _by_threads(source: Path, target: Path, threads: int) -> None:
    pairs = []
    for at, _, names in os.walk(source):
        into = target / os.path.relpath(at, source)
        into.mkdir(parents=True, exist_ok=True)
        pairs += [(os.path.join(at, name), into / name) for name in names]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda pair: shutil.copyfile(*pair), pairs):
            pass


def _measure_first_and_memory(report: Report, folder: Path) -> None:
    fill(folder / "small", SMALL_FILES, _SMALL_BYTES)
    idle = in_child("benchmarks.copying:import_only").peak_bytes
    rows: list[tuple[Any, ...]] = []
    paths = {"source": str(folder / "small"), "target": str(folder / "copied")}
    shutil.rmtree(folder / "copied", ignore_errors=True)
    child = in_child("benchmarks.copying:copy_and_watch", **paths)
    grown = (child.peak_bytes - idle) / 1e6
    rows.append(("first run", round(child.result["first"], 3), round(child.result["all"], 1), round(grown)))
    again = in_child("benchmarks.copying:copy_and_watch", **paths)
    grown_again = (again.peak_bytes - idle) / 1e6
    rows.append(("second run, all skipped", "", round(again.result["all"], 1), round(grown_again)))
    report.add_table(
        f"{SMALL_FILES:,} files of {_SMALL_BYTES:,} bytes on a disk",
        ("", "first file after, s", "all, s", "memory over import, MB"),
        rows,
    )
    report.bars.append(Bar("first file of 100,000 after", child.result["first"], 1.0, "s"))
    report.bars.append(Bar("memory over import, 100,000 files", max(grown, grown_again), 150.0, "MB"))


def import_only() -> None:
    """Import what a copy needs; run in a child."""
    _ = bridge.copy_tree


def copy_and_watch(*, source: str, target: str) -> dict[str, float]:
    """Copy, and return the seconds until the first file was there and until all were; run in a child."""
    copy = bridge.copy_tree
    began, first = time.perf_counter(), 0.0
    ended = threading.Event()

    def watch() -> None:
        nonlocal first
        while not first and not ended.wait(0.005):
            if any(name.endswith(".bin") for _, _, names in os.walk(target) for name in names):
                first = time.perf_counter() - began

    watching = threading.Thread(target=watch)
    watching.start()
    copy(source, target)
    taken = time.perf_counter() - began
    ended.set()
    watching.join()
    return {"first": first, "all": taken}
