"""Export: 20M rows to shards beside Spark's write.parquet, or Sail's toArrow; peak memory; reuse of 1,000 shards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import bridge
from benchmarks.harness import Bar, Report, compare, in_child

ROWS = 20_000_000
SHARD_BYTES = 16 << 20
_REUSED_SHARDS = 1000
_REUSED_ROWS = 100_000

_EXPRESSIONS = (
    "id",
    "CAST(id % 1000003 AS INT) AS small",
    "id / 7.0D AS ratio",
    "concat('row ', CAST(id % 10007 AS STRING)) AS text",
    "rand(1) AS uniform",
    "CAST(randn(2) AS FLOAT) AS normal",
    "CAST(CAST(id % 1000000 AS DECIMAL(14,4)) / 8 AS DECIMAL(18,4)) AS amount",
    "timestamp_seconds(1600000000 + id) AS moment",
    "CASE WHEN id % 10 = 0 THEN NULL ELSE id * 3 END AS maybe",
    "date_add(DATE'2000-01-01', CAST(id % 9000 AS INT)) AS day",
    "id % 3 = 0 AS flag",
    "CAST(rand(3) * 1000 AS INT) AS code",
)


def measure(*, engine: str, rounds: int, folder: Path) -> Report:
    """Return the times beside the bare engine's, the sizes of the shards, the memory, and how long reuse takes."""
    report = Report("exporting", engine)
    with _remote(engine, folder) as remote:
        spark = bridge.connect(remote)
        table = str(folder / "large")
        spark.range(ROWS).selectExpr(*_EXPRESSIONS).write.format("delta").save(table)
        _compare_times(report, spark, engine, table, folder, rounds)
        _compare_memory(report, engine, remote, table, folder)
        # a Sail elsewhere tells no version, so nothing is settled there
        _time_reuse(report, bridge.connect("sail") if engine == "sail" else spark, folder, rounds)
    return report


@contextmanager
def _remote(engine: str, folder: Path) -> Iterator[str]:
    """Give the address of a server that this process and its children share."""
    if engine == "apache":
        from bridge.spark.engines.apache import start_server

        server = start_server("local-cluster[2,1,1024]", spark_jars=os.environ.get("BRIDGE_SPARK_JARS"))
    else:
        from bridge.spark.engines import sail

        server = sail.start_server(folder / "warehouse")
    try:
        yield server.remote
    finally:
        server.stop()


def _compare_times(report: Report, spark: Any, engine: str, table: str, folder: Path, rounds: int) -> None:
    exports, bare = folder / "exports", folder / "bare"
    sizes: list[int] = []

    def ours() -> int:
        shutil.rmtree(exports, ignore_errors=True)
        made = bridge.export_table(table, exports, shard_bytes=SHARD_BYTES, spark=spark)
        sizes[:] = [os.path.getsize(file) for file in made.files]
        return made.num_rows

    def written(codec: str) -> int:
        shutil.rmtree(bare, ignore_errors=True)
        spark.read.format("delta").load(table).write.option("compression", codec).parquet(str(bare))
        return sum(pq.read_metadata(file).num_rows for file in bare.glob("*.parquet"))

    if engine == "apache":
        bar, against = ("write.parquet zstd", 1.15), {"bridge export_table": "write.parquet zstd"}
        contenders = {
            "write.parquet zstd": lambda: written("zstd"),
            "bridge export_table": ours,
            "write.parquet snappy": lambda: written("snappy"),
        }
    else:
        bar, against = ("toArrow", 1.3), {}
        contenders = {
            "toArrow": lambda: spark.read.format("delta").load(table).toArrow().num_rows,
            "bridge export_table": ours,
        }
    comparison = compare(contenders, reference=bar[0], rounds=rounds)
    report.add_comparison(f"{ROWS:,} rows, {len(_EXPRESSIONS)} columns", comparison, against=against)
    report.bars.append(Bar(f"export over {bar[0]}", comparison.ratio("bridge export_table").median, bar[1], "x"))
    off = [abs(size / SHARD_BYTES - 1) for size in sizes]
    rows = [(len(sizes), round(min(sizes) / 2**20, 1), round(max(sizes) / 2**20, 1), sum(each > 0.2 for each in off))]
    title = f"shards of an asked {SHARD_BYTES >> 20} MiB"
    report.add_table(title, ("shards", "least MiB", "most MiB", "off by more than 20 %"), rows)
    report.bars.append(Bar("largest distance from the asked size", 100 * max(off), 20.0, "%"))


def _compare_memory(report: Report, engine: str, remote: str, table: str, folder: Path) -> None:
    asked = {"remote": remote, "table": table, "folder": str(folder / "memory")}
    idle = in_child("benchmarks.exporting:connect_only", **asked)
    ours = in_child("benchmarks.exporting:export", **asked)
    grown = (ours.peak_bytes - idle.peak_bytes) / 1e6
    rows = [("connect only", round(idle.peak_bytes / 1e6)), ("bridge export_table", round(ours.peak_bytes / 1e6))]
    report.add_table("peak memory of the client", ("process", "peak MB"), rows)
    report.bars.append(Bar("peak of the client over connect only", grown, 300.0, "MB"))


def connect_only(*, remote: str, table: str, folder: str) -> None:
    """Connect, and load what an export loads; run in a child."""
    del folder
    spark = bridge.connect(remote)
    spark.read.format("delta").load(table).limit(10).toArrow()


def export(*, remote: str, table: str, folder: str) -> int:
    """Export; run in a child."""
    return bridge.export_table(table, folder, shard_bytes=SHARD_BYTES, spark=bridge.connect(remote)).num_rows


def _time_reuse(report: Report, spark: Any, folder: Path, rounds: int) -> None:
    table, exports = str(folder / "small"), folder / "reused"
    spark.range(_REUSED_ROWS).selectExpr(*_EXPRESSIONS).write.format("delta").save(table)

    def ask() -> str | None:
        made = bridge.export_table(table, exports, num_shards=_REUSED_SHARDS, spark=spark)
        return made.plan and made.plan.reuses

    ask()
    if ask() is None:
        raise ValueError("nothing is reused, so there is nothing to measure.")
    comparison = compare({"reuse": ask}, reference="reuse", rounds=max(rounds, 5))
    report.add_comparison(f"an export of {_REUSED_SHARDS:,} shards asked for again", comparison)
    report.bars.append(Bar("deciding to reuse it", comparison.spread("reuse").median, 1.0, "s"))
