"""Estimates that are far off, and views that change after they were loaded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import pyarrow.compute as pc
import pytest

import bridge
from bridge.errors import TableTooLargeError

# Apache Spark sends 10,000 rows in one message, however wide they are.
ROWS = 150_000
WIDE = 2_000


@pytest.fixture(scope="module")
def saved() -> dict[str, str]:
    """The names of tables that were made once for each engine."""
    return {}


@pytest.fixture
def narrow_at_its_head(engine: Any, saved: dict[str, str]) -> str:
    """A table whose first rows, which are what a sample reads, are hundreds of times narrower than the others."""
    if engine.name not in saved:
        rows = f"CASE WHEN id < 2000 THEN 'x' ELSE concat(CAST(id AS STRING), repeat('x', {WIDE})) END AS text"
        saved[engine.name] = engine.save(engine.spark.range(0, ROWS, 1, 1).selectExpr("id", rows))
    return saved[engine.name]


def test_a_table_a_hundred_times_wider_than_its_sample_becomes_an_export(
    engine: Any, narrow_at_its_head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.spark.size.COUNT_TIMEOUT_S", 120.0)  # a sample is read on a slow machine too

    table = engine.load(narrow_at_its_head, max_bytes="8MiB", volume=tmp_path)

    assert table.plan.num_bytes is not None
    assert table.plan.num_bytes * 100 < ROWS * WIDE
    assert table.route == "export"
    assert table.plan.reason.startswith("collecting passed max_bytes, 8.0 MiB, after ")
    assert table.num_rows == ROWS
    lengths = pc.utf8_length(table.to_arrow()["text"])
    assert pc.sum(pc.greater(lengths, WIDE)).as_py() == ROWS - 2000


def test_a_ceiling_holds_although_the_estimate_was_below_it(engine: Any, narrow_at_its_head: str) -> None:
    memory = _MostMemory()

    with (
        memory,
        pytest.raises(TableTooLargeError, match=r"takes more than 8\.0 MiB; max_bytes is 8\.0 MiB\.\n  Name fewer"),
    ):
        engine.load(narrow_at_its_head, max_bytes="8MiB", route="collect")

    # of 286 MiB: what has arrived, and the few messages on their way
    assert memory.grown < ROWS * WIDE / 2


class _MostMemory:
    """How much more memory this process holds within the block than before it, at most."""

    grown = 0

    def __enter__(self) -> None:
        self._before = psutil.Process().memory_info().rss
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.grown = max(self.grown, psutil.Process().memory_info().rss - self._before)


def test_a_view_that_is_replaced_after_it_was_loaded(engine: Any, route: str, tmp_path: Path) -> None:
    engine.spark.range(10).createOrReplaceTempView("replaced_later")
    table = engine.load("replaced_later", route=route, volume=tmp_path)
    engine.spark.range(100, 103).createOrReplaceTempView("replaced_later")

    assert sorted(table.to_pandas()["id"]) == list(range(10))
    assert bridge.load_table("replaced_later", spark=engine.spark).num_rows == 3
    engine.spark.catalog.dropTempView("replaced_later")
