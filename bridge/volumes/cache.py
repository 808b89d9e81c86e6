"""Local copies of files on volumes, one for each node, however many processes ask.

An entry is a folder `files/<digest>.<bytes>`. It holds a record, which says what file in what state it is a copy of,
and the copy itself, under its file's own name in a folder named as the file's own: code that takes a label from the one
and a suffix from the other goes on to work. The record is written last. An entry is believed where its record has the
digest that the folder is named for and the copy has all its bytes; anything else is garbage. Files are only created,
written once and deleted, so that a file system that refuses all else can hold a cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import json
import math
import os
import secrets
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bridge.display import format_bytes
from bridge.errors import VolumeError
from bridge.volumes.digest import digest_bytes
from bridge.volumes.pins import Pin, Pins, StalledError, hold_folder
from bridge.volumes.source import ChangedError, Found, open_source
from bridge.volumes.storage import Entry, Storage

_RECORD = "entry.json"
_FULL_S = 10.0  # how long a full cache is left alone
_TRIES = 5  # how often a file may change while it is copied
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file's copy in the cache."""

    source: str
    """The address of the file."""
    num_bytes: int
    last_used_ns: int
    """Nanoseconds since 1970 when it was last handed out; when it was copied, where the disk keeps no times."""
    path: Path


@dataclass(frozen=True, slots=True)
class Cleared:
    """What `FileCache.clear` did."""

    num_files: int
    """How many copies were deleted, also such as were never completed."""
    num_bytes: int
    kept: tuple[CachedFile, ...]
    """Copies that are in use."""


class FileCache:
    """A folder of copies, shared by all processes that name it. May be used by several threads, forked and pickled.

    Where a copy cannot be kept, the file itself is handed out, and one warning says why.

    Args:
        folder: Made where it is missing. The copies in it are for this user alone.
        max_bytes: The most that the copies may hold; the least recently used make room. Processes that copy at the same
            moment may pass it by a few percent.
        min_free_bytes: What stays free on the disk.
    """

    def __init__(self, folder: Path, *, max_bytes: int, min_free_bytes: int = 1 << 30) -> None:
        self.folder = folder.absolute()
        self.max_bytes = max_bytes
        self.min_free_bytes = min_free_bytes
        self._files = f"{self.folder}/files"
        self._pins = f"{self.folder}/pins"
        self._ledgers: dict[int, _Ledger] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        settings = {"max_bytes": self.max_bytes, "min_free_bytes": self.min_free_bytes}
        return functools.partial(FileCache, self.folder, **settings), ()

    def epoch(self) -> Epoch:
        """Return what files are fetched through: `with cache.epoch() as epoch: path = epoch.fetch(...)`."""
        return Epoch(self)

    def entries(self) -> Iterator[CachedFile]:
        """Yield the files of which there is a whole copy, in no order."""
        for key, _ in self._list():
            with contextlib.suppress(OSError, ValueError, TypeError):
                copy = _Copy(self._files, *json.loads(_read(f"{self._files}/{key}/{_RECORD}")))
                # equal also means that no byte of the record is damaged, since its digest is in the name
                if copy.key == key and copy.is_whole():
                    used = os.stat(copy.record_path).st_mtime_ns
                    yield CachedFile(copy.address, copy.num_bytes, used, Path(copy.path))

    def clear(self) -> Cleared:
        """Delete all that is not in use.

        Raises:
            OSError: The folder cannot be read or written.
        """
        pins = Pins(self._pins)
        freed = [size for key, size in self._list() if self._delete(key, pins)]
        return Cleared(len(freed), sum(freed), tuple(self.entries()))

    def _fetch(self, copy: _Copy, source: _Source, pin: Pin) -> None:
        """Hold a whole copy of a file, made if it is not there.

        Raises:
            _UnservedError: The cache cannot keep it.
            StalledError: Another process copies it, and stands still.
            ChangedError: The file is no longer in that state.
            VolumeError: The file cannot be read.
        """
        # OSError: there is no such entry, or it cannot be pinned, for a reason that shows below
        with contextlib.suppress(OSError), hold_folder(copy.folder, fcntl.LOCK_SH, grows=copy.path):
            if copy.is_whole():
                pin.hold(copy.key)
                with contextlib.suppress(OSError):
                    os.utime(copy.record_path)
                return
        if copy.num_bytes > self.max_bytes:
            raise _UnservedError(
                f"{copy.address} takes {format_bytes(copy.num_bytes)}, and max_bytes is {format_bytes(self.max_bytes)}"
            )
        ledger = self._ledger()
        for is_last in (False, True):
            if time.monotonic() < ledger.full_until:
                raise _UnservedError(self._fullness())
            try:
                with hold_folder(copy.folder, fcntl.LOCK_EX, grows=copy.path, make=True):
                    if not copy.is_whole():
                        self._fill(copy, source)
                    pin.hold(copy.key)
                return
            except (VolumeError, ChangedError):
                raise
            except OSError as exc:
                if exc.errno not in _NO_ROOM:
                    raise _UnservedError(f"it cannot be used: {exc.strerror}") from exc
                with ledger.lock:
                    if is_last:
                        ledger.full_until = time.monotonic() + _FULL_S
                        raise _UnservedError(self._fullness()) from exc
                    # the disk has less room than it said
                    self._evict(copy.num_bytes, spare=ledger.total // 10)

    def _fill(self, copy: _Copy, source: _Source) -> None:
        _empty(copy.folder)  # of what a killed process left
        try:
            self._make_room(copy.num_bytes)
            os.mkdir(os.path.dirname(copy.path))
            with open(copy.path, "xb", buffering=0) as file:
                for block in source.blocks():
                    _write(file, block)
                    # others may fill the disk at the same time
                    if self._free_bytes() < self.min_free_bytes:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Not flushed to the disk. After a crash of the machine, a copy whose bytes were lost is too short, as file
            # systems note the length after the bytes; they would not if the room were allocated beforehand.
            with open(copy.record_path, "xb", buffering=0) as file:
                _write(file, copy.record)
        except BaseException:
            with contextlib.suppress(OSError):
                _empty(copy.folder)
                os.rmdir(copy.folder)
            raise

    def _make_room(self, num_bytes: int) -> None:
        """Return when there is room for a copy whose folder is there, so that scans count it.

        Raises:
            _UnservedError: All that could make room is in use.
        """
        ledger = self._ledger()
        with ledger.lock:
            ledger.total += num_bytes
            ledger.unscanned += num_bytes
            # so 64 processes that copy at the same time do not pass max_bytes
            if 64 * ledger.unscanned >= ledger.room:
                self._scan(ledger)
            missing = self._missing(ledger, num_bytes)
            if missing > 0:
                self._evict(missing, spare=ledger.total // 10)
                self._scan(ledger)
                if self._missing(ledger, num_bytes) > 0:
                    ledger.full_until = time.monotonic() + _FULL_S
                    raise _UnservedError(self._fullness())

    def _scan(self, ledger: _Ledger) -> None:
        ledger.total = sum(size for _, size in self._list())
        ledger.room = max(0, self.max_bytes - ledger.total)
        ledger.unscanned = 0

    def _missing(self, ledger: _Ledger, num_bytes: int) -> float:
        return max(ledger.total - self.max_bytes, num_bytes + self.min_free_bytes - self._free_bytes())

    def _free_bytes(self) -> float:
        disk = os.statvfs(self._files)
        # some mounts tell nothing, in zeros
        return disk.f_bavail * disk.f_frsize if disk.f_blocks else math.inf

    def _evict(self, num_bytes: float, *, spare: int) -> None:
        """Delete the longest unused: at least `num_bytes` where so much is not in use, and then up to `spare` more."""
        found = []
        for key, size in self._list():
            try:
                used = os.stat(f"{self._files}/{key}/{_RECORD}").st_mtime_ns
            except OSError:
                used = 0  # never completed; or being copied, and so locked
            found.append((used, size, key))
        pins, freed = Pins(self._pins), 0
        pins.refresh()
        for _, size, key in sorted(found):
            if freed >= num_bytes and freed + size > num_bytes + spare:
                break
            if key not in pins.keys and self._delete(key, pins):
                freed += size

    def _delete(self, key: str, pins: Pins) -> bool:
        """Delete an entry; return False where it is in use or cannot be deleted.

        What was handed out is never deleted: whoever hands it out writes its key to a pin while he holds the entry's
        lock, with others or alone, and here the pins are read under that lock, held alone. If the pin came first, it is
        read here; if this came first, there is no entry to be handed out.
        """
        folder = f"{self._files}/{key}"
        try:
            with hold_folder(folder, fcntl.LOCK_EX):
                pins.refresh()
                if key in pins.keys:
                    return False
                _empty(folder)
                os.rmdir(folder)
        except FileNotFoundError:
            return True  # another process was faster
        except OSError:
            return False
        return True

    def _list(self) -> Iterator[tuple[str, int]]:
        """Yield key and size of what is there, complete or not."""
        with contextlib.suppress(FileNotFoundError):
            for key in os.listdir(self._files):
                _, _, size = key.partition(".")
                if size.isdecimal():
                    yield key, int(size)

    def _ledger(self) -> _Ledger:
        # by process: a lock that another thread holds at a fork stays locked in the child
        return self._ledgers.get(os.getpid()) or self._ledgers.setdefault(os.getpid(), _Ledger())

    def _fullness(self) -> str:
        free = self._free_bytes()
        return (
            f"all that it holds is in use; max_bytes is {format_bytes(self.max_bytes)}, and "
            f"{format_bytes(self.min_free_bytes)} of its disk are kept free"
            + (f" ({format_bytes(free)} are)" if free < math.inf else "")
        )

    def _bypass(self, copy: _Copy, source: _Source, reason: str) -> Path:
        """Return the file itself."""
        advice = (
            "\n  Raise cache_max_bytes (BRIDGE_CACHE_MAX_BYTES), or let cache_dir (BRIDGE_CACHE_DIR) be a folder on a "
            "disk with more room."
        )
        if source.storage.folder is None:
            raise VolumeError(
                f"{copy.address} ({format_bytes(copy.num_bytes)}) cannot be copied to the cache {self.folder}: "
                f"{reason}.{advice}"
            )
        ledger = self._ledger()
        if not ledger.has_warned:
            ledger.has_warned = True
            warnings.warn(
                f"files are read from {source.storage}, not from the cache {self.folder}: {reason}.{advice}",
                stacklevel=3,
            )
        return source.storage.folder / source.name


class Epoch:
    """Files that stay in the cache until this is closed. May be used by several threads.

    Also in processes that are forked or that it is pickled to, such as workers of a DataLoader: each then holds what it
    fetched itself, until it closes it or ends. `close` concerns the process that calls it.
    """

    def __init__(self, cache: FileCache) -> None:
        self._cache = cache
        self._pins: dict[int, Pin] = {}
        self._token = secrets.token_hex(8)

    def __reduce__(self) -> tuple[Any, ...]:
        return Epoch, (self._cache,)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fetch(self, storage: Storage, name: str, status: Entry | None = None) -> Path:
        """Return where to read a file: a copy of it in the cache, or the file itself where the cache cannot keep it.

        A copy has the file's own name and lies in a folder named as the file's own.

        Args:
            storage: Where the file is.
            name: Its name there.
            status: What a listing told of it. None: looked up.

        Raises:
            FileNotFoundError: There is no such file.
            IsADirectoryError: It is a folder.
            VolumeError: It cannot be read, changes all the time, or cannot be kept and has no path of its own.
        """
        for _ in range(_TRIES):
            source = _Source.find(storage, name, status)
            # without a time a change might not show: such a copy is good for one epoch
            state = self._token if source.mtime_ns is None else source.mtime_ns
            copy = _Copy(self._cache._files, f"{storage}/{name}", source.num_bytes, state)
            try:
                self._cache._fetch(copy, source, self._pin())
            except ChangedError:
                status = None
            except (_UnservedError, StalledError) as exc:
                return self._cache._bypass(copy, source, str(exc))
            else:
                return Path(copy.path)
        raise VolumeError(
            f"{storage}/{name} changed {_TRIES} times while it was copied.\n"
            "  Fetch it when nobody writes to it, or copy it elsewhere first."
        )

    def close(self) -> None:
        """Let the files go that this process fetched."""
        self._pin().close()

    def _pin(self) -> Pin:
        return self._pins.get(os.getpid()) or self._pins.setdefault(os.getpid(), Pin(self._cache._pins))


class _Ledger:
    """What one process knows of the cache without looking."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.total = 0  # bytes in the cache, as far as known
        self.room = 0  # up to max_bytes, at the last scan
        self.unscanned = 0  # bytes that this process copied since
        self.full_until = 0.0
        self.has_warned = False


class _UnservedError(Exception):
    """The cache cannot keep a file; says why."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A file in one state: its size and time."""

    storage: Storage
    name: str
    num_bytes: int
    mtime_ns: int | None

    @classmethod
    def find(cls, storage: Storage, name: str, status: Entry | None = None) -> _Source:
        """Return a file in the state that `status` tells of, or in the one it has now where that is not known."""
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"name is {name!r}; give the name of a file in {storage}.")
        if status is None or status.num_bytes is None or status.mtime_ns is None:
            with _naming(storage, name):
                status = storage.status(name)
        if status.is_folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), f"{storage}/{name}")
        if status.num_bytes is None:
            raise VolumeError(f"{storage}/{name} cannot be copied: {storage} does not tell its size.")
        return cls(storage, name, status.num_bytes, status.mtime_ns)

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes from front to back.

        Raises:
            ChangedError: The file is gone, or no longer in that state.
            VolumeError: It cannot be read.
        """
        try:
            status = Entry(self.name.rpartition("/")[2], False, self.num_bytes, self.mtime_ns)
            with (
                _naming(self.storage, self.name),
                open_source(self.storage).open(Found(self.name, entry=status)) as file,
            ):
                if file.num_bytes != self.num_bytes or self.mtime_ns not in (None, file.mtime_ns):
                    raise ChangedError
                yield from file.blocks()
            if self.find(self.storage, self.name) != self:
                raise ChangedError
        except (FileNotFoundError, IsADirectoryError) as exc:
            raise ChangedError from exc


@contextlib.contextmanager
def _naming(storage: Storage, name: str) -> Iterator[None]:
    """Let failures name the file."""
    try:
        yield
    except ChangedError:
        raise
    except FileNotFoundError as exc:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{storage}/{name}") from exc
    except OSError as exc:
        raise VolumeError(f"{storage}/{name} cannot be read: {exc.strerror or exc}.") from exc


class _Copy:
    """Where the copy belongs of one file in one state, which is its time or what else tells it from others."""

    def __init__(self, files: str, address: str, num_bytes: int, state: int | str) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.record = json.dumps([address, num_bytes, state]).encode()
        self.key = f"{digest_bytes(self.record)}.{num_bytes}"
        self.folder = f"{files}/{self.key}"
        self.record_path = f"{self.folder}/{_RECORD}"
        folder, _, name = address.rpartition("/")
        parent = folder.rpartition("/")[2]
        self.path = f"{self.folder}/{'_' if parent in ('', '.', '..', _RECORD) else parent}/{name}"

    def is_whole(self) -> bool:
        try:
            return _read(self.record_path) == self.record and os.stat(self.path).st_size == self.num_bytes
        except (FileNotFoundError, NotADirectoryError):
            return False


def _empty(folder: str) -> None:
    """Delete what an entry holds: the record first, without which it counts for nothing."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{folder}/{_RECORD}")
    for name in os.listdir(folder):
        shutil.rmtree(f"{folder}/{name}")


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16)
    finally:
        os.close(file)


def _write(file: io.FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
