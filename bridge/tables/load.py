"""load_table and plan_table: find out, decide, fetch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.columns.contract import type_contract
from bridge.config import Settings, available_memory, data_folder, load_settings
from bridge.display import format_bytes, format_count
from bridge.errors import SourceError, TableTooLargeError, VolumeError
from bridge.manifest import Manifest
from bridge.progress import progress_bar
from bridge.spark.connect import Connection, attach
from bridge.spark.read import stream_batches
from bridge.spark.size import Size, measure
from bridge.spark.source import Source, resolve
from bridge.tables.export import (
    ROW_GROUP_BYTES,
    SHARD_BYTES,
    export_folder,
    find_reusable,
    identity,
    shape,
    write_export,
)
from bridge.tables.plan import Plan, decide
from bridge.tables.receipt import make_receipt
from bridge.tables.table import Table
from bridge.volumes.path import Place, locate

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_MAX_BYTES = 512 << 20
# Batches as servers send them are small; they are joined to pieces of this size while they arrive, so that no moment
# needs the whole table twice.
_PIECE_BYTES = 32 << 20


@dataclass(frozen=True)
class Prepared:
    """A plan with all that is needed to carry it out."""

    plan: Plan
    source: Source
    connection: Connection
    size: Size
    volume: Place | None
    reusable: tuple[Path, Manifest] | None
    identity: str | None
    shard_bytes: int
    row_group_bytes: int
    settings: Settings
    auto: bool


def plan_table(
    source: str | Path | DataFrame,
    *,
    columns: Sequence[str] | None = None,
    where: str | Column | None = None,
    version: int | None = None,
    timestamp: str | datetime | None = None,
    limit: int | None = None,
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
        source, columns=columns, where=where, version=version, timestamp=timestamp, limit=limit, route=route,
        max_bytes=max_bytes, volume=volume, spark=spark,
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
    route: str = "auto",
    max_bytes: int | str | None = None,
    volume: str | os.PathLike[str] | None = None,
    spark: SparkSession | None = None,
) -> Table:
    """Read a table through Spark Connect and return it, fetched: small ones into memory, large ones as an export.

    A Delta table is read at one version, the newest unless `version` or `timestamp` is given; its rows come in no
    particular order. A result that outgrows `max_bytes` while it is collected is stopped on the server and exported.

    Args:
        source: "catalog.schema.table", "schema.table", "table", a path of a Delta table, or a Spark Connect DataFrame.
        columns: Names of the columns to read, in this order; default: all.
        where: A filter, as SQL text or a pyspark Column.
        version: A version of a Delta table.
        timestamp: A time, of which a Delta table's version is read; text is read in the session's zone.
        limit: At most so many rows.
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
        TableTooLargeError: More than `max_bytes` with route "collect", or with "auto" and no volume to export to.
        EngineUnavailableError, EngineSilentError: The server cannot be reached, or went silent.
        ExportError, VolumeError: The export could not be completed; nothing of it is visible.

    Example:
        >>> import bridge
        >>> spark = bridge.connect()
        >>> table = bridge.load_table(spark.range(3))
        >>> table.to_numpy()["id"].tolist()
        [0, 1, 2]
    """
    with prepare(
        source, columns=columns, where=where, version=version, timestamp=timestamp, limit=limit, route=route,
        max_bytes=max_bytes, volume=volume, spark=spark,
    ) as prepared:  # fmt: skip
        return fetch(prepared)


@contextmanager
def prepare(
    source: str | Path | DataFrame,
    *,
    spark: SparkSession | None = None,
    volume: str | os.PathLike[str] | None = None,
    max_bytes: int | str | None = None,
    route: str = "auto",
    shard_bytes: int | str = SHARD_BYTES,
    row_group_bytes: int | str = ROW_GROUP_BYTES,
    reuse: bool = True,
    **query: Any,
) -> Iterator[Prepared]:
    """Resolve, measure and decide; what was registered in the session for it is dropped at the end."""
    settings = load_settings(volume=None if volume is None else os.fspath(volume), max_bytes=max_bytes)
    ceiling = settings.max_bytes if settings.max_bytes is not None else min(_MAX_BYTES, available_memory() // 4)
    decide(None, ceiling, route)
    sizes = shape(shard_bytes, row_group_bytes)
    if not isinstance(source, str | os.PathLike):
        if not hasattr(source, "sparkSession"):
            raise SourceError(
                f"the source is a {type(source).__name__}; give a table's name, a path, or a Spark Connect DataFrame."
            )
        spark = source.sparkSession if spark is None else spark
    connection = attach(spark, settings)
    resolved = resolve(
        source, spark=connection.spark, engine=connection.engine, volume_root=settings.volume_root, **query
    )
    with closing(resolved):
        size = measure(resolved, ceiling)
        chosen, reason = decide(size.num_bytes, ceiling, route)
        place = _volume(settings, connection)
        known, why_not = identity(resolved, connection, *sizes)
        reusable = (
            find_reusable(export_folder(place, resolved), known) if reuse and place and chosen == "export" else None
        )
        plan = Plan(
            source=resolved.name,
            engine=f"{connection.engine.name} ({connection.address})",
            columns=resolved.columns,
            where=resolved.where,
            limit=resolved.limit,
            version=resolved.pin.version,
            pin_reason=resolved.pin.reason,
            num_rows=size.num_rows,
            rows_from=size.rows_from,
            num_bytes=size.num_bytes,
            bytes_from=size.width_from,
            is_bound=size.is_bound,
            max_bytes=ceiling,
            route=chosen,
            reason=reason,
            volume=None if place is None else place.name,
            reuses=str(reusable[0]) if reusable else None,
            reuse_reason=f"reused: {reusable[0]}" if reusable else why_not or "new: none of this version is there",
            types=type_contract(
                resolved.schema, {f.name: f.dataType.simpleString() for f in resolved.spark_schema.fields}
            ),
        )
        yield Prepared(
            plan, resolved, connection, size, place, reusable, known, *sizes, settings, auto=route == "auto"
        )  # fmt: skip


def fetch(prepared: Prepared) -> Table:
    """Carry out a plan."""
    if prepared.plan.route == "export":
        return _export(prepared)
    estimate = prepared.size.num_bytes
    if not prepared.size.is_bound and estimate is not None and estimate > prepared.plan.max_bytes:
        raise _too_large(prepared, f"would take about {format_bytes(estimate)}")
    try:
        return _collect(prepared)
    except _OutgrownError as exc:
        if not prepared.auto:
            raise _too_large(prepared, f"takes more than {format_bytes(prepared.plan.max_bytes)}") from exc
        ceiling = format_bytes(prepared.plan.max_bytes)
        told = f"collecting passed max_bytes, {ceiling}, after {format_count(exc.num_rows)} rows"
        width = exc.num_bytes / max(exc.num_rows, 1)
    except TableTooLargeError as exc:
        if not prepared.auto:
            raise
        told, width = str(exc).splitlines()[0], None
    return _export(
        replace(
            prepared,
            plan=replace(prepared.plan, route="export", reason=told),
            size=replace(prepared.size, row_bytes=width or prepared.size.row_bytes),
        )
    )


class _OutgrownError(Exception):
    """A collect passed its ceiling and was stopped."""

    def __init__(self, num_rows: int, num_bytes: int) -> None:
        super().__init__(num_rows, num_bytes)
        self.num_rows = num_rows
        self.num_bytes = num_bytes


def _collect(prepared: Prepared) -> Table:
    source, plan = prepared.source, prepared.plan
    receipt = make_receipt(source, prepared.connection)
    rows = _collect_rows(source, plan.max_bytes, prepared.size.num_rows, prepared.settings.progress)
    return Table.collected(rows, plan=plan, receipt={**receipt, "route": "collect", "num_rows": rows.num_rows})


def _collect_rows(source: Source, max_bytes: int, expected_rows: int | None, show: bool | None) -> pa.Table:
    schema = source.schema
    pieces: list[pa.Table] = []
    pending: list[pa.Table] = []
    num_rows = num_bytes = pending_bytes = 0
    bar = progress_bar(f"collect {source.name}", total=expected_rows, unit=" rows", enabled=show)
    with bar, closing(stream_batches(source.frame, schema, source.name)) as batches:
        for batch in batches:
            num_rows += batch.num_rows
            num_bytes += batch.nbytes
            pending_bytes += batch.nbytes
            if num_bytes > max_bytes:
                raise _OutgrownError(num_rows, num_bytes)
            pending.append(batch)
            if pending_bytes >= _PIECE_BYTES:
                pieces.append(pa.concat_tables(pending).combine_chunks())
                pending, pending_bytes = [], 0
            bar.update(batch.num_rows)
    if pending:
        pieces.append(pa.concat_tables(pending).combine_chunks())
    return pa.concat_tables(pieces) if pieces else schema.empty_table()


def _export(prepared: Prepared) -> Table:
    if prepared.volume is None:
        if not prepared.auto:
            raise VolumeError(
                f"{prepared.plan.source} has nowhere to be exported to.\n"
                '  Pass volume="/Volumes/..." (needs WRITE VOLUME), or set BRIDGE_VOLUME.'
            )
        estimate = prepared.size.num_bytes
        told = (
            f"would take about {format_bytes(estimate)}"
            if estimate
            else f"takes more than {format_bytes(prepared.plan.max_bytes)}"
        )
        raise _too_large(prepared, told)
    if prepared.reusable is not None:
        return Table.exported(*prepared.reusable, plan=prepared.plan)
    parent = export_folder(prepared.volume, prepared.source)
    folder, manifest = write_export(
        prepared.source,
        prepared.connection,
        parent,
        identity=prepared.identity,
        shard_bytes=prepared.shard_bytes,
        row_group_bytes=prepared.row_group_bytes,
        row_bytes=prepared.size.row_bytes,
    )
    return Table.exported(folder, manifest, plan=prepared.plan)


def _too_large(prepared: Prepared, told: str) -> TableTooLargeError:
    way_out = (
        'Pass volume="/Volumes/..." (needs WRITE VOLUME), name fewer columns, or limit=.'
        if prepared.auto
        else 'Name fewer columns, raise max_bytes, use limit=, or use route="export".'
    )
    return TableTooLargeError(
        f"{prepared.plan.source} {told}; max_bytes is {format_bytes(prepared.plan.max_bytes)}.\n  {way_out}"
    )


def _volume(settings: Settings, connection: Connection) -> Place | None:
    """Return where exports go: the argument, BRIDGE_VOLUME, the profile's volume, the embedded engine's data folder."""
    if settings.volume is not None:
        return locate(settings.volume, settings.volume_root)
    return locate(data_folder() / "exports") if connection.is_embedded else None
