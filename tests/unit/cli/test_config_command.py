from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run


def test_each_value_stands_with_its_origin(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("max_bytes: 1GiB\nprogress: false\n")
    monkeypatch.setenv("BRIDGE_CONF", str(tmp_path))
    monkeypatch.setenv("BRIDGE_WAREHOUSE", "/some/where")
    result = run("config", "--profile", "mine")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert f"max_bytes 1.0 GiB {tmp_path}/mine.yaml" in lines
    assert f"progress false {tmp_path}/mine.yaml" in lines
    assert "warehouse /some/where BRIDGE_WAREHOUSE" in lines
    assert "volume (decided when needed) default" in lines
    assert f"mine {tmp_path}/mine.yaml" in lines


def test_secrets_are_hidden(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_REMOTE", "sc://somebody@host:15002/;token=hush;user_id=5")
    result = run("config")
    assert "sc://***@host:15002/;token=***;user_id=5" in result.stdout
    assert "hush" not in result.output
    assert "somebody" not in result.output


def test_an_unknown_profile_is_an_error(run: Run) -> None:
    result = run("config", "--profile", "locl")
    assert result.exit_code == 1
    assert result.stderr.startswith('ConfigError: There is no profile "locl". Did you mean "local"?')
