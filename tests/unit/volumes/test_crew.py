from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import VolumeError
from bridge.volumes.crew import Crew, Stopped, threads_wanted


def nothing() -> None:
    pass


@given(threads=st.integers(1, 200), busy=st.floats(0, 16), most=st.integers(1, 200))
def test_threads_are_never_fewer_nor_more_than_allowed(threads: int, busy: float, most: int) -> None:
    wanted = threads_wanted(threads, busy, most=most)
    assert threads <= wanted <= max(most, threads)
    assert wanted == threads or busy < max(0.7, 0.1 * threads)


def test_threads_that_only_wait_are_joined_by_the_most_and_others_by_what_keeps_a_processor_busy() -> None:
    assert threads_wanted(4, 0.7, most=128) == 4
    assert threads_wanted(4, 0.5, most=128) == 6
    assert threads_wanted(4, 0.39, most=128) == 128
    assert threads_wanted(4, 0.0, most=128) == 128


def test_tasks_that_wait_get_more_threads_up_to_the_most() -> None:
    assert threads_that_work() == 16


def test_tasks_that_keep_a_processor_busy_get_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # how much of a processor there is for a test, none can say
    monkeypatch.setattr(Crew, "_cpu_seconds", lambda _: time.perf_counter())
    assert threads_that_work() == 1


def test_the_time_of_the_threads_is_that_of_what_they_compute() -> None:
    def compute() -> None:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass

    with Crew(2) as crew:
        before = crew._cpu_seconds()
        crew.add([compute, compute, lambda: time.sleep(0.5)])
        crew.drain(nothing)
        assert 0.4 <= crew._cpu_seconds() - before < 0.5


def threads_that_work() -> int:
    seen: set[int] = set()

    def task() -> None:
        seen.add(threading.get_ident())
        time.sleep(0.03)

    with Crew(16) as crew:
        crew.add([task] * 128)
        crew.drain(nothing)
    return len(seen)


def limit_threads(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    start, started = threading.Thread.start, 0

    def limited(thread: threading.Thread) -> None:
        nonlocal started
        if started == most:
            raise RuntimeError("can't start new thread")
        started += 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_where_no_more_threads_can_be_started_those_there_are_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_threads(monkeypatch, 3)
    assert threads_that_work() == 3


def test_where_no_thread_can_be_started_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_threads(monkeypatch, 0)
    with pytest.raises(VolumeError, match=r"no thread can be started \(can't start new thread\)"), Crew(4) as crew:
        crew.drain(nothing)


def test_an_interrupt_while_the_first_thread_starts_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = threading.active_count(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt), Crew(4) as crew:
            crew.drain(nothing)
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_without_the_clocks_of_threads_all_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "pthread_getcpuclockid")
    assert threads_that_work() == 16


def test_drain_returns_when_tasks_that_tasks_added_are_done() -> None:
    done: list[int] = []

    with Crew(3) as crew:

        def find(depth: int) -> None:
            crew.add([lambda: done.append(depth)], [lambda: find(depth - 1)] * 2 if depth else [])

        crew.add(folders=[lambda: find(6)])
        crew.drain(nothing)
        assert len(done) == 2**7 - 1
        crew.add([lambda: done.append(7)])
        crew.drain(nothing)
        assert done[-1] == 7


def test_an_exception_ends_everything_and_is_raised() -> None:
    began: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError("the first")

    with Crew(1) as crew:
        crew.add([fail, *[lambda: began.append(1)] * 100])
        with pytest.raises(ZeroDivisionError, match="the first"):
            crew.drain(nothing)
    assert began == []


def test_an_exception_in_the_context_ends_the_threads() -> None:
    before = threading.active_count()
    crew = Crew(2)
    crew.add([lambda: time.sleep(0.01)] * 10_000)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), crew:
        crew.drain(interrupt)
    assert threading.active_count() == before


def test_check_raises_once_stopped_and_that_is_no_failure() -> None:
    with Crew(1) as crew:
        crew.check()

        def stopped() -> None:
            crew.stop()
            crew.check()

        crew.add([stopped])
        crew.drain(nothing)
        with pytest.raises(Stopped):
            crew.check()


@pytest.mark.parametrize("most", [1, 6])
def test_what_is_shared_is_done_once_each(most: int) -> None:
    done: list[int] = []
    finished: list[bool] = []

    with Crew(most) as crew:

        def share() -> None:
            crew.share(iter(range(50)), lambda item: (time.sleep(0.002), done.append(item))[1])
            finished.append(sorted(done) == list(range(50)))

        crew.add([share])
        crew.drain(nothing)
    assert finished == [True]


def test_a_failure_in_what_is_shared_reaches_who_shares_after_all_calls_ended() -> None:
    running = 0
    lock = threading.Lock()

    def call(item: int) -> None:
        nonlocal running
        with lock:
            running += 1
        time.sleep(0.005)
        with lock:
            running -= 1
        if item == 10:
            raise OSError("item 10")

    with Crew(4) as crew:

        def share() -> None:
            with pytest.raises(OSError, match="item 10"):
                crew.share(iter(range(1000)), call)
            assert running == 0

        crew.add([share])
        crew.drain(nothing)


def test_what_is_shared_ends_when_the_work_is_to_stop() -> None:
    done: list[int] = []
    ended: list[type[BaseException]] = []

    def call(item: int) -> None:
        time.sleep(0.001)
        done.append(item)
        if len(done) == 10:
            crew.stop()

    def share() -> None:
        try:
            crew.share(iter(range(100_000)), call)
        except BaseException as exc:
            ended.append(type(exc))
            raise

    with Crew(2) as crew:
        crew.add([share])
        crew.drain(nothing)

    assert ended == [Stopped]
    assert 10 <= len(done) <= 12
