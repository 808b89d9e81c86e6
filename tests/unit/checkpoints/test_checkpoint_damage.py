"""Checkpoints that are damaged, by chance or on purpose: refused before any tensor changes, and nothing is run."""

from __future__ import annotations

import copy
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import bridge
from bridge.checkpoints import layout, pieces
from bridge.checkpoints.layout import INDEX, Entry, File, Index, Part, make_header
from bridge.errors import CheckpointNotFoundError, CorruptFileError
from bridge.volumes.commit import Marker
from bridge.volumes.digest import digest_bytes
from tests.harmful import RAN, Harmful

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

BLOCK_BYTES = 256
DATA, MARKER = "rank-00000.0.safetensors", "_bridge.0.json"
LIMITS = [None, 0, 300, 1000, 10**9]


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCK_BYTES", BLOCK_BYTES)
        patch.setattr(pieces, "BLOCK_BYTES", BLOCK_BYTES)
        yield


def state(value: float = 1.0) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "w": torch.rand(20, 16) * value,
        "v": torch.rand(7, 3).double() * value,
        "bits": torch.rand(100) < value / 2,
        "one": torch.tensor(value),
        "none": torch.zeros(0),
        "step": value,
        "pairs": (1, (2, value)),
    }


def blank() -> dict[str, Any]:
    """Return what to load into: tensors that are read straight into, and one that is not."""
    made = {
        name: torch.full_like(part, 0) if isinstance(part, torch.Tensor) else None for name, part in state().items()
    }
    return {**made, "w": torch.zeros(16, 20).T}


def load(folder: Path, target: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(target, storage_reader=bridge.UCVolumeReader(folder, **options))
    return target


def raw(target: dict[str, Any]) -> dict[str, Any]:
    return {
        name: part.contiguous().reshape(-1).view(torch.uint8).tolist() if isinstance(part, torch.Tensor) else part
        for name, part in target.items()
    }


def refused(folder: Path, **options: Any) -> BaseException:
    """Return why a checkpoint is not loaded, having seen that nothing of the target has changed."""
    target = blank()
    before = raw(copy.deepcopy(target))
    with pytest.raises(CheckpointException) as caught:
        load(folder, target, **options)
    assert raw(target) == before
    ((error, _),) = caught.value.failures.values()
    return error


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_blocks: None) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    dcp.save(state(), storage_writer=bridge.UCVolumeWriter(folder))
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def attempt_of(folder: Path) -> Path:
    return next(entry for entry in sorted(folder.iterdir(), reverse=True) if entry.name != "_leases")


@pytest.mark.parametrize("max_bytes", LIMITS)
def test_what_is_whole_is_loaded_whatever_may_be_kept(whole: Path, max_bytes: int | None) -> None:
    assert (attempt_of(whole) / DATA).stat().st_size > 8 * BLOCK_BYTES

    assert raw(load(whole, blank(), max_bytes=max_bytes)) == raw(state())


@settings(max_examples=250, deadline=None)
@given(st.sampled_from([DATA, DATA, INDEX, MARKER]), st.randoms(use_true_random=False), st.sampled_from(LIMITS))
def test_one_bit_that_is_flipped_anywhere_is_found(whole: Path, name: str, random: Any, max_bytes: int | None) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(whole, Path(place) / "copy"))
        file = attempt_of(folder) / name
        data = bytearray(file.read_bytes())
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        file.write_bytes(data)

        error = refused(folder, max_bytes=max_bytes)

        if name == MARKER:
            assert isinstance(error, CheckpointNotFoundError)
            assert str(error).startswith(f"{folder} holds no complete checkpoint: 1 were begun and not completed.")
        else:
            assert isinstance(error, CorruptFileError)
            assert str(error).startswith(f"{file} is damaged: ")


def test_no_bit_of_a_marker_may_be_another(whole: Path) -> None:
    data = (attempt_of(whole) / MARKER).read_bytes()
    assert Marker.decode(data) is not None

    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            assert Marker.decode(bytes(flipped)) is None, (position, bit)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def grown(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\x00")


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def replaced_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("max_bytes", [None, 0, 10**9])
@pytest.mark.parametrize("name", [DATA, INDEX])
@pytest.mark.parametrize("damage", [cut, emptied, grown, halved, zeroed, Path.unlink])
def test_a_file_that_is_not_as_it_was_is_named(
    folder: Path, damage: Callable[[Path], None], name: str, max_bytes: int | None
) -> None:
    file = attempt_of(folder) / name
    damage(file)

    error = refused(folder, max_bytes=max_bytes)

    assert isinstance(error, CorruptFileError)
    assert str(error).startswith(str(file))


@pytest.mark.parametrize("damage", [cut, emptied, grown, halved, zeroed, Path.unlink, replaced_by_a_folder])
def test_without_its_marker_it_is_not_complete(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(attempt_of(folder) / MARKER)

    error = refused(folder)

    assert isinstance(error, CheckpointNotFoundError)
    assert str(error).startswith(f"{folder} holds no complete checkpoint: 1 were begun and not completed.")


@pytest.mark.parametrize("name", [DATA, INDEX])
def test_a_folder_in_the_place_of_a_file_is_an_error_of_the_volume(folder: Path, name: str) -> None:
    replaced_by_a_folder(attempt_of(folder) / name)

    error = refused(folder)

    assert isinstance(error, bridge.VolumeError | CorruptFileError)
    assert str(attempt_of(folder) / name) in str(error)


def test_a_damaged_newer_save_does_not_become_an_older_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        dcp.save(state(value), storage_writer=bridge.UCVolumeWriter(tmp_path, label=f"save{value:.0f}"))
    cut(attempt_of(tmp_path) / DATA)

    assert isinstance(refused(tmp_path), CorruptFileError)


def test_a_newer_save_without_a_whole_marker_is_as_if_it_was_killed(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        dcp.save(state(value), storage_writer=bridge.UCVolumeWriter(tmp_path, label=f"save{value:.0f}"))
    cut(attempt_of(tmp_path) / MARKER)

    assert raw(load(tmp_path, blank())) == raw(state(1.0))


def test_what_is_not_asked_for_is_not_read(folder: Path) -> None:
    file = attempt_of(folder) / DATA
    index = Index.decode((attempt_of(folder) / INDEX).read_bytes(), "here")
    data = bytearray(file.read_bytes())
    (part,) = index.tensors["w"].parts
    data[part.stop - 300] ^= 1
    file.write_bytes(data)

    target = load(folder, {"v": torch.zeros(7, 3, dtype=torch.float64), "step": None})

    assert torch.equal(target["v"], state()["v"])
    assert isinstance(refused(folder), CorruptFileError)


@pytest.mark.parametrize("max_bytes", [0, 300])
def test_what_changes_between_the_check_and_the_filling_is_found(folder: Path, max_bytes: int) -> None:
    class Planner(DefaultLoadPlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            zeroed(attempt_of(folder) / DATA)
            return super().finish_plan(new_plan)

    with pytest.raises(CheckpointException) as caught:
        dcp.load(blank(), storage_reader=bridge.UCVolumeReader(folder, max_bytes=max_bytes), planner=Planner())

    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, CorruptFileError)


def test_what_is_kept_is_loaded_whatever_becomes_of_the_file(folder: Path) -> None:
    class Planner(DefaultLoadPlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            (attempt_of(folder) / DATA).unlink()
            return super().finish_plan(new_plan)

    target = blank()
    dcp.load(target, storage_reader=bridge.UCVolumeReader(folder, max_bytes=10**9), planner=Planner())

    assert raw(target) == raw(state())


@pytest.mark.parametrize("max_bytes", [None, 0, 10**9])
@pytest.mark.parametrize("size", [20, 500])
def test_tensors_that_share_memory_are_filled_one_after_the_other(
    tmp_path: Path, size: int, max_bytes: int | None
) -> None:
    saved = {"a": torch.full((size,), 1.0), "b": torch.full((size,), 2.0), "c": torch.full((10,), 3.0)}
    dcp.save(saved, storage_writer=bridge.UCVolumeWriter(tmp_path))
    shared = torch.zeros(size)

    load(tmp_path, {"a": shared, "b": shared, "c": shared[5:15]}, max_bytes=max_bytes)

    assert torch.equal(shared[5:15], saved["c"])
    assert torch.equal(shared[15:], saved["b"][15:])


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view, lambda x: x.conj().imag])
def test_views_that_change_what_they_show_are_filled_right(tmp_path: Path, view: Callable[[torch.Tensor], Any]) -> None:
    saved = view(torch.rand(50, dtype=torch.complex64)).clone()
    dcp.save({"x": saved}, storage_writer=bridge.UCVolumeWriter(tmp_path))

    target = load(tmp_path, {"x": view(torch.zeros(50, dtype=torch.complex64))})

    assert torch.equal(target["x"], saved)


# on purpose


def put(attempt: Path, name: str, value: Any) -> None:
    """Let a checkpoint hold a value that is pickled without care, with digests that are right all the same."""
    made = io.BytesIO()
    torch.save(value, made)
    data = made.getvalue()
    header, ((start, stop),) = make_header([Entry(name, torch.uint8, (len(data),))])
    (attempt / "other.safetensors").write_bytes(header + data)
    blocks = [data[first : first + BLOCK_BYTES] for first in range(0, len(data), BLOCK_BYTES)]
    file = File("other.safetensors", stop, start, tuple(map(digest_bytes, [header, *blocks])))
    old = Index.decode((attempt / INDEX).read_bytes(), "here")
    index = Index(
        old.tensors, old.values, {**old.pickles, name: Part(file.name, start, stop)}, None, (*old.files, file)
    )
    (attempt / INDEX).write_bytes(index.encode())
    marker = Marker.decode((attempt / MARKER).read_bytes())
    assert marker is not None
    body = {**marker.body, "index": digest_bytes(index.encode())}
    (attempt / MARKER).write_bytes(Marker(body, marker.sizes).encode())


@pytest.mark.parametrize("max_bytes", [None, 0, 10**9])
def test_a_harmful_value_is_refused_before_any_tensor_changes(folder: Path, max_bytes: int | None) -> None:
    put(attempt_of(folder), "pairs", Harmful())

    error = refused(folder, max_bytes=max_bytes)

    assert RAN == []
    assert isinstance(error, CorruptFileError)
    assert str(error).startswith(f"'pairs' of {attempt_of(folder)} is refused: Unsupported ")


def test_what_was_put_is_what_would_be_loaded(folder: Path) -> None:
    put(attempt_of(folder), "pairs", (3, 4))

    assert load(folder, blank())["pairs"] == (3, 4)


def test_a_harmful_value_would_run_where_pickle_loads_it() -> None:
    made = io.BytesIO()
    torch.save(Harmful(), made)
    made.seek(0)
    try:
        torch.load(made, weights_only=False)
        assert RAN == ["code of the file"]
    finally:
        RAN.clear()


def test_a_marker_whose_index_is_none_is_refused(folder: Path) -> None:
    attempt = attempt_of(folder)
    (attempt / INDEX).write_bytes(b"{}")
    marker = Marker.decode((attempt / MARKER).read_bytes())
    assert marker is not None
    (attempt / MARKER).write_bytes(Marker({**marker.body, "index": digest_bytes(b"{}")}, {}).encode())

    error = refused(folder)

    assert isinstance(error, CorruptFileError)
    assert str(error).startswith(f"{attempt}/index.json is no index: KeyError('format').")
