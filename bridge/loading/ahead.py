"""Files that threads fetch ahead: a few where a disk gives them at once, many where a network is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from bridge.loading.prefetch import stopped_at_exit
from bridge.volumes.crew import threads_wanted

T = TypeVar("T")

_TICK_S = 0.02
_MOST_AT_ONCE = 32
_MOST_AT_FIRST = 16  # to begin one takes as long as to ask a near volume


class FetchedAhead(Generic[T]):
    """What `fetch` returns for each item, in order; about `num_ahead` beyond the one that was asked for last.

    Args:
        num_threads: The most there will be.
        at_first: How many there are at once, before it is known what they wait for.
    """

    def __init__(
        self, items: Sequence[Any], fetch: Callable[[Any], T], *, num_threads: int, num_ahead: int, at_first: int = 1
    ) -> None:  # fmt: skip
        self._items = items
        self._fetch = fetch
        self._most = num_threads
        self._at_first = min(at_first, num_threads, _MOST_AT_FIRST)
        self._num_ahead = num_ahead
        lock = threading.Lock()
        self._may_begin = threading.Condition(lock)
        self._is_ready = threading.Condition(lock)
        self._done: dict[int, T | BaseException] = {}
        self._begun = 0
        self._asked = 0
        self._idle = 0
        self._is_stopped = False
        self._threads: list[threading.Thread] = []
        self._cpu_s, self._since = 0.0, time.monotonic()

    @property
    def num_threads(self) -> int:
        """How many threads there are, or were."""
        return len(self._threads)

    def stop(self) -> None:
        """End the threads, when each has fetched what it is at."""
        if not any(thread.is_alive() for thread in self._threads):
            return  # so where it was forked, maybe while one held the lock
        with self._may_begin:
            self._is_stopped = True
            self._may_begin.notify_all()
        for thread in self._threads:
            thread.join()

    def results(self) -> Generator[T | BaseException]:
        """Yield what came of each item, or its error; when it is closed, all threads have ended."""
        with stopped_at_exit(self.stop):
            with self._may_begin:
                self._start(self._at_first)
            while self._asked < len(self._items):
                ready: list[T | BaseException] = []
                with self._is_ready:
                    self._is_ready.wait_for(lambda: self._asked in self._done)
                    # also those behind it: a lock for each would cost more than the loop that they are for
                    while len(ready) < _MOST_AT_ONCE and self._asked in self._done:
                        ready.append(self._done.pop(self._asked))
                        self._asked += 1
                    self._may_begin.notify(len(ready))
                yield from ready

    def _work(self) -> None:
        while (index := self._next()) is not None:
            began = time.thread_time()
            try:
                result: T | BaseException = self._fetch(self._items[index])
            except BaseException as exc:  # noqa: BLE001 - handed to the consumer
                result = exc
            cpu_s = time.thread_time() - began
            with self._is_ready:
                self._done[index] = result
                if index == self._asked:
                    self._is_ready.notify()
                self._cpu_s += cpu_s
                self._adapt()

    def _next(self) -> int | None:
        def is_over() -> bool:
            return self._is_stopped or self._begun == len(self._items)

        with self._may_begin:
            self._idle += 1
            self._may_begin.wait_for(lambda: is_over() or self._begun <= self._asked + self._num_ahead)
            self._idle -= 1
            if is_over():
                self._may_begin.notify_all()
                return None
            self._begun += 1
            return self._begun - 1

    def _adapt(self) -> None:
        now = time.monotonic()
        if now - self._since < _TICK_S:
            return
        busy = self._cpu_s / (now - self._since)
        self._cpu_s, self._since = 0.0, now
        # idle threads say that enough is fetched
        if not self._idle and not self._is_stopped:
            self._start(threads_wanted(len(self._threads), busy, most=self._most) - len(self._threads))

    def _start(self, count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._work, name="bridge-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()
