"""What people do with a volume without asking `bridge` for more than where it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bridge
from tests.volumes.mount import Volume

pytestmark = pytest.mark.fuse


@pytest.fixture(autouse=True)
def folder(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the mount stand for /Volumes, and return the path of a folder of a volume that is there."""
    monkeypatch.setenv("BRIDGE_VOLUME_ROOT", str(volume.path))
    (volume.path / "main/ml/files").mkdir(parents=True)
    return "/Volumes/main/ml/files"


def test_files_are_written_and_read(folder: str) -> None:
    path = bridge.volume_path(f"{folder}/run/notes.txt")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.makedirs(os.path.dirname(path), exist_ok=True)

    for text in ("first\n", "second, which replaces it\n"):
        with open(path, "w") as file:
            file.write(text)
        with open(path) as file:
            assert file.read() == text
    assert os.listdir(os.path.dirname(path)) == ["notes.txt"]
    os.remove(path)
    os.rmdir(os.path.dirname(path))
    assert os.listdir(bridge.volume_path(folder)) == []


def test_shell_tools_work(folder: str, tmp_path: Path) -> None:
    script = """
        set -eu
        mkdir -p "$V/a/b"
        echo one > "$V/a/one.txt"
        cp "$V/a/one.txt" "$V/a/b/two.txt"
        cat "$V"/a/b/*.txt
        ls -l "$V/a" > "$T/listing"
        find "$V" -type f | wc -l
        cp -r "$V/a" "$T/copy"
        diff -r "$V/a" "$T/copy"
        rm -r "$V/a"
        ls "$V" | wc -l
    """
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "V": bridge.volume_path(folder), "T": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["one", "2", "0"], "")


def test_torch_saves_and_loads(folder: str) -> None:
    torch = pytest.importorskip("torch")
    path = bridge.volume_path(f"{folder}/model.pt")
    state = {"weight": torch.arange(1_000_000, dtype=torch.float32), "step": 40_000}

    torch.save(state, path)
    torch.save(state, path)  # again, over what is there
    loaded = torch.load(path)

    assert loaded["step"] == 40_000
    assert torch.equal(loaded["weight"], state["weight"])


TRAIN = """
import sys
import torch
import torch.distributed as dist
import bridge

dist.init_process_group("gloo")
rank = dist.get_rank()
path = bridge.volume_path(sys.argv[1])
if rank == 0:
    torch.save({"weight": torch.full((1000,), 7.0)}, path)
dist.barrier()
loaded = torch.load(path)
assert torch.equal(loaded["weight"], torch.full((1000,), 7.0))
print(f"rank {rank} loaded", flush=True)
dist.destroy_process_group()
"""


def test_torchrun_saves_on_rank_0_and_loads_on_all(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            str(tmp_path / "train.py"), f"{folder}/model.pt",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    # both may write a line at once
    assert sorted(re.findall("rank [01] loaded", done.stdout)) == ["rank 0 loaded", "rank 1 loaded"]
