"""All ranks iterate over the same thing in the same way, or none begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.distributed import from_rank_0


def agree(what: str, options: Mapping[str, Any]) -> None:
    """Return when all ranks have begun `what` with the same options.

    Raises:
        RankError: A rank differs, or did not come; on every rank, naming the rank and the options.
    """
    from_rank_0(lambda: None, what=what, arguments={name: str(value) for name, value in options.items()})
