"""Processes that export the same table at once, and a table that changes while it is exported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import bridge
from tests.engines.conftest import EngineUnderTest
from tests.engines.export_chaos import ROWS
from tests.processes import eventually
from tests.volumes.mount import Volume, mounted_volume

REPOSITORY = Path(__file__).parents[2]


def race(engine: EngineUnderTest, root: Path, *numbers: int) -> None:
    frame = engine.spark.range(len(ROWS)).selectExpr("id", "concat('row ', id, ' é') AS text")
    remote = engine.spark.client._builder.url.geturl().replace("http://", "sc://", 1)
    command = [sys.executable, "-m", "tests.engines.export_chaos", remote, engine.path(engine.save(frame)), str(root)]
    done = subprocess.run(
        [*command, *map(str, numbers)], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    for number in numbers:
        assert len(list((root / f"by {number}").iterdir())) == 1


def test_exporters_that_race_end_with_the_same_rows(engine: EngineUnderTest, tmp_path: Path) -> None:
    race(engine, tmp_path, *([2, 8] if engine.name == "sail" else [2]))


@pytest.mark.fuse
def test_exporters_that_race_on_a_volume(sail: EngineUnderTest, tmp_path: Path) -> None:
    with mounted_volume(tmp_path, cache_ms=0) as volume:
        race(sail, volume.path, 2, 8)


@contextmanager
def halted_when(volume: Volume, pattern: str) -> Iterator[threading.Event]:
    """Let the volume stand still once there is something in it of that name; the event tells so."""
    is_halted, is_over = threading.Event(), threading.Event()

    def halt() -> None:
        eventually(lambda: is_over.is_set() or any(volume.backing.rglob(pattern)), within_s=60)
        if not is_over.is_set():
            os.kill(volume.pid, signal.SIGSTOP)
            is_halted.set()

    thread = threading.Thread(target=halt)
    thread.start()
    try:
        yield is_halted
    finally:
        is_over.set()
        thread.join()
        os.kill(volume.pid, signal.SIGCONT)


@pytest.mark.fuse
def test_a_table_that_changes_while_it_is_exported(engine: EngineUnderTest, tmp_path: Path) -> None:
    def rows(start: int, stop: int) -> Any:
        return engine.spark.range(start, stop, 1, 4).selectExpr("id", "sha2(CAST(id AS STRING), 256) AS text")

    name = engine.save(rows(0, 100_000))
    exported: list[bridge.Table] = []

    def export() -> None:
        shape = {"shard_bytes": "1MiB", "row_group_bytes": "256KiB"}
        exported.append(bridge.export_table(name, volume.path / "exports", spark=engine.spark, **shape))

    with mounted_volume(tmp_path, cache_ms=0) as volume:
        exporter = threading.Thread(target=export)
        # an attempt's folder, before there is a file in it
        with halted_when(volume, "exports/*/*-*") as is_halted:
            exporter.start()
            assert is_halted.wait(60)
            engine.save(rows(100_000, 100_010), mode="append", name=name.rpartition(".")[2])
            engine.spark.sql(f"DELETE FROM {name} WHERE id % 2 = 0")
            engine.save(rows(7, 9), mode="overwrite", name=name.rpartition(".")[2])
            assert exporter.is_alive()
            assert not exported
            assert not any(file.stat().st_size for file in volume.backing.rglob("*.parquet"))
        exporter.join()

        (table,) = exported
        assert table.version == 0
        assert sorted(table.to_arrow()["id"].to_pylist()) == list(range(100_000))
        again = bridge.export_table(name, volume.path / "exports", spark=engine.spark)
        assert (again.version, sorted(again.to_arrow()["id"].to_pylist())) == (3, [7, 8])
