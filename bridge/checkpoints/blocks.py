"""Blocks of the files of a checkpoint, each checked when it is read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from bridge.checkpoints.layout import File, Part
from bridge.checkpoints.opened import Opened
from bridge.errors import CorruptFileError, VolumeError
from bridge.volumes.digest import digest_bytes, read_range
from bridge.volumes.storage import Storage, with_retries

_THREADS = 4
# what one thread reads front to back before it takes the next
_RUN_BLOCKS = 8


@dataclass(frozen=True)
class _Run:
    """Blocks [first, stop) of a file, which follow one another."""

    file: File
    first: int
    stop: int

    @property
    def start(self) -> int:
        return self.file.block(self.first)[0]

    @property
    def num_bytes(self) -> int:
        return self.file.block(self.stop - 1)[1] - self.start


class Blocks:
    """The blocks that hold some parts of a checkpoint; what was checked is kept as far as `max_bytes` allows."""

    def __init__(self, opened: Opened, max_bytes: int) -> None:
        self._opened = opened
        self._max_bytes = max_bytes
        assert opened.index is not None
        self._files = {file.name: file for file in opened.index.files}
        self._kept: dict[str, list[tuple[int, torch.Tensor]]] = {}  # of each file, by where it starts
        self._last: tuple[_Run, torch.Tensor] | None = None  # read anew; small parts share blocks

    def check(self, parts: Iterable[Part]) -> None:
        """Read and check the blocks that hold the parts, and the headers of their files.

        Raises:
            CorruptFileError: A block is damaged or gone.
            VolumeError: A file cannot be read.
        """
        wanted: dict[str, set[int]] = {}
        for part in parts:
            if part.file:
                numbers = self._files[part.file].blocks(part.start, part.stop)
                wanted.setdefault(part.file, {0}).update(numbers)
        runs = [run for name, numbers in wanted.items() for run in _runs(self._files[name], numbers)]
        left, targets = self._max_bytes, []
        for run in runs:
            is_kept = run.num_bytes <= left
            left -= run.num_bytes if is_kept else 0
            targets.append(torch.empty(run.num_bytes, dtype=torch.uint8) if is_kept else None)
            if (target := targets[-1]) is not None:
                self._kept.setdefault(run.file.name, []).append((run.start, target))
        with ThreadPoolExecutor(_THREADS, "bridge-read") as threads:
            work = [
                (run, target, first)
                for run, target in zip(runs, targets, strict=True)
                for first in range(run.first, run.stop, _RUN_BLOCKS)
            ]
            for _ in threads.map(self._read_some, work):
                pass

    def tensor(self, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes of a part as a tensor of one dimension: what was kept, or read and checked anew."""
        if part.start == part.stop:
            return torch.empty(0, dtype=dtype)
        for start, kept in self._kept.get(part.file, ()):
            if start <= part.start and part.stop <= start + kept.nbytes:
                return kept[part.start - start : part.stop - start].view(dtype)
        file = self._files[part.file]
        numbers = file.blocks(part.start, part.stop)
        run = _Run(file, numbers.start, numbers.stop)
        if self._last is None or self._last[0] != run:
            fresh = torch.empty(run.num_bytes, dtype=torch.uint8)
            self._read(run, fresh)
            self._last = run, fresh
        fresh = self._last[1]
        return fresh[part.start - run.start : part.stop - run.start].view(dtype)

    def _read_some(self, work: tuple[_Run, torch.Tensor | None, int]) -> None:
        run, target, first = work
        some = _Run(run.file, first, min(first + _RUN_BLOCKS, run.stop))
        start = some.start - run.start
        self._read(some, None if target is None else target[start : start + some.num_bytes])

    def _read(self, run: _Run, target: torch.Tensor | None) -> None:
        """Read and check blocks that follow one another, into `target` if there is one."""
        ranges = [run.file.block(number) for number in range(run.first, run.stop)]
        largest = max(stop - start for start, stop in ranges)
        kept = torch.empty(largest, dtype=torch.uint8) if target is None else target
        view = memoryview(kept.numpy())  # type: ignore[arg-type]
        with self._open(run.file) as read:
            for (start, stop), digest in zip(ranges, run.file.digests[run.first : run.stop], strict=True):
                first = 0 if target is None else start - run.start
                read(start, view[first : first + stop - start], digest)

    @contextlib.contextmanager
    def _open(self, file: File) -> Iterator[Callable[[int, memoryview, str], None]]:
        """Give what reads a range of a file and checks it."""
        storage, name = self._opened.storage, self._opened.within(file.name)
        if storage.folder is None:
            yield lambda start, target, digest: _read_far(storage, name, start, target, digest)
            return
        path = storage.folder / name
        try:
            descriptor = with_retries(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError as exc:
            raise CorruptFileError(f"{path} is gone.\n  Load another checkpoint, or restore the file.") from exc
        except OSError as exc:
            raise VolumeError(f"{path} cannot be read: {exc.strerror}.\n  See that the volume answers.") from exc
        try:
            if (size := os.fstat(descriptor).st_size) != file.num_bytes:
                raise CorruptFileError(
                    f"{path} holds {size:,} bytes; {file.num_bytes:,} were written.\n"
                    "  Load another checkpoint, or restore the file."
                )
            yield lambda start, target, digest: read_range(descriptor, path, start, target, digest)
        finally:
            os.close(descriptor)


def _read_far(storage: Storage, name: str, start: int, target: memoryview, digest: str) -> None:
    try:
        data = storage.read(name, start, start + len(target))
    except FileNotFoundError as exc:
        raise CorruptFileError(f"{storage}/{name} is gone.\n  Load another checkpoint, or restore the file.") from exc
    if len(data) != len(target) or digest_bytes(data) != digest:
        raise CorruptFileError(
            f"{storage}/{name} is damaged: bytes {start} to {start + len(target)} differ from what was written.\n"
            "  Load another checkpoint, or restore the file."
        )
    target[:] = data


def _runs(file: File, numbers: Iterable[int]) -> Iterator[_Run]:
    """Yield the blocks of those numbers, as many as follow one another at a time."""
    first = stop = -1
    for number in sorted(numbers):
        if number != stop and stop > first:
            yield _Run(file, first, stop)
        first, stop = (first if number == stop else number), number + 1
    if stop > first:
        yield _Run(file, first, stop)
