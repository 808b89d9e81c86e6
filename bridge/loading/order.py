"""The order of rows: a function of the row counts, the seed, the epoch and the window, and of nothing else. Pure.

Row groups are permuted for each epoch (file order without shuffle) and concatenated. Consecutive row groups that hold
at least `shuffle_window` rows form a window, whose rows are permuted. Permutations come from a generator whose stream
NumPy never changes (RandomState, NEP 19), so that a seed means the same next year.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Window:
    """Row groups that are read together, and the order of the rows they give, counted through the groups in turn.

    `permutation` is None where rows stay as they are.
    """

    groups: tuple[int, ...]
    num_rows: int
    permutation: np.ndarray[Any, Any] | None


def windows(
    row_counts: Sequence[int], *, shuffle: bool = False, shuffle_window: int = 200_000, seed: int = 0, epoch: int = 0
) -> Iterator[Window]:
    """Yield the windows of one epoch, which cover every row exactly once.

    Without `shuffle` each row group is a window of its own, in file order. Empty row groups are left out.

    Args:
        row_counts: Rows of each row group, in file order. May be empty.
        shuffle_window: At least so many rows are mixed together, where there are so many.
    """
    order: Sequence[int] = range(len(row_counts))
    if shuffle:
        order = _generator(seed, epoch, "row groups").permutation(len(row_counts)).tolist()
    group: list[int] = []
    rows = count = 0
    for index in order:
        if row_counts[index] == 0:
            continue
        group.append(index)
        rows += row_counts[index]
        if not shuffle or rows >= shuffle_window:
            yield _window(group, rows, shuffle, seed, epoch, count)
            group, rows, count = [], 0, count + 1
    if group:
        yield _window(group, rows, shuffle, seed, epoch, count)


def _window(groups: list[int], rows: int, shuffle: bool, seed: int, epoch: int, count: int) -> Window:
    permutation = _generator(seed, epoch, f"window {count}").permutation(rows) if shuffle else None
    return Window(tuple(groups), rows, permutation)


def _generator(seed: int, epoch: int, purpose: str) -> np.random.RandomState:
    import numpy as np

    key = hashlib.blake2b(f"{seed}/{epoch}/{purpose}".encode(), digest_size=16).digest()
    return np.random.RandomState(np.random.Philox(key=int.from_bytes(key, "little")))
