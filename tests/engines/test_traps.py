"""Where Spark, Delta, Arrow and Parquet go wrong silently: right by both routes, or a clear error."""

from __future__ import annotations

import datetime as dt
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import bridge
from bridge.errors import (
    BridgeError,
    EngineSilentError,
    EngineUnavailableError,
    SourceError,
    TableTooLargeError,
)
from bridge.tables.fetch import fetch
from bridge.tables.prepare import prepare
from tests.cluster import SHORT_LIVED
from tests.processes import busy_cores, eventually

EPOCH = dt.datetime(1970, 1, 1)
MOMENTS = [
    dt.datetime(1, 1, 1),
    dt.datetime(1500, 3, 1, 12),
    dt.datetime(1600, 1, 1),
    dt.datetime(1900, 1, 1, 0, 0, 0, 1),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999999),
    dt.datetime(2024, 3, 10, 10, 30),  # inside a change of clocks in Los Angeles
    dt.datetime(9999, 12, 30, 23, 59, 59, 999999),
]


def _micros(moment: dt.datetime) -> int:
    return (moment - EPOCH) // dt.timedelta(microseconds=1)


# --- times


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles", "Asia/Kolkata"])
def test_times_of_far_years_are_not_shifted(engine: Any, zone: str, route: str, tmp_path: Path) -> None:
    spark = engine.new_session(zone)
    rows = ", ".join(
        f"({i}, timestamp_micros({_micros(m)}), TIMESTAMP_NTZ'{m.isoformat(' ').zfill(19)}', DATE'{m.date()}')"
        for i, m in enumerate(MOMENTS)
    )
    frame = spark.sql(f"SELECT * FROM VALUES {rows} AS t(i, at, wall, day)")
    frame.write.format("delta").save(str(tmp_path / "table"))

    for source in (frame, tmp_path / "table"):
        table = bridge.load_table(source, route=route, volume=tmp_path / "exports", spark=spark).to_arrow()

        assert [str(arrow) for arrow in table.schema.types] == [
            "int32", "timestamp[us, tz=UTC]", "timestamp[us]", "date32[day]",
        ]  # fmt: skip
        ordered = table.sort_by("i")
        assert ordered["at"].cast(pa.int64()).to_pylist() == [_micros(m) for m in MOMENTS]
        assert ordered["wall"].cast(pa.int64()).to_pylist() == [_micros(m) for m in MOMENTS]
        assert ordered["day"].to_pylist() == [m.date() for m in MOMENTS]


# --- what changes meanwhile


@pytest.mark.parametrize("of", ["table", "frame", "column"])
def test_a_filter_by_chance_is_run_once(engine: Any, of: str, route: str, tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    frame = engine.spark.range(20_000)
    name = engine.save(frame)
    # a new column each time: one keeps its seed
    by = {
        "table": lambda: engine.load(name, where="rand() < 0.5", route=route, volume=tmp_path),
        "column": lambda: engine.load(name, where=F.rand() < 0.5, route=route, volume=tmp_path),
        "frame": lambda: engine.load(frame.filter("rand() < 0.5"), route=route, volume=tmp_path),
    }[of]

    tables = [by(), by()]

    for table in tables:
        assert 8_000 < table.num_rows < 12_000
        rows = table.to_arrow()["id"]
        assert len(rows) == table.num_rows == table.receipt["num_rows"]
        assert pc.count_distinct(rows).as_py() == len(rows)
    if route == "export":
        assert [table.manifest.num_rows for table in tables] == [_rows_in_files(table) for table in tables]
        assert tables[0].path != tables[1].path
        assert tables[1].plan.reuses is None
    assert tables[0].to_arrow()["id"].to_pylist() != tables[1].to_arrow()["id"].to_pylist()


def _rows_in_files(table: bridge.Table) -> int:
    return sum(pq.read_metadata(file).num_rows for file in table.files)


@pytest.mark.parametrize("of", ["name", "frame"])
def test_a_view_that_is_replaced_between_plan_and_fetch(engine: Any, of: str, route: str, tmp_path: Path) -> None:
    view = f"shifting_{of}_{route}"
    engine.spark.range(10).createOrReplaceTempView(view)
    source = view if of == "name" else engine.spark.table(view)

    with prepare(source, route=route, volume=tmp_path, spark=engine.spark) as prepared:
        engine.spark.range(100, 103).createOrReplaceTempView(view)
        table = fetch(prepared)

    assert sorted(table.to_arrow()["id"].to_pylist()) == list(range(10))
    assert engine.spark.table(view).count() == 3
    engine.spark.catalog.dropTempView(view)


@pytest.mark.parametrize("of", ["name", "path"])
def test_an_append_between_plan_and_fetch(engine: Any, of: str, route: str, tmp_path: Path) -> None:
    name = engine.save(engine.spark.range(10))
    source = name if of == "name" else engine.path(name)

    with prepare(source, route=route, volume=tmp_path, spark=engine.spark) as prepared:
        engine.save(engine.spark.range(10, 15), mode="append", name=name.rpartition(".")[2])
        table = fetch(prepared)

    assert sorted(table.to_arrow()["id"].to_pylist()) == list(range(10))
    assert table.version == 0
    assert engine.load(source).num_rows == 15


def test_a_table_made_again_is_not_reused(engine: Any, tmp_path: Path) -> None:
    name = engine.save(engine.spark.range(10))
    folder = Path(engine.path(name).removeprefix("file:"))
    first = bridge.export_table(name, tmp_path, spark=engine.spark)
    engine.spark.sql(f"DROP TABLE {name}")
    shutil.rmtree(folder, ignore_errors=True)
    engine.save(engine.spark.range(100, 110), name=name.rpartition(".")[2])

    again = bridge.export_table(name, tmp_path, spark=engine.spark)

    assert (first.version, again.version) == (0, 0)
    assert again.plan.reuses is None
    assert sorted(again.to_arrow()["id"].to_pylist()) == list(range(100, 110))


# --- large rows, large results


@pytest.fixture(scope="module")
def large() -> dict[tuple[str, int], str]:
    """The names of tables of large rows, which each engine makes once for both routes."""
    return {}


@pytest.mark.parametrize(("num_rows", "row_bytes"), [(2_000, 150 << 10), (40, 4 << 20)])
def test_large_rows(
    engine: Any, large: dict[tuple[str, int], str], num_rows: int, row_bytes: int, route: str, tmp_path: Path
) -> None:
    if (engine.name, num_rows) not in large:
        raw = f"CAST(concat(CAST(id AS STRING), repeat('x', {row_bytes})) AS BINARY) AS raw"
        large[engine.name, num_rows] = engine.save(engine.spark.range(num_rows).selectExpr("id", raw))
    name = large[engine.name, num_rows]

    table = engine.load(name, route=route, volume=tmp_path)

    seen = set()
    for batch in table.to_batches():
        for id_, raw in zip(batch["id"].to_pylist(), batch["raw"], strict=True):
            assert raw.as_py() == b"%d" % id_ + b"x" * row_bytes
            seen.add(id_)
    assert table.num_rows == num_rows
    assert seen == set(range(num_rows))


def _even(engine: Any, num_rows: int) -> Any:
    """Rows whose number no plan tells."""
    return engine.spark.range(num_rows).filter("id % 2 = 0").selectExpr("id", "id * 0.5D AS half")


def test_a_collect_that_outgrows_its_ceiling_becomes_an_export(engine: Any, tmp_path: Path) -> None:
    table = engine.load(_even(engine, 1_000_000), max_bytes="1MiB", volume=tmp_path)

    assert table.route == table.plan.route == table.receipt["route"] == "export"
    assert table.plan.reason.startswith("collecting passed max_bytes, 1.0 MiB, after ")
    assert table.num_rows == 500_000
    assert pc.sum(table.to_arrow()["id"]).as_py() == sum(range(0, 1_000_000, 2))


def test_a_collect_that_outgrows_its_ceiling_and_may_not_be_exported(engine: Any) -> None:
    with pytest.raises(TableTooLargeError, match=r"DataFrame takes more than 1\.0 MiB; max_bytes is 1\.0 MiB"):
        engine.load(_even(engine, 1_000_000), max_bytes="1MiB", route="collect")


def test_a_stopped_collect_does_not_run_on(engine: Any) -> None:
    # small partitions: Apache Spark holds the result of a whole one in memory before it sends any of it
    long = engine.spark.range(0, 10**9, 1, 5_000).filter("id % 2 = 0").selectExpr("id", "id * 0.5D AS half")
    began = time.monotonic()

    with pytest.raises(TableTooLargeError, match="takes more than"):
        engine.load(long, max_bytes="1MiB", route="collect")

    assert time.monotonic() - began < 60
    eventually(lambda: busy_cores() < 0.5)
    assert _operations_of(engine) == 0
    # the same questions while an operation does run
    runner = threading.Thread(target=_swallow, args=(_endless(engine.spark).collect,))
    runner.start()
    try:
        eventually(lambda: busy_cores() > 0.5)
        eventually(lambda: _operations_of(engine) == 1)
    finally:
        engine.spark.interruptAll()  # else it would keep all that follow waiting
        runner.join(60)
    assert not runner.is_alive()


def _operations_of(engine: Any) -> int:
    """Count, and end, what runs in the session."""
    return len(engine.spark.interruptAll())


def _swallow(call: Callable[[], Any]) -> None:
    from pyspark.errors import PySparkException

    with suppress(PySparkException):
        call()


# --- values


def test_large_integers_beside_null_are_exact_in_pandas(engine: Any, route: str, tmp_path: Path) -> None:
    frame = engine.spark.sql(
        "SELECT i, CAST(n AS BIGINT) AS n FROM VALUES"
        " (0, '9223372036854775707'), (1, NULL), (2, '-9223372036854775808') AS t(i, n)"
    )

    pandas = engine.load(engine.save(frame), route=route, volume=tmp_path).to_pandas().sort_values("i")

    assert str(pandas.n.dtype) == "Int64"
    assert pandas.n.tolist()[0] == 9223372036854775707
    assert pandas.n.isna().tolist() == [False, True, False]
    assert pandas.n.tolist()[2] == -9223372036854775808


NESTED = """
    SELECT id,
           IF(id % 5 = 0, NULL,
              named_struct('a', id, 'b', named_struct('c', concat('é', id), 'd', CAST(NULL AS INT)))) AS s,
           IF(id % 3 = 0, NULL, map(concat('k', id), id * 0.5D, 'none', NULL)) AS m,
           IF(id % 7 = 0, NULL, array(id, NULL, id + 1)) AS a,
           array(named_struct('x', array(map(id, array(CAST(id AS DECIMAL(20, 3))))))) AS deep,
           array(1, 2, 3) AS whole,
           CAST(array() AS ARRAY<INT>) AS none
    FROM range(50)
"""


def test_nested_types(engine: Any, route: str, tmp_path: Path) -> None:
    frame = engine.spark.sql(NESTED)

    for source in (frame, engine.save(frame)):
        rows = sorted(engine.load(source, route=route, volume=tmp_path).to_arrow().to_pylist(), key=lambda r: r["id"])

        assert len(rows) == 50
        for i, row in enumerate(rows):
            assert row == {
                "id": i,
                "s": None if i % 5 == 0 else {"a": i, "b": {"c": f"é{i}", "d": None}},
                "m": None if i % 3 == 0 else [(f"k{i}", i * 0.5), ("none", None)],
                "a": None if i % 7 == 0 else [i, None, i + 1],
                "deep": [{"x": [[(i, [Decimal(i)])]]}],
                "whole": [1, 2, 3],
                "none": [],
            }


# What each engine can make, and what comes of it by either route: rows, or an error that names the column.
ODD = {
    "void": "NULL",
    "day-time interval": "INTERVAL '1 02:03:04.000005' DAY TO SECOND",
    "year-month interval": "INTERVAL '1-2' YEAR TO MONTH",
    "calendar interval": "make_interval(1, 2, 0, 3)",
    "time": "TIME'12:34:56.123456'",
    "variant": """parse_json('{"a": 1}')""",
    "variant within": """array(named_struct('v', parse_json('{"a": 1}')))""",
}
RIGHT = {
    "void": None,
    "day-time interval": dt.timedelta(days=1, hours=2, minutes=3, seconds=4, microseconds=5),
}


@pytest.mark.parametrize("kind", sorted(ODD))
def test_odd_types_are_right_or_refused(engine: Any, kind: str, route: str, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    try:
        frame = engine.spark.sql(f"SELECT id, {ODD[kind]} AS odd FROM range(3)")
        frame.schema  # noqa: B018 (asks the server)
    except PySparkException:
        assert (engine.name, kind) == ("sail", "time"), "the engine lost a type that it had"
        return
    if kind in RIGHT:
        table = engine.load(frame, route=route, volume=tmp_path)
        assert table.to_arrow()["odd"].to_pylist() == [RIGHT[kind]] * 3
        return
    with pytest.raises(SourceError, match=re.escape("column 'odd' is ")):
        engine.load(frame, route=route, volume=tmp_path)


# --- shapes and names


def test_an_empty_table(engine: Any, route: str, tmp_path: Path) -> None:
    name = engine.save(engine.spark.range(0).selectExpr("id", "CAST(id AS STRING) AS text", "array(id) AS many"))

    table = engine.load(name, route=route, volume=tmp_path)

    assert table.num_rows == 0
    assert table.to_arrow().schema == table.schema
    assert table.schema.names == ["id", "text", "many"]
    assert table.to_numpy()["id"].dtype == np.int64
    assert len(table.to_pandas()) == 0


def test_a_filter_that_keeps_nothing(engine: Any, route: str, tmp_path: Path) -> None:
    table = engine.load(engine.save(engine.spark.range(10)), where="id > 100", route=route, volume=tmp_path)

    assert (table.num_rows, table.route) == (0, route)
    assert table.to_numpy()["id"].shape == (0,)


def test_2000_columns(engine: Any, route: str, tmp_path: Path) -> None:
    frame = engine.spark.range(3).selectExpr(*[f"id + {i} AS c{i}" for i in range(2000)])

    table = engine.load(frame, route=route, volume=tmp_path).to_arrow()

    assert table.schema.names == [f"c{i}" for i in range(2000)]
    assert [sorted(column.to_pylist()) for column in table.columns] == [[i, i + 1, i + 2] for i in range(2000)]


ODD_NAMES = [
    "a.b",
    "a b",
    "a`b",
    "a%20b",
    "é",
    "a'b",
    'a"b',
    "a\\b",
    "a/b",
    "a{b}",
    "a=b",
    "a,b;",
    "a\tb",
    "日本",
    "select",
]


def test_odd_names_of_columns(engine: Any, route: str, tmp_path: Path) -> None:
    columns = ", ".join(f"id + {i} AS `{name.replace('`', '``')}`" for i, name in enumerate(ODD_NAMES))
    frame = engine.spark.sql(f"SELECT {columns} FROM range(3)")

    table = engine.load(frame, route=route, volume=tmp_path)
    some = engine.load(frame, columns=ODD_NAMES[:3], where="`a.b` = 1", route=route, volume=tmp_path)

    assert table.schema.names == ODD_NAMES
    assert [sorted(column.to_pylist()) for column in table.to_arrow().columns] == [
        [i, i + 1, i + 2] for i in range(len(ODD_NAMES))
    ]
    assert some.to_arrow().to_pylist() == [{"a.b": 1, "a b": 2, "a`b": 3}]


@pytest.mark.parametrize("folder", ["a b", "é", "a%20b", "a'b", "a.b", "a#b", "a+b"])
def test_odd_names_of_paths(engine: Any, folder: str, route: str, tmp_path: Path) -> None:
    source = engine.path(engine.save(engine.spark.range(5))).removeprefix("file:")
    shutil.copytree(source, tmp_path / folder / "table")

    table = engine.load(tmp_path / folder / "table", route=route, volume=tmp_path / folder / "exports")

    assert sorted(table.to_arrow()["id"].to_pylist()) == list(range(5))
    assert table.version == 0


@pytest.mark.parametrize("name", ["a b", "é", "a.b", "a%20b", "a'b", "a`b"])
def test_odd_names_of_tables(sail: Any, name: str, route: str, tmp_path: Path) -> None:
    """Of Sail alone: Apache Spark's own catalog takes letters, digits and underscores."""
    quoted = f"`{route}{name.replace('`', '``')}`"
    sail.save(sail.spark.range(5), name=quoted)

    table = sail.load(f"main.demo.{quoted}", route=route, volume=tmp_path)

    assert sorted(table.to_arrow()["id"].to_pylist()) == list(range(5))
    if route == "export":
        assert bridge.open_export(tmp_path).num_rows == 5


def test_a_partitioned_table(engine: Any, route: str, tmp_path: Path) -> None:
    frame = engine.spark.sql(
        "SELECT id, CASE id % 4 WHEN 0 THEN 'a b' WHEN 1 THEN 'é/=%20' WHEN 2 THEN NULL ELSE 'x' END AS p,"
        " date_add(DATE'1900-01-01', CAST(id % 3 AS INT)) AS d FROM range(24)"
    )
    path = tmp_path / "table"
    frame.write.format("delta").partitionBy("p", "d").save(str(path))

    table = engine.load(path, route=route, volume=tmp_path / "exports")

    assert table.schema.names == ["id", "p", "d"]
    assert sorted(table.to_arrow().to_pylist(), key=lambda row: row["id"]) == [
        {"id": i, "p": ["a b", "é/=%20", None, "x"][i % 4], "d": dt.date(1900, 1, 1 + i % 3)} for i in range(24)
    ]


# --- the session stays the user's


def test_the_session_is_left_as_it_was(engine: Any, route: str, tmp_path: Path) -> None:
    spark = engine.spark
    name = engine.save(spark.range(100))
    spark.range(3).createOrReplaceTempView("mine")
    spark.addTag("mine")

    def state() -> Any:
        tables = sorted((table.name, table.isTemporary) for table in spark.catalog.listTables())
        place = spark.sql("SELECT current_catalog(), current_schema()").collect()
        return spark.conf.getAll, tables, place, spark.getTags()

    before = state()
    engine.load(name, route=route, volume=tmp_path)
    engine.load("mine", where="id > 0", route=route, volume=tmp_path)
    engine.load(spark.table("mine"), route=route, volume=tmp_path)
    bridge.plan_table(name, spark=spark)
    with pytest.raises(BridgeError):
        engine.load("mine", columns=["absent"])
    with pytest.raises(TableTooLargeError):
        engine.load(spark.table("mine"), max_bytes=1, route="collect")

    assert state() == before
    spark.removeTag("mine")
    spark.catalog.dropTempView("mine")


# --- a server that refuses, falls silent, or dies


@pytest.fixture(scope="module")
def spare_server() -> Iterator[Any]:
    """A server of our own to be ill-treated, with a small maxResultSize."""
    from bridge.spark.engines.apache import start_server

    conf = {"spark.driver.maxResultSize": "1m", "spark.driver.extraJavaOptions": SHORT_LIVED}
    server = start_server("local[2]", spark_jars=None, extra_conf=conf)
    yield server
    server.stop()


@pytest.fixture
def spare(spare_server: Any) -> Iterator[Any]:
    yield from _session_of(spare_server)


def _session_of(server: Any) -> Iterator[Any]:
    """Open a session; closed, its client does not go on trying for ten minutes when the server is gone."""
    from pyspark.sql.connect.session import SparkSession

    spark = SparkSession(server.remote)
    yield spark
    spark.client.close()


def _java(server: Any) -> psutil.Process:
    return next(p for p in psutil.Process(server.process.pid).children(recursive=True) if p.name() == "java")


@pytest.mark.apache
def test_the_servers_own_limit_is_too_large(spare: Any, tmp_path: Path) -> None:
    frame = spare.range(1_000_000).filter("id % 2 = 0")

    with pytest.raises(TableTooLargeError, match=r"more than the server sends as one result: .*maxResultSize"):
        bridge.load_table(frame, route="collect")
    table = bridge.load_table(frame, volume=tmp_path)

    assert table.route == table.plan.route == "export"
    assert "maxResultSize" in table.plan.reason
    assert pc.sum(table.to_arrow()["id"]).as_py() == sum(range(0, 1_000_000, 2))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.spark.source._DROP_TIMEOUT_S", 2.0)
    monkeypatch.setattr("bridge.spark.operation.SILENCE_S", 1.0)
    monkeypatch.setattr("bridge.spark.operation.PROBE_TIMEOUT_S", 2.0)


def _endless(spark: Any) -> Any:
    """One row, in a long time; in many tasks, since Apache Spark's do not end before their loop does."""
    return spark.range(0, 10**12, 1, 20_000).filter("id % 2 = 0").groupBy().max("id")


@contextmanager
def _while_collecting(action: Callable[[], Any]) -> Iterator[Callable[[], float]]:
    """Do something to the server once rows have been asked of it for a while; give the seconds since."""
    done: list[float] = []

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not any(thread.name == "bridge-fetch" for thread in threading.enumerate()):
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        time.sleep(1.5)
        action()
        done.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield lambda: time.monotonic() - done[0]
    finally:
        thread.join()


@pytest.mark.apache
@pytest.mark.usefixtures("impatient")
def test_a_server_that_only_takes_long_is_waited_for(spare: Any) -> None:
    rows = bridge.load_table(spare.range(400_000_000).filter("id % 7 = 1").groupBy().sum("id"), route="collect")

    assert rows.num_rows == 1


@pytest.mark.apache
@pytest.mark.usefixtures("impatient")
def test_a_silent_server_ends_a_collect(spare_server: Any, spare: Any) -> None:
    java = _java(spare_server)
    with _while_collecting(java.suspend) as since:
        try:
            with pytest.raises(EngineSilentError, match="DataFrame: the server has stopped answering"):
                bridge.load_table(_endless(spare), route="collect")
            assert since() < 10
        finally:
            java.resume()
    # the interrupt has waited for the server, so that nothing runs on
    eventually(lambda: not spare.interruptAll())
    assert spare.range(3).count() == 3


@pytest.mark.apache
@pytest.mark.usefixtures("impatient")
def test_a_server_that_dies_ends_a_collect() -> None:
    from bridge.spark.engines.apache import start_server

    conf = {"spark.driver.extraJavaOptions": SHORT_LIVED}
    server = start_server("local[2]", spark_jars=None, extra_conf=conf)
    try:
        with contextmanager(_session_of)(server) as spark, _while_collecting(_java(server).kill) as since:
            with pytest.raises(EngineUnavailableError, match="DataFrame: the server went away"):
                bridge.load_table(_endless(spark), route="collect")
            assert since() < 10
    finally:
        server.stop()
