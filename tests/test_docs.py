"""What the pages in docs/ show is run as it stands there, over files that are made here."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.processes import eventually

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def _blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)


def _lines(page: str, volumes: Path) -> list[str]:
    """Run the block of a page, with one folder as the volumes; return what it prints."""
    (block,) = _blocks(page)
    assert block.count('"/Volumes/main/ml/') == 1
    environment = {**os.environ, "BRIDGE_VOLUME_ROOT": str(volumes), "PYTHONPATH": str(ROOT)}
    code = ["-W", "error", "-W", "ignore:This DataLoader will create:UserWarning", "-c", block]
    done = subprocess.run(
        [sys.executable, *code], cwd=volumes, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _folder(volumes: Path, name: str) -> Path:
    folder = volumes / "main" / "ml" / name
    folder.mkdir(parents=True)
    (folder / "notes.md").write_text("not of the data")
    return folder


def test_images(tmp_path: Path) -> None:
    if importlib.util.find_spec("PIL") is None:
        pytest.skip("needs Pillow")
    from PIL import Image

    folder = _folder(tmp_path, "images")
    for number in range(35):
        mode = ("RGB", "L", "P", "RGBA")[number % 4]
        Image.new(mode, (10 + number, 20)).save(folder / f"{number}.png")

    assert _lines("images.md", tmp_path) == [f"torch.Size([{rows}, 3, 224, 224])" for rows in (32, 3)]


def test_audio(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "recordings")
    for number in range(18):
        channels = 1 + number % 2
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setnchannels(channels)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(np.full(1000 * number * channels, number, "<i2").tobytes())

    assert _lines("audio.md", tmp_path) == [f"torch.Size([{rows}, 16000])" for rows in (16, 2)]


def test_text(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "texts")
    for number in range(9):
        (folder / f"{number}.txt").write_text("".join(f"é{number}, line {line}\n\n" for line in range(20)))

    sizes = list(map(int, _lines("text.md", tmp_path)))

    assert sum(sizes) == 9 * 20
    assert max(sizes) == 64


def test_checkpoints(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "rows")
    rows = pa.table({"x": np.arange(640.0), "y": np.arange(640.0) % 2})
    pq.write_table(rows, folder / "rows.parquet")

    assert _lines("checkpoints.md", tmp_path) == ["20 [10, 15]"]
    assert _lines("checkpoints.md", tmp_path) == ["20 [10, 15]"]  # from step 15 to the end again


@pytest.mark.timeout(900)  # nine processes that import torch
def test_torchrun(tmp_path: Path) -> None:
    (block,) = _blocks("torchrun.md")
    (tmp_path / "train.py").write_text(block)
    (tmp_path / "warehouse" / "main" / "ml").mkdir(parents=True)
    environment = {**os.environ, "BRIDGE_WAREHOUSE": str(tmp_path / "warehouse"), "PYTHONPATH": str(ROOT)}

    def start(volumes: Path, *command: str) -> subprocess.Popen[str]:
        env = {**environment, "BRIDGE_VOLUME_ROOT": str(volumes)}
        return subprocess.Popen([sys.executable, *command], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)

    def printed(volumes: Path, *command: str) -> str:
        with start(volumes, *command) as process:
            told = process.communicate(timeout=400)[0]
        assert process.returncode == 0
        return told

    rows = "range(8000).selectExpr('id / 1000 AS x', 'id / 500 + 1 AS y')"
    save = f"import bridge; bridge.connect().{rows}.write.format('delta').saveAsTable('main.ml.rows')"
    train = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    printed(whole, "-c", save)

    expected = printed(whole, *train)
    shutil.copytree(whole / "main" / "ml" / "exports", killed / "main" / "ml" / "exports")
    with start(killed, *train) as process:
        eventually(lambda: any((killed / "main" / "ml" / "runs").glob("one/*/_bridge.0.json")), within_s=300)
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        process.communicate()

    assert process.returncode == -signal.SIGKILL, "it was not over yet"
    assert expected.startswith("126 ")
    assert printed(killed, *train) == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]

    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_page_with_code_is_run(page: Path) -> None:
    tests: dict[str, Callable[..., None]] = {
        "images.md": test_images,
        "audio.md": test_audio,
        "text.md": test_text,
        "checkpoints.md": test_checkpoints,
        "torchrun.md": test_torchrun,
    }

    assert not _blocks(page.name) or page.name in tests
