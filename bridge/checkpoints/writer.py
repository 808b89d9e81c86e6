"""The side of torch's distributed checkpoints that writes: each save is an attempt of its own, complete or absent.

    all ranks     storage_meta ── the coordinator begins an attempt, and tells its name ── each writes its files
    coordinator   finish: every planned entry has a result ── index ── files seen in full size ── marker

The name goes through the store of the default process group and not with the plan: a planner that caches plans gives
the first save's back. It is told before torch gathers the plans, and asked for after.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from bridge.checkpoints.layout import (
    INDEX,
    Entry,
    File,
    Index,
    Part,
    Stored,
    file_order,
    is_plain,
    make_header,
    part_name,
    pickled,
)
from bridge.checkpoints.pieces import Piece, by_file, file_bytes, piece_of, value_of
from bridge.checkpoints.staging import Staging
from bridge.display import format_names
from bridge.distributed import Told, world_size
from bridge.errors import CheckpointError
from bridge.volumes.commit import OpenAttempt, begin, collect_garbage, complete_attempts
from bridge.volumes.digest import digest_bytes
from bridge.volumes.hold import delete_unheld
from bridge.volumes.storage import Storage, is_transient, translated
from bridge.volumes.stores import open_storage

KIND = "checkpoint"

_TRIES = 3
_AS_IT_WAS = "What was saved before is as it was."
# how long a thread may take to end after torch told that its save has failed
_ENDING_S = 1.0


@dataclass(frozen=True)
class _Value:
    """What became of an entry that JSON holds."""

    value: Any


class UCVolumeWriter(StorageWriter):
    """Writes distributed checkpoints to a volume or any other folder, for `torch.distributed.checkpoint.save`.

    A save is seen when it is complete, and not before; until then, and where it fails, readers get what was saved
    before, which is deleted then, or when nobody reads it any more. Each rank writes its part into few files of
    safetensors, with a digest for each 4 MiB. Values that are no tensors are kept as JSON or, where JSON does not hold
    them, pickled in the way that torch loads without running code. It may be used again for the next save, and for
    `async_save`, for which it also copies the state into memory that it uses again; not for two saves at a time.

    Args:
        path: A folder for the saves of one thing, such as a step of a run. Made where it is missing.
        facts: JSON values that `bridge checkpoints ls` shows beside it.
        label: 1 to 32 of [a-z0-9], by which attempts in a folder are told apart.

    Example:
        >>> import torch.distributed.checkpoint as dcp  # doctest: +SKIP
        >>> dcp.save({"model": model}, storage_writer=bridge.UCVolumeWriter("/Volumes/main/ml/run/step_100"))
    """

    def __init__(
        self, path: str | os.PathLike[str], *, facts: Mapping[str, Any] | None = None, label: str = KIND
    ) -> None:
        self.path = os.fspath(path)
        self._facts = dict(facts or {})
        self._label = label
        self._staging = Staging()
        self._save: _Save | None = None
        self._lock = threading.Lock()

    @property
    def attempt(self) -> str | None:
        """The folder in `path` that the last save made complete; on the coordinator."""
        return self._save.complete if self._save else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Choose another folder."""
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def storage_meta(self) -> None:
        """Begin a save: of all, torch asks for this first, and on every rank. What an earlier one left is deleted.

        Raises:
            CheckpointError: Another thread is saving with this.
        """
        with self._lock:
            if self._save is not None:
                if self._save.is_running():
                    raise CheckpointError(
                        "this UCVolumeWriter is writing another save.\n  Wait for it, or make another."
                    )
                self._save.end()
            self._save = _Save(self.path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin the attempt, on the coordinator."""
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives=False saves without a rank that knows when all have written.\n  Leave it out."
            )
        assert self._save is not None
        self._save.begin(is_coordinator, kwargs.get("rank") or 0, self._label)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan with what its tensors are as a whole."""
        if world_size() == 1:
            return plan
        tensors = ((item.index.fqn, item.tensor_data) for item in plan.items if item.tensor_data is not None)
        wholes = {name: f"{list(data.size)} of {data.properties.dtype}" for name, data in tensors}
        return replace(plan, storage_data=wholes or None)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans, in which torch has left a tensor that several ranks hold with one of them.

        Raises:
            CheckpointError: It is not of the same shape and type on all of these, so that the save would mix them.
        """
        first: dict[str, tuple[int, str]] = {}
        for number, plan in enumerate(plans):
            for name, told in (plan.storage_data or {}).items():
                other, theirs = first.setdefault(name, (number, told))
                if told != theirs:
                    raise CheckpointError(
                        f"{name!r} is {theirs} on rank {other} and {told} on rank {number}.\n"
                        "  Save what is the same on all ranks, or give what is of a rank a name with its number."
                    )
        return [replace(plan, storage_data=None) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files of this rank."""
        assert self._save is not None
        try:
            results = self._save.write(plan, planner)
        finally:
            self._give_back(plan, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _give_back(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Let staged memory be used again, if it is what was written, and not what is to be written next."""
        planned = (item for item in plan.items if item.tensor_data is not None and item.tensor_data.chunk.sizes.numel())
        if (item := next(planned, None)) is not None:
            written: Any = planner.resolve_data(item)
            if self._staging.holds(written):
                self._staging.give_back()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the save complete.

        Raises:
            CheckpointError: An entry was planned and not written.
            VolumeError: A file is not seen in full size, or the volume cannot be written.
        """
        assert self._save is not None
        self._save.finish(metadata, results, self._facts)

    def close(self) -> None:
        """Delete what a failed save left; the next save does it too. Also the end of staging, for `async_save`."""
        if self._save is not None:
            self._save.end()
        self._staging.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path."""
        return isinstance(checkpoint_id, str | os.PathLike)

    # torch's AsyncStager, which a writer is taken for that has all of its attributes, this one too
    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Nothing is left to wait for when `stage` has returned."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state in memory that is used again."""
        with self._lock:
            if self._save is not None and self._save.thread is threading.current_thread():
                self._save.is_over = True  # this thread would not be here if it were not
        return self._staging.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Return at once."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(UCVolumeWriter, self.path, facts=self._facts, label=self._label), ()


class _Save:
    """One save: its attempt, on the coordinator, and what this rank writes into it."""

    def __init__(self, path: str) -> None:
        self.complete: str | None = None
        self.thread = threading.current_thread()  # torch makes all calls of a save in one
        self.is_over = False
        self._path = path
        self._told = Told(f"checkpoint {path}")
        self._stack = contextlib.ExitStack()
        self._attempt: OpenAttempt | None = None
        self._rank = 0
        # a writer that is dropped after a failure leaves no lease behind
        self._finalizer = weakref.finalize(self, _end_aside, self._stack)

    def is_running(self) -> bool:
        """Return whether another thread is in the middle of this save, as far as can be told."""
        if self.is_over or self.thread is threading.current_thread():
            return False
        self.thread.join(_ENDING_S)
        return self.thread.is_alive() and not self.is_over

    def begin(self, is_coordinator: bool, rank: int, label: str) -> None:
        """Begin the attempt, on the coordinator."""
        self._rank = rank
        # here and not before, so that all ranks learn of a failure
        self._storage: Storage = open_storage(self._path)
        if is_coordinator:
            self._attempt = self._stack.enter_context(begin(self._storage, label))
            self._told.tell(self._attempt.name)

    def end(self) -> None:
        """Delete what was not completed."""
        self.is_over = True
        self._finalizer.detach()
        self._stack.close()

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write the planned entries, and return what became of each, and the files."""
        try:
            with translated(f"{self._path} cannot be written", _AS_IT_WAS):
                results = self._write(plan, planner)
        except BaseException:
            self.is_over = True
            if world_size() == 1:  # others may be writing yet
                self.end()
            raise
        self.is_over = self._attempt is None
        return results

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        folder = self._attempt.name if self._attempt else self._told.ask()
        results, entries = [], []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                value = value_of(planner, item)
                if is_plain(value):
                    results.append(WriteResult(item.index, 0, _Value(value)))
                    continue
                data = pickled(item.index.fqn, value)
                entries.append(Piece(Entry(item.index.fqn, torch.uint8, (len(data),)), item.index, (), data))
            else:
                entries.append(piece_of(item))
        self._storage.make_folder(folder)
        for number, some in enumerate(by_file(sorted(entries, key=lambda piece: file_order(piece.entry)))):
            results += self._write_file(folder, f"rank-{self._rank:05d}.{number}", some, planner)
        return results

    def _write_file(
        self, folder: str, stem: str, pieces: Sequence[Piece], planner: SavePlanner
    ) -> list[WriteResult]:  # fmt: skip
        header, ranges = make_header(piece.entry for piece in pieces)
        for attempt in range(_TRIES):
            # a file is written once: one that failed may be there for good
            name = f"{stem}{f'.{attempt}' if attempt else ''}.safetensors"
            digests: list[str] = []
            try:
                self._storage.write(f"{folder}/{name}", file_bytes(header, pieces, planner, digests))
                break
            except OSError as exc:
                if attempt == _TRIES - 1 or not is_transient(exc):
                    raise
                time.sleep(0.1)
        size = ranges[-1][1] if ranges else len(header)
        results = [
            WriteResult(piece.index, stop - start, Part(name, start, stop, piece.box))
            for piece, (start, stop) in zip(pieces, ranges, strict=True)
        ]
        file = File(name, size, len(header), tuple(digests))
        return [*results, WriteResult(MetadataIndex(name), size, file)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]], facts: Mapping[str, Any]) -> None:
        """Write the index, and make the attempt complete."""
        try:
            with translated(f"{self._path} cannot be written", _AS_IT_WAS):
                self._finish(metadata, results, facts)
        finally:
            self.end()
        self._told.forget()
        assert self._attempt is not None
        # what this takes the place of, and what killed writers left; it stands whether or not that works
        with contextlib.suppress(OSError):
            mine = self._attempt.attempt
            older = [one for one, _ in complete_attempts(self._storage, mine.label) if one.rank > mine.rank]
            delete_unheld(self._storage, older, at_once=True)
            collect_garbage(self._storage)

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]], facts: Mapping[str, Any]) -> None:
        assert self._attempt is not None
        index = _index(metadata, [result for some in results for result in some])
        data = index.encode()
        self._storage.write(f"{self._attempt.name}/{INDEX}", [data])
        sizes = {file.name: file.num_bytes for file in index.files}
        body = {
            "kind": KIND, "index": digest_bytes(data), "num_bytes": index.num_bytes, "world_size": len(results),
            "facts": dict(facts),
        }  # fmt: skip
        self._attempt.commit(body, {**sizes, INDEX: len(data)})
        self.complete = self._attempt.name


def _index(metadata: Metadata, results: Sequence[WriteResult]) -> Index:
    """Return the index of what was planned and written.

    Raises:
        CheckpointError: An entry was planned and not written.
    """
    written = {
        (
            result.index.fqn,
            result.storage_data.box if isinstance(result.storage_data, Part) else (),
        ): result.storage_data
        for result in results
        if not isinstance(result.storage_data, File)
    }
    tensors, values, pickles, missing = {}, {}, {}, []
    for name, planned in metadata.state_dict_metadata.items():
        if isinstance(planned, TensorStorageMetadata):
            boxes = [
                tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
                for chunk in planned.chunks
            ]
            parts = [written.get((name, box)) for box in boxes]
            missing += [part_name(name, box, planned.size) for box, part in zip(boxes, parts, strict=True) if not part]
            tensors[name] = Stored(planned.properties.dtype, tuple(planned.size), tuple(filter(None, parts)))
        elif isinstance(found := written.get((name, ())), _Value):
            values[name] = found.value
        elif found:
            pickles[name] = found
        else:
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"{len(missing)} entries were planned and not written: {format_names(missing)}.\n"
            "  Nothing was saved; what was saved before is as it was."
        )
    paths = metadata.planner_data
    if paths is not None and not all(type(key) in (str, int) for path in paths.values() for key in path):
        raise CheckpointError("the state has keys that are neither text nor whole numbers.\n  Use such keys.")
    files = tuple(result.storage_data for result in results if isinstance(result.storage_data, File))
    return Index(tensors, values, pickles, None if paths is None else {k: list(v) for k, v in paths.items()}, files)


def _end_aside(stack: contextlib.ExitStack) -> None:
    """End an attempt in a thread: a finaliser interrupts somebody, and must not wait for a volume."""
    if threading.main_thread().is_alive():
        threading.Thread(target=stack.close, name="bridge-abandon", daemon=True).start()
    else:
        stack.close()
