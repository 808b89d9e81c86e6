"""Volumes for the tests: without latency, with every refusal, and with nothing remembered by the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.volumes.mount import Volume, mounted_volume


@pytest.fixture
def mount_volume(tmp_path: Path) -> Iterator[Callable[..., Volume]]:
    """Return what mounts a volume with these settings until the end of the test."""
    with ExitStack() as stack:
        made = 0

        def mount(**settings: int) -> Volume:
            nonlocal made
            made += 1
            folder = tmp_path / f"mount{made}"
            return stack.enter_context(mounted_volume(folder, **{"cache_ms": 0, **settings}))

        yield mount


@pytest.fixture
def volume(mount_volume: Callable[..., Volume]) -> Volume:
    return mount_volume()
