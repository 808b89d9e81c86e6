"""load_table and plan_table: find out, decide, fetch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.tables import ranks
from bridge.tables.plan import Plan
from bridge.tables.prepare import prepare
from bridge.tables.replay import with_replay
from bridge.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from bridge.columns.rules import Policies


def plan_table(
    source: str | Path | DataFrame,
    *,
    columns: Sequence[str] | None = None,
    where: str | Column | None = None,
    version: int | None = None,
    timestamp: str | datetime | None = None,
    limit: int | None = None,
    policies: Policies | None = None,
    route: str = "auto",
    max_bytes: int | str | None = None,
    volume: str | os.PathLike[str] | None = None,
    spark: SparkSession | None = None,
) -> Plan:
    """Return what `load_table` would do with the same arguments, and why; no rows move.

    Raises:
        SourceNotFoundError, SourceError, EngineError: As in `load_table`.
    """
    with prepare(
        source, columns=columns, where=where, version=version, timestamp=timestamp, limit=limit,
        policies=policies, route=route, max_bytes=max_bytes, volume=volume, spark=spark,
    ) as prepared:  # fmt: skip
        return prepared.plan


def load_table(
    source: str | Path | DataFrame,
    *,
    columns: Sequence[str] | None = None,
    where: str | Column | None = None,
    version: int | None = None,
    timestamp: str | datetime | None = None,
    limit: int | None = None,
    policies: Policies | None = None,
    route: str = "auto",
    max_bytes: int | str | None = None,
    volume: str | os.PathLike[str] | None = None,
    spark: SparkSession | None = None,
) -> Table:
    """Read a table through Spark Connect and return it, fetched: small ones into memory, large ones as an export.

    A Delta table is read at one version, the newest unless `version` or `timestamp` is given; its rows come in no
    particular order. A result that outgrows `max_bytes` while it is collected is stopped on the server and exported.

    Where a torch process group is initialized, all its ranks make this call: rank 0 alone talks to Spark, the others
    receive the rows or open the same export, and what fails on rank 0 is raised on all.

    Args:
        source: "catalog.schema.table", "schema.table", "table", a path of a Delta table, or a Spark Connect DataFrame.
        columns: Names of the columns to read, in this order; default: all.
        where: A filter, as SQL text or a pyspark Column.
        version: A version of a Delta table.
        timestamp: A time, of which a Delta table's version is read; text is read in the session's zone.
        limit: At most so many rows.
        policies: What may be done to columns that a target could not hold as they are: by column name, or by a type
            of Python (`str`, `Decimal`) for all columns of that kind, a policy or several in their order, such as
            {"price": bridge.as_float64(), "clicks": bridge.fill(0), str: bridge.dictionary()}. `types` of the plan
            and of the table show what each column becomes.
        route: "auto", or "collect" or "export" to choose yourself.
        max_bytes: The most that a collect may hold in memory, as Arrow; an integer or "2GiB". Default: the setting
            `max_bytes`, else the lesser of 512 MiB and a quarter of the free memory.
        volume: Where an export goes: /Volumes/<catalog>/<schema>/<volume>/... or a folder. Default: the setting
            `volume`, else the embedded engine's data folder.
        spark: The Spark Connect session; default: that of `connect`, or the DataFrame's own.

    Raises:
        SourceNotFoundError: No such table, schema, column or version; near names are offered.
        SourceError: It cannot be read as asked: `version` of something that has none, duplicate column names, a
            filter that does not parse, a type that Arrow cannot hold.
        PolicyError: A policy is not for its column, or names none.
        LossyConversionError: A value does not fit what its policy makes of it.
        TableTooLargeError: More than `max_bytes` with route "collect", or with "auto" and no volume to export to.
        AccessDeniedError: You may not read it; the message says what to ask for.
        EngineUnavailableError, EngineSilentError: The server cannot be reached, ended the session (SessionLostError)
            and could not be replaced, or went silent.
        ExportError, VolumeError: The export could not be completed; nothing of it is visible.
        RankError: A rank did not make this call, made it with other arguments, or was lost.

    Example:
        >>> import bridge
        >>> spark = bridge.connect()
        >>> table = bridge.load_table(spark.range(3))
        >>> table.to_numpy()["id"].tolist()
        [0, 1, 2]
    """
    arguments: dict[str, Any] = {
        "source": source, "columns": columns, "where": where, "version": version, "timestamp": timestamp,
        "limit": limit, "policies": policies, "route": route, "max_bytes": max_bytes, "volume": volume,
    }  # fmt: skip
    return ranks.shared(lambda: with_replay(spark=spark, **arguments), "load_table", arguments)
