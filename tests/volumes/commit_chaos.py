"""Writers of attempts that are killed, and what must be so afterwards."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bridge.volumes import lease
from bridge.volumes.commit import (
    Attempt,
    attempts,
    begin,
    collect_garbage,
    complete_attempts,
    delete_attempt,
)
from bridge.volumes.digest import digest_bytes
from bridge.volumes.storage import Storage
from bridge.volumes.stores import LocalStorage

_SHORT_GRACE_S = 1.0

Report = Callable[[str], None]


def commit_round(folder: Path, seed: int, *, writers: int = 2, longest_s: float = 0.08) -> int:
    """Kill writers at random moments, then check; return how many attempts they had completed.

    Raises:
        AssertionError: An attempt is half visible or lost, or garbage stays.
    """
    rng = random.Random(seed)
    children = [
        forked(lambda report, n=n: _write_on(LocalStorage(folder), seed * 10 + n, report)) for n in range(writers)
    ]
    events: list[str] = []
    for pid, reader in children:
        time.sleep(rng.uniform(0, longest_s))
        os.kill(pid, signal.SIGKILL)
        events += ended(pid, reader, expected=-signal.SIGKILL)
    _check(LocalStorage(folder), events)
    return sum(event.startswith("committed") for event in events)


def contended_round(folder: Path, seed: int) -> None:
    """Let a writer take longer than the grace time, while another is killed and a third process collects garbage.

    Raises:
        AssertionError: As of `commit_round`, or the living writer's attempt was collected.
    """
    rng = random.Random(seed)
    storage = LocalStorage(folder)
    living = forked(partial(_write_slowly, storage, seed))
    dying = forked(partial(_write_slowly, storage, seed + 1))
    collector = forked(partial(_collect_on, storage))
    try:
        time.sleep(rng.uniform(0, 1.5))
        os.kill(dying[0], signal.SIGKILL)
        events = ended(*dying, expected=-signal.SIGKILL) + ended(*living, expected=0)
    finally:
        os.kill(collector[0], signal.SIGKILL)
        ended(*collector, expected=-signal.SIGKILL)
    assert any(event.startswith("committed") for event in events)
    _check(storage, events)


def kill_at_every_step(folder: Path) -> int:
    """Kill a writer before, in and after each of its effects in turn, then check each time; return how many there were.

    Raises:
        AssertionError: As of `commit_round`.
    """
    storage = LocalStorage(folder)
    events = ended(*forked(partial(_write_one, storage, 0)), expected=0)
    for step in itertools.count():
        more, status = events_and_status(*forked(partial(_write_one, Killing(storage, step), step)))
        events += more
        _check(storage, events)
        if status == 0:
            return step
        assert status == -signal.SIGKILL, status
    raise AssertionError


class Killing:
    """A storage that kills its process at one of its effects: 3 k before the k-th, 3 k + 1 in it, 3 k + 2 after it."""

    def __init__(self, storage: Storage, step: int) -> None:
        self._storage = storage
        self._left = step

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)
        if name not in ("write", "delete", "make_folder", "delete_folder"):
            return method

        def effect(*args: Any) -> None:
            self.step()
            if name == "write" and self._left == 0:
                args = (args[0], _half_then_die(args[1]))
            self.step()
            method(*args)
            self.step()

        return effect

    def __str__(self) -> str:
        return str(self._storage)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls `call`, as one more effect to be killed before or after."""

        def effect(*args: Any, **options: Any) -> Any:
            self.step()
            result = call(*args, **options)
            self.step()
            return result

        return effect

    def step(self) -> None:
        """Go on, or die here."""
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def _half_then_die(blocks: Iterable[bytes]) -> Iterator[bytes]:
    whole = b"".join(blocks)
    yield whole[: len(whole) // 2]
    os.kill(os.getpid(), signal.SIGKILL)


def _write_on(storage: Storage, seed: int, report: Report) -> None:
    for number in itertools.count():
        _write_one(storage, seed + number, report)


def _write_one(storage: Storage, seed: int, report: Report) -> None:
    """Write an attempt, then keep the best two and collect what the dead left."""
    rng = random.Random(seed)
    with begin(storage, "chaos") as opened:
        storage.make_folder(opened.name)
        files = {
            f"part-{number}": rng.randbytes(rng.choice((0, 1, 4096, 300_000))) for number in range(rng.randint(1, 3))
        }
        for name, content in files.items():
            storage.write(f"{opened.name}/{name}", [content[:1000], content[1000:]])
        body = {"files": {name: [len(content), digest_bytes(content)] for name, content in files.items()}}
        opened.commit(body, {name: len(content) for name, content in files.items()})
    report(f"committed {opened.name}")
    for attempt, _ in list(complete_attempts(storage))[2:]:
        report(f"deleting {attempt.name}")
        delete_attempt(storage, attempt)
    collect_garbage(storage, grace_s=3600)


def _write_slowly(storage: Storage, seed: int, report: Report) -> None:
    lease.BEAT_S = _SHORT_GRACE_S / 20
    rng = random.Random(seed)
    contents = [rng.randbytes(4096) for _ in range(4)]
    with begin(storage, "chaos") as opened:
        storage.make_folder(opened.name)
        for number, content in enumerate(contents):
            storage.write(f"{opened.name}/part-{number}", [content])
            time.sleep(_SHORT_GRACE_S / 2)
        files = {f"part-{number}": [len(content), digest_bytes(content)] for number, content in enumerate(contents)}
        opened.commit({"files": files}, {name: size for name, (size, _) in files.items()})
    report(f"committed {opened.name}")


def _collect_on(storage: Storage, report: Report) -> None:
    while True:
        collect_garbage(storage, grace_s=_SHORT_GRACE_S)
        time.sleep(0.05)


def _check(storage: Storage, events: list[str]) -> None:
    visible: dict[str, Attempt] = {}
    for attempt, marker in complete_attempts(storage):
        visible[attempt.name] = attempt
        for name, (num_bytes, digest) in marker.body["files"].items():
            content = storage.read(f"{attempt.name}/{name}")
            assert (len(content), digest_bytes(content)) == (num_bytes, digest), f"half visible: {attempt.name}/{name}"
    done = {name for kind, name in map(str.split, events) if kind == "committed"}
    deleted = {name for kind, name in map(str.split, events) if kind == "deleting"}
    assert not (lost := done - deleted - set(visible)), f"lost: {lost}"

    collect_garbage(storage, grace_s=0)

    kept = {attempt.name for attempt in attempts(storage)}
    assert kept == set(visible), f"garbage: {kept - set(visible)}; collected: {set(visible) - kept}"
    assert not (stale := [entry.name for entry in storage.list("_leases")]), f"leases: {stale}"
    assert not (others := {entry.name for entry in storage.list()} - kept - {"_leases"}), f"others: {others}"


def forked(work: Callable[[Report], None]) -> tuple[int, int]:
    """Start a process that does `work` and ends; return its id, and a pipe from which what it reports can be read."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.close(reader)
        work(lambda line: os.write(writer, f"{line}\n".encode()) and None)
    except BaseException:  # noqa: BLE001  # whatever it is, the child ends here
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def events_and_status(pid: int, reader: int) -> tuple[list[str], int]:
    """Wait for the end of a forked process; return what it reported, and its exit status."""
    with open(reader, encoding="utf-8") as lines:
        events = lines.read().splitlines()
    return events, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ended(pid: int, reader: int, *, expected: int) -> list[str]:
    """Wait for the end of a forked process, which must be as expected; return what it reported."""
    events, status = events_and_status(pid, reader)
    assert status == expected, f"the writer ended with {status}"
    return events
