"""Readers hold what they read, so that it is not deleted under them.

Nothing is locked. Each side first says what it does and then looks at the other, so that at least one of them sees:

    reader:   write a lease ── see that the marker is still there ── read
    deleter:  see no lease ── withdraw the marker ── wait for listings that lag ── see no lease ── delete the files

Where a reader came in between, the files stay, and are garbage when its lease has ended.
"""

from __future__ import annotations

import threading
import weakref

from bridge.errors import VolumeError
from bridge.volumes.commit import Attempt, marker_names
from bridge.volumes.lease import Lease
from bridge.volumes.storage import Storage

_BEAT_S = 600.0
_LAST_S = 10.0


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
