"""What is asked of a place where bytes are kept, and how it is waited for.

Only what every place can do: write a file once from front to back, read a range, list, delete. Names are relative to
the root of the storage, with `/` between their parts; "" is the root.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from bridge.errors import VolumeError

T = TypeVar("T")

# what a mount over a network answers for a while and then no more
_TRANSIENT = {
    errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE,
    errno.ECONNRESET, errno.ECONNABORTED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EPIPE,
}  # fmt: skip
_RETRY_DELAYS_S = (0.05, 0.2, 0.8, 2.0)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder: its last name, and what is known of it. A listing of a mount knows neither size nor time."""

    name: str
    is_folder: bool
    num_bytes: int | None = None
    mtime_ns: int | None = None
    is_link: bool = False


class Storage(Protocol):
    """What `bridge` asks of a place. Failures are OSErrors; what is not there is a FileNotFoundError.

    An implementation prints as its address, and is safe to use from several threads.
    """

    @property
    def folder(self) -> Path | None:
        """The folder that Python opens, None where there is none."""

    def list(self, name: str = "") -> Iterator[Entry]:
        """Yield what a folder holds, in no order. What was written a moment ago may be missing."""

    def status(self, name: str) -> Entry:
        """Return size and time of a file, or that it is a folder."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of a file; fewer where it ends before."""

    def write(self, name: str, blocks: Iterable[bytes | memoryview]) -> None:
        """Write a new file front to back, and flush it as far as the place knows how to; on failure it is deleted."""

    def delete(self, name: str) -> bool:
        """Delete a file; return whether it was there."""

    def make_folder(self, name: str = "") -> None:
        """Make a folder and those above it; nothing where it is there, or where folders do not exist."""

    def delete_folder(self, name: str = "") -> None:
        """Delete an empty folder; nothing where it is gone, or where folders do not exist."""


def join(folder: str, name: str) -> str:
    """Return the name of what is in a folder; "" is the root."""
    return f"{folder}{'' if folder.endswith('/') else '/'}{name}" if folder else name


def is_transient(exc: OSError) -> bool:
    """Return whether the same call may succeed a moment later."""
    return exc.errno in _TRANSIENT


def is_full(exc: OSError) -> bool:
    """Return whether there is no room left."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


def reason_of(exc: BaseException) -> str:
    """Return in a few words why something failed, without a period."""
    return getattr(exc, "strerror", None) or str(exc).partition("\n")[0].rstrip(". ") or type(exc).__name__


@contextlib.contextmanager
def translated(problem: str, advice: str = "") -> Iterator[None]:
    """Let what fails in the block be a VolumeError that says `problem`, the reason, and what to do."""
    try:
        yield
    except VolumeError:
        raise
    except OSError as exc:
        told = f"{problem}: {exc.strerror or exc}."
        raise VolumeError(f"{told}\n  {advice}" if advice else told) from exc


def with_retries(call: Callable[[], T]) -> T:
    """Return what `call` returns; where it fails in a way that may pass, it is tried again, for 3 s in all."""
    for delay in _RETRY_DELAYS_S:
        try:
            return call()
        except OSError as exc:
            if not is_transient(exc):
                raise
        time.sleep(delay)
    return call()


def wait_for_files(storage: Storage, sizes: Mapping[str, int], *, timeout_s: float = 30.0) -> list[Entry]:
    """Return the status of every file when it is there in full size; what was written may show late.

    Args:
        sizes: Bytes of each file, by name.

    Raises:
        VolumeError: A file is missing, or of another size, after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    given_up = threading.Event()

    def wait(name: str) -> Entry:
        delay = 0.01
        while True:
            try:
                found = storage.status(name)
            except FileNotFoundError:
                found = Entry(name, is_folder=False)
            if found.num_bytes == sizes[name]:
                return found
            if time.monotonic() + delay > deadline or given_up.wait(delay):
                seen = "is not there" if found.num_bytes is None else f"holds {found.num_bytes:,} bytes"
                raise VolumeError(
                    f"{storage}/{name} {seen} {timeout_s:g} s after {sizes[name]:,} bytes were written.\n"
                    "  Another writer may use the same folder, or the mount loses writes. Write again."
                )
            delay = min(2 * delay, 1.0)

    if len(sizes) < 2:
        return [wait(name) for name in sizes]
    with ThreadPoolExecutor(min(32, len(sizes))) as threads:
        try:
            return list(threads.map(wait, sizes))
        finally:
            given_up.set()
