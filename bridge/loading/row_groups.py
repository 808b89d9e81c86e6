"""Row groups out of Parquet files, each checked when it is read as far as it is known what it should be."""

from __future__ import annotations

import copy
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.columns.contract import conform
from bridge.columns.huggingface import to_features
from bridge.columns.rules import Rules
from bridge.errors import CorruptFileError
from bridge.loading.cached import local_files
from bridge.manifest import Manifest, RowGroup, Shard, chunk_range
from bridge.volumes.digest import DigestSink, read_range
from bridge.volumes.hold import Hold
from bridge.volumes.storage import with_retries

_GROUP_ROWS = 65_536
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # elsewhere nothing is set aside
_UNRESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE


class RowGroups(Protocol):
    """Rows in groups that are read one at a time: what a loader needs to know of a table."""

    @property
    def schema(self) -> pa.Schema:
        """The types of every group's rows."""

    @property
    def row_counts(self) -> list[int]:
        """The rows of each group, in order."""

    @property
    def digest(self) -> str:
        """What is equal only for equal rows in equal groups."""

    @property
    def is_shared(self) -> bool:
        """Whether others use the memory of what `read` returns."""

    @property
    def bytes_read(self) -> int:
        """Bytes of files that this process has read."""

    def read(self, index: int) -> pa.Table:
        """Return the rows of one group, in `schema`."""

    def narrowed(self, columns: Sequence[str]) -> Self:
        """Return the same groups with these columns alone."""


class ParquetRowGroups:
    """The row groups of some files, in order, as the policies make them.

    Args:
        folder: Where the shards are.
        shards: The files. Where a digest is empty, nothing is known that its bytes could be checked against.
        digest: What is equal only for equal shards.
        rules: What the policies make of the rows; their source is what the files hold.
        footers: The footers that were read already, by the name of the shard.
        times: When each file was last written, in nanoseconds, by the name of the shard; one that was written since is
            not read.
    """

    is_shared = False

    def __init__(
        self, folder: Path, shards: Sequence[Shard], digest: str, rules: Rules, *,
        footers: dict[str, pq.FileMetaData] | None = None, times: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.digest = digest
        self._folder = folder
        self.rules = rules
        self._columns: list[str] | None = None  # of what the rules make; None: all
        self._places = [(shard, index) for shard in shards for index in range(len(shard.row_groups))]
        self._memory = _Memory([group for shard in shards for group in shard.row_groups])
        self._footers = footers or {}
        self._times = times or {}

    def __deepcopy__(self, memo: object) -> Self:
        return self  # nothing in it changes that others see

    @property
    def schema(self) -> pa.Schema:
        schema = self.rules.schema
        return schema if self._columns is None else pa.schema([schema.field(name) for name in self._columns])

    @cached_property
    def row_counts(self) -> list[int]:
        return [shard.row_groups[index].num_rows for shard, index in self._places]

    @property
    def bytes_read(self) -> int:
        return self._memory.num_bytes_read

    @property
    def places(self) -> list[tuple[str, int]]:
        """The file of each row group, and its number there."""
        return [(shard.name, index) for shard, index in self._places]

    def under(self, rules: Rules) -> Self:
        """Return the same row groups under other rules, with dictionaries of what the files hold."""
        plain = self._with(rules=Rules(rules.source, {}))
        return self._with(rules=rules.bound(lambda: map(plain.read, range(len(plain.row_counts)))))

    def narrowed(self, columns: Sequence[str]) -> Self:
        """Return the same row groups with these columns alone; others are not decoded."""
        return self._with(rules=self.rules.narrowed(columns), _columns=list(columns))

    def read(self, index: int) -> pa.Table:
        """Read one row group with one pass over its bytes.

        Raises:
            CorruptFileError: The file is missing, shorter than it was, or its bytes differ from what was written.
            LossyConversionError: A value does not fit what its policy makes of it.
        """
        shard, group = self._places[index]
        rows = conform(self._decoded(shard, group), self.rules.source, shard.name)
        made = self.rules.apply(rows) if self.rules.changes else rows
        return made if self._columns is None else made.select(self._columns)

    def _with(self, **changed: Any) -> Self:
        made = copy.copy(self)
        made.__dict__.update(changed)
        return made

    def _decoded(self, shard: Shard, index: int) -> pa.Table:
        """Decode a row group from memory that holds its bytes: what is decoded is exactly what was checked.

        The file is never mapped: one that is cut while mapped kills the process.
        """
        path = self._folder / shard.name
        group, names = shard.row_groups[index], self.rules.source.names
        with self._open(path, shard) as file, self._memory.holding(group) as (memory, source):
            footer = self._footers.get(shard.name) or self._read_footer(file, path, shard)
            ranges = [(group.start, group.stop)] if group.digest else _ranges(footer, index, names)
            for start, stop in ranges:
                part = memory[start - group.start : stop - group.start]
                read_range(file, path, start, part, group.digest)
                self._memory.count(stop - start)
            try:
                parquet = pq.ParquetFile(source, metadata=footer, coerce_int96_timestamp_unit="us")
                # a name with a dot is also that of a part of a struct
                rows = parquet.read_row_group(index, columns=names, use_threads=True).select(names)
            except (pa.ArrowException, OSError) as exc:
                raise CorruptFileError(
                    f"{path}: row group {index} cannot be decoded: {exc}.\n  Restore the file, or write it again."
                ) from exc
        counts = {len(column) for column in rows.columns} - {group.num_rows}
        if counts:  # Arrow does not compare them
            raise CorruptFileError(
                f"{path}: row group {index} holds {min(counts)} rows, not {group.num_rows} as its footer says.\n"
                "  Restore the file, or write it again."
            )
        return rows

    def _read_footer(self, file: int, path: Path, shard: Shard) -> pq.FileMetaData:
        memory = pa.allocate_buffer(shard.num_bytes - shard.footer_start, memory_pool=pa.system_memory_pool())
        read_range(file, path, shard.footer_start, memoryview(memory), shard.footer_digest)
        return self._footers.setdefault(shard.name, pq.read_metadata(pa.BufferReader(memory)))

    @contextmanager
    def _open(self, path: Path, shard: Shard) -> Iterator[int]:
        try:
            file = with_retries(lambda: os.open(path, os.O_RDONLY))
        except FileNotFoundError as exc:
            raise CorruptFileError(
                f"{path} is gone, though it was there when this was opened or written.\n"
                "  Restore the file, or export again with reuse=False."
            ) from exc
        try:
            now, mtime_ns = os.fstat(file), self._times.get(shard.name)
            if mtime_ns is not None and (now.st_size, now.st_mtime_ns) != (shard.num_bytes, mtime_ns):
                raise CorruptFileError(
                    f"{path} was written again since this was opened.\n  Open it anew, and begin the epoch again."
                )
            yield file
        finally:
            os.close(file)


class ExportedRowGroups(ParquetRowGroups):
    """The row groups of an export, in the order of the manifest.

    `hold` is what keeps the export from being deleted meanwhile; it is held for as long as this object lives.
    """

    def __init__(self, folder: Path, manifest: Manifest, rules: Rules | None = None, hold: Hold | None = None) -> None:
        super().__init__(folder, manifest.shards, manifest.digest, rules or Rules(manifest.schema, {}))
        self.hold = hold


class CollectedRowGroups:
    """Rows in memory, in row groups of one size: the batches in which they came may differ from time to time."""

    is_shared = True
    bytes_read = 0

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @property
    def schema(self) -> pa.Schema:
        return self.table.schema

    @property
    def row_counts(self) -> list[int]:
        rows = self.table.num_rows
        return [min(_GROUP_ROWS, rows - start) for start in range(0, rows, _GROUP_ROWS)]

    @cached_property
    def digest(self) -> str:
        """What is equal only for equal rows in the same order."""
        sink = DigestSink()
        with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), self.schema) as writer:
            for index in range(len(self.row_counts)):
                writer.write_table(self.read(index).combine_chunks())
        return sink.digest()

    def read(self, index: int) -> pa.Table:
        """Return the rows of one row group, without a copy."""
        return self.table.slice(index * _GROUP_ROWS, _GROUP_ROWS)

    def narrowed(self, columns: Sequence[str]) -> CollectedRowGroups:
        return CollectedRowGroups(self.table.select(columns))


class _Memory:
    """Memory that holds a row group for each thread that reads, at the place that it has in its file.

    Arrow asks for bytes by their place in the file. So a region as large as a file is handed to it, of which only the
    pages are ever touched that a row group is read to, always the same: fresh ones cost more than the reading. The
    memory is Arrow's own, since one of its threads may let go of it last: Python's would need the interpreter for that,
    and one that ends just then aborts.
    """

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self._place = max((group.start for group in groups), default=0)
        # some readers look a little beyond the last page
        self._num_bytes = self._place + max((group.stop - group.start for group in groups), default=0) + 128
        # used by several threads, and without a lock, which a fork might copy while it is held
        self._free: list[pa.Buffer] = []
        self._counts: dict[int, int] = {}

    @property
    def num_bytes_read(self) -> int:
        """What all threads have read."""
        return sum(list(self._counts.values()))

    def count(self, num_bytes: int) -> None:
        """Note that this thread has read so many bytes."""
        thread = threading.get_ident()
        self._counts[thread] = self._counts.get(thread, 0) + num_bytes

    @contextmanager
    def holding(self, group: RowGroup) -> Iterator[tuple[memoryview, pa.BufferReader]]:
        """Lend memory for the bytes of a row group, and the file that Arrow sees it in."""
        try:
            region = self._free.pop()
        except IndexError:
            region = _region(self._num_bytes)
        try:
            start = self._place - group.start
            yield (
                memoryview(region).cast("B")[self._place : self._place + group.stop - group.start],
                pa.BufferReader(region.slice(start, group.stop)),
            )
        finally:
            self._free.append(region)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_free": [], "_counts": {}}


def _region(num_bytes: int) -> pa.Buffer:
    try:
        return pa.allocate_buffer(num_bytes, pa.system_memory_pool())
    except MemoryError:
        # the file is larger than memory: no room is set aside for pages that are never touched
        return pa.py_buffer(mmap.mmap(-1, num_bytes, flags=_UNRESERVED))


def _ranges(footer: Any, index: int, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the bytes of some columns of a row group; those that touch are one range."""
    ranges: list[tuple[int, int]] = []
    group = footer.row_group(index)
    # Arrow goes by the schema, and so does this: what is decoded is what was read, whatever a chunk says of itself
    paths = [f"{footer.schema.column(number).path}." for number in range(group.num_columns)]
    # a column's path begins with its name, which may itself hold dots
    wanted = [
        group.column(number) for number, path in enumerate(paths) if any(path.startswith(f"{name}.") for name in names)
    ]
    for start, stop in sorted(map(chunk_range, wanted)):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
        else:
            ranges.append((start, stop))
    return ranges


def stream_row_groups(row_groups: list[tuple[ExportedRowGroups, int]]) -> Iterator[tuple[str, pa.Table]]:
    """Yield a key and the rows of each of some row groups, as datasets streams them."""
    for opened, index in row_groups:
        yield str(index), to_features(local_files(opened.read(index)))
