"""Copies of a state, and saves that go on while the state changes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import bridge
from bridge.checkpoints.layout import Leaf
from bridge.checkpoints.staging import Staging
from bridge.errors import CheckpointError
from bridge.volumes.commit import attempts, complete_attempts
from bridge.volumes.stores import LocalStorage
from tests.processes import eventually

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

REPOSITORY = Path(__file__).parents[3]
ALLOWED_S = 30


def load(folder: Path, target: dict[str, Any]) -> dict[str, Any]:
    dcp.load(target, storage_reader=bridge.UCVolumeReader(folder))
    return target


def leases(folder: Path) -> list[str]:
    return sorted(entry.name for entry in (folder / "_leases").iterdir())


class Gate(DefaultSavePlanner):
    """A planner that waits, when the first tensor is to be written, until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.is_there.set()
        assert self.may_go.wait(ALLOWED_S)
        return super().resolve_data(write_item)


# copies


def test_nothing_of_a_copy_changes_with_the_state() -> None:
    state = {
        "tensor": torch.ones(3), "nested": {"list": [torch.ones(2), (torch.ones(1), 4)]}, "value": [1, {"a": 2}],
        "set": {1}, "leaf": Leaf({"t": torch.ones(2)}), "text": "x",
    }  # fmt: skip

    copied = Staging().stage(state)
    state["tensor"].zero_()
    state["nested"]["list"][0].zero_()
    state["nested"]["list"][1][0].zero_()
    state["value"][1]["a"] = 3
    state["set"].add(2)
    state["leaf"].value["t"].zero_()

    assert copied["tensor"].tolist() == [1, 1, 1]
    assert copied["nested"]["list"][0].tolist() == [1, 1]
    assert copied["nested"]["list"][1][0].tolist() == [1]
    assert (copied["nested"]["list"][1][1], copied["value"], copied["set"]) == (4, [1, {"a": 2}], {1})
    assert copied["leaf"].value["t"].tolist() == [1, 1]


def test_a_tensor_that_is_there_twice_is_copied_once() -> None:
    tensor = torch.rand(1000)

    copied = Staging().stage({"a": tensor, "b": [tensor], "c": tensor[:500]})

    assert copied["a"] is copied["b"][0]
    assert torch.equal(copied["c"], tensor[:500])
    assert copied["c"].data_ptr() != copied["a"].data_ptr()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::2, 1:],
        lambda x: x[:1].expand(5, 6),
        lambda x: torch.view_as_complex(x.reshape(9, 2, 2)).conj(),
        lambda x: x[0, 0],
        lambda x: x[:, :0],
        torch.nn.Parameter,
        torch._neg_view,
    ],
)
def test_what_is_seen_of_a_view_is_copied(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.rand(6, 6))

    copied = Staging().stage({"x": tensor})["x"]

    assert torch.equal(copied, tensor)
    assert copied.is_contiguous()
    assert not copied.requires_grad
    assert not copied.is_conj()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.bool, torch.int16, torch.float32, torch.complex128, torch.float8_e5m2]),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
        ),
        max_size=8,
    )
)
def test_tensors_of_any_types_and_shapes_are_copied_side_by_side(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    state = {
        str(number): torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)
        for number, (dtype, shape) in enumerate(kinds)
    }

    copied = Staging().stage(state)

    for name, tensor in state.items():
        assert (copied[name].dtype, copied[name].shape) == (tensor.dtype, tensor.shape)
        one, two = (part.reshape(-1).view(torch.uint8).tolist() for part in (copied[name], tensor))
        assert one == two
    starts = [copied[name].data_ptr() % 64 for name in state if state[name].numel()]
    assert not any(starts)


def test_memory_that_is_given_back_is_used_again() -> None:
    staging = Staging()
    first = staging.stage({"x": torch.ones(1000)})
    staging.give_back()

    second = staging.stage({"x": torch.zeros(1000)})

    assert second["x"].data_ptr() == first["x"].data_ptr()


def test_memory_whose_tensors_are_gone_is_used_again() -> None:
    staging = Staging()
    first = staging.stage({"x": torch.ones(1000), "y": torch.ones(10)})
    address, left = first["x"].data_ptr(), first["y"][:2]
    del first
    assert staging.stage({"x": torch.ones(1000)})["x"].data_ptr() != address

    del left

    assert staging.stage({"x": torch.ones(1000)})["x"].data_ptr() == address


def test_memory_in_use_is_not_used_by_another() -> None:
    staging = Staging()
    copies = [staging.stage({"x": torch.full((1000,), float(number))}) for number in range(4)]

    assert [copied["x"].unique().tolist() for copied in copies] == [[0], [1], [2], [3]]


def test_a_larger_state_gets_more_memory_and_a_smaller_one_a_part_of_it() -> None:
    staging = Staging()
    for size in (10, 1000, 20):
        copied = staging.stage({"x": torch.full((size,), float(size))})
        assert copied["x"].unique().tolist() == [size]
        staging.give_back()

    assert staging.holds(copied["x"])
    staging.close()
    assert not staging.holds(copied["x"])


def test_it_needs_nothing_that_others_have_to_import() -> None:
    code = "import torch; from bridge.checkpoints.staging import Staging; print(Staging().stage({'x': torch.ones(2)}))"

    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert done.stdout == "{'x': tensor([1., 1.])}\n", done.stderr


# saves


def test_what_changes_after_it_returned_is_not_saved(tmp_path: Path) -> None:
    state = {"x": torch.ones(100_000), "list": [torch.ones(3)], "value": {"steps": [1]}, "empty": OrderedDict()}
    gate = Gate()
    saving = dcp.async_save(state, storage_writer=bridge.UCVolumeWriter(tmp_path), planner=gate)
    assert gate.is_there.wait(ALLOWED_S)

    state["x"].zero_()
    state["list"][0].zero_()
    state["value"]["steps"].append(2)
    gate.may_go.set()
    saving.result(ALLOWED_S)

    loaded = load(tmp_path, {"x": torch.zeros(100_000), "list": [torch.zeros(3)], "value": {"steps": None}})
    assert loaded["x"].unique().tolist() == [1]
    assert loaded["list"][0].tolist() == [1, 1, 1]
    assert loaded["value"] == {"steps": [1]}


def test_memory_is_used_again_from_the_second_save_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = bridge.UCVolumeWriter(tmp_path)
    addresses = []
    stage = Staging.stage

    def staged(self: Staging, state: Any) -> Any:
        copied = stage(self, state)
        addresses.append(copied["x"].data_ptr())
        return copied

    monkeypatch.setattr(Staging, "stage", staged)
    for step in range(5):
        dcp.async_save({"x": torch.full((1000,), float(step)), "step": step}, storage_writer=used).result(ALLOWED_S)

    assert len(set(addresses)) == 1
    assert load(tmp_path, {"x": torch.zeros(1000), "step": None})["step"] == 4


def test_a_second_save_at_a_time_is_refused_and_the_first_is_whole(tmp_path: Path) -> None:
    used = bridge.UCVolumeWriter(tmp_path)
    gate = Gate()
    first = dcp.async_save({"x": torch.ones(1000), "y": torch.ones(10)}, storage_writer=used, planner=gate)
    assert gate.is_there.wait(ALLOWED_S)

    second = dcp.async_save({"x": torch.zeros(1000), "y": torch.zeros(10)}, storage_writer=used)
    with pytest.raises(CheckpointException) as caught:
        second.result(ALLOWED_S)
    gate.may_go.set()
    first.result(ALLOWED_S)

    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, CheckpointError)
    assert str(error) == "this UCVolumeWriter is writing another save.\n  Wait for it, or make another."
    loaded = load(tmp_path, {"x": torch.zeros(1000), "y": torch.zeros(10)})
    assert loaded["x"].unique().tolist() == loaded["y"].unique().tolist() == [1]
    assert len(attempts(LocalStorage(tmp_path))) == 1


def test_a_writer_goes_on_after_a_save_that_was_refused(tmp_path: Path) -> None:
    used = bridge.UCVolumeWriter(tmp_path)
    gate = Gate()
    first = dcp.async_save({"x": torch.ones(1000)}, storage_writer=used, planner=gate)
    assert gate.is_there.wait(ALLOWED_S)
    with pytest.raises(CheckpointException):
        dcp.save({"x": torch.zeros(1000)}, storage_writer=used)
    gate.may_go.set()
    first.result(ALLOWED_S)

    for step in range(3):
        dcp.async_save({"x": torch.full((1000,), float(step))}, storage_writer=used).result(ALLOWED_S)

    assert load(tmp_path, {"x": torch.zeros(1000)})["x"].unique().tolist() == [2]


@pytest.mark.parametrize("again", [dcp.save, dcp.async_save])
@pytest.mark.parametrize("first", [dcp.save, dcp.async_save])
def test_a_writer_goes_on_after_a_save_that_failed(tmp_path: Path, first: Any, again: Any) -> None:
    class Failing(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            raise RuntimeError("no plan")

    used = bridge.UCVolumeWriter(tmp_path)
    with pytest.raises(CheckpointException, match="no plan"):
        done(first({"x": torch.ones(10)}, storage_writer=used, planner=Failing()))

    done(again({"x": torch.full((10,), 2.0)}, storage_writer=used))

    assert load(tmp_path, {"x": torch.zeros(10)})["x"].unique().tolist() == [2]
    assert len(attempts(LocalStorage(tmp_path))) == 1
    eventually(lambda: leases(tmp_path) == [])


def done(saving: Any) -> None:
    if isinstance(saving, Future):
        saving.result(ALLOWED_S)


def test_a_state_that_cannot_be_copied_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        dcp.async_save({"lock": threading.Lock()}, storage_writer=bridge.UCVolumeWriter(tmp_path))


@pytest.fixture
def flat() -> Iterator[Callable[[], None]]:
    """Return what sees that neither memory nor open files nor threads have grown since it was called first."""
    process, before = psutil.Process(), []

    def look() -> None:
        gc.collect()
        found = (process.memory_info().rss, process.num_fds(), threading.active_count())
        before.append(found)
        memory, files, threads = before[0]
        assert found[0] - memory < 24 << 20
        assert found[1] - files <= 3
        assert found[2] - threads <= 3

    return look


def test_a_hundred_saves_leave_memory_and_files_as_they_were(tmp_path: Path, flat: Callable[[], None]) -> None:
    used = bridge.UCVolumeWriter(tmp_path)
    state = {"x": torch.zeros(1 << 18), "y": [torch.zeros(10), 3]}
    for step in range(100):
        state["x"].fill_(step)
        dcp.async_save(state, storage_writer=used).result(ALLOWED_S)
        if step in (20, 60, 99):
            flat()

    assert load(tmp_path, {"x": torch.zeros(1 << 18)})["x"].unique().tolist() == [99]
    storage = LocalStorage(tmp_path)
    assert len(attempts(storage)) == len(list(complete_attempts(storage))) == 1
    eventually(lambda: leases(tmp_path) == [])


def test_a_hundred_loads_leave_memory_and_files_as_they_were(tmp_path: Path, flat: Callable[[], None]) -> None:
    dcp.save({"x": torch.ones(1 << 18)}, storage_writer=bridge.UCVolumeWriter(tmp_path))
    for step in range(100):
        load(tmp_path, {"x": torch.zeros(1 << 18)})
        if step in (20, 99):
            flat()

    eventually(lambda: leases(tmp_path) == [])


def failed(folder: Path) -> bridge.UCVolumeWriter:
    """Return a writer whose save has failed where it does not learn of it, as when another rank fails."""

    class Failing(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            raise RuntimeError("another rank failed")

    used = bridge.UCVolumeWriter(folder)
    with pytest.raises(CheckpointException, match="another rank failed"):
        dcp.save({"x": torch.ones(10)}, storage_writer=used, planner=Failing())
    return used


def test_a_writer_that_is_dropped_after_a_failure_leaves_no_lease(tmp_path: Path) -> None:
    used = failed(tmp_path)
    assert leases(tmp_path) != []

    del used
    gc.collect()

    eventually(lambda: leases(tmp_path) == [])
    assert attempts(LocalStorage(tmp_path)) == []


def test_a_writer_that_is_closed_after_a_failure_leaves_nothing(tmp_path: Path) -> None:
    used = failed(tmp_path)

    used.close()

    assert leases(tmp_path) == []
    assert os.listdir(tmp_path) == ["_leases"]


def test_a_process_that_ends_after_a_failure_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import torch, torch.distributed.checkpoint as dcp, bridge
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
class Failing(DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        raise RuntimeError("another rank failed")
used = bridge.UCVolumeWriter({str(tmp_path)!r})
try:
    dcp.save({{"x": torch.ones(10)}}, storage_writer=used, planner=Failing())
except BaseException as exc:
    print("failed", len(list(__import__("pathlib").Path({str(tmp_path)!r}, "_leases").iterdir())))
"""

    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert ended.stdout == "failed 1\n", ended.stderr
    assert leases(tmp_path) == []
    assert os.listdir(tmp_path) == ["_leases"]


def test_what_a_failed_save_wrote_is_gone_before_it_is_told(tmp_path: Path) -> None:
    used = bridge.UCVolumeWriter(tmp_path)

    with pytest.raises(CheckpointException):
        dcp.save({"x": torch.ones(10), "f": print}, storage_writer=used)

    assert os.listdir(tmp_path) == ["_leases"]
    assert leases(tmp_path) == []
