"""What attempts there are in a folder, and how each of them stands."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from bridge.display import format_seconds
from bridge.errors import VolumeError
from bridge.volumes.commit import WITHDRAWN, Attempt, Marker, attempts, marker_names, read_marker
from bridge.volumes.lease import BEAT_S, last_beats_s, storage_time_ns
from bridge.volumes.storage import Storage, join, reason_of, translated

State = Literal["complete", "being written", "left behind", "withdrawn", "unreadable", "no export", "something else"]


@dataclass(frozen=True)
class Standing:
    """How an attempt stands.

    Attributes:
        path: Its folder.
        state: "being written" while a writer holds it; "left behind" by a writer that failed or was killed; "withdrawn"
            when it was deleted while readers held it, whose files go after them; "unreadable" as `problem` says; the
            last two where what was committed is not what was looked for.
        age_s: Seconds since it was begun, by the clock of the storage.
        num_holders: Readers and writers that hold it. One that was killed counts for up to an hour.
        num_bytes: Bytes of its files; where it is incomplete, of those that are there.
    """

    path: str
    state: State
    age_s: float = 0.0
    num_holders: int = 0
    num_bytes: int | None = None
    problem: str | None = None


Look = Callable[[], tuple[Standing, Marker | None]]


def survey(storage: Storage) -> dict[Attempt, Look]:
    """Return what looks at each attempt of a storage and at its marker, the one of the highest rank first.

    Raises:
        VolumeError: The storage cannot be listed, or its leases cannot be read.
    """
    found = attempts(storage)
    if not found:
        return {}
    try:
        now_ns = storage_time_ns(storage)
    except VolumeError:  # whoever may only read has no clock but its own
        now_ns = time.time_ns()
    with translated(f"the leases of {storage} cannot be read"):
        beats_s = last_beats_s(storage, now_ns=now_ns)
    return {one: partial(_look, storage, one, now_ns, beats_s.get(one.attempt_id, [])) for one in found}


def _look(storage: Storage, attempt: Attempt, now_ns: int, beats_s: list[float]) -> tuple[Standing, Marker | None]:
    age_s = max(0.0, now_ns / 1e9 - attempt.generation / 1e3)
    withdrawn = join(attempt.name, WITHDRAWN)
    seen = partial(Standing, f"{storage}/{attempt.name}", age_s=age_s, num_holders=len(beats_s))
    try:
        if (marker := read_marker(storage, attempt.name)) is not None:
            return seen(state="complete", num_bytes=sum(marker.sizes.values())), marker
        sizes = _sizes(storage, attempt.name)
        with contextlib.suppress(FileNotFoundError):  # by its name: a listing may not show it yet
            sizes[withdrawn] = storage.status(withdrawn).num_bytes or 0
    except OSError as exc:
        return seen(state="unreadable", problem=reason_of(exc)), None
    state: State = "being written" if beats_s else "left behind"
    problem = None
    if withdrawn in sizes:
        state = "withdrawn"
    elif not beats_s and not sizes.keys().isdisjoint(marker_names(attempt.name)):
        problem = "its marker is damaged"
    elif beats_s and (quiet_s := min(beats_s)) > 6 * BEAT_S:
        problem = f"no sign of life for {format_seconds(quiet_s)}; if its writer was killed, it goes after an hour"
    return seen(state=state, num_bytes=sum(sizes.values()), problem=problem), None


def _sizes(storage: Storage, folder: str) -> dict[str, int]:
    """Return the bytes of each file in a folder and below, by name, but for what its writer deletes meanwhile."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in list(storage.list(folder)):
            name = f"{folder}/{entry.name}"
            if entry.is_folder and not entry.is_link:
                sizes |= _sizes(storage, name)
                continue
            with contextlib.suppress(FileNotFoundError):
                sizes[name] = (entry if entry.num_bytes is not None else storage.status(name)).num_bytes or 0
    return sizes
