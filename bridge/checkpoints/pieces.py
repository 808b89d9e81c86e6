"""What goes into a file of a checkpoint, and its bytes, front to back, digested in a thread while they are written."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import xxhash
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from bridge.checkpoints.layout import BLOCK_BYTES, Box, Entry, Leaf, part_name
from bridge.errors import CheckpointError

_FILE_BYTES = 4 << 30
# less is gathered: a volume takes each write for a request
_SMALL_BYTES = 256 << 10
_GATHERED_BYTES = 1 << 20
_MOST_WAITING = 8  # to be digested
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


@dataclass(frozen=True)
class Piece:
    """An entry of a file, and where its bytes come from: `data`, or else the planner."""

    entry: Entry
    index: MetadataIndex
    box: Box
    data: bytes | None = None
    item: WriteItem | None = None

    def view(self, planner: SavePlanner) -> memoryview:
        """Return its bytes; those of a tensor in memory are not copied."""
        if self.data is not None:
            return memoryview(self.data)
        tensor: Any = planner.resolve_data(self.item)  # type: ignore[arg-type]
        if tensor.is_meta:
            raise CheckpointError(f"{self.index.fqn!r} is on the device meta, and holds nothing that could be saved.")
        tensor = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
        if tensor.dtype != self.entry.dtype or tuple(tensor.shape) != tuple(self.entry.shape):
            raise CheckpointError(
                f"{self.index.fqn!r} is {tensor.dtype} {list(tensor.shape)}, planned as {self.entry.dtype} "
                f"{list(self.entry.shape)}: the state changed during the save.\n  Save a copy of it, or use async_save."
            )
        return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()).cast("B")


def piece_of(item: WriteItem) -> Piece:
    """Return the piece that a planned tensor becomes.

    Raises:
        CheckpointError: It is of a kind that cannot be stored.
    """
    data = item.tensor_data
    assert data is not None
    name, dtype = item.index.fqn, data.properties.dtype
    if data.properties.layout != torch.strided:
        raise CheckpointError(f"{name!r} is a tensor of layout {data.properties.layout}.\n  Save it with to_dense().")
    if dtype in _QUANTIZED:
        raise CheckpointError(f"{name!r} is quantized.\n  Save its int_repr(), and its scale and zero point with it.")
    box = tuple((start, start + size) for start, size in zip(data.chunk.offsets, data.chunk.sizes, strict=True))
    return Piece(Entry(part_name(name, box, data.size), dtype, tuple(data.chunk.sizes)), item.index, box, item=item)


def value_of(planner: SavePlanner, item: WriteItem) -> Any:
    """Return a value that is no tensor: itself, where the planner has it, else what it serialised."""
    look_up = getattr(planner, "lookup_object", None)
    if look_up is not None:
        value = look_up(item.index)
        return value.value if isinstance(value, Leaf) else value
    data: Any = planner.resolve_data(item)
    data.seek(0)
    return torch.load(data, weights_only=True)


def by_file(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces of each file, of which there is one for each 4 GiB."""
    some: list[Piece] = []
    filled = 0
    for piece in pieces:
        if some and filled + piece.entry.num_bytes > _FILE_BYTES:
            yield some
            some, filled = [], 0
        some.append(piece)
        filled += piece.entry.num_bytes
    if some:
        yield some


def file_bytes(
    header: bytes, pieces: Sequence[Piece], planner: SavePlanner, digests: list[str]
) -> Iterator[memoryview]:  # fmt: skip
    """Yield a file front to back, each part good until the next; note the digests of the header and of each block."""
    gathered = memoryview(bytearray(_GATHERED_BYTES))
    filled, left = 0, BLOCK_BYTES
    with _Digesting(digests) as digesting:
        digesting.add(memoryview(header))
        digesting.end_block()
        yield memoryview(header)
        for piece in pieces:
            view = piece.view(planner)
            while view.nbytes:
                part, view = view[:left], view[left:]
                left -= part.nbytes
                if filled and (part.nbytes >= _SMALL_BYTES or filled + part.nbytes > _GATHERED_BYTES):
                    yield digesting.add(gathered[:filled])
                    digesting.wait()
                    filled = 0
                if part.nbytes >= _SMALL_BYTES:
                    yield digesting.add(part)
                else:
                    gathered[filled : filled + part.nbytes] = part
                    filled += part.nbytes
                if left == 0:
                    if filled:
                        yield digesting.add(gathered[:filled])
                        digesting.wait()
                    digesting.end_block()
                    filled, left = 0, BLOCK_BYTES
        if filled:
            yield digesting.add(gathered[:filled])
        if left < BLOCK_BYTES:
            digesting.end_block()


class _Digesting:
    """A thread that digests what is added; at the end of the context all digests are in the list that it was given.

    No executor: those take no more work when the interpreter ends, and a save shall end then too.
    """

    def __init__(self, digests: list[str]) -> None:
        self._digests = digests
        self._todo: queue.Queue[memoryview | str | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="bridge-digest", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._todo.put("end")
        self._thread.join()

    def add(self, view: memoryview) -> memoryview:
        """Digest more of a block, and return it."""
        self._todo.put(view)
        return view

    def end_block(self) -> None:
        """Note the digest of what was added since the last time."""
        self._todo.put(None)

    def wait(self) -> None:
        """Return when all that was added is digested, so that its memory may be used again."""
        self._todo.join()

    def _work(self) -> None:
        state = xxhash.xxh3_128()
        while not isinstance(view := self._todo.get(), str):
            if view is None:
                self._digests.append(state.hexdigest())
                state.reset()
            else:
                state.update(view)
            del view
            self._todo.task_done()
