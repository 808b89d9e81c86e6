"""export_table and open_export: Parquet shards that are complete or absent, and found again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.columns.rules import Rules, by_spark
from bridge.config import load_settings
from bridge.display import did_you_mean
from bridge.errors import ExportNotFoundError, PolicyError
from bridge.loading.parquet import ExportedRowGroups
from bridge.manifest import Manifest
from bridge.tables.fetch import fetch
from bridge.tables.prepare import prepare
from bridge.tables.table import Table
from bridge.volumes.commit import complete_attempts, read_marker
from bridge.volumes.path import locate
from bridge.volumes.stores import LocalStorage

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from bridge.columns.rules import Policies
    from bridge.config import Settings


def export_table(
    source: str | Path | DataFrame,
    volume: str | os.PathLike[str] | None = None,
    *,
    columns: Sequence[str] | None = None,
    where: str | Column | None = None,
    version: int | None = None,
    timestamp: str | datetime | None = None,
    policies: Policies | None = None,
    shard_bytes: int | str = "1GiB",
    row_group_bytes: int | str = "64MiB",
    reuse: bool = True,
    spark: SparkSession | None = None,
) -> Table:
    """Write a table's rows as Parquet shards into a folder of a volume, and return a Table over them.

    The export is complete or absent: it has a folder of its own under `volume`, and readers find it by a marker that is
    written last. With `reuse`, a complete export of the same version, columns, filter, policies and shape by the same
    user is returned instead, and Spark reads no rows; what has no version (views, DataFrames) and what is filtered by a
    Column is always exported afresh.

    Args:
        source: As in `load_table`.
        volume: A folder or volume; else the setting `volume`, else the embedded engine's data folder.
        policies: As in `load_table`. The files hold what Spark gave; the table returned, and `open_export`, apply them.
        shard_bytes: About how large a file should be.
        row_group_bytes: About how large a row group should be before compression.

    Raises:
        VolumeError: There is no volume, or it cannot be written.
        ExportError: The rows that were written are not the rows that were read; nothing is left visible.
        SourceNotFoundError, SourceError, PolicyError, EngineError: As in `load_table`.
    """
    with prepare(
        source, columns=columns, where=where, version=version, timestamp=timestamp, policies=policies,
        route="export", volume=volume, spark=spark, shard_bytes=shard_bytes, row_group_bytes=row_group_bytes,
        reuse=reuse,
    ) as prepared:  # fmt: skip
        return fetch(prepared)


def open_export(
    root_or_path: str | os.PathLike[str],
    *,
    table: str | None = None,
    version: int | None = None,
    policies: Policies | None = None,
) -> Table:
    """Return the newest complete export in a folder, without Spark.

    It may be of some columns or rows only: `table.receipt` holds the columns, filter and limit it was made with, and
    printing the table shows a filter.

    Args:
        root_or_path: The folder that was given as `volume`, or the folder of one export (`table.path`).
        table: Name of the table, in full or its last parts; needed where the folder holds exports of several.
        version: Only exports of this version of the table.
        policies: In place of those that the export was made with, which are applied by default. What Spark does
            (`drop_nulls`, `to_json`) is done when an export is made.

    Raises:
        PolicyError: A policy is not for its column, or is one of Spark's.
        ExportNotFoundError: No complete export of that table and version is there.
    """
    settings = load_settings()
    folder = locate(root_or_path, settings.volume_root).folder()
    marker = read_marker(LocalStorage(folder))
    if marker is not None:
        found = Manifest.from_json(marker.body, folder)
        is_other = table is not None and not _is_named(found.table, table)
        if is_other or (version is not None and found.version != version):
            wanted = _named(table or found.table, version)
            raise ExportNotFoundError(f"{folder} holds {_named(found.table, found.version)}, not {wanted}.")
        return _opened(folder, found, policies, settings)
    newest: dict[str, tuple[Path, Manifest]] = {}
    for parent in sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ():
        for attempt, marker in complete_attempts(LocalStorage(parent)):
            manifest = Manifest.from_json(marker.body, parent / attempt.name)
            if version is None or manifest.version == version:
                newest.setdefault(manifest.table, (parent / attempt.name, manifest))
    asked = "" if version is None else f" of version {version}"
    if not newest:
        raise ExportNotFoundError(
            f"{folder} holds no complete export{asked}.\n  Make one: bridge.export_table(table, {str(folder)!r})."
        )
    named = [name for name in newest if table is None or _is_named(name, table)]
    if not named:
        hint = did_you_mean(table or "", newest) or f"\n  It holds exports of {', '.join(newest)}."
        raise ExportNotFoundError(f"{folder} holds no complete export of {table}{asked}.{hint}")
    if len(named) > 1:
        raise ExportNotFoundError(f"{folder} holds exports of {', '.join(named)}.\n  Say which, in full: table=.")
    return _opened(*newest[named[0]], policies, settings)


def _opened(folder: Path, manifest: Manifest, policies: Policies | None, settings: Settings) -> Table:
    rules = None
    if policies is not None:
        if any(by_spark(policies)):
            raise PolicyError("drop_nulls() and to_json() are done by Spark: export the table with them.")
        row_groups = ExportedRowGroups(folder, manifest)
        rules = Rules.choose(manifest.schema, policies).bound(
            lambda: map(row_groups.read, range(len(row_groups.row_counts)))
        )
    return Table.exported(folder, manifest, rules, client_max_bytes=settings.client_max_bytes)


def _is_named(name: str, asked: str) -> bool:
    """Return whether `asked` is `name`, or its last parts."""
    return f".{name}".endswith(f".{asked}")


def _named(table: str, version: int | None) -> str:
    return table if version is None else f"{table} version {version}"
