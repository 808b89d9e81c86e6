"""What a batch is, and the rows of windows made into its columns, each row moved once to where the order wants it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from bridge.columns.arrays import feature_arrays, has_array_form, pick_column, pick_features
from bridge.columns.lists import element_type, is_list
from bridge.columns.policies import mark_of, ways_out
from bridge.columns.tensors import column_to_torch, field_to_torch, label_to_torch, numpy_dtype
from bridge.errors import LossyConversionError
from bridge.loading.order import Indices

Column: TypeAlias = Any  # a tensor, or an Arrow column of which each batch is made anew
Columns: TypeAlias = list[Column]
Each: TypeAlias = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]  # `map`, or that of an executor

_BLOCK_ROWS = 2048  # of 32 columns of float32: what fits in the cache of a core
_MOST_BYTES = 1 << 30  # of text that are joined: twice as many is what offsets of 32 bits reach
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
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

    def columns(self, parts: list[pa.Table], order: Indices | None = None, each: Each = map) -> Columns:
        """Return the columns of the rows of all parts: behind one another, or in an order.

        Args:
            parts: Emptied, so that what a column was made of can be freed before the next is made.
            order: Which row, counted through the parts, comes in each place.
            each: How what can be done side by side is done.
        """
        moves = None if order is None else _Moves(order, parts)
        if self.features is not None:
            return self._matrix(parts, moves, each)
        columns = [[part.column(index) for part in parts] for index in range(len(self._fields))]
        parts.clear()

        def make(index: int) -> Column:
            chunks, columns[index] = columns[index], []
            name = self._fields[index].name
            if self._are_dense[index]:
                return self._moved([column_to_torch(chunk, name) for chunk in chunks], moves, name)
            column = _joined(chunks, name)
            return column if moves is None else _taken(column, moves.order)

        return list(each(make, range(len(columns))))

    def batch(self, columns: Columns) -> Any:
        """Return the columns of some rows as one batch."""
        if self.features is None:
            return {
                field.name: column if isinstance(column, torch.Tensor) else self._converted(column, field)
                for field, column in zip(self._fields, columns, strict=True)
            }
        return columns[0] if self.label is None else tuple(columns)

    def _matrix(self, parts: list[pa.Table], moves: _Moves | None, each: Each) -> Columns:
        features = self.features
        assert features is not None
        starts = np.cumsum([0, *(part.num_rows for part in parts)]).tolist()
        empty = feature_arrays(parts[0].slice(0, 0), features, self._dtype)
        whole = _empty((starts[-1], len(empty)), torch.from_numpy(empty[0].copy()).dtype)
        matrix = whole.numpy()
        targets = None if moves is None else moves.targets

        def fill(number: int) -> torch.Tensor | None:
            part = parts[number]
            arrays = feature_arrays(part, features, self._dtype)
            block = np.empty((min(_BLOCK_ROWS, part.num_rows), len(arrays)), matrix.dtype)
            for start in range(0, part.num_rows, _BLOCK_ROWS):
                stop = min(start + _BLOCK_ROWS, part.num_rows)
                rows = block[: stop - start]
                if targets is None:
                    rows = matrix[starts[number] + start : starts[number] + stop]
                for index, values in enumerate(arrays):
                    rows[:, index] = values[start:stop]
                if targets is not None:
                    matrix[targets[number][start:stop]] = rows
            return None if self.label is None else label_to_torch(part, self.label)

        labels = list(each(fill, range(len(parts))))
        parts.clear()
        return [whole] if self.label is None else [whole, self._moved(labels, moves, self.label)]

    def _moved(self, parts: Sequence[torch.Tensor], moves: _Moves | None, name: str) -> torch.Tensor:
        check_shapes(parts, name)
        if moves is not None:
            return moves.apply(parts)
        # a matrix keeps no rows alive for the sake of its labels
        is_kept = len(parts) == 1 and (self._is_shared or self.features is not None)
        return parts[0].clone() if is_kept else _joined(parts, name)

    def _converted(self, column: pa.ChunkedArray, field: pa.Field) -> Any:
        values = field_to_torch(column, field)
        return copied(values) if self._is_shared else values


class _Moves:
    """Rows of some parts, each of which moves to one place."""

    def __init__(self, order: Indices, parts: Sequence[pa.Table]) -> None:
        self.order = order
        self._ends = np.cumsum([part.num_rows for part in parts])

    @cached_property
    def targets(self) -> list[Indices]:
        """The place of each row of each part."""
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(places))
        return np.split(places, self._ends[:-1])

    def apply(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one tensor of the rows of all parts."""
        whole = _empty((len(self.order), *parts[0].shape[1:]), parts[0].dtype)
        if whole.dim() == 1:
            # twice as fast as to put each value in its place; the copy that joins them stays in the cache
            torch.index_select(_joined_bits(parts), 0, torch.from_numpy(self.order), out=_signed(whole))
            return whole
        for part, target in zip(parts, self.targets, strict=True):
            _signed(whole).index_copy_(0, torch.from_numpy(target), _signed(part))
        return whole


def join(parts: Sequence[Columns], names: list[str]) -> Columns:
    """Return rows behind one another."""
    if len(parts) == 1:
        return parts[0]
    return [_joined(list(columns), name) for name, *columns in zip(names, *parts, strict=True)]


def interleave(parts: Sequence[Columns], names: list[str], num_rows: int) -> Columns:
    """Return rows of several streams in turn."""
    made: Columns = []
    for name, *columns in zip(names, *parts, strict=True):
        if isinstance(columns[0], torch.Tensor):
            check_shapes(columns, name)
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


def slice_rows(columns: Columns, start: int, stop: int) -> Columns:
    """Return the rows [start, stop), which are not copied."""
    return [
        column[start:stop] if isinstance(column, torch.Tensor) else column.slice(start, stop - start)
        for column in columns
    ]


def last_row(columns: Columns) -> Columns:
    """Return a copy of the last row."""
    return [
        column[-1:].clone() if isinstance(column, torch.Tensor) else column.slice(len(column) - 1) for column in columns
    ]


def num_bytes(columns: Columns) -> int:
    """Return the bytes of all columns."""
    return sum(int(column.nbytes) for column in columns)


def check_shapes(parts: Sequence[torch.Tensor], name: str) -> None:
    """See that the rows of all parts have one shape.

    Raises:
        LossyConversionError: They do not.
    """
    sizes = {tuple(part.shape[1:]) for part in parts}
    if len(sizes) > 1:
        shown = " and ".join(str(list(size)) for size in sorted(sizes))
        raise LossyConversionError(
            f"column {name!r} holds arrays of the shapes {shown}, which do not make [rows, n].\n"
            f"{ways_out(name, 'jagged()', 'offsets()')}; to_pandas() holds them."
        )


def _joined(parts: Sequence[Column], name: str) -> Column:
    if len(parts) == 1:
        return parts[0]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)
    check_shapes(parts, name)
    return _joined_bits(parts).view(parts[0].dtype)


def _joined_bits(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    # torch copies even where there is one
    return _signed(parts[0]) if len(parts) == 1 else torch.cat([_signed(part) for part in parts])


def _taken(column: pa.ChunkedArray, at: Indices) -> pa.ChunkedArray:
    large = _LARGE.get(column.type) if column.num_chunks > 1 and column.nbytes > _MOST_BYTES else None
    if large is None:
        return column.take(at)
    ends = np.cumsum(pc.binary_length(column).fill_null(0).to_numpy()[at], dtype=np.int64)
    parts = np.split(at, np.flatnonzero(np.diff(ends // _MOST_BYTES)) + 1)
    whole = column.cast(large).combine_chunks()
    return pa.chunked_array([whole.take(part).cast(column.type) for part in parts])


def copied(values: Any) -> Any:
    """Return the values of a column, or of several, with tensors in memory of their own."""
    if isinstance(values, dict):
        return {name: copied(part) for name, part in values.items()}
    if isinstance(values, tuple):
        return tuple(map(copied, values))
    if isinstance(values, torch.Tensor):
        # clone() waits for torch's threads, which other work may have
        return torch.from_numpy(values.numpy().copy()) if values.layout is torch.strided else values.clone()
    return values


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in memory of Arrow's pool, which gives pages again that were freed: fresh ones cost much."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(pa.allocate_buffer(count * dtype.itemsize), dtype=dtype).reshape(shape)


def _signed(values: torch.Tensor) -> torch.Tensor:
    return values.view(_SIGNED.get(values.dtype, values.dtype))


def _is_dense(field: pa.Field) -> bool:
    """Return whether a column becomes one tensor, whose rows can be sliced."""
    arrow = field.type
    if mark_of(field):
        return False
    if is_list(arrow):
        return has_array_form(element_type(arrow))
    return has_array_form(arrow) or pa.types.is_dictionary(arrow) or pa.types.is_decimal(arrow)
