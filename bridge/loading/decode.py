"""Windows of rows decoded ahead, and batches cut out of them.

    row groups, the next one read meanwhile ── window: each row moved once to its place ── batches are slices of it

Nothing is moved that stays in the order of the files: batches are then slices of what was decoded.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from bridge.loading.ahead import made_ahead, mapped_ahead
from bridge.loading.form import Columns, Form, interleave, join, num_bytes, slice_rows
from bridge.loading.order import Indices, Order, Taken
from bridge.loading.row_groups import RowGroups

_READS = 3  # row groups at a time: bytes are read and checked, and rows moved, while others are decoded
_COLUMNS = 64  # of which it is known at a time that they are to be gathered


class Batches:
    """The batches of one rank.

    Args:
        prefetch_bytes: How many bytes of decoded windows may wait.
    """

    def __init__(self, row_groups: RowGroups, form: Form, *, prefetch_bytes: int) -> None:
        self._row_groups = row_groups
        self._form = form
        self._prefetch_bytes = prefetch_bytes

    def of(
        self, order: Order, sizes: Iterable[int], *, rank: int, world_size: int, consumed: int
    ) -> Generator[Columns]:  # fmt: skip
        """Yield the columns of the rank's next rows from a position on, as many at a time as `sizes` tells."""
        windows = self._windows(order.taken(rank=rank, world_size=world_size, consumed=consumed))
        ahead = made_ahead(windows, lambda made: num_bytes(made[1]), self._prefetch_bytes)
        streams = [_Stream(self._form.names) for _ in range(order.num_streams(world_size))]
        turn = 0
        try:
            for size in sizes:
                parts = []
                for offset in range(min(len(streams), size)):
                    number = (turn + offset) % len(streams)
                    count = -(-(size - offset) // len(streams))
                    while streams[number].num_rows < count:
                        taken, columns = next(ahead)
                        streams[taken.stream].add(columns, taken.num_rows)
                        del columns
                    parts.append(streams[number].take(count))
                turn = (turn + size) % len(streams)
                yield parts[0] if len(parts) == 1 else interleave(parts, self._form.names, size)
        finally:
            ahead.close()

    def row(self, order: Order, position: int) -> Columns:
        """Return the one row at a position of the order."""
        row, stream = divmod(position, order.canonical_world_size)
        window = next(order.windows(stream, row))
        wanted = _wanted(Taken(0, window, row - window.first, window.num_rows))
        return self._form.columns(list(map(self._read, wanted.parts)))

    def _windows(self, windows: Iterable[Taken]) -> Generator[tuple[Taken, Columns]]:
        """Yield the columns of windows; row groups of the next one are read meanwhile."""
        with ThreadPoolExecutor(max(_READS, pa.cpu_count()), "bridge-decode") as threads:
            wanted, ahead = itertools.tee((taken, _wanted(taken)) for taken in windows)
            rows = mapped_ahead(threads, self._read, (part for _, window in ahead for part in window.parts), _READS)
            each = partial(mapped_ahead, threads, depth=_COLUMNS)
            for taken, window in wanted:
                tables = list(itertools.islice(rows, len(window.parts)))
                yield taken, self._form.columns(tables, window.order, each)

    def _read(self, part: _Part) -> pa.Table:
        rows = self._row_groups.read(part.group).slice(part.start, part.stop - part.start)
        return rows if part.kept is None else rows.take(part.kept)


class _Part(NamedTuple):
    """Rows of one row group: all of [start, stop), or those of it that `kept` counts."""

    group: int
    start: int
    stop: int
    kept: Indices | None = None


class _Wanted(NamedTuple):
    """What is read for a window, and which of these rows, counted through the parts, comes in each place of it."""

    parts: list[_Part]
    order: Indices | None


def _wanted(taken: Taken) -> _Wanted:
    window, order = taken.window, taken.window.permutation()
    if taken.num_rows == window.num_rows:
        return _Wanted([_Part(*piece) for piece in window.pieces], order)
    chosen = (np.arange(window.num_rows) if order is None else order)[taken.offset :: taken.step]
    is_kept = np.zeros(window.num_rows, bool)
    is_kept[chosen] = True
    parts, first = [], 0
    for piece in window.pieces:
        kept = np.flatnonzero(is_kept[first : first + piece.stop - piece.start])
        first += piece.stop - piece.start
        if len(kept):
            start, stop = piece.start + int(kept[0]), piece.start + int(kept[-1]) + 1
            parts.append(_Part(piece.group, start, stop, None if len(kept) == stop - start else kept - kept[0]))
    return _Wanted(parts, None if order is None else (np.cumsum(is_kept) - 1)[chosen])


class _Stream:
    """The rows of one stream that were decoded and not yet taken."""

    def __init__(self, names: list[str]) -> None:
        self.num_rows = 0
        self._names = names
        self._windows: deque[tuple[Columns, int]] = deque()
        self._start = 0  # in the first window

    def add(self, columns: Columns, num_rows: int) -> None:
        self._windows.append((columns, num_rows))
        self.num_rows += num_rows

    def take(self, count: int) -> Columns:
        parts = []
        self.num_rows -= count
        while count:
            columns, num_rows = self._windows[0]
            stop = min(self._start + count, num_rows)
            parts.append(slice_rows(columns, self._start, stop))
            count -= stop - self._start
            self._start = stop
            if stop == num_rows:
                self._windows.popleft()
                self._start = 0
            del columns
        return join(parts, self._names)
