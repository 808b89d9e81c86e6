"""A warehouse with one small Delta table, and a way to call the command in this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

import bridge
from bridge.cli.app import app
from bridge.spark import connect

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "warehouse"
    schema = folder / "main" / "demo"
    schema.mkdir(parents=True)
    rows = pa.table(
        {
            "id": pa.array([1, 2, 3, None], pa.int64()),
            "name": pa.array(["a", 'b"', None, "ü"], pa.string()),
            "tags": pa.array([["x"], [], None, ["y", "z"]], pa.list_(pa.string())),
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRIDGE_WAREHOUSE", str(folder))
        spark = bridge.connect("sail")
    spark.sql(f"CREATE SCHEMA IF NOT EXISTS main.demo LOCATION '{schema}'")
    spark.createDataFrame(rows).write.format("delta").saveAsTable("main.demo.small")
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call `bridge` with these arguments, as in a process of its own: what a command sets of profiles is put back."""
    monkeypatch.setattr(connect, "_known", weakref.WeakKeyDictionary())
    monkeypatch.setenv("BRIDGE_PROFILE", "")
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch, warehouse: Path) -> Path:
    """Put the embedded engine in force, whatever session an earlier test left active."""
    monkeypatch.setenv("BRIDGE_REMOTE", "sail")
    monkeypatch.setenv("BRIDGE_WAREHOUSE", str(warehouse))
    return warehouse
