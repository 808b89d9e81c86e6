"""How rows are laid out in shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import ConfigError, SourceError
from bridge.spark.shape import Shape, fitted


def test_sizes_are_sizes() -> None:
    assert Shape.checked("1GiB", 5) == Shape(2**30, 5)
    with pytest.raises(ConfigError, match='shard_bytes is "12 parsecs"; give an integer or a size'):
        Shape.checked("12 parsecs")
    with pytest.raises(ConfigError, match=r"row_group_bytes is 1\.5; give an integer or a size"):
        Shape.checked(5, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="shard_bytes is 0 and row_group_bytes 5; give 1 or more"):
        Shape.checked(0, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_shards": 0}, "num_shards is 0; give a whole number, 1 or more"),
        ({"num_shards": 2.0}, r"num_shards is 2\.0; give"),
        ({"shuffle_at_write": True}, "shuffle_at_write is True; give a seed"),
        ({"shuffle_at_write": -1}, "shuffle_at_write is -1; give a seed"),
        ({"shuffle_at_write": 2**31}, "shuffle_at_write is 2147483648; give a seed"),
        ({"order_by": "a", "shuffle_at_write": 1}, "rows are either sorted or mixed"),
    ],
)
def test_shapes_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shape.checked(**arguments)


def test_numbers_of_numpy_are_numbers() -> None:
    shape = Shape.checked(num_shards=np.int64(2), shuffle_at_write=np.uint8(7))  # type: ignore[arg-type]

    assert shape == Shape(num_shards=2, shuffle_at_write=7)
    assert shape.to_json() == {"num_shards": 2, "row_group_bytes": 64 << 20, "shuffle_at_write": 7}


def test_sort_columns_are_spelled_as_the_table_does() -> None:
    schema = pa.schema([("A", pa.int64()), ("b", pa.string()), ("m", pa.map_(pa.string(), pa.string()))])

    assert Shape.checked(order_by="a").spelled(schema).order_by == ("A",)
    assert Shape.checked(order_by=["B", "a"]).spelled(schema).order_by == ("b", "A")
    with pytest.raises(SourceError, match=r"order_by names 'c', which is not read\.\n  There is: A, b, m\."):
        Shape.checked(order_by="c").spelled(schema)
    with pytest.raises(SourceError, match="order_by names 'm', a map, by which Spark cannot sort"):
        Shape.checked(order_by="m").spelled(schema)


EVEN = [3_000_000] * 100


@pytest.mark.parametrize(
    ("partitions", "shard_rows", "tasks", "most"),
    [
        (EVEN, 3_000_000, 100, 3_000_000),
        (EVEN, 1_000_000, 100, 1_000_000),
        (EVEN, 1_100_000, 100, 1_000_000),
        (EVEN, 6_000_000, 50, 6_000_000),
        (EVEN, 300_000_000, 2, 150_000_000),  # one file, but by two tasks
        ([10] * 1000, 1000, 11, 910),
        ([0, 0], 5, 2, 1),
    ],
)
def test_tasks_and_files_fit_the_partitions(partitions: list[int], shard_rows: int, tasks: int, most: int) -> None:
    assert fitted(partitions, shard_rows) == (tasks, most)


def sizes(partitions: list[int], num_tasks: int, most: int) -> list[int]:
    """Return the rows of each file, as Spark writes them."""
    count, files = len(partitions), []
    for task in range(num_tasks):
        rows = sum(partitions[task * count // num_tasks : (task + 1) * count // num_tasks])
        files += [most] * (rows // most) + [rows % most] * (rows % most > 0)
    return files


@given(st.integers(20, 400), st.integers(1000, 2000), st.integers(200, 40_000), st.integers(0, 5))
def test_files_of_even_partitions_come_near_their_size(count: int, rows: int, shard_rows: int, spread: int) -> None:
    partitions = [rows + (number * 7919) % (spread + 1) for number in range(count)]
    num_tasks, most = fitted(partitions, shard_rows)

    files = sizes(partitions, num_tasks, most)

    assert sum(files) == sum(partitions)
    off = [size for size in files if not 0.8 * shard_rows <= size <= 1.2 * shard_rows]
    assert len(off) <= max(2, 0.05 * len(files)) or shard_rows > rows / 4
    assert 1 <= num_tasks <= count
    assert most >= 1


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=60), st.integers(1, 50_000))
def test_any_partitions_are_laid_out(partitions: list[int], shard_rows: int) -> None:
    num_tasks, most = fitted(partitions, shard_rows)

    assert 1 <= num_tasks <= len(partitions)
    assert most >= 1
    assert sum(sizes(partitions, num_tasks, most)) == sum(partitions)
