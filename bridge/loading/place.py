"""Where an iteration is: a position in an epoch, and what of it one process goes through. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bridge.loading.order import Indices


@dataclass(frozen=True)
class Listing:
    """What there is to be ordered: the rows of each row group, and what is equal only for equal data."""

    row_counts: Sequence[int] | Indices
    digest: str

    @cached_property
    def num_rows(self) -> int:
        """The rows of all row groups."""
        return int(np.sum(self.row_counts))


@dataclass(frozen=True)
class Place:
    """A position in an epoch: `consumed` positions are done.

    Where a wrapper does not make one item of one, `items` tells for each worker how many items of the dataset under it
    are done since `consumed`, and how many were made of the next ones; `next_worker` is the one whose turn it is, and
    `of_rank` tells the rank and the world_size, for which alone this holds. `digest` is that of the data, where it is
    known.
    """

    epoch: int
    consumed: int = 0
    canonical_world_size: int | None = None
    items: tuple[tuple[int, int], ...] = ()
    next_worker: int = 0
    of_rank: tuple[int, int] | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Pass:
    """What one process iterates over: its rank's part of the order from `place` on, and its worker's part of that.

    Attributes:
        item: How many items of its part are left out at the start.
        made: How many items a wrapper has made of those that come next, and which it is to leave out.
    """

    place: Place
    rank: int
    world_size: int
    worker: int = 0
    num_workers: int = 1
    item: int = 0
    made: int = 0
