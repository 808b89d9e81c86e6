from __future__ import annotations

from pathlib import Path

import pytest

import bridge
from tests.unit.cli.conftest import Run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source" / "deep").mkdir(parents=True)
    (tmp_path / "source" / "a").write_bytes(b"a" * 1000)
    (tmp_path / "source" / "deep" / "b").write_bytes(b"b" * 24)
    return tmp_path / "source"


def test_a_copy_prints_its_report(run: Run, source: Path, tmp_path: Path) -> None:
    result = run("cp", source, tmp_path / "target", "--threads", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("2 files (1.0 KiB) copied in ")
    assert result.stdout.endswith(" ms; 0 skipped\n")
    assert (tmp_path / "target" / "deep" / "b").read_bytes() == b"b" * 24
    assert run("cp", source, tmp_path / "target").stdout.endswith("; 2 skipped\n")


def test_a_failure_is_told_once_and_ends_with_status_1(run: Run, source: Path, tmp_path: Path) -> None:
    (source / "gone").symlink_to("nowhere")
    result = run("cp", source, tmp_path / "target")
    assert result.exit_code == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == f"CopyError: {source} was not copied whole."
    assert lines[1].startswith("2 files (1.0 KiB) copied in ")
    assert lines[2:] == [
        "1 failed:",
        f"  {source}/gone: a link to what is not there",
        "  Mend that and run it again: what is there is skipped.",
    ]


def test_a_missing_source_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    result = run("cp", tmp_path / "missing", tmp_path / "target")
    assert result.exit_code == 2
    assert "there is nothing at" in result.stderr


def test_a_copy_into_itself_is_refused(run: Run, source: Path) -> None:
    result = run("cp", source, source / "deep" / "er")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"VolumeError: {source}/deep/er cannot take {source}")


@pytest.mark.parametrize("arguments", [["a"], ["a", "b", "c"], ["a", "b", "--threads", "0"]])
def test_wrong_usage_ends_with_status_2(run: Run, arguments: list[str]) -> None:
    assert run("cp", *arguments).exit_code == 2


def test_a_folder_that_stands_for_a_volume_is_named(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDGE_VOLUME_ROOT", str(tmp_path / "root"))
    result = run("cp", source, "/Volumes/main/ml/files/x")
    assert result.exit_code == 0, result.output
    assert (
        result.stderr
        == f"/Volumes/main/ml/files/x is not mounted here; {tmp_path}/root/main/ml/files/x stands for it.\n"
    )
    assert (tmp_path / "root/main/ml/files/x/a").exists()


def test_an_interrupted_copy_says_what_to_do(run: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bridge, "copy_tree", interrupted)
    result = run("cp", source, "target")
    assert (result.exit_code, result.stderr) == (
        130, "Interrupted. What was copied is whole; run it again for the rest.\n"
    )  # fmt: skip
