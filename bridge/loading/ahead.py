"""Files that threads fetch ahead: a few where a disk gives them at once, many where a network is waited for."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar

from bridge.volumes.crew import threads_wanted

T = TypeVar("T")

_TICK_S = 0.02
_MOST_AT_ONCE = 32
_MOST_AT_FIRST = 16  # to begin one takes as long as to ask a near volume


class FetchedAhead(Generic[T]):
    """What `fetch` returns for each item, in order; about `num_ahead` beyond the one that was asked for last.

    Use it as a context: at its end all threads have ended.

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

    def __enter__(self) -> Self:
        self._unregister = atexit.unregister  # what is closed last of all finds no modules
        atexit.register(self.stop)
        with self._may_begin:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._unregister(self.stop)

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

    def results(self) -> Iterator[T | BaseException]:
        """Yield what came of each item, or its error."""
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
        with self._may_begin:
            # one after another, while whoever asks waits for the first file and not for all of them
            if len(self._threads) < self._at_first and not self._is_stopped:
                self._start()
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
        with self._may_begin:
            self._idle += 1
            self._may_begin.wait_for(
                lambda: (
                    self._is_stopped or self._begun == len(self._items) or self._begun <= self._asked + self._num_ahead
                )
            )
            self._idle -= 1
            if self._is_stopped or self._begun == len(self._items):
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
            wanted = threads_wanted(len(self._threads), busy, most=self._most)
            while len(self._threads) < wanted:
                self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="bridge-fetch", daemon=True)
        self._threads.append(thread)
        thread.start()
