"""What a call needs before rows move: the source resolved, its size learned, the route decided."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.columns.contract import type_contract
from bridge.columns.rules import Policies, Rules, by_spark
from bridge.config import Settings, collect_ceiling, data_folder, load_settings
from bridge.errors import SourceError, VolumeError
from bridge.manifest import Manifest
from bridge.spark.connect import Connection, attach
from bridge.spark.size import Size, count_rows, measure
from bridge.spark.source import Source, resolve
from bridge.tables.plan import Plan, decide
from bridge.tables.publish import ROW_GROUP_BYTES, SHARD_BYTES, export_folder, find_reusable, identity, shape
from bridge.tables.receipt import spark_types
from bridge.volumes.path import Place, locate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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
    rules: Rules
    shard_bytes: int
    row_group_bytes: int
    settings: Settings
    auto: bool


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
    policies: Policies | None = None,
    **query: Any,
) -> Iterator[Prepared]:
    """Resolve, measure and decide; what was registered in the session for it is dropped at the end."""
    load = partial(load_settings, volume=None if volume is None else os.fspath(volume), max_bytes=max_bytes)
    settings = load()
    decide(None, 0, route)
    sizes = shape(shard_bytes, row_group_bytes)
    if not isinstance(source, str | os.PathLike):
        if not hasattr(source, "sparkSession"):
            raise SourceError(
                f"the source is a {_kind(source)}; give a table's name, a path, or a Spark Connect DataFrame.\n"
                "  Rows of this process become one by spark.createDataFrame(...)."
            )
        spark = source.sparkSession if spark is None else spark
    connection = attach(spark, settings)
    if connection.profile is not None:
        settings = load(profile=connection.profile)
    ceiling = collect_ceiling(settings)
    drop_nulls, to_json = by_spark(policies)
    resolved = resolve(
        source, spark=connection.spark, engine=connection.engine, volume_root=settings.volume_root,
        drop_nulls=drop_nulls, to_json=to_json, **query,
    )  # fmt: skip
    with closing(resolved):
        rules = Rules.choose(resolved.schema, policies)
        size = measure(resolved, ceiling)
        chosen, reason = decide(size.num_bytes, ceiling, route)
        place = _volume(settings, connection)
        known, why_not = identity(resolved, connection, rules, *sizes)
        reusable = None
        if place is not None and reuse and route != "collect":
            reusable = find_reusable(export_folder(place, resolved), known)
        if reusable and size.num_bytes is None and chosen == "collect":
            chosen, reason = "export", "the size is unknown, and a complete export of the same is there"
        if not reuse:
            why_not = "new: reuse=False"
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
            reuses=str(reusable[0]) if reusable and chosen == "export" else None,
            reuse_reason=f"reused: {reusable[0]}" if reusable else why_not or "new: none of this version is there",
            types=type_contract(rules.schema, spark_types(resolved), rules),
            drops_nulls=tuple(drop_nulls),
            num_dropped=None if resolved.dropped is None else count_rows(resolved.dropped),
        )
        yield Prepared(
            plan, resolved, connection, size, place, reusable, known, rules, *sizes, settings, auto=route == "auto"
        )  # fmt: skip


def _volume(settings: Settings, connection: Connection) -> Place | None:
    """Return where exports go: the argument, BRIDGE_VOLUME, the profile's volume, the embedded engine's data folder."""
    if settings.volume is not None:
        place = locate(settings.volume, settings.volume_root)
        if settings.volume_root is None and place.is_stand_in and not connection.engine.is_here:
            raise VolumeError(
                f"{place.name} is not mounted here, and the server at {connection.address} is elsewhere.\n"
                "  Set BRIDGE_VOLUME_ROOT to the folder where this machine and the server see their volumes."
            )
        return place
    return locate(data_folder() / "exports") if connection.is_embedded else None


def _kind(value: object) -> str:
    module = type(value).__module__.partition(".")[0]
    return type(value).__name__ if module == "builtins" else f"{type(value).__name__} of {module}"
