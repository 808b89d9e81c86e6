"""Work done ahead: in one thread as far as a number of bytes allows, or in several for a number of items."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

from bridge.volumes.crew import threads_wanted

S = TypeVar("S")
T = TypeVar("T")

_TICK_S = 0.02
_MOST_AT_ONCE = 32
_MOST_AT_FIRST = 16  # to begin one takes as long as to ask a near volume


def mapped_ahead(threads: Executor, call: Callable[[S], T], items: Iterable[S], depth: int) -> Iterator[T]:
    """Yield what `call` makes of the items, in their order, of which `depth` at most are begun and not yet yielded."""
    begun: deque[Callable[[], T]] = deque()
    for item in items:
        try:
            begun.append(threads.submit(call, item).result)
        except RuntimeError:
            # when the main thread ends, executors take nothing more, though threads may go on for long
            begun.append(partial(call, item))
        if len(begun) == depth:
            yield begun.popleft()()
    while begun:
        yield begun.popleft()()


def made_ahead(items: Generator[T], size_of: Callable[[T], int], max_bytes: int) -> Generator[T]:
    """Yield the items while a thread makes the next ones.

    One is begun while those that wait hold no more than `max_bytes` with it, as large as the last was, or where none
    waits. What making one raises is raised here, in its place. The thread closes `items`.
    """
    ahead = _Ahead(items, size_of, max_bytes)
    with stopped_at_exit(ahead.stop):
        ahead.thread.start()
        yield from ahead


@contextmanager
def stopped_at_exit(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the end, be it that of the interpreter: a thread that works on then takes the process with it."""
    unregister = atexit.unregister  # a generator that is closed last of all finds no modules
    atexit.register(stop)
    try:
        yield
    finally:
        stop()
        unregister(stop)


class _Ahead(Generic[T]):
    def __init__(self, items: Generator[T], size_of: Callable[[T], int], max_bytes: int) -> None:
        self.thread = threading.Thread(target=self._work, name="bridge-decode", daemon=True)
        self._items = items
        self._size_of = size_of
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._made: deque[tuple[T, int]] = deque()
        self._num_bytes = 0
        self._is_over = self._is_stopped = False
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._made or self._is_over)
                if not self._made:
                    break
                item, num_bytes = self._made.popleft()
                self._num_bytes -= num_bytes
                self._changed.notify()
            yield item
            del item  # so that it is freed when the caller lets go of it
        if self._error is not None:
            raise self._error
        if self._is_stopped:
            raise SystemExit  # the interpreter ends, and with it the thread that this is

    def stop(self) -> None:
        """End the thread, when it has made what it is at."""
        if self.thread.is_alive():  # not so where it was forked, maybe while it held the lock
            with self._changed:
                self._is_over = self._is_stopped = True
                self._changed.notify()
            if self.thread is not threading.current_thread():
                self.thread.join()
        self._made.clear()

    def _work(self) -> None:
        last = 0
        try:
            while self._may_begin(last):
                item = next(self._items, None)
                if item is None:
                    break
                last = self._size_of(item)
                with self._changed:
                    self._made.append((item, last))
                    self._num_bytes += last
                    self._changed.notify()
                del item
        except BaseException as exc:  # noqa: BLE001 - carried to the consumer, who raises it
            self._error = exc
        finally:
            self._items.close()
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _may_begin(self, num_bytes: int) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or not self._made or self._num_bytes + num_bytes <= self._max_bytes
            )
            return not self._is_over


class FetchedAhead(Generic[S, T]):
    """What `fetch` returns for each item, in order; about `num_ahead` beyond the one that was asked for last.

    Threads are a few where a disk gives files at once, and many where a network is waited for.

    Args:
        num_threads: The most there will be.
        at_first: How many there are at once, before it is known what they wait for.
    """

    def __init__(
        self, items: Sequence[S], fetch: Callable[[S], T], *, num_threads: int, num_ahead: int, at_first: int
    ) -> None:  # fmt: skip
        self._items = items
        self._fetch = fetch
        self._most = num_threads
        self._wanted = min(at_first, num_threads, _MOST_AT_FIRST)
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
                self._start()
            while self._asked < len(self._items):
                ready: list[T | BaseException] = []
                with self._is_ready:
                    self._is_ready.wait_for(lambda: self._asked in self._done)
                    # also those behind it: a lock for each would cost more than the loop that they are for
                    while len(ready) < _MOST_AT_ONCE and self._asked in self._done:
                        ready.append(self._done.pop(self._asked))
                        self._asked += 1
                    self._may_begin.notify()
                yield from ready

    def _work(self) -> None:
        with self._may_begin:
            # one after another, while whoever asks waits for a file and not for all of them
            if len(self._threads) < self._wanted and not self._is_stopped:
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
        def may_go_on() -> bool:
            return self._is_stopped or self._begun == len(self._items) or self._begun <= self._asked + self._num_ahead

        with self._may_begin:
            self._idle += 1
            self._may_begin.wait_for(may_go_on)
            self._idle -= 1
            # threads wake one another: to wake them all would take longer than the loop has between two batches
            if self._idle and may_go_on():
                self._may_begin.notify()
            if self._is_stopped or self._begun == len(self._items):
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
        if not self._idle and not self._is_stopped and len(self._threads) >= self._wanted:
            self._wanted = threads_wanted(len(self._threads), busy, most=self._most)
            if len(self._threads) < self._wanted:
                self._start()

    def _start(self) -> None:
        """Start a thread; where there can be no more, those that are there do it all."""
        thread = threading.Thread(target=self._work, name="bridge-fetch", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            self._most = self._wanted = len(self._threads)
        else:
            self._threads.append(thread)
