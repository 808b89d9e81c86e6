"""A file that is read from front to back, in the state in which it was found."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bridge.errors import VolumeError
from bridge.volumes.storage import Entry, Storage, with_retries

_BLOCK = 4 << 20


class ChangedError(Exception):
    """A file is no longer what it was."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file in one state: its size and time."""

    storage: Storage
    name: str
    num_bytes: int
    mtime_ns: int | None

    def is_unchanged(self) -> bool:
        """Return whether it is still there, in that state."""
        try:
            return find_source(self.storage, self.name) == self
        except FileNotFoundError:
            return False

    def read_blocks(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes from front to back; a block is valid until the next.

        Raises:
            ChangedError: It is gone, or shorter than it was.
            VolumeError: It cannot be read.
        """
        with contextlib.ExitStack() as stack:
            read: Callable[[int, int], bytes | memoryview] = functools.partial(self.storage.read, self.name)
            if self.storage.folder is not None:
                # one open for all blocks, so that the mount sees that it is read in order
                opened = _OpenFile(f"{self.storage.folder}/{self.name}", min(_BLOCK, self.num_bytes))
                stack.callback(opened.close)
                read = opened.read
            start = 0
            while start < self.num_bytes:
                try:
                    with _naming(self.storage, self.name):
                        block = read(start, min(start + _BLOCK, self.num_bytes))
                except FileNotFoundError as exc:
                    raise ChangedError from exc
                if not block:
                    raise ChangedError
                yield block
                start += len(block)


def find_source(storage: Storage, name: str, status: Entry | None = None) -> Source:
    """Return a file in the state that `status` tells of, or in the one it has now where that is not known.

    Raises:
        FileNotFoundError: There is no such file.
        IsADirectoryError: It is a folder.
        VolumeError: It cannot be looked at, or tells no size.
    """
    if status is None or status.num_bytes is None or status.mtime_ns is None:
        with _naming(storage, name):
            status = storage.status(name)
    if status.is_folder:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), f"{storage}/{name}")
    if status.num_bytes is None:
        raise VolumeError(f"{storage}/{name} cannot be copied: {storage} does not tell its size.")
    return Source(storage, name, status.num_bytes, status.mtime_ns)


class _OpenFile:
    """Ranges of a file through one descriptor, with retries.

    After a failure the file is opened again, as a handle may be stale.
    """

    def __init__(self, path: str, block_bytes: int) -> None:
        self._path = path
        self._buffer = memoryview(bytearray(block_bytes))
        self._file: int | None = None

    def read(self, start: int, stop: int) -> memoryview:
        return with_retries(functools.partial(self._read, start, stop))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self, start: int, stop: int) -> memoryview:
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY)
            return self._buffer[: os.preadv(self._file, [self._buffer[: stop - start]], start)]
        except OSError:
            self.close()
            raise


@contextlib.contextmanager
def _naming(storage: Storage, name: str) -> Iterator[None]:
    """Let failures name the file."""
    try:
        yield
    except VolumeError:
        raise
    except FileNotFoundError as exc:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{storage}/{name}") from exc
    except OSError as exc:
        raise VolumeError(f"{storage}/{name} cannot be read: {exc.strerror}.") from exc
