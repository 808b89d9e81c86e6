from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bridge.loading.ahead import FetchedAhead, _Ahead, mapped_ahead


def test_threads_that_waited_for_room_all_begin_again_when_there_is_room() -> None:
    all_begin = threading.Barrier(8)
    num_ahead = 16

    def fetch(item: int) -> int:
        if item == 0:
            while ahead._idle < 7:
                time.sleep(0.001)
        elif item > num_ahead:
            all_begin.wait(5)
        return item

    ahead = FetchedAhead(range(num_ahead + 9), fetch, num_threads=8, num_ahead=num_ahead, at_first=8)
    assert list(ahead.results()) == list(range(num_ahead + 9))


@pytest.mark.parametrize("allowed", [1, 3])
def test_where_no_more_threads_can_be_started_those_there_are_fetch_all(
    allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    ahead = FetchedAhead(range(100), lambda item: item, num_threads=16, num_ahead=16, at_first=8)
    monkeypatch.setattr(threading.Thread, "start", refuse)

    assert list(ahead.results()) == list(range(100))
    assert ahead.num_threads == allowed


def test_where_no_thread_can_be_started_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        next(FetchedAhead(range(9), str, num_threads=4, num_ahead=4, at_first=4).results())


def test_what_was_forked_has_no_thread_to_wait_for() -> None:
    is_held, is_forked = threading.Event(), threading.Event()

    def size_of(_: int) -> int:
        with ahead._changed:
            is_held.set()
            is_forked.wait(20)
        return 1

    def items() -> Generator[int]:
        yield 1

    ahead = _Ahead(items(), size_of, 1)
    ahead.thread.start()
    is_held.wait(20)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        ahead.stop()
        os._exit(0)
    is_forked.set()
    assert os.waitpid(child, 0)[1] == 0
    ahead.stop()


def test_a_loop_in_a_thread_ends_with_the_interpreter_in_silence() -> None:
    ahead = _Ahead((number for number in itertools.count()), lambda _: 1, 1)
    ahead.thread.start()
    made = iter(ahead)
    next(made)
    ahead.stop()
    with pytest.raises(SystemExit):
        list(made)


def test_what_is_mapped_ahead_comes_in_order_also_when_no_executor_takes_it() -> None:
    threads = ThreadPoolExecutor(2)
    begun: list[int] = []

    def items() -> Iterator[int]:
        for item in range(9):
            begun.append(item)
            if item == 5:
                threads.shutdown()
            yield item

    for item, made in enumerate(mapped_ahead(threads, lambda item: item * 10, items(), 3)):
        assert made == item * 10
        assert len(begun) <= item + 3


def test_a_loop_in_a_thread_goes_on_when_the_main_thread_has_ended(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": np.arange(1000), "m": np.arange(1000)}), tmp_path / "a.parquet", row_group_size=10)
    code = f"""
import threading, bridge
data = bridge.ParquetDataset({str(tmp_path)!r}, batch_size=10, shuffle=True, shuffle_window=20, prefetch_bytes=1)
batches = iter(data)
rows = len(next(batches)["n"])
def loop():
    threading.main_thread().join()
    print(rows + sum(len(batch["n"]) for batch in batches))
threading.Thread(target=loop).start()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("1000\n", "")
