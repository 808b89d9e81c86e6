"""What is in use: locks that end with their owner, and files that say what their owner holds.

Each process writes the keys it holds to a file of its own, which it keeps locked. A file that nobody has locked is that of
a process that ended. Only creating files and writing them front to back is relied on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def locked(file: int) -> Iterator[None]:
    """Unlock an open file that was locked, and close it.

    Closing alone would not do: a process that was forked meanwhile has the same lock open.
    """
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def is_still_at(path: str, file: int) -> bool:
    """Return whether `path` names the open file; it may have been deleted, and made anew, before it was locked."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


class Pin:
    """The keys that this process holds, until `close` or its end. May be used by several threads."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._path = ""
        self._file: int | None = None
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
            if self._file is None:
                self._path, self._file = self._create()
            # the break in front ends a line that a full disk cut off
            line = f"\n{key}\n".encode()
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)

    def close(self) -> None:
        """Hold nothing any more; nothing where that is so."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                with locked(self._file), contextlib.suppress(OSError):
                    os.unlink(self._path)
                self._file = None

    def _create(self) -> tuple[str, int]:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        while True:
            path = f"{self._folder}/{os.getpid()}-{secrets.token_hex(6)}"
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_still_at(path, file):
                    return path, file
            except BlockingIOError:
                pass  # `Pins` looked at it before it was locked, and took it for one whose owner ended
            except BaseException:
                os.close(file)
                raise
            os.close(file)


class Pins:
    """The keys that living processes hold, as of the last `refresh`. For one thread."""

    def __init__(self, folder: str) -> None:
        self.keys: set[str] = set()
        self._folder = folder
        self._ends: dict[str, int] = {}  # up to which byte each file was read

    def refresh(self) -> None:
        """Read what was added since the last time, and delete the files of processes that ended."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    self._read(f"{self._folder}/{name}")

    def _read(self, path: str) -> None:
        file = os.open(path, os.O_RDONLY)
        with locked(file):
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
