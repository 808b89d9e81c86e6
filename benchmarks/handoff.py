"""Hand-off: our load_table and to_torch beside toArrow alone, and beside toPandas taken to tensors by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import bridge
from benchmarks.collect import ROWS, SCHEMA, store
from benchmarks.harness import Bar, Report, Spread, compare, in_child

_REMOTES = {"sail": "sail", "apache": "local[2]"}
# A JVM compiles what it runs often: its first few queries take twice as long.
_WARM_UPS = 3

# A list of a million strings costs what no tensor does: measured with and without.
_NO_TEXT = [name for name in SCHEMA.names if name != "text"]

# What every way must arrive at, NULL where a tensor holds NaN.
_TENSORS = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.int32()),
        ("ratio", pa.float64()),
        ("text", pa.string()),
        ("pair", pa.list_(pa.float32(), 2)),
        ("amount", pa.float64()),
        ("moment", pa.int64()),
        ("maybe", pa.float64()),
    ]
)


def measure(*, engine: str, rounds: int, folder: Path) -> Report:
    """Return the times of the three ways, where ours goes step by step and column by column, and the memory of each."""
    report = Report("handoff", engine)
    spark = _connect(engine)
    path = str(folder / "mixed")
    kind = store(spark, Path(path), rows=ROWS)
    _compare_times(report, spark, path, kind, rounds)
    _split_time(report, spark, path, kind, rounds)
    _compare_memory(report, engine, path, kind)
    return report


def _connect(engine: str) -> Any:
    spark = bridge.connect(_REMOTES[engine])
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    return spark


def _frame(spark: Any, path: str, kind: str, columns: Sequence[str] = SCHEMA.names) -> Any:
    return spark.read.format(kind).load(path).select(*columns)


def _source(spark: Any, path: str, kind: str) -> Any:
    return path if kind == "delta" else spark.read.format(kind).load(path)


def _policies() -> dict[str, Any]:
    return {"amount": bridge.as_float64(), "maybe": bridge.as_float64()}


def _ours(spark: Any, path: str, kind: str, columns: Sequence[str] = SCHEMA.names) -> dict[str, Any]:
    # As people write it: without a list of columns where all are wanted.
    some = None if columns == SCHEMA.names else columns
    table = bridge.load_table(_source(spark, path, kind), columns=some, policies=_policies(), spark=spark)
    if table.route != "collect":
        raise ValueError(f"the table came by {table.route}, which is another question.")
    tensors: dict[str, Any] = table.to_torch()
    return tensors


def _by_pandas(spark: Any, path: str, kind: str, columns: Sequence[str] = SCHEMA.names) -> dict[str, Any]:
    """Go by toPandas and NumPy, as people do."""
    import numpy as np
    import torch

    frame = _frame(spark, path, kind, columns).toPandas()
    convert: dict[str, Callable[[Any], Any]] = {
        "pair": lambda values: np.stack(values).astype("float32", copy=False),
        "amount": lambda values: values.astype("float64"),
        "moment": lambda values: values.astype("datetime64[us]").astype("int64"),
    }
    tensors: dict[str, Any] = {}
    for name in columns:
        values = frame[name].to_numpy()
        if name == "text":
            tensors[name] = values.tolist()
        else:
            tensors[name] = torch.from_numpy(convert[name](values) if name in convert else values)
    return tensors


def _compare_times(report: Report, spark: Any, path: str, kind: str, rounds: int) -> None:
    at = (spark, path, kind)
    comparison = compare(
        {
            "toArrow": lambda: _frame(*at).toArrow(),
            "bridge to_torch": lambda: _ours(*at),
            "toPandas to tensors": lambda: _by_pandas(*at),
            "toArrow, no text": lambda: _frame(*at, _NO_TEXT).toArrow(),
            "bridge to_torch, no text": lambda: _ours(*at, _NO_TEXT),
            "toPandas to tensors, no text": lambda: _by_pandas(*at, _NO_TEXT),
        },
        reference="toArrow",
        rounds=rounds,
        warm_ups=_WARM_UPS,
        check=_differs,
    )
    against = {name: "toArrow, no text" for name in comparison.seconds if name.endswith(", no text")}
    title = f"{ROWS:,} rows, {len(SCHEMA)} columns ({len(_NO_TEXT)} without text), stored as {kind}"
    report.add_comparison(title, comparison, against=against)
    rows: list[tuple[object, ...]] = []
    for suffix in ("", ", no text"):
        ours, usual, arrow = (f"{way}{suffix}" for way in ("bridge to_torch", "toPandas to tensors", "toArrow"))
        for name in (ours, usual):
            more = comparison.difference(name, to=arrow)
            rows.append((name, *(round(value, 3) for value in (more.median, more.least, more.most))))
        report.bars += [
            Bar(f"{ours} over toArrow", comparison.ratio(ours, to=arrow).median, 1.15, "x"),
            Bar(f"{ours} over toPandas", comparison.ratio(ours, to=usual).median, 1 / 3, "x"),
        ]
    # Both ways wait for the same rows: this is what they add to that.
    report.add_table("seconds more than toArrow in the same round", ("contender", "median", "min", "max"), rows)


def _differs(expected: Any, found: Any) -> str | None:
    """Compare two results, each an Arrow table or a dict of tensors, whatever the order of their rows."""
    right = _canonical(found)
    left = _canonical(expected).select(right.column_names)
    if left.num_rows != right.num_rows:
        return f"{left.num_rows:,} rows became {right.num_rows:,}"
    other = [name for name in right.column_names if not left.column(name).equals(right.column(name))]
    return f"columns {', '.join(other)} hold other values" if other else None


def _canonical(result: Any) -> pa.Table:
    names = result.column_names if isinstance(result, pa.Table) else list(result)
    columns = []
    for name in names:
        target = _TENSORS.field(name).type
        if isinstance(result, pa.Table):
            column = result.column(name)
            # The session's zone is UTC; an engine may leave the zone out.
            column = column.cast(pa.timestamp("us", tz="UTC")) if name == "moment" else column
            columns.append(column.cast(target))
        elif isinstance(result[name], list):
            columns.append(pa.array(result[name], target))
        else:
            columns.append(_as_arrow(result[name].numpy(), target))
    table = pa.Table.from_arrays(columns, schema=pa.schema([_TENSORS.field(name) for name in names]))
    return table.sort_by("id").combine_chunks()


def _as_arrow(values: Any, target: pa.DataType) -> pa.Array:
    """Refuse a tensor of another type than the contract's, which a cast would hide."""
    flat = pa.array(values.reshape(-1), from_pandas=True)
    is_pair = pa.types.is_fixed_size_list(target)
    if flat.type != (target.value_type if is_pair else target):
        raise TypeError(f"a tensor of {flat.type} came in the place of {target}")
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if is_pair else flat


class _Watch:
    """Seconds of named steps, over several rounds."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)

    def rows(self) -> list[tuple[object, ...]]:
        """Return a row for each step: milliseconds, and the part of all."""
        whole = Spread.of([sum(parts) for parts in zip(*self.seconds.values(), strict=True)]).median
        rows = []
        for step, measured in self.seconds.items():
            spread = Spread.of(measured)
            shown = (round(value * 1e3, 1) for value in (spread.median, spread.least, spread.most))
            rows.append((step, *shown, f"{spread.median / whole:.0%}"))
        return rows


def _split_time(report: Report, spark: Any, path: str, kind: str, rounds: int) -> None:
    from bridge.columns.rules import Rules
    from bridge.columns.tensors import field_to_torch, to_torch
    from bridge.tables.fetch import fetch
    from bridge.tables.prepare import prepare

    steps, columns = _Watch(), _Watch()
    for _ in range(rounds):
        with ExitStack() as stack:
            with steps.step("plan"):
                prepared = stack.enter_context(prepare(_source(spark, path, kind), spark=spark))
            # Without the policies, which fetch would apply: they are a step of their own.
            with steps.step("collect"):
                rows = fetch(prepared).to_arrow()
        with steps.step("apply policies"):
            made = Rules.choose(rows.schema, _policies()).apply(rows)
        del rows
        with steps.step("to_torch"):
            tensors = to_torch(made)
        del tensors
        for field, column in zip(made.schema, made.columns, strict=True):
            with columns.step(f"{field.name} {field.type}"):
                tensor = field_to_torch(column, field)
            del tensor
        del made
    headers = ("ms, median", "min", "max", "of all")
    report.add_table("where the time of bridge to_torch goes", ("step", *headers), steps.rows())
    report.add_table("where the time of the step to_torch goes", ("column", *headers), columns.rows())


def _compare_memory(report: Report, engine: str, path: str, kind: str) -> None:
    idle = in_child("benchmarks.handoff:connect_only", engine=engine).peak_bytes
    rows: list[tuple[object, ...]] = [("connect only", round(idle / 1e6), "")]
    grown: dict[str, float] = {}
    for name in ("toArrow", "bridge to_torch", "toPandas to tensors"):
        peak = in_child("benchmarks.handoff:hand_over", engine=engine, path=path, kind=kind, way=name).peak_bytes
        grown[name] = (peak - idle) / 1e6
        rows.append((name, round(peak / 1e6), round(grown[name])))
    limit = grown["toPandas to tensors"] / 2
    report.bars.append(Bar("peak of bridge to_torch over connect only", grown["bridge to_torch"], limit, "MB"))
    # The embedded engine lives in the process that is measured, with all that it needs to read the files.
    title = "peak memory of a process" + (", the server's included" if engine == "sail" else "")
    report.add_table(title, ("process", "peak MB", "more than connect only, MB"), rows)


def connect_only(*, engine: str) -> None:
    """Connect, and load what all ways load; run in a child."""
    import torch  # noqa: F401

    _connect(engine).range(10).toArrow()


def hand_over(*, engine: str, path: str, kind: str, way: str) -> int:
    """Go one way and return how many columns came; run in a child."""
    import torch  # noqa: F401

    spark = _connect(engine)
    if way == "toArrow":
        return int(_frame(spark, path, kind).toArrow().num_columns)
    return len((_ours if way == "bridge to_torch" else _by_pandas)(spark, path, kind))
