"""Local copies of files on volumes, one for each node, however many processes ask.

An entry is a folder `files/<digest>.<bytes>`, named for what it holds: the digest of its record, which says of what file
and in what state it is a copy. It holds that record, written last, and the copy under the name of its file in a folder
named as the file's own, so that code finds the label and the suffix where it looks for them. An entry is believed where
the record is what the name says and the copy has all its bytes. Files are only created, written once and deleted;
file systems that refuse all else can hold the cache.

Whoever writes or deletes an entry holds the lock of its folder alone. Whoever hands it out holds the lock too, with others,
while it checks that the entry is there and writes its key to its pin; whoever deletes it reads the pins after it has the
lock. So one of two comes first: the pin, which the deletion then sees, or the deletion, after which the entry isn't there
to be handed out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
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
from bridge.volumes.pins import Pin, Pins, is_still_at, locked
from bridge.volumes.storage import Entry, Storage, with_retries

_RECORD = "entry.json"
_BLOCK = 4 << 20
_LONGEST_POLL_S = 0.02
_STALLED_S = 60.0  # how long a copy that another makes may stand still
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
                record = _read_record(f"{self._files}/{key}")
                copy = _Copy(self._files, *json.loads(record))
                # equal also means that no byte of the record is damaged, since its digest is in the name
                if copy.key == key and copy.is_whole():
                    used = os.stat(f"{copy.folder}/{_RECORD}").st_mtime_ns
                    yield CachedFile(copy.address, copy.num_bytes, used, Path(copy.path))

    def clear(self) -> Cleared:
        """Delete all that is not in use.

        Raises:
            OSError: The folder cannot be read or written.
        """
        pins = Pins(self._pins)
        freed = [size for key, size in self._list() if self._delete(key, pins)]
        return Cleared(len(freed), sum(freed), tuple(self.entries()))

    def _fetch(self, copy: _Copy, storage: Storage, name: str, pin: Pin) -> None:
        """Hold a whole copy of a file, made if it is not there.

        Raises:
            _UnservedError: The cache cannot keep it.
            _ChangedError: The file is not in the state to be copied.
            VolumeError: The file cannot be read.
        """
        # OSError: there is no such entry, or it can't be pinned; why not shows below
        with contextlib.suppress(OSError), _hold_lock(copy.folder, fcntl.LOCK_SH, grows=copy.path):
            if copy.is_whole():
                pin.hold(copy.key)
                with contextlib.suppress(OSError):
                    os.utime(f"{copy.folder}/{_RECORD}")
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
                with _hold_lock(copy.folder, fcntl.LOCK_EX, grows=copy.path, make=True):
                    if not copy.is_whole():
                        self._fill(copy, storage, name)
                    pin.hold(copy.key)
                return
            except VolumeError:
                raise
            except OSError as exc:
                if exc.errno not in _NO_ROOM:
                    raise _UnservedError(f"it cannot be used: {exc.strerror}") from exc
                if is_last:
                    raise _UnservedError(self._fullness()) from exc
            # the disk has less room than it said
            with ledger.lock:
                self._evict(copy.num_bytes)

    def _fill(self, copy: _Copy, storage: Storage, name: str) -> None:
        _empty(copy.folder)  # of what a killed process left
        try:
            self._make_room(copy.num_bytes)
            os.mkdir(os.path.dirname(copy.path))
            with open(copy.path, "xb", buffering=0) as file:
                for block in _read_blocks(storage, name, copy):
                    _write(file.fileno(), block)
                    # others may fill the disk at the same time
                    if self._missing_on_disk(0) > 0:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            now = read_status(storage, name)
            if (now.num_bytes, now.mtime_ns) != copy.state:
                raise _ChangedError
            # not flushed to the disk: after a crash of the machine a copy whose bytes were not written is too short,
            # as long as the disk is not told its length beforehand
            with open(f"{copy.folder}/{_RECORD}", "xb", buffering=0) as file:
                _write(file.fileno(), copy.record)
        except BaseException:
            with contextlib.suppress(OSError):
                _empty(copy.folder)
                os.rmdir(copy.folder)
            raise

    def _make_room(self, num_bytes: int) -> None:
        """Return when there is room for a copy whose folder is there, and so is already counted by a scan.

        Raises:
            _UnservedError: There is none, since all copies are in use.
        """
        ledger = self._ledger()
        with ledger.lock:
            ledger.total += num_bytes
            ledger.unscanned += num_bytes
            # 64 processes that copy at the same time do not pass max_bytes
            if 64 * ledger.unscanned >= ledger.room:
                self._scan(ledger)
            missing = self._missing(ledger, num_bytes)
            if missing <= 0:
                return
            self._evict(missing, spare=ledger.total // 10)
            self._scan(ledger)
            if self._missing(ledger, num_bytes) > 0:
                ledger.full_until = time.monotonic() + _FULL_S
                raise _UnservedError(self._fullness())

    def _scan(self, ledger: _Ledger) -> None:
        ledger.total = sum(size for _, size in self._list())
        ledger.room = max(0, self.max_bytes - ledger.total)
        ledger.unscanned = 0

    def _missing(self, ledger: _Ledger, num_bytes: int) -> int:
        return max(ledger.total - self.max_bytes, self._missing_on_disk(num_bytes))

    def _missing_on_disk(self, num_bytes: int) -> int:
        disk = os.statvfs(self._files)
        # some mounts tell nothing: all zeros
        return num_bytes + self.min_free_bytes - disk.f_bavail * disk.f_frsize if disk.f_blocks else 0

    def _evict(self, num_bytes: int, *, spare: int = 0) -> None:
        """Delete at least `num_bytes` of copies not in use, where there are, and then up to `spare` more."""
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
        """Delete an entry; return False where it is in use or cannot be deleted."""
        folder = f"{self._files}/{key}"
        try:
            with _hold_lock(folder, fcntl.LOCK_EX):
                pins.refresh()  # with the lock: from now on nobody else can pin it
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
        # a lock that was held at the moment of a fork would stay so in the child
        return self._ledgers.get(os.getpid()) or self._ledgers.setdefault(os.getpid(), _Ledger())

    def _fullness(self) -> str:
        free = min(0, -self._missing_on_disk(0)) + self.min_free_bytes
        return (
            f"all that it holds is in use; max_bytes is {format_bytes(self.max_bytes)}, and of its disk "
            f"{format_bytes(free)} are free, of which {format_bytes(self.min_free_bytes)} stay so"
        )

    def _bypass(self, copy: _Copy, storage: Storage, name: str, reason: str) -> Path:
        """Return the file itself."""
        if storage.folder is None:
            raise VolumeError(
                f"{copy.address} ({format_bytes(copy.num_bytes)}) cannot be copied to the cache {self.folder}: "
                f"{reason}.\n"
                "  Raise cache_max_bytes (BRIDGE_CACHE_MAX_BYTES), or set cache_dir (BRIDGE_CACHE_DIR) to a folder on a "
                "larger disk."
            )
        ledger = self._ledger()
        if not ledger.has_warned:
            ledger.has_warned = True
            warnings.warn(
                f"files are read from {storage}, not from the cache {self.folder}: {reason}.\n"
                "  Raise cache_max_bytes (BRIDGE_CACHE_MAX_BYTES), or set cache_dir (BRIDGE_CACHE_DIR) to a folder on a "
                "larger disk.",
                stacklevel=3,
            )
        return storage.folder / name
