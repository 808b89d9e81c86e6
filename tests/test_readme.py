"""What the README shows is run as it stands there, in order, as a new user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A person's folder after they ran the Python blocks, in one process."""
    home = tmp_path_factory.mktemp("person")
    _run([sys.executable, "-W", "error", "-c", "\n".join(_blocks("python"))], home)
    return home


def _run(command: list[str], home: Path) -> str:
    environment = {**os.environ, "XDG_DATA_HOME": str(home / "data"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_blocks_run(home: Path) -> None:
    assert len(_blocks("python")) == 5
    assert list((home / "exports").glob("*/*/_bridge.0.json"))
    assert list((home / "run").glob("*-step*/_bridge.0.json"))


@pytest.mark.parametrize(
    "line", [line for block in _blocks("bash") for line in block.splitlines() if line.startswith("bridge ")]
)
def test_command_lines_run(home: Path, line: str) -> None:
    import shlex

    assert _run([sys.executable, "-c", "from bridge.cli.app import main; main()", *shlex.split(line)[1:]], home)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE))))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]

    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
