"""What `torch.distributed.checkpoint` saves through UCVolumeWriter and loads through UCVolumeReader, in one process."""

from __future__ import annotations

import enum
import gc
import math
import os
import pickle
import re
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import bridge
from bridge.checkpoints import layout, pieces
from bridge.checkpoints.layout import is_plain
from bridge.errors import CheckpointError, CheckpointNotFoundError, LossyConversionError, VolumeError
from bridge.volumes.commit import attempts, collect_garbage, complete_attempts
from bridge.volumes.stores import LocalStorage
from tests.processes import eventually

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_DTYPES = sorted({found for found in vars(torch).values() if isinstance(found, torch.dtype)} - _QUANTIZED, key=str)
# of these torch itself saves nothing
DTYPES = [dtype for dtype in _DTYPES if not re.fullmatch(r"torch\.(u?int[1-7]|bits.*)", str(dtype))]


def save(folder: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=bridge.UCVolumeWriter(folder), **options)


def load(folder: Path, state: dict[str, Any], *, planner: Any = None, **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=bridge.UCVolumeReader(folder, **options), planner=planner)
    return state


def why(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """Return what the one rank raised."""
    ((error, _),) = caught.value.failures.values()
    return error


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a tensor of any bytes that its type may have, those of NaN included."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


# tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = {"matrix": (3, 5), "scalar": (), "empty": (2, 0, 3), "nothing": (0,)}
    saved = {name: random_tensor(dtype, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    save(tmp_path, saved)

    loaded = load(tmp_path, {name: random_tensor(dtype, shape, seed=9) for name, shape in shapes.items()})

    for name, tensor in saved.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(loaded[name]) == raw(tensor), name


def test_all_types_are_told(tmp_path: Path) -> None:
    assert {torch.bfloat16, torch.float8_e8m0fnu, torch.complex128, torch.uint16, torch.bool} <= set(DTYPES)
    assert len(DTYPES) >= 22


VIEWS = {
    "transposed": lambda x: x.T,
    "strided": lambda x: x[::2, 1::3],
    "offset": lambda x: x[3:, 2:],
    "expanded": lambda x: x[:1].expand(4, 9),
    "flipped": lambda x: x.flip(0),
    "channels_last": lambda x: x.reshape(1, 3, 3, 9)[:, :, :, :6].contiguous(memory_format=torch.channels_last),
    "real": lambda x: torch.view_as_complex(x[:8].reshape(9, 4, 2)).conj().imag,
    "conjugate": lambda x: torch.view_as_complex(x[:8].reshape(9, 4, 2)).conj(),
    "negative": torch._neg_view,
    "parameter": torch.nn.Parameter,
    "with_gradient": lambda x: x.clone().requires_grad_(),
    "not_a_leaf": lambda x: x.clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_seen_of_a_view_is_saved(tmp_path: Path, view: str) -> None:
    tensor = VIEWS[view](torch.arange(81.0).reshape(9, 9))
    save(tmp_path, {"x": tensor, "list": [tensor]})

    loaded = load(tmp_path, {"x": torch.zeros_like(tensor), "list": [torch.zeros(tensor.shape, dtype=tensor.dtype)]})

    assert torch.equal(loaded["x"], tensor)
    assert torch.equal(loaded["list"][0], tensor)


@pytest.mark.parametrize("view", ["transposed", "strided", "offset", "parameter", "with_gradient", "channels_last"])
def test_views_are_filled_in_place(tmp_path: Path, view: str) -> None:
    whole = torch.zeros(9, 9)
    target = VIEWS[view](whole)
    saved = torch.rand(target.shape)
    save(tmp_path, {"x": saved})

    loaded = load(tmp_path, {"x": target})

    assert loaded["x"] is target
    assert torch.equal(target, saved)
    assert target.requires_grad == VIEWS[view](whole).requires_grad
    if view in ("transposed", "strided", "offset"):
        assert whole.count_nonzero() == saved.count_nonzero()


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.eye(2).to_sparse(), r"'x' is a tensor of layout torch\.sparse_coo\.\n  Save it with to_dense\(\)"),
        (
            torch.ones(2, dtype=torch.uint8).view(torch.quint8),
            r"'x' is quantized\.\n  Save its int_repr\(\)",
        ),
        (torch.empty(2, device="meta"), "'x' is on the device meta, and holds nothing that could be saved"),
    ],
)
def test_tensors_that_would_not_come_back_are_refused_by_name(tmp_path: Path, tensor: torch.Tensor, told: str) -> None:
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, {"x": tensor})

    assert isinstance(why(caught), CheckpointError)
    assert re.match(told, str(why(caught)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["_leases"]


def test_a_model_and_its_optimizer_come_back_as_torch_documents_it(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1), betas=(0.9, 0.95 + 0.01 * seed))
        for _ in range(2 + seed):
            model(torch.randn(16, 4)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def parts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optim": optimizer_state, "step": 7}

    model, optimizer = made(0)
    save(tmp_path, parts(model, optimizer))
    other, its_optimizer = made(1)
    state = load(tmp_path, parts(other, its_optimizer))
    set_state_dict(
        other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )  # fmt: skip

    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert raw(one) == raw(two), name
    one, two = optimizer.state_dict(), its_optimizer.state_dict()
    assert one["param_groups"] == two["param_groups"]
    for number, kept in one["state"].items():
        assert {name: raw(part) for name, part in kept.items()} == {
            name: raw(part) for name, part in two["state"][number].items()
        }


def test_what_has_a_state_dict_is_loaded_in_place(tmp_path: Path) -> None:
    saved, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    save(tmp_path, {"model": saved})

    load(tmp_path, {"model": other})

    assert torch.equal(other.weight, saved.weight)


def test_a_state_of_nothing_is_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, {})

    assert load(tmp_path, {}) == {}


def test_a_state_of_values_alone_is_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, {"step": 3})

    assert load(tmp_path, {"step": 0}) == {"step": 3}


# values


class Letter(enum.Enum):
    A = 1


VALUES: list[Any] = [
    None, True, False, 0, -1, 2**63, -(2**64), 10**600, 0.1, -0.0, 5e-324, math.inf, -math.inf, "", "é", "\x00", "𐀀",
    "\ud800", "\udfff\ud800", "\ud800\udc00", (1, 2), (), {1, 2}, b"\x00\xff", bytearray(b"x"), 1j,
    [], [[], [1, [None]]], [(1, {2: 3})], torch.float32, torch.Size([1, 2]), torch.device("cpu"),
    [float("nan"), "\ud800\udc00", 2**70],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: ascii(value)[:20])
def test_values_come_back_with_their_types(tmp_path: Path, value: Any) -> None:
    save(tmp_path, {"value": value, "nested": {"list": [value]}})

    loaded = load(tmp_path, {"value": "other", "nested": {"list": ["other"]}})

    # repr tells -0.0 from 0.0, True from 1, and is the same for each NaN
    assert repr(loaded) == repr({"value": value, "nested": {"list": [value]}})


@pytest.mark.parametrize("bits", [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001])
def test_what_is_no_number_comes_back_bit_for_bit(tmp_path: Path, bits: int) -> None:
    (value,) = struct.unpack("<d", struct.pack("<Q", bits))
    save(tmp_path, {"value": value})

    loaded = load(tmp_path, {"value": 0.0})["value"]

    assert struct.pack("<d", loaded) == struct.pack("<d", value)


plain_text = st.text(st.characters(exclude_categories=()))
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | plain_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(plain_values)
def test_json_gives_back_what_is_plain(value: Any) -> None:
    index = layout.Index({}, {"value": value}, {}, None, ())

    assert not is_plain(value) or repr(layout.Index.decode(index.encode(), "here").values["value"]) == repr(value)


def test_most_values_are_plain() -> None:
    assert is_plain({"a": [1, 0.5, "x", None, True, {"b": []}]})
    assert not any(
        is_plain(value) for value in [(1,), {1: 2}, math.nan, math.inf, 10**700, np.float64(1.0), np.int64(1), b"", 1j]
    )


def test_dicts_come_back_in_dicts_whatever_their_keys(tmp_path: Path) -> None:
    state = {"a": {"b": {"c": 1, "d": [2, {"e": 3}]}}, "x.y": 4, "": 5, "\ud800\udc00": 6}
    save(tmp_path, state)

    assert load(tmp_path, {"a": {"b": {"c": 0, "d": [0, {"e": 0}]}}, "x.y": 0, "": 0, "\ud800\udc00": 0}) == state


def test_dicts_with_other_keys_are_loaded_as_torch_loads_its_own(tmp_path: Path) -> None:
    state = {"a": {1: 2, "b": (3, {4: 5})}, "c": [{6: torch.ones(1)}]}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"))
    save(tmp_path / "ours", state)

    def blank() -> dict[str, Any]:
        return {"a": {1: 0, "b": None}, "c": [{6: torch.zeros(1)}]}

    stock, ours = blank(), blank()
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path / "stock"))
    load(tmp_path / "ours", ours)
    assert ours == stock
    assert ours["c"][0][6] == 1


@pytest.mark.parametrize(
    "value",
    [np.float64(1.5), np.arange(3), Letter.A, Path("x"), math.sqrt, Exception("x"), 10**5000],
    ids=lambda value: type(value).__name__,
)
def test_values_that_could_not_be_loaded_safely_are_refused_when_saving(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, {"a": {"value": value}})

    assert isinstance(why(caught), CheckpointError)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    assert re.match(
        rf"'a\.value' holds a {re.escape(kind)}, which cannot be loaded again safely: Unsupported", str(why(caught))
    )
    assert "\x1b" not in str(why(caught))
    assert "weights_only" not in str(why(caught))


def test_values_of_classes_that_are_allowed_come_back(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Letter]):
        save(tmp_path, {"value": Letter.A})
        assert load(tmp_path, {"value": None})["value"] is Letter.A


def test_values_that_are_saved_by_another_planner_come_back(tmp_path: Path) -> None:
    class Planner(DefaultSavePlanner):
        lookup_object = None  # type: ignore[assignment]

        def resolve_data(self, write_item: Any) -> Any:
            found = self.state_dict[write_item.index.fqn]
            return found if isinstance(found, torch.Tensor) else super().transform_object(write_item, found)

    save(tmp_path, {"a": 1, "b": (1, 2), "c": torch.ones(2)}, planner=Planner())

    loaded = load(tmp_path, {"a": 0, "b": None, "c": torch.zeros(2)})
    assert (loaded["a"], loaded["b"], loaded["c"].tolist()) == (1, (1, 2), [1, 1])


# what was asked for


def test_a_checkpoint_may_hold_more_than_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2), "b": torch.ones(3), "c": {"d": 4, "e": 5}})

    loaded = load(tmp_path, {"a": torch.zeros(2), "c": {"e": 0}})

    assert loaded["a"].tolist() == [1, 1]
    assert loaded["c"] == {"e": 5}


def test_all_that_is_missing_is_named_and_nothing_has_changed(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2), "b": 1})
    state = {"a": torch.zeros(2), "b": 0, "x": torch.zeros(2), "y": {"z": 3}}

    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, state)

    assert isinstance(why(caught), CheckpointError)
    assert re.match(
        rf"{tmp_path}/\d+-checkpoint-\w+ does not hold x, y\.z\.\n  Ask for what it holds", str(why(caught))
    )
    assert state["a"].tolist() == [0, 0]
    assert state["b"] == 0


def test_of_many_that_are_missing_ten_are_named(tmp_path: Path) -> None:
    save(tmp_path, {})

    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, {f"p{number:02}": torch.zeros(1) for number in range(12)})

    assert "does not hold p00, p01, p02, p03, p04, p05, p06, p07, p08, p09 and 2 more." in str(why(caught))


def test_what_is_missing_is_left_as_it_is_where_a_part_is_enough(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2)})

    state = load(
        tmp_path, {"a": torch.zeros(2), "x": torch.zeros(2), "y": 3},
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )  # fmt: skip

    assert (state["a"].tolist(), state["x"].tolist(), state["y"]) == ([1, 1], [0, 0], 3)


def test_another_type_is_refused_before_anything_has_changed(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2), "b": torch.full((2,), 1.7), "c": torch.ones(2)})
    state = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16), "c": torch.zeros(2, dtype=torch.int64)}

    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, state)

    assert isinstance(why(caught), LossyConversionError)
    assert str(why(caught)) == (
        "tensors were saved in other types: b (torch.float32, not torch.bfloat16), "
        "c (torch.float32, not torch.int64).\n"
        "  Give tensors of these types, or UCVolumeReader(cast=True)."
    )
    assert not any(tensor.count_nonzero() for tensor in state.values())


def test_another_type_is_filled_where_that_is_wanted(tmp_path: Path) -> None:
    save(tmp_path, {"b": torch.full((2,), 1.7), "c": torch.arange(3)})

    state = load(tmp_path, {"b": torch.zeros(2, dtype=torch.bfloat16), "c": torch.zeros(3)}, cast=True)

    assert torch.equal(state["b"], torch.full((2,), 1.7, dtype=torch.bfloat16))
    assert torch.equal(state["c"], torch.arange(3.0))


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 4), (2, 2), ()])
def test_another_shape_is_refused_before_anything_has_changed(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save(tmp_path, {"a": torch.ones(2), "b": torch.ones(2, 3)})
    state = {"a": torch.zeros(2), "b": torch.zeros(shape)}

    with pytest.raises(CheckpointException, match=r"Size mismatch between saved torch.Size\(\[2, 3\]\)"):
        load(tmp_path, state)

    assert not any(tensor.count_nonzero() for tensor in state.values())


def test_a_value_is_not_filled_with_a_tensor(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2)})

    with pytest.raises(CheckpointException, match="Invalid checkpoint metadata for a"):
        load(tmp_path, {"a": 3})


def test_a_state_that_changes_while_it_is_saved_is_refused(tmp_path: Path) -> None:
    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return torch.ones(3)

    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, {"a": torch.ones(2)}, planner=Planner())

    assert isinstance(why(caught), CheckpointError)
    assert str(why(caught)).startswith("'a' is torch.float32 [3], planned as torch.float32 [2]: the state changed")


# places and saves


def test_the_newest_save_is_read(tmp_path: Path) -> None:
    for step in range(3):
        save(tmp_path, {"x": torch.full((2,), float(step)), "step": step})

    state = load(tmp_path, {"x": torch.zeros(2), "step": None})

    assert (state["x"].tolist(), state["step"]) == ([2, 2], 2)


def test_an_attempt_is_read_by_its_own_path_also_where_it_was_copied_to(tmp_path: Path) -> None:
    used = bridge.UCVolumeWriter(tmp_path / "a", label="first")
    dcp.save({"step": 1}, storage_writer=used)
    assert used.attempt is not None
    save(tmp_path / "a", {"step": 2})

    assert load(tmp_path / "a" / used.attempt, {"step": 0}) == {"step": 1}
    (tmp_path / "a" / used.attempt).rename(tmp_path / "copied")
    assert load(tmp_path / "copied", {"step": 0}) == {"step": 1}


def test_a_save_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for step in range(2):
        save(tmp_path, {"step": step})

    (left,) = attempts(LocalStorage(tmp_path))
    assert load(tmp_path / left.name, {"step": None}) == {"step": 1}


def test_saves_of_another_label_stay(tmp_path: Path) -> None:
    for label in ("a", "b", "a"):
        dcp.save({"label": label}, storage_writer=bridge.UCVolumeWriter(tmp_path, label=label))

    assert [attempt.label for attempt in attempts(LocalStorage(tmp_path))] == ["a", "b"]


def test_a_save_that_is_being_read_stays_until_it_is_read(tmp_path: Path) -> None:
    class Planner(DefaultLoadPlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            save(tmp_path, {"x": torch.full((300,), 2.0)})
            return super().finish_plan(new_plan)

    save(tmp_path, {"x": torch.ones(300)})

    state = load(tmp_path, {"x": torch.zeros(300)}, planner=Planner(), max_bytes=0)

    assert state["x"].unique().tolist() == [1]
    storage = LocalStorage(tmp_path)
    assert len(attempts(storage)) == 2
    assert len(list(complete_attempts(storage))) == 1
    gc.collect()
    eventually(lambda: not list(storage.list("_leases")))
    collect_garbage(storage, grace_s=0)
    assert len(attempts(storage)) == 1


def test_torch_may_choose_the_folder(tmp_path: Path) -> None:
    dcp.save({"step": 1}, checkpoint_id=str(tmp_path / "b"), storage_writer=bridge.UCVolumeWriter(tmp_path / "a"))
    state = {"step": 0}

    dcp.load(state, checkpoint_id=tmp_path / "b", storage_reader=bridge.UCVolumeReader(tmp_path / "c"))

    assert state == {"step": 1}
    assert not (tmp_path / "a").exists()


def test_one_reader_reads_again_what_is_newest_then(tmp_path: Path) -> None:
    reader = bridge.UCVolumeReader(tmp_path)
    found = []
    for step in range(2):
        save(tmp_path, {"step": step})
        state = {"step": None}
        dcp.load(state, storage_reader=reader)
        found.append((state["step"], reader.attempt))

    assert [step for step, _ in found] == [0, 1]
    assert found[0][1] != found[1][1]


def test_nothing_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path / "missing", {"a": torch.zeros(1)})

    assert isinstance(why(caught), CheckpointNotFoundError)
    assert str(why(caught)).startswith(f"{tmp_path}/missing holds no complete checkpoint: nothing was saved there.")


def test_other_things_that_are_kept_there_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, {"step": 1})
    bridge.save_file({"x": 1}, tmp_path)

    assert load(tmp_path, {"step": 0}) == {"step": 1}
    assert bridge.load_file(tmp_path) == {"x": 1}


def test_places_that_fsspec_reaches_are_written_and_read() -> None:
    place = "memory://checkpoints/run"
    saved = {"a": torch.rand(300), "b": (1, 2), "c": {"d": torch.ones((), dtype=torch.float64)}}
    dcp.save(saved, storage_writer=bridge.UCVolumeWriter(place))
    state = {"a": torch.zeros(300), "b": None, "c": {"d": torch.zeros((), dtype=torch.float64)}}

    dcp.load(state, storage_reader=bridge.UCVolumeReader(place))

    assert torch.equal(state["a"], saved["a"])
    assert (state["b"], state["c"]["d"]) == ((1, 2), 1)


def test_a_place_that_cannot_be_written_is_a_volume_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "file", {"a": 1})

    assert isinstance(why(caught), VolumeError)


def test_saving_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="use_collectives=False saves without a rank that knows"):
        save(tmp_path, {"a": 1}, use_collectives=False)


def test_files_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_FILE_BYTES", 1000)
    saved = {f"t{number}": torch.rand(number * 20) for number in range(20)}
    save(tmp_path, saved)

    state = load(tmp_path, {name: torch.zeros_like(tensor) for name, tensor in saved.items()})

    assert len(list(tmp_path.glob("*/*.safetensors"))) > 10
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())


def test_a_writer_may_be_sent_to_another_process(tmp_path: Path) -> None:
    sent = pickle.loads(pickle.dumps(bridge.UCVolumeWriter(tmp_path, facts={"a": 1}, label="step1")))
    dcp.save({"step": 1}, storage_writer=sent)

    assert "-step1-" in os.fspath(sent.attempt)
    assert load(tmp_path, {"step": 0}) == {"step": 1}


def test_all_of_a_checkpoint_can_be_taken_without_knowing_what_it_holds(tmp_path: Path) -> None:
    save(tmp_path / "ours", {"model": {"w": torch.ones(2)}, "step": 3, "t": [torch.zeros(1), (1, 2)]})
    planner = dcp.default_planner._EmptyStateDictLoadPlanner()
    state: dict[str, Any] = {}

    dcp.state_dict_loader._load_state_dict(
        state, storage_reader=bridge.UCVolumeReader(tmp_path / "ours"), planner=planner, no_dist=True
    )

    assert state["model"]["w"].tolist() == [1, 1]
    assert (state["step"], state["t"][1]) == (3, (1, 2))


def test_a_reader_lets_go_of_what_it_held_when_it_is_dropped(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2)})
    reader = bridge.UCVolumeReader(tmp_path)
    dcp.load({"a": torch.zeros(2)}, storage_reader=reader)
    gone = weakref.ref(reader)

    del reader

    assert gone() is None
