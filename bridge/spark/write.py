"""Rows of a source as Parquet shards in a folder: written by Spark itself, or from its stream."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.errors import ExportError
from bridge.spark.failures import translated
from bridge.spark.read import stream_batches
from bridge.spark.source import Source
from bridge.volumes.path import Place
from bridge.volumes.stores import flush_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COMPRESSION = "zstd"


@dataclass(frozen=True)
class Written:
    """Which files were written, in the order of their rows, and how many rows went into them by another count."""

    names: tuple[str, ...]
    num_rows: int


def write_shards(source: Source, place: Place, *, shard_bytes: int, row_group_bytes: int, row_bytes: float) -> Written:
    """Write the rows of `source.frame` into the new folder `place`.

    Args:
        shard_bytes: About how large a file should be.
        row_group_bytes: About how large a row group should be, before compression.
        row_bytes: The estimated Arrow width of a row; Spark takes the size of a file in rows.
    """
    if source.engine.spark_writes:
        rows = max(1, round(shard_bytes / max(row_bytes, 1.0)))
        return _spark_shards(source.frame, place, source.name, rows, row_group_bytes)
    folder = place.folder()
    folder.mkdir(parents=True)
    with closing(stream_batches(source.frame, source.schema, source.name)) as batches:
        return _stream_shards(batches, folder, source.schema, shard_bytes, row_group_bytes)


def _spark_shards(frame: DataFrame, place: Place, name: str, rows_per_file: int, row_group_bytes: int) -> Written:
    from pyspark.sql import Observation
    from pyspark.sql.connect import functions as F

    observation = Observation()
    with translated(name):
        observed = frame.observe(observation, F.count(F.lit(1)).alias("num_rows"))
        (
            observed.write.option("compression", COMPRESSION)
            # Without it timestamps are INT96, of which the year 1600 reads back as 2184. Only the dotted form works.
            .option("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
            .option("parquet.block.size", str(row_group_bytes))
            .option("maxRecordsPerFile", str(rows_per_file))
            .parquet(place.spark)
        )
        num_rows = int(observation.get["num_rows"])
    folder = place.folder()
    if not (folder / "_SUCCESS").exists() and not any(folder.glob("*.parquet")):
        raise ExportError(
            f"Spark wrote {place.spark}, but no file of it can be seen at {folder}.\n"
            "  Use a volume that both the cluster and this process have."
        )
    return Written(tuple(sorted((path.name for path in folder.glob("*.parquet")), key=_natural)), num_rows)


def _natural(name: str) -> tuple[int, ...]:
    """Sort `part-00002-...-c000` by partition, then by the file within it."""
    return tuple(int(number) for number in re.findall(r"^part-(\d+)|-c(\d+)", name) for number in number if number)


def _stream_shards(
    batches: Iterable[pa.Table], folder: Path, schema: pa.Schema, shard_bytes: int, row_group_bytes: int
) -> Written:
    names: list[str] = []
    num_rows = 0
    writer: pq.ParquetWriter | None = None
    pending: list[pa.Table] = []
    pending_bytes = 0

    def flush() -> None:
        nonlocal writer, pending, pending_bytes
        if writer is None:
            names.append(f"part-{len(names):05d}.parquet")
            writer = pq.ParquetWriter(folder / names[-1], schema, compression=COMPRESSION)
        table = pa.concat_tables(pending).combine_chunks()
        writer.write_table(table, row_group_size=max(1, table.num_rows))
        pending, pending_bytes = [], 0
        if (folder / names[-1]).stat().st_size >= shard_bytes:
            close()

    def close() -> None:
        nonlocal writer
        if writer is not None:
            writer.close()
            writer = None
            flush_file(folder / names[-1])

    try:
        for batch in batches:
            num_rows += batch.num_rows
            if batch.num_rows:
                pending.append(batch)
                pending_bytes += batch.nbytes
            if pending_bytes >= row_group_bytes:
                flush()
        if pending:
            flush()
        close()
    finally:
        if writer is not None:
            writer.close()
    if not names:
        names.append("part-00000.parquet")
        pq.ParquetWriter(folder / names[-1], schema, compression=COMPRESSION).close()
    return Written(tuple(names), num_rows)
