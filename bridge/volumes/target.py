"""Where files are written: whole at their names, or not there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bridge.volumes.crew import Crew
from bridge.volumes.source import ChangedError, Reader
from bridge.volumes.storage import Entry, Storage, is_full, join, wait_for_files, with_retries
from bridge.volumes.stores import take_back

_SOON = 1 << 20  # so small a file is written at once
_BIG_FILE = 64 << 20
_PIECE = 32 << 20
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_TEMPORARY = re.compile(r"\.bridge-copy-[0-9a-f]{8}-\d+")
_NOT_BY_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
_ODD_TIME_NS = 1_000_000_000_123_456_789  # finer than what keeps whole seconds, or microseconds
_SEEN_WITHIN_S = 10.0
_PROBES = 5


def is_copied(size: int, mtime_ns: int | None, there: Entry, *, keeps_times: bool) -> bool:
    """Return whether what is there is the copy of a file: of its size, and of its time or, without that, not older."""
    if there.is_folder or there.num_bytes != size or mtime_ns is None or there.mtime_ns is None:
        return False
    return there.mtime_ns == mtime_ns if keeps_times else there.mtime_ns >= mtime_ns


def pieces(size: int, piece: int) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges that cover [0, size) once, in order, none longer than `piece`."""
    return ((start, min(start + piece, size)) for start in range(0, size, piece))


def is_temporary(name: str) -> bool:
    """Return whether a file of this name is what a copy is writing, or what a killed one left."""
    return _TEMPORARY.fullmatch(name) is not None


class FolderTarget:
    """A folder where a file is renamed to its name when it is whole.

    What takes a while to be written is locked, so that a later copy can tell it from what a killed one left. The rest
    is written again should another copy take it for that.
    """

    def __init__(self, folder: Path) -> None:
        self._root = str(folder)
        self._stem = f".bridge-copy-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._by_kernel = hasattr(os, "copy_file_range")
        self.keeps_times = False
        self._writes_anywhere = False

    def probe(self) -> bool:
        """Find out what the folder allows; return whether files can be renamed, without which it is not to be used.

        Raises:
            OSError: No file can be made.
        """
        for _ in range(_PROBES):
            left, renamed, is_taken = self._temporary(""), self._temporary(""), False
            descriptor = with_retries(partial(os.open, left, _WRITE_FLAGS))
            try:
                with os.fdopen(descriptor, "wb", buffering=0):
                    _lock(descriptor)
                    with contextlib.suppress(OSError):
                        self._writes_anywhere = os.pwrite(descriptor, b"b", 1) == os.pwrite(descriptor, b"a", 0) == 1
                    with contextlib.suppress(OSError):
                        os.utime(descriptor, ns=(_ODD_TIME_NS, _ODD_TIME_NS))
                        self.keeps_times = os.fstat(descriptor).st_mtime_ns == _ODD_TIME_NS
                    try:
                        os.rename(left, renamed)
                    except FileNotFoundError:
                        is_taken = not os.fstat(descriptor).st_nlink  # for left over, before it was locked
                        raise
                    left = renamed
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(left)
                    return True
            except OSError as exc:
                if is_taken and isinstance(exc, FileNotFoundError):
                    continue
                take_back(Path(left))
                if is_full(exc):
                    raise
                return left == renamed
        return False

    def make_folder(self, name: str, mode: int) -> None:
        """Make a folder in one that is there; nothing where it is there itself."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{self._root}/{name}", mode)

    def sync(self) -> None:
        """Return when what was written is on the disk, should the power fail."""
        os.sync()

    def sweep(self, name: str) -> None:
        """Delete a temporary file, unless another copy is writing it."""
        with contextlib.suppress(OSError), open(f"{self._root}/{name}", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(file.name)

    def put(self, name: str, reader: Reader, crew: Crew, *, is_there: bool) -> None:
        """Write a file, in place of one that is there."""
        temporary = self._temporary(name)
        descriptor = os.open(temporary, _WRITE_FLAGS, reader.mode)
        try:
            try:
                if reader.num_bytes > _SOON:
                    _lock(descriptor)
                if reader.num_bytes >= _BIG_FILE and self._writes_anywhere:
                    ranges = pieces(reader.num_bytes, _PIECE)
                    crew.share(ranges, lambda piece: self._move(reader, descriptor, *piece, crew))
                else:
                    self._move(reader, descriptor, 0, reader.num_bytes, crew)
                reader.check()
                if self.keeps_times and reader.mtime_ns is not None:
                    os.utime(descriptor, ns=(reader.mtime_ns, reader.mtime_ns))
            finally:
                os.close(descriptor)
            try:
                os.replace(temporary, f"{self._root}/{name}")
            except FileNotFoundError:  # another copy took it for left over
                raise ChangedError from None
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _move(self, reader: Reader, descriptor: int, start: int, stop: int, crew: Crew) -> None:
        while start < stop:
            crew.check()
            if self._by_kernel and reader.descriptor is not None:
                try:
                    moved = os.copy_file_range(reader.descriptor, descriptor, min(_PIECE, stop - start), start, start)
                except OSError as exc:
                    if exc.errno not in _NOT_BY_KERNEL:
                        raise
                    self._by_kernel, moved = False, 0
                start += moved
                if moved:  # else there may be bytes all the same: some file systems answer so
                    continue
            start += os.pwrite(descriptor, reader.read(start, min(start + reader.block, stop)), start)

    def _temporary(self, name: str) -> str:
        return f"{self._root}/{join(name.rpartition('/')[0], self._stem)}-{next(self._numbers)}"


class StorageTarget:
    """A place where a file is written once, at its name, front to back; one that is not whole is deleted."""

    keeps_times = False

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def make_folder(self, name: str, mode: int) -> None:
        """Make a folder."""
        self._storage.make_folder(name)

    def sync(self) -> None:
        """Do nothing: each file was flushed."""

    def sweep(self, name: str) -> None:
        """Do nothing: there are no temporary files here."""

    def put(self, name: str, reader: Reader, crew: Crew, *, is_there: bool) -> None:
        """Write a file, in place of one that is there."""
        blocks = self._blocks(reader, crew)
        # one is read at once: what cannot be read shall not cost the copy that is there
        blocks = itertools.chain(list(itertools.islice(blocks, 1)), blocks)
        if is_there:
            self._storage.delete(name)
        try:
            self._storage.write(name, blocks)
        except FileExistsError:  # it was not seen yet; no block is gone
            self._storage.delete(name)
            self._storage.write(name, blocks)
        (written,) = wait_for_files(self._storage, {name: reader.num_bytes}, timeout_s=_SEEN_WITHIN_S)
        try:
            # after its time was set: what is written to the source from now on is newer
            reader.check()
        except BaseException:
            with contextlib.suppress(OSError):
                if self._storage.status(name) == written:  # else another copy wrote it
                    self._storage.delete(name)
            raise

    def _blocks(self, reader: Reader, crew: Crew) -> Iterator[bytes]:
        for block in reader.blocks():
            crew.check()
            yield block


def _lock(descriptor: int) -> None:
    # some mounts know no locks; what a killed copy leaves there stays
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
