"""Collect: our load_table beside Connect's own toPandas and toArrow, on the same stored table."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa

import bridge
from benchmarks.harness import Bar, Report, Spread, compare, in_child

_REMOTES = {"sail": "sail", "apache": "local[2]"}
ROWS = 1_000_000
# 76 bytes a row and more: about 400 MB of Arrow.
MEMORY_ROWS = 4_800_000
_ENOUGH = "8GiB"
# A JVM compiles what it runs often: its first few queries take twice as long.
_WARM_UPS = 3

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.int32()),
        ("ratio", pa.float64()),
        ("text", pa.string()),
        ("pair", pa.list_(pa.float32())),
        ("amount", pa.decimal128(18, 4)),
        ("moment", pa.timestamp("us", tz="UTC")),
        ("maybe", pa.int64()),
    ]
)
_EXPRESSIONS = (
    "id",
    "CAST(id % 1000003 AS INT) AS small",
    "id / 7.0D AS ratio",
    "concat('row ', CAST(id % 10007 AS STRING)) AS text",
    "array(CAST(id % 1000 AS FLOAT), CAST(id % 777 AS FLOAT)) AS pair",
    "CAST(CAST(id % 1000000 AS DECIMAL(14,4)) / 8 AS DECIMAL(18,4)) AS amount",
    "timestamp_seconds(1600000000 + id) AS moment",
    "CASE WHEN id % 10 = 0 THEN NULL ELSE id * 3 END AS maybe",
)


def measure(*, engine: str, rounds: int, folder: Path) -> Report:
    """Return the times of the four ways, where ours goes, and the memory of a large collect."""
    report = Report("collect", engine)
    spark = _connect(engine)
    kind = store(spark, folder / "mixed", rows=ROWS)
    _compare_times(report, spark, str(folder / "mixed"), kind, rounds)
    _split_time(report, spark, str(folder / "mixed"), kind, rounds)
    large = str(folder / "large")
    store(spark, Path(large), rows=MEMORY_ROWS)
    _compare_memory(report, engine, large, kind)
    return report


def store(spark: Any, path: Path, *, rows: int) -> str:
    """Write the mixed table and return its format: "delta", or "parquet" where the server knows no Delta."""
    from pyspark.errors import PySparkException

    frame = spark.range(rows).selectExpr(*_EXPRESSIONS)
    try:
        frame.write.format("delta").save(str(path))
    except PySparkException:
        frame.write.format("parquet").save(str(path))
        return "parquet"
    return "delta"


def _connect(engine: str) -> Any:
    spark = bridge.connect(_REMOTES[engine])
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    return spark


def _frame(spark: Any, path: str, kind: str) -> Any:
    return spark.read.format(kind).load(path)


def _load(spark: Any, path: str, kind: str, max_bytes: str | None = None) -> bridge.Table:
    source = path if kind == "delta" else _frame(spark, path, kind)
    return bridge.load_table(source, route="collect", max_bytes=max_bytes, spark=spark)


def _compare_times(report: Report, spark: Any, path: str, kind: str, rounds: int) -> None:
    ours = {"bridge to_pandas": "toPandas", "bridge to_arrow": "toArrow"}
    comparison = compare(
        {
            "toPandas": lambda: _frame(spark, path, kind).toPandas(),
            "bridge to_pandas": lambda: _load(spark, path, kind).to_pandas(),
            "toArrow": lambda: _frame(spark, path, kind).toArrow(),
            "bridge to_arrow": lambda: _load(spark, path, kind).to_arrow(),
        },
        reference="toPandas",
        rounds=rounds,
        warm_ups=_WARM_UPS,
        check=_differs,
    )
    report.add_comparison(f"{ROWS:,} rows, {len(SCHEMA)} columns, stored as {kind}", comparison, against=ours)
    report.bars.append(Bar("to_pandas over toPandas", comparison.ratio("bridge to_pandas").median, 1.0, "x"))


def _differs(expected: Any, found: Any) -> str | None:
    """Compare two results, each an Arrow table or a DataFrame, whatever the order of their rows."""
    left, right = _canonical(expected), _canonical(found)
    if left.num_rows != right.num_rows:
        return f"{left.num_rows:,} rows became {right.num_rows:,}"
    other = [name for name in SCHEMA.names if not left.column(name).equals(right.column(name))]
    return f"columns {', '.join(other)} hold other values" if other else None


def _canonical(result: Any) -> pa.Table:
    if not isinstance(result, pa.Table):
        # pyarrow warns of what Connect keeps there, which is no data.
        result.attrs.clear()
        # toPandas gives instants without a zone, in that of the session: UTC here.
        result = pa.Table.from_pandas(result, schema=SCHEMA, preserve_index=False, safe=False)
    return result.cast(SCHEMA).combine_chunks().sort_by("id")


def _split_time(report: Report, spark: Any, path: str, kind: str, rounds: int) -> None:
    from bridge.tables.fetch import fetch
    from bridge.tables.prepare import prepare

    steps: dict[str, list[float]] = {"plan": [], "fetch": [], "convert to pandas": []}
    for _ in range(rounds):
        started = time.perf_counter()
        source = path if kind == "delta" else _frame(spark, path, kind)
        with prepare(source, route="collect", spark=spark) as prepared:
            planned = time.perf_counter()
            table = fetch(prepared)
            fetched = time.perf_counter()
        frame = table.to_pandas()
        converted = time.perf_counter()
        del frame, table
        for step, seconds in zip(steps, (planned - started, fetched - planned, converted - fetched), strict=True):
            steps[step].append(seconds)
    whole = Spread.of([sum(parts) for parts in zip(*steps.values(), strict=True)]).median
    rows = []
    for step, measured in steps.items():
        spread = Spread.of(measured)
        shown = (round(value, 3) for value in (spread.median, spread.least, spread.most))
        rows.append((step, *shown, f"{spread.median / whole:.0%}"))
    report.add_table("where the time of bridge to_pandas goes", ("step", "median s", "min s", "max s", "of all"), rows)


def _compare_memory(report: Report, engine: str, path: str, kind: str) -> None:
    idle = in_child("benchmarks.collect:connect_only", engine=engine)
    rows: list[tuple[object, ...]] = [("connect only", "", round(idle.peak_bytes / 1e6), "")]
    for name, function in (("toArrow", "collect_theirs"), ("bridge to_arrow", "collect_ours")):
        child = in_child(f"benchmarks.collect:{function}", engine=engine, path=path, kind=kind)
        grown = child.peak_bytes - idle.peak_bytes
        rows.append((name, round(child.result / 1e6), round(child.peak_bytes / 1e6), round(grown / 1e6)))
        if function == "collect_ours":
            limit = 1.3 * child.result + 200e6
            report.bars.append(Bar("peak of to_arrow over connect only", grown / 1e6, limit / 1e6, "MB"))
    # The embedded engine lives in the process that is measured, with all that it needs to read the files.
    title = "peak memory of a process" + (", the server's included" if engine == "sail" else "")
    report.add_table(title, ("process", "Arrow MB", "peak MB", "more than connect only, MB"), rows)


def connect_only(*, engine: str) -> None:
    """Connect, and load what a collect loads; run in a child."""
    _connect(engine).range(10).toArrow()


def collect_theirs(*, engine: str, path: str, kind: str) -> int:
    """Collect by Connect alone and return the Arrow bytes; run in a child."""
    return int(_frame(_connect(engine), path, kind).toArrow().nbytes)


def collect_ours(*, engine: str, path: str, kind: str) -> int:
    """Collect by bridge and return the Arrow bytes; run in a child."""
    return _load(_connect(engine), path, kind, _ENOUGH).num_bytes
