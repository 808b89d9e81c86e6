"""export_table and open_export: Parquet shards that are complete or absent, and found again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.columns.rules import Rules
from bridge.config import load_settings
from bridge.display import did_you_mean
from bridge.errors import ExportNotFoundError, SourceError
from bridge.manifest import Manifest
from bridge.spark.shape import LAYOUT, Shape
from bridge.tables import ranks
from bridge.tables.identity import differing
from bridge.tables.inventory import is_named
from bridge.tables.prepare import Reuse
from bridge.tables.publish import bind, export_folder, readable_exports
from bridge.tables.replay import with_replay
from bridge.tables.table import Table
from bridge.volumes.commit import read_marker
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
    limit: int | None = None,
    policies: Policies | None = None,
    shard_bytes: int | str = "1GiB",
    row_group_bytes: int | str = "64MiB",
    num_shards: int | None = None,
    order_by: str | Sequence[str] | None = None,
    shuffle_at_write: int | None = None,
    reuse: bool = True,
    max_age_s: float | None = None,
    shared: bool = False,
    spark: SparkSession | None = None,
) -> Table:
    """Write a table's rows as Parquet shards into a folder of a volume, and return a Table over them.

    The export is complete or absent: it has a folder of its own under `volume`, and readers find it by a marker that is
    written last. With `reuse`, a complete export of the same version, columns, filter and shape by the same user is
    returned instead, and Spark reads no rows. Under a process group it is one call of all ranks, as `load_table` is.

    Args:
        source: As in `load_table`; so are the arguments up to `policies`.
        volume: A folder or volume; else the setting `volume`, else the embedded engine's data folder.
        policies: The files hold what Spark gave, without the rows of drop_nulls() and with the text of to_json(); the
            table returned, and `open_export`, apply the rest.
        shard_bytes: About how large a file should be. The last one may be smaller, and so may all where it cannot be
            known how many rows there are.
        row_group_bytes: About how large a row group should be before compression.
        num_shards: How many files there should be, in place of `shard_bytes`; fewer where there are fewer rows.
        order_by: Columns by which all rows are sorted, as Spark sorts (NULL first), through the files in their order.
        shuffle_at_write: A seed by which all rows are mixed once, so that training may read in order.
        reuse: Whether an export that is there may be returned.
        max_age_s: Take also an export that need not hold the rows of today, if it was begun so many seconds ago at
            most: of a view, of a table without versions or whose history may not be read, or with a filter that
            reads the clock. Without it these are exported afresh; a DataFrame, a temporary view and a filter that is
            a Column always are.
        shared: Take also exports by other users who said so, and let them take this one. Whoever is asked first gives
            the others what they may see: say so only where row filters and masks are the same for all. It only says
            who reuses what: who may read the files, the folder's permissions say.

    Raises:
        VolumeError: There is no volume, or it cannot be written.
        ExportError: The rows that were written are not the rows that were read; nothing is left visible.
        SourceNotFoundError, SourceError, PolicyError, EngineError, RankError: As in `load_table`.
    """
    arguments: dict[str, Any] = {
        "source": source, "volume": volume, "columns": columns, "where": where, "version": version,
        "timestamp": timestamp, "limit": limit, "policies": policies,
        "shape": Shape.checked(shard_bytes, row_group_bytes, num_shards, order_by, shuffle_at_write),
        "reuse": Reuse(reuse, max_age_s, shared),
    }  # fmt: skip
    return ranks.shared(lambda: with_replay(spark=spark, route="export", **arguments), "export_table", arguments)


def open_export(
    root_or_path: str | os.PathLike[str],
    *,
    table: str | None = None,
    version: int | None = None,
    policies: Policies | None = None,
) -> Table:
    """Return the newest complete export in a folder, without Spark.

    Where there are exports of the table that may hold different rows (other columns, filters, limits, users, engines),
    it is not guessed which is meant: the error lists their folders. Who may read one, the folder's permissions say.

    Args:
        root_or_path: The folder that was given as `volume`, or the folder of one export (`table.path`).
        table: Name of the table, in full or its last parts; needed where the folder holds exports of several.
        version: Only exports of this version of the table.
        policies: In place of those that the export was made with, which are applied by default. What Spark does
            (`drop_nulls`, `to_json`) is done when an export is made.

    Raises:
        PolicyError: A policy is not for its column, or is one of Spark's.
        ExportNotFoundError: No complete export of that table and version is there, or several that differ.
        SourceError: `version` is no whole number.
    """
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise SourceError(f"version is {version!r}; give a whole number.")
    settings = load_settings()
    root = locate(root_or_path, settings.volume_root)
    folder = root.folder()
    marker = read_marker(LocalStorage(folder))
    if marker is not None:
        found = Manifest.from_json(marker.body, folder)
        is_other = table is not None and not is_named(found.table, table)
        if is_other or (version is not None and found.version != version):
            wanted = _named(table or found.table, version)
            raise ExportNotFoundError(f"{folder} holds {_named(found.table, found.version)}, not {wanted}.")
        return _opened(folder, found, policies, settings)
    own = export_folder(root, table).folder() if table is not None else None
    parents = [own] if own and own.is_dir() else _folders(folder)
    newest: dict[str, dict[str, tuple[Path, Manifest]]] = {}
    versions: set[int] = set()
    for parent in parents:
        for attempt, manifest in readable_exports(parent):
            versions |= set() if manifest.version is None else {manifest.version}
            if version is None or manifest.version == version:
                path = parent / attempt.name
                newest.setdefault(manifest.table, {}).setdefault(_kind(manifest, path), (path, manifest))
    asked = "" if version is None else f" of version {version}"
    if not newest:
        there = f"\n  There is: {', '.join(map(str, sorted(versions)))}." if versions else ""
        what = "holds no complete export" if folder.is_dir() else "is not there, so it holds no complete export"
        raise ExportNotFoundError(
            f"{folder} {what}{asked}.{there}\n  Make one: bridge.export_table(table, {str(folder)!r})."
        )
    named = [name for name in newest if table is None or is_named(name, table)]
    if not named:
        hint = did_you_mean(table or "", newest) or f"\n  It holds exports of {', '.join(newest)}."
        raise ExportNotFoundError(f"{folder} holds no complete export of {table}{asked}.{hint}")
    if len(named) > 1:
        raise ExportNotFoundError(f"{folder} holds exports of {', '.join(named)}.\n  Say which, in full: table=.")
    kinds = newest[named[0]]
    if len(kinds) > 1:
        raise ExportNotFoundError(
            f"{folder} holds exports of {named[0]}{asked} that may hold different rows. Open one by its own folder, or "
            f"keep them under folders of their own:{_told_apart(list(kinds.values()))}"
        )
    return _opened(*next(iter(kinds.values())), policies, settings)


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _kind(manifest: Manifest, path: Path) -> str:
    """Return what is equal for exports of the same query, however their shards are laid out."""
    if manifest.identity is None:
        return str(path)
    return json.dumps({name: value for name, value in manifest.query.items() if name not in LAYOUT}, sort_keys=True)


def _told_apart(found: list[tuple[Path, Manifest]]) -> str:
    names = [name for name in differing([manifest.query for _, manifest in found]) if name not in LAYOUT]
    lines = []
    for path, manifest in found:
        told = ", ".join(f"{name} {manifest.query.get(name)}" for name in names if name not in ("schema", "format"))
        lines.append(f"\n  {told or 'of ' + manifest.receipt.get('time', 'a time that is not known')}: {path}")
    return "".join(lines)


def _opened(folder: Path, manifest: Manifest, policies: Policies | None, settings: Settings) -> Table:
    rules = None
    if policies is not None:
        rules = bind(folder, manifest, Rules.choose_for_files(manifest.schema, policies))
    return Table.exported(folder, manifest, rules, client_max_bytes=settings.client_max_bytes)


def _named(table: str, version: int | None) -> str:
    return table if version is None else f"{table} version {version}"
