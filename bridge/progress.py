"""The one way to show long work: a tqdm bar on stderr, in terminals and notebooks."""

from __future__ import annotations

import sys
from typing import Any


def progress_bar(description: str, *, total: int | None, unit: str, enabled: bool | None = None) -> Any:
    """Return a tqdm bar; it goes away when it is closed.

    Args:
        enabled: Whether it is shown; None: where stderr is a terminal or a notebook shows it.
    """
    from tqdm.auto import tqdm

    shown = enabled if enabled is not None else (sys.stderr.isatty() or "ipykernel" in sys.modules)
    return tqdm(desc=description, total=total, unit=unit, unit_scale=True, leave=False, disable=not shown)
