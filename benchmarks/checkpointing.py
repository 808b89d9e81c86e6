"""Checkpoints saved and loaded, beside raw files of the same bytes and torch's own storage; async saves."""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import bridge
from benchmarks.harness import Bar, Comparison, Report, Spread, compare
from bridge.checkpoints.staging import Staging

_LARGE = {"1 GiB in 200 tensors": (200, (1 << 30) // 800)}
_SMALL = {"6,000 tensors of 8 KB": (6_000, 2_000)}
_ALONE_S = 2.0


def measure(*, engine: str, rounds: int, folder: Path) -> Report:
    """Return what saving and loading take, and what an async save costs the training loop."""
    report = Report("checkpointing", engine)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        for title, (count, size) in _LARGE.items():
            times = _compare(report, title, count, size, rounds, folder / "large")
            report.bars += [
                Bar("save over raw writing", times["save"].ratio("bridge").median, 1 / 0.8, "x"),
                Bar("verified load over raw reading", times["load"].ratio("bridge").median, 1 / 0.6, "x"),
                _beside_stock("save", times["save"], 1.3),
                _beside_stock("load", times["load"], 1.3),
            ]
        for title, (count, size) in _SMALL.items():
            times = _compare(report, title, count, size, rounds, folder / "small")
            report.bars += [_beside_stock(f"{what}, small", times[what], 2.0) for what in ("save", "load")]
        _measure_async(report, folder / "async", rounds)
    return report


def _beside_stock(what: str, times: Comparison, least: float) -> Bar:
    others = [name for name in times.seconds if name.startswith("torch")]
    fastest = min(others, key=lambda name: times.spread(name).median)
    return Bar(f"{what} over {fastest}", times.ratio("bridge", to=fastest).median, 1 / least, "x")


def _compare(report: Report, title: str, count: int, size: int, rounds: int, folder: Path) -> Mapping[str, Comparison]:
    folder.mkdir()
    state = {f"t{index:04d}": torch.randn(size) for index in range(count)}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    saves: dict[str, Callable[[], Any]] = {
        "raw": lambda: _write_raw(state, folder / "raw"),
        "bridge": lambda: _save(state, folder / "bridge", bridge.UCVolumeWriter),
        "torch, one file": lambda: _save(state, folder / "one", dcp.FileSystemWriter),
        "torch, two threads": lambda: _save(
            state, folder / "two", lambda path: dcp.FileSystemWriter(path, thread_count=2, single_file_per_rank=False)
        ),
    }
    loads: dict[str, Callable[[], Any]] = {
        "raw": lambda: _read_raw(target, folder / "raw"),
        "bridge": lambda: dcp.load(dict(target), storage_reader=bridge.UCVolumeReader(folder / "bridge")),
        "torch, one file": lambda: dcp.load(dict(target), storage_reader=dcp.FileSystemReader(folder / "one")),
        "torch, two threads": lambda: dcp.load(dict(target), storage_reader=dcp.FileSystemReader(folder / "two")),
    }
    made = {
        "save": compare(saves, reference="raw", rounds=rounds, check=lambda expected, found: None),
        "load": compare(loads, reference="raw", rounds=rounds, check=lambda expected, found: _differs(state, target)),
    }
    for what, comparison in made.items():
        report.add_comparison(f"{what} {title}", comparison)
    shutil.rmtree(folder)
    return made


def _save(state: dict[str, torch.Tensor], folder: Path, writer: Callable[[Path], Any]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    dcp.save(dict(state), storage_writer=writer(folder))


def _write_raw(state: Mapping[str, torch.Tensor], path: Path) -> None:
    path.unlink(missing_ok=True)
    with open(path, "wb", buffering=0) as file:
        for tensor in state.values():
            view = memoryview(tensor.numpy()).cast("B")
            while view.nbytes:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _read_raw(target: Mapping[str, torch.Tensor], path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        for tensor in target.values():
            view = memoryview(tensor.numpy()).cast("B")
            while view.nbytes:
                view = view[file.readinto(view) :]


def _differs(state: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> str | None:
    differing = next((name for name in state if not torch.equal(state[name], target[name])), None)
    for tensor in target.values():
        tensor.zero_()
    return None if differing is None else f"{differing} differs"


def _measure_async(report: Report, folder: Path, rounds: int) -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(2048, 2048) for _ in range(32))  # 512 MiB
    state = {"model": model}
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    manager = bridge.CheckpointManager(folder, keep_last=1, handle_sigterm=False)
    copied = Staging()
    blocked, copies, slowed, stock = [], [], [], []
    for number in range(rounds + 1):
        alone = _steps_per_s(lambda: time.sleep(_ALONE_S))
        for _ in range(2):  # the first after the loop finds nothing in the caches
            copy_s = _timed(lambda: copied.stage(dict(model.state_dict())))
            copied.give_back()
        copies.append(copy_s)
        blocked.append(_timed(lambda number=number: manager.save(number, state)))
        slowed.append(alone / _steps_per_s(manager.wait))
        beside = folder / f"stock-{number}"
        future = dcp.async_save(dict(model.state_dict()), storage_writer=dcp.FileSystemWriter(beside))
        stock.append(alone / _steps_per_s(future.result))
        shutil.rmtree(beside)
    manager.close()
    ratio = Spread.of([mine / copy for mine, copy in list(zip(blocked, copies, strict=True))[1:]])
    rows = [
        ("blocked over one copy", round(ratio.median, 2), round(ratio.least, 2), round(ratio.most, 2)),
        *(
            (f"steps slowed while {name} writes", *(round(value, 2) for value in (s.median, s.least, s.most)))
            for name, s in (("bridge", Spread.of(slowed[1:])), ("torch's thread mode", Spread.of(stock[1:])))
        ),
    ]
    report.add_table(f"async save of {num_bytes >> 20} MiB, from the second on", ("what", "median", "min", "max"), rows)
    report.bars += [
        Bar("async: blocked over one copy", ratio.median, 1.3, "x"),
        Bar("async: steps slowed", statistics.median(slowed[1:]), 1.5, "x"),
    ]


def _steps_per_s(wait: Callable[[], Any]) -> float:
    """Return how many steps of a small training loop are made in a second until `wait` returns."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rows = torch.randn(64, 256)
    is_over = threading.Event()
    thread = threading.Thread(target=lambda: (wait(), is_over.set()))
    began = time.perf_counter()
    thread.start()
    steps = 0
    while not is_over.is_set():
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        steps += 1
    elapsed = time.perf_counter() - began
    thread.join()
    return steps / elapsed


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
