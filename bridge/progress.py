"""The one way to show long work: a tqdm bar on stderr, in terminals and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bridge.display import format_bytes


def progress_bar(description: str, *, total: int | None, unit: str, enabled: bool | None = None) -> Any:
    """Return a tqdm bar, which shows itself after half a second and goes away when it is closed.

    Args:
        enabled: Whether it is shown; None: where stderr is a terminal, or in a notebook.
    """
    from tqdm import tqdm

    shown = enabled if enabled is not None else (sys.stderr.isatty() or _in_notebook())
    return tqdm(desc=description, total=total, unit=unit, unit_scale=True, leave=False, delay=0.5, disable=not shown)


@contextmanager
def task_bar(description: str, *, enabled: bool | None = None) -> Iterator[Callable[[int, int, int], None]]:
    """Show the tasks of a server: give what is to be called with the tasks done, those known so far and the bytes read.

    Args:
        enabled: As in `progress_bar`.
    """
    with progress_bar(description, total=None, unit=" tasks", enabled=enabled) as bar:

        def show(num_done: int, num_tasks: int, num_bytes: int) -> None:
            bar.n, bar.total = num_done, num_tasks
            bar.set_postfix_str(f"{format_bytes(num_bytes)} read")

        yield show


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")
