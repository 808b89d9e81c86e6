"""The shapes that an export may have: as many shards as asked for, sorted or mixed as a whole, each row once."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import bridge
from bridge.errors import BridgeError
from tests.engines.conftest import EngineUnderTest

NUM_ROWS = 6000
WORDS = "'z', 'é', 'a', 'Z', '日本', 'ä', '😀', '', 'e', 'aa'"
ROWS = f"""
    SELECT id, IF(id % 10 = 0, NULL, id * 7919 % 1000) AS n, id % 10 AS tenth,
           IF(id % 7 = 0, NULL, element_at(array({WORDS}), CAST(id % 10 + 1 AS INT))) AS word,
           named_struct('a', id, 'b', IF(id % 3 = 0, NULL, 'é')) AS pair
    FROM range(0, {NUM_ROWS}, 1, 2)
"""
SHAPES: list[dict[str, Any]] = [
    {},
    {"num_shards": 5},
    {"shard_bytes": "8KiB", "row_group_bytes": "16KiB"},
    {"order_by": ["tenth", "n"], "shard_bytes": "8KiB", "row_group_bytes": "16KiB"},
    {"shuffle_at_write": 3, "num_shards": 4},
    {"shuffle_at_write": 3, "shard_bytes": "8KiB", "row_group_bytes": "16KiB"},
]


@pytest.fixture(scope="module")
def _saved() -> dict[str, str]:
    """The table of each engine."""
    return {}


@pytest.fixture
def name(engine: EngineUnderTest, _saved: dict[str, str]) -> str:
    """A Delta table of ROWS."""
    if engine.name not in _saved:
        _saved[engine.name] = engine.save(engine.spark.sql(ROWS))
    return _saved[engine.name]


@pytest.fixture
def export(engine: EngineUnderTest, tmp_path: Path) -> Callable[..., bridge.Table]:
    """Return what exports through the engine."""
    return lambda source, **arguments: bridge.export_table(source, tmp_path, spark=engine.spark, **arguments)


def rows_of_shards(table: bridge.Table) -> list[int]:
    assert table.manifest is not None
    rows = [shard.num_rows for shard in table.manifest.shards]
    assert rows == [pq.read_metadata(file).num_rows for file in table.files]
    return rows


# --- each row once


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_row_is_written_once(
    engine: EngineUnderTest, name: str, export: Callable[..., bridge.Table], shape: dict[str, Any]
) -> None:
    table = export(name, where="id >= 1000", policies={"n": bridge.drop_nulls(), "pair": bridge.to_json()}, **shape)

    rows = table.to_arrow().sort_by("id")
    kept = [number for number in range(1000, NUM_ROWS) if number % 10]
    assert rows["id"].to_pylist() == kept
    assert rows["n"].to_pylist() == [number * 7919 % 1000 for number in kept]
    pairs = [json.loads(pair) for pair in rows["pair"].to_pylist()]
    # Sail leaves out fields that are NULL
    assert [(pair["a"], pair.get("b")) for pair in pairs] == [(id_, None if id_ % 3 == 0 else "é") for id_ in kept]
    assert sum(rows_of_shards(table)) == table.num_rows == len(kept)
    if "num_shards" in shape:
        assert len(table.files) == shape["num_shards"]


@pytest.mark.parametrize("shape", [{}, {"num_shards": 3}, {"order_by": "n"}, {"shuffle_at_write": 0}], ids=str)
def test_a_limit_is_a_limit_in_every_shape(
    engine: EngineUnderTest, name: str, export: Callable[..., bridge.Table], shape: dict[str, Any]
) -> None:
    table = export(name, limit=1234, **shape)

    ids = table.to_arrow()["id"].to_pylist()
    assert len(ids) == len(set(ids)) == sum(rows_of_shards(table)) == 1234
    assert set(ids) <= set(range(NUM_ROWS))


# --- as many shards as asked for


def test_there_are_as_many_shards_as_asked_for(
    engine: EngineUnderTest, name: str, export: Callable[..., bridge.Table]
) -> None:
    num_shards = 11  # 50 rows in shards of one length, rounded up, would be 10
    view = f"{name}_whole"
    engine.spark.sql(f"CREATE OR REPLACE VIEW {view} AS SELECT id FROM {name}")
    frame = engine.spark.table(name).groupBy("id").count()

    tables = [
        export(name, num_shards=num_shards),
        export(name, where="id < 50", num_shards=num_shards),
        export(view, num_shards=num_shards),
        export(frame, num_shards=num_shards),
        export(name, order_by="id", num_shards=num_shards),
        export(name, shuffle_at_write=1, num_shards=num_shards),
    ]

    assert [len(table.files) for table in tables] == [num_shards] * 6
    for table in (tables[0], tables[3]):
        rows = rows_of_shards(table)
        assert sum(rows) == NUM_ROWS
        assert max(rows) < 2 * NUM_ROWS / num_shards


def test_fewer_rows_than_shards_are_fewer_shards(
    engine: EngineUnderTest, name: str, export: Callable[..., bridge.Table]
) -> None:
    few = export(name, where="id < 3", num_shards=8)
    none = export(name, where="id < 0", num_shards=8)

    assert few.to_arrow().sort_by("id")["id"].to_pylist() == [0, 1, 2]
    assert 1 <= len(few.files) <= 8
    assert (none.num_rows, len(none.files)) == (0, 1)


# --- sorted


def sorting_key(row: tuple[Any, ...]) -> list[tuple[bool, Any]]:
    """NULL first; text by the bytes of UTF-8."""
    return [(value is not None, value.encode() if isinstance(value, str) else value or 0) for value in row]


@pytest.mark.parametrize(
    ("order_by", "size"),
    [
        ("word", {"num_shards": 4}),
        (["n"], {"shard_bytes": "8KiB", "row_group_bytes": "16KiB"}),
        (["TENTH", "word"], {"num_shards": 4}),
    ],
    ids=str,
)
def test_rows_are_sorted_through_the_files(
    engine: EngineUnderTest, name: str, export: Callable[..., bridge.Table], order_by: Any, size: dict[str, Any]
) -> None:
    table = export(name, order_by=order_by, **size)

    names = [each.lower() for each in ([order_by] if isinstance(order_by, str) else order_by)]
    rows = table.to_arrow()
    keys = list(map(sorting_key, zip(*(rows[each].to_pylist() for each in names), strict=True)))
    assert all(before <= after for before, after in itertools.pairwise(keys))
    assert sorted(rows["id"].to_pylist()) == list(range(NUM_ROWS))
    assert len(table.files) > 1


@pytest.mark.parametrize("size", [{"num_shards": 2}, {"shard_bytes": "8KiB"}], ids=str)
def test_rows_may_be_sorted_by_an_array(
    engine: EngineUnderTest, export: Callable[..., bridge.Table], size: dict[str, Any]
) -> None:
    frame = engine.spark.range(0, 1000, 1, 2).selectExpr("id", "array(id % 3, id % 2) AS pair")

    rows = export(frame, order_by="pair", **size).to_arrow()

    assert rows["pair"].to_pylist() == sorted(rows["pair"].to_pylist())
    assert sorted(rows["id"].to_pylist()) == list(range(1000))


@pytest.mark.parametrize("size", [{"num_shards": 2}, {"shard_bytes": "8KiB"}], ids=str)
def test_what_cannot_be_sorted_by_is_told(apache: EngineUnderTest, tmp_path: Path, size: dict[str, Any]) -> None:
    frame = apache.spark.range(10).selectExpr("map('k', id) AS pairs")

    with pytest.raises(BridgeError, match="pairs"):
        bridge.export_table(frame, tmp_path, order_by="pairs", spark=apache.spark, **size)


# --- mixed


def test_rows_are_mixed_within_and_across_shards(
    engine: EngineUnderTest, name: str, export: Callable[..., bridge.Table]
) -> None:
    table = export(name, columns=["id"], shuffle_at_write=3, num_shards=4)

    ids = table.to_arrow()["id"].to_numpy()
    rows = rows_of_shards(table)
    assert sorted(ids) == list(range(NUM_ROWS))
    for part in (ids, *np.split(ids, np.cumsum(rows)[:-1])):
        deviation = 1 / np.sqrt(len(part))
        assert abs(np.corrcoef(np.arange(len(part)), part)[0, 1]) < 4 * deviation
        # what was beside it is not
        assert abs(np.corrcoef(part[1:], part[:-1])[0, 1]) < 4 * deviation
        assert abs(part.mean() / NUM_ROWS - 0.5) < 4 * deviation * np.sqrt(1 / 12)
    other = export(name, columns=["id"], shuffle_at_write=4, num_shards=4).to_arrow()["id"].to_numpy()
    assert abs(np.corrcoef(ids[:5000], other[:5000])[0, 1]) < 4 / np.sqrt(5000)


def test_rows_that_are_equal_are_mixed_too(
    engine: EngineUnderTest, name: str, export: Callable[..., bridge.Table]
) -> None:
    sorted_rows = engine.spark.table(name).select("tenth").orderBy("tenth")

    values = export(sorted_rows, shuffle_at_write=3, num_shards=2).to_arrow()["tenth"].to_numpy()

    assert Counter(values.tolist()) == dict.fromkeys(range(10), NUM_ROWS // 10)
    same_as_before = (values[1:] == values[:-1]).mean()
    assert abs(same_as_before - 0.1) < 4 * np.sqrt(0.1 * 0.9 / NUM_ROWS)


# --- sizes


def hashes(engine: EngineUnderTest) -> Any:
    """Return rows of 64 characters, of which a codec leaves about half."""
    return engine.spark.range(0, 120_000, 1, 2).selectExpr("sha2(CAST(id AS STRING), 256) AS text")


def test_shards_of_a_stream_are_near_their_size(sail: EngineUnderTest, tmp_path: Path) -> None:
    table = bridge.export_table(
        hashes(sail), tmp_path, shard_bytes="512KiB", row_group_bytes="256KiB", spark=sail.spark
    )

    assert table.manifest is not None
    sizes = [shard.num_bytes for shard in table.manifest.shards]
    assert len(sizes) > 5
    assert all(0.85 * (512 << 10) < size < 1.15 * (512 << 10) for size in sizes[:-1])
    assert sizes[-1] < 1.15 * (512 << 10)


def test_row_groups_are_near_their_size(engine: EngineUnderTest, export: Callable[..., bridge.Table]) -> None:
    table = export(hashes(engine), num_shards=2, row_group_bytes="1MiB")

    for file in table.files:
        footer = pq.read_metadata(file)
        groups = [footer.row_group(index).num_rows * 68 for index in range(footer.num_row_groups)]
        assert len(groups) > 2
        assert all(0.5 * (1 << 20) < size < 1.5 * (1 << 20) for size in groups[:-1])
