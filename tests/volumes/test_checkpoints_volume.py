"""Checkpoints where a volume misbehaves, and where their writers are killed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import bridge
from bridge.checkpoints import pieces
from bridge.errors import CorruptFileError, VolumeError
from bridge.volumes import storage
from bridge.volumes.commit import attempts, complete_attempts
from bridge.volumes.stores import LocalStorage
from tests.volumes.checkpoint_chaos import checkpoint_round, kill_at_every_step, load, save
from tests.volumes.mount import Fault, Volume

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


@pytest.fixture(params=["disk", pytest.param("volume", marks=pytest.mark.fuse)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk, or on a volume."""
    yield tmp_path / "run" if request.param == "disk" else request.getfixturevalue("volume").path / "run"
    gc.collect()  # what readers hold ends before the volume does


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_RETRY_DELAYS_S", (0.01, 0.02, 0.05, 0.1))


def reason(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    ((error, _),) = caught.value.failures.values()
    return error


# killed


def test_killed_at_any_step_the_newest_complete_save_is_loaded(place: Path) -> None:
    steps = kill_at_every_step(place)

    assert steps > 40


def test_killed_at_any_moment_the_newest_complete_save_is_loaded(place: Path) -> None:
    saved = sum(checkpoint_round(place / str(seed), seed) for seed in range(8))

    assert saved > 0


def test_many_files_are_complete_or_absent_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_FILE_BYTES", 1000)

    kill_at_every_step(tmp_path / "run", every=2)

    assert len(list((tmp_path / "run").glob("*/rank-00000.2.safetensors"))) > 0


# a volume as it is


@pytest.mark.fuse
def test_a_volume_that_refuses_all_but_writing_once_is_enough(volume: Volume) -> None:
    for number in range(3):
        save(volume.path / "run", number)

    assert load(volume.path / "run") == 2
    bridge.save_file({"x": torch.ones(3)}, volume.path / "x.pt")
    bridge.save_file({"x": torch.zeros(3)}, volume.path / "x.pt")
    assert bridge.load_file(volume.path / "x.pt")["x"].tolist() == [0, 0, 0]


@pytest.mark.fuse
def test_what_shows_late_is_waited_for(mount_volume: Callable[..., Volume]) -> None:
    volume = mount_volume(listing_lag_ms=1500, lookup_lag_ms=300)
    save(volume.path / "run", 1)

    save(volume.path / "run", 2)

    volume.set(listing_lag_ms=0, lookup_lag_ms=0)
    assert load(volume.path / "run") == 2


@pytest.mark.fuse
def test_what_is_loaded_from_a_volume_is_read_once(volume: Volume) -> None:
    saved = {"x": torch.rand(5 << 20), "y": torch.rand(1000)}
    dcp.save(saved, storage_writer=bridge.UCVolumeWriter(volume.path / "run"))
    size = sum(file.stat().st_size for file in (volume.backing / "run").glob("*/*"))
    before = volume.counts().bytes_read

    state = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    dcp.load(state, storage_reader=bridge.UCVolumeReader(volume.path / "run"))

    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
    assert volume.counts().bytes_read - before < 1.2 * size


@pytest.mark.fuse
def test_what_is_not_asked_for_is_not_read_from_a_volume(volume: Volume) -> None:
    saved = {"x": torch.rand(6 << 20), "y": torch.rand(1000)}
    dcp.save(saved, storage_writer=bridge.UCVolumeWriter(volume.path / "run"))
    before = volume.counts().bytes_read

    dcp.load({"y": torch.zeros(1000)}, storage_reader=bridge.UCVolumeReader(volume.path / "run"))

    assert volume.counts().bytes_read - before < 6 << 20


@pytest.mark.fuse
def test_one_bit_that_is_flipped_on_a_volume_is_found(volume: Volume) -> None:
    save(volume.path / "run", 1)
    (file,) = (volume.backing / "run").glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    with pytest.raises(CheckpointException) as caught:
        load(volume.path / "run")

    assert isinstance(reason(caught), CorruptFileError)
    assert file.name in str(reason(caught))


# a volume that fails


def filled(volume: Volume) -> tuple[Path, dict[str, int]]:
    """Return a folder that holds the save of number 1, and how large its parts are, in the order of writing."""
    save(volume.path / "run", 1)
    (attempt,) = (volume.backing / "run").glob("*-checkpoint-*")
    parts = {"data": "rank-00000.0.safetensors", "index": "index.json", "marker": "_bridge.0.json"}
    return volume.path / "run", {part: (attempt / name).stat().st_size for part, name in parts.items()}


def left(volume: Volume) -> set[str]:
    return {str(file.relative_to(volume.backing)) for file in volume.backing.rglob("*") if "_leases" not in file.parts}


@pytest.mark.fuse
@pytest.mark.parametrize("part", ["data", "index", "marker"])
def test_a_full_volume_keeps_what_was_there_and_has_its_room_back(volume: Volume, part: str) -> None:
    folder, sizes = filled(volume)
    before, stored = left(volume), volume.counts().stored
    room = stored + sizes[part] // 2
    for earlier in list(sizes)[: list(sizes).index(part)]:
        room += sizes[earlier]
    volume.set(capacity_bytes=room)

    with pytest.raises(CheckpointException) as caught:
        save(folder, 2)

    assert isinstance(reason(caught), VolumeError)
    assert "No space left on device" in str(reason(caught))
    assert str(folder) in str(reason(caught))
    assert left(volume) == before
    assert volume.counts().stored == stored
    assert load(folder) == 1
    volume.set(capacity_bytes=0)
    save(folder, 3)
    assert load(folder) == 3


NAMES = {"data": ".safetensors", "index": "index.json", "marker": "_bridge."}


@pytest.mark.fuse
@pytest.mark.parametrize("kind", ["eio_write", "eio_close"])
@pytest.mark.parametrize("part", NAMES)
def test_a_volume_that_fails_for_good_keeps_what_was_there(volume: Volume, part: str, kind: Fault) -> None:
    folder, _ = filled(volume)
    before = left(volume)
    volume.fault(kind, match=NAMES[part])

    with pytest.raises(CheckpointException) as caught:
        save(folder, 2)

    volume.clear_faults()
    assert isinstance(reason(caught), VolumeError)
    assert "Input/output error" in str(reason(caught))
    assert left(volume) == before
    assert load(folder) == 1


@pytest.mark.fuse
@pytest.mark.parametrize("kind", ["eio_write", "eio_close", "eio_open", "eio_stat"])
@pytest.mark.parametrize("part", NAMES)
def test_errors_that_pass_are_survived_when_saving(volume: Volume, part: str, kind: Fault) -> None:
    folder, _ = filled(volume)
    volume.fault(kind, times=2, match=NAMES[part])

    save(folder, 2)

    volume.clear_faults()
    assert load(folder) == 2
    place = LocalStorage(folder)
    assert len(attempts(place)) == len(list(complete_attempts(place))) == 1


@pytest.mark.fuse
@pytest.mark.parametrize("kind", ["eio_read", "eio_open"])
@pytest.mark.parametrize("part", NAMES)
def test_a_volume_that_cannot_be_read_is_an_error_that_names_the_file(volume: Volume, part: str, kind: Fault) -> None:
    folder, _ = filled(volume)
    volume.fault(kind, match=NAMES[part])

    with pytest.raises(CheckpointException) as caught:
        load(folder)

    volume.clear_faults()
    assert isinstance(reason(caught), VolumeError)
    assert "cannot be read: Input/output error" in str(reason(caught))
    assert "marker" in str(reason(caught)) if part == "marker" else NAMES[part] in str(reason(caught))


@pytest.mark.fuse
@pytest.mark.parametrize("kind", ["eio_read", "eio_open", "eio_stat", "eio_list"])
def test_errors_that_pass_are_survived_when_loading(volume: Volume, kind: Fault) -> None:
    folder, _ = filled(volume)
    volume.fault(kind, times=2)

    assert load(folder) == 1


@pytest.mark.fuse
def test_tensors_are_as_they_were_where_a_volume_fails_in_the_middle(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_FILE_BYTES", 4000)
    saved: dict[str, Any] = {f"t{number}": torch.ones(700) for number in range(4)}
    dcp.save(saved, storage_writer=bridge.UCVolumeWriter(volume.path / "run"))
    volume.fault("eio_read", match="rank-00000.3.")
    state = {name: torch.zeros(700) for name in saved}

    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=bridge.UCVolumeReader(volume.path / "run"))

    volume.clear_faults()
    assert isinstance(reason(caught), VolumeError)
    assert not any(tensor.count_nonzero() for tensor in state.values())


@pytest.mark.fuse
def test_a_single_file_is_saved_and_loaded_through_errors_that_pass(volume: Volume) -> None:
    bridge.save_file("old", volume.path / "x.pt")
    for kind in ("eio_write", "eio_close"):
        volume.fault(kind, times=1, match="data.pt")
    bridge.save_file("new", volume.path / "x.pt")
    volume.clear_faults()
    for kind in ("eio_read", "eio_open"):
        volume.fault(kind, times=2, match="data.pt")

    assert bridge.load_file(volume.path / "x.pt") == "new"


@pytest.mark.fuse
@pytest.mark.parametrize("match", ["data.pt", "_bridge."])
def test_a_single_file_that_cannot_be_saved_is_as_it_was(volume: Volume, match: str) -> None:
    bridge.save_file("old", volume.path / "x.pt")
    before = left(volume)
    volume.fault("eio_write", match=match)

    with pytest.raises(VolumeError, match="Input/output error"):
        bridge.save_file("new", volume.path / "x.pt")

    volume.clear_faults()
    assert left(volume) == before
    assert bridge.load_file(volume.path / "x.pt") == "old"
