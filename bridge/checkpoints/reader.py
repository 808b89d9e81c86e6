"""The side of torch's distributed checkpoints that reads: what a rank needs is verified before any tensor changes.

    all ranks     which attempt, what is in it ── blocks that this rank needs are read and checked, and kept
    coordinator   all ranks chose the same attempt ── what was asked for and is missing is told to all
    all ranks     tensors are filled from what was kept

What does not fit in the memory that is allowed is checked, dropped, and read and checked again when it is needed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from bridge.checkpoints.blocks import Blocks, Piece
from bridge.checkpoints.layout import Box, Index, Part, unpickled
from bridge.checkpoints.opened import Opened, open_checkpoint
from bridge.config import available_memory
from bridge.display import format_names
from bridge.distributed import local_world_size
from bridge.errors import CheckpointError, LossyConversionError
from bridge.volumes.path import is_local


@dataclass(frozen=True)
class _Told:
    """What a rank's plan tells the coordinator, and the coordinator's tells all."""

    attempt: str
    missing: tuple[str, ...]


class UCVolumeReader(StorageReader):
    """Reads distributed checkpoints from a volume or any other folder, for `torch.distributed.checkpoint.load`.

    Of a folder that `UCVolumeWriter` or `CheckpointManager` saved to, the newest complete save is read; of an attempt
    in it, that one. Each rank reads the blocks that it needs, on as many ranks as there are now, and all are checked
    before the first tensor changes on any. Nothing is run that a file holds. Folders of torch's own FileSystemWriter
    are read too; they hold nothing that they could be checked against.

    Args:
        path: The folder.
        cast: Whether tensors of other types than were saved are filled all the same, rounded where they must be.
        max_bytes: How much may be kept in memory between the check and the filling; None: half of what is free, shared
            with the other ranks of this machine, and nothing of files on its own disk, which are sooner read twice.

    Raises, when it loads, on every rank, within torch's CheckpointException:
        CheckpointNotFoundError: There is none that is complete.
        CorruptFileError: A file is damaged, cut or gone; no tensor has changed.
        CheckpointError: Something that was asked for is not there, all of it named; or ranks see different saves.
        LossyConversionError: A tensor is of another type than was saved.

    Example:
        >>> import torch.distributed.checkpoint as dcp  # doctest: +SKIP
        >>> dcp.load(state, storage_reader=bridge.UCVolumeReader("/Volumes/main/ml/run/step_100"))
    """

    def __init__(self, path: str | os.PathLike[str], *, cast: bool = False, max_bytes: int | None = None) -> None:
        self.path = os.fspath(path)
        self._cast = cast
        self._max_bytes = max_bytes
        self._opened: Opened | None = None
        self._error: Exception | None = None
        self._blocks: Blocks | None = None
        self._stock: Any = None
        self._metadata = Metadata({})

    @property
    def attempt(self) -> str | None:
        """The folder that was read last."""
        return self._opened.address if self._opened else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load."""
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)
        self._opened = self._error = self._blocks = self._stock = None

    # a parameter called kwargs would tell torch that there is one such file for each rank
    def read_metadata(self, *args: Any) -> Metadata:
        """Return what the checkpoint holds."""
        try:
            return self._read_metadata()
        except Exception as exc:  # noqa: BLE001 - raised by the next call; torch would only quote it
            self._error = exc
            return Metadata({})

    def _read_metadata(self) -> Metadata:
        self._opened = open_checkpoint(self.path)
        if self._opened.index is not None:
            self._metadata = _metadata(self._opened.index)
            return self._metadata
        from bridge.checkpoints.stock import StockReader

        self._stock = StockReader(self._opened.folder())
        stock: Metadata = self._stock.read_metadata()
        self._metadata = replace(stock, state_dict_metadata=_Entries(stock.state_dict_metadata))
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise what was wrong with the checkpoint."""
        if self._error is not None:
            raise self._error
        if self._stock is not None:
            self._stock.set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Read and check all that this rank needs."""
        assert self._opened is not None
        there = self._metadata.state_dict_metadata.keys()
        missing = tuple(item.storage_index.fqn for item in plan.items if item.storage_index.fqn not in there)
        items = [item for item in plan.items if item.storage_index.fqn in there]
        if (index := self._opened.index) is not None:
            self._blocks = Blocks(self._opened, self._limit())
            self._blocks.check([_extent(index, item) for item in items])
        return replace(plan, items=items, storage_data=_Told(self._opened.address, missing))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See that all ranks read the same save, and tell all what is missing on any."""
        told: list[_Told] = [plan.storage_data for plan in plans]
        for rank, one in enumerate(told):
            if one.attempt != told[0].attempt:
                raise CheckpointError(
                    f"rank 0 reads {told[0].attempt}, rank {rank} {one.attempt}: a listing lags, or another save was "
                    "made just now.\n  Load again, or give the folder of one of them."
                )
        missing = tuple(sorted({name for one in told for name in one.missing}))
        return [replace(plan, storage_data=_Told(told[0].attempt, missing)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of this rank."""
        told: _Told = plan.storage_data
        if told.missing and not getattr(planner, "allow_partial_load", False):
            raise CheckpointError(
                f"{told.attempt} does not hold {format_names(told.missing)}.\n  Ask for what it holds "
                "(bridge checkpoints show), or load with DefaultLoadPlanner(allow_partial_load=True)."
            )
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        targets = [planner.resolve_tensor(item).detach() for item in tensors]
        if not self._cast:
            _check_types(self._metadata, tensors, targets)
        if self._stock is not None:
            return self._stock.read_data(plan, planner)  # type: ignore[no-any-return]
        index, blocks = self._known()
        # before any tensor changes: one may be refused
        values = [(item, self._value(item)) for item in plan.items if item.type == LoadItemType.BYTE_IO]
        parts = [_extent(index, item) for item in tensors]
        straight = _straight(blocks, index, tensors, parts, targets)
        blocks.fill(straight.values())
        for number, (item, part, target) in enumerate(zip(tensors, parts, targets, strict=True)):
            if number not in straight:
                source = blocks.tensor(part, index.tensors[item.storage_index.fqn].dtype)
                target.copy_(_boxed(source, _chunk(index, item), item))
            planner.commit_tensor(item, target)
        for item, value in values:
            planner.load_bytes(item, value)
        self._blocks = None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _value(self, item: ReadItem) -> io.BytesIO:
        """Return what the planner, which uses pickle, may load: bytes that were made here of a value."""
        index, blocks = self._known()
        name = item.storage_index.fqn
        if name in index.values:
            value = index.values[name]
        else:
            data = blocks.tensor(index.pickles[name], torch.uint8)
            value = unpickled(data.numpy().tobytes(), f"{name!r} of {self.attempt}")
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return buffer

    def _limit(self) -> int:
        """Return how much is kept. What lies on a disk of this machine is read twice sooner than kept."""
        assert self._opened is not None
        if self._max_bytes is not None:
            return self._max_bytes
        folder = self._opened.storage.folder
        return 0 if folder is not None and is_local(folder) else available_memory() // (2 * local_world_size())

    def _known(self) -> tuple[Index, Blocks]:
        assert self._opened is not None
        assert self._opened.index is not None
        assert self._blocks is not None
        return self._opened.index, self._blocks

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path."""
        return isinstance(checkpoint_id, str | os.PathLike)


class _Entries(dict[str, Any]):
    """What a checkpoint holds, by name; says that it holds any name, so that all that is missing can be named at once.

    torch's planner stops at the first.
    """

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> BytesStorageMetadata:
        return BytesStorageMetadata()


def _metadata(index: Index) -> Metadata:
    entries = _Entries()
    for name, stored in index.tensors.items():
        chunks = [
            ChunkStorageMetadata(
                torch.Size(start for start, _ in part.box), torch.Size(stop - start for start, stop in part.box)
            )
            for part in stored.parts
        ]
        entries[name] = TensorStorageMetadata(TensorProperties(stored.dtype), torch.Size(stored.shape), chunks)
    for name in (*index.values, *index.pickles):
        entries[name] = BytesStorageMetadata()
    paths = None if index.paths is None else {name: tuple(path) for name, path in index.paths.items()}
    return Metadata(entries, planner_data=paths)


def _chunk(index: Index, item: ReadItem) -> Part:
    """Return the part of a tensor that an item reads from."""
    parts = index.tensors[item.storage_index.fqn].parts
    hint, offset = item.storage_index.index, item.storage_index.offset
    starts = tuple(offset or ())
    if hint is not None and hint < len(parts) and _starts(parts[hint].box) == starts:
        return parts[hint]
    return next(part for part in parts if _starts(part.box) == starts)


def _starts(box: Box) -> tuple[int, ...]:
    return tuple(start for start, _ in box)


def _extent(index: Index, item: ReadItem) -> Part:
    """Return the bytes of a file that hold what an item needs: whole rows of the first dimension."""
    name = item.storage_index.fqn
    if item.type == LoadItemType.BYTE_IO:
        return index.pickles.get(name) or Part("", 0, 0)
    part = _chunk(index, item)
    if not part.box or part.start == part.stop:
        return part
    row_bytes = (part.stop - part.start) // (part.box[0][1] - part.box[0][0])
    first, count = item.storage_offsets[0], item.lengths[0]
    start = part.start + first * row_bytes
    return replace(part, start=start, stop=start + count * row_bytes)


def _boxed(rows: torch.Tensor, part: Part, item: ReadItem) -> torch.Tensor:
    """Return what an item needs of the rows of a part that hold it."""
    sizes = [stop - start for start, stop in part.box]
    if not sizes:
        return rows.reshape(())
    shaped = rows.reshape([item.lengths[0], *sizes[1:]])
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if dim:
            shaped = shaped.narrow(dim, offset, length)
    return shaped


def _straight(
    blocks: Blocks, index: Index, items: Sequence[ReadItem], parts: Sequence[Part], targets: Sequence[torch.Tensor]
) -> dict[int, Piece]:
    """Return which items can be read straight into their tensors: bytes that were not kept, and that need no change."""
    found: dict[int, Piece] = {}
    stop: dict[str, int] = {}
    alone = _alone(targets)
    for number in sorted(alone, key=lambda number: (parts[number].file, parts[number].start)):
        item, part, target = items[number], parts[number], targets[number]
        is_same = (
            target.dtype == index.tensors[item.storage_index.fqn].dtype and target.nbytes == part.stop - part.start
        )
        if (
            is_same and target.nbytes and target.device.type == "cpu" and target.is_contiguous()
            and not target.is_conj() and not target.is_neg()
            and part.start >= stop.get(part.file, 0) and not blocks.keeps(part)
        ):  # fmt: skip
            memory = target.view(-1).view(torch.uint8).numpy()
            found[number] = Piece(part.file, part.start, memoryview(memory))  # type: ignore[arg-type]
            stop[part.file] = part.stop
    return found


def _alone(targets: Sequence[torch.Tensor]) -> set[int]:
    """Return which tensors share no byte with another: several threads fill them, and digest what they hold then."""
    shared: set[int] = set()
    last, end = -1, 0
    for number in sorted(range(len(targets)), key=lambda number: targets[number].data_ptr()):
        start, target = targets[number].data_ptr(), targets[number]
        stop = start + target.element_size() * (
            1 + sum((size - 1) * step for size, step in zip(target.shape, target.stride(), strict=True))
        )
        if target.nbytes and start < end:
            shared |= {last, number}
        if target.nbytes and stop > end:
            last, end = number, stop
    return set(range(len(targets))) - shared


def _check_types(metadata: Metadata, items: Sequence[ReadItem], targets: Sequence[torch.Tensor]) -> None:
    saved: Any = metadata.state_dict_metadata
    wrong = {
        item.storage_index.fqn: (saved[item.storage_index.fqn].properties.dtype, target.dtype)
        for item, target in zip(items, targets, strict=True)
        if saved[item.storage_index.fqn].properties.dtype != target.dtype
    }
    if wrong:
        shown = [f"{name} ({saved}, not {asked})" for name, (saved, asked) in wrong.items()]
        raise LossyConversionError(
            f"tensors were saved in other types: {format_names(shown)}.\n"
            "  Give tensors of these types, or UCVolumeReader(cast=True)."
        )
