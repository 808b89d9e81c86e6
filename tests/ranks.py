"""Processes that are the ranks of a process group.

`python -m tests.ranks <name> <argument>...` is one of them: it calls the function of that name in `tests.rank_calls`,
or in the module of `tests` that the name begins with.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from bridge.spark.engines.process import free_port

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit status, and what it told, by name."""

    status: int
    told: dict[str, Any]
    stderr: str


def run_ranks(
    name: str, world_size: int, *arguments: str | os.PathLike[str], within_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[Ended]:  # fmt: skip
    """Run a function of `tests.rank_calls`, or `module.function`, on so many ranks; none outlives the call."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    common |= {"LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1", **(environment or {})}
    with contextlib.ExitStack() as stack:
        # files, since a rank whose pipe is full waits, and the others for it
        outputs = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(world_size)]
        processes = []
        for rank, (stdout, stderr) in enumerate(outputs):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.ranks", name, *map(os.fspath, arguments)],
                cwd=REPOSITORY, env=os.environ | common | {"RANK": str(rank)}, stdout=stdout, stderr=stderr,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        deadline = time.monotonic() + within_s
        ended = []
        for process, (stdout, stderr) in zip(processes, outputs, strict=True):
            status = process.wait(max(0.1, deadline - time.monotonic()))
            stdout.seek(0)
            stderr.seek(0)
            ended.append(Ended(status, dict(map(json.loads, stdout)), stderr.read()))
        return ended


def tell(name: str, call: Callable[[], Any]) -> None:
    """Print what a call returns or raises, as JSON, for the test to read."""
    began = time.monotonic()
    told: dict[str, Any] = {}
    try:
        told["value"] = call()
    except BaseException as exc:  # noqa: BLE001 - told
        told |= {"error": type(exc).__name__, "text": str(exc), "notes": getattr(exc, "__notes__", [])}
    told["seconds"] = time.monotonic() - began
    sys.stdout.write(f"{json.dumps([name, told])}\n")
    sys.stdout.flush()


def digest(rows: pa.Table) -> str:
    """Return what is equal for equal rows in equal record batches."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return hashlib.blake2b(sink.getvalue()).hexdigest()


def tables() -> list[pa.Table]:
    """Return rows of every shape that counts here."""
    numbers = pa.table({"n": range(1000), "t": [f"row {number}" * (number % 7) for number in range(1000)]})
    words = [pa.array(values).dictionary_encode() for values in (["a", "b", None], ["c"])]
    return [
        pa.concat_tables([numbers[:10], numbers[10:10], numbers[10:999]]),
        pa.table({"n": pa.chunked_array([[1], [2, 3]]), "m": pa.chunked_array([[1, None], [3]])}),
        pa.table({"word": pa.chunked_array(words)}),
        numbers.schema.with_metadata({"k": "v"}).empty_table(),
        pa.table({}),
    ]


if __name__ == "__main__":
    module, _, function = sys.argv[1].rpartition(".")
    getattr(importlib.import_module(f"tests.{module or 'rank_calls'}"), function)(*sys.argv[2:])
