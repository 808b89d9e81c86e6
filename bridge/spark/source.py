"""What a source is: its columns, its version, and the DataFrame that reads exactly that."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.errors import PolicyError, SourceError, SourceNotFoundError
from bridge.spark.arrow import arrow_schema
from bridge.spark.channel import answer_within, is_refused
from bridge.spark.engines import Engine, Pin
from bridge.spark.failures import Failure, classify, quiet, reason, translated
from bridge.spark.filters import filtered, where_text
from bridge.spark.names import near, parse_name, quote, quote_parts, sql_string
from bridge.spark.sessions import remember_place
from bridge.volumes.path import is_path, locate

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_DROP_TIMEOUT_S = 10.0

# whose tables are files, read in the same order each time
_FILE_PROVIDERS = frozenset({"parquet", "orc", "csv", "json", "avro", "text"})


@dataclass(frozen=True)
class Source:
    """A resolved source.

    `frame` reads what was asked for; `unfiltered` reads the same columns without `where` and `limit`. `pin.version` is
    None for everything but Delta tables. A private view that pins a plan is dropped by `close`. `dropped` gives the
    rows that are left out for their NULLs, None where that was not asked for. `is_temporary` is true of a DataFrame and
    of a temporary view: nobody else can mean the same by its name. `where_is_text` is false where the filter was a
    pyspark Column, whose text does not say all of it. `asked_at` is the time of which a version was asked for. `again`
    is what to resolve in another session to get the same table, None where nothing does.
    """

    spark: SparkSession
    engine: Engine
    name: str
    kind: str  # "delta", "files", "foreign", "view" or "dataframe"
    location: str | None
    pin: Pin
    frame: DataFrame = field(repr=False)
    unfiltered: DataFrame = field(repr=False)
    columns: tuple[str, ...] = ()
    where: str | None = None
    limit: int | None = None
    is_repeatable: bool = True
    view: str | None = None
    dropped: DataFrame | None = field(default=None, repr=False)
    is_temporary: bool = False
    where_is_text: bool = True
    asked_at: str | None = None
    again: str | Path | None = None

    @property
    def is_filtered(self) -> bool:
        """Whether `frame` may have fewer rows than `unfiltered`, but for the limit."""
        return self.where is not None or self.dropped is not None

    @property
    def spark_schema(self) -> StructType:
        """The Spark types of the columns that are read, in order."""
        return self.frame.schema

    @property
    def schema(self) -> pa.Schema:
        """The Arrow types of the columns that are read, in order; every column may hold nulls."""
        return arrow_schema(self.spark_schema, self.name)

    def close(self) -> None:
        """Drop the private view, if there is one. The frames cannot be run afterwards.

        A server that does not answer is not waited for, since the view ends with the session.
        """
        from pyspark.errors import PySparkException

        if self.view is not None and not is_refused(self.spark):
            with suppress(PySparkException, TimeoutError):
                answer_within(_DROP_TIMEOUT_S, partial(self.spark.catalog.dropTempView, self.view))


def resolve(
    source: str | Path | DataFrame,
    *,
    spark: SparkSession,
    engine: Engine,
    columns: Sequence[str] | None = None,
    where: str | Column | None = None,
    version: int | None = None,
    timestamp: str | datetime | None = None,
    limit: int | None = None,
    drop_nulls: Sequence[str] = (),
    to_json: Sequence[str] = (),
    volume_root: Path | None = None,
) -> Source:
    """Find out at once what `source` is and whether it can be read as asked; no rows move.

    Raises:
        SourceNotFoundError: No such table, schema, column or version; near names are offered.
        SourceError: Duplicate column names, `version` on something that has none, a filter that does not parse, a
            column of a type that Arrow cannot hold, a DataFrame of another session.
    """
    version, at = _checked_version(version, timestamp)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise SourceError(f"limit is {limit!r}; give a whole number of rows, 0 or more.")
    if columns is not None and (isinstance(columns, str) or not list(columns)):
        raise SourceError(f"columns is {columns!r}; give a list of column names, or leave it out for all of them.")

    if not isinstance(source, str) and hasattr(source, "sparkSession"):
        found = _find_dataframe(source, spark, engine, version, at)
    elif isinstance(source, str) and not is_path(source):
        found = _find_name(source, spark, engine, version, at)
    else:
        found = _find_path(source, spark, engine, version, at, volume_root)
    try:
        chosen = _choose_columns(found.frame.columns, columns, found.name)
        _check_policies(found.frame, chosen, drop_nulls, to_json)
        unfiltered = _select(found.frame, chosen, to_json)
        frame = found.frame if where is None else filtered(found.frame, where, found.name)
        text, repeatable = where_text(where, found.frame.columns)
        dropped = None
        if drop_nulls:
            there = " AND ".join(f"{quote(name)} IS NOT NULL" for name in drop_nulls)
            frame, dropped = frame.filter(there), frame.filter(f"NOT ({there})")
        frame = unfiltered if frame is found.frame else _select(frame, chosen, to_json)
        resolved = replace(
            found, frame=frame if limit is None else frame.limit(limit), unfiltered=unfiltered, columns=chosen,
            where=text, where_is_text=where is None or isinstance(where, str), limit=limit, dropped=dropped,
            is_repeatable=repeatable, asked_at=at,
        )  # fmt: skip
        with translated(found.name):
            _ = resolved.schema
    except BaseException:
        found.close()
        raise
    return resolved


def _checked_version(version: int | None, timestamp: str | datetime | None) -> tuple[int | None, str | None]:
    if version is not None and timestamp is not None:
        raise SourceError("version and timestamp were both given; name one of them.")
    if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
        raise SourceError(f"version is {version!r}; give a whole number, 0 or more.")
    if timestamp is not None and not isinstance(timestamp, str | datetime):
        raise SourceError(
            f"timestamp is {timestamp!r}; give a datetime with its zone, or text as in '2024-01-31 12:00:00'."
        )
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise SourceError(f"timestamp {timestamp} has no zone; give one, as in datetime(..., tzinfo=timezone.utc).")
        return version, timestamp.isoformat(sep=" ")
    return version, timestamp


def _find_dataframe(
    frame: Any, spark: SparkSession, engine: Engine, version: int | None, timestamp: str | None
) -> Source:
    if not hasattr(frame, "_plan"):
        raise SourceError(
            "the DataFrame belongs to a classic Spark session; bridge reads through Spark Connect.\n"
            "  Give the table's name, or make the DataFrame in the session of bridge.connect()."
        )
    if frame.sparkSession is not spark:
        raise SourceError(
            "the DataFrame belongs to another session than the one given as spark=.\n"
            "  Leave spark= out: a DataFrame is read by its own session."
        )
    _refuse_version("a DataFrame", version, timestamp)
    held, view = _held(frame, spark, "DataFrame")
    pin = Pin(None, None, "a DataFrame's plan has no version")
    return Source(spark, engine, "DataFrame", "dataframe", None, pin, held, held, view=view, is_temporary=True)


def _find_path(
    source: str | Path,
    spark: SparkSession,
    engine: Engine,
    version: int | None,
    timestamp: str | None,
    volume_root: Path | None,
) -> Source:
    text = str(source)
    folder = locate(text, volume_root)
    # A folder that is not here may be one that the server has.
    is_here = folder.local is not None and folder.local.is_dir()
    path = engine.spark_path(folder.folder().resolve()) if is_here else folder.name
    relation = f"delta.{quote(path)}"
    pin = engine.pin(spark, relation, path, version, timestamp)
    frame, pin = _read_delta(spark, text, relation, pin, version, timestamp)
    return Source(spark, engine, text, "delta", path, pin, frame, frame, again=source)


def _find_name(text: str, spark: SparkSession, engine: Engine, version: int | None, timestamp: str | None) -> Source:
    parts = parse_name(text)
    relation = quote_parts(parts)
    name = ".".join(parts)
    details = _describe(spark, parts, relation, name)
    is_temporary = not details or details.get("type") == "TEMPORARY"
    again = None
    if not is_temporary:
        # The same table by another spelling is the same table, in receipts and when exports are looked for.
        with translated(name):
            place = spark.catalog.currentCatalog(), spark.catalog.currentDatabase()
        remember_place(spark, *place)
        full = (*place[: 3 - len(parts)], *parts)
        name, again = ".".join(full), quote_parts(full)
    location, provider = details.get("location"), details.get("provider")
    if provider is None or provider.lower() != "delta":
        what = "view" if provider is None else f"{provider} table"
        _refuse_version(f"{name}, a {what},", version, timestamp)
        kind = "view" if provider is None else "files" if provider.lower() in _FILE_PROVIDERS else "foreign"
        held, view = _held(spark.table(relation), spark, name)
        pin = Pin(None, details.get("view text"), f"a {what} has no version")
        return Source(
            spark, engine, name, kind, location, pin, held, held, view=view, is_temporary=is_temporary, again=again
        )
    pin = engine.pin(spark, relation, location, version, timestamp)
    frame, pin = _read_delta(spark, name, relation, pin, version, timestamp)
    if any(key.strip("# ").startswith(("row filter", "column mask")) for key in details):
        # what they let through may change without a version
        pin = replace(pin, fingerprint=None, reason=f"{pin.reason}; its row filter or column masks have no version")
    return Source(spark, engine, name, "delta", location, pin, frame, frame, again=again)


def _held(frame: DataFrame, spark: SparkSession, name: str) -> tuple[DataFrame, str | None]:
    """Hold a plan fast under a private view, so that a view it reads can be replaced meanwhile without harm."""
    with translated(name):
        if len({column.lower() for column in frame.columns}) < len(frame.columns):
            return frame, None  # no view can have such columns, and they are refused
        view = f"bridge_{uuid.uuid4().hex}"
        frame.createTempView(view)
        return spark.table(view), view


def _read_delta(
    spark: SparkSession, name: str, relation: str, pin: Pin, version: int | None, timestamp: str | None
) -> tuple[DataFrame, Pin]:
    """Return what reads the table at its pin, and the pin: none where nobody asked for one and the table refuses it.

    Tables with row filters or column masks may tell their history and yet refuse to be read at a version.
    """
    if version is None and timestamp is None and pin.version is not None:
        try:
            return _read_at(spark, name, relation, pin, version, timestamp), pin
        except SourceError as exc:
            cause = exc.__cause__
            if cause is None or classify(cause) is not Failure.NO_TIME_TRAVEL:
                raise
            pin = Pin(None, None, f"the table refuses time travel: {reason(cause)}")
    return _read_at(spark, name, relation, pin, version, timestamp), pin


def _read_at(
    spark: SparkSession, name: str, relation: str, pin: Pin, version: int | None, timestamp: str | None
) -> DataFrame:
    at_time = "" if timestamp is None else f" TIMESTAMP AS OF {sql_string(timestamp)}"
    at_version = at_time if pin.version is None else f" VERSION AS OF {pin.version}"
    with _time_travel(name, version, timestamp):
        if timestamp is not None:
            # Also where the history told the version: it is the engine who refuses a time that is yet to come.
            _ = spark.sql(f"SELECT * FROM {relation}{at_time}").schema
        frame = spark.sql(f"SELECT * FROM {relation}{at_version}")
        _ = frame.schema
    return frame


def _describe(spark: SparkSession, parts: tuple[str, ...], relation: str, name: str) -> dict[str, str]:
    """Return the detailed information of a table in lower-case keys; empty for a temporary view."""
    from pyspark.errors import PySparkException

    try:
        with quiet():
            rows = spark.sql(f"DESCRIBE TABLE EXTENDED {relation}").collect()
    except PySparkException as exc:
        if classify(exc) is Failure.NO_TABLE:
            raise SourceNotFoundError(_missing_table(spark, parts, name)) from exc
        with translated(name):
            raise
    heading = next((i for i, row in enumerate(rows) if row["col_name"].startswith("# Detailed Table")), len(rows))
    return {row["col_name"].lower(): row["data_type"] for row in rows[heading + 1 :] if row["col_name"]}


def _missing_table(spark: SparkSession, parts: tuple[str, ...], name: str) -> str:
    """Say which part of the name is not there, with near names of its kind."""

    def listed(statement: str) -> list[str]:
        from pyspark.errors import PySparkException

        try:
            with quiet():
                rows = spark.sql(statement).limit(10_000).collect()
        except PySparkException:
            return []
        return [row["tableName"] if "tableName" in row else row[0] for row in rows]

    *above, table = parts
    in_catalog = f" IN {quote(above[0])}" if len(above) == 2 else ""
    levels = [("catalog", above[:1], "SHOW CATALOGS")] if in_catalog else []
    levels += [("schema", above, f"SHOW SCHEMAS{in_catalog}")] if above else []
    for kind, path, statement in levels:
        known = listed(statement)
        if path[-1].lower() not in {candidate.lower() for candidate in known}:
            offered = near(path[-1], set(known) - {"system"})
            return f"{name} does not exist: there is no {kind} {'.'.join(path)}.\n  {offered}".rstrip()
    tables = listed("SHOW TABLES" + (f" IN {quote_parts(above)}" if above else ""))
    where = f"in {'.'.join(above)}" if above else "in the current schema"
    return f"{name} does not exist {where}.\n  {near(table, tables)}".rstrip()


def _refuse_version(what: str, version: int | None, timestamp: str | None) -> None:
    if version is not None or timestamp is not None:
        asked = f"version={version}" if version is not None else f"timestamp={timestamp!r}"
        raise SourceError(f"{what} has no versions, so {asked} cannot be read.\n  Leave it out, or name a Delta table.")


@contextmanager
def _time_travel(name: str, version: int | None, timestamp: str | None) -> Iterator[None]:
    """Say what a failed read of a version means."""
    from pyspark.errors import PySparkException

    asked = "newest version" if timestamp is None else f"timestamp {timestamp!r}"
    asked = asked if version is None else f"version {version}"
    try:
        with quiet():
            yield
    except PySparkException as exc:
        failure = classify(exc)
        if failure is Failure.NO_TABLE:
            raise SourceNotFoundError(
                f"{name} is no Delta table: {reason(exc)}\n"
                "  Give the folder that holds _delta_log; read other files with spark.read and pass the DataFrame."
            ) from exc
        if failure is Failure.NO_VERSION:
            raise SourceNotFoundError(f"{name} has no {asked}: {reason(exc)}") from exc
        if failure is Failure.NO_TIME_TRAVEL:
            raise SourceError(f"{name} cannot be read as of {asked}: {reason(exc)}") from exc
        with translated(name):
            raise


def _choose_columns(have: list[str], asked: Sequence[str] | None, name: str) -> tuple[str, ...]:
    """Return the columns to read, in the order asked for and in the table's own spelling."""
    spelled: dict[str, str] = {}
    for column in have:
        if column.lower() in spelled:
            raise SourceError(
                f"{name} has two columns {column!r} (names are compared without regard to case).\n"
                "  Rename one in a DataFrame: df.toDF(...), and pass that."
            )
        spelled[column.lower()] = column
    if not have:
        raise SourceError(f"{name} has no columns.")
    if asked is None:
        return tuple(have)
    chosen: list[str] = []
    for column in asked:
        if not isinstance(column, str) or column.lower() not in spelled:
            raise SourceNotFoundError(f"{name} has no column {column!r}.\n  {near(str(column), have)}")
        if spelled[column.lower()] in chosen:
            raise SourceError(f"columns names {column!r} twice.")
        chosen.append(spelled[column.lower()])
    return tuple(chosen)


def _check_policies(
    frame: DataFrame, columns: tuple[str, ...], drop_nulls: Sequence[str], to_json: Sequence[str]
) -> None:
    from pyspark.sql.types import ArrayType, MapType, StructType, VariantType

    for name in (*drop_nulls, *to_json):
        if name not in columns:
            raise PolicyError(f"policies names {name!r}, which is not read.\n  {near(name, list(columns))}".rstrip())
    for name in to_json:
        kind = frame.schema[name].dataType
        if not isinstance(kind, StructType | MapType | ArrayType | VariantType):
            raise PolicyError(
                f"column {name!r} is {kind.simpleString()}; to_json() is for structs, maps, arrays and variants."
            )


def _select(frame: DataFrame, columns: tuple[str, ...], to_json: Sequence[str] = ()) -> DataFrame:
    # Each projection is one more plan that the server analyses.
    if tuple(frame.columns) == columns and not to_json:
        return frame
    if not to_json:
        return frame.select(*[quote(name) for name in columns])
    from pyspark.sql.connect import functions as F

    def read(name: str) -> Any:
        text = F.to_json(F.col(quote(name)), {"ignoreNullFields": "false"})
        return text.alias(name) if name in to_json else quote(name)

    return frame.select(*[read(name) for name in columns])
