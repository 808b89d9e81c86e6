"""Leases: small files that whoever works on an attempt renews, so that nobody takes it for garbage.

A renewal ("beat") is a new file `_leases/<attempt id>.<holder>.<n>`, since a volume cannot append or touch. The last
two stay, so that a listing that lags by less than a beat always shows one. How old a beat is, the storage's own clock
says: the clocks of two machines need not agree. An attempt has as many holders as work on it or read it.
"""

from __future__ import annotations

import contextlib
import queue
import re
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from bridge.errors import VolumeError
from bridge.volumes.storage import Entry, Storage, translated, wait_for_files

GRACE_S = 3600.0

_FOLDER = "_leases"
_BEAT = re.compile(r"(?P<id>[0-9a-f]{12})\.(?P<holder>[0-9a-f]{12})\.\d{1,9}")
_CLOCK = re.compile(r"clock\.[0-9a-f]{12}")
BEAT_S = 20.0
_LAPSE_S = GRACE_S / 2  # after so long without a beat, a holder no longer counts on what it held
_KEPT = 2


def is_lease(path: str) -> bool:
    """Return whether a file at `path` is a beat of a lease, or a look at the clock."""
    folder, _, name = path.rpartition("/")
    return folder.rpartition("/")[2] == _FOLDER and bool(_BEAT.fullmatch(name) or _CLOCK.fullmatch(name))


class Lease:
    """A lease on one attempt: from `start` on it is renewed in the background, until `end`."""

    def __init__(self, storage: Storage, attempt_id: str, *, beat_s: float | None = None) -> None:
        self._storage = storage
        self._stem = f"{_FOLDER}/{attempt_id}.{secrets.token_hex(6)}"
        self._beat_s = BEAT_S if beat_s is None else beat_s
        self._count = 0
        self._renewed = 0.0
        self._ending: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._renew, name="bridge-lease", daemon=True)
        self.started_ns = 0

    def start(self) -> None:
        """Write the first beat; its time by the storage's clock is `started_ns`.

        Raises:
            OSError: The storage cannot be written.
        """
        self._storage.make_folder(_FOLDER)
        self._beat()
        self.started_ns = _time_of_new(self._storage, f"{self._stem}.1")
        self._thread.start()

    def join_in(self) -> None:
        """Start where others keep leases already, with one write; `started_ns` stays 0.

        Raises:
            OSError: No leases are kept there, or the storage cannot be written.
        """
        self._beat()
        self._thread.start()

    def check(self) -> None:
        """Check that it never went unrenewed for so long that somebody may have collected the attempt.

        Raises:
            VolumeError: It did.
        """
        idle_s = _uptime() - self._renewed
        if idle_s > _LAPSE_S:
            raise VolumeError(
                f"the lease {self._storage}/{self._stem} was not renewed for {idle_s:,.0f} s: this process stood "
                "still, or the volume could not be written.\n"
                "  What it was writing may have been collected; write it again."
            )

    def end(self, *, timeout_s: float | None = None) -> None:
        """Stop renewing, and delete the beats; those that cannot be deleted, or not in time, grow old."""
        self.stop()
        self._thread.join(timeout_s)

    def stop(self) -> None:
        """Let it end soon, without waiting. A finaliser may call this, whatever it interrupts."""
        self._ending.put(None)

    def _renew(self) -> None:
        while self._is_wanted():
            # a volume that is away for a while does not end the lease; `check` tells when it was too long
            with contextlib.suppress(OSError):
                self._beat()
        # by this thread, which a forked process does not have
        with contextlib.suppress(OSError):
            for number in range(max(1, self._count - _KEPT), self._count + 1):
                self._storage.delete(f"{self._stem}.{number}")

    def _is_wanted(self) -> bool:
        try:
            self._ending.get(timeout=self._beat_s)
        except queue.Empty:
            return True
        return False

    def _beat(self) -> None:
        self._count += 1
        self._storage.write(f"{self._stem}.{self._count}", [b""])
        lapsed = self._renewed and _uptime() - self._renewed > _LAPSE_S
        # a lease that lapsed once stays so
        self._renewed = self._renewed if lapsed else _uptime()
        if self._count > _KEPT:
            self._storage.delete(f"{self._stem}.{self._count - _KEPT}")


def last_beats_s(storage: Storage, *, now_ns: int, grace_s: float = GRACE_S) -> dict[str, list[float]]:
    """Return how long ago each holder of an attempt wrote its youngest beat, by the id of the attempt.

    Args:
        now_ns: The storage's time, as by `storage_time_ns`.
        grace_s: After so long without a beat one holds nothing any more.

    Raises:
        OSError: The leases cannot be read.
    """
    youngest: dict[str, dict[str, float]] = {}
    for name, age_s in _ages_s(storage, now_ns).items():
        if age_s < grace_s and (match := _BEAT.fullmatch(name)):
            holders = youngest.setdefault(match["id"], {})
            holders[match["holder"]] = min(age_s, holders.get(match["holder"], age_s))
    return {attempt_id: list(holders.values()) for attempt_id, holders in youngest.items()}


def count_holders(storage: Storage, *, now_ns: int, grace_s: float = GRACE_S) -> dict[str, int]:
    """Return how many hold an attempt, by its id, as `last_beats_s` does; 0 is left out."""
    return {attempt_id: len(ages) for attempt_id, ages in last_beats_s(storage, now_ns=now_ns, grace_s=grace_s).items()}


def has_leases(storage: Storage) -> bool:
    """Return whether anything of ours is there, stale or not.

    Raises:
        OSError: It cannot be listed.
    """
    try:
        return any(True for _ in storage.list(_FOLDER))
    except (FileNotFoundError, NotADirectoryError):
        return False


def drop_stale_leases(storage: Storage, *, now_ns: int, grace_s: float = GRACE_S) -> None:
    """Delete the beats that are older than `grace_s`, and what looks at the clock left."""
    for name, age_s in _ages_s(storage, now_ns).items():
        if age_s >= grace_s:
            storage.delete(f"{_FOLDER}/{name}")


def storage_time_ns(storage: Storage) -> int:
    """Return the time by the clock that stamps the storage's files, in nanoseconds since 1970.

    Raises:
        VolumeError: The storage cannot be written.
    """
    name = f"{_FOLDER}/clock.{secrets.token_hex(6)}"
    with translated(f"{storage} cannot be written"):
        storage.make_folder(_FOLDER)
        storage.write(name, [b""])
        try:
            return _time_of_new(storage, name)
        finally:
            storage.delete(name)


def _ages_s(storage: Storage, now_ns: int) -> dict[str, float]:
    """Return the age of every beat and every look at the clock, by its name."""
    try:
        entries = list(storage.list(_FOLDER))
    except FileNotFoundError:
        return {}

    def age_s(entry: Entry) -> float:
        try:
            seen = entry if entry.mtime_ns else storage.status(f"{_FOLDER}/{entry.name}")
            return (now_ns - _time_of(seen)) / 1e9
        except FileNotFoundError:
            return 0.0  # renewed meanwhile: whoever does that is alive

    ours = [entry for entry in entries if _BEAT.fullmatch(entry.name) or _CLOCK.fullmatch(entry.name)]
    # a thousand ranks that read one export are a thousand holders
    with ThreadPoolExecutor(16) as threads:
        return dict(zip((entry.name for entry in ours), threads.map(age_s, ours), strict=True))


def _time_of(entry: Entry) -> int:
    return time.time_ns() if entry.mtime_ns is None else entry.mtime_ns


def _time_of_new(storage: Storage, name: str) -> int:
    return _time_of(wait_for_files(storage, {name: 0})[0])


def _uptime() -> float:
    # goes on while the process or the machine is stopped
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
