"""The one way to show long work: a tqdm bar on stderr, in terminals and notebooks."""

from __future__ import annotations

import sys
from typing import Any


def progress_bar(description: str, *, total: int | None, unit: str, enabled: bool | None = None) -> Any:
    """Return a tqdm bar, which shows itself after half a second and goes away when it is closed.

    Args:
        enabled: Whether it is shown; None: where stderr is a terminal, or in a notebook.
    """
    from tqdm import tqdm

    shown = enabled if enabled is not None else (sys.stderr.isatty() or _in_notebook())
    return tqdm(desc=description, total=total, unit=unit, unit_scale=True, leave=False, delay=0.5, disable=not shown)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")
