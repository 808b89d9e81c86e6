"""Blocks of the files of a checkpoint, each checked when it is read, wherever its bytes go."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import xxhash

from bridge.checkpoints.layout import File, Part
from bridge.checkpoints.opened import Opened
from bridge.errors import CorruptFileError, VolumeError
from bridge.volumes.storage import Storage, with_retries

_THREADS = 4
# what one thread reads front to back before it takes the next
_RUN_BLOCKS = 8
_MOST_VIEWS = 512  # of one read: systems take 1,024

Views: TypeAlias = list[memoryview]
Read: TypeAlias = Callable[[int, Views], None]


@dataclass(frozen=True)
class Piece:
    """Where the bytes from `start` on of a file go."""

    file: str
    start: int
    target: memoryview

    @property
    def stop(self) -> int:
        """Where it ends in the file."""
        return self.start + self.target.nbytes


@dataclass(frozen=True)
class _Run:
    """Blocks of a file that follow one another, and the pieces that they fill; other bytes are only checked."""

    file: File
    numbers: range
    pieces: Sequence[Piece] = ()

    @property
    def start(self) -> int:
        return self.file.block(self.numbers.start)[0]

    @property
    def num_bytes(self) -> int:
        return self.file.block(self.numbers.stop - 1)[1] - self.start


class Blocks:
    """The blocks that hold some parts of a checkpoint; what was checked is kept as far as `max_bytes` allows."""

    def __init__(self, opened: Opened, max_bytes: int) -> None:
        self._opened = opened
        self._max_bytes = max_bytes
        assert opened.index is not None
        self._files = {file.name: file for file in opened.index.files}
        self._kept: dict[str, list[Piece]] = {}  # of each file
        self._last: tuple[_Run, memoryview] | None = None  # read anew; small parts share blocks

    def check(self, parts: Iterable[Part]) -> None:
        """Read and check the blocks that hold the parts, and the headers of their files.

        Raises:
            CorruptFileError: A block is damaged or gone.
            VolumeError: A file cannot be read.
        """
        wanted: dict[str, set[int]] = {}
        for part in parts:
            if part.file:
                wanted.setdefault(part.file, {0}).update(self._files[part.file].blocks(part.start, part.stop))
        runs, left = [], self._max_bytes
        for name, numbers in wanted.items():
            for run in _runs(self._files[name], numbers):
                pieces = []
                if run.num_bytes <= left:
                    left -= run.num_bytes
                    pieces = [Piece(name, run.start, _memory(run.num_bytes))]
                    self._kept.setdefault(name, []).extend(pieces)
                runs.append(_Run(run.file, run.numbers, pieces))
        self._read_all(runs)

    def keeps(self, part: Part) -> bool:
        """Return whether the bytes of a part were kept."""
        return self._kept_view(part) is not None

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Read and check anew the blocks that hold some pieces, which do not overlap, into these.

        Raises:
            CorruptFileError: A block is damaged or gone; some pieces are filled.
            VolumeError: A file cannot be read.
        """
        runs = []
        for name, some in itertools.groupby(sorted(pieces, key=lambda p: (p.file, p.start)), key=lambda p: p.file):
            file, of_file = self._files[name], list(some)
            numbers = {number for piece in of_file for number in file.blocks(piece.start, piece.stop)}
            runs += [_Run(file, run.numbers, of_file) for run in _runs(file, numbers)]
        self._read_all(runs)

    def tensor(self, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes of a part as a tensor of one dimension: what was kept, or read and checked anew."""
        if part.start == part.stop:
            return torch.empty(0, dtype=dtype)
        view = self._kept_view(part)
        if view is None:
            file = self._files[part.file]
            run = _Run(file, file.blocks(part.start, part.stop))
            if self._last is None or self._last[0] != run:
                fresh = _memory(run.num_bytes)
                self._read(_Run(file, run.numbers, [Piece(file.name, run.start, fresh)]))
                self._last = run, fresh
            view = self._last[1][part.start - run.start : part.stop - run.start]
        return torch.frombuffer(view, dtype=dtype)

    def _kept_view(self, part: Part) -> memoryview | None:
        for kept in self._kept.get(part.file, ()):
            if kept.start <= part.start and part.stop <= kept.stop:
                return kept.target[part.start - kept.start : part.stop - kept.start]
        return None

    def _read_all(self, runs: Iterable[_Run]) -> None:
        some = [
            _Run(run.file, run.numbers[first : first + _RUN_BLOCKS], run.pieces)
            for run in runs
            for first in range(0, len(run.numbers), _RUN_BLOCKS)
        ]
        with ThreadPoolExecutor(_THREADS, "bridge-read") as threads:
            for _ in threads.map(self._read, some):
                pass

    def _read(self, run: _Run) -> None:
        """Read and check blocks that follow one another."""
        ranges = [run.file.block(number) for number in run.numbers]
        spare = memoryview(bytearray(max(stop - start for start, stop in ranges)))
        starts = [piece.start for piece in run.pieces]
        with self._open(run.file) as read:
            for number, (start, stop) in zip(run.numbers, ranges, strict=True):
                views = list(_views(run.pieces, starts, start, stop, spare))
                state = xxhash.xxh3_128()
                position = start
                for first in range(0, len(views), _MOST_VIEWS):
                    some = views[first : first + _MOST_VIEWS]
                    read(position, some)
                    position += sum(view.nbytes for view in some)
                    for view in some:
                        state.update(view)
                if state.hexdigest() != run.file.digests[number]:
                    where = f"{self._opened.storage}/{self._opened.within(run.file.name)}"
                    raise CorruptFileError(
                        f"{where} is damaged: bytes {start} to {stop} differ from what was written.\n"
                        "  Load another checkpoint, or restore the file."
                    )

    @contextlib.contextmanager
    def _open(self, file: File) -> Iterator[Read]:
        """Give what fills memory from a place in a file on."""
        storage, name = self._opened.storage, self._opened.within(file.name)
        if storage.folder is None:
            yield partial(_read_far, storage, name)
            return
        path = storage.folder / name
        with _translated(str(path)):
            descriptor = with_retries(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            try:
                if (size := os.fstat(descriptor).st_size) != file.num_bytes:
                    raise CorruptFileError(
                        f"{path} holds {size:,} bytes; {file.num_bytes:,} were written.\n"
                        "  Load another checkpoint, or restore the file."
                    )
                yield partial(_read_near, descriptor, str(path))
            finally:
                os.close(descriptor)


def _views(
    pieces: Sequence[Piece], starts: Sequence[int], start: int, stop: int, spare: memoryview
) -> Iterator[memoryview]:
    """Yield where the bytes [start, stop) of a file go, in order: into pieces, and into `spare` what no piece wants."""
    number, first = max(0, bisect.bisect_right(starts, start) - 1), start
    while start < stop:
        while number < len(pieces) and pieces[number].stop <= start:
            number += 1
        piece = pieces[number] if number < len(pieces) else None
        if piece is not None and piece.start <= start:
            end = min(piece.stop, stop)
            yield piece.target[start - piece.start : end - piece.start]
        else:
            end = stop if piece is None else min(piece.start, stop)
            yield spare[start - first : end - first]  # all are digested when all are read
        start = end


def _read_near(descriptor: int, path: str, start: int, views: Views) -> None:
    """Fill memory from an open file."""
    left = sum(view.nbytes for view in views)
    while left:
        count = with_retries(partial(os.preadv, descriptor, views, start))
        if count == 0:
            raise CorruptFileError(
                f"{path} was cut while it was read.\n  Load another checkpoint, or restore the file."
            )
        start += count
        left -= count
        while left and count:
            taken = min(count, views[0].nbytes)
            count -= taken
            views = [views[0][taken:], *views[1:]] if taken < views[0].nbytes else views[1:]


def _read_far(storage: Storage, name: str, start: int, views: Views) -> None:
    """Fill memory from a file in a storage without a folder."""
    size = sum(view.nbytes for view in views)
    with _translated(f"{storage}/{name}"):
        data = memoryview(storage.read(name, start, start + size))
    if len(data) != size:
        raise CorruptFileError(f"{storage}/{name} is cut.\n  Load another checkpoint, or restore the file.")
    for view in views:
        view[:] = data[: view.nbytes]
        data = data[view.nbytes :]


@contextlib.contextmanager
def _translated(where: str) -> Iterator[None]:
    try:
        yield
    except (CorruptFileError, VolumeError):
        raise
    except FileNotFoundError as exc:
        raise CorruptFileError(f"{where} is gone.\n  Load another checkpoint, or restore the file.") from exc
    except OSError as exc:
        raise VolumeError(f"{where} cannot be read: {exc.strerror or exc}.\n  See that the volume answers.") from exc


def _memory(num_bytes: int) -> memoryview:
    return memoryview(torch.empty(num_bytes, dtype=torch.uint8).numpy())  # type: ignore[arg-type]


def _runs(file: File, numbers: Iterable[int]) -> Iterator[_Run]:
    """Yield the blocks of those numbers, as many as follow one another at a time."""
    first = stop = -1
    for number in sorted(numbers):
        if number != stop and stop > first:
            yield _Run(file, range(first, stop))
        first, stop = (first if number == stop else number), number + 1
    if stop > first:
        yield _Run(file, range(first, stop))
