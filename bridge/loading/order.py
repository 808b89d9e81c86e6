"""The order of rows: a function of row counts, seed, epoch, canonical_world_size, window and position, and of no more.

Row groups are permuted for each epoch (file order without shuffle) and concatenated. Of that sequence, each of
`canonical_world_size` streams takes an equal part. In a stream, consecutive pieces of row groups that hold at least
`shuffle_window` rows form a window, whose rows are permuted. Position p is row p // canonical_world_size of stream
p % canonical_world_size; of the positions from `consumed` on, rank r has those with p = r (mod world_size).

Permutations come from a generator whose stream NumPy never changes (RandomState, NEP 19), so that a seed means the
same next year. Pure.
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """The rows [start, stop) of a row group."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Window:
    """Pieces that are read together: the rows [first, first + num_rows) of a stream. `key` says how they are permuted.

    Without a key rows stay as they are.
    """

    pieces: tuple[Piece, ...]
    first: int
    num_rows: int
    key: str | None

    def permutation(self) -> Indices | None:
        """Return which row, counted through the pieces, comes in each place."""
        return None if self.key is None else _permutation(self.key, self.num_rows)


@dataclass(frozen=True)
class Taken:
    """What one rank takes of a window of its stream number `stream`: rows `offset`, `offset + step`, and so on."""

    stream: int
    window: Window
    offset: int
    step: int

    @property
    def num_rows(self) -> int:
        """How many rows it takes."""
        return max(0, -(-(self.window.num_rows - self.offset) // self.step))


class Order:
    """The order of one epoch.

    Args:
        row_counts: Rows of each row group, in file order. May be empty.
        canonical_world_size: Streams that the epoch is dealt to, one after another.
        shuffle_window: At least so many rows of a stream are mixed together, where there are so many.
    """

    def __init__(
        self, row_counts: Sequence[int] | Indices, *, seed: int = 0, epoch: int = 0, canonical_world_size: int = 1,
        shuffle: bool = False, shuffle_window: int = 200_000,
    ) -> None:  # fmt: skip
        counts = np.asarray(row_counts, np.int64)
        self.num_rows = int(counts.sum())
        self.canonical_world_size = canonical_world_size
        self._key = f"{seed}/{epoch}"
        self._shuffle = shuffle
        self._shuffle_window = shuffle_window
        self._counts = counts
        # empty row groups take part in the permutation, and in nothing else
        groups = _permutation(f"{self._key}/row groups", len(counts)) if shuffle else np.arange(len(counts))
        self._groups = groups[counts[groups] > 0]

    @cached_property
    def _ends(self) -> list[int]:
        ends: list[int] = np.cumsum(self._counts[self._groups]).tolist()  # bisect is faster on a list
        return ends

    def bounds(self, stream: int) -> tuple[int, int]:
        """Return the rows [start, stop) of the sequence that a stream takes."""
        size, longer = divmod(self.num_rows, self.canonical_world_size)
        start = stream * size + min(stream, longer)
        return start, start + size + (stream < longer)

    def windows(self, stream: int, row: int = 0) -> Iterator[Window]:
        """Yield the windows of a stream, from the one on that holds its row number `row`."""
        begin, stop = self.bounds(stream)
        start, number = begin, 0
        while start < stop:
            end = self._window_end(start, stop)
            if end > begin + row:
                key = f"{self._key}/window {stream} {number}" if self._shuffle else None
                yield Window(tuple(self._pieces(start, end)), start - begin, end - start, key)
            start, number = end, number + 1

    def num_streams(self, world_size: int) -> int:
        """Return of how many streams a rank takes rows, in turn."""
        return self.canonical_world_size // gcd(self.canonical_world_size, world_size)

    def taken(self, *, rank: int = 0, world_size: int = 1, consumed: int = 0) -> Iterator[Taken]:
        """Yield the windows of a rank's positions from `consumed` on, as they are needed; the first rows come first.

        Row j of these positions is the next row of the rank's stream j % num_streams.
        """
        first, num_streams = consumed + (rank - consumed) % world_size, self.num_streams(world_size)
        step = world_size // gcd(self.canonical_world_size, world_size)

        def of_stream(number: int) -> Iterator[tuple[int, Taken]]:
            row, stream = divmod(first + number * world_size, self.canonical_world_size)
            needed = number
            for window in self.windows(stream, row):
                one = Taken(number, window, row - window.first, step)
                if one.num_rows:  # a window may have fewer rows than a step
                    yield needed, one
                    row += one.num_rows * step
                    needed += one.num_rows * num_streams

        numbers = range(min(num_streams, max(0, -(-(self.num_rows - first) // world_size))))
        for _, one in heapq.merge(*map(of_stream, numbers), key=lambda pair: pair[0]):
            yield one

    def rows_at(self, positions: Indices) -> Indices:
        """Return the row groups at some positions of an order in which each holds one row."""
        row, stream = np.divmod(positions, self.canonical_world_size)
        size, longer = divmod(self.num_rows, self.canonical_world_size)
        chosen: Indices = self._groups[stream * size + np.minimum(stream, longer) + row]
        return chosen

    def _window_end(self, start: int, stop: int) -> int:
        if not self._shuffle:
            return min(self._ends[bisect_right(self._ends, start)], stop)
        at = bisect_left(self._ends, start + self._shuffle_window)
        return min(self._ends[at], stop) if at < len(self._ends) else stop

    def _pieces(self, start: int, stop: int) -> Iterator[Piece]:
        at = bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[at - 1] if at else 0
            end = min(self._ends[at], stop)
            yield Piece(int(self._groups[at]), start - begin, end - begin)
            start, at = end, at + 1


def num_steps(num_rows: int, *, batch_size: int, world_size: int, consumed: int, drop_last: bool) -> int:
    """Return how many batches every rank makes of the positions from `consumed` on."""
    rest, batch = max(0, num_rows - consumed), batch_size * world_size
    return rest // batch if drop_last else -(-rest // batch)


def batch_rows(
    step: int, num_rows: int, *, batch_size: int, rank: int, world_size: int, consumed: int
) -> tuple[int, int]:
    """Return how many rows a rank's batch has, and how many of them are real; those behind them repeat one."""
    start = consumed + step * batch_size * world_size
    stop = min(start + batch_size * world_size, num_rows)
    first = start + (rank - start) % world_size
    return max(0, -(-(stop - start) // world_size)), max(0, -(-(stop - first) // world_size))


def padding(num_rows: int, *, rank: int, world_size: int) -> int:
    """Return the position that pads a rank's last batch: the rank's last, or the last of all where it has none."""
    last = num_rows - 1
    return last - (last - rank) % world_size if rank <= last else last


def seed_of(key: str) -> int:
    """Return a number of 63 bits that is the same for the same text."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def _permutation(key: str, count: int) -> Indices:
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    permutation: Indices = np.random.RandomState(np.random.Philox(key=int.from_bytes(digest, "little"))).permutation(
        count
    )
    return permutation
