from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import bridge
from bridge.errors import LossyConversionError

ROWS = 61
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning"),  # Dataset.sort's
]
Made = Callable[[], Any]


def numbered(rows: int = ROWS, *, chunk_rows: int = 7) -> datasets.Dataset:
    """Return rows in many record batches, as files have them."""
    table = pa.table(
        {
            "n": np.arange(rows),
            "x": np.arange(rows, dtype=np.float32) / 2,
            "small": (np.arange(rows) % 100).astype(np.int8),
            "even": np.arange(rows) % 2 == 0,
            "text": [f"é{n}" * (n % 3) for n in range(rows)],
            "v": [[n, n + 1] for n in range(rows)],
            "holes": [None if n % 5 == 0 else float(n) for n in range(rows)],
        }
    )
    return datasets.Dataset(pa.Table.from_batches(table.to_batches(max_chunksize=chunk_rows)))


def numbers(batches: Any) -> list[list[int]]:
    return [batch["n"].tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return [n for batch in numbers(batches) for n in batch]


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def assert_resumes_anywhere(make: Made) -> None:
    """Save after each batch, go on in a new loader, and see the rest of the epoch and the whole next one."""
    loader = make()
    loader.set_epoch(1)
    epoch, after = numbers(loader), numbers(loader)
    assert epoch
    for taken in range(len(epoch) + 1):
        first = make()
        first.set_epoch(1)
        batches = iter(first)
        assert numbers(next(batches) for _ in range(taken)) == epoch[:taken]
        state = json.loads(json.dumps(first.state_dict()))
        second = make()
        second.load_state_dict(state)
        assert numbers(second) == epoch[taken:], taken
        assert numbers(second) == after, taken


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_row_comes_once_in_equal_steps(
    monkeypatch: pytest.MonkeyPatch, world_size: int, num_workers: int, shuffle: bool, drop_last: bool
) -> None:
    dataset = numbered()
    seen: Counter[int] = Counter()
    shapes = set()
    for rank in range(world_size):
        as_rank(monkeypatch, rank, world_size)
        loader = bridge.DataLoader(
            dataset, batch_size=8, shuffle=shuffle, drop_last=drop_last, num_workers=num_workers, seed=3
        )
        batches = numbers(loader)
        assert len(batches) == len(loader)
        shapes.add(tuple(map(len, batches)))
        for step, batch in enumerate(batches):
            seen.update(batch[: loader.num_valid(step)])
    assert len(shapes) == 1
    assert set(seen.values()) == {1}
    assert len(seen) == (ROWS // (8 * world_size) * 8 * world_size if drop_last else ROWS)


def test_more_ranks_than_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        found.append(numbers(bridge.DataLoader(numbered(2), batch_size=4)))
    assert found == [[[0]], [[1]], [[1]]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_resume_anywhere(shuffle: bool, drop_last: bool) -> None:
    dataset = numbered()
    assert_resumes_anywhere(
        lambda: bridge.DataLoader(dataset, batch_size=8, shuffle=shuffle, drop_last=drop_last, seed=2)
    )


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_an_epoch_goes_on_in_another_world(monkeypatch: pytest.MonkeyPatch, before: int, after: int) -> None:
    dataset = numbered()
    seen: Counter[int] = Counter()
    state: dict[str, Any] = {}
    for rank in range(before):
        as_rank(monkeypatch, rank, before)
        loader = bridge.DataLoader(dataset, batch_size=4, shuffle=True)
        batches = iter(loader)
        for _ in range(2):
            seen.update(next(batches)["n"].tolist())
        state = loader.state_dict()
    for rank in range(after):
        as_rank(monkeypatch, rank, after)
        loader = bridge.DataLoader(dataset, batch_size=3, shuffle=True, num_workers=2)
        loader.load_state_dict(state)
        for step, batch in enumerate(numbers(loader)):
            seen.update(batch[: loader.num_valid(step)])
    assert seen == Counter(range(ROWS))


def test_the_epoch_and_the_seed_choose_the_order() -> None:
    dataset = numbered()
    orders = []
    for seed in (0, 1):
        loader = bridge.DataLoader(dataset, batch_size=8, shuffle=True, seed=seed)
        orders += [flat(loader), flat(loader)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(ROWS)) for order in orders)


def _columns_joined(dataset: datasets.Dataset) -> datasets.Dataset:
    other = datasets.Dataset.from_dict({"y": list(range(ROWS))})
    return datasets.concatenate_datasets([dataset, other], axis=1)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.select(range(5, 50)),
        lambda data: data.select([3, 1, 50, 1]),
        lambda data: data.filter(lambda row: row["n"] % 3 == 0),
        lambda data: data.shuffle(seed=4),
        lambda data: data.sort("n", reverse=True),
        lambda data: data.shuffle(seed=4).select(range(40)).shard(2, 1),
        lambda data: datasets.concatenate_datasets([data, data.select([2, 0])]),
        _columns_joined,
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_are_those_of_the_dataset(change: Callable[[Any], Any], shuffle: bool) -> None:
    dataset = change(numbered())
    batches = list(bridge.DataLoader(dataset, batch_size=6, shuffle=shuffle))
    rows = {name: [value for batch in batches for value in batch[name]] for name in dataset.column_names}
    expected = dataset.to_dict()
    if not shuffle:
        assert [int(n) for n in rows["n"]] == expected["n"]
    assert sorted(int(n) for n in rows["n"]) == sorted(expected["n"])
    for at, n in enumerate(map(int, rows["n"])):
        assert (rows["x"][at], rows["text"][at], rows["v"][at].tolist()) == (n / 2, f"é{n}" * (n % 3), [n, n + 1])
        assert (bool(rows["even"][at]), int(rows["small"][at])) == (n % 2 == 0, n % 100)
        assert torch.isnan(rows["holes"][at]) if n % 5 == 0 else rows["holes"][at] == n
        assert "y" not in rows or int(rows["y"][at]) == n


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loop_may_write_into_a_batch(tmp_path: Path, on_disk: bool, shuffle: bool) -> None:
    dataset = numbered(chunk_rows=ROWS)
    if on_disk:
        dataset.save_to_disk(tmp_path / "saved")
        dataset = datasets.load_from_disk(tmp_path / "saved")
    before = dataset.to_dict()
    for source in (dataset, dataset.to_iterable_dataset()):
        for batch in bridge.DataLoader(source, batch_size=8, shuffle=shuffle and source is dataset):
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
    np.testing.assert_equal(dataset.to_dict(), before)


def test_columns_whose_chunks_lie_anywhere_in_memory() -> None:
    memory = pa.py_buffer(np.arange(2000, dtype=np.uint8))
    kept = memory.slice(0, 160), memory.slice(501, 160)  # the second at no multiple of 8
    chunks = [pa.Array.from_buffers(pa.int64(), 20, [None, buffer]) for buffer in kept]
    dataset = datasets.Dataset(pa.table({"n": pa.chunked_array(chunks)}))
    batches = list(bridge.DataLoader(dataset, batch_size=8, shuffle=True))

    assert sorted(flat(batches)) == sorted(n for chunk in chunks for n in chunk.to_pylist())


def test_types_are_those_of_the_columns() -> None:
    batch = next(iter(bridge.DataLoader(numbered(), batch_size=4, shuffle=True)))
    kinds = {name: value.dtype for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert kinds == {
        "n": torch.int64, "x": torch.float32, "small": torch.int8, "even": torch.bool, "v": torch.int64,
        "holes": torch.float64,
    }  # fmt: skip
    assert isinstance(batch["text"], list)


@pytest.mark.parametrize("shuffle", [False, True])
def test_extension_types_and_large_types(shuffle: bool) -> None:
    features = datasets.Features(
        {"n": datasets.Value("int64"), "m": datasets.Array2D((2, 2), "float32"), "t": datasets.Value("large_string")}
    )
    rows = {"n": [0, 1, 2], "m": [[[n, 1], [2, 3]] for n in range(3)], "t": ["a", "b", "c"]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    (batch,) = bridge.DataLoader(dataset, batch_size=3, shuffle=shuffle)
    assert batch["m"].shape == (3, 2, 2)
    assert batch["m"][:, 0, 0].tolist() == batch["n"].tolist()
    assert batch["t"] == ["abc"[n] for n in batch["n"].tolist()]


def test_what_is_no_tensor_is_an_error_that_says_what_helps() -> None:
    dataset = datasets.Dataset.from_dict({"v": [[1], [1, 2]]})
    with pytest.raises(LossyConversionError, match="'v'") as raised:
        next(iter(bridge.DataLoader(dataset, batch_size=2)))
    assert "collate_fn" in "".join(raised.value.__notes__)
    padded = bridge.DataLoader(dataset, batch_size=2, collate_fn=lambda rows: [len(row["v"]) for row in rows])
    assert list(padded) == [[1, 2]]


def test_formats_are_respected() -> None:
    dataset = numbered()
    assert isinstance(next(iter(bridge.DataLoader(dataset.with_format("numpy"), batch_size=3)))["n"], np.ndarray)
    assert isinstance(next(iter(bridge.DataLoader(dataset.with_format("arrow"), batch_size=3))), pa.Table)
    chosen = bridge.DataLoader(dataset.with_format(None, columns=["n", "text"]), batch_size=3, shuffle=True)
    assert set(next(iter(chosen))) == {"n", "text"}
    calls = []

    def doubled(rows: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(rows["n"]))
        return {"n": torch.tensor(rows["n"]) * 2}

    assert flat(bridge.DataLoader(dataset.with_transform(doubled), batch_size=8)) == list(range(0, 2 * ROWS, 2))
    assert calls == [8] * 7 + [5]


def test_a_collate_fn_gets_rows() -> None:
    loader = bridge.DataLoader(numbered(), batch_size=2, collate_fn=lambda rows: [row["text"] for row in rows])
    assert list(loader)[1] == ["é2é2", ""]


def samplers(dataset: Any) -> dict[str, Made]:
    return {
        "sequential": lambda: {"sampler": SequentialSampler(dataset)},
        "list": lambda: {"sampler": [5, 3, -1, 3, 0]},
        "random": lambda: {"sampler": RandomSampler(dataset)},
        "replacing": lambda: {"sampler": RandomSampler(dataset, replacement=True, num_samples=90)},
        "subset": lambda: {"sampler": SubsetRandomSampler(range(4, 40))},
        "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * ROWS, 30)},
        "distributed": lambda: {"sampler": DistributedSampler(dataset, num_replicas=3, rank=1)},
        "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(dataset), 7, True)},
        "given": lambda: {"batch_sampler": [[4, 5, 6], [60], [2, 0]]},
    }


@pytest.mark.parametrize("kind", sorted(samplers(range(ROWS))))
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samplers_resume_anywhere(kind: str, num_workers: int) -> None:
    dataset = numbered(chunk_rows=20)
    make = samplers(dataset)[kind]
    size = {} if "batch_sampler" in make() else {"batch_size": 16}
    assert_resumes_anywhere(lambda: bridge.DataLoader(dataset, num_workers=num_workers, **size, **make()))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["sequential", "list", "distributed"])
def test_samplers_choose_as_under_torch(kind: str, drop_last: bool) -> None:
    dataset, make = numbered(), samplers(range(ROWS))[kind]
    ours = bridge.DataLoader(dataset, batch_size=4, drop_last=drop_last, **make())
    rows = dataset.select_columns(["n"])
    theirs = torch.utils.data.DataLoader(rows, batch_size=4, drop_last=drop_last, **make())
    assert numbers(ours) == numbers(theirs)
    assert len(ours) == len(theirs)


def test_a_random_sampler_gives_each_row_once_and_stays_as_it_was() -> None:
    dataset = numbered()
    sampler = RandomSampler(dataset)
    first, second = (bridge.DataLoader(dataset, batch_size=8, sampler=sampler) for _ in range(2))
    epochs = [flat(first), flat(first)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 2
    assert epochs[0] != epochs[1]
    assert flat(second) == epochs[0]
    assert sampler.generator is None


class Endless:
    """A batch sampler that does not know how many batches it has."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1], [2, 3], [4]])


def test_a_sampler_without_a_length() -> None:
    dataset = numbered()
    assert_resumes_anywhere(lambda: bridge.DataLoader(dataset, batch_sampler=Endless()))
    with pytest.raises(TypeError, match="len"):
        len(bridge.DataLoader(dataset, batch_sampler=Endless()))


def test_samplers_that_may_differ_between_workers_are_refused() -> None:
    dataset = numbered()
    seeded = RandomSampler(dataset, generator=torch.Generator().manual_seed(1))
    for arguments in ({"batch_sampler": Endless()}, {"sampler": seeded}):
        with pytest.raises(ValueError, match="may choose other rows in each worker"):
            iter(bridge.DataLoader(dataset, num_workers=2, **arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampler": [1], "shuffle": True}, "sampler excludes shuffle"),
        ({"batch_sampler": [[1]], "batch_size": 2}, "batch_sampler excludes"),
        ({"batch_sampler": [[1]], "shuffle": True}, "batch_sampler excludes"),
        ({"batch_sampler": [[1]], "sampler": [1]}, "batch_sampler excludes"),
        ({"batch_sampler": [[1]], "drop_last": True}, "batch_sampler excludes"),
    ],
)
def test_arguments_that_exclude_each_other(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bridge.DataLoader(numbered(), **arguments)


def test_rows_that_are_not_there_are_refused() -> None:
    for indices in ([ROWS - 1, ROWS], [-ROWS - 1]):
        with pytest.raises(IndexError, match="61"):
            list(bridge.DataLoader(numbered(), batch_size=2, sampler=indices))


def test_num_valid_is_not_known_where_others_choose() -> None:
    for loader in (
        bridge.DataLoader(numbered(), sampler=[1]),
        bridge.DataLoader(numbered().to_iterable_dataset()),
    ):
        with pytest.raises(TypeError):
            loader.num_valid(0)


def shuffled_stream(seed: int = 5) -> datasets.IterableDataset:
    return numbered().to_iterable_dataset(num_shards=4).shuffle(seed=seed, buffer_size=20)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_streams_resume_anywhere(shuffle: bool, drop_last: bool) -> None:
    def make() -> bridge.DataLoader:
        dataset = shuffled_stream() if shuffle else numbered().to_iterable_dataset()
        return bridge.DataLoader(dataset, batch_size=8, drop_last=drop_last)

    assert_resumes_anywhere(make)


def test_a_stream_gives_each_row_once_in_another_order_each_epoch() -> None:
    loader = bridge.DataLoader(shuffled_stream(), batch_size=8)
    epochs = [flat(loader), flat(loader)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 2
    assert epochs[0] != epochs[1]
    # their own loop gives the same rows
    assert epochs[0] == [row["n"] for row in shuffled_stream()]


def test_a_stream_of_python_rows_its_formats_and_a_collate_fn() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        for n in range(10):
            yield {"n": n, "t": str(n)}

    dataset = datasets.IterableDataset.from_generator(rows)
    assert numbers(bridge.DataLoader(dataset, batch_size=4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert isinstance(next(iter(bridge.DataLoader(dataset.with_format("numpy"), batch_size=3)))["n"], np.ndarray)
    for drop_last in (False, True):
        assert_resumes_anywhere(
            lambda drop_last=drop_last: bridge.DataLoader(  # type: ignore[misc]
                dataset,
                batch_size=4,
                drop_last=drop_last,
                collate_fn=lambda rows: {"n": torch.tensor([row["n"] for row in rows])},
            )
        )


def test_a_stream_refuses_what_would_repeat_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = numbered().to_iterable_dataset(num_shards=4)
    with pytest.raises(ValueError, match="num_workers=0"):
        iter(bridge.DataLoader(dataset, num_workers=2))
    seen: list[int] = []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        with pytest.raises(ValueError, match="split_dataset_by_node"):
            iter(bridge.DataLoader(dataset))
        seen += flat(bridge.DataLoader(split_dataset_by_node(dataset, rank, 2), batch_size=8))
    assert sorted(seen) == list(range(ROWS))


def test_a_stream_refuses_what_it_cannot_do() -> None:
    dataset = numbered().to_iterable_dataset()
    for arguments in ({"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}):
        with pytest.raises(ValueError, match="iterable dataset takes no"):
            bridge.DataLoader(dataset, **arguments)
    loader = bridge.DataLoader(dataset, batch_size=8)
    next(iter(loader))
    with pytest.raises(TypeError, match="how many rows"):
        len(loader)
    other = bridge.DataLoader(dataset, batch_size=5)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="batch_size of then"):
        iter(other)


def test_a_state_of_other_data_is_refused() -> None:
    pairs = [(numbered(), numbered().shuffle(seed=1)), (shuffled_stream(1), shuffled_stream(2))]
    for one, other in pairs:
        loader = bridge.DataLoader(one, batch_size=8)
        next(iter(loader))
        second = bridge.DataLoader(other, batch_size=8)
        second.load_state_dict(loader.state_dict())
        with pytest.raises(ValueError, match="over other data"):
            iter(second)


def test_workers_take_any_fingerprint() -> None:
    dataset = numbered().map(lambda row: {"n": row["n"]}, new_fingerprint="my own")
    assert sorted(flat(bridge.DataLoader(dataset, batch_size=8, num_workers=2))) == list(range(ROWS))


@pytest.mark.parametrize("arguments", [{"shuffle": True}, {"sampler": RandomSampler(range(ROWS))}])
def test_workers_may_be_spawned(arguments: dict[str, Any]) -> None:
    loader = bridge.DataLoader(numbered(), batch_size=8, num_workers=1, multiprocessing_context="spawn", **arguments)
    assert sorted(flat(loader)) == list(range(ROWS))


def test_a_module_of_somebody_elses_is_not_mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
    with pytest.raises(TypeError, match="neither a ParquetDataset"):
        bridge.DataLoader([1, 2])


@pytest.mark.parametrize("is_stream", [False, True])
def test_images_are_decoded(is_stream: bool) -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    features = datasets.Features({"n": datasets.Value("int64"), "image": datasets.Image()})
    images = [np.full((2, 3, 3), n, np.uint8) for n in range(5)]
    dataset = datasets.Dataset.from_dict({"n": range(5), "image": images}, features=features)
    source = dataset.to_iterable_dataset() if is_stream else dataset

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"n": torch.tensor([row["n"] for row in rows]), "image": [np.asarray(row["image"]) for row in rows]}

    for batch in bridge.DataLoader(source, batch_size=2, collate_fn=collate):
        assert [int(image[0, 0, 0]) for image in batch["image"]] == batch["n"].tolist()


def test_the_format_torch_gives_what_it_gives_row_by_row() -> None:
    count = 40
    columns = {
        **{
            str(kind): np.arange(count).astype(kind) for kind in ("int8", "int32", "int64", "uint8", "uint16", "uint32")
        },
        **{str(kind): np.arange(count).astype(kind) for kind in ("float16", "float32", "float64", "bool")},
        "text": [f"row {index}" for index in range(count)],
        "vector": [[index, index + 0.5] for index in range(count)],
        "fixed": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * count, dtype=np.int32)), 2),
        "ragged": [[index] * (1 + index % 2) for index in range(count)],
        "none": [index if index % 7 else None for index in range(count)],
        "large": np.arange(count).astype("uint64"),
    }
    dataset = datasets.Dataset(pa.table(columns)).with_format("torch")
    for names in (list(columns)[:-3], [*list(columns)[:-3], "ragged"], ["int8", "none"], ["large"]):
        chosen = dataset.select_columns(names)
        for shown in (chosen, chosen.select(range(3, 30)), dataset.with_format("torch", columns=names)):
            expected = shown[[5, 1, 2]]
            found = next(iter(bridge.DataLoader(shown, batch_sampler=[[5, 1, 2]])))
            assert list(found) == list(expected)
            for name, value in expected.items():
                assert type(found[name]) is type(value), name
                if isinstance(value, torch.Tensor):
                    assert found[name].dtype == value.dtype, name
                    assert torch.equal(found[name], value), name
                else:
                    assert all(np.array_equal(a, b) for a, b in zip(found[name], value, strict=True)), name
    doubled = dataset.with_format("torch", columns=["int8"], dtype=torch.float64)
    assert next(iter(bridge.DataLoader(doubled, batch_size=2)))["int8"].dtype == torch.float64
