"""How one file goes over: where it is read, where it is written, and that it is whole at its name or not there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from bridge.errors import VolumeError
from bridge.volumes.crew import Crew
from bridge.volumes.storage import Entry, Storage, is_transient, wait_for_files, with_retries

T = TypeVar("T")

_BLOCK = 1 << 20
_FAR_BLOCK = 8 << 20  # what one request to an object store brings
_BIG_FILE = 64 << 20
_PIECE = 32 << 20
_BATCH = 64
# O_NONBLOCK: a pipe that took the place of a file would be waited for
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_TEMPORARY = re.compile(r"\.bridge-copy-[0-9a-f]{8}-\d+")
_NOT_BY_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
_ODD_TIME_NS = 1_000_000_000_123_456_789  # finer than what keeps whole seconds, or microseconds
_SEEN_WITHIN_S = 10.0
_SPECIAL = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class Found(NamedTuple):
    """What is at a name in the source: a folder, a file, or, where there is a `problem`, neither.

    `entry` is what a listing knows of size and time; `is_loop` a link to a folder in which it lies.
    """

    name: str
    is_folder: bool = False
    entry: Entry | None = None
    problem: str = ""
    is_loop: bool = False


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


def join(folder: str, name: str) -> str:
    """Return the name of what is in a folder; "" is the root."""
    return f"{folder}/{name}" if folder else name


def is_within(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or lies in it, by their names."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def reason_of(exc: OSError) -> str:
    """Return why something could not be copied."""
    return exc.strerror or str(exc)


def is_full(exc: OSError) -> bool:
    """Return whether there is no room left."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


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
            raise _changed()
        return part

    def check(self) -> None:
        """Check that the file is still what it was when it was opened."""
        # once a file was read, a mount asks again for what fstat tells; for bytes beyond its end it does not
        has_grown = self.descriptor is not None and _settle(lambda: self._read(self.num_bytes, self.num_bytes + 1))
        if has_grown or (self.num_bytes > _BLOCK and self._facts_now() != (self.num_bytes, self.mtime_ns)):
            raise _changed()


class FolderSource:
    """A folder that Python opens; links are followed."""

    def __init__(self, folder: Path) -> None:
        self._root = str(folder)

    def list(self, name: str) -> Iterator[Found]:
        """Yield what a folder holds while it is listed. A listing that breaks off is begun again."""
        seen: set[str] = set()
        scan: Iterator[os.DirEntry[str]] | None = None

        def advance() -> list[os.DirEntry[str]]:
            nonlocal scan
            scan = scan or os.scandir(f"{self._root}/{name}")
            try:
                return list(itertools.islice(scan, _BATCH))
            except OSError:
                scan = None
                raise

        while entries := _settle(advance):
            for entry in entries:
                if entry.name not in seen:
                    seen.add(entry.name)
                    is_folder = entry.is_dir(follow_symlinks=False)
                    is_plain = is_folder or entry.is_file(follow_symlinks=False)
                    path = f"{name}/{entry.name}" if name else entry.name
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
        descriptor = _settle(lambda: os.open(f"{self._root}/{found.name}", _READ_FLAGS))
        try:
            status = _settle(lambda: os.fstat(descriptor))
            if not stat.S_ISREG(status.st_mode):
                raise VolumeError(_special(status.st_mode))
            # the kernel then asks a mount for twice as much at once
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            os.close(descriptor)
            raise

        def facts() -> tuple[int, int | None]:
            now = _settle(lambda: os.fstat(descriptor))
            return now.st_size, now.st_mtime_ns

        return Reader(
            (status.st_size, status.st_mtime_ns),
            lambda start, stop: os.pread(descriptor, stop - start, start),
            facts,
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


class FolderTarget:
    """A folder where a file is renamed to its name when it is whole.

    What is being written is locked, so that a later copy can tell it from what a killed one left.
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
        left, renamed = self._temporary(""), self._temporary("")
        descriptor = with_retries(lambda: os.open(left, _WRITE_FLAGS))
        try:
            with os.fdopen(descriptor, "wb", buffering=0):
                _lock(descriptor)
                with contextlib.suppress(OSError):
                    self._writes_anywhere = os.pwrite(descriptor, b"b", 1) == os.pwrite(descriptor, b"a", 0) == 1
                with contextlib.suppress(OSError):
                    os.utime(descriptor, ns=(_ODD_TIME_NS, _ODD_TIME_NS))
                    self.keeps_times = os.fstat(descriptor).st_mtime_ns == _ODD_TIME_NS
            os.rename(left, renamed)
            left = renamed
        except OSError as exc:
            if is_full(exc):
                raise
        finally:
            _delete_when_seen(left)
        return left == renamed

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
                _lock(descriptor)
                if reader.num_bytes >= _BIG_FILE and self._writes_anywhere:
                    ranges = pieces(reader.num_bytes, _PIECE)
                    crew.share(ranges, lambda piece: self._move(reader, descriptor, *piece, crew))
                else:
                    self._move(reader, descriptor, 0, reader.num_bytes, crew)
                reader.check()
                if os.fstat(descriptor).st_size != reader.num_bytes:
                    raise _changed()
                if self.keeps_times and reader.mtime_ns is not None:
                    os.utime(descriptor, ns=(reader.mtime_ns, reader.mtime_ns))
            finally:
                os.close(descriptor)
            try:
                os.replace(temporary, f"{self._root}/{name}")
            except FileNotFoundError:  # another copy took it for left over, in a moment when it was not locked
                raise _changed() from None
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
        if is_there:
            self._storage.delete(name)
        try:
            self._storage.write(name, self._blocks(reader, crew))
        except FileExistsError:  # the listing did not show it
            self._storage.delete(name)
            self._storage.write(name, self._blocks(reader, crew))
        try:
            reader.check()
            wait_for_files(self._storage, {name: reader.num_bytes}, timeout_s=_SEEN_WITHIN_S)
        except BaseException:
            with contextlib.suppress(OSError):
                self._storage.delete(name)
            raise

    def _blocks(self, reader: Reader, crew: Crew) -> Iterator[bytes]:
        start = 0
        while start < reader.num_bytes:
            crew.check()
            block = reader.read(start, min(start + reader.block, reader.num_bytes))
            yield block
            start += len(block)


def _settle(call: Callable[[], T]) -> T:
    """Return what `call` returns, after retries; an error that stays counts as one that does not pass."""
    try:
        return with_retries(call)
    except OSError as exc:
        if is_transient(exc):
            raise VolumeError(reason_of(exc)) from exc
        raise


def _changed() -> OSError:
    # transient, so that the file is copied again
    return OSError(errno.EAGAIN, "it changed while it was copied")


def _delete_when_seen(path: str) -> None:
    """Delete a file that was just made, and that may not be found yet."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while True:
        try:
            os.unlink(path)
        except FileNotFoundError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
        except OSError:
            pass  # it is of no bytes, or of two
        return


def _lock(descriptor: int) -> None:
    # some mounts know no locks; what a killed copy leaves there stays
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _special(mode: int) -> str:
    return f"{_SPECIAL.get(stat.S_IFMT(mode), 'not a file')}, which holds nothing to copy"
