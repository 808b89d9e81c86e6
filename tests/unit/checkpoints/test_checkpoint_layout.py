"""What lies in the folder of a checkpoint: files that stock safetensors opens, and an index that is checked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file as load_safetensors

import bridge
from bridge.checkpoints import layout
from bridge.checkpoints.layout import Entry, File, Index, Part, Stored, file_order, make_header, part_name
from bridge.errors import CheckpointError, CorruptFileError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# of those that stock safetensors knows, those that its torch side gives back
KNOWN = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64,
]  # fmt: skip
OTHERS = [torch.complex128, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.complex32]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    top = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def saved_files(folder: Path, state: dict[str, Any]) -> list[Path]:
    dcp.save(state, storage_writer=bridge.UCVolumeWriter(folder))
    return sorted(folder.glob("*/*.safetensors"))


# files


def test_stock_safetensors_opens_what_is_written_and_gives_the_same_tensors(tmp_path: Path) -> None:
    state = {
        f"{dtype}.{name}": random_tensor(dtype, shape, seed)
        for seed, dtype in enumerate(KNOWN)
        for name, shape in {"matrix": (3, 5), "scalar": (), "empty": (2, 0, 3)}.items()
    }

    (file,) = saved_files(tmp_path, {**state, "step": 3, "betas": (0.9, 0.99)})

    found = load_safetensors(file)
    assert found.keys() == state.keys() | {"betas"}
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def test_types_that_it_does_not_know_are_bytes_to_it(tmp_path: Path) -> None:
    state = {str(dtype): random_tensor(dtype, (3, 5)) for dtype in OTHERS}

    (file,) = saved_files(tmp_path, state)

    found = load_safetensors(file)
    for name, tensor in state.items():
        assert raw(found[name]) == raw(tensor)


def test_it_says_of_what_format_it_is(tmp_path: Path) -> None:
    (file,) = saved_files(tmp_path, {"a": torch.ones(2)})

    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "bridge": "1"}


@pytest.mark.parametrize(
    "name", ["__metadata__", "a\ud800", "a\ud800\udc00", "", "é", "\x00", "\\ud800", 'a"b', "rank-00000.0.safetensors"]
)
def test_names_of_any_text_are_written(tmp_path: Path, name: str) -> None:
    state = {name: torch.rand(()), "w": torch.rand(3), f"{name}.w": torch.rand(2)}

    (file,) = saved_files(tmp_path, state)

    found = load_safetensors(file).values()
    assert sorted(map(raw, found)) == sorted(map(raw, state.values()))
    blank = {name: torch.zeros(()), "w": torch.zeros(3), f"{name}.w": torch.zeros(2)}
    dcp.load(blank, storage_reader=bridge.UCVolumeReader(tmp_path))
    assert all(torch.equal(blank[key], state[key]) for key in state)


def test_names_that_stock_safetensors_takes_for_one_stay_two() -> None:
    entries = [Entry(name, torch.uint8, (1,)) for name in ("\ud800", "\\ud800", "__metadata__")]

    header, ranges = make_header(entries)

    names = json.loads(header[8:]).keys()
    assert names == {"__metadata__", "\\ud800", "\\ud800 (2)", "__metadata__ (2)"}
    assert len(set(ranges)) == 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(KNOWN + OTHERS), st.lists(st.integers(0, 4), max_size=3).map(tuple)), max_size=12
    )
)
def test_every_tensor_starts_where_its_type_may_start(kinds: list[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    entries = [Entry(f"t{number}", dtype, shape) for number, (dtype, shape) in enumerate(kinds)]
    entries.sort(key=file_order)

    header, ranges = make_header(entries)

    assert len(header) % 64 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    end = len(header)
    for entry, (start, stop) in zip(entries, ranges, strict=True):
        assert (start, stop - start) == (end, entry.num_bytes)
        assert start % entry.dtype.itemsize == 0
        end = stop


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4).map(lambda number: 64 * number), st.integers(0, 40), st.data())
def test_the_blocks_of_a_range_are_those_that_hold_it_and_no_others(
    block_bytes: int, size: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCK_BYTES", block_bytes)
        file = File("f", 128 + size * 8, 128, ())
        start = 128 + 8 * data.draw(st.integers(0, size))
        stop = data.draw(st.integers(start, file.num_bytes))

        numbers = file.blocks(start, stop)

        covered = [position for number in numbers for position in range(*file.block(number))]
        assert set(range(start, stop)) <= set(covered)
        assert len(numbers) <= (stop - start) // block_bytes + 2 * (start != stop)
        ends = [file.block(number) for number in range(1 + -(-(size * 8) // block_bytes))]
        assert [position for block in ends for position in range(*block)] == list(range(file.num_bytes))


def test_a_part_of_a_tensor_is_called_by_its_box() -> None:
    assert part_name("w", ((0, 4), (0, 3)), (4, 3)) == "w"
    assert part_name("w", (), ()) == "w"
    assert part_name("w", ((0, 4), (1, 3)), (4, 3)) == "w[0:4, 1:3]"


# the index


names = st.text(st.characters(exclude_categories=()), max_size=4)
dtypes = st.sampled_from([torch.float32, torch.bool, torch.complex128])


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    tensors, end = {}, 64
    for name in draw(st.lists(names, unique=True, max_size=4)):
        dtype, shape = draw(dtypes), tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
        stop = end + math.prod(shape) * dtype.itemsize
        tensors[name] = Stored(dtype, shape, (Part("f", end, stop, tuple((0, size) for size in shape)),))
        end = stop
    pickles = {name: Part("f", 64, end) for name in draw(st.lists(names, unique=True, max_size=2))}
    values = {name: draw(st.integers() | names | st.none()) for name in draw(st.lists(names, unique=True, max_size=2))}
    paths = draw(st.none() | st.dictionaries(names, st.lists(names | st.integers(0, 9), min_size=1), max_size=2))
    return Index(tensors, values, pickles, paths, (File("f", end, 64, ("0", "1")[: 1 + (end > 64)]),))


@settings(max_examples=200, deadline=None)
@given(indexes())
def test_an_index_is_read_as_it_was_written(index: Index) -> None:
    assert Index.decode(index.encode(), "here") == index


def content(**changed: Any) -> bytes:
    whole = {
        "format": 1,
        "tensors": {"a": ["float32", [2], [["f", 64, 72, [[0, 2]]]]]},
        "values": {},
        "pickles": {"p": ["f", 72, 80, []]},
        "paths": None,
        "files": [["f", 80, 64, ["0", "1"]]],
    }
    return json.dumps({**whole, **changed}).encode()


def test_what_the_next_test_changes_is_an_index() -> None:
    assert Index.decode(content(), "here").num_bytes == 80


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        content(tensors={"a": ["load", [2], [["f", 64, 72, [[0, 2]]]]]}),
        content(tensors={"a": ["nothing", [2], [["f", 64, 72, [[0, 2]]]]]}),
        content(tensors={"a": ["float32", [2], [["g", 64, 72, [[0, 2]]]]]}),
        content(tensors={"a": ["float32", [2], [["f", 64, 84, [[0, 2]]]]]}),
        content(tensors={"a": ["float32", [2], [["f", 0, 8, [[0, 2]]]]]}),
        content(tensors={"a": ["float32", [2], [["f", 64, 68, [[0, 2]]]]]}),
        content(tensors={"a": ["float32", [2], [["f", 72, 64, [[0, -2]]]]]}),
        content(tensors={"a": ["float32", [2], [["f", "64", "72", [[0, 2]]]]]}),
        content(pickles={"p": ["f", 72, 81, []]}),
        content(pickles={"p": ["f", 72]}),
        content(files=[["f", 80, 64, ["0"]]]),
        content(files=[["../f", 80, 64, ["0", "1"]]]),
        content(files=[]),
    ],
    ids=range(18),
)
def test_an_index_that_cannot_be_is_refused_whatever_its_digest(data: bytes) -> None:
    with pytest.raises(CorruptFileError, match="here is no index: "):
        Index.decode(data, "here")


def test_an_index_of_another_format_says_what_to_do() -> None:
    with pytest.raises(
        CheckpointError, match=r"here has format 2; this version reads 1\.\n  Load it with a newer bridge"
    ):
        Index.decode(content(format=2), "here")
