"""How an export is named, found again, and made."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.columns.contract import conform
from bridge.columns.rules import Rules
from bridge.display import parse_bytes
from bridge.errors import ConfigError, ExportError, VolumeError
from bridge.manifest import FORMAT_VERSION, Manifest, Shard, describe_shards, encode_schema
from bridge.spark.connect import Connection
from bridge.spark.size import assumed_width
from bridge.spark.source import Source
from bridge.spark.write import Written, write_shards
from bridge.tables.receipt import make_receipt
from bridge.volumes.commit import begin, collect_garbage, complete_attempts
from bridge.volumes.path import Place, refuse_glob
from bridge.volumes.stores import LocalStorage

SHARD_BYTES = 1 << 30
ROW_GROUP_BYTES = 64 << 20


def shape(shard_bytes: int | str, row_group_bytes: int | str) -> tuple[int, int]:
    """Return both sizes in bytes.

    Raises:
        ConfigError: One is no size.
    """
    sizes = {"shard_bytes": shard_bytes, "row_group_bytes": row_group_bytes}
    shards, row_groups = (parse_bytes(size, name=name) for name, size in sizes.items())
    if min(shards, row_groups) < 1:
        raise ConfigError(f"shard_bytes is {shard_bytes} and row_group_bytes {row_group_bytes}; give 1 or more.")
    return shards, row_groups


def identity(
    source: Source, connection: Connection, rules: Rules, shard_bytes: int, row_group_bytes: int
) -> tuple[str | None, str]:
    """Return what is equal for two exports of the same rows in the same shape, or None; and the reason for None."""
    if source.pin.version is None or source.pin.fingerprint is None:
        return None, f"not reused: {source.pin.reason}"
    if not source.is_repeatable:
        return None, "not reused: the filter need not give the same rows twice"
    # the same folder has several names where links lead to it, as to a warehouse whose path holds odd characters
    location = source.location
    if location is not None and location.startswith("/"):
        location = os.path.realpath(location)
    facts = [
        FORMAT_VERSION, connection.address, connection.user, connection.time_zone,
        source.name, location, source.pin.version,
        source.pin.fingerprint, source.columns, source.where, source.limit, rules.to_json(),
        shard_bytes, row_group_bytes,
    ]  # fmt: skip
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest(), ""


def export_folder(root: Place, source: Source) -> Place:
    """Return the folder under `root` for the exports of one source.

    Raises:
        VolumeError: `root` has a name that readers would expand.
    """
    refuse_glob(root)
    # Names of tables may hold anything; engines agree on few characters of a path.
    digest = hashlib.blake2b(source.name.encode(), digest_size=4).hexdigest()
    plain = re.sub(r"[^a-z0-9_-]+", "-", source.name.lower()).strip("-")[-60:] or "table"
    return root / f"{plain}-{digest}"


def find_reusable(folder: Place, identity: str | None) -> tuple[Path, Manifest] | None:
    """Return the complete export of that identity whose files are all there in full size."""
    if identity is None or folder.local is None:
        return None
    storage = LocalStorage(folder.local)
    for attempt, marker in complete_attempts(storage, identity):
        if marker.missing(storage, attempt.name) is None:
            path = folder.local / attempt.name
            return path, Manifest.from_json(marker.body, path)
    return None


def write_export(
    source: Source,
    connection: Connection,
    parent: Place,
    *,
    identity: str | None,
    shard_bytes: int,
    row_group_bytes: int,
    row_bytes: float | None,
    rules: Rules,
) -> tuple[Path, Manifest]:
    """Write a new export of `source` under `parent`; on failure nothing is left.

    Raises:
        ExportError: The files do not hold the rows that were read.
        VolumeError: The volume cannot be written.
    """
    receipt = make_receipt(source, connection)
    storage = LocalStorage(parent.folder())
    with begin(storage, identity or "unpinned") as attempt:
        folder = storage.folder / attempt.name
        try:
            written = write_shards(
                source,
                parent / attempt.name,
                shard_bytes=shard_bytes,
                row_group_bytes=row_group_bytes,
                row_bytes=row_bytes or assumed_width(source.schema),
            )
            shards = describe_shards(folder, written.names)
            width = row_bytes if row_bytes is not None else _measured_width(folder, shards)
        except OSError as exc:
            if isinstance(exc, VolumeError):
                raise
            raise VolumeError(f"{source.name} could not be written to {folder}: {exc.strerror or exc}.") from exc
        num_rows = _counted(shards, written, source.name)
        rules = rules.bound(lambda: _read_all(folder, shards, rules))
        manifest = Manifest(
            table=source.name,
            version=source.pin.version,
            identity=identity,
            schema_ipc=encode_schema(source.schema),
            num_rows=num_rows,
            num_bytes=sum(shard.num_bytes for shard in shards),
            memory_bytes=round(num_rows * width),
            shards=shards,
            receipt={**receipt, "route": "export", "num_rows": num_rows, "policies": rules.to_json()},
        )
        attempt.commit(manifest.to_json(), {shard.name: shard.num_bytes for shard in shards})
    # what killed writers left; the export itself stands whether or not that works
    with contextlib.suppress(VolumeError):
        collect_garbage(storage)
    return folder, manifest


def _read_all(folder: Path, shards: Sequence[Shard], rules: Rules) -> Iterator[pa.Table]:
    for shard in shards:
        file = pq.ParquetFile(folder / shard.name)
        for index in range(file.num_row_groups):
            yield conform(file.read_row_group(index), rules.source, shard.name)


def _counted(shards: Sequence[Shard], written: Written, name: str) -> int:
    in_files = sum(shard.num_rows for shard in shards)
    if in_files != written.num_rows:
        raise ExportError(
            f"{name}: {written.num_rows:,} rows were written, but the files hold {in_files:,}.\n"
            "  Another writer may use the same folder; nothing of this export is kept. Export again."
        )
    return in_files


def _measured_width(folder: Path, shards: Sequence[Shard]) -> float:
    """Return the mean Arrow bytes of a row of the first row group."""
    for shard in shards:
        if shard.num_rows:
            rows: Any = pq.ParquetFile(folder / shard.name).read_row_group(0)
            return float(rows.nbytes / rows.num_rows)
    return 0.0
