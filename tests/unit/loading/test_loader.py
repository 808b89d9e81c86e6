from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import LossyConversionError, SourceNotFoundError
from bridge.loading.loader import DataLoader
from bridge.loading.parquet import RowGroupDataset


class Rows:
    """Row groups in memory, which say how often each was read."""

    digest = "rows"
    is_shared = True
    bytes_read = 0

    def __init__(self, *tables: pa.Table) -> None:
        self.tables = tables
        self.reads: list[int] = []

    @property
    def schema(self) -> pa.Schema:
        return self.tables[0].schema

    @property
    def row_counts(self) -> list[int]:
        return [table.num_rows for table in self.tables]

    def read(self, index: int) -> pa.Table:
        self.reads.append(index)
        return self.tables[index]

    def narrowed(self, columns: Sequence[str]) -> Rows:
        self.tables = tuple(table.select(columns) for table in self.tables)
        return self


def load(rows: Rows, **arguments: Any) -> DataLoader:
    """Return a loader over rows in memory."""
    dataset = RowGroupDataset(lambda: rows, name="rows", **arguments)
    dataset.check()
    return DataLoader(dataset)


def numbered(*counts: int) -> Rows:
    """Return row groups of so many rows, whose column `n` counts through all of them."""
    starts = np.cumsum([0, *counts])
    return Rows(*(pa.table({"n": range(starts[i], starts[i] + count)}) for i, count in enumerate(counts)))


def decoding_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bridge-decode"]


def wait_for_no_thread() -> None:
    deadline = time.monotonic() + 5
    while decoding_threads():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    wait_for_no_thread()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=8),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.integers(1, 60),
)
def test_batches_hold_each_row_once_and_are_full_but_the_last(
    counts: list[int], batch_size: int, shuffle: bool, drop_last: bool, shuffle_window: int
) -> None:
    loader = load(
        numbered(*counts),
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        shuffle_window=shuffle_window,
    )

    sizes = [len(batch["n"]) for batch in loader]
    seen = [n for batch in loader for n in batch["n"].tolist()]

    assert len(sizes) == len(loader)
    assert all(size == batch_size for size in sizes[:-1])
    assert len(set(seen)) == len(seen)
    rows = sum(counts)
    assert len(seen) == (rows // batch_size * batch_size if drop_last else rows)
    if not shuffle:
        assert seen == list(range(len(seen)))


def test_each_row_group_is_read_once_an_epoch() -> None:
    rows = numbered(7, 7, 7)

    list(load(rows, batch_size=5, shuffle=True, shuffle_window=8))

    assert sorted(rows.reads) == [0, 1, 2]


def test_the_epoch_and_the_seed_choose_the_order() -> None:
    loader = load(numbered(50, 50), batch_size=100, shuffle=True)
    first = next(iter(loader))["n"].tolist()
    loader.set_epoch(0)
    again = next(iter(loader))["n"].tolist()
    loader.set_epoch(1)
    second = next(iter(loader))["n"].tolist()
    other = next(iter(load(numbered(50, 50), batch_size=100, shuffle=True, seed=1)))["n"].tolist()

    assert first == again
    assert len({tuple(order) for order in (first, second, other)}) == 3
    assert sorted(second) == sorted(first) == list(range(100))


def test_each_finished_epoch_is_followed_by_the_next() -> None:
    loader = load(numbered(50, 50), batch_size=100, shuffle=True)
    orders = [[batch["n"].tolist() for batch in loader] for _ in range(3)]

    assert len({str(order) for order in orders}) == 3
    loader.set_epoch(1)
    assert [batch["n"].tolist() for batch in loader] == orders[1]
    assert [batch["n"].tolist() for _, batch in zip(range(len(loader)), loader, strict=False)] == orders[2]
    assert next(iter(loader))["n"].tolist() not in [order[0] for order in orders], (
        "a loop that counts steps finishes too"
    )


def test_a_batch_is_a_dict_of_tensors_and_lists() -> None:
    rows = Rows(pa.table({"n": [1, 2], "text": ["a", None], "raw": [b"x", b"y"], "d": [0.5, None]}))

    batch = next(iter(load(rows)))

    assert batch["n"].tolist() == [1, 2]
    assert batch["n"].dtype == torch.int64
    assert batch["text"] == ["a", None]
    assert batch["raw"] == [b"x", b"y"]
    assert torch.isnan(batch["d"]).tolist() == [False, True]


def test_features_and_a_label_make_pairs() -> None:
    rows = Rows(pa.table({"a": [1, 2, 3], "b": [4, 5, None], "y": [0, 1, 2], "text": ["p", "q", "r"]}))

    pairs = list(load(rows, batch_size=2, features=["b", "a"], label="y", dtype="float32"))
    alone = list(load(rows, batch_size=2, features=["a"]))

    assert [x.shape for x, _ in pairs] == [(2, 2), (1, 2)]
    assert pairs[0][0].tolist() == [[4.0, 1.0], [5.0, 2.0]]
    assert torch.isnan(pairs[1][0][0, 0])
    assert [y.tolist() for _, y in pairs] == [[0, 1], [2]]
    assert [x.tolist() for x in alone] == [[[1], [2]], [[3]]]


def test_nulls_in_an_integer_column_are_an_error_that_names_it() -> None:
    rows = Rows(pa.table({"n": [1, None]}))

    with pytest.raises(LossyConversionError, match=r"column 'n' \(int64\) holds 1 nulls"):
        list(load(rows))


def test_a_training_step_may_write_into_a_batch() -> None:
    table = pa.table({"n": np.arange(1000), "d": np.arange(1000.0)})
    before = table.to_pydict()

    for batch in load(Rows(table), batch_size=100):
        batch["n"].add_(1)
    for _, label in load(Rows(table), batch_size=100, features=["d"], label="n", shuffle=True):
        label.zero_()

    assert table.to_pydict() == before


def test_a_shuffled_window_is_moved_once() -> None:
    batches = [batch["n"] for batch in load(numbered(500, 500), batch_size=100, shuffle=True, shuffle_window=1000)]

    assert [batch.data_ptr() - batches[0].data_ptr() for batch in batches] == [800 * step for step in range(10)]


def test_a_loop_that_is_left_ends_its_thread() -> None:
    rows = numbered(*[10] * 100)

    for _ in load(rows, batch_size=10, prefetch_bytes=0):
        break

    wait_for_no_thread()
    assert len(rows.reads) <= 4


def test_no_more_is_read_ahead_than_the_bytes_allow() -> None:
    rows = numbered(*[10] * 100)
    batches = iter(load(rows, batch_size=10, prefetch_bytes=5 * 80))
    next(batches)
    time.sleep(0.3)

    assert 5 <= len(rows.reads) <= 8  # five wait, one is in use, two are read
    batches.close()  # type: ignore[attr-defined]


class Fresh(Rows):
    """Row groups of 1000 rows that are made when they are read, and `alive` as long as they are used."""

    def __init__(self, count: int) -> None:
        super().__init__(*[pa.table({"n": np.arange(1000)})] * count)
        self.made: list[Any] = []

    def read(self, index: int) -> pa.Table:
        values = np.arange(1000) + index
        self.made.append(weakref.ref(values))
        return pa.table({"n": values})

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.made)


def test_what_was_used_is_freed() -> None:
    rows = Fresh(30)

    assert max(rows.alive for _ in load(rows, batch_size=500)) <= 5


@pytest.mark.parametrize("features", [None, ["n"]])
def test_a_shuffled_window_keeps_no_row_groups(features: list[str] | None) -> None:
    rows = Fresh(40)
    batches = iter(load(rows, features=features, shuffle=True, shuffle_window=10_000, prefetch_bytes=1))
    next(batches)

    deadline = time.monotonic() + 5
    while len(rows.made) < 20 or rows.alive > 3:
        assert time.monotonic() < deadline, rows.alive
        time.sleep(0.01)
    batches.close()  # type: ignore[attr-defined]


def test_an_error_while_reading_is_raised_where_rows_are_used() -> None:
    class Broken(Rows):
        def read(self, index: int) -> pa.Table:
            if index == 2:
                raise OSError("the disk is gone")
            return super().read(index)

    batches = iter(load(Broken(*numbered(5, 5, 5).tables), batch_size=5))
    assert [next(batches)["n"][0].item() for _ in range(2)] == [0, 5]
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(batches)

    assert any(entry.name == "read" for entry in caught.traceback)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
@pytest.mark.parametrize("name", ["batch_size", "shuffle_window"])
def test_sizes_are_whole_numbers_from_one(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value!r}; give a whole number, 1 or more"):
        load(numbered(3), **{name: value})


@pytest.mark.parametrize("arguments", [{"label": "n"}, {"dtype": "float32"}])
def test_a_label_goes_with_features(arguments: Any) -> None:
    with pytest.raises(ValueError, match="label and dtype go with features"):
        load(numbered(3), **arguments)


def test_columns_are_looked_up_at_once() -> None:
    with pytest.raises(SourceNotFoundError, match=r"no column 'm' was loaded\."):
        load(numbered(3), features=["m"])
    with pytest.raises(SourceNotFoundError, match=r"no column 'lable' was loaded\. Did you mean \"label\"\?"):
        load(Rows(pa.table({"a": [1], "label": [1]})), features=["a"], label="lable")


@pytest.mark.parametrize("features", [[], "n"])
def test_features_are_a_list_of_names(features: Any) -> None:
    with pytest.raises(ValueError, match=r"features is .*; give a list of column names"):
        load(numbered(3), features=features)


def test_no_rows_no_batches() -> None:
    assert list(load(numbered(0), batch_size=3)) == []
    assert list(load(numbered(0, 0), batch_size=3, shuffle=True)) == []
    assert len(load(numbered(0))) == 0
