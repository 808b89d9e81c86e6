"""Parquet files that others wrote: found, and known by their footers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.columns.rules import Policies, Rules
from bridge.errors import CorruptFileError, SourceError, VolumeError
from bridge.loading.files import files_under
from bridge.loading.row_groups import ParquetRowGroups
from bridge.manifest import RowGroup, Shard, chunk_range
from bridge.volumes.commit import Attempt
from bridge.volumes.digest import digest_bytes
from bridge.volumes.source import FolderSource, Found
from bridge.volumes.storage import with_retries

_THREADS = 32  # they wait for the volume
_TAIL_BYTES = 64 << 10  # holds most footers
_END = 8  # the length of the footer, and the magic number


class _Known(NamedTuple):
    shard: Shard
    mtime_ns: int
    footer: pq.FileMetaData
    schema: pa.Schema
    digest: str


def open_files(files: Sequence[Path], policies: Policies | None) -> ParquetRowGroups:
    """Return the row groups of Parquet files in the order given; their footers are read at once, in parallel.

    INT96 is read as microseconds, which Spark writes; a nanosecond that another writer has is cut. Dictionaries of
    single files become the values that they stand for, since codes would differ from file to file.

    Raises:
        CorruptFileError: A file is no Parquet file.
        SourceError: The files do not have the same columns.
        PolicyError: A policy is not for its column, or is one of Spark's.
    """
    with ThreadPoolExecutor(min(_THREADS, len(files)), "bridge-footers") as threads:
        known = list(threads.map(lambda file: with_retries(lambda: _read_footer(file)), files))
    schema = plain(known[0].schema)
    for one in known[1:]:
        _check_columns(one, schema, files[0])
    root = os.path.commonpath([file.parent for file in files])
    names = [os.path.relpath(one.shard.name, root) for one in known]
    told = "\n".join(f"{name}\0{one.shard.num_bytes}\0{one.digest}" for name, one in zip(names, known, strict=True))
    row_groups = ParquetRowGroups(
        Path(root),
        [one.shard for one in known],
        digest_bytes(os.fsencode(told)),
        Rules(schema, {}),
        footers={one.shard.name: one.footer for one in known},
        times={one.shard.name: one.mtime_ns for one in known},
    )
    return row_groups if policies is None else row_groups.under(Rules.choose_for_files(schema, policies))


def find_files(folder: Path, *, are_columns_named: bool) -> list[Path]:
    """Return the Parquet files under a folder, by name; hidden ones and those that begin with `_` are left out.

    Links are followed, but for those to a folder in which they lie.

    Raises:
        FileNotFoundError: There is none.
        SourceError: The folder is a Delta table, holds exports, or has columns in the names of its folders.
        VolumeError: A link leads to nothing, or something is neither a file nor a folder.
    """

    def is_wanted(found: Found) -> bool:
        path = folder / found.name
        if path.name == "_delta_log":
            raise SourceError(
                f"{path.parent} is a Delta table: its files also hold rows that were deleted or replaced.\n"
                f"  Load it: bridge.load_table({str(path.parent)!r}).to_loader(...)."
            )
        if path.name.startswith((".", "_")) or found.is_loop:
            return False
        if found.problem:
            raise VolumeError(f"{path} is {found.problem}.\n  Remove it, or give a list of the files to read.")
        if not found.is_folder:
            return path.name.endswith((".parquet", ".parq"))
        if Attempt.parse(path.name) is not None:
            raise SourceError(
                f"{path.parent} holds exports, of which each has all rows.\n"
                f"  Give the folder of one: bridge.open_export({str(path.parent)!r}).path."
            )
        if "=" in path.name and not are_columns_named:
            raise SourceError(
                f"{path.parent} has a column in the names of its folders ({path.name}), which is not in the files.\n"
                "  Name the columns that are wanted of the files (columns= or features=), or load it through Spark."
            )
        return True

    try:
        found = sorted(folder / name for name in files_under(FolderSource(folder), is_wanted))
    except NotADirectoryError as exc:
        raise FileNotFoundError(f"{folder} is neither a folder nor a file that ends in .parquet.") from exc
    if not found:
        raise FileNotFoundError(f"{folder} holds no Parquet file (*.parquet).\n  Give the folder or the files that do.")
    return found


def _read_footer(path: Path) -> _Known:
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        tail = _read_tail(file.fileno(), status.st_size, _TAIL_BYTES)
        if tail[-4:] != b"PAR1":
            raise CorruptFileError(f"{path} is no Parquet file, or was cut: it does not end as one.")
        length = int.from_bytes(tail[-_END:-4], "little") + _END
        if length > len(tail):
            tail = _read_tail(file.fileno(), status.st_size, length)
    try:
        parquet = pq.ParquetFile(pa.BufferReader(tail), coerce_int96_timestamp_unit="us")
    except (pa.ArrowException, OSError) as exc:
        raise CorruptFileError(f"{path} has a footer that cannot be read: {exc}.") from exc
    footer = parquet.metadata
    row_groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    if any(group.num_columns != footer.num_columns for group in row_groups):
        # Arrow ends the process when it is asked for a column that the schema lacks
        raise CorruptFileError(f"{path} has a footer whose row groups do not have the columns of its schema.")
    groups = tuple(map(_row_group, row_groups))
    # no digest: nothing tells what the bytes should be
    shard = Shard(str(path), footer.num_rows, status.st_size, groups, "")
    return _Known(shard, status.st_mtime_ns, footer, parquet.schema_arrow, digest_bytes(tail[-length:]))


def _read_tail(file: int, num_bytes: int, length: int) -> bytes:
    return os.pread(file, length, max(0, num_bytes - length))


def _row_group(group: Any) -> RowGroup:
    ranges = [chunk_range(group.column(index)) for index in range(group.num_columns)]
    start, stop = min((one[0] for one in ranges), default=0), max((one[1] for one in ranges), default=0)
    return RowGroup(group.num_rows, start, stop, "")


def plain(schema: pa.Schema) -> pa.Schema:
    """Return a schema with the types that tables from Spark have, as far as they hold the same."""
    return pa.schema([pa.field(field.name, _plain_type(field.type), field.nullable) for field in schema])


def _plain_type(arrow: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(arrow):
        return _plain_type(arrow.value_type)
    if types.is_large_string(arrow) or types.is_string_view(arrow):
        return pa.string()
    if types.is_large_binary(arrow) or types.is_binary_view(arrow):
        return pa.binary()
    if types.is_large_list(arrow) or types.is_list(arrow):
        return pa.list_(_plain_type(arrow.value_type))
    if types.is_struct(arrow):
        return pa.struct([(field.name, _plain_type(field.type)) for field in arrow])
    if isinstance(arrow, pa.BaseExtensionType):
        return _plain_type(arrow.storage_type)
    return arrow


def _check_columns(one: _Known, schema: pa.Schema, first: Path) -> None:
    found = plain(one.schema)
    if set(found.names) != set(schema.names):
        differ = sorted(set(found.names) ^ set(schema.names))
        raise SourceError(f"{one.shard.name} and {first} do not have the same columns: {', '.join(differ)}.")
    for field in schema:
        other = found.field(field.name)
        if other.type != field.type:
            raise SourceError(
                f"{one.shard.name}: column {field.name!r} is {other.type}; in {first} it is {field.type}.\n"
                "  Load them through Spark, or write them again with one type."
            )
