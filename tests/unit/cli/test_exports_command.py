from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bridge.config import data_folder
from bridge.volumes import hold
from bridge.volumes.commit import Attempt, begin
from bridge.volumes.hold import hold_attempt
from bridge.volumes.stores import LocalStorage
from tests.exports import make_export
from tests.unit.cli.conftest import Run

TABLE = pa.table({"n": range(1000)})
DAY_S = 86400


@pytest.fixture(autouse=True)
def _nothing_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "_LAG_S", 0.0)


def export(root: Path, version: int | None = 3, *, age_s: int = 0, shards: int = 2) -> Path:
    receipt = {
        "table": "main.ml.t", "version": version, "spark_types": {"n": "bigint"}, "user": "someone@example.com",
        "columns": ["n", "m"], "where": None, "versions": {"bridge": "0.1.0"},
    }  # fmt: skip
    query = {"columns": ["n", "m"], "where": None, "shard_bytes": 1 << 30}
    folder, _ = make_export(root / "t", [TABLE] * shards, version=version, receipt=receipt, query=query)
    attempt = Attempt.parse(folder.name)
    assert attempt is not None
    older = Attempt(attempt.generation - age_s * 1000, attempt.label, attempt.attempt_id)
    return folder.rename(folder.with_name(older.name))


def size(folder: Path) -> str:
    return f"{sum(file.stat().st_size for file in folder.glob('*.parquet')) / 1024:.1f} KiB"


def fields(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_ls_shows_what_is_complete_and_what_is_not(run: Run, tmp_path: Path) -> None:
    old, young = export(tmp_path, age_s=40 * DAY_S), export(tmp_path, 4, age_s=3 * 3600)
    held = hold_attempt(LocalStorage(old.parent), old.name)
    left = tmp_path / "t" / Attempt(1_000_000_000_000, "a", "0" * 12).name
    left.mkdir()
    with begin(LocalStorage(tmp_path / "t"), "a") as opened:
        result = run("exports", "ls", tmp_path)
        (tmp_path / "t" / opened.name).mkdir()
        with_writer = run("exports", "ls", tmp_path)

    assert result.exit_code == 0, result.output
    header, _, first, second, _, other, _, third, _, total = fields(result.stdout)
    assert header == ["table", "version", "rows", "shards", "size", "owner", "age", "in", "use", "what", "folder"]
    line = ["main.ml.t", "4", "2,000", "2", *size(young).split(), "someone@example.com"]
    assert first[:-1] == [*line, "3", "h", "00", "min", "no", "2", "columns"]
    assert first[-1] == str(young)
    assert second[6:11] == ["someone@example.com", "40", "days", "by", "1"]
    assert second[-1] == str(old)
    assert other == ["not", "complete", "size", "age", "in", "use", "note", "folder"]
    assert (third[:4], third[-1]) == (["left", "behind", "0", "B"], str(left))
    assert total[:2] == ["2", "exports,"]
    assert "being written" in with_writer.stdout
    assert held is not None


def test_ls_of_a_table(run: Run, tmp_path: Path) -> None:
    export(tmp_path)
    make_export(tmp_path / "u", [TABLE], table="main.ml.u", query={})

    assert "main.ml.t" not in run("exports", "ls", tmp_path, "--table", "u").stdout
    result = run("exports", "ls", tmp_path, "--table", "v")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"ExportNotFoundError: {tmp_path} holds no complete export of v.")


def test_the_folder_is_the_setting_or_the_data_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("exports", "ls")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"ExportNotFoundError: {data_folder()}/exports is no folder.")
    default, set_to = export(data_folder() / "exports"), export(tmp_path)
    assert str(default) in run("exports", "ls").stdout

    monkeypatch.setenv("BRIDGE_VOLUME", str(tmp_path))

    assert str(set_to) in run("exports", "ls").stdout
    assert "kept 1, failed 0" in run("exports", "gc", "--keep-versions", "1").stdout


def test_show_tells_what_it_is_and_whether_it_is_there(run: Run, tmp_path: Path) -> None:
    folder = export(tmp_path)

    result = run("exports", "show", folder)
    lines = (line.partition("  ") for line in result.stdout.splitlines()[2:])
    facts = {name: value.strip() for name, _, value in lines}

    assert result.exit_code == 0, result.output
    assert facts["state"] == "complete"
    assert facts["shards"] == "2, all there in full size"
    assert facts["rows"] == "2,000"
    assert (facts["table"], facts["version"], facts["user"]) == ("main.ml.t", "3", "someone@example.com")
    assert (facts["columns"], facts["shard_bytes"]) == ("n, m", "1.0 GiB")
    assert (facts["versions"], facts["spark_types"]) == ("bridge: 0.1.0", "n: bigint")
    assert "where" not in facts
    assert facts["folder"] == str(folder)

    (folder / "part-00000.parquet").unlink()
    assert "2, part-00000.parquet is not there" in run("exports", "show", folder).stdout
    (folder / "_bridge.0.json").write_bytes(b"{}")
    assert "left behind: its marker is damaged" in run("exports", "show", folder).stdout
    assert run("exports", "show", tmp_path).exit_code == 1


def test_verify_tells_each_file_and_exits_with_1(run: Run, tmp_path: Path) -> None:
    folder = export(tmp_path)
    result = run("exports", "verify", folder)
    assert (result.exit_code, result.stdout) == (0, f"2 shards, {size(folder)} in {folder}: all as written\n")
    first = folder / "part-00000.parquet"
    os.truncate(first, first.stat().st_size - 1)
    (folder / "part-00009.parquet").write_bytes(b"")

    result = run("exports", "verify", folder)

    assert result.exit_code == 1
    assert "part-00000.parquet  holds " in result.stdout
    assert "part-00009.parquet  is not listed: readers of the folder take its rows in" in result.stdout
    assert result.stdout.endswith(f"in {folder}: 1 damaged, 1 not listed\n")


def test_gc_tells_what_went_and_what_stays(run: Run, tmp_path: Path) -> None:
    old, young = export(tmp_path, 1, age_s=40 * DAY_S), export(tmp_path, 2)
    freed = size(old)

    dry = run("exports", "gc", tmp_path, "--max-age", "30d", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert fields(dry.stdout)[2][:5] == ["would", "delete", "main.ml.t", "version", "1"]
    assert dry.stdout.endswith(f"would delete 1 export, {freed}; kept 1, failed 0\n")
    assert old.exists()
    result = run("exports", "gc", tmp_path, "--max-age", "30d", "--keep-versions", "1")

    assert result.exit_code == 0, result.output
    _, _, deleted, kept, *_ = result.stdout.splitlines()
    assert (deleted.split()[0], deleted.split()[-1]) == ("deleted", str(old))
    assert "the newest of its table and query" in kept
    assert kept.endswith(str(young))
    assert result.stdout.endswith(f"deleted 1 export, {freed}; kept 1, failed 0\n")
    assert not old.exists()


def test_gc_exits_with_1_where_something_stays_that_should_go(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = export(tmp_path, 1, age_s=10), export(tmp_path, 2)

    def fail(self: LocalStorage, name: str) -> Any:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(LocalStorage, "delete", fail)
    monkeypatch.setattr(hold, "storage_time_ns", lambda storage: 0)

    result = run("exports", "gc", tmp_path, "--keep-versions", "1")

    assert result.exit_code == 1
    assert f"{old.name} cannot be withdrawn, and may still be complete: Permission denied." in result.stdout
    assert "FAILED" in result.stdout


@pytest.mark.parametrize("age", ["30", "d", "-1d", "1.5d", "30 days", ""])
def test_an_age_is_a_number_and_a_unit(run: Run, tmp_path: Path, age: str) -> None:
    result = run("exports", "gc", tmp_path, "--max-age", age)

    assert result.exit_code == 2
    assert "is no age; give a number and one of s, m, h, d, w, such as 30d" in " ".join(
        result.stderr.replace("│", " ").split()
    )


def test_gc_needs_a_rule(run: Run, tmp_path: Path) -> None:
    result = run("exports", "gc", tmp_path)

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("ConfigError: nothing says which exports may go")


def test_rm_deletes_one_that_nobody_uses(run: Run, tmp_path: Path) -> None:
    folder = export(tmp_path)
    num_bytes = size(folder)
    held = hold_attempt(LocalStorage(folder.parent), folder.name)
    result = run("exports", "rm", folder)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"ExportError: {folder} is not deleted: in use by 1 holder.")
    assert held is not None
    held.end()

    result = run("exports", "rm", folder)

    assert (result.exit_code, result.stdout) == (0, f"deleted main.ml.t version 3, {num_bytes}: {folder}\n")
    assert not folder.exists()
