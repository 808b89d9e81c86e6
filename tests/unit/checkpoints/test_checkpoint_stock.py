"""Folders of torch's own FileSystemWriter, and what somebody may have put into them."""

from __future__ import annotations

import errno
import io
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

import bridge
from bridge.errors import CheckpointError, CorruptFileError, LossyConversionError, VolumeError
from tests.harmful import RAN, Harmful

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def nothing_ran() -> Any:
    RAN.clear()
    yield
    assert RAN == []


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)},
        "list": [torch.ones(()), {"x": torch.zeros(0)}],
        "step": 7,
        "betas": (0.9, 0.99),
        "name": "é",
        "none": None,
    }


def blank() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)},
        "list": [torch.zeros(()), {"x": torch.zeros(0)}],
        "step": None,
        "betas": None,
        "name": None,
        "none": 1,
    }


def saved(folder: Path, content: dict[str, Any]) -> Path:
    dcp.save(content, storage_writer=dcp.FileSystemWriter(folder))
    return folder


def load(folder: Path, target: dict[str, Any], *, planner: Any = None, **options: Any) -> dict[str, Any]:
    dcp.load(target, storage_reader=bridge.UCVolumeReader(folder, **options), planner=planner)
    return target


def refused(folder: Path, target: dict[str, Any]) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        load(folder, target)
    ((error, _),) = caught.value.failures.values()
    return error


def test_such_a_folder_is_read(tmp_path: Path) -> None:
    loaded = load(saved(tmp_path, state()), blank())

    expected = state()
    for name in ("w", "b"):
        assert torch.equal(loaded["model"][name], expected["model"][name])
    assert loaded["list"][0] == 1
    assert {name: loaded[name] for name in ("step", "betas", "name", "none")} == {
        "step": 7, "betas": (0.9, 0.99), "name": "é", "none": None,
    }  # fmt: skip


def test_what_bridge_saved_there_later_is_read_instead(tmp_path: Path) -> None:
    saved(tmp_path, {"step": 1})
    dcp.save({"step": 2}, storage_writer=bridge.UCVolumeWriter(tmp_path))

    assert load(tmp_path, {"step": 0}) == {"step": 2}


def test_all_that_is_missing_is_named(tmp_path: Path) -> None:
    target = {**blank(), "x": torch.zeros(1), "y": 2}

    error = refused(saved(tmp_path, state()), target)

    assert isinstance(error, CheckpointError)
    assert str(error).startswith(f"{tmp_path} does not hold x, y.\n")
    assert not target["model"]["w"].count_nonzero()


def test_what_is_missing_stays_where_a_part_is_enough(tmp_path: Path) -> None:
    saved(tmp_path, {"step": 1})

    loaded = load(tmp_path, {"step": 0, "x": 5}, planner=DefaultLoadPlanner(allow_partial_load=True))

    assert loaded == {"step": 1, "x": 5}


def test_another_type_is_refused_and_cast_if_that_is_wanted(tmp_path: Path) -> None:
    saved(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)})
    target = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float16)}

    error = refused(tmp_path, target)

    assert isinstance(error, LossyConversionError)
    assert not target["a"].count_nonzero()
    assert load(tmp_path, target, cast=True)["b"].tolist() == [1, 1]


@pytest.mark.parametrize("harmful", [Harmful(), print, io.StringIO, {"a": Harmful()}], ids=range(4))
def test_metadata_that_asks_for_more_than_metadata_is_refused(tmp_path: Path, harmful: Any) -> None:
    saved(tmp_path, {"step": 1})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(harmful))

    error = refused(tmp_path, {"step": 0})

    assert isinstance(error, CorruptFileError)
    assert re.match(r"\.metadata asks for \S+, which no checkpoint needs: it is refused\.", str(error))


def test_metadata_that_would_change_a_class_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, {"step": 1})
    changing = (
        b"\x80\x02c" + f"{MetadataIndex.__module__}\nMetadataIndex\n".encode() + b"N}X\x04\x00\x00\x00evilK\x07s\x86b."
    )
    (tmp_path / ".metadata").write_bytes(changing)

    error = refused(tmp_path, {"step": 0})

    assert not hasattr(MetadataIndex, "evil")
    assert isinstance(error, CorruptFileError)
    assert str(error).startswith(".metadata would change <class 'torch.distributed.checkpoint.metadata.MetadataIndex'>")


@pytest.mark.parametrize("data", [b"", b"garbage", pickle.dumps([1]), pickle.dumps(None)], ids=range(4))
def test_metadata_that_is_none_is_damaged(tmp_path: Path, data: bytes) -> None:
    saved(tmp_path, {"step": 1})
    (tmp_path / ".metadata").write_bytes(data)

    error = refused(tmp_path, {"step": 0})

    assert isinstance(error, CorruptFileError)
    assert str(error).startswith(f"{tmp_path}/.metadata is damaged: ")


def put(folder: Path, name: str, value: Any) -> None:
    """Replace a value of a folder by what torch pickles of another."""
    made = io.BytesIO()
    torch.save(value, made)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / "other.distcp").write_bytes(made.getvalue())
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo("other.distcp", 0, made.getbuffer().nbytes, ())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_metadata_that_cannot_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path, state())

    def broken(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", broken)
    error = refused(folder, blank())

    assert isinstance(error, VolumeError)
    assert str(error) == f"{folder}/.metadata cannot be read: Input/output error."


@pytest.mark.parametrize("keep", [None, 0, 0.3, 0.9])
def test_a_file_that_is_cut_or_gone_is_told(tmp_path: Path, keep: float | None) -> None:
    folder = saved(tmp_path, {"w": torch.arange(6000.0)})
    (file,) = folder.glob("*.distcp")
    if keep is None:
        file.unlink()
    else:
        with open(file, "r+b") as opened:
            opened.truncate(int(keep * file.stat().st_size))

    error = refused(folder, {"w": torch.zeros(6000)})

    assert isinstance(error, CorruptFileError)
    assert str(error).startswith(f"a file of {folder} is damaged or gone: ")
    assert str(error).endswith("; some tensors may have changed.\n  Load another checkpoint.")


def test_a_harmful_value_is_refused_before_any_tensor_changes(tmp_path: Path) -> None:
    saved(tmp_path, {"a": torch.ones(2), "step": 1, "z": torch.ones(2)})
    put(tmp_path, "step", Harmful())
    target = {"a": torch.zeros(2), "step": 0, "z": torch.zeros(2)}

    error = refused(tmp_path, target)

    assert isinstance(error, CorruptFileError)
    assert str(error).startswith(f"'step' of {tmp_path} is refused: Unsupported ")
    assert (target["a"].tolist(), target["step"], target["z"].tolist()) == ([0, 0], 0, [0, 0])


def test_a_harmful_value_would_have_run() -> None:
    try:
        pickle.loads(pickle.dumps(Harmful()))
        assert RAN == ["code of the file"]
    finally:
        RAN.clear()


def test_reading_it_tells_nobody_to_trust_it(tmp_path: Path) -> None:
    saved(tmp_path, {"step": 1})
    put(tmp_path, "step", Harmful())

    with warnings.catch_warnings():
        error = refused(tmp_path, {"step": 0})

    assert "weights_only" not in str(error)
