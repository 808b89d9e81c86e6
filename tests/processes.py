"""What this process and the servers it started are doing."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def busy_cores() -> float:
    """Return how many cores this process and its children keep busy, over one second."""
    own = psutil.Process()
    processes = [own, *own.children(recursive=True)]

    def spent() -> float:
        times = (process.cpu_times() for process in processes if process.is_running())
        return sum(each.user + each.system for each in times)

    before, began = spent(), time.monotonic()
    time.sleep(1)
    return (spent() - before) / (time.monotonic() - began)


def eventually(condition: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Wait until `condition` holds; fail where it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {within_s:g} s"
        time.sleep(0.005)
