"""bridge checkpoints: what is shown, verified, converted and deleted."""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import Result

import bridge
from bridge.volumes.stores import LocalStorage

Run = Callable[..., Result]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of four steps."""
    manager = bridge.CheckpointManager(tmp_path / "run", keep_last=10, async_save=False)
    model = torch.nn.Linear(3, 2)
    for step in range(4):
        manager.save(step, {"model": model, "note": "x"}, metrics={"loss": step / 3})
    manager.close()
    return tmp_path / "run"


def _newest(root: Path) -> Path:
    return max(path for path in root.iterdir() if "-step" in path.name)


def test_ls_shows_each_step_the_newest_first(run: Run, root: Path) -> None:
    result = run("checkpoints", "ls", root)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[:2] for line in lines[2:6]] == [["complete", str(step)] for step in (3, 2, 1, 0)]
    assert "loss 0.666667" in lines[3]
    assert lines[-1] == "4 of 4 complete"


def test_ls_tells_what_was_left_and_what_is_not_there(run: Run, root: Path, tmp_path: Path) -> None:
    (_newest(root) / "rank-00000.0.safetensors").unlink()
    (root / "1700000000000-step9-0123456789ab").mkdir()
    output = run("checkpoints", "ls", root).output
    assert "DAMAGED: rank-00000.0.safetensors is not there in full" in output
    assert "left behind" in output
    assert "3 of 5 complete" in output
    empty = run("checkpoints", "ls", tmp_path / "nothing")
    assert empty.exit_code == 1
    assert "holds no checkpoint" in empty.output


def test_ls_needs_no_right_to_write(run: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(LocalStorage, "write", refuse)
    assert "4 of 4 complete" in run("checkpoints", "ls", root).output


def test_show_lists_the_entries(run: Run, root: Path) -> None:
    output = run("checkpoints", "show", root).output
    rows = [line.split() for line in output.splitlines()]
    assert ["model.weight", "float32", "2", "x", "3", "1", "24", "B"] in rows
    assert ["values.note", "value", '"x"'] in rows
    assert ["rank_0.random", "pickled"] in [row[:2] for row in rows]
    assert str(_newest(root)) in output


def test_verify_reads_every_byte(run: Run, root: Path) -> None:
    assert "all as written" in run("checkpoints", "verify", root).output
    path = _newest(root) / "rank-00000.0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = run("checkpoints", "verify", root)
    assert result.exit_code == 1
    assert "rank-00000.0.safetensors" in result.output
    assert "is damaged" in result.output


def test_gc_keeps_the_last_steps(run: Run, root: Path) -> None:
    assert "would delete 2 checkpoints" in run("checkpoints", "gc", root, "--keep-last", "2", "--dry-run").output
    assert "deleted 2 checkpoints" in run("checkpoints", "gc", root, "--keep-last", "2").output
    assert bridge.CheckpointManager(root).steps() == [2, 3]
    assert "deleted 0 checkpoints" in run("checkpoints", "gc", root).output


def test_gc_never_deletes_the_newest_step_that_is_whole(run: Run, root: Path) -> None:
    for path in root.glob("*-step[23]-*/rank-00000.0.safetensors"):
        path.write_bytes(b"")
    assert run("checkpoints", "gc", root, "--keep-last", "1").exit_code == 0
    assert bridge.CheckpointManager(root).steps() == [1, 3]
    for path in root.glob("*-step1-*/rank-00000.0.safetensors"):
        path.unlink()
    result = run("checkpoints", "gc", root, "--keep-last", "1")
    assert result.exit_code == 1
    assert "is whole, so none was deleted" in result.output
    assert bridge.CheckpointManager(root).steps() == [1, 3]


def test_convert_goes_from_and_to_the_forms_of_others(run: Run, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3), "flag": torch.tensor([True, False])}, "step": 7}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(state, checkpoint_id=tmp_path / "stock")
    for source, target in (("stock", "ours"), ("ours", "file.pt"), ("file.pt", "again"), ("again", "all.safetensors")):
        result = run("checkpoints", "convert", tmp_path / source, tmp_path / target)
        assert result.exit_code == 0, result.output
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    assert loaded["step"] == 7
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])
    tensors = safetensors.load_file(tmp_path / "all.safetensors")
    assert torch.equal(tensors["model.w"], state["model"]["w"])
    assert torch.equal(tensors["model.flag"], state["model"]["flag"])
    result = run("checkpoints", "convert", tmp_path / "ours", tmp_path / "file.pt")
    assert result.exit_code == 1
    result = run("checkpoints", "verify", tmp_path / "stock")
    assert result.exit_code == 1
    assert "holds no digests" in result.output
    assert "torch's FileSystemWriter" in run("checkpoints", "ls", tmp_path / "stock").output


def test_a_marker_of_something_else_is_told(run: Run, tmp_path: Path) -> None:
    bridge.save_file({"a": 1}, tmp_path / "a.pt")
    assert "something else" in run("checkpoints", "ls", tmp_path / "a.pt").output
    marker = next((tmp_path / "a.pt").glob("*/_bridge.0.json")).read_bytes().partition(b"\n")[2]
    assert json.loads(marker)["body"]["kind"] == "file"
