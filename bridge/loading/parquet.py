"""Row groups out of an export, each checked against the manifest when it is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.columns.contract import conform
from bridge.columns.huggingface import to_features
from bridge.columns.rules import Rules
from bridge.errors import CorruptFileError
from bridge.loading.files import local_files
from bridge.manifest import Manifest, Shard
from bridge.volumes.digest import read_range
from bridge.volumes.hold import Hold


class RowGroups(Protocol):
    """Rows in groups that are read one at a time: what a loader needs to know of a table."""

    @property
    def schema(self) -> pa.Schema:
        """The types of every group's rows."""

    @property
    def row_counts(self) -> list[int]:
        """The rows of each group, in order."""

    def read(self, index: int) -> pa.Table:
        """Return the rows of one group, in `schema`."""


class ExportedRowGroups:
    """The row groups of an export's shards, in the order of the manifest, as the policies make them.

    `hold` is what keeps the export from being deleted meanwhile; it is held for as long as this object lives.
    """

    def __init__(self, folder: Path, manifest: Manifest, rules: Rules | None = None, hold: Hold | None = None) -> None:
        self.hold = hold
        self._folder = folder
        self._manifest = manifest
        self._rules = rules or Rules(manifest.schema, {})
        self._places = [(shard, index) for shard in manifest.shards for index in range(len(shard.row_groups))]
        self._footers: dict[str, pq.FileMetaData] = {}

    def __deepcopy__(self, memo: object) -> ExportedRowGroups:
        return self  # nothing in it changes, and one hold is enough

    @property
    def schema(self) -> pa.Schema:
        """The types after all policies."""
        return self._rules.schema

    @property
    def row_counts(self) -> list[int]:
        """The rows of each row group."""
        return [shard.row_groups[index].num_rows for shard, index in self._places]

    def read(self, index: int) -> pa.Table:
        """Read one row group with one pass over its bytes.

        Raises:
            CorruptFileError: The file is missing, shorter than it was, or its bytes differ from what was written.
            LossyConversionError: A value does not fit what its policy makes of it.
        """
        shard, group = self._places[index]
        path = self._folder / shard.name
        table, self._footers[shard.name] = _read_row_group(path, shard, group, self._footers.get(shard.name))
        rows = conform(table, self._manifest.schema, path.name)
        return self._rules.apply(rows) if self._rules.changes else rows


def _read_row_group(
    path: Path, shard: Shard, index: int, footer: pq.FileMetaData | None
) -> tuple[pa.Table, pq.FileMetaData]:
    """Decode a row group from memory that holds its bytes, and the footer's, at the places they have in the file.

    Pages that are not filled cost nothing. What is decoded is thus exactly what was checked, and the file itself is
    never mapped: a file that is cut while mapped kills the process. The memory is Arrow's own, since one of its threads
    may let go of it last: Python's would need the interpreter for that, and one that ends just then aborts.
    """
    group = shard.row_groups[index]
    memory = pa.allocate_buffer(shard.num_bytes, memory_pool=pa.system_memory_pool())
    view = memoryview(memory)
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError as exc:
        raise CorruptFileError(
            f"{path} is gone, though the export's manifest lists it.\n"
            "  Export again with reuse=False, or restore the file."
        ) from exc
    try:
        if footer is None:
            footer_bytes = view[shard.footer_start : shard.num_bytes]
            read_range(file, path, shard.footer_start, footer_bytes, shard.footer_digest)
        read_range(file, path, group.start, view[group.start : group.stop], group.digest)
    finally:
        os.close(file)
    parquet = pq.ParquetFile(pa.BufferReader(memory), metadata=footer)
    return parquet.read_row_group(index, use_threads=True), parquet.metadata


def stream_row_groups(row_groups: list[tuple[ExportedRowGroups, int]]) -> Iterator[tuple[str, pa.Table]]:
    """Yield a key and the rows of each of some row groups, as datasets streams them."""
    for opened, index in row_groups:
        yield str(index), to_features(local_files(opened.read(index)))
