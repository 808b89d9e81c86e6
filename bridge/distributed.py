"""Rank and world_size, and calls that all ranks make together: rank 0 does it, all learn of it, errors included.

What is said goes through the store of the default process group: every backend has one, it needs no partner that waits,
and it tells which rank never came. Blocks of memory go over gloo. Without a process group, or in one of a single rank,
nothing here imports torch.

    every rank: says what it calls ── waits, as long as rank 0 shows that it lives ── reads the outcome
    rank 0:     waits for all, ARRIVAL_S at most ── does it ── leaves the outcome: a value, or an error
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bridge.errors import ConfigError, EngineError, RankError

T = TypeVar("T")

# how long a call waits for ranks that have not made it
ARRIVAL_S = 300.0
# how long rank 0 may show no sign of life, and how often it does
LOST_S = 90.0
_BEAT_S = 5.0
# the store may end with rank 0, which therefore stays so long for others to read
_READ_S = 10.0
# TCPStore drops the connection at values of more than 8 MiB
_PIECE_BYTES = 4 << 20
_GLOO = "bridge"
_TOGETHER = "\n  All ranks must make the same calls, in the same order and with the same arguments."
SEE_LOGS = "\n  The log of that rank says why."


def rank() -> int:
    """Return the rank of this process in the default process group; 0 without one."""
    return _asked("get_rank", 0)


def world_size() -> int:
    """Return how many ranks the default process group has; 1 without one."""
    return _asked("get_world_size", 1)


def local_world_size() -> int:
    """Return how many ranks share this machine: LOCAL_WORLD_SIZE, as torchrun sets it; without it, all."""
    return min(world_size(), int(os.environ.get("LOCAL_WORLD_SIZE") or world_size()))


def resolve_rank(given_rank: int | None = None, given_world_size: int | None = None) -> tuple[int, int]:
    """Return rank and world_size: those given, the default process group's, RANK and WORLD_SIZE, or 0 and 1.

    Raises:
        ConfigError: One is given or set without the other, or they are no rank of a world of that size.
    """
    if given_rank is not None or given_world_size is not None:
        return _checked_rank(given_rank, given_world_size, "rank=", "world_size=")
    if _group() is not None:
        return rank(), world_size()
    found = [os.environ.get(name) or None for name in ("RANK", "WORLD_SIZE")]
    if found in ([None, None], [None, "1"]):
        return 0, 1
    try:
        numbers = [None if text is None else int(text) for text in found]
    except ValueError as exc:
        raise ConfigError(f"RANK is {found[0]!r} and WORLD_SIZE {found[1]!r}; they must be whole numbers.") from exc
    return _checked_rank(numbers[0], numbers[1], "RANK", "WORLD_SIZE")


def _checked_rank(number: int | None, size: int | None, *names: str) -> tuple[int, int]:
    if number is None or size is None:
        there, absent = names if size is None else names[::-1]
        raise ConfigError(f"{there} is given without {absent}.\n  Give both, or neither: torchrun sets them.")
    if not 0 <= number < size:
        raise ConfigError(f"{names[0]} is {number} and {names[1]} {size}; ranks count from 0 to world_size - 1.")
    return number, size


def _asked(name: str, alone: int) -> int:
    dist = _group()
    return alone if dist is None else int(getattr(dist, name)())


def _group() -> Any:
    """Return torch.distributed where there is a default process group."""
    # whoever made one has imported it
    dist: Any = sys.modules.get("torch.distributed")
    return dist if dist and dist.is_available() and dist.is_initialized() else None


@dataclass(frozen=True)
class _Said:
    """What a rank calls, with a digest of each argument by name, and the error of its own part of it."""

    what: str
    arguments: Mapping[str, str]
    error: bytes | None = None


def from_rank_0(call: Callable[[], T], *, what: str, arguments: Mapping[str, str] | None = None) -> T:
    """Run `call` on rank 0 and return its value on every rank, pickled on the others.

    Args:
        what: The call in words, such as "load_table('main.ml.t')"; equal on all ranks.
        arguments: A digest of each argument, by name; equal on all ranks.

    Raises:
        RankError: A rank did not call within ARRIVAL_S, or called something else; on every rank that called. Or rank 0
            is lost.
        Exception: What `call` raised on rank 0, in the same type and words on every rank. What cannot be pickled, and
            what ends rank 0 (KeyboardInterrupt, SystemExit), is an EngineError on the others.
    """
    return call() if world_size() == 1 else _together(_Said(what, arguments or {}), call)


def on_every_rank(call: Callable[[], T], *, what: str) -> T:
    """Run `call` on every rank, and return its value there when it has succeeded on all.

    Raises:
        RankError: As in `from_rank_0`.
        Exception: What `call` raised on the first rank where it failed; on every rank.
    """
    if world_size() == 1:
        return call()
    made: list[T] = []
    error = None
    try:
        made.append(call())
    except Exception as exc:  # noqa: BLE001 - raised on all ranks
        error = _packed(exc)
    _together(_Said(what, {}, error), lambda: None)
    return made[0]


def _together(mine: _Said, call: Callable[[], T]) -> T:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    try:
        store = PrefixStore("bridge", _get_default_store())
        # the store counts: a group that is made again may have a new one
        number = store.add(f"calls/{rank()}", 1)
        meeting = _Meeting(PrefixStore(str(number), store), mine)
        return meeting.lead(call) if rank() == 0 else meeting.follow()
    except dist.DistError as exc:
        raise RankError(f"rank 0 was lost during {mine.what}, with the process group's store.{SEE_LOGS}") from exc


class _Meeting:
    """One call of all ranks, in a part of the store of its own, which is empty again when all have read the outcome."""

    def __init__(self, store: Any, mine: _Said) -> None:
        self._store = store
        self._mine = mine
        self._keys = [f"said/{other}" for other in range(world_size())]
        store.set(f"said/{rank()}", pickle.dumps(mine))

    def lead(self, call: Callable[[], T]) -> T:
        """Do it, on rank 0, and leave the outcome."""
        try:
            with self._heartbeat():
                self._gather()
                made = call()
                outcome = pickle.dumps((True, made))
        except BaseException as exc:
            self._publish(pickle.dumps((False, _packed(exc))))
            raise
        self._publish(outcome)
        return made

    def follow(self) -> Any:
        """Wait for the outcome and return or raise it."""
        began = changed = time.monotonic()
        beat = 0

        def is_decided() -> bool:
            nonlocal beat, changed
            if self._store.check(["outcome"]):
                return True
            now, last = time.monotonic(), beat
            beat = self._store.add("beat", 0)
            changed = now if beat != last else changed
            if not beat and now - began > ARRIVAL_S:
                raise RankError(f"rank 0 did not call {self._mine.what} within {ARRIVAL_S:g} s.{_TOGETHER}")
            if beat and now - changed > LOST_S:
                raise RankError(
                    f"rank 0 was lost during {self._mine.what}: it gave no sign of life for {LOST_S:g} s.{SEE_LOGS}"
                )
            return False

        try:
            _until(is_decided)
        except BaseException as exc:
            # so that rank 0, should it come or end after all, does not wait
            self._store.set(f"said/{rank()}", pickle.dumps(replace(self._mine, error=_packed(exc))))
            self._leave()
            raise
        pieces = [self._store.get(f"outcome/{index}") for index in range(int(self._store.get("outcome")))]
        self._leave()
        is_made, value = pickle.loads(b"".join(pieces))
        if is_made:
            return value
        raise _unpacked(value)

    def _gather(self) -> None:
        """Wait until all ranks are here, and see that they call the same."""
        if not _until(lambda: self._store.check(self._keys), ARRIVAL_S):
            absent = [str(other) for other, key in enumerate(self._keys) if not self._store.check([key])]
            ranks = f"rank{'s' * (len(absent) > 1)} {', '.join(absent)}"
            raise RankError(f"{ranks} did not call {self._mine.what} within {ARRIVAL_S:g} s.{_TOGETHER}")
        said: list[_Said] = [pickle.loads(self._store.get(key)) for key in self._keys]
        for other, theirs in enumerate(said):
            if theirs.what != self._mine.what:
                raise RankError(f"rank {other} called {theirs.what}, rank 0 {self._mine.what}.{_TOGETHER}")
            both = theirs.arguments.keys() | self._mine.arguments.keys()
            differ = sorted(name for name in both if theirs.arguments.get(name) != self._mine.arguments.get(name))
            if differ:
                raise RankError(
                    f"rank {other} and rank 0 called {theirs.what}, but differ in {', '.join(differ)}.{_TOGETHER}"
                )
        for theirs in said:
            if theirs.error is not None:
                raise _unpacked(theirs.error)

    @contextlib.contextmanager
    def _heartbeat(self) -> Iterator[None]:
        is_over = threading.Event()
        self._store.add("beat", 1)

        def beat() -> None:
            # a store that is gone is seen by all who use it
            with contextlib.suppress(RuntimeError):
                while not is_over.wait(_BEAT_S):
                    self._store.add("beat", 1)

        thread = threading.Thread(target=beat, name="bridge-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _publish(self, outcome: bytes) -> None:
        """Leave the outcome for the others, and stay until those who wait have read it."""
        waiting = sum(self._store.check([key]) for key in self._keys[1:])
        pieces = range(0, len(outcome), _PIECE_BYTES)
        for index, start in enumerate(pieces):
            self._store.set(f"outcome/{index}", outcome[start : start + _PIECE_BYTES])
        self._store.set("outcome", str(len(pieces)))
        _until(lambda: self._store.add("read", 0) >= waiting, _READ_S)
        self._leave()

    def _leave(self) -> None:
        """Say that this rank needs nothing more; the last deletes what was said."""
        if self._store.add("read", 1) == world_size():
            pieces = [f"outcome/{index}" for index in range(int(self._store.get("outcome")))]
            for key in (*self._keys, *pieces, "outcome", "beat", "read"):
                self._store.delete_key(key)


def _until(condition: Callable[[], bool], within_s: float = math.inf) -> bool:
    """Return whether `condition` held in time."""
    deadline, delay = time.monotonic() + within_s, 0.001
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(delay)
        delay = min(1.5 * delay, 0.5)
    return True


def _packed(error: BaseException) -> bytes:
    """Return an error as it goes to other ranks: itself, where it can be pickled, and its text."""
    text = f"rank {rank()} raised {type(error).__name__}: {error}"
    if isinstance(error, Exception):
        # any class may have a way of its own to be pickled, and to fail at it
        with contextlib.suppress(Exception):
            copy = pickle.loads(pickle.dumps(error))
            if type(copy) is type(error) and str(copy) == str(error):
                if not any(note.startswith("Raised on rank ") for note in getattr(copy, "__notes__", ())):
                    copy.add_note(f"Raised on rank {rank()}.")
                return pickle.dumps((pickle.dumps(copy), text))
    return pickle.dumps((None, text))


def _unpacked(packed: bytes) -> Exception:
    pickled, text = pickle.loads(packed)
    if pickled is not None:
        # its class may be missing here
        with contextlib.suppress(Exception):
            error: Exception = pickle.loads(pickled)
            return error
    return EngineError(text)


class Told:
    """Something that one rank tells the others before a collective call that they make together, and they ask after it.

    It goes through the store, where ranks of any process group find what others have to say. It is there when they ask,
    since the call came between; and what a call of before left was told anew.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._store: Any = None
        if world_size() > 1:
            from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

            self._store = PrefixStore("bridge/told", _get_default_store())

    def tell(self, value: str) -> None:
        """Tell the others."""
        if self._store is not None:
            self._store.set(self._what, value)
            self._store.check([self._what])  # it is there when this is answered: what is set is not acknowledged

    def ask(self) -> str:
        """Return what was told.

        Raises:
            RankError: Nobody told it.
        """
        if self._store is None or not self._store.check([self._what]):
            raise RankError(f"rank {rank()} takes part in {self._what}, which no rank began.{_TOGETHER}")
        return str(self._store.get(self._what).decode())

    def forget(self) -> None:
        """Take it back, when all have asked; on the rank that told it."""
        if self._store is not None:
            self._store.delete_key(self._what)


def cpu_group() -> Any:
    """Return a process group of all ranks that moves what is in memory: the default one where it has gloo.

    Raises:
        RuntimeError: There is no default process group.
    """
    import torch.distributed as dist

    return dist.group.WORLD if "cpu:gloo" in dist.get_backend_config() else own_group(_GLOO)


def own_group(name: str) -> Any:
    """Return a gloo process group of all ranks for one purpose, made at the first call, which all ranks make together.

    What goes over it cannot be mixed up with what other threads say over the default group.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    # found in torch's own list: a process group that is destroyed takes it along
    known = (found for found in _world.pg_map if found.group_desc == name)
    return next(known, None) or dist.new_group(backend="gloo", group_desc=name)


def broadcast_block(block: npt.NDArray[np.uint8]) -> None:
    """Send memory from rank 0, and receive it on the others."""
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.from_numpy(block), src=0, group=cpu_group())
