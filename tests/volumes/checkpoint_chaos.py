"""Processes that save checkpoints and are killed, and what must be so afterwards."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from bridge.checkpoints import writer
from bridge.checkpoints.reader import UCVolumeReader
from bridge.checkpoints.writer import UCVolumeWriter
from bridge.volumes.commit import attempts, collect_garbage, complete_attempts
from bridge.volumes.storage import Storage
from bridge.volumes.stores import LocalStorage
from tests.volumes.commit_chaos import Killing, Report, ended, events_and_status, forked

# small, so that torch needs no threads for them: those of its OpenMP do not survive a fork
_SIZES = (7000, 1000, 3)


def make_state(number: int) -> dict[str, Any]:
    """Return a state that tells its number in all its parts: in two files, in the index, and pickled."""
    tensors = [torch.full((size,), float(number)) for size in _SIZES]
    return {"tensors": tensors, "number": number, "pickled": (number, [number])}


def save(folder: Path, number: int) -> None:
    """Save the state of that number."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(make_state(number), storage_writer=UCVolumeWriter(folder))


def load(folder: Path) -> int:
    """Load what is there, see that it is one state, and return its number."""
    state: dict[str, Any] = {"tensors": [torch.zeros(size) for size in _SIZES], "number": None, "pickled": None}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=UCVolumeReader(folder))
    number = int(state["number"])
    expected = make_state(number)
    assert state["pickled"] == expected["pickled"], state["pickled"]
    for one, two in zip(state["tensors"], expected["tensors"], strict=True):
        assert torch.equal(one, two), f"parts of two saves: {number}, {one.unique().tolist()}"
    return number


def kill_at_every_step(folder: Path, *, every: int = 1, first: int = 0) -> int:
    """Kill a process before, in and after each effect of its save, then check each time; return how many there were.

    Args:
        every: Only at each so many of them.
        first: Beginning with this one.

    Raises:
        AssertionError: What is loaded is not the newest complete save, or garbage stays.
    """
    save(folder, last := 0)
    for step in itertools.count(first, every):
        storage = Killing(LocalStorage(folder), step)
        events, status = events_and_status(*forked(partial(_save_on, storage, folder, step + 1)))
        loaded = load(folder)
        assert loaded in ({step + 1} if events else {last, step + 1}), f"step {step}: {loaded}, after {last}"
        last = loaded
        _check(LocalStorage(folder))
        if status == 0:
            return step
        assert status == -signal.SIGKILL, status
    raise AssertionError


def checkpoint_round(folder: Path, seed: int) -> int:
    """Kill a process that saves one checkpoint after another at a random moment; return how many it had saved.

    Raises:
        AssertionError: As of `kill_at_every_step`.
    """
    save(folder, 0)
    pid, reader = forked(partial(_save_on_and_on, folder))
    time.sleep(random.Random(seed).uniform(0, 0.3))
    os.kill(pid, signal.SIGKILL)
    saved = len(ended(pid, reader, expected=-signal.SIGKILL))
    # it may be complete without its end having been told
    assert load(folder) in (saved, saved + 1)
    _check(LocalStorage(folder))
    return saved


def _check(storage: LocalStorage) -> None:
    """Check that what was not completed can be collected, and that nothing else is; keep the newest."""
    complete = [attempt for attempt, _ in complete_attempts(storage)]
    collect_garbage(storage, grace_s=0)
    assert attempts(storage) == complete
    assert not [entry.name for entry in storage.list("_leases")]
    assert {entry.name for entry in storage.list()} == {"_leases", *(attempt.name for attempt in complete)}


def _save_on(storage: Storage, folder: Path, number: int, report: Report) -> None:
    writer.open_storage = lambda *args, **options: storage  # type: ignore[assignment]  # this process ends soon
    save(folder, number)
    report("saved")


def _save_on_and_on(folder: Path, report: Report) -> None:
    for number in itertools.count(1):
        save(folder, number)
        report("saved")
