"""Digests: how fast bytes are checked, beside how fast memory is copied."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bar, Report, compare

NUM_BYTES = 1 << 30


def measure(*, engine: str, rounds: int, folder: Path) -> Report:
    """Return the figures; no engine takes part."""
    from bridge.volumes.digest import digest_bytes, digest_ranges

    report = Report("digest", "none")
    source = np.frombuffer(os.urandom(1 << 20), dtype=np.uint8).repeat(NUM_BYTES >> 20)
    target = np.empty_like(source)
    path = folder / "file"
    source.tofile(path)

    def copied() -> None:
        np.copyto(target, source)

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            file.readinto(memoryview(target))

    def nothing(_: Any, __: Any) -> None:
        return None

    comparison = compare(
        {
            "memcpy": copied,
            "digest_bytes": lambda: digest_bytes(memoryview(source)),
            "read the file into memory": read,
            "digest_ranges of the file": lambda: digest_ranges(path, [(0, NUM_BYTES)]),
        },
        reference="memcpy",
        rounds=max(rounds, 5),
        check=nothing,
    )
    report.add_comparison(
        "1 GiB, the file in the page cache",
        comparison,
        against={"digest_ranges of the file": "read the file into memory"},
    )
    report.bars.append(Bar("1 GiB: digest over memcpy", comparison.ratio("digest_bytes").median, 2.0, "x"))
    return report
