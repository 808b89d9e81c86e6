"""Delta tables that others wrote, read through load_table by both routes, against the rows that are right."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bridge
from tests.rows import multiset, shape

pytestmark = pytest.mark.golden

GOLDEN = Path(os.environ.get("BRIDGE_TEST_DATA", ".")) / "golden-delta"
CASES = sorted(path.name for path in GOLDEN.iterdir()) if GOLDEN.is_dir() else ["none"]

SAIL_FAULTS = {
    "basic-decimal-table": "Sail reads the decimals of partition values by way of float64",
}


def _count(columns: dict[str, Any]) -> int:
    """Return the rows of the first column that is no dict of columns."""
    first = next(iter(columns.values()))
    return _count(first) if isinstance(first, dict) else len(first)


# each gives how many rows it handed over
HAND_OFFS: dict[str, Callable[[bridge.Table], int]] = {
    "to_pandas": lambda table: len(table.to_pandas()),
    "to_pandas of Arrow": lambda table: len(table.to_pandas("pyarrow")),
    "to_numpy": lambda table: _count(table.to_numpy()),
    "to_torch": lambda table: _count(table.to_torch()),
    "to_huggingface": lambda table: sum(1 for _ in table.to_huggingface(streaming=False)),
    "to_huggingface, streaming": lambda table: sum(1 for _ in table.to_huggingface(streaming=True)),
}


@pytest.fixture(scope="session")
def sessions() -> dict[tuple[str, str], Any]:
    return {}


def _session(engine: Any, sessions: dict[tuple[str, str], Any], zone: str) -> Any:
    """Return a session in `zone`, in which partition timestamps that name no zone are read."""
    key = engine.name, zone
    if key not in sessions:
        sessions[key] = engine.new_session(zone)
    return sessions[key]


def _expected(case: str) -> pa.Table:
    files = sorted((GOLDEN / case / "expected").glob("*.parquet"))
    return pa.concat_tables([pq.ParquetFile(file).read() for file in files])


@pytest.mark.parametrize("case", CASES)
def test_golden(engine: Any, sessions: Any, case: str, route: str, tmp_path: Path) -> None:
    right = _expected(case)

    table = bridge.load_table(
        GOLDEN / case / "delta", route=route, volume=tmp_path, spark=_session(engine, sessions, "UTC")
    )

    assert table.route == route
    assert table.num_rows == right.num_rows
    assert shape(table.schema) == shape(right.schema)
    # a fault of the engine is asserted too, so that a case is right by every route or by none
    is_right = multiset(table.to_arrow()) == multiset(right)
    assert is_right == (engine.name == "apache" or case not in SAIL_FAULTS)
    for name, count in HAND_OFFS.items():
        try:
            assert count(table) == right.num_rows, name
        except bridge.LossyConversionError as exc:
            assert any(f"'{column}" in str(exc) for column in right.column_names), f"{name}: {exc}"  # noqa: PT017


@pytest.mark.parametrize("case", sorted(SAIL_FAULTS))
def test_sail_alone_is_wrong(sail: Any, sessions: Any, case: str) -> None:
    """Fails when Sail mends a fault: then take it out of SAIL_FAULTS."""
    spark = _session(sail, sessions, "UTC")

    alone = spark.read.format("delta").load(str(GOLDEN / case / "delta")).toArrow()

    assert multiset(alone) != multiset(_expected(case)), f"mended: {SAIL_FAULTS[case]}"


@pytest.mark.parametrize("case", ["kernel-timestamp-int96", "kernel-timestamp-timestamp_micros"])
def test_partition_timestamps_without_a_zone_are_in_the_sessions(
    engine: Any, sessions: Any, case: str, route: str, tmp_path: Path
) -> None:
    spark = _session(engine, sessions, "America/Los_Angeles")
    path = GOLDEN / case / "delta"
    right = _expected(case)
    in_utc = {row["id"]: row["part"] for row in right.to_pylist()}

    table = bridge.load_table(path, route=route, volume=tmp_path, spark=spark)

    alone = spark.read.format("delta").load(str(path)).toArrow()
    assert multiset(table.to_arrow()) == multiset(alone)
    parts = {row["id"]: row["part"] for row in table.to_arrow().to_pylist()}
    if engine.name == "sail":
        assert parts == in_utc, "mended: Sail reads them in UTC, whatever the session's zone"
        return
    here = ZoneInfo("America/Los_Angeles")
    assert parts == {row: part and part.replace(tzinfo=here).astimezone(dt.UTC) for row, part in in_utc.items()}
