"""What is in use: locks that end with their owner, and pins, which say what their owner holds.

A pin is a file to which a process writes the keys it holds, and which it keeps locked. One that nobody has locked is
of a process that ended. Only creating files and writing them front to back is relied on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator

_PIN = re.compile(r"[0-9]+-[0-9a-f]{12}")
_LONGEST_POLL_S = 0.02
_STALLED_S = 60.0  # how long the owner of a lock may stand still
_TRIES = 100  # to lock what others delete and make anew in between


class UnservedError(Exception):
    """The cache cannot serve a file; says why."""


@contextlib.contextmanager
def hold_folder(folder: str, how: int, *, grows: str | None = None, make: bool = False) -> Iterator[None]:
    """Hold the lock of an entry's folder, which is there as long as it is held.

    Args:
        how: LOCK_SH or LOCK_EX.
        grows: The file that others write under this lock: waits for them. None: does not wait.
        make: Whether the folder is made.

    Raises:
        FileNotFoundError: There is no such folder, or none to make it in.
        BlockingIOError: Somebody else holds the lock.
        UnservedError: Somebody else holds the lock, and does nothing.
    """
    for _ in range(_TRIES):
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        try:
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if make:
                continue
            raise
        with _unlocking(file):
            _wait_for_lock(file, how, grows)
            if _is_still_at(folder, file):
                yield
                return
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), folder)


class Pin:
    """The keys that this process holds, until `close`, its end, or nobody has this. May be used by several threads."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._path = ""
        self._file: int | None = None
        self._release: Callable[[], object]
        self._keys: set[str] = set()
        self._missing: set[str] = set()  # not in the file yet
        self._is_closed = False

    def hold(self, key: str) -> None:
        """Hold a key; it is in the file when this returns.

        Raises:
            OSError: It could not be written.
            ValueError: The pin is closed.
        """
        with self._lock:
            if self._is_closed:
                raise ValueError("the epoch is closed; fetch within `with cache.epoch() as epoch:`.")
            # cleaners delete what is old
            if self._file is None or not _is_still_at(self._path, self._file):
                self._drop()
                self._path, self._file = self._create()
                self._missing |= self._keys
            if key not in self._keys:
                self._missing.add(key)
            if self._missing:
                # the break in front ends a line that a full disk cut off
                lines = "".join(f"\n{key}\n" for key in self._missing).encode()
                if os.write(self._file, lines) != len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
                self._keys |= self._missing
                self._missing.clear()

    def close(self) -> None:
        """Hold nothing any more; nothing where that is so. Goes on where it was interrupted before."""
        with self._lock:
            self._drop()
            self._is_closed = True

    def _drop(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._file = None
            self._release()

    def _create(self) -> tuple[str, int]:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        for _ in range(_TRIES):
            path = f"{self._folder}/{os.getpid()}-{secrets.token_hex(6)}"
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._release = weakref.finalize(self, _release, os.getpid(), path, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_still_at(path, file):
                    return path, file
            except BlockingIOError:
                pass  # `Pins` looks at it before it is locked, and takes it for that of a process that ended
            except BaseException:
                self._release()
                raise
            self._release()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), self._folder)


class Pins:
    """The keys that living processes hold, as of the last `refresh`. For one thread."""

    def __init__(self, folder: str) -> None:
        self.keys: set[str] = set()
        self._folder = folder
        self._ends: dict[str, int] = {}  # up to which byte each file was read

    def refresh(self) -> None:
        """Read what was added since the last time, and delete the files of processes that ended."""
        with contextlib.suppress(FileNotFoundError):
            for name in filter(_PIN.fullmatch, os.listdir(self._folder)):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    self._read(f"{self._folder}/{name}")

    def _read(self, path: str) -> None:
        file = os.open(path, os.O_RDONLY)
        with _unlocking(file):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                start = self._ends.get(path, 0)
                added = os.pread(file, os.fstat(file).st_size - start, start)
                # a line without its end is still being written, and so its writer does not count on it yet
                end = added.rfind(b"\n") + 1
                self.keys.update(added[:end].decode("ascii", "replace").split())
                self._ends[path] = start + end
            else:
                os.unlink(path)


def _release(pid: int, path: str, file: int) -> None:
    """Give up a pin, unless this process was forked from the one that holds it."""
    if os.getpid() == pid:
        with _unlocking(file), contextlib.suppress(OSError):
            os.unlink(path)


def _wait_for_lock(file: int, how: int, grows: str | None) -> None:
    delay, seen, deadline = 0.0005, -2, 0.0
    while True:
        try:
            return fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if grows is None:
                raise
        try:
            size = os.stat(grows).st_size
        except FileNotFoundError:
            size = -1
        if size != seen:
            seen, deadline = size, time.monotonic() + _STALLED_S
        elif time.monotonic() > deadline:
            raise UnservedError(f"another process that copies {os.path.basename(grows)} stands still")
        time.sleep(delay)
        delay = min(2 * delay, _LONGEST_POLL_S)


@contextlib.contextmanager
def _unlocking(file: int) -> Iterator[None]:
    """Unlock a descriptor and close it at the end of the block.

    Closing alone would not do: a process that was forked meanwhile has the same lock open.
    """
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _is_still_at(path: str, file: int) -> bool:
    """Return whether `path` names the open file; it may have been deleted, and made anew, before it was locked."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
