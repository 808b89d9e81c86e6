"""The main job: a Delta table through a Spark Connect session into tensors, by both routes, on every engine."""

from __future__ import annotations

import datetime as dt
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import bridge

MIXED = """
    SELECT CAST(id AS INT) AS i, id AS b, CAST(id % 128 AS TINYINT) AS t, CAST(id AS SMALLINT) AS s,
           id * 0.5D AS d, CAST(id AS FLOAT) AS f, id % 2 = 0 AS flag,
           IF(id % 10 = 0, NULL, id) AS n, IF(id % 7 = 0, NULL, id * 1.5D) AS dn,
           IF(id % 5 = 0, NULL, concat('é', id)) AS text,
           CAST(concat('x', id) AS BINARY) AS raw, date_add(DATE'1970-01-01', CAST(id AS INT)) AS day,
           timestamp_micros(id * 1000003) AS at, CAST(id AS DECIMAL(18, 4)) / 7 AS price
    FROM range(1000)
"""


@pytest.fixture
def mixed(engine: Any) -> str:
    return engine.save(engine.spark.sql(MIXED), mode="overwrite", name="mixed")


@pytest.fixture
def mixed_anywhere(any_engine: Any) -> str:
    return any_engine.save(any_engine.spark.sql(MIXED), mode="overwrite", name="mixed")


def _rows(table: bridge.Table | pa.Table) -> list[dict[str, Any]]:
    return sorted(pa.table(table).to_pylist(), key=lambda row: row["b"])


def test_both_routes_give_what_spark_gives(any_engine: Any, mixed_anywhere: str, route: str, tmp_path: Path) -> None:
    table = any_engine.load(mixed_anywhere, route=route, volume=tmp_path)

    assert table.route == route
    assert table.num_rows == len(table) == 1000
    assert table.version is not None
    by_python = {row["b"]: row.asDict() for row in any_engine.spark.table(mixed_anywhere).collect()}
    for row in _rows(table):
        expected = by_python[row["b"]]
        # pyspark's rows hold instants without a zone, in this process's own
        expected["at"] = expected["at"].astimezone(dt.UTC)
        expected["raw"] = bytes(expected["raw"])
        assert row == expected


def test_arrow_types_are_the_same_on_both_routes(engine: Any, mixed: str, tmp_path: Path) -> None:
    collected = engine.load(mixed, route="collect")
    exported = engine.load(mixed, route="export", volume=tmp_path)

    assert collected.schema == exported.schema
    assert dict(zip(collected.schema.names, map(str, collected.schema.types), strict=True)) == {
        "i": "int32", "b": "int64", "t": "int8", "s": "int16", "d": "double", "f": "float", "flag": "bool",
        "n": "int64", "dn": "double", "text": "string", "raw": "binary", "day": "date32[day]",
        "at": "timestamp[us, tz=UTC]", "price": str(collected.schema.field("price").type),
    }  # fmt: skip
    assert _rows(collected) == _rows(exported)


def test_pandas_numpy_torch_and_datasets(engine: Any, mixed: str, route: str, tmp_path: Path) -> None:
    table = engine.load(mixed, route=route, volume=tmp_path)

    frame = table.to_pandas().sort_values("b").reset_index(drop=True)
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {
        "i": "Int32", "b": "Int64", "t": "Int8", "s": "Int16", "d": "float64", "f": "float32", "flag": "boolean",
        "n": "Int64", "dn": "float64", "text": "object", "raw": "object", "day": "datetime64[ms]",
        "at": "datetime64[us, UTC]", "price": str(frame.dtypes["price"]),
    }  # fmt: skip
    assert frame.n.isna().sum() == 100
    assert frame.n[999] == 999
    assert frame.price[7] == decimal.Decimal(7) / 7

    some = engine.load(mixed, columns=["b", "d", "flag", "dn", "text", "day", "at"], route=route, volume=tmp_path)
    arrays = some.to_numpy()
    assert {name: str(array.dtype) for name, array in arrays.items()} == {
        "b": "int64", "d": "float64", "flag": "bool", "dn": "float64", "text": "object", "day": "datetime64[D]",
        "at": "datetime64[us]",
    }  # fmt: skip
    assert np.isnan(arrays["dn"]).sum() == 143

    tensors = some.to_torch()
    order = torch.argsort(tensors["b"])
    assert tensors["b"][order].tolist() == list(range(1000))
    assert tensors["day"][order][999] == 999
    assert tensors["at"][order][999] == 999 * 1000003
    assert tensors["text"][int(order[1])] == "é1"

    features, label = some.to_torch(features=["d", "dn"], label="b")
    assert features.shape == (1000, 2)
    assert features.dtype == torch.float64
    assert label.shape == (1000,)

    rows = sorted(some.to_huggingface(), key=lambda row: row["b"])
    assert len(rows) == 1000
    assert rows[1]["text"] == "é1"
    assert rows[1]["at"] == dt.datetime(1970, 1, 1, 0, 0, 1, 3, tzinfo=dt.UTC)


def test_a_loader_gives_each_row_once(engine: Any, mixed: str, route: str, tmp_path: Path) -> None:
    table = engine.load(mixed, columns=["b", "d"], route=route, volume=tmp_path)
    loader = table.to_loader(64, features=["d"], label="b", shuffle=True, shuffle_window=300)

    batches = list(loader)

    assert len(batches) == len(loader) == 16
    assert all(x.shape == (len(y), 1) for x, y in batches)
    assert torch.cat([y for _, y in batches]).sort().values.tolist() == list(range(1000))
    assert all(bool((x[:, 0] == y * 0.5).all()) for x, y in batches)
    loader.set_epoch(1)
    assert next(iter(loader))[1].tolist() != batches[0][1].tolist()


def test_columns_filter_and_limit(engine: Any, mixed: str, route: str, tmp_path: Path) -> None:
    table = engine.load(mixed, columns=["B", "text"], where="b < 10 AND text IS NOT NULL", route=route, volume=tmp_path)

    assert table.schema.names == ["b", "text"]
    assert [row["b"] for row in _rows(table)] == [1, 2, 3, 4, 6, 7, 8, 9]
    assert engine.load(mixed, columns=["b"], limit=7, route=route, volume=tmp_path).num_rows == 7
    assert engine.load(mixed, where="b < 0", route=route, volume=tmp_path).num_rows == 0


def test_a_filter_may_be_a_column(engine: Any, mixed: str, route: str, tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    table = engine.load(mixed, where=F.col("b") >= 990, columns=["b"], route=route, volume=tmp_path)

    assert [row["b"] for row in _rows(table)] == list(range(990, 1000))


def test_the_same_export_is_reused(any_engine: Any, mixed_anywhere: str, tmp_path: Path) -> None:
    first = bridge.export_table(mixed_anywhere, tmp_path, spark=any_engine.spark)
    again = bridge.export_table(mixed_anywhere, tmp_path, spark=any_engine.spark)
    afresh = bridge.export_table(mixed_anywhere, tmp_path, reuse=False, spark=any_engine.spark)

    assert again.path == first.path
    assert again.plan is not None
    assert again.plan.reuses == first.path
    assert bridge.open_export(tmp_path).path == afresh.path
    assert bridge.open_export(tmp_path, table=mixed_anywhere, version=first.version).path == afresh.path

    other = bridge.export_table(mixed_anywhere, tmp_path, where="b < 10", spark=any_engine.spark)

    assert len({first.path, other.path, afresh.path}) == 3
    with pytest.raises(bridge.ExportNotFoundError, match="may hold different rows"):
        bridge.open_export(tmp_path)


def test_a_new_version_is_exported_afresh(engine: Any, tmp_path: Path) -> None:
    name = engine.save(engine.spark.range(10))
    first = bridge.export_table(name, tmp_path, spark=engine.spark)
    engine.spark.range(10, 15).write.format("delta").mode("append").saveAsTable(name)
    second = bridge.export_table(name, tmp_path, spark=engine.spark)

    assert (first.num_rows, second.num_rows) == (10, 15)
    assert (first.version, second.version) == (0, 1)
    assert bridge.open_export(tmp_path).num_rows == 15
    assert bridge.open_export(tmp_path, version=0).num_rows == 10
    assert engine.load(name, version=0).num_rows == 10


def test_a_path_is_a_source(engine: Any, mixed: str, route: str, tmp_path: Path) -> None:
    path = engine.path(mixed)

    table = engine.load(path, route=route, volume=tmp_path, columns=["b"])

    assert table.num_rows == 1000
    assert table.version is not None


def test_a_dataframe_is_a_source_and_leaves_no_view(engine: Any, mixed: str, route: str, tmp_path: Path) -> None:
    frame = engine.spark.table(mixed).groupBy("flag").count()

    table = bridge.load_table(frame, route=route, volume=tmp_path)

    assert sorted(table.to_arrow().to_pylist(), key=str) == [
        {"flag": False, "count": 500},
        {"flag": True, "count": 500},
    ]
    assert table.version is None
    assert not [view.name for view in engine.spark.catalog.listTables() if view.name.startswith("bridge_")]


def test_others_read_a_table_as_an_arrow_stream(engine: Any, mixed: str, route: str, tmp_path: Path) -> None:
    table = engine.load(mixed, columns=["b"], route=route, volume=tmp_path)

    assert pa.table(table).num_rows == 1000
    assert sum(batch.num_rows for batch in table.to_batches()) == 1000


def test_load_dataset_sees_exactly_the_rows_of_an_export(
    engine: Any, mixed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    table = bridge.export_table(mixed, tmp_path, spark=engine.spark)

    loaded = datasets.load_dataset("parquet", data_files=f"{table.path}/*.parquet", cache_dir=str(tmp_path / "hf"))

    assert loaded["train"].num_rows == 1000
    assert sorted(str(path) for path in Path(table.path or "").glob("*.parquet")) == sorted(table.files)
