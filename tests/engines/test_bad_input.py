"""What people get wrong, and what they are told."""

from __future__ import annotations

import datetime as dt
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import bridge
from bridge.errors import (
    ConfigError,
    EngineError,
    EngineUnavailableError,
    ExportError,
    SourceError,
    SourceNotFoundError,
    TableTooLargeError,
    VolumeError,
)
from bridge.spark.channel import open_session
from bridge.spark.engines.apache import delta_conf
from bridge.volumes.path import Place


def raises(error: type[Exception], message: str) -> Any:
    """Expect `error` with exactly this beginning, in which ... stands for anything."""
    return pytest.raises(error, match="^" + re.escape(message).replace(r"\.\.\.", "(?s:.*)"))


@pytest.fixture(scope="module")
def saved() -> dict[str, str]:
    """The names of tables that were made once for each engine."""
    return {}


@pytest.fixture
def table(engine: Any, saved: dict[str, str]) -> str:
    """A Delta table with the columns id and amount, in two versions."""
    if engine.name not in saved:
        frame = engine.spark.range(4).selectExpr("id", "id * 0.5D AS amount")
        saved[engine.name] = engine.save(frame, name="bad_input")
        engine.save(frame, mode="append", name="bad_input")
    return saved[engine.name]


# No engine, or none that answers


HIDE = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hide())
import bridge
try:
    bridge.connect({remote})
except bridge.BridgeError as exc:
    print(type(exc).__name__, exc, sep=": ")
"""


@pytest.mark.parametrize(
    ("hidden", "remote", "message"),
    [
        (
            ["pysail"],
            "",
            "MissingDependencyError: the embedded engine needs pysail, which is not installed.\n"
            '  pip install "spark-training-bridge[local]", or connect to a server: bridge.connect("sc://host:15002").\n',
        ),
        (
            ["pyspark"],
            "",
            "MissingDependencyError: a Spark Connect session needs pyspark with its Connect client.\n"
            '  pip install "spark-training-bridge[local]" (no Java) or "spark-training-bridge[spark]".\n',
        ),
        (
            ["pysail", "pyspark"],
            "'sc://localhost:15002'",
            "MissingDependencyError: a Spark Connect session needs pyspark with its Connect client.\n"
            '  pip install "spark-training-bridge[local]" (no Java) or "spark-training-bridge[spark]".\n',
        ),
    ],
)
def test_no_engine_installed(hidden: list[str], remote: str, message: str) -> None:
    code = HIDE.format(hidden=set(hidden), remote=remote)

    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert (child.stdout, child.returncode) == (message, 0), child.stderr


def test_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("BRIDGE_WAREHOUSE", str(tmp_path / "warehouse"))

    with raises(
        EngineUnavailableError,
        "Apache Spark needs Java 17 or newer; no java was found in JAVA_HOME or PATH. Install one (Debian: apt install "
        'openjdk-17-jre-headless), or use the embedded engine: bridge.connect("sail").',
    ):
        bridge.connect("local[1]")


def test_java_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "bin/java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("BRIDGE_WAREHOUSE", str(tmp_path / "warehouse"))

    with raises(
        EngineUnavailableError, f"Apache Spark needs Java 17 or newer; {java} is version 1.8.0_392. Install one"
    ):
        bridge.connect("local[1]")


def test_wrong_jars(tmp_path: Path) -> None:
    (tmp_path / "other.jar").write_text("")

    with raises(ConfigError, f"spark_jars holds no delta-spark jar: {tmp_path}. Add it and what it needs"):
        delta_conf(str(tmp_path))
    with raises(ConfigError, "spark_jars names /missing/a.jar, which is neither a folder nor a file. Give a folder"):
        delta_conf("/missing/a.jar")


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A port on which nothing ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_port_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = time.monotonic()

    with raises(
        EngineUnavailableError,
        f"no Spark Connect server answers at sc://127.0.0.1:{port}/;token=***: Connection refused.\n"
        '  Start one, correct the address, or use the embedded engine: bridge.connect("sail").',
    ) as caught:
        bridge.connect(f"sc://127.0.0.1:{port}/;token=hush")

    assert time.monotonic() - started < 15
    assert "hush" not in str(caught.value)


def test_host_unknown() -> None:
    with raises(EngineUnavailableError, "no Spark Connect server answers at sc://no-such-host.invalid:15002: "):
        bridge.connect("sc://no-such-host.invalid:15002")


def test_port_of_something_else(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    started = time.monotonic()

    with raises(
        EngineUnavailableError,
        f"sc://127.0.0.1:{port}/;token=*** did not answer as a Spark Connect server: ...\n"
        "  Check the address, the token and use_ssl.",
    ) as caught:
        open_session(f"sc://127.0.0.1:{port}/;token=hush", timeout_s=1)

    assert time.monotonic() - started < 15
    assert "hush" not in str(caught.value)


def test_unknown_profile() -> None:
    with raises(
        ConfigError,
        'There is no profile "lokal". Did you mean "local"? The profiles are cluster, databricks, local; looked in ',
    ):
        bridge.connect(profile="lokal")


# What is not there


def test_table_missing(engine: Any, table: str) -> None:
    with raises(
        SourceNotFoundError,
        f'{engine.catalog}.demo.bad_imput does not exist in {engine.catalog}.demo.\n  Did you mean "bad',
    ):
        engine.load(f"{engine.catalog}.demo.bad_imput")
    with raises(SourceNotFoundError, 'demo.bad_imput does not exist in demo.\n  Did you mean "bad_input"?'):
        engine.load("demo.bad_imput")
    with raises(SourceNotFoundError, "no_such_table does not exist in the current schema."):
        engine.load("no_such_table")


def test_schema_missing(engine: Any, table: str) -> None:
    with raises(
        SourceNotFoundError,
        f'{engine.catalog}.demmo.t does not exist: there is no schema {engine.catalog}.demmo.\n  Did you mean "demo"?',
    ):
        engine.load(f"{engine.catalog}.demmo.t")
    with raises(SourceNotFoundError, 'demmo.t does not exist: there is no schema demmo.\n  Did you mean "demo"?'):
        engine.load("demmo.t")


def test_catalog_missing(engine: Any, table: str) -> None:
    wrong = engine.catalog.replace("a", "e")

    with raises(
        SourceNotFoundError,
        f'{wrong}.demo.bad_input does not exist: there is no catalog {wrong}.\n  Did you mean "{engine.catalog}"?',
    ):
        engine.load(f"{wrong}.demo.bad_input")


def test_column_missing(engine: Any, table: str) -> None:
    with raises(SourceNotFoundError, f"{table} has no column 'amuont'.\n  Did you mean \"amount\"?"):
        engine.load(table, columns=["id", "amuont"])
    with raises(SourceNotFoundError, f"{table} has no column 7.\n  There is: amount, id."):
        engine.load(table, columns=[7])
    with raises(SourceError, "columns names 'ID' twice."):
        engine.load(table, columns=["id", "ID"])


def test_version_missing(engine: Any, table: str) -> None:
    assert engine.load(table, version=0).num_rows == 4
    path = engine.path(table)

    for source in (table, path):
        with raises(SourceNotFoundError, f"{source} has no version 99: "):
            engine.load(source, version=99)
    with raises(SourceNotFoundError, f"{table} has no timestamp '1999-01-01 00:00:00+00:00': "):
        engine.load(table, timestamp=dt.datetime(1999, 1, 1, tzinfo=dt.UTC))
    with raises(SourceNotFoundError, f"{path} has no timestamp '1999-01-01 00:00:00': "):
        engine.load(path, timestamp="1999-01-01 00:00:00")


def test_a_path_that_is_no_table(engine: Any, tmp_path: Path) -> None:
    with raises(SourceNotFoundError, f"{tmp_path} is no Delta table: ...\n  Give the folder that holds _delta_log;"):
        engine.load(tmp_path)
    with raises(SourceNotFoundError, f"{tmp_path}/missing is no Delta table: "):
        engine.load(f"{tmp_path}/missing")


# What cannot be read as asked


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [({"version": 0}, "version=0"), ({"timestamp": "2020-01-01"}, "timestamp='2020-01-01'")],
)
def test_version_of_what_has_none(engine: Any, arguments: Any, asked: str) -> None:
    engine.spark.sql("CREATE OR REPLACE TEMP VIEW bad_view AS SELECT 1 AS one")
    files = engine.save(engine.spark.range(1), provider="parquet", mode="overwrite", name="bad_files")

    for source, what in (
        ("bad_view", "bad_view, a view,"),
        (files, f"{files}, a parquet table,"),
        (engine.spark.range(1), "a DataFrame"),
    ):
        with raises(
            SourceError, f"{what} has no versions, so {asked} cannot be read.\n  Leave it out, or name a Delta table."
        ):
            engine.load(source, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"version": 1, "timestamp": "2020-01-01"}, "version and timestamp were both given; name one of them."),
        ({"version": -1}, "version is -1; give a whole number, 0 or more."),
        ({"version": "1"}, "version is '1'; give a whole number, 0 or more."),
        ({"version": True}, "version is True; give a whole number, 0 or more."),
        (
            {"timestamp": dt.datetime(2020, 1, 1)},
            "timestamp 2020-01-01 00:00:00 has no zone; give one, as in datetime(..., tzinfo=timezone.utc).",
        ),
        ({"columns": []}, "columns is []; give a list of column names, or leave it out for all of them."),
        ({"columns": "id"}, "columns is 'id'; give a list of column names, or leave it out for all of them."),
        ({"limit": -1}, "limit is -1; give a whole number of rows, 0 or more."),
        ({"limit": True}, "limit is True; give a whole number of rows, 0 or more."),
        ({"limit": 1.5}, "limit is 1.5; give a whole number of rows, 0 or more."),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(sail: Any, arguments: Any, message: str) -> None:
    with raises(SourceError, message):
        sail.load("any_table", **arguments)


def test_ceilings_and_routes_that_make_no_sense(sail: Any) -> None:
    with raises(ConfigError, 'max_bytes is "12 parsecs"; give an integer or a size such as "512MiB" or "1GB".'):
        sail.load("any_table", max_bytes="12 parsecs")
    with raises(ConfigError, 'shard_bytes is "12 parsecs"; give an integer or a size'):
        bridge.export_table("any_table", spark=sail.spark, shard_bytes="12 parsecs")
    with raises(ValueError, 'route is \'stream\'; give "auto", "collect" or "export".'):
        sail.load("any_table", route="stream")


def test_names_that_are_none(sail: Any) -> None:
    for name in ("a.b.c.d", "", "`a"):
        with raises(SourceError, f"{name!r} is no table name.\n  Give table, schema.table or catalog.schema.table;"):
            sail.load(name)


@pytest.mark.parametrize("source", [None, 7, pa.table({"a": [1]}), ["t"]], ids=lambda source: type(source).__name__)
def test_sources_that_are_none(sail: Any, source: Any) -> None:
    for spark in (sail.spark, None):
        kind = "Table of pyarrow" if isinstance(source, pa.Table) else type(source).__name__
        with raises(SourceError, f"the source is a {kind}; give a table's name, a path, or a Spark Connect DataFrame."):
            bridge.load_table(source, spark=spark)


@pytest.mark.parametrize("names", [("a", "A"), ("a", "a"), ("é", "É")])
def test_names_that_are_the_same_without_regard_to_case(engine: Any, names: tuple[str, str]) -> None:
    frame = engine.spark.range(3).selectExpr(*(f"id AS `{name}`" for name in names))

    with raises(SourceError, f"DataFrame has two columns {names[1]!r} (names are compared without regard to case).\n"):
        engine.load(frame)
    assert not [view.name for view in engine.spark.catalog.listTables() if view.name.startswith("bridge_")]


def test_no_columns(sail: Any) -> None:
    with raises(SourceError, "DataFrame has no columns."):
        sail.load(sail.spark.range(3).select())


def test_a_type_that_cannot_be_carried(sail: Any) -> None:
    frame = sail.spark.sql("SELECT INTERVAL '1' YEAR AS span, 1 AS one")

    with raises(
        SourceError, "DataFrame: column 'span' is interval year, which cannot be carried.\n  Leave it out with col"
    ):
        sail.load(frame)
    assert sail.load(frame, columns=["one"]).num_rows == 1


def test_a_filter_that_does_not_parse(engine: Any, table: str) -> None:
    for where in ("id >>>> (", "id ="):
        with raises(SourceError, f"where cannot be used on {table}: "):
            engine.load(table, where=where)


def test_a_filter_on_a_column_that_is_missing(engine: Any, table: str) -> None:
    with raises(
        SourceNotFoundError, f"where names a column that {table} does not have: ...nope...\n  It has: id, amount."
    ):
        engine.load(table, where="nope > 1")


def test_a_query_that_fails(engine: Any) -> None:
    frame = engine.spark.sql("SELECT raise_error('boom') AS a, id FROM range(3)")

    with raises(EngineError, "DataFrame: ...boom"):
        engine.load(frame)


def test_a_failed_statement_of_the_person_is_sparks_own_error(engine: Any, capfd: pytest.CaptureFixture[str]) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(SourceNotFoundError):
        engine.load("no_such_table")
    assert capfd.readouterr().err == ""
    with pytest.raises(AnalysisException):
        engine.spark.sql("SELECT nope FROM range(3)").collect()


# Sessions


def test_a_dataframe_of_another_session(engine: Any) -> None:
    other = bridge.connect("sail")  # of this test's own warehouse

    with raises(
        SourceError,
        "the DataFrame belongs to another session than the one given as spark=.\n"
        "  Leave spark= out: a DataFrame is read by its own session.",
    ):
        engine.load(other.range(3))
    assert bridge.load_table(engine.spark.range(3)).num_rows == 3
    other.stop()


def test_a_classic_dataframe(sail: Any) -> None:
    # A real one takes a JVM; this is what is looked at.
    classic = SimpleNamespace(sparkSession=SimpleNamespace())

    with raises(SourceError, "the DataFrame belongs to a classic Spark session; bridge reads through Spark Connect.\n"):
        bridge.load_table(classic, spark=sail.spark)  # type: ignore[arg-type]
    with raises(EngineUnavailableError, "the Spark session is a classic one; bridge reads through Spark Connect.\n"):
        bridge.load_table(classic)  # type: ignore[arg-type]


# Sizes and volumes


def test_a_large_table_and_no_volume(apache: Any, saved: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.tables import fetch

    name = saved.get("large") or saved.setdefault("large", apache.save(apache.spark.range(1 << 18), name="bad_large"))
    monkeypatch.setattr(fetch, "stream_batches", None)  # no rows may move

    with raises(
        TableTooLargeError,
        f"{name} would take about 2.0 MiB; max_bytes is 1.0 MiB.\n"
        '  Pass volume="/Volumes/..." (needs WRITE VOLUME), name fewer columns, or limit=.',
    ):
        apache.load(name, max_bytes="1MiB")
    with raises(
        TableTooLargeError,
        f"{name} would take about 2.0 MiB; max_bytes is 1.0 MiB.\n"
        '  Name fewer columns, raise max_bytes, use limit=, or use route="export".',
    ):
        apache.load(name, max_bytes="1MiB", route="collect")


def test_a_frame_that_turns_out_large_and_no_volume(apache: Any) -> None:
    frame = apache.spark.range(1 << 18).filter("id >= 0")

    with raises(TableTooLargeError, "DataFrame takes more than 1.0 MiB; max_bytes is 1.0 MiB.\n  Pass volume="):
        apache.load(frame, max_bytes="1MiB")
    with raises(TableTooLargeError, "DataFrame takes more than 1.0 MiB; max_bytes is 1.0 MiB.\n  Name fewer columns"):
        apache.load(frame, max_bytes="1MiB", route="collect")


def test_an_export_and_no_volume(apache: Any, tmp_path: Path) -> None:
    for call in (
        lambda: apache.load(apache.spark.range(3), route="export"),
        lambda: bridge.export_table(apache.spark.range(3)),
    ):
        with raises(
            VolumeError,
            'DataFrame has nowhere to be exported to.\n  Pass volume="/Volumes/..." (needs WRITE VOLUME), or',
        ):
            call()


@pytest.mark.parametrize("volume", ["/Volumes/main/ml", "dbfs:/Volumes/main"])
def test_a_volume_of_two_parts(engine: Any, volume: str) -> None:
    with raises(
        VolumeError,
        f"{volume.removeprefix('dbfs:')} does not name a volume.\n"
        "  Give catalog, schema and volume: /Volumes/<catalog>/<schema>/<volume>/",
    ):
        bridge.export_table(engine.spark.range(3), volume)


def test_a_volume_that_cannot_be_written(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a file in the place of the root, since some people may write in every folder
    (tmp_path / "root").write_text("")
    monkeypatch.setenv("BRIDGE_VOLUME_ROOT", str(tmp_path / "root"))

    with raises(
        VolumeError,
        f"{tmp_path}/root/main/ml/exports/dataframe-... cannot be written: Not a directory.\n  Give a folder or",
    ):
        bridge.export_table(engine.spark.range(3), "/Volumes/main/ml/exports")


def test_a_volume_that_readers_would_expand(engine: Any, tmp_path: Path) -> None:
    with raises(VolumeError, f"{tmp_path}/a*b cannot hold exports: readers expand ? * [ ] {{ }} in a path.\n"):
        bridge.export_table(engine.spark.range(3), tmp_path / "a*b")


def test_a_volume_that_python_cannot_open(engine: Any) -> None:
    with raises(VolumeError, "s3://bucket/x/dataframe-... is not a folder that Python can open here.\n  Give a volume"):
        bridge.export_table(engine.spark.range(3), "s3://bucket/x")


def test_a_volume_that_fills_up(sail: Any, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with raises(VolumeError, f"DataFrame could not be written to {tmp_path}/dataframe-...: ...File too large"):
            bridge.export_table(sail.spark.range(100_000).selectExpr("id", "rand(1) AS r"), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_volume_that_only_the_cluster_has(apache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.tables.publish.SEEN_S", 1.0)
    monkeypatch.setattr(Place, "spark", property(lambda place: f"file:{tmp_path}/theirs/{place.local.name}"))

    with raises(
        ExportError,
        f"DataFrame: 3 rows were written, but no file of them can be seen at {tmp_path}/ours/...\n"
        "  Use a volume that both the cluster and this process have.",
    ):
        bridge.export_table(apache.spark.range(3), tmp_path / "ours")

    assert bridge.list_exports(tmp_path / "ours") == []


def test_an_export_that_fails_leaves_nothing(engine: Any, tmp_path: Path) -> None:
    frame = engine.spark.sql("SELECT id, CASE WHEN id = 900 THEN raise_error('boom') END AS e FROM range(1000)")

    with raises(EngineError, "DataFrame: ...boom"):
        bridge.export_table(frame, tmp_path)

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with pytest.raises(bridge.ExportNotFoundError):
        bridge.open_export(tmp_path)
