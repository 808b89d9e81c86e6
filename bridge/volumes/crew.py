"""Threads for work that mostly waits: few where the processor is the limit, more where calls wait for a network."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
Task = Callable[[], None]

_FIRST_THREADS = 2
_MOST_WAITING = 1024
_TICKS_S = (0.01, 0.05)
_QUICK_TICKS = 10
# of one processor: Python runs in one thread at a time, so that more threads gain nothing beyond
_BUSY = 0.7


class Stopped(Exception):  # noqa: N818 (no error: the work was told to stop)
    """The work is to stop."""


def threads_wanted(threads: int, busy: float, *, most: int) -> int:
    """Return how many threads there should be, where `threads` keep `busy` processors busy; never fewer than there are.

    Threads that wait need little of the processor: as many are wanted as would keep one almost busy.
    """
    if busy >= _BUSY:
        return threads
    return max(threads, min(most, math.ceil(threads * _BUSY / max(busy, 0.001))))


class Crew:
    """Does tasks in threads: files first in first out, folders last in first out, so that few of either wait.

    A folder's task is taken when there are fewer files than threads. An exception in a task stops everything and is
    raised by `drain`. As a context it ends all threads; where an exception leaves it, without doing what is left.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._files: deque[Task] = deque()
        self._folders: list[Task] = []
        self._unfinished = 0
        self._threads: list[threading.Thread] = []
        self._clocks: list[int] = []
        self._stopped = False
        self._failure: BaseException | None = None

    def __enter__(self) -> Crew:
        self._start(min(_FIRST_THREADS, self._most))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()

    @property
    def has_enough(self) -> bool:
        """Whether so many files wait that listing more would only take memory."""
        return len(self._files) >= _MOST_WAITING

    def add_files(self, tasks: Iterable[Task]) -> None:
        """Take tasks that each copy a file."""
        self._add(self._files.extend, list(tasks))

    def add_folders(self, tasks: Iterable[Task]) -> None:
        """Take tasks that find more tasks."""
        self._add(self._folders.extend, list(tasks))

    def share(self, items: Iterator[T], call: Callable[[T], None]) -> None:
        """Call with each item, in this thread and in those that come free; return when all calls have.

        Raises:
            BaseException: What a call raised; no item is begun after it.
        """
        lock = threading.Condition()
        working = 0
        failures: list[BaseException] = []

        def work() -> None:
            nonlocal working
            while True:
                with lock:
                    found = [] if failures else [item for item, _ in zip(items, range(1), strict=False)]
                    if not found:
                        return
                    working += 1
                try:
                    call(found[0])
                except BaseException as exc:  # noqa: BLE001 (raised below, in the thread that shares)
                    failures.append(exc)
                with lock:
                    working -= 1
                    lock.notify_all()

        self._add(self._files.extendleft, [work] * 7)
        work()
        with lock:
            lock.wait_for(lambda: not working)
        if failures:
            raise failures[0]

    def drain(self, show: Callable[[], None]) -> None:
        """Return when all tasks are done, and those that they added, or `stop` was called.

        Args:
            show: Called every now and then.

        Raises:
            BaseException: What a task raised.
        """
        ticks = 0
        began, spent = time.perf_counter(), self._cpu_seconds()
        while True:
            with self._changed:
                tick = _TICKS_S[ticks >= _QUICK_TICKS]
                if self._changed.wait_for(lambda: self._stopped or not self._unfinished, tick):
                    break
                waiting = len(self._files) + len(self._folders)
            ticks += 1
            show()
            now, cpu = time.perf_counter(), self._cpu_seconds()
            wanted = threads_wanted(len(self._threads), (cpu - spent) / (now - began), most=self._most)
            self._start(min(wanted - len(self._threads), waiting))
            began, spent = now, cpu
        show()
        if self._failure:
            raise self._failure

    def check(self) -> None:
        """Check that work is to go on.

        Raises:
            Stopped: It is not.
        """
        if self._stopped:
            raise Stopped

    def stop(self) -> None:
        """Begin no more tasks."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _add(self, add: Callable[[Iterable[Task]], None], tasks: list[Task]) -> None:
        with self._changed:
            add(tasks)
            self._unfinished += len(tasks)
            self._changed.notify(len(tasks))

    def _start(self, count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._work, name="bridge-copy")
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        self._clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        while (task := self._take()) is not None:
            try:
                task()
            except Stopped:
                pass
            except BaseException as exc:  # noqa: BLE001 (raised by `drain`)
                self._failure = self._failure or exc
                self.stop()
            with self._changed:
                self._unfinished -= 1
                if not self._unfinished:
                    self._changed.notify_all()

    def _take(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._files or self._folders)
            if self._stopped:
                return None
            if self._folders and len(self._files) < len(self._threads):
                return self._folders.pop()
            return self._files.popleft() if self._files else self._folders.pop()

    def _cpu_seconds(self) -> float:
        total = 0.0
        for clock in list(self._clocks):
            # the clock of a thread that has ended
            with contextlib.suppress(OSError):
                total += time.clock_gettime(clock)
        return total
