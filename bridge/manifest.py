"""What an export holds: its schema, where it came from, and each shard with its row groups and their digests."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.errors import ExportError
from bridge.volumes.digest import digest_bytes, digest_ranges

FORMAT_VERSION = 1

_JULIAN = b"org.apache.spark.legacyDateTime"


class LostTimesError(ExportError):
    """Times were written in a form in which they cannot be read back: as INT96, or in the Julian calendar."""


@dataclass(frozen=True)
class RowGroup:
    """A row group of a shard, at the bytes [start, stop) of its file."""

    num_rows: int
    start: int
    stop: int
    digest: str


@dataclass(frozen=True)
class Shard:
    """A Parquet file. Its row groups and its footer, [row_groups[-1].stop, num_bytes), cover all its bytes."""

    name: str
    num_rows: int
    num_bytes: int
    row_groups: tuple[RowGroup, ...]
    footer_digest: str

    @property
    def footer_start(self) -> int:
        """Where the footer starts: everything behind the last row group."""
        return self.row_groups[-1].stop if self.row_groups else 0


@dataclass(frozen=True)
class Manifest:
    """What an export holds.

    `num_bytes` is the size of the files, `memory_bytes` about that of the rows as Arrow. `receipt` says what was read,
    by whom, when and with what; `query` what was asked for, but for the version; `identity` is equal for two exports
    of the same query and version, and None where nobody can ask for the same again.
    """

    table: str
    version: int | None
    identity: str | None
    query: dict[str, Any]
    schema_ipc: str
    num_rows: int
    num_bytes: int
    memory_bytes: int
    shards: tuple[Shard, ...]
    receipt: dict[str, Any]
    format_version: int = FORMAT_VERSION

    @cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema that readers get, whatever Parquet can say of it."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema_ipc)))

    @cached_property
    def digest(self) -> str:
        """What is equal only for exports of the same bytes in the same shards."""
        parts = [
            [shard.name, shard.footer_digest, *(group.digest for group in shard.row_groups)] for shard in self.shards
        ]
        return digest_bytes(json.dumps(parts).encode())

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any], where: Path) -> Manifest:
        """Return the manifest that `body`, the marker of the folder `where`, holds."""
        if body.get("format_version") != FORMAT_VERSION:
            raise ExportError(
                f"{where} has manifest format {body.get('format_version')!r}; this version reads {FORMAT_VERSION}.\n"
                "  Upgrade spark-training-bridge, or export again."
            )
        try:
            shards = tuple(
                Shard(**{**shard, "row_groups": tuple(RowGroup(**group) for group in shard["row_groups"])})
                for shard in body["shards"]
            )
            return cls(**{**body, "shards": shards})
        except (LookupError, TypeError) as exc:
            raise ExportError(
                f"{where} has a manifest that this version does not read: {exc}.\n"
                "  Upgrade spark-training-bridge, or export again."
            ) from exc


def encode_schema(schema: pa.Schema) -> str:
    """Return a schema as it stands in a manifest."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def describe_shard(path: Path, schema: pa.Schema | None = None, as_integers: Collection[str] = ()) -> Shard:
    """Read the footer of a file and digest each row group.

    Args:
        schema: What the columns are to be; None: whatever they are.
        as_integers: Columns of dates and instants that are to stand as days and microseconds since 1970.

    Raises:
        LostTimesError: A column of times is INT96, or in the Julian calendar.
        ExportError: The columns are not those of `schema`, or of types that do not hold the same values.
    """
    num_bytes = path.stat().st_size
    footer = pq.read_metadata(path)
    # Spark says so in the footer, where its session has spark.sql.parquet.datetimeRebaseModeInWrite=LEGACY
    is_julian = _JULIAN in (footer.metadata or {})
    for index in range(len(footer.schema)):
        column = footer.schema.column(index)
        if column.physical_type == "INT96":
            raise LostTimesError(
                f"{path.name}: column {column.path!r} was written as INT96, which loses years outside 1677 to 2262.\n"
                "  The server ignored the write option; cast the column to a microsecond type."
            )
        if is_julian and _is_rebased(column):
            raise LostTimesError(
                f"{path.name}: column {column.path!r} is in the Julian calendar, which moves days before 1582.\n"
                "  Set spark.sql.parquet.datetimeRebaseModeInWrite to CORRECTED in the session."
            )
    if schema is not None:
        _check_types(path.name, footer.schema.to_arrow_schema(), schema, as_integers)
    # Each range starts where the one before ends, so that no byte of the file goes unchecked.
    ranges, position = [], 0
    for index in range(footer.num_row_groups):
        chunks = [footer.row_group(index).column(i) for i in range(footer.num_columns)]
        stop = max((chunk_range(chunk)[1] for chunk in chunks), default=0)
        ranges.append((position, max(position, stop)))
        position = ranges[-1][1]
    digests = digest_ranges(path, [*ranges, (position, num_bytes)])
    groups = tuple(
        RowGroup(footer.row_group(index).num_rows, start, stop, digest)
        for index, ((start, stop), digest) in enumerate(zip(ranges, digests, strict=False))
    )
    return Shard(path.name, footer.num_rows, num_bytes, groups, digests[-1])


def _is_rebased(column: Any) -> bool:
    told = json.loads(column.logical_type.to_json())
    return told.get("Type") == "Date" or (told.get("Type") == "Timestamp" and bool(told.get("isAdjustedToUTC")))


def _check_types(name: str, found: pa.Schema, wanted: pa.Schema, as_integers: Collection[str]) -> None:
    if found.names != wanted.names:
        raise ExportError(f"{name} holds the columns {', '.join(found.names)}, not {', '.join(wanted.names)}.")
    for column, field in zip(found, wanted, strict=True):
        expected = field.type
        if field.name in as_integers:
            expected = pa.int32() if pa.types.is_date(field.type) else pa.int64()
        if not _holds(column.type, expected):
            raise ExportError(f"{name}: column {field.name!r} was written as {column.type}, not as {expected}.")


def _holds(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a Parquet column of type `found` holds the values of `wanted` exactly."""
    types = pa.types
    if types.is_struct(wanted):
        return (
            types.is_struct(found)
            and len(found) == len(wanted)
            and all(
                child.name == other.name and _holds(child.type, other.type)
                for child, other in zip(found, wanted, strict=True)
            )
        )
    if types.is_map(wanted):
        return (
            types.is_map(found)
            and _holds(found.key_type, wanted.key_type)
            and _holds(found.item_type, wanted.item_type)
        )
    if types.is_list(wanted):
        return types.is_list(found) and _holds(found.value_type, wanted.value_type)
    # Parquet has neither durations nor columns of nothing
    return bool(found.equals(wanted) or types.is_null(wanted) or (types.is_duration(wanted) and types.is_int64(found)))


def chunk_range(chunk: Any) -> tuple[int, int]:
    """Return the bytes [start, stop) of a column chunk; writers leave out the dictionary page as None or as 0."""
    start = min((offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset), default=0)
    return int(start), int(start + chunk.total_compressed_size)
