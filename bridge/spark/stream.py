"""A stream of rows as Parquet shards in a folder, with little more than a row group in memory."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bridge.spark.shape import Shape
from bridge.volumes.stores import flush_file

COMPRESSION = "zstd"

# so many rows tell whether values are repeated
SAMPLE_ROWS = 65_536


@dataclass(frozen=True)
class Written:
    """How many rows were written by another count than that of the files.

    `names` are the files in the order of their rows; None where Spark wrote them, which tells it by a listing.
    `as_integers` names the columns of dates and instants that stand as days and microseconds since 1970.
    """

    num_rows: int
    names: tuple[str, ...] | None = None
    as_integers: frozenset[str] = frozenset()


def write_stream(
    batches: Iterable[pa.Table], folder: Path, schema: pa.Schema, shape: Shape, num_rows: int | None = None
) -> Written:
    """Write the rows of `batches` as shards into `folder`, in their order; little more than a row group is in memory.

    Args:
        num_rows: How many rows are to come, for a shape of so many shards; what comes beyond goes into the last one.
    """
    shards = _Shards(folder, schema, shape, num_rows)
    count = 0
    try:
        for batch in batches:
            count += batch.num_rows
            shards.add(batch)
        shards.finish()
    finally:
        shards.close()
    return Written(count, tuple(shards.names))


def repeated(rows: pa.Table) -> list[str] | bool:
    """Return the Parquet columns for which a dictionary may pay: those of which half the values are repeated.

    Spark gives others up at once; pyarrow goes on until a dictionary has grown to a megabyte, in every row group, which
    took 1.7 times as long for larger files.
    """
    some = rows.slice(0, SAMPLE_ROWS)
    names = [
        name
        for name, column in zip(some.column_names, some.columns, strict=True)
        if pa.types.is_nested(column.type)
        or pa.types.is_null(column.type)
        or 2 * pc.count_distinct(column).as_py() <= some.num_rows
    ]
    sink = io.BytesIO()
    pq.write_table(rows.schema.empty_table(), sink)
    leaves = pq.read_metadata(sink).schema
    paths = [leaves.column(index).path for index in range(len(leaves))]
    return [path for path in paths if any(path == name or path.startswith(f"{name}.") for name in names)] or False


class _Shards:
    """Cuts a stream of rows into row groups, and these into shards."""

    def __init__(self, folder: Path, schema: pa.Schema, shape: Shape, num_rows: int | None) -> None:
        self.names: list[str] = []
        self._folder = folder
        self._schema = schema
        self._shape = shape
        self._num_rows = num_rows
        # a shard holds a row at least
        self._count = min(shape.num_shards or 1, max(num_rows or 0, 1))
        self._writer: pq.ParquetWriter | None = None
        self._file: pa.OSFile
        self._pending: list[pa.Table] = []
        self._pending_bytes = self._taken = 0
        # bytes in a file for one of Arrow, by what was written so far
        self._ratio = 1.0
        self._dictionaries: list[str] | bool | None = None

    def add(self, batch: pa.Table) -> None:
        """Take rows, and write a row group when there are enough."""
        while batch.num_rows:
            room = self._room()
            take = batch.num_rows if room is None else min(room, batch.num_rows)
            self._pending.append(batch.slice(0, take))
            self._pending_bytes += round(batch.nbytes * take / batch.num_rows)
            self._taken += take
            batch = batch.slice(take)
            if self._pending_bytes >= self._group_bytes() or take == room:
                self._write_row_group()

    def finish(self) -> None:
        """Write what is left. There is a file even where there are no rows."""
        if self._pending or not self.names:
            self._write_row_group()

    def close(self) -> None:
        """Close the file that is open."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with self._file as file:
                writer.close()
                flush_file(file.fileno(), self._folder / self.names[-1])

    def _room(self) -> int | None:
        """Return how many rows the shard still takes, None where its bytes decide, or it is the last."""
        started = len(self.names) + (self._writer is None)
        if self._num_rows is None or started >= self._count:
            return None
        return started * self._num_rows // self._count - self._taken

    def _group_bytes(self) -> float:
        """Return at how many bytes of Arrow a row group is written, so that a shard ends near its size."""
        if self._num_rows is not None:
            return self._shape.row_group_bytes
        left = self._shape.shard_bytes - self._size()
        return max(1.0, min(self._shape.row_group_bytes, left / self._ratio))

    def _size(self) -> int:
        # not by its name: a volume may not show a file that is being written
        return int(self._file.tell()) if self._writer is not None else 0

    def _write_row_group(self) -> None:
        rows = pa.concat_tables([self._schema.empty_table(), *self._pending])
        if self._dictionaries is None:
            self._dictionaries = repeated(rows)
        if self._writer is None:
            self.names.append(f"part-{len(self.names):05d}.parquet")
            self._file = pa.OSFile(str(self._folder / self.names[-1]), "w")
            self._writer = pq.ParquetWriter(
                self._file, self._schema, compression=COMPRESSION, use_dictionary=self._dictionaries
            )
        if not self._pending:
            return
        before = self._size()
        self._writer.write_table(rows, row_group_size=rows.num_rows)
        size = self._size()
        self._ratio = max((size - before) / max(rows.nbytes, 1), 1e-6)
        self._pending, self._pending_bytes = [], 0
        is_full = size >= 0.98 * self._shape.shard_bytes if self._num_rows is None else self._room() == 0
        if is_full:
            self.close()
