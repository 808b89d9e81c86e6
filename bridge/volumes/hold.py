"""Readers hold what they read, so that it is not deleted under them.

Nothing is locked. Each side first says what it does and then looks at the other, so that at least one of them sees:

    reader:   write a lease ── see that the marker is still there ── read
    deleter:  see no lease ── withdraw the marker ── wait for listings that lag ── see no lease ── delete the files

Where a reader came in between, the files stay, and are garbage when its lease has ended.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable

from bridge.errors import VolumeError
from bridge.volumes.commit import Attempt, delete_attempt, marker_names, withdraw_attempt
from bridge.volumes.lease import Lease, count_holders, storage_time_ns
from bridge.volumes.storage import Storage, translated

_BEAT_S = 600.0
_LAST_S = 10.0
# How long listings may lack a lease that is there, and names may outlive a marker that is gone.
_LAG_S = 5.0


class Hold:
    """A reader's lease on an attempt; it ends when this object is collected, or with the interpreter.

    A forked process reads on under its parent's. One that gets a copy by pickle takes a lease of its own, if it can.
    """

    def __init__(self, storage: Storage, attempt_id: str, lease: Lease) -> None:
        self._storage = storage
        self._attempt_id = attempt_id
        self._lease = lease
        self._finalizer = weakref.finalize(self, _let_go, lease)

    def end(self) -> None:
        """End it now, and return when nobody sees it any more."""
        self._finalizer.detach()
        self._lease.end()

    def __reduce__(self) -> tuple[object, ...]:
        return _take, (self._storage, self._attempt_id)


def hold_attempt(storage: Storage, name: str) -> Hold | None:
    """Hold the complete attempt in the folder `name` of `storage` for as long as the result is referenced.

    None where it is read without a lease, and so may be deleted meanwhile: the folder is no attempt, or stands where
    nobody keeps leases, as a copy does; or the reader may not write there, or the storage fails at it.

    Raises:
        VolumeError: It was deleted since its marker was read.
    """
    attempt = Attempt.parse(name)
    held = None if attempt is None else _take(storage, attempt.attempt_id)
    if held is not None and not has_marker(storage, name):
        held.end()
        raise VolumeError(
            f"{storage}/{name} was deleted while it was opened.\n  Open what is there now, or make it again."
        )
    return held


def _take(storage: Storage, attempt_id: str) -> Hold | None:
    lease = Lease(storage, attempt_id, beat_s=_BEAT_S)
    try:
        lease.join_in()
    except OSError:
        return None
    return Hold(storage, attempt_id, lease)


def has_marker(storage: Storage, name: str) -> bool:
    """Return whether an attempt has a marker, whole or not; True where that cannot be seen."""
    for marker in marker_names(name):
        try:
            storage.status(marker)
        except FileNotFoundError:
            continue
        except OSError:
            return True  # whoever reads will be told
        return True
    return False


def _let_go(lease: Lease) -> None:
    lease.stop()
    # Elsewhere a finaliser interrupts somebody, and must not wait for a volume.
    if not threading.main_thread().is_alive():
        lease.end(timeout_s=_LAST_S)


def delete_unheld(
    storage: Storage, doomed: Iterable[Attempt], *, at_once: bool = False
) -> tuple[dict[Attempt, str], dict[Attempt, str]]:
    """Delete complete attempts, but for what is held; return who holds the files that stay, and what failed.

    Args:
        at_once: Withdraws what is held too, and does not wait for listings: a reader that opens one at this moment
            fails with an error that names it.
    """
    left = list(doomed)
    held: dict[Attempt, str] = {}
    failed: dict[Attempt, str] = {}

    def look(told: str = "") -> None:
        holders = count_holders(storage, now_ns=storage_time_ns(storage)) if left else {}
        held.update({one: told + in_use(holders[one.attempt_id]) for one in left if one.attempt_id in holders})
        left[:] = [one for one in left if one not in held]

    def each(act: Callable[[Storage, Attempt], None], some: Iterable[Attempt]) -> None:
        for one in list(some):
            try:
                act(storage, one)
            except VolumeError as exc:
                failed[one] = str(exc)
        left[:] = [one for one in left if one not in failed]

    try:
        with translated(f"the leases of {storage} cannot be read"):
            look()
            each(withdraw_attempt, held if at_once else left)
            if left and not at_once:
                _wait_for_listings()
                look("opened at the last moment, its files go later: ")
    except VolumeError as exc:
        failed.update(dict.fromkeys(left, str(exc)))
    else:
        each(delete_attempt, left)
    return held, failed


def in_use(num_holders: int) -> str:
    """Say how many hold an attempt."""
    return f"in use by {num_holders} holder{'' if num_holders == 1 else 's'}"


def _wait_for_listings() -> None:
    time.sleep(_LAG_S)
