"""What ranks that save and restore call in tests; `tests.ranks` starts them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import bridge
from bridge.checkpoints.retention import list_saved
from bridge.volumes.stores import LocalStorage
from tests.ranks import tell

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextlib.contextmanager
def group_of(size: int, folder: Path, name: str) -> Iterator[bool]:
    """Make the first ranks a process group; give whether this one is of it."""
    if size <= RANK:
        yield False
        return
    store = f"file://{folder}/store-{name}"
    dist.init_process_group("gloo", store, rank=RANK, world_size=size, timeout=timedelta(seconds=240))
    yield True
    dist.barrier()
    dist.destroy_process_group()


def after(folder: Path, name: str) -> None:
    """Wait until `done` was called with this name."""
    deadline = time.monotonic() + 240
    while not (folder / f"done-{name}").exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.02)


def done(folder: Path, name: str) -> None:
    dist.barrier()
    if RANK == 0:
        (folder / f"done-{name}").touch()


def full(value: Any) -> Any:
    """Return a state with all that is spread put together, as lists."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.detach().double().flatten().tolist()]
    if isinstance(value, dict):
        return {str(key): full(part) for key, part in value.items()}
    return [full(part) for part in value] if isinstance(value, list | tuple) else value


def spread_tensors(filled: bool) -> dict[str, Any]:
    """Return tensors spread in every way, with sizes that do not divide."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, shape, placement in (
        ("rows", (7, 3), Shard(0)), ("columns", (3, 7), Shard(1)), ("whole", (5,), Replicate()),
        ("few", (1, 2), Shard(0)), ("deep", (2, 5, 3), Shard(1)), ("none", (0, 2), Shard(0)),
    ):  # fmt: skip
        rows = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + len(name)
        state[name] = distribute_tensor(rows if filled else torch.zeros_like(rows), mesh, [placement])
    state["plain"] = torch.arange(3) if filled else torch.zeros(3, dtype=torch.int64)
    state["scalar"] = torch.tensor(2.5 if filled else 0.0)
    state["value"] = {"text": "a" if filled else "", "numbers": [1, 2] if filled else []}
    return state


def fsdp_run(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def ddp_run(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train(run: dict[str, Any], steps: int = 2) -> None:
    torch.manual_seed(9)
    for _ in range(steps):
        run["model"](torch.randn(4, 5)).square().mean().backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()


def state_of(run: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = get_state_dict(run["model"], run["optimizer"])
    return {"model": model, "optimizer": optimizer}


class Counter:
    """A part that has a state of its own on each rank."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def numbers() -> list[Any]:
    """Return what all random generators give next."""
    return [random.random(), float(np.random.random()), float(torch.rand(1))]


def spread(folder_name: str) -> None:
    """Save on 2, 1 and 4 of these ranks, and load on 1, 3 and 2."""
    torch.set_num_threads(1)
    folder = Path(folder_name)
    for size in (2, 1, 4):
        with group_of(size, folder, f"save-{size}") as is_in:
            if is_in:
                save_all(folder / str(size), size)
                done(folder, str(size))
    for size in (1, 3, 2):
        for saved in (2, 1, 4):
            after(folder, str(saved))
        with group_of(size, folder, f"load-{size}") as is_in:
            if is_in:
                for saved in (2, 1, 4):
                    load_all(folder / str(saved), f"{saved} on {size}")
    with group_of(4, folder, "bytes"):
        tell("bytes", lambda: bytes_read(folder))
        tell("groups", lambda: saved_by_groups(folder / "groups"))


def save_all(folder: Path, size: int) -> None:
    name = f"saved {size}"
    state = spread_tensors(filled=True)
    dcp.save(state, storage_writer=bridge.UCVolumeWriter(folder / "tensors"))
    tell(f"{name}: tensors", lambda: full(state))
    run = fsdp_run(0)
    train(run)
    dcp.save(state_of(run), storage_writer=bridge.UCVolumeWriter(folder / "fsdp"))
    tell(f"{name}: fsdp", lambda: full(state_of(run)))
    with bridge.CheckpointManager(folder / "fsdp-manager", async_save=True, handle_sigterm=False) as manager:
        manager.save(3, {**run, "note": RANK})
        train(run, 1)  # while it is written
    other = ddp_run(0)
    train(other)
    torch.manual_seed(100 + RANK)
    with bridge.CheckpointManager(folder / "ddp-manager", async_save=False, handle_sigterm=False) as manager:
        manager.save(4, {**other, "counter": Counter(RANK + 10), "note": {"rank": RANK}})
    tell(f"{name}: ddp", lambda: full(state_of(other)))
    tell(f"{name}: numbers", numbers)


def load_all(folder: Path, name: str) -> None:
    state = spread_tensors(filled=False)
    dcp.load(state, storage_reader=bridge.UCVolumeReader(folder / "tensors"))
    tell(f"{name}: tensors", lambda: full(state))

    def loaded() -> Any:
        run = fsdp_run(1)
        asked = state_of(run)
        dcp.load(asked, storage_reader=bridge.UCVolumeReader(folder / "fsdp"))
        set_state_dict(
            run["model"], run["optimizer"], model_state_dict=asked["model"], optim_state_dict=asked["optimizer"]
        )
        return full(state_of(run))

    tell(f"{name}: fsdp", loaded)

    def restored() -> Any:
        run = {**fsdp_run(1), "note": None}
        with bridge.CheckpointManager(folder / "fsdp-manager", handle_sigterm=False) as manager:
            found = manager.restore_latest(run)
        assert found is not None
        note = run.pop("note")
        return [found.step, found.world_size, found.random, note, full(state_of(run))]

    tell(f"{name}: fsdp manager", restored)

    def restored_ddp() -> Any:
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(7)
        run = {**ddp_run(1), "counter": Counter(0), "note": None}
        with bridge.CheckpointManager(folder / "ddp-manager", handle_sigterm=False) as manager:
            found = manager.restore_latest(run)
        assert found is not None
        note, counter = run.pop("note"), run.pop("counter")
        next_numbers = numbers()
        return [found.step, found.random, note, counter.count, next_numbers, full(state_of(run))]

    tell(f"{name}: ddp manager", restored_ddp)


def bytes_read(folder: Path) -> Any:
    """Return what this rank of four reads of a tensor that is spread over all, and how large it is."""
    mesh = init_device_mesh("cpu", (4,))
    size = 4 << 20
    rows = torch.arange(4 * size, dtype=torch.int32)
    state: dict[str, Any] = {"rows": distribute_tensor(rows, mesh, [Shard(0)])}
    dcp.save(state, storage_writer=bridge.UCVolumeWriter(folder / "large"))
    state["rows"] = distribute_tensor(torch.zeros_like(rows), mesh, [Shard(0)])

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = so_far()
    dcp.load(state, storage_reader=bridge.UCVolumeReader(folder / "large", max_bytes=1 << 30))
    count = so_far() - before
    local = state["rows"].to_local()
    assert torch.equal(local, rows[RANK * size : (RANK + 1) * size])
    return [count, local.nbytes, rows.nbytes]


def saved_by_groups(path: Path) -> list[list[str]]:
    """Return what is loaded after some of four ranks have saved to a path, then others, then all."""
    found = []
    for ranks in ([0, 1], [2, 3], [3], [0, 1, 2, 3], [1, 2]):
        group = dist.new_group(ranks)
        if RANK in ranks:
            mine: dict[str, Any] = {f"{len(ranks)} of {RANK}": torch.full((2,), RANK)}
            dcp.save(mine, storage_writer=bridge.UCVolumeWriter(path), process_group=group)
        dist.barrier()
        loaded = bridge.UCVolumeReader(path).read_metadata().state_dict_metadata
        found.append(sorted(loaded))
        dist.barrier()
    return found


@contextlib.contextmanager
def failing(on: int, code: int, *, match: str = ".safetensors") -> Iterator[None]:
    """Let no file of a name be written on one rank."""
    real = LocalStorage.write

    def broken(storage: LocalStorage, name: str, data: Iterable[bytes | memoryview]) -> None:
        if match in name:
            raise OSError(code, os.strerror(code))
        real(storage, name, data)

    if on == RANK:
        LocalStorage.write = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalStorage.write = real  # type: ignore[method-assign]


@contextlib.contextmanager
def unreadable(on: int, code: int, *, match: str) -> Iterator[None]:
    """Let no file of a name be read on one rank."""
    real = os.preadv

    def broken(file: int, buffers: Any, offset: int, *flags: int) -> int:
        if match in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(code, os.strerror(code))
        return real(file, buffers, offset, *flags)

    if on == RANK:
        os.preadv = broken
    try:
        yield
    finally:
        os.preadv = real


class Broken(Counter):
    """A part that fails on rank 1."""

    is_broken = True

    def state_dict(self) -> dict[str, Any]:
        if RANK == 1 and self.is_broken:
            raise ValueError("theirs")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if RANK == 1 and self.is_broken:
            raise ValueError("theirs")
        super().load_state_dict(state)


def all_fail(name: str, call: Callable[[], Any]) -> None:
    """Tell what torch's exception says of each rank, or another error."""

    def called() -> Any:
        try:
            call()
        except CheckpointException as exc:
            return {number: [type(reason).__name__, str(reason)] for number, (reason, _) in exc.failures.items()}
        return "nothing was raised"

    tell(name, called)


def large(filled: bool = True) -> dict[str, Any]:
    """Return a tensor of 5 MiB on each rank, its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(dist.get_world_size() * (5 << 18), dtype=torch.float32)
    return {"rows": distribute_tensor(rows if filled else torch.zeros_like(rows), mesh, [Shard(0)])}


def complete(root: Path) -> list[int]:
    return [one.step for one in list_saved(LocalStorage(root))]


def faults(folder_name: str) -> None:
    """Fail on rank 1 alone, in every way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=240))
    folder = Path(folder_name)
    by_torch(folder / "dcp")
    mixed(folder / "mixed")
    by_manager(folder / "manager")
    told_apart(folder / "apart")
    busy(folder / "busy")
    cached_plans(folder / "plans")
    stopping(folder / "stop")
    dist.barrier()
    dist.destroy_process_group()


def by_torch(folder: Path) -> None:
    writer = bridge.UCVolumeWriter(folder)
    with failing(1, errno.ENOSPC):
        all_fail("dcp full disk", lambda: dcp.save(large(), storage_writer=writer))
    tell("dcp no marker", lambda: list(folder.glob("*/_bridge*")))
    dcp.save(large(), storage_writer=writer)
    state = large(filled=False)
    with unreadable(1, errno.EIO, match="rank-00001"):
        all_fail("dcp unreadable", lambda: dcp.load(state, storage_reader=bridge.UCVolumeReader(folder)))
    tell("dcp untouched", lambda: float(state["rows"].to_local().abs().sum()))
    missing = {**state, "more": torch.zeros(1)} if RANK == 1 else state
    all_fail("dcp missing", lambda: dcp.load(missing, storage_reader=bridge.UCVolumeReader(folder)))
    tell("dcp still untouched", lambda: float(state["rows"].to_local().abs().sum()))
    dcp.load(state, storage_reader=bridge.UCVolumeReader(folder))
    tell("dcp loaded", lambda: bool(state["rows"].full_tensor().equal(large()["rows"].full_tensor())))


def mixed(root: Path) -> None:
    """Save what is not the same on all ranks under one name."""
    several = {
        "shapes": torch.zeros(2 + RANK),
        "types": torch.zeros(2, dtype=(torch.float32, torch.int32)[RANK]),
        "kinds": torch.zeros(2) if RANK else 3,
        "parts": distribute_tensor(torch.zeros(4 + 2 * RANK), init_device_mesh("cpu", (2,)), [Shard(0)]),
    }
    for name, value in several.items():
        state = {"same": torch.zeros(3), name: value}
        all_fail(f"mixed {name}", lambda state=state: dcp.save(state, storage_writer=bridge.UCVolumeWriter(root)))  # type: ignore[misc]
    model = torch.nn.Linear(2, 2 + RANK)
    with bridge.CheckpointManager(root / "run", handle_sigterm=False, async_save=False) as manager:
        tell("mixed models", lambda: manager.save(1, {"model": model}))
        tell("mixed steps", manager.steps)
    all_fail("other paths", lambda: dcp.save({"a": 1}, storage_writer=bridge.UCVolumeWriter(root / str(RANK))))


def by_manager(root: Path) -> None:
    torch.manual_seed(0)
    run = fsdp_run(0)
    train(run)
    broken = Broken(1)
    state = {**run, "part": broken, "note": 1}
    for async_save in (True, False):
        manager = bridge.CheckpointManager(root, async_save=async_save, handle_sigterm=False, keep_last=1)
        name = "async" if async_save else "sync"

        def save(
            step: int, given: dict[str, Any] = state, manager: bridge.CheckpointManager = manager
        ) -> None:  # fmt: skip
            manager.save(step, given)
            manager.wait()

        tell(f"{name} state_dict", partial(save, 1))
        broken.is_broken = False
        with failing(1, errno.ENOSPC):
            tell(f"{name} full disk", partial(save, 2))
        with failing(0, errno.ENOSPC):
            tell(f"{name} full disk on 0", partial(save, 2))
        with failing(0, errno.ENOSPC, match="_bridge"):
            tell(f"{name} full disk at the marker", partial(save, 2))
        odd = {**state, "odd": lambda: None} if RANK == 0 else state
        tell(f"{name} odd", partial(save, 2, odd))
        dist.barrier()  # rank 0 deletes what failed
        tell(f"{name} steps", lambda: complete(root))
        tell(f"{name} attempts", lambda: len(list(root.glob("*-step*"))))
        tell(f"{name} save", partial(save, 3))
        broken.is_broken = True
        tell(f"{name} other steps", partial(save, 4 + RANK))
        dist.barrier()
        manager.close()
    broken.is_broken = False
    with bridge.CheckpointManager(root, handle_sigterm=False, keep_last=2) as manager:
        manager.save(5, state)
    expected = full(state_of(run))

    fresh = fsdp_run(1)
    before = full(fresh["model"].state_dict())
    other = Broken(7)
    again = {**fresh, "part": other, "note": None}
    manager = bridge.CheckpointManager(root, handle_sigterm=False)

    def untouched() -> Any:
        return [full(fresh["model"].state_dict()) == before, len(fresh["optimizer"].state), other.count, again["note"]]

    with unreadable(1, errno.EIO, match="rank-00001"):
        tell("unreadable on 1", lambda: manager.restore_latest(again))
    tell("untouched", untouched)
    unfit = {**again, "more": Counter(0)} if RANK == 1 else again
    tell("unfit on 1", lambda: manager.restore_latest(unfit))
    tell("still untouched", untouched)
    tell("broken on 1", lambda: manager.restore_latest(again))
    other.is_broken = False

    newest = next(one for one in list_saved(LocalStorage(root)) if one.step == 5)
    if RANK == 0:
        (file,) = (root / newest.attempt.name).glob("rank-00001*")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()

    def fall_back() -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = manager.restore_latest(again)
        assert found is not None
        told = [str(one.message) for one in caught if "was restored" in str(one.message)]
        return [found.step, found.skipped, told, other.count, again["note"], full(state_of(fresh)) == expected]

    tell("fall back", fall_back)
    manager.close()
    root_of = root if RANK == 0 else root.with_name("elsewhere")
    with bridge.CheckpointManager(root_of, handle_sigterm=False) as manager:
        tell("other roots", lambda: manager.restore_latest(again))
        tell("other roots to save", lambda: manager.save(9, again))


def told_apart(root: Path) -> None:
    """Let rank 1 see another folder at the same address."""
    from bridge.checkpoints import opened

    for place in (root, root.with_name("other")):
        dcp.save(large(), storage_writer=bridge.UCVolumeWriter(place))
    with bridge.CheckpointManager(root.with_name("run"), handle_sigterm=False) as manager:
        manager.save(1, {"note": 1})
    real = opened.open_storage

    class Elsewhere(LocalStorage):
        def __init__(self, path: Path) -> None:
            first, *rest = path.relative_to(root.parent).parts
            super().__init__(root.parent.joinpath({root.name: "other", "run": "nowhere"}[first], *rest))
            self._shown = path

        def __str__(self) -> str:
            return str(self._shown)

    def elsewhere(path: Any, **options: Any) -> Any:
        return Elsewhere(Path(path))

    state = large(filled=False)
    if RANK == 1:
        opened.open_storage = elsewhere
    all_fail("another attempt", lambda: dcp.load(state, storage_reader=bridge.UCVolumeReader(root)))
    tell("apart untouched", lambda: float(state["rows"].to_local().abs().sum()))
    with bridge.CheckpointManager(root.with_name("run"), handle_sigterm=False) as manager:
        tell("no attempt", lambda: manager.restore_latest({"note": 0}))
    opened.open_storage = real
    dist.barrier()


def busy(root: Path) -> None:
    """Ask for saves while one is written, on rank 1 for longer than on rank 0."""
    gate = threading.Event()
    write = LocalStorage.write

    def slow(storage: LocalStorage, name: str, data: Iterable[bytes | memoryview]) -> None:
        if name.endswith(".safetensors"):
            assert gate.wait(60)
            time.sleep(0.5 * RANK)
        write(storage, name, data)

    LocalStorage.write = slow  # type: ignore[method-assign]
    state = large()
    with bridge.CheckpointManager(root, when_busy="skip", handle_sigterm=False, keep_last=9) as manager:
        tell("first", lambda: manager.save(1, {"rows": state["rows"][:0].to_local(), "note": 1}))
        tell("skipped", lambda: [manager.save(step, {"note": step}) for step in (2, 3)])
        gate.set()

        def until_saved() -> int:
            step = 4
            while not manager.save(step, {"note": step}):
                step += 1
                time.sleep(0.01 * (1 + RANK))
            return step

        tell("later", until_saved)
    tell("busy steps", lambda: len(complete(root)))
    with bridge.CheckpointManager(root, when_busy="wait", handle_sigterm=False, keep_last=9) as manager:
        tell("waited", lambda: [manager.save(step, {"note": step}) for step in range(1000, 1003)])
    tell("waited steps", lambda: sorted(step for step in complete(root) if step >= 1000))
    LocalStorage.write = write  # type: ignore[method-assign]
    with bridge.CheckpointManager(root.with_name("left"), handle_sigterm=False) as manager:
        with failing(1, errno.EIO):
            manager.save(1, {"model": torch.nn.Linear(2, 2)} | {"note": 1})
            manager._running.exception()  # type: ignore[union-attr]
            dist.barrier()
        tell("left", lambda: manager.save(2, {"note": 2}))
        tell("after it", lambda: manager.save(3, {"note": 3}))


def cached_plans(folder: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    writer = bridge.UCVolumeWriter(folder)

    def save(state: dict[str, Any]) -> None:
        dcp.save(state, storage_writer=writer, planner=planner)

    attempts = []

    def loaded(asked: dict[str, Any]) -> Any:
        reader = bridge.UCVolumeReader(folder)
        dcp.load(asked, storage_reader=reader)
        attempts.append(reader.attempt)
        return full(asked)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state(number: int, size: int = 6) -> dict[str, Any]:
        rows = torch.full((size,), float(number))
        return {"rows": distribute_tensor(rows, mesh, [Shard(0)]), "note": number, "own": torch.tensor([number])}

    found = []
    for number in range(3):
        save(state(number))
        found.append(loaded(state(-1)) == full(state(number)))
    with failing(1, errno.ENOSPC):
        all_fail("cached full disk", lambda: save(state(3)))
    save(state(4))
    found.append(loaded(state(-1)) == full(state(4)))
    save(state(5, size=9))
    found.append(loaded(state(-1, size=9)) == full(state(5, size=9)))
    save(state(6, size=9))
    found.append(loaded(state(-1, size=9)) == full(state(6, size=9)))
    tell("cached", lambda: found)
    tell("cached attempts", lambda: attempts)


def stopping(root: Path) -> None:
    """Get SIGTERM on rank 1, in the middle of the third step."""
    before = signal.getsignal(signal.SIGTERM)
    gate = threading.Event()
    write = LocalStorage.write

    def slow(storage: LocalStorage, name: str, data: Iterable[bytes | memoryview]) -> None:
        if name.endswith(".safetensors"):
            assert gate.wait(60)
        write(storage, name, data)

    LocalStorage.write = slow  # type: ignore[method-assign]
    manager = bridge.CheckpointManager(root, every=2, when_busy="skip")

    def run() -> Any:
        saved = []
        for step in range(1, 10):
            if step == 3 and RANK == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Timer(0.5, gate.set).start()
            if step == 3 and RANK == 0:
                threading.Timer(0.5, gate.set).start()
            if manager.should_save(step):
                saved.append([step, manager.save(step, {"model": torch.nn.Linear(2, 2)})])
            if manager.should_stop:
                break
        return saved

    tell("stopped", run)
    manager.close()
    LocalStorage.write = write  # type: ignore[method-assign]
    tell("stopped steps", manager.steps)
    tell("given back", lambda: signal.getsignal(signal.SIGTERM) is before)


def lost(folder_name: str) -> None:
    """Lose rank 1 in the middle of a save."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    root = Path(folder_name)
    manager = bridge.CheckpointManager(root, handle_sigterm=False, async_save=False)
    manager.save(1, {"model": torch.nn.Linear(2, 2)})
    write = LocalStorage.write

    def die(storage: LocalStorage, name: str, data: Iterable[bytes | memoryview]) -> None:
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        write(storage, name, data)

    LocalStorage.write = die  # type: ignore[method-assign]
    tell("lost", lambda: manager.save(2, {"model": torch.nn.Linear(2, 2)}))
    tell("steps", manager.steps)
    os._exit(0)


def leaving(folder_name: str) -> None:
    """End while a save is written, on rank 1 for longer."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    write = LocalStorage.write

    def slow(storage: LocalStorage, name: str, data: Iterable[bytes | memoryview]) -> None:
        if name.endswith(".safetensors"):
            time.sleep(0.5 + RANK)
        write(storage, name, data)

    LocalStorage.write = slow  # type: ignore[method-assign]
    manager = bridge.CheckpointManager(folder_name)
    tell("left", lambda: manager.save(1, {"model": torch.nn.Linear(2, 2)}))


def positions(folder_name: str, export: str) -> None:
    """Save in the middle of an epoch on 2, 1 and 3 of these ranks, and go on to its end on 3, 2 and 1."""
    torch.set_num_threads(1)
    folder = Path(folder_name)

    def opened() -> Any:
        return bridge.DataLoader(bridge.ParquetDataset(export, batch_size=4, shuffle=True, seed=3))

    def rows(loader: Any, most: int | None = None) -> Iterator[tuple[int, list[int]]]:
        for step, batch in enumerate(loader):
            yield step, batch["n"].tolist()[: loader.num_valid(step)]
            if step + 1 == most:
                return

    for size in (2, 1, 3):
        with group_of(size, folder, f"place-{size}") as is_in:
            if is_in:
                loader, seen = opened(), []
                with bridge.CheckpointManager(folder / str(size), handle_sigterm=False) as manager:
                    for step, some in rows(loader, 3):
                        seen += some
                        if step == 2:
                            manager.save(step, {"loader": loader})
                tell(f"before {size}", lambda seen=seen: seen)  # type: ignore[misc]
                done(folder, f"place-{size}")
    for size in (3, 2, 1):
        for saved in (2, 1, 3):
            after(folder, f"place-{saved}")
        with group_of(size, folder, f"rest-{size}") as is_in:
            if not is_in:
                continue
            for saved in (2, 1, 3):
                loader = opened()
                with bridge.CheckpointManager(folder / str(saved), handle_sigterm=False) as manager:
                    manager.restore_latest({"loader": loader})
                rest = [row for _, some in rows(loader) for row in some]
                following = [row for _, some in rows(loader) for row in some]
                tell(f"{saved} on {size}", lambda pair=[rest, following]: pair)  # type: ignore[misc]


class Trail:
    """What a rank has seen, in order, as a digest."""

    def __init__(self) -> None:
        self.digest = ""
        self.steps = 0

    def add(self, *seen: Any) -> None:
        self.digest = hashlib.blake2b(repr((self.digest, *seen)).encode(), digest_size=16).hexdigest()
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self.digest, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.digest, self.steps = state["digest"], state["steps"]


def trained(root: Path, export: str, at: Callable[[str], None]) -> list[Any]:
    """Train for two epochs, from where an earlier process was killed; return what the run is then.

    `at` is called at each step, and at each file that is written or deleted.
    """
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    random.seed(1)
    np.random.seed(2)
    layers: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))
    model = DistributedDataParallel(layers) if dist.is_initialized() else layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
    loader = bridge.DataLoader(bridge.ParquetDataset(export, batch_size=4, shuffle=True))
    trail = Trail()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "trail": trail}
    with bridge.CheckpointManager(root, every=3, keep_last=2) as manager:
        restored = manager.restore_latest(state)
        step = restored.step + 1 if restored else 0
        at("restored")
        for epoch in range(loader.epoch, 2):
            loader.set_epoch(epoch)
            for batch in loader:
                noise = random.random() + float(np.random.normal()) + torch.randn(1)
                loss = model(batch["x"][:, None] + noise).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                trail.add(step, epoch, batch["n"].tolist(), float(loss.detach()))
                at("step")
                if manager.should_save(step):
                    manager.save(step, state)
                step += 1
    parts = [full(layers.state_dict()), full(optimizer.state_dict()), scheduler.state_dict()]
    return [*parts, trail.state_dict(), numbers()]


def forked(rank: int, size: int, folder: Path, name: str, run: str, export: str, kill_at: int | None) -> int:
    """Train in a process of its own, which kills itself at an event; return its id."""
    if pid := os.fork():
        return pid
    try:
        torch.set_num_threads(1)
        count = 0

        def at(event: str) -> None:
            nonlocal count
            if event == "restored" and rank == 0:
                (folder / f"began-{name}").touch()
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        for call in ("write", "delete"):
            real = getattr(LocalStorage, call)

            def counted(*args: Any, real: Any = real, call: str = call) -> Any:
                at(call)
                result = real(*args)
                at(call)
                return result

            setattr(LocalStorage, call, counted)
        if size > 1:
            store = f"file://{folder}/store-{name}"
            dist.init_process_group("gloo", store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        result = trained(folder / run, export, at)
        (folder / f"result-{run}-{rank}").write_text(json.dumps(result))
        if size > 1:
            dist.barrier()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the child ends here
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def killed(folder_name: str, export: str, size: str, kills: str) -> None:
    """Train without a kill, and with so many, in processes that are forked from this one."""
    folder, ranks = Path(folder_name), range(int(size))
    rng = random.Random(int(kills))

    def run_once(name: str, run: str, *, kill_at: int | None = None, within_s: float | None = None) -> bool:
        """Run until done or killed; return whether it was killed."""
        victim = rng.choice(ranks)
        pids = [
            forked(rank, len(ranks), folder, name, run, export, kill_at if rank == victim else None) for rank in ranks
        ]
        deadline = time.monotonic() + 120
        if within_s is not None:
            while not (folder / f"began-{name}").exists():
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(within_s)
            os.kill(pids[victim], signal.SIGKILL)
        _, status = os.waitpid(pids[victim], 0)
        is_killed = os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        for rank, pid in enumerate(pids):
            if rank != victim:
                if is_killed:
                    time.sleep(rng.uniform(0, 0.05))
                    os.kill(pid, signal.SIGKILL)
                status = status or os.waitpid(pid, 0)[1] if not is_killed else os.waitpid(pid, 0)[1]
        assert is_killed or status == 0, status
        return is_killed

    def results(run: str) -> Any:
        return [json.loads((folder / f"result-{run}-{rank}").read_text()) for rank in ranks]

    assert not run_once("plain", "plain")
    expected = results("plain")
    count, run, found = 0, 0, []
    for number in itertools.count():
        left = count < int(kills)
        at = rng.randint(2, 60) if left and number % 2 else None
        within_s = rng.uniform(0, 0.25) if left and not number % 2 else None
        if run_once(str(number), f"run-{run}", kill_at=at, within_s=within_s):
            count += 1
            continue
        found.append(results(f"run-{run}") == expected)
        run += 1
        if not left:
            break
    tell("killed", lambda: [count, found, [each[3]["steps"] for each in expected]])
