from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run

pytestmark = pytest.mark.usefixtures("embedded")


def install(folder: Path, name: str, version: str) -> None:
    """Leave what pip leaves of a distribution that owns pyspark/__init__.py."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"pyspark/__init__.py,,\n{info.name}/METADATA,,\n")


def test_a_working_machine(run: Run, warehouse: Path) -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(line.startswith("embedded engine ok started and counted to 3 in ") for line in lines)
    assert any(line.endswith("Delta tables in the warehouse: 1") for line in lines)
    assert any(line.startswith(f"warehouse ok {warehouse} (") for line in lines)
    assert any(line.startswith("memory ok ") for line in lines)
    assert lines[-1].startswith("All that is needed works.")


def test_two_owners_of_the_pyspark_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "pyspark-client", "4.2.99")
    install(tmp_path, "databricks-connect", "17.99")
    monkeypatch.syspath_prepend(tmp_path)
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "pyspark-client 4.2.99, databricks-connect 17.99: they own the same folder, " in result.stdout
    assert "pyspark-client databricks-connect\n" in result.stdout.partition("> pip uninstall -y ")[2]
    assert '> pip install "spark-training-bridge[databricks]"' in result.stdout
    assert "Problems beside that: 1." in result.stdout


@pytest.mark.parametrize(
    ("variable", "name"), [("BRIDGE_WAREHOUSE", "warehouse"), ("BRIDGE_VOLUME_ROOT", "volume root")]
)
def test_a_folder_that_cannot_be_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, name: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file" / "folder"))
    result = run("doctor")
    assert result.exit_code == 1, result.output
    assert f"{tmp_path}/file/folder cannot be written: Not a directory ({tmp_path}/file)" in result.stdout
    assert f"or export {variable}=<another>" in result.stdout
    assert result.stdout.splitlines()[-1].endswith(f"{name}.")


def test_an_unreachable_server_is_no_reason_to_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://somebody@localhost:1/;token=hush")
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "no Spark Connect server answers at sc://***@localhost:1/;token=***" in result.stdout
    assert "hush" not in result.output


def test_a_setting_that_is_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_MAX_BYTES", "12 parsecs")
    result = run("doctor")
    assert result.exit_code == 1
    assert 'BRIDGE_MAX_BYTES: max_bytes is "12 parsecs"' in result.stdout
    assert result.stdout.splitlines()[-1] == "Needed, and broken: settings."


def test_no_home_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("BRIDGE_WAREHOUSE")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    result = run("doctor")
    assert result.exit_code == 1, result.output
    assert "Could not determine home directory." in result.stdout


def test_jars_without_delta(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_SPARK_JARS", str(tmp_path))
    result = run("doctor")
    assert "spark_jars holds no delta-spark jar" in result.stdout
    assert result.exit_code == 0


def test_a_table_that_cannot_be_registered(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main" / "demo" / "broken" / "_delta_log").mkdir(parents=True)
    monkeypatch.setenv("BRIDGE_WAREHOUSE", str(tmp_path))
    result = run("doctor")
    assert f"{tmp_path}/main/demo/broken could not be registered" in result.stdout


def test_databricks_is_named_by_its_variables_alone(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "databricks-connect", "17.99")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DATABRICKS_TOKEN", "hush")
    result = run("doctor")
    assert "databricks-connect 17.99; configured by DATABRICKS_TOKEN" in result.stdout
    assert "hush" not in result.output


def test_no_engine_at_all(tmp_path: Path) -> None:
    for name in ("pysail", "pyspark"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('No module named {name}')\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-m", "bridge.cli.app", "doctor"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "BRIDGE_REMOTE": ""},
    )
    assert ended.returncode == 1, ended.stdout
    assert "Needed, and broken: no engine works.\n" in ended.stdout
    assert "> pip install" in ended.stdout
    assert ended.stderr == ""
