"""Threads for work that mostly waits: few where the processor is the limit, more where calls wait for a network."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Self, TypeVar

from bridge.errors import VolumeError

T = TypeVar("T")
Task = Callable[[], None]

_MOST_WAITING = 4096
_MOST_SHARING = 8
_TICK_S = 0.02
# of one processor: Python runs in one thread at a time, so that more threads gain nothing beyond
_BUSY = 0.7
_WAITING = 0.1


class Stopped(Exception):  # noqa: N818 (no error: it was told to stop)
    """The work is to stop."""


def threads_wanted(threads: int, busy: float, *, most: int) -> int:
    """Return how many threads there should be, where `threads` keep `busy` processors busy; not fewer than there are.

    Where each uses next to nothing of a processor they wait for a network: the most are wanted, since what waits costs
    nothing. Else as many as would keep one processor almost busy.
    """
    if busy < _WAITING * threads:
        return max(threads, most)
    if busy >= _BUSY:
        return threads
    return max(threads, min(most, math.ceil(threads * _BUSY / busy)))


class Crew:
    """Does tasks in threads: those that copy files, and those that find more, the last found first.

    Files of several folders take turns, since the kernel makes names in one folder one after another; and so do files
    and what finds more, while not too many wait. An exception in a task stops everything and is raised by `drain`. At
    the end of the context all threads have ended; what they had not begun is dropped.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._files: deque[deque[Task]] = deque()
        self._num_waiting = 0
        self._finds_next = True
        self._folders: list[Task] = []
        self._unfinished = 0
        self._threads: list[threading.Thread] = []
        self._clocks: list[int] = []
        self._is_stopped = False
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()

    @property
    def num_threads(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    @property
    def has_enough(self) -> bool:
        """Whether so many files wait that to find more would only take memory."""
        return self._num_waiting >= _MOST_WAITING

    def add(self, files: Sequence[Task] = (), folders: Sequence[Task] = ()) -> None:
        """Take tasks."""
        with self._changed:
            if files:
                self._files.append(deque(files))
                self._num_waiting += len(files)
            self._folders.extend(folders)
            self._unfinished += len(files) + len(folders)
            self._changed.notify(len(files) + len(folders))

    def share(self, items: Iterator[T], call: Callable[[T], None]) -> None:
        """Call with each item, in this thread and in those that come free; return when all calls have.

        Raises:
            Stopped: The work is not to go on.
            BaseException: What a call raised; no item is begun after it.
        """
        changed = threading.Condition()
        working = 0
        failures: list[BaseException] = []

        def work() -> None:
            nonlocal working
            while True:
                with changed:
                    chosen = next(items, None) if not failures else None
                    if chosen is None:
                        return
                    working += 1
                try:
                    self.check()
                    call(chosen)
                except BaseException as exc:  # noqa: BLE001 (raised below, in the thread that shares)
                    failures.append(exc)
                with changed:
                    working -= 1
                    changed.notify_all()

        self.add([work] * (_MOST_SHARING - 1))
        work()
        with changed:
            changed.wait_for(lambda: not working)
        if failures:
            raise failures[0]

    def drain(self, show: Callable[[], None]) -> None:
        """Return when all tasks are done, and those that they added, or `stop` was called.

        Args:
            show: Called every now and then.

        Raises:
            BaseException: What a task raised.
        """
        # on a disk the processor is the limit, and a second thread costs more than it gives
        self._start(0 if self._threads else 1)
        began, spent, is_done = time.perf_counter(), self._cpu_seconds(), False
        while not is_done:
            with self._changed:
                is_done = self._changed.wait_for(lambda: self._is_stopped or not self._unfinished, _TICK_S)
                waiting = self._num_waiting + len(self._folders)
            show()
            now, cpu = time.perf_counter(), self._cpu_seconds()
            wanted = threads_wanted(len(self._threads), (cpu - spent) / (now - began), most=self._most)
            self._start(0 if is_done else min(wanted - len(self._threads), waiting))
            began, spent = now, cpu
        if self._failure:
            raise self._failure

    def check(self) -> None:
        """Check that work is to go on.

        Raises:
            Stopped: It is not.
        """
        if self._is_stopped:
            raise Stopped

    def stop(self) -> None:
        """Begin no more tasks."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _start(self, count: int) -> None:
        try:
            for _ in range(count):
                thread = threading.Thread(target=self._work, name="bridge-copy")
                thread.start()
                self._threads.append(thread)
        except RuntimeError as exc:
            self._most = len(self._threads)  # the machine allows no more
            if not self._threads:
                raise VolumeError(
                    f"no thread can be started ({exc}).\n  End other work here, or raise the limit of processes."
                ) from exc

    def _work(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):  # without it all threads seem to wait, and more are started
            self._clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        task = self._take(0)
        while task is not None:
            try:
                task()
            except Stopped:
                pass
            except BaseException as exc:  # noqa: BLE001 (raised by `drain`)
                self._failure = self._failure or exc
                self.stop()
            task = self._take(1)

    def _take(self, num_done: int) -> Task | None:
        """Return the next task, None where there is to be none; `num_done` were done since the last."""
        with self._changed:
            self._unfinished -= num_done
            if not self._unfinished:
                self._changed.notify_all()
            while not (self._is_stopped or self._files or self._folders):
                self._changed.wait()
            if self._is_stopped:
                return None
            if self._folders and (not self._files or (self._finds_next and not self.has_enough)):
                self._finds_next = False
                return self._folders.pop()
            self._finds_next = True
            group = self._files.popleft()
            task = group.popleft()
            if group:
                self._files.append(group)
            self._num_waiting -= 1
            return task

    def _cpu_seconds(self) -> float:
        total = 0.0
        for clock in list(self._clocks):
            with contextlib.suppress(OSError):  # that thread has ended
                total += time.clock_gettime(clock)
        return total
