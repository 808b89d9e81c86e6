"""Delta tables that others wrote, read through load_table by both routes, against the rows that are right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bridge
from tests.rows import multiset, shape

pytestmark = pytest.mark.golden

GOLDEN = Path(os.environ.get("BRIDGE_TEST_DATA", ".")) / "golden-delta"
CASES = sorted(path.name for path in GOLDEN.iterdir()) if GOLDEN.is_dir() else ["none"]

# Partition values without a zone were written in this one, and are read in the session's.
WRITTEN_IN = "America/Los_Angeles"

_UTC = "Sail reads partition timestamps without a zone in UTC, whatever the session's zone"
SAIL_FAULTS = {
    "basic-decimal-table": "Sail",
    "kernel-timestamp-int96": _UTC,
    "kernel-timestamp-timestamp_micros": _UTC,
}


@pytest.fixture(scope="session")
def _sessions() -> dict[str, Any]:
    return {}


@pytest.fixture
def spark(engine: Any, _sessions: dict[str, Any]) -> Any:
    """A session of its own, in the zone of the writer."""
    if engine.name not in _sessions:
        _sessions[engine.name] = engine.new_session(WRITTEN_IN)
    return _sessions[engine.name]


def _expected(case: str) -> pa.Table:
    files = sorted((GOLDEN / case / "expected").glob("*.parquet"))
    return pa.concat_tables([pq.ParquetFile(file).read() for file in files])


@pytest.mark.parametrize("case", CASES)
def test_golden(engine: Any, spark: Any, case: str, route: str, tmp_path: Path) -> None:
    right = _expected(case)

    table = bridge.load_table(GOLDEN / case / "delta", route=route, volume=tmp_path, spark=spark)

    assert table.route == route
    assert table.num_rows == right.num_rows
    assert shape(table.schema) == shape(right.schema)
    # a fault of the engine is asserted, so that none is carried any further than the engine carries it
    is_right = multiset(table.to_arrow()) == multiset(right)
    assert is_right == (engine.name == "apache" or case not in SAIL_FAULTS)


@pytest.mark.parametrize("case", sorted(SAIL_FAULTS))
def test_sail_alone_is_wrong(sail: Any, case: str) -> None:
    """Fails when Sail mends a fault: then take it out of SAIL_FAULTS."""
    spark = sail.new_session(WRITTEN_IN)

    alone = spark.read.format("delta").load(str(GOLDEN / case / "delta")).toArrow()

    assert multiset(alone) != multiset(_expected(case)), f"mended: {SAIL_FAULTS[case]}"
