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
from bridge.distributed import local_world_size
from bridge.errors import ConfigError, SourceError, VolumeError
from bridge.manifest import Manifest
from bridge.spark.connect import Connection, attach
from bridge.spark.shape import Shape
from bridge.spark.size import Size, count_rows, measure
from bridge.spark.source import Source, resolve
from bridge.tables.identity import Identity
from bridge.tables.plan import Plan, decide
from bridge.tables.publish import export_folder, find_reusable, why_new
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
    reuse: Reuse
    identity: Identity
    rules: Rules
    shape: Shape
    settings: Settings
    auto: bool


@dataclass(frozen=True)
class Reuse:
    """Which exports may be taken in place of a new one.

    `max_age_s` is how old one may be whose rows need not be those of today; None: it is not taken. With `is_shared`,
    those of all users who say so, with the rights of whoever made them.
    """

    is_wanted: bool = True
    max_age_s: float | None = None
    is_shared: bool = False

    def __post_init__(self) -> None:
        if self.max_age_s is None:
            return
        if isinstance(self.max_age_s, bool) or not isinstance(self.max_age_s, int | float) or not self.max_age_s > 0:
            raise ConfigError(f"max_age_s is {self.max_age_s!r}; give a number of seconds above 0.")
        if not self.is_wanted:
            raise ConfigError("max_age_s says which export may be reused, and reuse=False that none may.")

    def find(self, folder: Place, identity: Identity) -> tuple[Path, Manifest] | None:
        """Return the export that may be taken."""
        return find_reusable(folder, identity, self.max_age_s) if self.is_wanted else None

    def why_new(self, folder: Place, identity: Identity, version: int | None) -> str:
        """Return why none is taken."""
        return why_new(folder, identity, version, self.max_age_s) if self.is_wanted else "new: reuse=False"


@contextmanager
def prepare(
    source: str | Path | DataFrame,
    *,
    spark: SparkSession | None = None,
    volume: str | os.PathLike[str] | None = None,
    max_bytes: int | str | None = None,
    route: str = "auto",
    shape: Shape | None = None,
    reuse: Reuse | None = None,
    policies: Policies | None = None,
    **query: Any,
) -> Iterator[Prepared]:
    """Resolve, measure and decide; what was registered in the session for it is dropped at the end."""
    load = partial(load_settings, volume=None if volume is None else os.fspath(volume), max_bytes=max_bytes)
    if isinstance(volume, str) and not volume.strip():
        raise VolumeError(f"volume is {volume!r}; give a folder or a volume, or leave it out.")
    settings = load()
    decide(None, 0, route)
    reuse = reuse or Reuse()
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
    ceiling = collect_ceiling(settings, local_world_size())
    drop_nulls, to_json = by_spark(policies)
    resolved = resolve(
        source, spark=connection.spark, engine=connection.engine, volume_root=settings.volume_root,
        drop_nulls=drop_nulls, to_json=to_json, **query,
    )  # fmt: skip
    with closing(resolved):
        rules = Rules.choose(resolved.schema, policies)
        shape = (shape or Shape()).spelled(resolved.schema)
        place = _volume(settings, connection)
        identity = Identity.of(
            resolved, connection, shape, drop_nulls=drop_nulls, to_json=to_json, is_shared=reuse.is_shared
        )
        folder = None if place is None else export_folder(place, resolved.name)
        reusable = reuse.find(folder, identity) if folder is not None and route != "collect" else None
        size = measure(resolved, ceiling) if reusable is None else _known(reusable[1])
        chosen, reason = decide(size.num_bytes, ceiling, route)
        reuse_reason = ""
        if chosen == "export" and folder is not None and folder.local is not None:
            version = resolved.pin.version
            reuse_reason = f"reused: {reusable[0]}" if reusable else reuse.why_new(folder, identity, version)
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
            stand_in=str(place.local) if place is not None and place.is_stand_in else None,
            reuses=str(reusable[0]) if reusable and chosen == "export" else None,
            reuse_reason=reuse_reason,
            types=type_contract(rules.schema, spark_types(resolved), rules),
            drops_nulls=tuple(drop_nulls),
            num_dropped=_num_dropped(resolved, reusable),
        )
        yield Prepared(
            plan, resolved, connection, size, place, reusable, reuse, identity, rules, shape, settings, route == "auto"
        )


def _known(manifest: Manifest) -> Size:
    told = "the export that is there"
    width = manifest.memory_bytes / manifest.num_rows if manifest.num_rows else 0.0
    return Size(manifest.num_rows, told, width, told)


def _num_dropped(source: Source, reusable: tuple[Path, Manifest] | None) -> int | None:
    if reusable is not None:
        found: int | None = reusable[1].receipt.get("num_dropped")
        return found
    return None if source.dropped is None else count_rows(source.dropped)


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
