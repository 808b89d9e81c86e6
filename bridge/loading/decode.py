"""Row groups into batches: windows are decoded ahead, their rows moved once to where the order wants them.

    row group ── columns as tensors ── each row to its place in the window ── batches are slices of it

Nothing is moved that stays in the order of the files: batches are then slices of what was decoded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from bridge.columns.arrays import feature_arrays, has_array_form, pick_column, pick_features
from bridge.columns.lists import element_type, is_list
from bridge.columns.policies import mark_of, ways_out
from bridge.columns.tensors import column_to_torch, field_to_torch, label_to_torch, numpy_dtype
from bridge.errors import LossyConversionError
from bridge.loading.order import Indices, Order, Share, Taken
from bridge.loading.prefetch import made_ahead
from bridge.loading.row_groups import RowGroups

Column: TypeAlias = Any  # a tensor, or an Arrow column of which each batch is made anew
Columns: TypeAlias = list[Column]

_BLOCK_ROWS = 2048  # of 32 columns of float32: what fits in the cache of a core
# torch moves no rows of these; of the same bits with a sign it does
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Form:
    """What a batch is: a dict of columns, or (X, y) where features are named.

    Args:
        schema: The types of the rows.
        features: Names of the columns of X, in order; None: a dict of all columns.
        label: Name of the column of y; None: a batch is X alone.
        dtype: The type of X, NumPy's or torch's; None: the one that all features have.
        is_shared: Whether others use the memory of the rows, so that batches must not.

    Raises:
        SourceNotFoundError: A feature or the label is no column.
        ValueError: `label` or `dtype` is given without features.
    """

    def __init__(
        self, schema: pa.Schema, features: Sequence[str] | None = None, label: str | None = None, dtype: Any = None, *,
        is_shared: bool = False,
    ) -> None:  # fmt: skip
        if features is None and (label is not None or dtype is not None):
            raise ValueError("label and dtype go with features: name the columns that make X.")
        rows = schema.empty_table()
        self.features = None if features is None else list(pick_features(rows, features))
        self.label = label
        if label is not None:
            pick_column(rows, label)
        self._dtype = numpy_dtype(dtype)
        self._is_shared = is_shared
        self._fields = list(schema)
        self._are_dense = [_is_dense(field) for field in schema]

    def batch_of(self, rows: pa.Table) -> Any:
        """Return rows as one batch."""
        window = self.window(rows.num_rows)
        window.put(rows, None)
        return self.batch(window.columns())

    @property
    def names(self) -> list[str]:
        """The names of what stands in a batch, in order."""
        if self.features is None:
            return [field.name for field in self._fields]
        return ["X"] if self.label is None else ["X", self.label]

    @property
    def needed(self) -> list[str]:
        """The columns that a batch is made of."""
        if self.features is None:
            return self.names
        return list(dict.fromkeys([*self.features, *([] if self.label is None else [self.label])]))

    def window(self, num_rows: int) -> Window:
        """Return what gathers the columns of so many rows."""
        if self.features is None:
            return _ColumnWindow(self._fields, self._are_dense, num_rows, self._is_shared)
        return _MatrixWindow(self.features, self.label, self._dtype, num_rows)

    def batch(self, columns: Columns) -> Any:
        """Return the columns of some rows as one batch."""
        if self.features is None:
            return {
                field.name: column if isinstance(column, torch.Tensor) else self._converted(column, field)
                for field, column in zip(self._fields, columns, strict=True)
            }
        return columns[0] if self.label is None else tuple(columns)

    def _converted(self, column: pa.ChunkedArray, field: pa.Field) -> Any:
        values = field_to_torch(column, field)
        return _cloned(values) if self._is_shared else values


class Window(Protocol):
    """The columns of rows that come in pieces."""

    def put(self, rows: pa.Table, target: Indices | None) -> None:
        """Add rows: behind those that are there, or each at the place in the window that `target` tells."""

    def columns(self) -> Columns:
        """Return the columns of all rows, when all are there."""


class _ColumnWindow:
    def __init__(self, fields: list[pa.Field], are_dense: list[bool], num_rows: int, is_shared: bool) -> None:
        self._fields = fields
        self._are_dense = are_dense
        self._num_rows = num_rows
        self._is_shared = is_shared
        self._dense = [_Tensor(field.name, num_rows) for field in fields]
        self._others: list[list[pa.ChunkedArray]] = [[] for _ in fields]
        self._targets: list[Indices] = []

    def put(self, rows: pa.Table, target: Indices | None) -> None:
        for index, (field, is_dense) in enumerate(zip(self._fields, self._are_dense, strict=True)):
            column = rows.column(index)
            if not is_dense:
                self._others[index].append(column)
                continue
            values = column_to_torch(column, field.name)
            # rows that stay where they are may be the memory of others
            self._dense[index].put(values.clone() if self._is_shared and target is None else values, target)
        if target is not None:
            self._targets.append(target)

    def columns(self) -> Columns:
        order = None
        if self._targets and not all(self._are_dense):
            order = np.empty(self._num_rows, np.int64)
            order[np.concatenate(self._targets)] = np.arange(self._num_rows)
        made: Columns = []
        for index, is_dense in enumerate(self._are_dense):
            if is_dense:
                made.append(self._dense[index].whole())
                continue
            column: Any = _joined(self._others[index], self._fields[index].name)
            self._others[index] = []
            made.append(column if order is None else _taken(column, order))
        return made


class _MatrixWindow:
    def __init__(self, features: list[str], label: str | None, dtype: Any, num_rows: int) -> None:
        self._features = features
        self._label = label
        self._dtype = dtype
        self._matrix = np.empty((0, 0))
        self._target = _Tensor(label or "", num_rows)
        self._num_rows = num_rows
        self._filled = 0

    def put(self, rows: pa.Table, target: Indices | None) -> None:
        arrays = feature_arrays(rows, self._features, self._dtype)
        if not self._filled:
            dtype = torch.from_numpy(arrays[0][:0].copy()).dtype
            self._matrix = _empty((self._num_rows, len(arrays)), dtype).numpy()
        block = np.empty((min(_BLOCK_ROWS, rows.num_rows), len(arrays)), self._matrix.dtype)
        for start in range(0, rows.num_rows, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, rows.num_rows)
            part = block[: stop - start]
            if target is None:
                part = self._matrix[self._filled + start : self._filled + stop]
            for index, values in enumerate(arrays):
                part[:, index] = values[start:stop]
            if target is not None:
                self._matrix[target[start:stop]] = part
        self._filled += rows.num_rows
        if self._label is not None:
            label = label_to_torch(rows, self._label)
            self._target.put(label if target is not None else label.clone(), target)

    def columns(self) -> Columns:
        matrix = torch.from_numpy(self._matrix)
        return [matrix] if self._label is None else [matrix, self._target.whole()]


class _Tensor:
    """One column of a window."""

    def __init__(self, name: str, num_rows: int) -> None:
        self._name = name
        self._num_rows = num_rows
        self._parts: list[torch.Tensor] = []

    def put(self, values: torch.Tensor, target: Indices | None) -> None:
        if self._parts:
            _check_shapes([self._parts[0], values], self._name)
        if target is None:
            self._parts.append(values)
            return
        if not self._parts:
            self._parts = [_empty((self._num_rows, *values.shape[1:]), values.dtype)]
        whole, index = self._parts[0], torch.from_numpy(target)
        whole, values = _signed(whole), _signed(values)
        if values.dim() == 1:
            whole.scatter_(0, index, values)  # twice as fast as index_copy_
        else:
            whole.index_copy_(0, index, values)

    def whole(self) -> Column:
        parts, self._parts = self._parts, []
        return _joined(parts, self._name)


class Batches:
    """The batches of one rank's share of an epoch.

    Args:
        prefetch_bytes: How many bytes of decoded windows may wait.
    """

    def __init__(self, row_groups: RowGroups, form: Form, *, prefetch_bytes: int) -> None:
        self._read_group = row_groups.read
        self._form = form
        self._prefetch_bytes = prefetch_bytes

    def of(self, order: Order, share: Share, sizes: Iterable[int]) -> Generator[Columns]:
        """Yield the columns of the next rows of a share, as many at a time as `sizes` tells."""
        windows = ((taken, self._read(taken)) for taken in order.taken(share))
        ahead = made_ahead(windows, lambda made: _num_bytes(made[1]), self._prefetch_bytes)
        streams = [_Stream(self._form.names) for _ in range(share.num_streams)]
        turn = 0
        try:
            for size in sizes:
                parts = []
                for offset in range(min(share.num_streams, size)):
                    number = (turn + offset) % share.num_streams
                    count = -(-(size - offset) // share.num_streams)
                    while streams[number].num_rows < count:
                        taken, columns = next(ahead)
                        streams[taken.stream].add(columns, taken.num_rows)
                        del columns
                    parts.append(streams[number].take(count))
                turn = (turn + size) % share.num_streams
                yield parts[0] if len(parts) == 1 else _interleaved(parts, self._form.names, size)
        finally:
            ahead.close()

    def row(self, order: Order, position: int) -> Columns:
        """Return the one row at a position of the order."""
        row, stream = divmod(position, order.canonical_world_size)
        window = next(order.windows(stream, row))
        return self._read(Taken(0, window, row - window.first, window.num_rows))

    def _read(self, taken: Taken) -> Columns:
        gathered = self._form.window(taken.num_rows)
        places = _places(taken)
        start = 0
        for piece in taken.window.pieces:
            count = piece.stop - piece.start
            if places is None:
                kept, target = np.arange(max(0, taken.offset - start), count), None
            else:
                target = places[start : start + count]
                kept = np.flatnonzero(target >= 0)
                target = target[kept]
            start += count
            if len(kept):
                rows = self._read_group(piece.group).slice(piece.start, count)
                if len(kept) < count:
                    rows = rows.slice(kept[0]) if places is None else rows.take(kept)
                gathered.put(rows, target)
                del rows
        return gathered.columns()


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
            parts.append([_slice(column, self._start, stop) for column in columns])
            count -= stop - self._start
            self._start = stop
            if stop == num_rows:
                self._windows.popleft()
                self._start = 0
            del columns
        return join(parts, self._names)


def join(parts: Sequence[Columns], names: list[str]) -> Columns:
    """Return rows behind one another."""
    if len(parts) == 1:
        return parts[0]
    return [_joined(list(columns), name) for name, *columns in zip(names, *parts, strict=True)]


def last_row(columns: Columns) -> Columns:
    """Return a copy of the last row."""
    return [
        column[-1:].clone() if isinstance(column, torch.Tensor) else column.slice(len(column) - 1) for column in columns
    ]


def _places(taken: Taken) -> Indices | None:
    """Return where each row of a window goes, and -1 for those that are not taken; None: where they are."""
    permutation = taken.window.permutation()
    if permutation is None:
        if taken.step == 1:
            return None
        permutation = np.arange(taken.window.num_rows)
    wanted = permutation[taken.offset :: taken.step]
    places = np.full(taken.window.num_rows, -1)
    places[wanted] = np.arange(len(wanted))
    return places


def _interleaved(parts: list[Columns], names: list[str], num_rows: int) -> Columns:
    """Return rows of several streams in turn."""
    made: Columns = []
    for name, *columns in zip(names, *parts, strict=True):
        if isinstance(columns[0], torch.Tensor):
            _check_shapes(columns, name)
            column = columns[0].new_empty(num_rows, *columns[0].shape[1:])
            for index, part in enumerate(columns):
                column[index :: len(parts)] = part
        else:
            at = np.empty(num_rows, np.int64)
            begin = 0
            for index, part in enumerate(columns):
                at[index :: len(parts)] = np.arange(begin, begin + len(part))
                begin += len(part)
            column = _taken(_joined(columns, name), at)
        made.append(column)
    return made


def _joined(parts: Sequence[Column], name: str) -> Column:
    if len(parts) == 1:
        return parts[0]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)
    _check_shapes(parts, name)
    return torch.cat([_signed(part) for part in parts]).view(parts[0].dtype)


def _check_shapes(parts: Sequence[torch.Tensor], name: str) -> None:
    sizes = {tuple(part.shape[1:]) for part in parts}
    if len(sizes) > 1:
        shown = " and ".join(str(list(size)) for size in sorted(sizes))
        raise LossyConversionError(
            f"column {name!r} holds arrays of the shapes {shown}, which do not make [rows, n].\n"
            f"{ways_out(name, 'jagged()', 'offsets()')}; to_pandas() holds them."
        )


def _taken(column: pa.ChunkedArray, at: Indices) -> pa.ChunkedArray:
    # of several chunks, each take would join them anew
    return pa.chunked_array([column.combine_chunks()]).take(at) if column.num_chunks > 1 else column.take(at)


def _slice(column: Column, start: int, stop: int) -> Column:
    return column[start:stop] if isinstance(column, torch.Tensor) else column.slice(start, stop - start)


def _cloned(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _cloned(part) for name, part in values.items()}
    if isinstance(values, tuple):
        return tuple(map(_cloned, values))
    return values.clone() if isinstance(values, torch.Tensor) else values


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in memory of Arrow's pool, which gives pages again that were freed: fresh ones cost much."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(pa.allocate_buffer(count * dtype.itemsize), dtype=dtype).reshape(shape)


def _signed(values: torch.Tensor) -> torch.Tensor:
    return values.view(_SIGNED.get(values.dtype, values.dtype))


def _num_bytes(columns: Columns) -> int:
    return sum(int(column.nbytes) for column in columns)


def _is_dense(field: pa.Field) -> bool:
    """Return whether a column becomes one tensor, whose rows can be sliced."""
    arrow = field.type
    if mark_of(field):
        return False
    if is_list(arrow):
        return has_array_form(element_type(arrow))
    return has_array_form(arrow) or pa.types.is_dictionary(arrow) or pa.types.is_decimal(arrow)
