"""Partitions and folders whose names hold what paths, URIs and Hive give a meaning of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import bridge
from tests.engines.conftest import EngineUnderTest
from tests.volumes.mount import mounted_volume

VALUES = [
    "a b", "100%", "%2F", "#1", "it's", 'say "hi"', "a=b", "a/b", "a:b", "back\\slash", "?", "*", "[x]", "{y}", "+",
    "&", "é", "日本", "😀", ".", "..", "_x", "~", "null", None,
]  # fmt: skip
FOLDERS = ["a=b", 'a"b', "it's", "100%", "%2F", "a#b", "a&b;c", "a b", "é 日本", "=", "#"]


def literal(value: str | None) -> str:
    if value is None:
        return "NULL"
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def test_odd_names_and_values_of_partitions(engine: EngineUnderTest, tmp_path: Path) -> None:
    values = ", ".join(f"({number}, {literal(value)})" for number, value in enumerate(VALUES))
    frame = engine.spark.sql(f"SELECT id, value AS `p%é#'x` FROM VALUES {values} AS t(id, value)")
    frame.write.format("delta").partitionBy("p%é#'x").save(str(tmp_path / "table"))

    for route in ("collect", "export"):
        table = engine.load(tmp_path / "table", route=route, volume=tmp_path / "exports")

        rows = sorted(table.to_arrow().to_pylist(), key=lambda row: row["id"])
        assert [row["p%é#'x"] for row in rows] == VALUES


def check_export(engine: EngineUnderTest, root: Path) -> None:
    table = bridge.export_table(engine.spark.range(0, 100, 1, 2), root, num_shards=2, spark=engine.spark)

    assert sorted(table.to_arrow()["id"].to_pylist()) == list(range(100))
    assert len(table.files) == 2
    assert str(root) in (table.path or "")
    assert bridge.open_export(root).path == table.path
    assert [info.path for info in bridge.list_exports(root)] == [table.path]


@pytest.mark.parametrize("folder", FOLDERS)
def test_odd_names_of_roots(engine: EngineUnderTest, folder: str, tmp_path: Path) -> None:
    check_export(engine, tmp_path / folder)

    assert [path.name for path in tmp_path.iterdir()] == [folder]


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    with mounted_volume(tmp_path, cache_ms=0) as mounted:
        yield mounted.path


@pytest.mark.fuse
def test_odd_names_on_a_volume(engine: EngineUnderTest, volume: Path) -> None:
    check_export(engine, volume / "it's #1" / "100% é=日本")
