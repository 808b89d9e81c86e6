"""Rows of a source as Parquet shards in a folder: written by Spark itself, or from its stream."""

from __future__ import annotations

import io
import json
import re
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bridge.columns.contract import conform
from bridge.errors import EngineError, VolumeError
from bridge.progress import progress_bar, task_bar
from bridge.spark.failures import Failure, classify, root_cause, translated
from bridge.spark.names import quote
from bridge.spark.operation import run_watched
from bridge.spark.read import run_within, stream_batches
from bridge.spark.shape import Shape, fitted
from bridge.spark.size import Size, assumed_width
from bridge.spark.source import Source
from bridge.spark.stream import COMPRESSION, SAMPLE_ROWS, Written, repeated, write_stream
from bridge.volumes.path import Place

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Apache Spark's own
_COMPRESSION_LEVEL = 3

# Without it timestamps are INT96, of which the year 1600 reads back as 2184. Only the dotted form works.
_TIMESTAMPS = ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")

# Bytes of a row in a file are told by so many rows, or as many as so many bytes of Arrow hold.
_SAMPLE_BYTES = 32 << 20

# Rows that stay together when rows are dealt to shards.
_DEALT_ROWS = 1000

# An export takes long anyway, and a cluster that is cold takes half a minute for its first query.
_LOOK_TIMEOUT_S = 60.0


def write_shards(
    source: Source, place: Place, shape: Shape, size: Size, *, as_integers: bool = False, show: bool | None = None
) -> Written:
    """Write the rows of `source.frame` into the new folder `place`.

    Args:
        size: What is known of the rows. What a shape needs and is not known is asked for.
        as_integers: Whether dates and instants are written as integers, for a server that writes them in a form that
            loses some, whatever it is told.
        show: Whether progress is shown; None: where someone can see it.
    """
    if source.engine.spark_writes:
        return _spark_shards(source, place, shape, size, as_integers, show)
    folder = place.folder()
    folder.mkdir(parents=True)
    num_rows = None if shape.num_shards is None else _num_rows(source, size)
    bar = progress_bar(f"export {source.name}", total=size.num_rows, unit=" rows", enabled=show)
    with bar, closing(stream_batches(_arranged(source.frame, shape), source.schema, source.name)) as batches:
        return write_stream(_counted(batches, bar), folder, source.schema, shape, num_rows)


def _counted(batches: Iterable[pa.Table], bar: Any) -> Iterable[pa.Table]:
    for batch in batches:
        yield batch
        bar.update(batch.num_rows)


def _arranged(frame: DataFrame, shape: Shape) -> DataFrame:
    """Return the frame sorted or mixed as a whole, for a stream."""
    if shape.order_by:
        return frame.orderBy(*map(quote, shape.order_by))
    if shape.shuffle_at_write is not None:
        mixed, key, added = _with_key(frame, shape.shuffle_at_write)
        return mixed.orderBy(key).drop(*added)
    return frame


def _with_key(frame: DataFrame, seed: int) -> tuple[DataFrame, str, list[str]]:
    """Return the frame with a column to mix its rows by, its name, and the names of all that was added.

    rand(seed) would not do: Sail starts it anew for every 1,024 rows.
    """
    from pyspark.sql.connect import functions as F

    number, key = (f"bridge_{uuid.uuid4().hex}" for _ in range(2))
    frame = frame.withColumn(number, F.monotonically_increasing_id())
    return frame.withColumn(key, F.xxhash64(number, F.lit(seed))), key, [number, key]


def _spark_shards(
    source: Source, place: Place, shape: Shape, size: Size, as_integers: bool, show: bool | None
) -> Written:
    from pyspark.sql import Observation
    from pyspark.sql.connect import functions as F

    with translated(source.name):
        frame, converted = _as_integers(source.frame) if as_integers else (source.frame, frozenset())
        frame, most_rows = _laid_out(frame, source, shape, size)
    observation = Observation()
    write = (
        frame.observe(observation, F.count(F.lit(1)).alias("num_rows"))
        .write.option("compression", COMPRESSION)
        .option(*_TIMESTAMPS)
        .option("parquet.block.size", str(shape.row_group_bytes))
        .option("maxRecordsPerFile", str(most_rows))
    )

    def run() -> int:
        write.parquet(place.spark)
        return int(observation.get["num_rows"])

    try:
        with task_bar(f"export {source.name}", enabled=show) as tell:
            written = run_watched(source.spark, run, source.name, on_progress=tell)
    except EngineError as exc:
        if exc.__cause__ is None or classify(exc.__cause__) is not Failure.NOT_WRITTEN:
            raise
        raise VolumeError(
            f"{source.name} could not be written to {place.name}: {root_cause(exc.__cause__)}."
        ) from exc.__cause__
    return Written(written, None, converted)


def _laid_out(frame: DataFrame, source: Source, shape: Shape, size: Size) -> tuple[DataFrame, int]:
    """Return the frame with a partition for each task that is to write, and how many rows a file may hold."""
    # of anything else nobody knows in which order it comes when it is asked again
    is_scan = source.kind in ("delta", "files") and source.limit is None and source.is_repeatable
    is_moved = bool(shape.order_by or shape.shuffle_at_write is not None)
    if shape.num_shards is not None:
        # only tells how finely they are dealt
        few = 0 if size.is_bound else size.num_rows or 0
        return _moved(frame, source, shape, shape.num_shards, few, is_scan=is_scan), 0
    with ThreadPoolExecutor(1, "bridge-sample") as beside:
        sample = beside.submit(_file_bytes, source, shape, size)
        # what is moved needs a number; what is not moved can be fitted where partitions are those of files
        rows = [_num_rows(source, size)] if is_moved else _partition_rows(source) if is_scan else []
        shard_rows = max(1, round(shape.shard_bytes / sample.result()))
    if is_moved:
        count = max(1, round(sum(rows) / shard_rows))
        return _moved(frame, source, shape, count, sum(rows), is_scan=is_scan), round(1.2 * shard_rows)
    if not rows:
        return frame, shard_rows
    num_tasks, most_rows = fitted(rows, shard_rows)
    return frame if num_tasks == len(rows) else frame.coalesce(num_tasks), most_rows


def _num_rows(source: Source, size: Size) -> int:
    """Return how many rows there are, however long it takes to count them."""
    from pyspark.sql.connect import functions as F

    if size.num_rows is not None and not size.is_bound:
        return size.num_rows
    counting = source.frame.agg(F.count(F.lit(1)))
    return int(run_watched(source.spark, counting.toArrow, source.name).column(0)[0].as_py())


def _partition_rows(source: Source) -> list[int]:
    """Return how many rows each partition of a scan holds; none where that takes too long to count."""
    from pyspark.sql.connect import functions as F

    counts = source.frame.groupBy(F.spark_partition_id().alias("id")).agg(F.count(F.lit(1)).alias("rows"))
    found = run_within(counts, _LOOK_TIMEOUT_S)
    if found is None or found.num_rows == 0:
        return []
    by_id = dict(zip(found["id"].to_pylist(), found["rows"].to_pylist(), strict=True))
    return [by_id.get(partition, 0) for partition in range(max(by_id) + 1)]


def _file_bytes(source: Source, shape: Shape, size: Size) -> float:
    """Return about how many bytes a row takes in a file: those of the table's first rows, written as Spark would."""
    width = size.row_bytes or assumed_width(source.schema)
    most = min(SAMPLE_ROWS, int(_SAMPLE_BYTES // max(width, 1.0)) + 1)
    rows = run_within(source.unfiltered.limit(most), _LOOK_TIMEOUT_S)
    if rows is None or rows.num_rows == 0:
        return max(1.0, width / 2)
    rows = conform(rows, source.schema, source.name)
    if flat := [name for name in shape.order_by if not pa.types.is_nested(rows.schema.field(name).type)]:
        rows = rows.sort_by([(name, "ascending") for name in flat])
    elif shape.shuffle_at_write is not None:
        rows = rows.take(np.random.default_rng(0).permutation(rows.num_rows))
    sink = io.BytesIO()
    options = {"compression": COMPRESSION, "compression_level": _COMPRESSION_LEVEL}
    pq.write_table(rows, sink, use_dictionary=repeated(rows), **options)
    footer = pq.read_metadata(sink)
    in_file = sum(
        footer.row_group(group).column(column).total_compressed_size
        for group in range(footer.num_row_groups)
        for column in range(footer.num_columns)
    )
    return max(1.0, float(in_file / rows.num_rows))


def _moved(frame: DataFrame, source: Source, shape: Shape, count: int, num_rows: int, *, is_scan: bool) -> DataFrame:
    """Return the frame with its rows moved to `count` partitions, each of which becomes a shard.

    Args:
        is_scan: Whether rows come in the same order each time, as those of files do. A row that a task sees elsewhere
            when it is run again could be dealt twice, or never; repartition(n) alone sorts before it deals.
    """
    from pyspark.sql.connect import functions as F

    if shape.order_by:
        names = [quote(name) for name in shape.order_by]
        return frame.repartitionByRange(count, *names).sortWithinPartitions(*names)
    if shape.shuffle_at_write is not None:
        if not is_scan:
            # numbered after they are dealt: what repartition(n) sorts by must be the same each time
            mixed, key, added = _with_key(frame.repartition(count), shape.shuffle_at_write)
            return mixed.sortWithinPartitions(key).drop(*added)
        mixed, key, added = _with_key(frame, shape.shuffle_at_write)
        return mixed.repartition(count, key).sortWithinPartitions(key).drop(*added)
    if not is_scan:
        return frame.repartition(count)
    together = max(1, min(_DEALT_ROWS, num_rows // (8 * count)))
    number = f"bridge_{uuid.uuid4().hex}"
    # The partition is in the upper 31 bits, the row within it in the lower 33. What lies together compresses together.
    to = F.expr(f"(shiftright({number}, 33) + ({number} & {(1 << 33) - 1}) DIV {together}) % {count}")
    numbered = frame.withColumn(number, F.monotonically_increasing_id())
    return numbered.repartition(count, _dealing_key(source, count, to)).drop(number)


def _dealing_key(source: Source, count: int, number: Column) -> Column:
    """Return a column by which Spark moves a row to the partition `number` of `count`, exactly.

    Spark deals by pmod(hash(key), count); one key for each partition is found by asking it.
    """
    from pyspark.sql.connect import functions as F

    tried = source.spark.range(32 * count + 100).select("id", F.pmod(F.hash("id"), F.lit(count)).alias("partition"))
    found = run_watched(source.spark, tried.groupBy("partition").agg(F.min("id").alias("key")).toArrow, source.name)
    keys = dict(zip(found["partition"].to_pylist(), found["key"].to_pylist(), strict=True))
    return F.element_at(F.lit([keys[each] for each in range(count)]), number.cast("int") + 1).cast("bigint")


def _as_integers(frame: DataFrame) -> tuple[DataFrame, frozenset[str]]:
    """Return the frame with dates as days and instants as microseconds since 1970, and the names of these columns."""
    from pyspark.sql.connect import functions as F
    from pyspark.sql.types import DateType, TimestampType

    convert = {DateType: F.unix_date, TimestampType: F.unix_micros}
    kinds = {field.name: type(field.dataType) for field in frame.schema.fields}
    columns = [
        convert[kind](quote(name)).alias(name) if kind in convert else F.col(quote(name))
        for name, kind in kinds.items()
    ]
    return frame.select(*columns), frozenset(name for name, kind in kinds.items() if kind in convert)


def listed_shards(folder: Path) -> list[str]:
    """Return the Parquet files that Spark wrote into `folder`, as far as they are seen, in the order of their rows.

    Where a commit of Databricks lists its files, what else is there was written by tasks that failed:
    https://docs.databricks.com/archive/legacy/dbio-commit.html, and is no part of it.
    """
    started = [path.name for path in folder.glob("_started_*") if path.name[9:].isdigit()]
    if any(not (folder / f"_committed_{name[9:]}").exists() for name in started):
        return []  # its list is not seen yet
    committed = [json.loads(path.read_bytes()) for path in folder.glob("_committed_*") if path.name[11:].isdigit()]
    names = {path.name for path in folder.glob("*.parquet")}
    if committed:
        names = {name for commit in committed for name in commit["added"]}
        names -= {name for commit in committed for name in commit.get("removed", ())}
    return sorted(names, key=_natural)


def _natural(name: str) -> tuple[int, ...]:
    """Sort `part-00002-...-c000` by partition, then by the file within it."""
    return tuple(int(number) for number in re.findall(r"^part-(\d+)|-c(\d+)\.", name) for number in number if number)
