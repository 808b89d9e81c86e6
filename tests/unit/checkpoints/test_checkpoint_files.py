"""Single objects: saved whole or not at all, and loaded without running what is in them."""

from __future__ import annotations

import errno
import io
import itertools
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import bridge
from bridge.checkpoints import files
from bridge.errors import CheckpointError, CheckpointNotFoundError, CorruptFileError, VolumeError
from bridge.volumes.commit import Attempt, attempts, complete_attempts
from bridge.volumes.digest import digest_bytes
from bridge.volumes.storage import Storage
from bridge.volumes.stores import LocalStorage
from tests.harmful import RAN, Harmful


def file_of(path: Path) -> Path:
    (found,) = path.glob("*/data.pt")
    return found


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    saved = {"a": torch.rand(3, 4).bfloat16(), "b": [1, (2.5, None)], "c": {3: "é"}, "d": torch.zeros(0)}

    bridge.save_file(saved, tmp_path / "x.pt")

    loaded = bridge.load_file(tmp_path / "x.pt")
    assert torch.equal(loaded["a"], saved["a"])
    assert (loaded["b"], loaded["c"], loaded["d"].shape) == (saved["b"], saved["c"], (0,))


def test_it_is_there_in_other_places_too() -> None:
    bridge.save_file({"x": 1}, "memory://files/x.pt")
    bridge.save_file({"x": 2}, "memory://files/x.pt")

    assert bridge.load_file("memory://files/x.pt") == {"x": 2}


def test_saving_again_leaves_the_last_alone(tmp_path: Path) -> None:
    for number in range(3):
        bridge.save_file(number, tmp_path)

    assert bridge.load_file(tmp_path) == 2
    assert len(attempts(LocalStorage(tmp_path))) == 1
    assert os.listdir(tmp_path / "_leases") == []


def test_where_it_goes_on_which_device_is_said_when_loading(tmp_path: Path) -> None:
    bridge.save_file(torch.ones(2), tmp_path)

    assert bridge.load_file(tmp_path, map_location="meta").device.type == "meta"
    assert bridge.load_file(tmp_path).device.type == "cpu"


def test_nothing_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=f"{tmp_path}/no holds nothing that bridge.save_file completed"):
        bridge.load_file(tmp_path / "no")


@pytest.mark.parametrize("position", [0, 1, 500, -1])
def test_one_bit_that_is_flipped_is_found(tmp_path: Path, position: int) -> None:
    bridge.save_file(torch.rand(100), tmp_path)
    data = bytearray(file_of(tmp_path).read_bytes())
    data[position] ^= 1
    file_of(tmp_path).write_bytes(data)

    with pytest.raises(CorruptFileError, match=f"{file_of(tmp_path)} is damaged: it is not what was saved"):
        bridge.load_file(tmp_path)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda data: data + b"x"])
def test_a_file_of_another_size_is_damaged(tmp_path: Path, change: Any) -> None:
    bridge.save_file(1, tmp_path)
    file_of(tmp_path).write_bytes(change(file_of(tmp_path).read_bytes()))

    with pytest.raises(CorruptFileError, match="is damaged"):
        bridge.load_file(tmp_path)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    bridge.save_file(1, tmp_path)
    file = file_of(tmp_path)
    file.unlink()

    with pytest.raises(CorruptFileError, match=f"{file} is gone"):
        bridge.load_file(tmp_path)


def test_what_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # as somebody may have written it who means harm
    made = io.BytesIO()
    torch.save(Harmful(), made)
    monkeypatch.setattr(files, "pickled", lambda name, value: made.getvalue())
    bridge.save_file(1, tmp_path)

    with pytest.raises(CorruptFileError, match=f"{file_of(tmp_path)} is refused: Unsupported ") as caught:
        bridge.load_file(tmp_path)

    assert RAN == []
    assert "weights_only" not in str(caught.value)


def test_it_would_have_run() -> None:
    made = io.BytesIO()
    torch.save(Harmful(), made)
    made.seek(0)
    try:
        torch.load(made, weights_only=False)
        assert RAN == ["code of the file"]
    finally:
        RAN.clear()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a file of somebody")

    with pytest.raises(VolumeError, match=f"{tmp_path}/x is a file"):
        bridge.save_file(1, tmp_path / "x")
    assert (tmp_path / "x").read_text() == "a file of somebody"


class Faulty(LocalStorage):
    """A folder of which some calls fail."""

    def __init__(self, folder: Path, call: str, part: str, error: int) -> None:
        super().__init__(folder)
        self._call, self._part, self._error = call, part, error

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or name != self._call:
            return found

        def failing(*args: Any) -> Any:
            if self._part in args[0]:
                raise OSError(self._error, os.strerror(self._error))
            return found(*args)

        return failing


def faulty(patch: pytest.MonkeyPatch, folder: Path, call: str, part: str, error: int = errno.EIO) -> None:
    patch.setattr(files, "open_storage", lambda path: Faulty(folder, call, part, error))


@pytest.mark.parametrize(
    ("part", "error"), [("data.pt", errno.ENOSPC), ("data.pt", errno.EIO), ("_bridge.", errno.ENOSPC)]
)
def test_a_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, error: int
) -> None:
    bridge.save_file("old", tmp_path)
    with monkeypatch.context() as patch:
        faulty(patch, tmp_path, "write", part, error)
        with pytest.raises(VolumeError, match=os.strerror(error)):
            bridge.save_file("new", tmp_path)

    assert bridge.load_file(tmp_path) == "old"
    assert len(attempts(LocalStorage(tmp_path))) == 1


def test_what_cannot_be_read_is_an_error_of_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.save_file(1, tmp_path)
    faulty(monkeypatch, tmp_path, "read", "data.pt")

    with pytest.raises(VolumeError, match=r"data\.pt cannot be read: Input/output error"):
        bridge.load_file(tmp_path)


def test_a_save_stands_also_where_the_one_before_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.save_file("old", tmp_path)
    with monkeypatch.context() as patch:
        faulty(patch, tmp_path, "delete", "data.pt")
        bridge.save_file("new", tmp_path)

    assert bridge.load_file(tmp_path) == "new"


def test_whoever_loads_while_it_is_saved_again_gets_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Overtaken(LocalStorage):
        def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            if name.endswith("data.pt") and not overtaken:
                overtaken.append(name)
                bridge.save_file("new", tmp_path)
            return super().read(name, start, stop)

    overtaken: list[str] = []
    bridge.save_file("old", tmp_path)
    monkeypatch.setattr(files, "open_storage", lambda path: Overtaken(tmp_path))

    assert bridge.load_file(tmp_path) == "new"
    assert len(overtaken) == 1


def test_what_killed_writers_left_is_collected(tmp_path: Path) -> None:
    dead = Attempt(1_000_000, "file", "0" * 12)
    (tmp_path / dead.name).mkdir(parents=True)
    (tmp_path / dead.name / "data.pt").write_bytes(b"x")

    bridge.save_file(1, tmp_path)

    assert dead not in attempts(LocalStorage(tmp_path))


def test_its_marker_tells_the_digest(tmp_path: Path) -> None:
    bridge.save_file(1, tmp_path)

    ((_, marker),) = complete_attempts(LocalStorage(tmp_path))
    assert marker.body == {"kind": "file", "digest": digest_bytes(file_of(tmp_path).read_bytes())}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_killed_at_every_step_it_is_the_old_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.volumes.commit_chaos import Killing, events_and_status, forked

    def save(storage: Storage, number: int, report: Any) -> None:
        monkeypatch.setattr(files, "open_storage", lambda path: storage)
        bridge.save_file(number, tmp_path)
        report("saved")

    bridge.save_file(0, tmp_path)
    last = 0
    for step in itertools.count(1):
        storage: Any = Killing(LocalStorage(tmp_path), step - 1)
        events, status = events_and_status(*forked(partial(save, storage, step)))
        loaded = bridge.load_file(tmp_path)
        assert loaded in ({step} if events else {last, step})
        last = loaded
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert step > 20
    assert last == step


def test_what_would_be_refused_is_not_saved_and_nothing_is_lost(tmp_path: Path) -> None:
    bridge.save_file({"a": 1}, tmp_path / "best.pt")
    with pytest.raises(CheckpointError, match=r"holds a torch\.nn\.modules\.linear\.Linear, which cannot be loaded"):
        bridge.save_file(torch.nn.Linear(1, 1), tmp_path / "best.pt")
    assert bridge.load_file(tmp_path / "best.pt") == {"a": 1}


def test_a_plain_file_is_told(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "plain.pt")
    with pytest.raises(VolumeError, match="is a file, and save_file makes a folder"):
        bridge.save_file({"a": 1}, tmp_path / "plain.pt")
    with pytest.raises(CheckpointNotFoundError, match="may read it"):
        bridge.load_file(tmp_path / "plain.pt")
