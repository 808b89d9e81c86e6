"""Ctrl-C: the operation ends on the server too, the session stays usable, nothing is half-visible."""

from __future__ import annotations

import _thread
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes import busy_cores


def test_ctrl_c_ends_a_load_on_the_server(engine: Any, route: str, tmp_path: Path) -> None:
    # one row, in hours; in many tasks, since those of Apache Spark do not end before their loop does
    endless = engine.spark.range(0, 10**12, 1, 20_000).filter("id % 2 = 0").groupBy().max("id")
    timer = threading.Timer(3, _thread.interrupt_main)
    timer.start()
    began = time.monotonic()

    try:
        with pytest.raises(KeyboardInterrupt):
            engine.load(endless, route=route, volume=tmp_path)
    finally:
        timer.cancel()

    assert time.monotonic() - began < 60
    deadline = time.monotonic() + 20
    while busy_cores() > 0.3:
        assert time.monotonic() < deadline
    assert engine.load(engine.spark.range(3)).num_rows == 3
    assert list(tmp_path.rglob("_bridge*")) == []
