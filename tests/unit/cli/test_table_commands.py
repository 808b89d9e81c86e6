from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bridge
from tests.unit.cli.conftest import Run

pytestmark = pytest.mark.usefixtures("embedded")


def test_plan_shows_the_decision_and_the_types(run: Run) -> None:
    result = run("plan", "main.demo.small", "--columns", "id,name", "--where", "id > 1", "--version", "0")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "columns id, name" in lines
    assert "where id > 1" in lines
    assert "version 0 (the version that was asked for)" in lines
    assert "route collect: it fits in max_bytes, 512 MiB" in lines
    assert "id bigint int64 Int64 int64 int64" in lines
    assert "name string string object (str) object (str) list[str]" in lines
    assert "<NA> in pandas; an error in arrays and tensors id" in lines


def test_plan_of_an_export_names_the_volume(run: Run, tmp_path: Path) -> None:
    result = run("plan", "main.demo.small", "--route", "export", "--volume", tmp_path)
    assert f"volume           {tmp_path}" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_ceiling_changes_the_route(run: Run) -> None:
    assert "export: it does not fit in max_bytes, 8 B" in run("plan", "main.demo.small", "--max-bytes", "8").stdout


def test_the_settings_of_a_profile_are_in_force(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(f"max_bytes: 8\nvolume: {tmp_path}/exports\n")
    monkeypatch.setenv("BRIDGE_CONF", str(tmp_path))
    result = run("plan", "main.demo.small", "--profile", "mine")
    assert "export: it does not fit in max_bytes, 8 B" in result.stdout
    assert f"volume           {tmp_path}/exports" in result.stdout


def test_a_remote_wins_over_the_environment(run: Run) -> None:
    result = run("plan", "main.demo.small", "--remote", "sc://localhost:1")
    assert result.exit_code == 1
    assert result.stderr.startswith("EngineUnavailableError: no Spark Connect server answers at sc://localhost:1")


@pytest.mark.parametrize("route", ["collect", "export"])
def test_load_writes_parquet_and_arrow(run: Run, tmp_path: Path, route: str) -> None:
    options = ["--route", route, "--volume", tmp_path / "exports"]
    for name in ("rows.parquet", "rows.arrow"):
        result = run("load", "main.demo.small", "--to", tmp_path / name, *options)
        assert result.exit_code == 0, result.output
        assert "4 rows x 3 columns" in result.stdout
    expected = {(1, "a", ("x",)), (2, 'b"', ()), (3, None, None), (None, "ü", ("y", "z"))}
    for table in (pq.read_table(tmp_path / "rows.parquet"), pa.ipc.open_file(tmp_path / "rows.arrow").read_all()):
        assert table.schema.field("tags").type.value_type == pa.string()
        rows = {
            (row["id"], row["name"], None if row["tags"] is None else tuple(row["tags"])) for row in table.to_pylist()
        }
        assert rows == expected


def test_load_writes_csv_in_which_null_and_empty_differ(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "rows.CSV"
    result = run("load", "main.demo.small", "--to", path, "--columns", 'id, "name"', "--where", "id IS NOT NULL")
    assert result.exit_code == 0, result.output
    assert sorted(path.read_text().splitlines()) == ['"id","name"', '1,"a"', '2,"b"""', "3,"]


def test_a_type_that_csv_cannot_hold_is_named(run: Run, tmp_path: Path) -> None:
    result = run("load", "main.demo.small", "--to", tmp_path / "rows.csv")
    assert result.exit_code == 1
    assert "LossyConversionError: column 'tags' is list<" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_before_bytes_move(run: Run, tmp_path: Path) -> None:
    result = run("load", "main.demo.nowhere", "--to", tmp_path / "absent" / "rows.csv")
    assert result.exit_code == 1
    assert result.stderr.startswith("VolumeError")
    assert f"{tmp_path}/absent is not a folder" in result.stderr


def test_a_write_that_fails_is_an_error_of_ours(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet" / "kept").mkdir(parents=True)
    result = run("load", "main.demo.small", "--to", tmp_path / "rows.parquet")
    assert result.exit_code == 1
    assert "VolumeError: " in result.stderr
    assert "rows.parquet could not be written: " in result.stderr
    assert list(tmp_path.rglob("*")) == [tmp_path / "rows.parquet", tmp_path / "rows.parquet" / "kept"]


def test_an_unknown_suffix_is_wrong_usage(run: Run, tmp_path: Path) -> None:
    result = run("load", "main.demo.small", "--to", tmp_path / "rows.xlsx")
    assert result.exit_code == 2
    assert "does not end in .parquet, .arrow, .csv" in result.stderr


def test_export_prints_its_folder_last_and_is_reused(run: Run, tmp_path: Path) -> None:
    first = run("export", "main.demo.small", tmp_path)
    assert first.exit_code == 0, first.output
    assert first.stdout.splitlines()[0].startswith("main.demo.small version 0: 4 rows, 1 shard, ")
    assert first.stdout.splitlines()[1] == "new: none is there"
    folder = first.stdout.splitlines()[-1]
    assert bridge.open_export(folder).num_rows == 4
    second = run("export", "main.demo.small", tmp_path)
    assert second.stdout.splitlines()[1] == f"reused: {folder}"
    assert second.stdout.splitlines()[-1] == folder
