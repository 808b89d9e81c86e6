"""What is read: a folder that Python opens, or a place behind the seam, whose files are read from front to back."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from bridge.errors import VolumeError
from bridge.volumes.storage import Entry, Storage, is_transient, join, reason_of, with_retries

T = TypeVar("T")

_BLOCK = 1 << 20
_FAR_BLOCK = 8 << 20  # what one request to an object store brings
# O_NONBLOCK: a pipe that took the place of a file would be waited for
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_SPECIAL = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class ChangedError(OSError):
    """A file is no longer what it was when it was opened. It counts as an error that may pass: it is read again."""

    def __init__(self) -> None:
        super().__init__(errno.EAGAIN, "it changed while it was copied")


class Found(NamedTuple):
    """What is at a name in the source: a folder, a file, or, where there is a `problem`, neither.

    `entry` is what a listing knows of size and time; `is_loop` a link to a folder in which it lies.
    """

    name: str
    is_folder: bool = False
    entry: Entry | None = None
    problem: str = ""
    is_loop: bool = False


class Reader:
    """A file of the source, open until the end of the context."""

    def __init__(
        self,
        facts: tuple[int, int | None],
        read: Callable[[int, int], bytes],
        facts_now: Callable[[], tuple[int, int | None]],
        *,
        mode: int = 0o666,
        descriptor: int | None = None,
    ) -> None:
        self.num_bytes, self.mtime_ns = facts
        self.mode = mode
        self.descriptor = descriptor
        self.block = _FAR_BLOCK if descriptor is None else _BLOCK
        self._read = read
        self._facts_now = facts_now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), or the first of them."""
        part = _settle(lambda: self._read(start, stop))
        if not part:
            raise ChangedError
        return part

    def blocks(self) -> Iterator[bytes]:
        """Yield all its bytes from front to back."""
        start = 0
        while start < self.num_bytes:
            block = self.read(start, min(start + self.block, self.num_bytes))
            yield block
            start += len(block)

    def check(self) -> None:
        """Check that the file is still what it was when it was opened."""
        # once a file was read, a mount asks again for its size and time, whatever it remembers
        if self._facts_now() != (self.num_bytes, self.mtime_ns):
            raise ChangedError


class FolderSource:
    """A folder that Python opens; links are followed."""

    def __init__(self, folder: Path) -> None:
        self._root = str(folder)

    def list(self, name: str) -> Iterator[Found]:
        """Yield what a folder holds. A listing that breaks off is begun again."""
        for entry in _settle(lambda: list(os.scandir(f"{self._root}/{name}"))):
            is_folder = entry.is_dir(follow_symlinks=False)
            is_plain = is_folder or entry.is_file(follow_symlinks=False)
            path = join(name, entry.name)
            yield Found(path, is_folder) if is_plain else self.find(path)

    def find(self, name: str) -> Found:
        """Return what is at `name`."""
        path = f"{self._root}/{name}"
        try:
            mode = _settle(lambda: os.stat(path)).st_mode
        except OSError as exc:
            problem = "a link to what is not there" if isinstance(exc, FileNotFoundError) else reason_of(exc)
            return Found(name, problem=problem)
        if stat.S_ISDIR(mode) and os.path.islink(path):
            leads_to = os.path.realpath(path)
            # every folder on the way by which the link was reached
            above = itertools.accumulate(name.split("/")[:-1], "{}/{}".format, initial=self._root)
            if any(is_within(os.path.realpath(folder), leads_to) for folder in above):
                return Found(name, problem=f"a link to {leads_to}, in which it lies", is_loop=True)
        is_file = stat.S_ISREG(mode)
        return Found(name, stat.S_ISDIR(mode), problem="" if is_file or stat.S_ISDIR(mode) else _special(mode))

    def folder_mode(self, name: str) -> int:
        """Return the permission bits of a folder, and those that filling it needs."""
        return _settle(lambda: os.stat(f"{self._root}/{name}")).st_mode & 0o777 | 0o700

    def facts(self, found: Found) -> tuple[int, int | None]:
        """Return size and time of a file without opening it."""
        status = _settle(lambda: os.stat(f"{self._root}/{found.name}"))
        return status.st_size, status.st_mtime_ns

    def open(self, found: Found) -> Reader:
        """Open a file."""
        path = f"{self._root}/{found.name}"
        descriptor = _settle(lambda: os.open(path, _READ_FLAGS))
        try:
            status = _settle(lambda: os.fstat(descriptor))
            if not stat.S_ISREG(status.st_mode):
                raise VolumeError(_special(status.st_mode))
            if hasattr(os, "posix_fadvise"):  # the kernel then asks a mount for twice as much at once
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            os.close(descriptor)
            raise

        def read(start: int, stop: int) -> bytes:
            try:
                return os.pread(descriptor, stop - start, start)
            except OSError:
                # the handle may be stale: the file, opened anew, takes its number, which other threads may be using
                fresh = os.open(path, _READ_FLAGS)
                os.dup2(fresh, descriptor, inheritable=False)
                os.close(fresh)
                raise

        return Reader(
            (status.st_size, status.st_mtime_ns),
            read,
            lambda: self.facts(found),  # by name: another file may have taken its place
            mode=status.st_mode & 0o777,
            descriptor=descriptor,
        )


class StorageSource:
    """A place that is read by the calls of the seam alone."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def list(self, name: str) -> Iterator[Found]:
        """Yield what a folder holds."""
        for entry in _settle(lambda: list(self._storage.list(name))):
            yield Found(join(name, entry.name), entry.is_folder, entry)

    def find(self, name: str) -> Found:
        """Return what is at `name`."""
        entry = _settle(lambda: self._storage.status(name))
        return Found(name, entry.is_folder, entry)

    def folder_mode(self, name: str) -> int:
        """Return the permission bits of a folder."""
        return 0o777

    def facts(self, found: Found) -> tuple[int, int | None]:
        """Return size and time of a file, by its listing where that knows the size."""
        entry = found.entry
        if entry is None or entry.num_bytes is None:
            entry = _settle(lambda: self._storage.status(found.name))
        if entry.num_bytes is None:
            raise VolumeError("its size is not known")
        return entry.num_bytes, entry.mtime_ns

    def open(self, found: Found) -> Reader:
        """Return what reads a file."""
        read = partial(self._storage.read, found.name)
        return Reader(self.facts(found), read, lambda: self.facts(Found(found.name)))


def open_source(storage: Storage) -> FolderSource | StorageSource:
    """Return what reads the files of a storage."""
    return StorageSource(storage) if storage.folder is None else FolderSource(storage.folder)


def is_within(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or lies in it, by their names."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _settle(call: Callable[[], T]) -> T:
    """Return what `call` returns, after retries; an error that stays counts as one that does not pass."""
    try:
        return with_retries(call)
    except OSError as exc:
        if is_transient(exc):
            raise VolumeError(reason_of(exc)) from exc
        raise


def _special(mode: int) -> str:
    return f"{_SPECIAL.get(stat.S_IFMT(mode), 'not a file')}, which holds nothing to copy"
