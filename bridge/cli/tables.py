"""bridge plan, bridge load, bridge export."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import bridge
from bridge.cli import options
from bridge.cli.screen import print_table, print_types
from bridge.display import format_bytes, format_count
from bridge.errors import LossyConversionError, VolumeError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from bridge.tables.table import Table

_FORMATS = (".parquet", ".arrow", ".csv")


def plan(
    source: options.Source,
    columns: options.Columns = None,
    where: options.Where = None,
    version: options.Version = None,
    timestamp: options.Timestamp = None,
    limit: options.Limit = None,
    route: options.Route = "auto",
    max_bytes: options.MaxBytes = None,
    volume: options.VolumeOption = None,
    remote: options.Remote = None,
    profile: options.Profile = None,
) -> None:
    """Show what a load would do, and why; no rows move."""
    spark = _session(remote, profile)
    made = bridge.plan_table(
        source, columns=_names(columns), where=where, version=version, timestamp=timestamp, limit=limit, route=route,
        max_bytes=max_bytes, volume=volume, spark=spark,
    )  # fmt: skip
    print_table(made)
    print()
    print_types(made.types)


def load(
    source: options.Source,
    to: options.To,
    columns: options.Columns = None,
    where: options.Where = None,
    version: options.Version = None,
    timestamp: options.Timestamp = None,
    limit: options.Limit = None,
    route: options.Route = "auto",
    max_bytes: options.MaxBytes = None,
    volume: options.VolumeOption = None,
    remote: options.Remote = None,
    profile: options.Profile = None,
) -> None:
    """Load a table into one file, in place of one that is there."""
    if to.suffix.lower() not in _FORMATS:
        raise typer.BadParameter(f"{to} does not end in {', '.join(_FORMATS)}.", param_hint="--to")
    target = Path(bridge.volume_path(to))
    if not target.parent.is_dir():
        raise VolumeError(f"{to} cannot be written: {target.parent} is not a folder.\n  Make it, or choose another.")
    spark = _session(remote, profile)
    table = bridge.load_table(
        source, columns=_names(columns), where=where, version=version, timestamp=timestamp, limit=limit, route=route,
        max_bytes=max_bytes, volume=volume, spark=spark,
    )  # fmt: skip
    _write(table, target)
    print(f"{table!r}\n{target}: {format_bytes(target.stat().st_size)}")


def export(
    source: options.Source,
    volume: options.VolumeArgument = None,
    columns: options.Columns = None,
    where: options.Where = None,
    version: options.Version = None,
    timestamp: options.Timestamp = None,
    limit: options.Limit = None,
    shard_bytes: options.ShardBytes = "1GiB",
    num_shards: options.NumShards = None,
    order_by: options.OrderBy = None,
    shuffle_at_write: options.Shuffle = None,
    fresh: options.Fresh = False,
    max_age: options.MaxAge = None,
    shared: options.Shared = False,
    remote: options.Remote = None,
    profile: options.Profile = None,
) -> None:
    """Write a table as Parquet shards, or find them again.

    The last line that is printed is the folder of the export.
    """
    spark = _session(remote, profile)
    table = bridge.export_table(
        source, volume, columns=_names(columns), where=where, version=version, timestamp=timestamp, limit=limit,
        shard_bytes=shard_bytes, num_shards=num_shards, order_by=_names(order_by), shuffle_at_write=shuffle_at_write,
        reuse=not fresh, max_age_s=None if max_age is None else options.seconds(max_age), shared=shared, spark=spark,
    )  # fmt: skip
    name = table.receipt["table"] + ("" if table.version is None else f" version {table.version}")
    shards = f"{len(table.files)} shard{'' if len(table.files) == 1 else 's'}"
    print(f"{name}: {format_count(table.num_rows)} rows, {shards}, {format_bytes(table.num_bytes)}")
    if table.plan:
        print(table.plan.reuse_reason)
    print(table.path)


def _session(remote: str | None, profile: str | None) -> SparkSession | None:
    options.choose_profile(profile)
    return bridge.connect(remote, profile=profile) if remote or profile else None


def _names(columns: str | None) -> list[str] | None:
    """Split at commas; a name that holds one stands in double quotes."""
    return (
        None if columns is None else [name.strip() for name in next(csv.reader([columns], skipinitialspace=True), [])]
    )


def _write(table: Table, path: Path) -> None:
    if path.suffix.lower() == ".csv":
        _refuse_for_csv(table.schema)
    # Beside it and then in its place, so that a write that fails leaves what was there.
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        with _open_writer(part, table.schema) as writer:
            for batch in table.to_batches():
                writer.write_batch(batch)
        os.replace(part, path)
    except BaseException as exc:
        part.unlink(missing_ok=True)
        if isinstance(exc, OSError) and not isinstance(exc, bridge.BridgeError):
            raise VolumeError(f"{path} could not be written: {exc.strerror or exc}.") from exc
        raise


def _open_writer(path: Path, schema: pa.Schema) -> Any:
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        return pq.ParquetWriter(path, schema)
    if path.suffix.lower() == ".arrow":
        import pyarrow as pa

        return pa.ipc.new_file(path, schema)
    import pyarrow.csv

    return pyarrow.csv.CSVWriter(path, schema)


def _refuse_for_csv(schema: pa.Schema) -> None:
    import pyarrow as pa

    for field in schema:
        if pa.types.is_nested(field.type) or pa.types.is_binary(field.type) or pa.types.is_duration(field.type):
            raise LossyConversionError(
                f"column {field.name!r} is {field.type}, which CSV cannot hold.\n"
                "  Write .parquet or .arrow, or leave the column out with --columns."
            )
