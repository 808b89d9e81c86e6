"""Local copies of files on volumes, one for each node, however many processes ask.

An entry is a folder `files/<digest>.<bytes>`. It holds a record, which says what file in what state it is a copy of,
and the copy itself, under its file's own name in a folder named as the file's own: code that takes a label from the one
and a suffix from the other goes on to work. The record is written last. An entry is believed where its record has the
digest that the folder is named for and the copy has all its bytes; anything else is garbage. Files are only created,
written once and deleted, so that a file system that refuses all else can hold a cache. Nothing is deleted in a folder
without the tag that a cache gets first of all, nor what is not named as an entry or a pin.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import secrets
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bridge.display import format_bytes, parse_bytes
from bridge.errors import VolumeError
from bridge.volumes.entry import RECORD, Copy, Source, empty, is_cache, list_entries, make_cache, read
from bridge.volumes.pins import Pin, Pins, UnservedError, hold_folder
from bridge.volumes.source import ChangedError
from bridge.volumes.storage import Entry, Storage, is_full

_FULL_S = 10.0  # how long a full cache is left alone
_TRIES = 5  # how often a file may change while it is copied
_TICK_NS = 2 * 10**9  # of a clock that times files in whole seconds


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file's copy in the cache."""

    source: str
    """The address of the file."""
    num_bytes: int
    """What it takes on the disk, in blocks of 4 KiB: the copy as many as it needs, its record and its folders three."""
    last_used_ns: int
    """Nanoseconds since 1970 when it was last handed out; when it was copied, where the disk keeps no times."""
    path: Path


@dataclass(frozen=True, slots=True)
class Fetched:
    """Where a file is read, and whether its bytes came from the volume for that, or will when it is read."""

    path: Path
    num_bytes: int
    is_copied: bool


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
        folder: Made where it is missing. One that holds other things is not used. The copies are for this user alone.
        max_bytes: The most that the copies may take on the disk, as an integer or as text such as "50GiB"; the least
            recently used make room. A file counts as `CachedFile.num_bytes` says, so 16 KiB at the least if it is not
            empty; one of up to `max_bytes` is kept alone. Processes that copy at the same moment may pass it by a few
            percent.
        min_free_bytes: What stays free on the disk, as an integer or as text.

    Raises:
        ConfigError: A size is negative or not a size.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, max_bytes: int | str, min_free_bytes: int | str = "1GiB"
    ) -> None:
        self.folder = Path(folder).absolute()
        self.max_bytes = parse_bytes(max_bytes, name="max_bytes")
        self.min_free_bytes = parse_bytes(min_free_bytes, name="min_free_bytes")
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
        """Yield the files of which there is a whole copy, in no order.

        Raises:
            OSError: The folder cannot be read, or holds something else.
        """
        is_cache(self.folder)
        for key, size in list_entries(self._files):
            with contextlib.suppress(OSError, ValueError, TypeError):
                copy = Copy(self._files, *json.loads(read(f"{self._files}/{key}/{RECORD}")))
                # equal also means that no byte of the record is damaged, since its digest is in the name
                if copy.key == key and copy.is_whole():
                    used = os.stat(copy.record_path).st_mtime_ns
                    yield CachedFile(copy.address, size, used, Path(copy.path))

    def clear(self) -> Cleared:
        """Delete all that is not in use.

        Raises:
            OSError: The folder cannot be read or written, or holds something else.
        """
        is_cache(self.folder)
        pins = Pins(self._pins)
        freed = [size for key, size in list_entries(self._files) if self._delete(key, pins)]
        return Cleared(len(freed), sum(freed), tuple(self.entries()))

    def _fetch(self, copy: Copy, source: Source, pin: Pin) -> bool:
        """Hold a whole copy of a file, made if it is not there; return whether this process made it.

        Raises:
            UnservedError: The cache cannot keep it, or another process that copies it stands still.
            ChangedError: The file is no longer in that state.
            VolumeError: The file cannot be read.
        """
        # OSError: there is no such entry, or it cannot be pinned, for a reason that shows below
        with contextlib.suppress(OSError), hold_folder(copy.folder, fcntl.LOCK_SH, grows=copy.path):
            if copy.is_whole():
                pin.hold(copy.key)
                with contextlib.suppress(OSError):
                    os.utime(copy.record_path)
                return False
        if copy.num_bytes > self.max_bytes:
            raise UnservedError(
                f"{copy.address} takes {format_bytes(copy.num_bytes)}, and max_bytes is {format_bytes(self.max_bytes)}"
            )
        ledger = self._ledger()
        is_last = False
        while True:
            if time.monotonic() < ledger.full_until:
                raise UnservedError(self._fullness())
            is_new = not ledger.is_tagged
            try:
                if is_new:
                    if not is_cache(self.folder):
                        make_cache(self.folder)
                    os.makedirs(self._files, mode=0o700, exist_ok=True)
                    ledger.is_tagged = True
                with hold_folder(copy.folder, fcntl.LOCK_EX, grows=copy.path, make=True):
                    is_whole = copy.is_whole()
                    if not is_whole:
                        self._fill(copy, source)
                    pin.hold(copy.key)
                    return not is_whole
            except (VolumeError, ChangedError):
                raise
            except OSError as exc:
                if isinstance(exc, FileNotFoundError) and not is_new:
                    ledger.is_tagged = False  # somebody deleted the whole cache
                    continue
                if not is_full(exc):
                    raise UnservedError(f"it cannot be used: {exc.strerror}") from exc
                with ledger.lock:
                    if is_last:
                        ledger.full_until = time.monotonic() + _FULL_S
                        raise UnservedError(self._fullness()) from exc
                    # the disk has less room than it said
                    self._evict(copy.disk_bytes, spare=ledger.total // 10)
                is_last = True

    def _fill(self, copy: Copy, source: Source) -> None:
        try:
            self._make_room(copy)
            try:
                os.mkdir(os.path.dirname(copy.path))
            except FileExistsError:
                empty(copy.folder)  # of what a killed process left
                os.mkdir(os.path.dirname(copy.path))
            with open(copy.path, "xb") as file:
                for number, block in enumerate(source.blocks()):
                    # others may fill the disk at the same time
                    if number and self._free_bytes() < self.min_free_bytes:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    file.write(block)
            # Not flushed to the disk. After a crash of the machine, a copy whose bytes were lost is too short, as file
            # systems note the length after the bytes; they would not if the room were allocated beforehand.
            with open(copy.record_path, "xb") as file:
                file.write(copy.record)
        except BaseException:
            with contextlib.suppress(OSError):
                empty(copy.folder)
                os.rmdir(copy.folder)
            raise

    def _make_room(self, copy: Copy) -> None:
        """Return when there is room for a copy whose folder is there, so that scans count it.

        Raises:
            UnservedError: All that could make room is in use.
        """
        ledger = self._ledger()
        with ledger.lock:
            ledger.total += copy.disk_bytes
            ledger.unscanned += copy.disk_bytes
            # so 64 processes that copy at the same time do not pass max_bytes
            if 64 * ledger.unscanned >= ledger.room:
                self._scan(ledger)
            missing = self._missing(ledger, copy)
            if missing > 0:
                self._evict(missing, spare=ledger.total // 10)
                self._scan(ledger)
                if self._missing(ledger, copy) > 0:
                    ledger.full_until = time.monotonic() + _FULL_S
                    raise UnservedError(self._fullness())

    def _scan(self, ledger: _Ledger) -> None:
        ledger.total = sum(size for _, size in list_entries(self._files))
        ledger.room = max(0, self.max_bytes - ledger.total)
        ledger.unscanned = 0

    def _missing(self, ledger: _Ledger, copy: Copy) -> float:
        most = max(self.max_bytes, copy.disk_bytes)
        return max(ledger.total - most, copy.disk_bytes + self.min_free_bytes - self._free_bytes())

    def _free_bytes(self) -> float:
        disk = os.statvfs(self._files)
        # some mounts tell nothing, in zeros
        return disk.f_bavail * disk.f_frsize if disk.f_blocks else math.inf

    def _evict(self, num_bytes: float, *, spare: int) -> None:
        """Delete the longest unused: at least `num_bytes` where so much is not in use, and then up to `spare` more."""
        found = []
        for key, size in list_entries(self._files):
            try:
                used = os.stat(f"{self._files}/{key}/{RECORD}").st_mtime_ns
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
                empty(folder)
                os.rmdir(folder)
        except FileNotFoundError:
            return True  # another process was faster
        except OSError:
            return False
        return True

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

    def _bypass(self, copy: Copy, source: Source, reason: str) -> Path:
        """Return the file itself."""
        advice = (
            "\n  Raise cache_max_bytes (BRIDGE_CACHE_MAX_BYTES), or let cache_dir (BRIDGE_CACHE_DIR) be a new folder "
            "on a disk with more room."
        )
        if source.storage.folder is None:
            raise UncachedError(
                f"{copy.address} ({format_bytes(copy.num_bytes)}) cannot be copied to the cache {self.folder}: "
                f"{reason}.{advice}"
            )
        ledger = self._ledger()
        if not ledger.has_warned:
            ledger.has_warned = True
            warnings.warn(
                f"files are read from {source.storage}, not from the cache {self.folder}: {reason}.{advice}",
                stacklevel=4,  # at who called fetch
            )
        return source.storage.folder / source.name


class Epoch:
    """Files that stay in the cache until this is closed or nobody has it any more. May be used by several threads.

    Also in processes that are forked or that it is pickled to, such as workers of a DataLoader: each then holds what it
    fetched itself, until it closes it or ends. `close` concerns the process that calls it.
    """

    def __init__(self, cache: FileCache, token: str | None = None) -> None:
        self._cache = cache
        self._pins: dict[int, Pin] = {}
        self._token = token or secrets.token_hex(8)
        # what this process holds: the state of the file, and where its copy is
        self._found: dict[tuple[int, str, str], tuple[int, int, Fetched]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Epoch, (self._cache, self._token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fetch(self, storage: Storage, name: str, status: Entry | None = None) -> Path:
        """Return where to read a file, as `find` does."""
        return self.find(storage, name, status).path

    def find(self, storage: Storage, name: str, status: Entry | None = None) -> Fetched:
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
        key = (os.getpid(), str(storage), name)
        for _ in range(_TRIES):
            source = Source.find(storage, name, status)
            found = self._found.get(key)
            if found and found[:2] == (source.num_bytes, source.mtime_ns) and found[2].path.exists():
                return found[2]
            state: int | str = self._token
            # where the next change might not show in the time, the copy is good for one epoch
            if (at := source.mtime_ns) is not None and (at % 10**9 or abs(time.time_ns() - at) > _TICK_NS):
                state = at
            copy = Copy(self._cache._files, f"{storage}/{name}", source.num_bytes, state)
            try:
                is_made = self._cache._fetch(copy, source, self._pin())
            except ChangedError:
                status = None
            except UnservedError as exc:
                return Fetched(self._cache._bypass(copy, source, str(exc)), source.num_bytes, is_copied=True)
            else:
                made = Path(copy.path)
                if isinstance(state, int):
                    self._found[key] = source.num_bytes, state, Fetched(made, source.num_bytes, is_copied=False)
                return Fetched(made, source.num_bytes, is_made)
        raise VolumeError(
            f"{storage}/{name} changed {_TRIES} times while it was copied.\n"
            "  Fetch it when nobody writes to it, or copy it elsewhere first."
        )

    def close(self) -> None:
        """Let the files go that this process fetched."""
        self._found.clear()
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
        self.is_tagged = False  # whether the folder was seen to be a cache
        self.has_warned = False


class UncachedError(VolumeError):
    """A file that has no path of its own cannot be kept in the cache."""
