"""What checkpoints there are, whether they are whole, and their way from and to files of others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from bridge.checkpoints.blocks import Blocks
from bridge.checkpoints.layout import Entry, Part, file_order, make_header, pickled, unpickled
from bridge.checkpoints.opened import STOCK, open_checkpoint
from bridge.checkpoints.reader import UCVolumeReader
from bridge.checkpoints.retention import Retention, Saved, list_saved
from bridge.checkpoints.writer import KIND, UCVolumeWriter
from bridge.errors import BridgeError, CheckpointError, CheckpointNotFoundError, CorruptFileError
from bridge.volumes.commit import Attempt, collect_garbage
from bridge.volumes.hold import delete_unheld
from bridge.volumes.storage import Storage
from bridge.volumes.stores import LocalStorage, open_storage
from bridge.volumes.survey import Look, Standing, survey


@dataclass(frozen=True)
class CheckpointInfo(Standing):
    """One save, or what there is of one; what is told here is only known of a complete one."""

    step: int | None = None
    world_size: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def list_checkpoints(root: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Return the saves in a folder, newest first, incomplete ones too.

    Raises:
        CheckpointNotFoundError: The folder holds none.
        VolumeError: It cannot be read.
    """
    storage = open_storage(root)
    looks = survey(storage)
    if not looks:
        told = "holds no checkpoint.\n  Give the folder that was saved to."
        if storage.folder is not None and (storage.folder / STOCK).is_file():
            told = (
                "is one checkpoint of torch's FileSystemWriter.\n  bridge checkpoints convert writes it in this form."
            )
        raise CheckpointNotFoundError(f"{storage} {told}")
    return [_describe(storage, attempt, look) for attempt, look in looks.items()]


def _describe(storage: Storage, attempt: Attempt, look: Look) -> CheckpointInfo:
    seen, marker = look()
    info = CheckpointInfo(**vars(seen))
    if marker is None:
        return info
    body = marker.body
    if body.get("kind") != KIND:
        return replace(info, state="something else")
    missing = marker.missing(storage, attempt.name)
    return replace(
        info, num_bytes=body["num_bytes"], problem=f"{missing[0]} is not there in full" if missing else None,
        step=body["facts"].get("step"), world_size=body["world_size"], facts=body["facts"],
    )  # fmt: skip


def verify_checkpoint(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read every byte of a checkpoint; return what is wrong with a file, by its name: nothing where it is whole.

    Raises:
        CheckpointNotFoundError: There is no complete one.
        CorruptFileError: Its index is damaged.
        CheckpointError: It is one of torch's FileSystemWriter, which holds nothing to check it against.
    """
    opened = open_checkpoint(os.fspath(path))
    if opened.index is None:
        raise CheckpointError(
            f"{path} was written by torch's FileSystemWriter and holds no digests.\n"
            "  bridge checkpoints convert makes one that can be verified."
        )
    damaged = {}
    for file in opened.index.files:
        try:
            Blocks(opened, max_bytes=0).check([Part(file.name, file.data_start, file.num_bytes)])
        except (BridgeError, OSError) as exc:
            damaged[file.name] = str(exc)
    return damaged


def convert_checkpoint(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> int:
    """Write a checkpoint in another form; return how many entries it has.

    Both are told by their names: `.pt` and `.pth` are files of `torch.save`, `.safetensors` is one file of tensors
    (values that are no tensors stay behind), and any other name is a folder, of this library or, as a source, of
    torch's FileSystemWriter. All of it is held in memory.

    Raises:
        CheckpointError: The target is a file that is there, the source is a file of safetensors, or it holds no tensors
            where the target holds nothing else.
    """
    state = _loaded(os.fspath(source))
    end = Path(target).suffix
    if end in (".pt", ".pth", ".safetensors") and Path(target).exists():
        raise CheckpointError(f"{target} is there already.\n  Give a new name, or delete it.")
    if end in (".pt", ".pth"):
        LocalStorage(Path(target).parent).write(Path(target).name, [pickled("state", state)])
    elif end == ".safetensors":
        tensors = dict(sorted(_tensors(state), key=lambda pair: file_order(Entry("", pair[1].dtype, ()))))
        if not tensors:
            raise CheckpointError(f"{source} holds no tensors.\n  Give a target that ends in .pt.")
        header, _ = make_header(Entry(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        data = [memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in tensors.values()]  # type: ignore[arg-type]
        LocalStorage(Path(target).parent).write(Path(target).name, [header, *data])
        return len(tensors)
    else:
        with _translated(f"{target} cannot be saved"):
            _save_state_dict(state, UCVolumeWriter(target), no_dist=True)
    return len(state)


def prune_checkpoints(
    root: str | os.PathLike[str], *, keep_last: int | None = None, keep_every: int | None = None, dry_run: bool = False
) -> tuple[list[Saved], list[str]]:
    """Delete what killed writers left, and of a run the steps that no rule keeps; return these, and what failed.

    The newest step that is whole always stays: it is read from end to end before another is deleted.

    Args:
        keep_last: How many of the last steps stay; None: all.
        keep_every: Steps that are a multiple of this stay as well.
        dry_run: Delete nothing, and return what would be.

    Raises:
        CheckpointError: Steps would be deleted, and none is whole.
    """
    storage = open_storage(root)
    doomed: list[Saved] = []
    if keep_last is not None:
        retention, saved = Retention(keep_last, keep_every), list_saved(storage)
        if retention.doomed(saved):
            doomed = retention.doomed(saved, {_newest_whole(os.fspath(root), saved).attempt.name})
    if dry_run:
        return doomed, []
    _, failed = delete_unheld(storage, [one.attempt for one in doomed], at_once=True)
    collect_garbage(storage)
    return doomed, list(failed.values())


def _newest_whole(root: str, saved: Sequence[Saved]) -> Saved:
    for one in sorted(saved, key=lambda one: one.attempt.rank):
        try:
            if not verify_checkpoint(f"{root.rstrip('/')}/{one.attempt.name}"):
                return one
        except (CheckpointError, CorruptFileError):
            continue
    raise CheckpointError(f"no step of {root} is whole, so none was deleted.\n  bridge checkpoints verify says why.")


def _loaded(source: str) -> dict[str, Any]:
    end = Path(source).suffix
    if end == ".safetensors":
        raise CheckpointError(f"{source} is one file of tensors.\n  Load it with safetensors, and save the model anew.")
    if end in (".pt", ".pth") and Path(source).is_file():
        found = unpickled(Path(source).read_bytes(), source)
        return dict(found) if isinstance(found, Mapping) else {"state": found}
    state: dict[str, Any] = {}
    with _translated(f"{source} cannot be loaded"):
        _load_state_dict(state, UCVolumeReader(source), no_dist=True, planner=_EmptyStateDictLoadPlanner())
    return state


@contextlib.contextmanager
def _translated(problem: str) -> Iterator[None]:
    try:
        yield
    except CheckpointException as exc:  # no Exception, and of one rank here
        reason, _ = next(iter(exc.failures.values()))
        raise CheckpointError(f"{problem}: {reason}") from exc


def _tensors(value: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a nested state with the keys that lead to them, joined by dots."""
    if isinstance(value, torch.Tensor):
        return [(name, value.contiguous())]
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [found for key, part in items for found in _tensors(part, f"{name}.{key}" if name else str(key))]
