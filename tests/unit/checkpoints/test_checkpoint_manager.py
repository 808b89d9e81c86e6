from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import itertools
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import bridge
from bridge.checkpoints import manager as manager_module
from bridge.checkpoints import writer
from bridge.checkpoints.blocks import Blocks
from bridge.checkpoints.retention import list_saved
from bridge.errors import CheckpointError, VolumeError
from bridge.volumes import hold
from bridge.volumes.commit import begin, read_marker
from bridge.volumes.stores import LocalStorage
from tests.ranks import REPOSITORY
from tests.volumes.commit_chaos import Killing, events_and_status, forked

SIZE = 16


class Run:
    """A small training run, all of whose state is in `state`."""

    def __init__(self, seed: int = 0, *, size: int = SIZE) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(size, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "note": {"loss": [1.5, None]},
        }

    def step(self) -> float:
        loss = self.model(torch.randn(4, SIZE) + random.random() + np.random.random()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def snapshot(self) -> dict[str, Any]:
        parts = (self.model, self.optimizer, self.scheduler)
        return copy.deepcopy({type(part).__name__: part.state_dict() for part in parts} | {"note": self.state["note"]})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(part, other[key]) for key, part in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def saved_at(root: Path, *steps: int, **arguments: Any) -> list[dict[str, Any]]:
    """Train and save at these steps; return what the run was then."""
    run, snapshots = Run(), []
    with bridge.CheckpointManager(root, async_save=False, handle_sigterm=False, **arguments) as manager:
        for step in steps:
            run.step()
            run.state["note"] = step
            manager.save(step, run.state)
            snapshots.append(run.snapshot())
    return snapshots


def attempt_of(root: Path, step: int) -> Path:
    """Return the folder that readers pick for a step."""
    return root / next(one.attempt.name for one in list_saved(LocalStorage(root)) if one.step == step)


def damage(root: Path, step: int) -> None:
    """Flip a bit of a tensor of a step."""
    file = next(attempt_of(root, step).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


class Slow:
    """Files of tensors are written when `gate` is open."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        write = LocalStorage.write

        def slow(storage: LocalStorage, name: str, blocks: Iterable[bytes | memoryview]) -> None:
            if name.endswith(".safetensors"):
                assert self.gate.wait(60)
            write(storage, name, blocks)

        patch.setattr(LocalStorage, "write", slow)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of tensors be written."""
    write = LocalStorage.write

    def full(storage: LocalStorage, name: str, blocks: Iterable[bytes | memoryview]) -> None:
        if name.endswith(".safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(storage, name, blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "write", full)
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def opened(root: Path, **arguments: Any) -> bridge.CheckpointManager:
    return bridge.CheckpointManager(root, **{"handle_sigterm": False, **arguments})


@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_goes_on_with_all_that_it_consists_of(root: Path, async_save: bool) -> None:
    run = Run()
    losses = []
    with opened(root, async_save=async_save) as manager:
        for step in range(6):
            losses.append(run.step())
            if step == 2:
                assert manager.save(step, run.state) is True
    again = Run(seed=1)
    again.state["note"] = None
    random.seed(5)
    np.random.seed(5)
    with opened(root) as manager:
        restored = manager.restore_latest(again.state)
        assert manager.steps() == [2]
    assert restored is not None
    assert (restored.step, restored.world_size, restored.skipped) == (2, 1, ())
    assert restored.attempt == attempt_of(root, 2).name
    assert restored.values == {"note": {"loss": [1.5, None]}}
    assert restored.random == "as it was on every rank"
    assert again.state["note"] == {"loss": [1.5, None]}
    assert [again.step() for _ in range(3)] == losses[3:]
    assert same(again.snapshot(), run.snapshot())


def test_what_changes_after_save_returns_is_not_saved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, run = Slow(monkeypatch), Run()
    run.step()
    with opened(root) as manager:
        manager.save(1, run.state)
        before = run.snapshot()
        run.step()
        run.state["note"]["loss"].append(7)
        slow.gate.set()
    again = Run(seed=1)
    opened(root).restore_latest(again.state)
    assert same(again.snapshot(), before)


def test_a_state_that_cannot_be_written_to_gets_its_values_in_the_result(root: Path) -> None:
    from types import MappingProxyType

    saved_at(root, 4)
    restored = opened(root).restore_latest(MappingProxyType(Run().state))
    assert restored is not None
    assert restored.values == {"note": 4}


def test_a_second_save_waits_for_the_first_or_is_skipped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, run = Slow(monkeypatch), Run()
    with opened(root, when_busy="skip") as manager:
        assert manager.save(0, run.state)
        assert not manager.save(1, run.state)
        manager.should_stop = True
        threading.Timer(0.3, slow.gate.set).start()
        assert manager.save(2, run.state), "the last before the end is not skipped"
    assert opened(root).steps() == [0, 2]

    slow.gate.clear()
    with opened(root, when_busy="wait") as manager:
        assert manager.save(3, run.state)
        began = time.monotonic()
        threading.Timer(0.5, slow.gate.set).start()
        assert manager.save(4, run.state)
        assert time.monotonic() - began > 0.4
    assert opened(root, keep_last=9).steps() == [2, 3, 4]


@pytest.mark.parametrize("call", ["save", "wait", "restore_latest", "close"])
def test_a_failed_save_that_nobody_waited_for_is_raised_at_the_next_call(root: Path, call: str) -> None:
    run = Run()
    manager = opened(root)
    manager.save(0, run.state)
    manager.wait()
    with full_disk():
        manager.save(1, run.state)
        assert manager._running is not None
        manager._running.exception()
    arguments: dict[str, tuple[Any, ...]] = {"save": (2, run.state), "restore_latest": (run.state,)}
    with pytest.raises(
        CheckpointError, match=r"step 1 could not be saved to .*No space left on device.*\n.*as they were"
    ):
        getattr(manager, call)(*arguments.get(call, ()))
    assert manager.steps() == [0]
    assert [entry.name for entry in root.iterdir() if entry.name[0].isdigit()] == [attempt_of(root, 0).name]
    manager.save(3, run.state)
    manager.close()
    assert manager.steps() == [0, 3]


def test_a_wait_that_is_interrupted_may_be_taken_up_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with opened(root) as manager:
            manager.save(1, Run().state)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                manager.wait()
            threading.Timer(0.2, slow.gate.set).start()
            manager.wait()
            assert manager.steps() == [1]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_runs_are_kept_where_python_opens_no_files(tmp_path: Path) -> None:
    address = f"memory://{tmp_path.name}"
    run = Run()
    run.step()
    with opened(address, keep_last=2) as manager:  # type: ignore[arg-type]
        for step in range(3):
            manager.save(step, run.state)
    again = Run(seed=1)
    with opened(address + "/") as manager:  # type: ignore[arg-type]
        restored = manager.restore_latest(again.state)
        assert manager.steps() == [1, 2]
    assert restored is not None
    assert restored.step == 2
    assert same(again.snapshot(), run.snapshot())


def test_failing_saves_leave_the_last_good_one(root: Path) -> None:
    (before,) = saved_at(root, 0, keep_last=1)
    run = Run(seed=3)
    with opened(root, keep_last=1) as manager:
        for step in range(1, 4):
            with full_disk():
                manager.save(step, run.state)
                with pytest.raises(CheckpointError, match="No space left"):
                    manager.wait()
        assert manager.steps() == [0]
        restored = manager.restore_latest(run.state)
    assert restored is not None
    assert restored.step == 0
    assert same(run.snapshot(), before)


def test_steps_stay_as_the_rules_say(root: Path) -> None:
    run = Run()
    losses = {0: 0.5, 1: 0.2, 2: float("nan"), 3: 0.9, 4: 0.3, 5: 0.4, 6: 0.6}
    with opened(root, keep_last=2, keep_every=3, best=("loss", "min"), async_save=False) as manager:
        for step, loss in losses.items():
            manager.save(step, run.state, metrics={"loss": loss, "other": step})
    assert opened(root).steps() == [0, 1, 3, 5, 6]
    assert len([entry for entry in root.iterdir() if entry.name[0].isdigit()]) == 5


def test_a_metric_that_no_step_has_is_told(root: Path) -> None:
    run = Run()
    with opened(root, best=("los", "min"), async_save=False) as manager:
        manager.save(0, run.state)
        with pytest.warns(UserWarning, match=r"no step has the metric 'los' that best= names; they have: loss, other$"):
            manager.save(1, run.state, metrics={"loss": 1, "other": 2})


def test_a_root_that_cannot_be_written_is_told_at_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        opened(tmp_path / "file" / "run", every=1000) as manager,
        pytest.raises(VolumeError, match="cannot be written"),
    ):
        manager.should_save(1)
    with opened(tmp_path / "run", every=1000) as manager:
        assert not manager.should_save(1)
        assert manager.steps() == []
        assert manager.restore_latest(Run().state) is None


def test_the_step_that_was_restored_stays(root: Path) -> None:
    saved_at(root, 0)
    run = Run()
    with opened(root, keep_last=1, async_save=False) as manager:
        manager.restore_latest(run.state)
        for step in range(1, 4):
            manager.save(step, run.state)
        assert manager.steps() == [0, 3]
    with opened(root, keep_last=1, async_save=False) as manager:
        manager.save(4, run.state)
        assert manager.steps() == [4]


def test_the_next_older_step_is_restored_where_the_newest_is_damaged(root: Path) -> None:
    _, second, _, _ = saved_at(root, 1, 2, 3, 4, keep_last=9)
    damage(root, 4)
    next(attempt_of(root, 3).glob("*.safetensors")).unlink()
    run = Run(seed=1)
    with pytest.warns(
        UserWarning, match="step 2 was restored, since step 4 is damaged: .*; step 3 is damaged: .* is gone"
    ):
        restored = opened(root).restore_latest(run.state)
    assert restored is not None
    assert restored.step == 2
    assert [step for step, _ in restored.skipped] == [4, 3]
    assert same(run.snapshot(), second)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_damaged_steps_do_not_push_out_what_is_saved_after_an_older_one_was_restored(
    root: Path, keep_last: int
) -> None:
    saved_at(root, 20, 30, 31, keep_last=9)
    damage(root, 30)
    damage(root, 31)
    run = Run(seed=1)
    with opened(root, keep_last=keep_last, async_save=False) as manager:
        with pytest.warns(UserWarning, match="step 20 was restored"):
            manager.restore_latest(run.state)
        manager.save(25, run.state)
        run.step()
        manager.save(26, run.state)
        last = run.snapshot()
        assert set(manager.steps()) == {20, 26, 27 - keep_last}
    again = Run(seed=2)
    restored = opened(root).restore_latest(again.state)
    assert restored is not None
    assert (restored.step, restored.skipped) == (26, ())
    assert same(again.snapshot(), last)


def test_nothing_is_restored_where_nothing_was_completed(root: Path) -> None:
    run = Run()
    before = run.snapshot()
    assert opened(root).restore_latest(run.state) is None
    with begin(LocalStorage(root), "step1") as attempt:
        LocalStorage(root).make_folder(attempt.name)
        with pytest.warns(UserWarning, match="1 saves were begun there, and none was completed"):
            assert opened(root).restore_latest(run.state) is None
    assert same(run.snapshot(), before)


def test_there_is_no_cold_start_where_all_steps_are_damaged(root: Path) -> None:
    saved_at(root, 1, 2)
    damage(root, 1)
    damage(root, 2)
    run = Run(seed=1)
    before = run.snapshot()
    with pytest.raises(CheckpointError, match=r"no step of .* can be read:\n  step 2: .* damaged.*\n.*step 1: "):
        opened(root).restore_latest(run.state)
    assert same(run.snapshot(), before)


def test_what_fails_when_tensors_are_being_filled_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_at(root, 1)
    count = 0
    fill = Blocks.fill

    def lost(blocks: Blocks, pieces: Any) -> None:
        nonlocal count
        count += 1
        if count == 1:
            next(attempt_of(root, 1).glob("*.safetensors")).unlink()
        fill(blocks, pieces)

    monkeypatch.setattr(Blocks, "fill", lost)
    with pytest.raises(CheckpointError, match=r"step 1: .* is gone; parts of the state have changed"):
        opened(root).restore_latest(Run().state)


@pytest.mark.parametrize("name", ["index.json", "_bridge.0.json"])
def test_what_vanishes_while_it_is_opened_is_passed_over(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    saved_at(root, 1, 2)
    found = bridge.CheckpointManager._found

    def found_and_lost(manager: bridge.CheckpointManager) -> Any:
        listed = found(manager)
        (attempt_of(root, 2) / name).unlink()
        return listed

    monkeypatch.setattr(bridge.CheckpointManager, "_found", found_and_lost)
    with pytest.warns(UserWarning, match="step 1 was restored"):
        restored = opened(root).restore_latest(Run().state)
    assert restored is not None
    assert restored.step == 1


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(storage: LocalStorage, name: str = "") -> Any:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(LocalStorage, "list", refuse)
    with pytest.raises(VolumeError, match="cannot be listed"):
        opened(tmp_path).restore_latest(Run().state)


class Counter:
    """A part that has a state of its own."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def other_shape() -> dict[str, Any]:
    return Run(size=SIZE + 1).state


def other_part() -> dict[str, Any]:
    return {**Run(1).state, "counter": Counter(4)}


def other_value() -> dict[str, Any]:
    return {**Run(1).state, "best": 3}


def more_layers() -> dict[str, Any]:
    run = Run(1)
    run.model.append(torch.nn.Linear(1, 1))
    return {"model": run.model}


def fewer_layers() -> dict[str, Any]:
    return {"model": torch.nn.Sequential(torch.nn.Linear(SIZE, 8))}


def other_type() -> dict[str, Any]:
    return {"model": Run(1).model.to(torch.bfloat16)}


def other_optimizer() -> dict[str, Any]:
    run = Run(1)
    return {"model": run.model, "optimizer": torch.optim.Adam(run.model.parameters(), amsgrad=True)}


def no_model() -> dict[str, Any]:
    return {"optimizer": Run(1).optimizer}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (other_shape, "model.0.weight"), (other_part, "counter"), (other_value, "best"),
        (more_layers, "model.3.weight"), (fewer_layers, "model.2.weight"), (other_type, "bfloat16"),
        (other_optimizer, "max_exp_avg_sq"), (no_model, "no model"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_an_error_and_changes_nothing(
    root: Path, make: Callable[[], dict[str, Any]], told: str
) -> None:
    saved_at(root, 1, 2)
    state = make()

    def snapshot() -> Any:
        parts = {name: part.state_dict() for name, part in state.items() if hasattr(part, "state_dict")}
        values = {name: part for name, part in state.items() if not hasattr(part, "state_dict")}
        return copy.deepcopy(
            [parts, values, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
        )

    before = snapshot()
    with pytest.raises(CheckpointError, match=re.escape(told)):
        opened(root).restore_latest(state)
    assert same(snapshot(), before)


def test_what_a_part_raises_at_its_state_is_told_with_its_name(root: Path) -> None:
    class Strange(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("count")

    with opened(root) as manager:
        manager.save(1, {"strange": Strange(3)})
    with pytest.raises(CheckpointError, match=r"(?s)'strange'.*KeyError.*may have changed"):
        opened(root).restore_latest({"strange": Strange()})


def test_saving_before_the_first_step_changes_nothing(root: Path) -> None:
    run = Run()
    before = run.snapshot()
    with opened(root) as manager:
        manager.save(0, run.state)
    assert same(run.snapshot(), before)
    assert all(parameter.grad is None for parameter in run.model.parameters())
    again = Run(seed=2)
    opened(root).restore_latest(again.state)
    assert same(again.snapshot(), before)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum", "adagrad"])
def test_training_is_the_same_with_saves_and_after_a_restore(root: Path, kind: str) -> None:
    """Parameters that no loss depends on, and those that are frozen, have no state."""

    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in ("used", "late", "unused", "frozen")})
        model["frozen"].requires_grad_(False)
        optimizer: Any = {
            "adamw": lambda some: torch.optim.AdamW(some, lr=0.1),
            "sgd": lambda some: torch.optim.SGD(some, lr=0.1),
            "momentum": lambda some: torch.optim.SGD(some, lr=0.1, momentum=0.9, dampening=0.5),
            "adagrad": lambda some: torch.optim.Adagrad(some, lr=0.1),
        }[kind](model.parameters())
        return {"model": model, "optimizer": optimizer}

    def train(state: dict[str, Any], step: int) -> None:
        model = state["model"]
        rows = torch.full((2, 3), 1.0 + step)
        loss = model["used"](rows).square().sum()
        if step > 2:
            loss = loss + model["late"](rows).square().sum()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()

    plain, saving, restarted = make(), make(), make()
    for step in range(6):
        train(plain, step)
    with opened(root, async_save=False) as manager:
        for step in range(6):
            manager.save(step, saving)
            train(saving, step)
            manager.save(step, restarted)
            restarted = make()
            restored = manager.restore_latest(restarted)
            assert restored is not None
            assert restored.step == step
            train(restarted, step)
    for state in (saving, restarted):
        for name in ("model", "optimizer"):
            assert same(state[name].state_dict(), plain[name].state_dict()), name


def test_two_optimizers_of_one_model_are_kept_apart(root: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        first = torch.optim.AdamW([{"params": [model[0].weight], "lr": 0.5}, {"params": [model[0].bias]}])
        second = torch.optim.SGD(model[1].parameters(), lr=torch.tensor(0.1), momentum=0.9)
        return {"model": model, "first": first, "second": second}

    def train(state: dict[str, Any]) -> None:
        state["model"](torch.ones(2, 3)).square().sum().backward()
        for name in ("first", "second"):
            state[name].step()
            state[name].zero_grad()

    state, again = make(0), make(1)
    train(state)
    with opened(root) as manager:
        manager.save(1, state)
        manager.wait()
        train(again)
        manager.restore_latest(again)
    for one in (state, again):
        train(one)
    for name in state:
        assert same(again[name].state_dict(), state[name].state_dict()), name


@pytest.mark.parametrize("name", ["values", "random", "rank_0"])
def test_names_that_are_kept_for_ranks_are_refused(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"a part named '{name}', which is kept"), opened(root) as manager:
        manager.save(1, {name: torch.nn.Linear(1, 1)})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"every": 0}, "every is 0; give 1 or more"), ({"keep_last": 0}, "keep_last is 0"),
        ({"keep_every": -1}, "keep_every is -1"), ({"when_busy": "drop"}, "when_busy is 'drop'"),
        ({"best": ("loss", "least")}, "best is "), ({"best": ("loss",)}, "best is "),
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(root: Path, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        bridge.CheckpointManager(root, **arguments)


@pytest.mark.parametrize("step", [-1, True, 1.5])
def test_steps_are_whole_numbers(root: Path, step: Any) -> None:
    with pytest.raises(ValueError, match=f"step is {step}; give"):
        opened(root).save(step, {})
    with opened(root) as manager:
        manager.save(np.int64(7), {})  # type: ignore[arg-type]
    assert opened(root).steps() == [7]


def test_metrics_that_are_no_numbers_are_refused(root: Path) -> None:
    with opened(root) as manager:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            manager.save(1, {}, metrics={"loss": torch.ones(2)})  # type: ignore[dict-item]
        manager.save(2, {}, metrics={"loss": torch.tensor(1.0)})  # type: ignore[dict-item]
    assert opened(root).steps() == [2]


def test_sigterm_asks_for_a_last_save(root: Path) -> None:
    run = Run()
    before = signal.getsignal(signal.SIGTERM)
    with bridge.CheckpointManager(root, every=10) as manager:
        asked = []
        for step in range(1, 14):
            if step == 12:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.should_save(step):
                asked.append((step, manager.should_stop))
                manager.save(step, run.state)
            if manager.should_stop:
                break
        assert asked == [(10, False), (12, True)]
        assert manager.should_save(13), "asked again, it says so again"
    assert signal.getsignal(signal.SIGTERM) is before
    assert opened(root).steps() == [10, 12]


def test_without_a_rule_only_sigterm_asks_for_a_save(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    manager = opened(root)
    assert [manager.should_save(step) for step in range(3)] == [False] * 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_in_the_block_gives_the_signal_back_and_waits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    threads = threading.active_count()

    def block() -> None:
        with bridge.CheckpointManager(root) as manager:
            manager.should_save(1)
            manager.save(1, Run().state)
            threading.Timer(0.2, slow.gate.set).start()
            raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        block()
    assert signal.getsignal(signal.SIGTERM) is before
    assert opened(root).steps() == [1]
    assert threading.active_count() == threads


def test_an_error_in_the_block_is_told_and_not_that_of_the_save(root: Path) -> None:
    def block() -> None:
        with full_disk(), opened(root) as manager:
            manager.save(1, Run().state)
            raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        block()


def test_close_may_be_called_twice_and_in_any_thread(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    manager = bridge.CheckpointManager(root)
    manager.should_save(1)
    manager.save(1, {})
    failures: list[BaseException] = []

    def close() -> None:
        try:
            manager.close()
        except BaseException as exc:  # noqa: BLE001 - told
            failures.append(exc)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert not failures
    assert manager.steps() == [1]
    manager.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_was_set_meanwhile_stays(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with bridge.CheckpointManager(root) as manager:
            manager.should_save(1)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_python_does_not_know_is_no_obstacle(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    libc = ctypes.CDLL(None)
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
    try:
        # as a library in C does; Python then says None
        libc.signal(int(signal.SIGTERM), handler)
        with bridge.CheckpointManager(root) as manager:
            manager.should_save(1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert manager.should_save(2)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_forked_processes_end_at_sigterm(root: Path) -> None:
    with bridge.CheckpointManager(root) as manager:
        manager.should_save(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context = multiprocessing.get_context("fork")
            began = context.Event()
            child = context.Process(target=lambda: (began.set(), time.sleep(60)))
            child.start()
        assert began.wait(60)
        child.terminate()
        child.join(20)
        alive = child.is_alive()
        child.kill()
        child.join()
        assert not alive
        assert not manager.should_save(2)


def told_at_exit(code: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run a script that saves and ends."""
    head = (
        "import sys, time, torch, bridge\n"
        "from bridge.volumes.stores import LocalStorage\n"
        "write = LocalStorage.write\n"
        "def changed(storage, name, blocks):\n"
        "    if name.endswith('.safetensors'):\n"
        "        broken()\n"
        "    write(storage, name, blocks)\n"
        "LocalStorage.write = changed\n"
        "manager = bridge.CheckpointManager(sys.argv[1], keep_last=1)\n"
        "state = {'model': torch.nn.Linear(4, 4)}\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head + code, str(root)],
        capture_output=True, text=True, timeout=120, cwd=REPOSITORY, check=False,
    )  # fmt: skip


def test_the_end_of_a_process_waits_for_the_save_that_is_running(root: Path) -> None:
    saved_at(root, 1)
    ended = told_at_exit("broken = lambda: time.sleep(1)\nmanager.save(2, state)\nprint('over')\n", root)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "over\n", "")
    assert opened(root).steps() == [2]
    assert [entry.name for entry in root.iterdir() if entry.name[0].isdigit()] == [attempt_of(root, 2).name]


def test_the_end_of_a_process_tells_of_a_save_that_failed(root: Path) -> None:
    code = "def broken():\n    time.sleep(0.5)\n    raise OSError(28, 'no room')\nmanager.save(2, state)\n"
    ended = told_at_exit(code, root)
    assert "a save failed, and nobody waited for it: step 2 could not be saved" in ended.stderr
    assert "no room" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert opened(root).steps() == []


def test_deletion_that_is_killed_anywhere_leaves_no_step_that_is_not_whole(tmp_path: Path) -> None:
    import shutil

    saved_at(tmp_path / "made", 1, 2, 3, keep_last=9)
    for step in itertools.count():
        root = tmp_path / f"at_{step}"
        shutil.copytree(tmp_path / "made", root)
        storage = LocalStorage(root)
        doomed = [one for one in list_saved(storage) if one.step < 3]

        def delete(report: Any, storage: Any = storage, doomed: Any = doomed, step: int = step) -> None:
            hold.delete_unheld(Killing(storage, step), [one.attempt for one in doomed], at_once=True)

        _, status = events_and_status(*forked(delete))
        steps = [one.step for one in list_saved(storage)]
        assert 3 in steps
        for one in list_saved(storage):
            state = Run(seed=1).state
            bridge.UCVolumeReader(root / one.attempt.name).reset()
            with opened(root) as manager:
                manager._found = lambda one=one: ([one], [], "")  # type: ignore[method-assign,misc]
                restored = manager.restore_latest(state)
            assert restored is not None
            assert (restored.step, state["note"]) == (one.step, one.step)
        shutil.rmtree(root, ignore_errors=True)  # a lease may be ending
        if status == 0:
            assert steps == [3]
            assert step > 6
            return
        assert status == -signal.SIGKILL


def test_saving_a_step_again_that_is_killed_anywhere_leaves_the_old_one_or_the_new(root: Path) -> None:
    saved_at(root, 5)

    def save_again(report: Any, number: int, step: int) -> None:
        torch.set_num_threads(1)
        for module in (writer, manager_module):
            real = module.open_storage

            def killing(*args: Any, real: Any = real, **options: Any) -> Any:
                return Killing(real(*args, **options), step)

            module.open_storage = killing  # type: ignore[attr-defined]
        run = Run(seed=2)
        run.state["note"] = number
        manager = opened(root, async_save=False, keep_last=1)
        manager.save(5, run.state)
        report("saved")

    last, number = 5, 100
    for step in itertools.count(0, 2):
        number += 1
        events, status = events_and_status(*forked(lambda report, n=number, s=step: save_again(report, n, s)))
        state = Run(seed=3).state
        restored = opened(root).restore_latest(state)
        assert restored is not None
        assert state["note"] in (last, number)
        if events:
            assert state["note"] == number
        last = state["note"]
        assert opened(root).steps() == [5]
        if status == 0:
            assert step > 20
            break
        assert status == -signal.SIGKILL
    assert last == number


def test_a_failure_leaves_the_memory_for_the_next_save(root: Path) -> None:
    class Broken(Counter):
        def state_dict(self) -> dict[str, Any]:
            if self.count:
                raise ValueError("theirs")
            return super().state_dict()

    broken = Broken()
    state = {**Run().state, "broken": broken}
    with opened(root) as manager:
        manager.save(1, state)
        manager.wait()
        block = manager._staging._block
        assert block is not None
        broken.count = 1
        with pytest.raises(CheckpointError, match="'broken' does not give its state: ValueError: theirs"):
            manager.save(2, state)
        broken.count = 0
        with full_disk():
            manager.save(3, state)
            with pytest.raises(CheckpointError, match="No space"):
                manager.wait()
        state["unfit"] = object()
        manager.save(4, state)
        with pytest.raises(CheckpointError, match="cannot be loaded again"):
            manager.wait()
        assert manager._staging._block is block
    assert manager.steps() == [1]


def test_an_old_step_that_cannot_be_deleted_does_not_fail_the_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_at(root, 1)
    delete = LocalStorage.delete

    def refuse(storage: LocalStorage, name: str) -> bool:
        if "-step1-" in name:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return delete(storage, name)

    monkeypatch.setattr(LocalStorage, "delete", refuse)
    with opened(root, keep_last=1) as manager:
        manager.save(1, {})
        with pytest.warns(UserWarning, match="an old checkpoint stays: .*may still be complete"):
            manager.save(2, {})
        # as errors, with which rank 0 would be alone
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.save(3, {})
            manager.wait()
        assert manager.steps() == [1, 3]


def test_leases_that_cannot_be_read_do_not_fail_the_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_at(root, 1)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(hold, "count_holders", refuse)
    manager = opened(root, keep_last=1)
    manager.save(2, {})
    with pytest.warns(UserWarning, match="an old checkpoint stays"):
        manager.close()
    assert manager.steps() == [1, 2]


def test_tensors_are_made_in_memory_whatever_the_default_device_is(root: Path) -> None:
    run = Run()
    run.step()
    torch.set_default_device("meta")
    try:
        with bridge.CheckpointManager(root, every=1) as manager:
            assert manager.should_save(1)
            manager.save(1, run.state)
            manager.wait()
            before = run.snapshot()
            with torch.device("cpu"):
                run.step()
            restored = manager.restore_latest(run.state)
    finally:
        torch.set_default_device(None)
    assert restored is not None
    assert same(run.snapshot(), before)


def test_many_saves_take_no_more_than_a_few(root: Path) -> None:
    process = psutil.Process()
    model = torch.nn.Linear(1 << 10, 1 << 10)

    def taken() -> tuple[int, int, int, int]:
        files = sum(1 for _ in root.rglob("*"))
        return threading.active_count(), process.num_fds(), files, process.memory_info().rss >> 20

    with opened(root, keep_last=2) as manager:
        found = []
        for step in range(30):
            manager.save(step, {"model": model})
            if step % 10 == 9:
                manager.wait()
                found.append(taken())
    for early, late in itertools.pairwise(found):
        assert late[:3] == early[:3], found
        assert late[3] - early[3] < 24, found


def test_a_newer_step_whose_marker_is_damaged_is_told(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with bridge.CheckpointManager(tmp_path, async_save=False) as manager:
        manager.save(1, {"model": model})
        manager.save(2, {"model": model})
    marker = next(tmp_path.glob("*-step2-*/_bridge.0.json"))
    data = bytearray(marker.read_bytes())
    data[len(data) // 2] ^= 1
    marker.write_bytes(data)

    with pytest.warns(UserWarning, match="step 1 was restored, since step 2 is damaged: its marker is not whole"):
        restored = bridge.CheckpointManager(tmp_path).restore_latest({"model": model})

    assert restored is not None
    assert (restored.step, restored.skipped) == (1, ((2, "its marker is not whole"),))
    next(tmp_path.glob("*-step1-*/_bridge.0.json")).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"no step of .* can be read:\n  step 2: its marker is not whole"):
        bridge.CheckpointManager(tmp_path).restore_latest({"model": model})


def test_a_step_that_another_job_completes_just_now_is_not_called_damaged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_at(root, 1)
    opening = begin(LocalStorage(root), "step2")
    attempt = opening.__enter__()
    (root / attempt.name).mkdir()
    real = manager_module.has_marker

    def completed_first(storage: Any, name: str) -> bool:
        if name == attempt.name:
            attempt.commit({"kind": "checkpoint"}, {})
        return real(storage, name)

    monkeypatch.setattr(manager_module, "has_marker", completed_first)
    restored = bridge.CheckpointManager(root).restore_latest(Run().state)
    opening.__exit__(None, None, None)

    assert read_marker(LocalStorage(root), attempt.name) is not None, "it was completed meanwhile"
    assert restored is not None
    assert (restored.step, restored.skipped) == (1, ())


def test_a_checkpoint_that_is_no_step_is_told_from_an_empty_root(tmp_path: Path) -> None:
    bridge.save_file({"a": 1}, tmp_path)

    for root in (tmp_path, next(tmp_path.glob("*-file-*")), next(tmp_path.glob("*-file-*/data.pt"))):
        with pytest.raises(CheckpointError, match="holds something, and no step of a run"):
            bridge.CheckpointManager(root).restore_latest({})


def test_a_state_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    manager = bridge.CheckpointManager(tmp_path, async_save=False)
    with pytest.raises(TypeError, match="the state is a Linear; give a dict"):
        manager.save(1, torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_the_state_of_a_model_is_not_taken_for_the_model(tmp_path: Path) -> None:
    with (
        bridge.CheckpointManager(tmp_path, async_save=False) as manager,
        pytest.raises(ValueError, match="Give what it is the state of: the model, not its state_dict"),
    ):
        manager.save(1, {"model": torch.nn.Linear(2, 2).state_dict()})


def test_an_attempt_of_another_label_is_not_taken_for_a_step(tmp_path: Path) -> None:
    folder = tmp_path / "1700000000000-stepper-0123456789ab"
    folder.mkdir()
    (folder / "_bridge.0.json").write_bytes(b"{}")

    with pytest.warns(UserWarning, match="1 saves were begun there, and none was completed"):
        assert bridge.CheckpointManager(tmp_path).restore_latest({}) is None
