"""Work done ahead: in one thread as far as a number of bytes allows, or in several for a number of items."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


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
