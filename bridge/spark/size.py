"""How large a source is, learned from cheap facts, before its rows move.

Bytes on disk never decide: compressed columnar files are 16 times smaller than their rows, or more. What decides is
rows x width, where both can be had without running the query; where they can't, the answer is "unknown".
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.spark.failures import quiet, translated
from bridge.spark.read import run_within
from bridge.spark.source import Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COUNT_TIMEOUT_S = 10.0
_FIXED = "the width of its types"
_SAMPLE_ROWS = 1000
# A first, small sample shows whether more is worth reading, and whether the rows are too wide for it.
_FIRST_SAMPLE_ROWS = 64
_SAMPLE_BYTES = 32 << 20


@dataclass(frozen=True)
class Size:
    """Rows and Arrow bytes of a result, None where unknown.

    With `is_bound` there may be fewer. `rows_from` and `width_from` tell how they were learned.
    """

    num_rows: int | None
    rows_from: str
    row_bytes: float | None = None
    width_from: str = "not measured"
    is_bound: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether nothing of it is a guess."""
        return not self.is_bound and self.width_from == _FIXED

    @property
    def num_bytes(self) -> int | None:
        """Rows times width."""
        if self.num_rows is None or (self.row_bytes is None and self.num_rows > 0):
            return None
        return round(self.num_rows * (self.row_bytes or 0))


def measure(source: Source, max_bytes: int) -> Size:
    """Return the size of what `source.frame` gives. A full count is made only of a filtered table, for 10 s at most."""
    fixed = _fixed_width(source.schema)
    with translated(source.name), ThreadPoolExecutor(1, "bridge-sample") as beside:
        # where rows will be counted, a sample is read meanwhile
        is_sampled = source.kind == "delta" and fixed is None
        sample = beside.submit(_sample, source, _FIRST_SAMPLE_ROWS) if is_sampled else None
        rows, told = _unfiltered_rows(source)
        if rows is None:
            return _with_limit(Size(None, told), source.limit)
        width, width_from = fixed, _FIXED
        if fixed is None:
            first = sample.result() if sample else _sample(source, _FIRST_SAMPLE_ROWS)
            width, width_from = _width(source, rows, first, max_bytes)
        size = _with_limit(Size(rows, told, width, width_from), source.limit)
        if not source.is_filtered:
            return size
        bound = Size(size.num_rows, f"{size.rows_from}, before the filter", width, width_from, is_bound=True)
        if (bound.num_bytes or 0) <= max_bytes:
            return bound
        counted = count_rows(source.frame)
        if counted is None:
            return Size(None, f"the filter could not be counted within {COUNT_TIMEOUT_S:.0f} s", width, width_from)
        return Size(counted, "counted with the filter", width, width_from)


def _with_limit(size: Size, limit: int | None) -> Size:
    if limit is None or (size.num_rows is not None and size.num_rows <= limit):
        return size
    return Size(limit, "the limit", size.row_bytes, size.width_from, is_bound=size.num_rows is None)


def _unfiltered_rows(source: Source) -> tuple[int | None, str]:
    if source.kind == "delta":
        rows = count_rows(source.unfiltered)
        if rows is not None:
            return rows, "counted from the Delta log"
        return None, f"the table could not be counted within {COUNT_TIMEOUT_S:.0f} s"
    # Sail shows a limit's input as the limit's own rows, so the plan is asked without it.
    if not source.is_filtered:
        rows = source.engine.exact_rows(_explain(source.unfiltered))
        if rows is not None:
            return rows, "known to the query plan"
    return None, f"unknown: a {source.kind} is not counted, since that would run it"


def _explain(frame: Any) -> str:
    client = frame.sparkSession.client
    with quiet():
        return str(client.explain_string(frame._plan.to_proto(client), explain_mode="cost"))


def count_rows(frame: DataFrame) -> int | None:
    """Return how many rows `frame` gives; None where that takes more than 10 s, after which it is stopped."""
    from pyspark.sql.connect import functions as F

    counted = run_within(frame.agg(F.count(F.lit(1))), COUNT_TIMEOUT_S)
    return None if counted is None else int(counted.column(0)[0].as_py())


def _width(source: Source, rows: int, sample: pa.Table | None, max_bytes: int) -> tuple[float | None, str]:
    """Return the mean Arrow bytes of a row, more exactly where the decision is close."""
    if rows == 0:
        return 0.0, "no rows"
    if sample is not None and sample.num_rows:
        width = sample.nbytes / sample.num_rows
        if rows * width > max_bytes / 4 and width * _SAMPLE_ROWS < _SAMPLE_BYTES:
            sample = _sample(source, _SAMPLE_ROWS) or sample
    if sample is None or sample.num_rows == 0:
        return None, f"a sample could not be read within {COUNT_TIMEOUT_S:.0f} s"
    return sample.nbytes / sample.num_rows, f"a sample of {sample.num_rows:,} rows"


def _sample(source: Source, rows: int) -> pa.Table | None:
    return run_within(source.unfiltered.limit(rows), COUNT_TIMEOUT_S)


def _fixed_width(schema: pa.Schema) -> float | None:
    """Return the bytes of a row where all types tell."""
    widths = [_fixed_bytes(field.type) for field in schema]
    return None if None in widths else float(sum(width or 0 for width in widths))


def _fixed_bytes(arrow: pa.DataType) -> float | None:
    """Return the bytes of one value with its validity bit, None where values differ in length."""
    if pa.types.is_struct(arrow):
        children = [_fixed_bytes(child.type) for child in arrow]
        return None if None in children else sum(child or 0 for child in children) + 1 / 8
    if pa.types.is_null(arrow):
        return 0.0
    try:
        return float(arrow.bit_width + 1) / 8
    except ValueError:
        return None


def assumed_width(schema: pa.Schema) -> float:
    """Return a guess of the bytes of a row, for shapes only: 64 bytes for a value whose type does not tell."""
    return sum(64.0 if width is None else width for width in (_fixed_bytes(field.type) for field in schema))
