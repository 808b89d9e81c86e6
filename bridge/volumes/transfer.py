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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol, TypeVar

from bridge.errors import VolumeError
from bridge.volumes.storage import Entry, Storage, is_transient, wait_for_files, with_retries

T = TypeVar("T")

_BLOCK = 1 << 20
# what one request to an object store brings
_FAR_BLOCK = 8 << 20
_BIG_FILE = 64 << 20
_PIECE = 32 << 20
# O_NONBLOCK: a pipe that took the place of a file would be waited for
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_TEMPORARY = re.compile(r"\.bridge-copy-[0-9a-f]{8}-\d+")
_NOT_BY_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
# finer than any clock that cuts times off
_ODD_TIME_NS = 1_000_000_000_123_456_789


class Kind(Enum):
    """What a listing found."""

    FILE = "file"
    FOLDER = "folder"
    LOOP = "loop"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Found:
    """A name in a folder; `entry` where the listing knows size and time, `reason` where it cannot be copied."""

    name: str
    kind: Kind
    entry: Entry | None = None
    reason: str = ""


def is_copied(size: int, mtime_ns: int | None, there: Entry, *, keeps_times: bool) -> bool:
    """Return whether what is there is the copy of a file: of the same size, and of its time or not older."""
    if there.is_folder or there.num_bytes != size or mtime_ns is None or there.mtime_ns is None:
        return False
    return there.mtime_ns == mtime_ns if keeps_times else there.mtime_ns >= mtime_ns


def pieces(size: int, piece: int = _PIECE) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges that cover [0, size) once, in order, none longer than `piece`."""
    return ((start, min(start + piece, size)) for start in range(0, size, piece))


def is_temporary(name: str) -> bool:
    """Return whether a file of this name is what a copy is writing, or what a killed one left."""
    return _TEMPORARY.fullmatch(name) is not None


def settle(call: Callable[[], T]) -> T:
    """Return what `call` returns, after retries; an error that stays is one that does not pass."""
    try:
        return with_retries(call)
    except OSError as exc:
        if is_transient(exc):
            raise VolumeError(reason_of(exc)) from exc
        raise


class Reader(Protocol):
    """A file of the source, open."""

    num_bytes: int
    mtime_ns: int | None
    mode: int
    block: int
    descriptor: int | None

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), all of them; the file must have them."""

    def check(self) -> None:
        """Check that the file is still what it was when it was opened."""

    def close(self) -> None:
        """Close it."""


class FolderSource:
    """A folder that Python opens, read through file descriptors; links are followed."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self.storage = storage
        self._root = str(folder)

    def list(self, name: str) -> Iterator[Found]:
        """Yield what a folder holds as it is listed. A listing that breaks off and may pass is begun again."""
        folder = self._path(name)
        seen: set[str] = set()
        scan: Iterator[os.DirEntry[str]] | None = None

        def advance() -> os.DirEntry[str] | None:
            nonlocal scan
            scan = os.scandir(folder) if scan is None else scan
            try:
                return next(scan, None)
            except OSError:
                scan = None
                raise

        while (entry := settle(advance)) is not None:
            if entry.name not in seen:
                seen.add(entry.name)
                yield self._found(name, entry)

    def find(self, name: str) -> Found:
        """Return what is at `name`, which is not a link to a folder above it."""
        path = self._path(name)
        try:
            mode = settle(lambda: os.stat(path)).st_mode
        except FileNotFoundError:
            return Found(name, Kind.BROKEN, reason="a link to what is not there")
        except OSError as exc:
            return Found(name, Kind.BROKEN, reason=reason_of(exc))
        if stat.S_ISDIR(mode):
            return Found(name, Kind.FOLDER)
        return Found(name, Kind.FILE) if stat.S_ISREG(mode) else Found(name, Kind.BROKEN, reason=_special(mode))

    def folder_mode(self, name: str) -> int:
        """Return the permission bits of a folder, with those that filling it needs."""
        return os.stat(self._path(name)).st_mode & 0o777 | 0o700

    def facts(self, name: str, entry: Entry | None) -> tuple[int, int | None]:
        """Return size and time of a file without opening it."""
        found = settle(lambda: os.stat(self._path(name)))
        return found.st_size, found.st_mtime_ns

    def open(self, name: str, entry: Entry | None) -> Reader:
        """Open a file."""
        path = self._path(name)
        return _DescriptorReader(settle(lambda: os.open(path, _READ_FLAGS)))

    def _found(self, folder: str, entry: os.DirEntry[str]) -> Found:
        name = join(folder, entry.name)
        if entry.is_dir(follow_symlinks=False):
            return Found(name, Kind.FOLDER)
        if entry.is_file(follow_symlinks=False):
            return Found(name, Kind.FILE)
        found = self.find(name)
        if found.kind is Kind.FOLDER and self._is_loop(folder, entry.path):
            return Found(name, Kind.LOOP, reason=f"a link to {os.path.realpath(entry.path)}, in which it lies")
        return found

    def _is_loop(self, folder: str, link: str) -> bool:
        """Return whether a link leads to a folder above it, on the way by which it was reached."""
        leads_to = os.path.realpath(link)
        parts = folder.split("/") if folder else []
        above = ("/".join(parts[:count]) for count in range(len(parts) + 1))
        return any(is_within(os.path.realpath(self._path(name)), leads_to) for name in above)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


class _DescriptorReader:
    """A file descriptor, which it closes."""

    block = _BLOCK

    def __init__(self, descriptor: int) -> None:
        self.descriptor: int = descriptor
        try:
            found = settle(lambda: os.fstat(descriptor))
            if not stat.S_ISREG(found.st_mode):
                raise VolumeError(_special(found.st_mode))
        except BaseException:
            os.close(descriptor)
            raise
        self.num_bytes: int = found.st_size
        self.mtime_ns: int | None = found.st_mtime_ns
        self.mode: int = found.st_mode & 0o777

    def read(self, start: int, stop: int) -> bytes:
        parts: list[bytes] = []
        while start < stop:
            part = settle(lambda: os.pread(self.descriptor, stop - start, start))
            if not part:
                raise _changed()
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check(self) -> None:
        found = settle(lambda: os.fstat(self.descriptor))
        if (found.st_size, found.st_mtime_ns) != (self.num_bytes, self.mtime_ns):
            raise _changed()

    def close(self) -> None:
        os.close(self.descriptor)


class StorageSource:
    """A place that is read by the calls of the seam alone."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def list(self, name: str) -> Iterator[Found]:
        """Yield what a folder holds."""
        for entry in settle(lambda: list(self.storage.list(name))):
            yield Found(join(name, entry.name), Kind.FOLDER if entry.is_folder else Kind.FILE, entry)

    def find(self, name: str) -> Found:
        """Return what is at `name`."""
        entry = settle(lambda: self.storage.status(name))
        return Found(name, Kind.FOLDER if entry.is_folder else Kind.FILE, entry)

    def folder_mode(self, name: str) -> int:
        """Return the permission bits of a folder."""
        return 0o777

    def facts(self, name: str, entry: Entry | None) -> tuple[int, int | None]:
        """Return size and time of a file, by its listing where that knows them."""
        if entry is None or entry.num_bytes is None:
            entry = settle(lambda: self.storage.status(name))
        if entry.num_bytes is None:
            raise VolumeError("the place does not tell its size")
        return entry.num_bytes, entry.mtime_ns

    def open(self, name: str, entry: Entry | None) -> Reader:
        """Open a file."""
        return _StorageReader(self.storage, name, *self.facts(name, entry))


class _StorageReader:
    """A file of a storage; there is nothing to close."""

    block = _FAR_BLOCK
    descriptor = None
    mode = 0o666

    def __init__(self, storage: Storage, name: str, num_bytes: int, mtime_ns: int | None) -> None:
        self._storage = storage
        self._name = name
        self.num_bytes: int = num_bytes
        self.mtime_ns: int | None = mtime_ns

    def read(self, start: int, stop: int) -> bytes:
        part = settle(lambda: self._storage.read(self._name, start, stop))
        if len(part) != stop - start:
            raise _changed()
        return part

    def check(self) -> None:
        found = settle(lambda: self._storage.status(self._name))
        if (found.num_bytes, found.mtime_ns) != (self.num_bytes, self.mtime_ns):
            raise _changed()

    def close(self) -> None:
        pass


class Helpers(Protocol):
    """The threads of a copy, as the writing of one file sees them."""

    def check(self) -> None:
        """Raise where the copy is to stop."""

    def share(self, items: Iterator[tuple[int, int]], call: Callable[[tuple[int, int]], None]) -> None:
        """Call with each item, in this thread and in idle ones; return when all calls have."""


class FolderTarget:
    """A folder where a file is renamed to its name when it is whole.

    What is being written is locked, so that a later copy knows what a killed one left.
    """

    def __init__(self, storage: Storage, folder: Path) -> None:
        self.storage = storage
        self._root = str(folder)
        self._stem = f".bridge-copy-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._by_kernel = hasattr(os, "copy_file_range")
        self.keeps_times = False
        self.writes_anywhere = False

    def probe(self) -> bool:
        """Find out what the folder allows; return whether files can be renamed, which all the rest relies on."""
        scratch, renamed = self._temporary(""), self._temporary("")
        descriptor = os.open(scratch, _WRITE_FLAGS)
        try:
            with os.fdopen(descriptor, "wb", buffering=0):
                _lock(descriptor)
                with contextlib.suppress(OSError):
                    os.utime(descriptor, ns=(_ODD_TIME_NS, _ODD_TIME_NS))
                    self.keeps_times = os.fstat(descriptor).st_mtime_ns == _ODD_TIME_NS
                with contextlib.suppress(OSError):
                    self.writes_anywhere = os.pwrite(descriptor, b"b", 1) == os.pwrite(descriptor, b"a", 0) == 1
            os.rename(scratch, renamed)
        except OSError as exc:
            if is_full(exc):
                raise
            return False
        finally:
            for path in (scratch, renamed):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        return True

    def entries(self, name: str) -> dict[str, Entry]:
        """Return what a folder holds, by last name. What a killed copy left there is deleted."""
        found = {entry.name: entry for entry in self.storage.list(name)}
        for left in filter(is_temporary, list(found)):
            del found[left]
            self._sweep(self._path(join(name, left)))
        return found

    def make_folder(self, name: str, mode: int) -> None:
        """Make a folder in one that is there; nothing where it is there itself."""
        with contextlib.suppress(FileExistsError):
            settle(lambda: os.mkdir(self._path(name), mode))

    def put(self, name: str, reader: Reader, helpers: Helpers, *, is_there: bool) -> None:
        """Write a file, in place of one that is there."""
        temporary = self._temporary(name)
        descriptor = os.open(temporary, _WRITE_FLAGS, reader.mode)
        try:
            _lock(descriptor)
            if reader.num_bytes >= _BIG_FILE and self.writes_anywhere:
                helpers.share(pieces(reader.num_bytes), lambda piece: self._move(reader, descriptor, *piece, helpers))
            else:
                self._move(reader, descriptor, 0, reader.num_bytes, helpers)
            reader.check()
            if os.fstat(descriptor).st_size != reader.num_bytes:
                raise _changed()
            if self.keeps_times and reader.mtime_ns is not None:
                os.utime(descriptor, ns=(reader.mtime_ns, reader.mtime_ns))
            try:
                os.replace(temporary, self._path(name))
            except FileNotFoundError:
                # another copy took it for left over, in the moment before it was locked
                raise _changed() from None
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(descriptor)

    def _move(self, reader: Reader, descriptor: int, start: int, stop: int, helpers: Helpers) -> None:
        while start < stop:
            helpers.check()
            if self._by_kernel and reader.descriptor is not None:
                try:
                    moved = os.copy_file_range(reader.descriptor, descriptor, min(_PIECE, stop - start), start, start)
                except OSError as exc:
                    if exc.errno not in _NOT_BY_KERNEL:
                        raise
                    self._by_kernel, moved = False, 0
                start += moved
                # some file systems say that there is nothing where there is something
                if moved:
                    continue
            block = reader.read(start, min(start + reader.block, stop))
            written = 0
            while written < len(block):
                written += os.pwrite(descriptor, memoryview(block)[written:], start + written)
            start += written

    def _temporary(self, name: str) -> str:
        return self._path(join(name.rpartition("/")[0], f"{self._stem}-{next(self._numbers)}"))

    def _sweep(self, path: str) -> None:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


class StorageTarget:
    """A place where a file is written once, at its name, front to back; one that is not whole is deleted."""

    keeps_times = False

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def entries(self, name: str) -> dict[str, Entry]:
        """Return what a folder holds, by last name."""
        return {entry.name: entry for entry in self.storage.list(name)}

    def make_folder(self, name: str, mode: int) -> None:
        """Make a folder."""
        self.storage.make_folder(name)

    def put(self, name: str, reader: Reader, helpers: Helpers, *, is_there: bool) -> None:
        """Write a file, in place of one that is there."""
        if is_there:
            self.storage.delete(name)
        try:
            self.storage.write(name, self._blocks(reader, helpers))
        except FileExistsError:
            # the listing did not show it yet
            self.storage.delete(name)
            self.storage.write(name, self._blocks(reader, helpers))
        try:
            reader.check()
            wait_for_files(self.storage, {name: reader.num_bytes}, timeout_s=10)
        except BaseException:
            with contextlib.suppress(OSError):
                self.storage.delete(name)
            raise

    def _blocks(self, reader: Reader, helpers: Helpers) -> Iterator[bytes]:
        for start, stop in pieces(reader.num_bytes, reader.block):
            helpers.check()
            yield reader.read(start, stop)


def join(folder: str, name: str) -> str:
    """Return the name of what is in a folder; "" is the root."""
    return f"{folder}/{name}" if folder else name


def is_within(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or lies in it, by their names."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def is_full(exc: OSError) -> bool:
    """Return whether there is no room left."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


def reason_of(exc: OSError) -> str:
    """Return why a file could not be copied."""
    return exc.strerror or str(exc)


def _changed() -> OSError:
    # an error that may pass: the file is copied again
    return OSError(errno.EAGAIN, "it changed while it was copied")


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        # some mounts know no locks; what a killed copy leaves there stays
        pass


def _special(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return f"{kinds.get(stat.S_IFMT(mode), 'not a file')}, which holds nothing to copy"
