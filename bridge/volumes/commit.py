"""Complete or absent: write-once attempt folders, each made visible by its own marker, written last.

A storage holds attempts `<generation>-<label>-<attempt id>`. An attempt is complete when it holds a marker
`_bridge.<n>.json`, n in 0 to 3, whose digest is right; readers believe nothing else. Only creating and deleting files
is relied on: no rename, append, link, truncate or exclusive create, which volume mounts refuse. Where several attempts
are complete, the one of the highest generation wins, then the one of the smallest attempt id, so that everybody who
sees the same attempts picks the same.

    begin ── write files ── commit: files seen in full size ── marker written, read back ── complete
      │            │                         │                            │
      └────────────┴──── fails or is killed ─┴────────────────────────────┘── dead: deleted, or collected later

Who works on an attempt renews a lease beside it; what is neither complete nor leased is garbage after a grace time.
Readers hold a complete attempt in the same way (hold.py). It can be withdrawn all the same: its marker goes, its files
stay until nobody holds it.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bridge.errors import VolumeError
from bridge.volumes.digest import digest_bytes
from bridge.volumes.lease import GRACE_S, Lease, count_holders, drop_stale_leases, has_leases, storage_time_ns
from bridge.volumes.storage import Storage, is_transient, join, translated, wait_for_files

MARKERS = tuple(f"_bridge.{number}.json" for number in range(4))
WITHDRAWN = "_withdrawn"  # a file that says so

_LABEL = re.compile(r"[a-z0-9]{1,32}")
_NAME = re.compile(rf"(?P<generation>\d{{13,}})-(?P<label>{_LABEL.pattern})-(?P<id>[0-9a-f]{{12}})")
_WITHDRAWN_S = 30.0

# How long a folder must have been gone that a server wrote, which was told to stop: Spark's tasks end when they notice,
# and one that starts its next file makes the folder again. And how long that is waited for.
_GONE_S = 1.0
_LAST_FILES_S = 10.0


@dataclass(frozen=True)
class Attempt:
    """One try at writing something: a folder of its own, whether or not it exists yet.

    `generation` is the time of its beginning in milliseconds since 1970, by the clock of the storage, or one more than
    the highest that is there: so that attempts that a listing does not show yet are still outranked. `label` is what
    the writer wants to find attempts by, in [a-z0-9].
    """

    generation: int
    label: str
    attempt_id: str

    @property
    def name(self) -> str:
        """The name of its folder in the storage."""
        return f"{self.generation:013d}-{self.label}-{self.attempt_id}"

    @property
    def rank(self) -> tuple[int, str]:
        """Attempts sort by this; the first is the one that readers pick."""
        return (-self.generation, self.attempt_id)

    @classmethod
    def parse(cls, name: str) -> Attempt | None:
        """Return the attempt that a folder's name says it is, None for other folders."""
        match = _NAME.fullmatch(name)
        return cls(int(match["generation"]), match["label"], match["id"]) if match else None


@dataclass(frozen=True)
class Marker:
    """What makes an attempt complete: what its writer has to say, and the bytes of each of its files, by name.

    Stored as a line with the digest of the rest, and the rest, both JSON.
    """

    body: dict[str, Any]
    sizes: dict[str, int]

    def encode(self) -> bytes:
        """Return the bytes of its file."""
        content = {"body": self.body, "sizes": self.sizes}
        # ASCII, since names of files need not be text
        text = json.dumps(content, separators=(",", ":"), sort_keys=True).encode()
        return json.dumps({"digest": digest_bytes(text)}).encode() + b"\n" + text

    @classmethod
    def decode(cls, data: bytes) -> Marker | None:
        """Return the marker whose file holds `data`, None where it is not whole."""
        head, _, text = data.partition(b"\n")
        try:
            marker = cls(**json.loads(text)) if json.loads(head)["digest"] == digest_bytes(text) else None
        except (ValueError, KeyError, TypeError):
            return None
        is_one = marker is not None and isinstance(marker.body, dict) and isinstance(marker.sizes, dict)
        return marker if is_one else None

    def missing(self, storage: Storage, folder: str) -> list[str]:
        """Return the files that are not there in full size.

        Raises:
            OSError: A file cannot be looked at.
        """

        def is_there(name: str) -> bool:
            try:
                return storage.status(join(folder, name)).num_bytes == self.sizes[name]
            except FileNotFoundError:
                return False

        with ThreadPoolExecutor(min(32, len(self.sizes) + 1)) as threads:
            found = threads.map(is_there, self.sizes)
            return [name for name, there in zip(self.sizes, found, strict=True) if not there]


class OpenAttempt:
    """An attempt that is being written: its files go into the folder `name` of `storage`, then `commit`."""

    def __init__(self, storage: Storage, attempt: Attempt, lease: Lease, *, by_server: bool = False) -> None:
        self.storage = storage
        self.attempt = attempt
        self._lease = lease
        self._gone_s = _GONE_S if by_server else 0.0
        self._markers: list[str] = []
        self._is_complete = False

    @property
    def name(self) -> str:
        """The folder that takes the files; it is not made yet."""
        return self.attempt.name

    def commit(self, body: Mapping[str, Any], sizes: Mapping[str, int], *, timeout_s: float = 30.0) -> None:
        """Make the attempt complete: see that its files are there, then write the marker and read it back.

        Args:
            body: What the marker is to say, as JSON values: sizes and digests of what readers check.
            sizes: Bytes of each file, by its name in the attempt.
            timeout_s: How long what was written may stay unseen.

        Raises:
            VolumeError: A file is not there in full size, the marker cannot be written or does not read back, or this
                process stood still for so long that the attempt may have been collected.
        """
        with translated(f"{self.storage}/{self.name} cannot be completed"):
            if not sizes:
                self.storage.make_folder(self.name)
            files = {join(self.name, name): size for name, size in sizes.items()}
            wait_for_files(self.storage, files, timeout_s=timeout_s)
            self._lease.check()
            self._write_marker(Marker(dict(body), dict(sizes)).encode(), timeout_s)
            self._lease.check()
            self._is_complete = True

    def _write_marker(self, data: bytes, timeout_s: float) -> None:
        """Write a marker; one that fails is tried again under a new name, since its own may hold a part for good."""
        problem = ""
        for marker in MARKERS:
            name = join(self.name, marker)
            try:
                # an iterator: the storage shall not try again under this name
                self.storage.write(name, iter([data]))
                self._markers.append(name)
                if _read_when_seen(self.storage, name, timeout_s) == data:
                    return
                problem = "it does not read back as it was written"
            except OSError as exc:
                if isinstance(exc, VolumeError) or not is_transient(exc):
                    raise
                problem = exc.strerror or str(exc)
                time.sleep(0.1)
        raise VolumeError(
            f"no marker could be written to {self.storage}/{self.name} in {len(MARKERS)} tries: {problem}."
        )

    def _abandon(self) -> None:
        """Delete what was written, unless it was committed; what cannot be deleted now is collected later."""
        if self._is_complete:
            return
        with contextlib.suppress(OSError):
            deadline = time.monotonic() + _WITHDRAWN_S
            while self._markers and time.monotonic() < deadline:
                self._markers = [name for name in self._markers if not self.storage.delete(name)]
                time.sleep(0.05 if self._markers else 0)
        # A marker that is not seen yet may show at any time, and must find all its files then.
        if self._markers:
            return
        gone_since = None
        deadline = time.monotonic() + _LAST_FILES_S
        while time.monotonic() < deadline:
            with contextlib.suppress(VolumeError):  # a file was written since its folder was listed
                if gone_since is None or self.attempt in attempts(self.storage):
                    gone_since = None
                    delete_attempt(self.storage, self.attempt)
                    gone_since = time.monotonic()
                    deadline = max(deadline, gone_since + 2 * self._gone_s)
            if gone_since is not None and time.monotonic() - gone_since >= self._gone_s:
                return
            time.sleep(0.2)


@contextlib.contextmanager
def begin(storage: Storage, label: str, *, by_server: bool = False) -> Iterator[OpenAttempt]:
    """Give a fresh attempt, leased while the block lasts; unless it was committed, it is deleted at the end.

    Args:
        by_server: Whether a server writes its files, and may go on for a moment when it is told to stop.

    Raises:
        ValueError: `label` is not 1 to 32 of [a-z0-9].
        VolumeError: The storage cannot be written.
    """
    if not _LABEL.fullmatch(label):
        raise ValueError(f"label is {label!r}; give 1 to 32 of a-z and 0-9.")
    attempt_id = secrets.token_hex(6)
    try:
        storage.make_folder()
        lease = Lease(storage, attempt_id)
        lease.start()
    except OSError as exc:
        raise VolumeError(
            f"{storage} cannot be written: {exc.strerror or exc}{_owner(storage, exc)}.\n"
            "  Give a folder or volume you may write (WRITE VOLUME)."
        ) from exc
    try:
        generation = max((attempt.generation + 1 for attempt in attempts(storage)), default=0)
        generation = max(generation, lease.started_ns // 1_000_000)
        opened = OpenAttempt(storage, Attempt(generation, label, attempt_id), lease, by_server=by_server)
        try:
            yield opened
        finally:
            opened._abandon()
    finally:
        lease.end()


def _owner(storage: Storage, exc: OSError) -> str:
    """Say whose a folder is that may not be written: where many write, each table's is of who was first."""
    try:
        found = storage.folder.stat() if storage.folder and isinstance(exc, PermissionError) else None
    except OSError:
        return ""
    return "" if found is None else f" (it is of user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o})"


def attempts(storage: Storage) -> list[Attempt]:
    """Return every attempt of a storage, complete or not, the one of the highest rank first; none where it is missing.

    Raises:
        VolumeError: The storage cannot be listed.
    """
    with translated(f"{storage} cannot be listed"):
        try:
            found = [Attempt.parse(entry.name) for entry in storage.list() if entry.is_folder and not entry.is_link]
        except (FileNotFoundError, NotADirectoryError):
            return []
    return sorted((attempt for attempt in found if attempt is not None), key=lambda attempt: attempt.rank)


def complete_attempts(storage: Storage, label: str | None = None) -> Iterator[tuple[Attempt, Marker]]:
    """Yield the complete attempts of a storage with their markers, the one that readers pick first.

    Raises:
        VolumeError: The storage cannot be listed, or a marker that is there cannot be read.
    """
    for attempt in attempts(storage):
        if label is None or attempt.label == label:
            marker = read_marker(storage, attempt.name)
            if marker is not None:
                yield attempt, marker


def marker_names(folder: str = "") -> list[str]:
    """Return all names that a marker of a folder may have. They are asked for by name: listings may lag."""
    return [join(folder, name) for name in MARKERS]


def read_marker(storage: Storage, folder: str = "") -> Marker | None:
    """Return the marker of a folder, None where there is none that is whole.

    Raises:
        VolumeError: A marker is there and cannot be read.
    """
    with translated(f"the marker of {storage}/{folder} cannot be read"):
        return next((marker for _, marker in read_markers(storage, folder)), None)


def read_markers(storage: Storage, folder: str) -> Iterator[tuple[str, Marker]]:
    """Yield the names of the markers of a folder that are whole, and what they say."""
    for name in marker_names(folder):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            if (marker := Marker.decode(storage.read(name))) is not None:
                yield name, marker


def _read_when_seen(storage: Storage, name: str, timeout_s: float) -> bytes:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            return storage.read(name)
        if time.monotonic() > deadline:
            raise VolumeError(f"the marker {storage}/{name} is not there {timeout_s:g} s after it was written.")
        time.sleep(0.05)


def withdraw_attempt(storage: Storage, attempt: Attempt) -> None:
    """Delete the markers of a complete attempt and leave its files, for readers who began before.

    From now on it is garbage where nobody holds it, but not before a grace time is over: a reader that had seen the
    marker may hold it already while listings do not show that yet.

    Raises:
        VolumeError: It could not be withdrawn, and may still be complete.
    """
    with translated(f"{storage}/{attempt.name} cannot be withdrawn, and may still be complete"):
        # another deleter was here, or has been through
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            storage.write(join(attempt.name, WITHDRAWN), [b""])
        _delete_markers(storage, attempt.name)


def _is_just_withdrawn(storage: Storage, attempt: Attempt, now_ns: int, grace_s: float) -> bool:
    with translated(f"{storage}/{attempt.name} cannot be looked at"):
        try:
            withdrawn_ns = storage.status(join(attempt.name, WITHDRAWN)).mtime_ns
        except FileNotFoundError:
            return False
    return withdrawn_ns is not None and now_ns - withdrawn_ns < grace_s * 1e9


def delete_attempt(storage: Storage, attempt: Attempt) -> None:
    """Delete an attempt, its markers first, so that nobody sees a part as the whole.

    Raises:
        VolumeError: Something of it could not be deleted. It is not complete any more unless the message says so.
    """
    folder = f"{storage}/{attempt.name}"
    with translated(f"{folder} cannot be deleted, and may still be complete"):
        _delete_markers(storage, attempt.name)
    with translated(f"{folder} is not complete any more, but not all of it could be deleted"):
        try:
            storage.delete(join(attempt.name, WITHDRAWN))  # by its name: a listing may not show it yet
            _delete_tree(storage, attempt.name)
        finally:
            _delete_markers(storage, attempt.name)  # what a copy into the same folder wrote meanwhile


def _delete_markers(storage: Storage, folder: str) -> None:
    for name in marker_names(folder):
        with contextlib.suppress(NotADirectoryError):
            storage.delete(name)


def _delete_tree(storage: Storage, folder: str) -> None:
    try:
        entries = list(storage.list(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_folder and not entry.is_link:
            _delete_tree(storage, f"{folder}/{entry.name}")
        else:
            storage.delete(f"{folder}/{entry.name}")
    storage.delete_folder(folder)


def collect_garbage(storage: Storage, *, grace_s: float = GRACE_S) -> list[Attempt]:
    """Delete the attempts that are neither complete nor leased and began more than `grace_s` ago; return them.

    One that was withdrawn counts as begun when it was.

    Leases that nobody renews are deleted too.

    Raises:
        VolumeError: The storage cannot be listed or written, or something could not be deleted; all else was.
    """
    found = attempts(storage)
    if not found and not has_leases(storage):
        return []
    collected: list[Attempt] = []
    problems: list[VolumeError] = []
    with translated(f"the leases of {storage} cannot be read"):
        now_ns = storage_time_ns(storage)
        leased = count_holders(storage, now_ns=now_ns, grace_s=grace_s)
    for attempt in found:
        try:
            is_young = now_ns - attempt.generation * 1_000_000 < grace_s * 1e9
            # the marker is read last: whoever is leased or young costs nothing
            if (
                not is_young
                and attempt.attempt_id not in leased
                and read_marker(storage, attempt.name) is None
                and not _is_just_withdrawn(storage, attempt, now_ns, grace_s)
            ):
                delete_attempt(storage, attempt)
                collected.append(attempt)
        except VolumeError as exc:
            problems.append(exc)
    with translated(f"the leases of {storage} cannot be deleted"):
        drop_stale_leases(storage, now_ns=now_ns, grace_s=grace_s)
    if problems:
        raise problems[0]
    return collected
