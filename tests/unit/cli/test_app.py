from __future__ import annotations

import subprocess
import sys

import pytest

import bridge
from tests.unit.cli.conftest import Run

pytestmark = pytest.mark.usefixtures("embedded")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bridge.cli.app", *arguments], capture_output=True, text=True, check=False
    )


def test_an_error_is_one_message_on_stderr_and_exit_status_1() -> None:
    ended = command("plan", "main.demo.smalls")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("SourceNotFoundError: main.demo.smalls does not exist")
    assert 'Did you mean "small"?' in ended.stderr
    assert "Traceback" not in ended.stderr


def test_debug_shows_the_traceback() -> None:
    ended = command("--debug", "plan", "main.demo.small", "--max-bytes", "12 parsecs")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert 'ConfigError: max_bytes is "12 parsecs"' in ended.stderr


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom bridge.cli.app import app\n"
        "try:\n    app(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({'torch', 'pyspark', 'pandas', 'datasets', 'pyarrow', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"
    for name in ("demo", "doctor", "plan", "load", "export", "checkpoints", "cp", "cache", "config"):
        assert f"\n  {name} " in shown
    assert "..." not in shown.partition("Commands:")[2], "a summary was cut"


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"bridge {bridge.__version__}\n")


def test_without_a_command_the_help_is_shown(run: Run) -> None:
    assert "Usage: bridge" in command().stdout + command().stderr
    assert run().exit_code == 2


@pytest.mark.parametrize("arguments", [["plan", "t", "--route", "sideways"], ["plan", "t", "--limit", "-1"], ["plan"]])
def test_wrong_usage_is_exit_status_2(run: Run, arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2
