"""Rows of a Hugging Face dataset out of its Arrow table, at a cost that grows with those taken alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import default_collate

from bridge.columns.tensors import to_torch
from bridge.errors import LossyConversionError
from bridge.loading.foreign import plain
from bridge.loading.form import copied
from bridge.loading.order import Indices

if TYPE_CHECKING:
    import datasets

Fetch = Callable[[Indices], Any]


def fetcher(dataset: datasets.Dataset, collate_fn: Callable[[Any], Any] | None) -> Fetch:
    """Return what makes a batch of some rows."""
    from datasets.features.features import require_decoding

    if collate_fn is not None or require_decoding(dataset.features):
        return partial(_collated, dataset, collate_fn or default_collate)
    if dataset.format["type"] is None:
        return _ArrowRows(dataset)
    return _TorchRows(dataset) if _is_plain_torch(dataset) else partial(_formatted, dataset)


def _formatted(dataset: datasets.Dataset, indices: Indices) -> Any:
    """Return a batch as the dataset's format or transform makes it."""
    return dataset[indices.tolist()]


def _collated(dataset: datasets.Dataset, collate: Callable[[Any], Any], indices: Indices) -> Any:
    """Return a batch of single rows, for what must be decoded and for functions that expect rows."""
    return collate(dataset.__getitems__(indices.tolist()))


class _ArrowRows:
    """Tensors of rows of the table under a dataset, which a loop may write into."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self._dataset = dataset

    def __call__(self, indices: Indices) -> dict[str, Any]:
        # what select, filter, shuffle and sort leave: the rows of the table that the dataset has
        if self._chosen is not None:
            indices = self._chosen.take(indices).column(0).to_numpy().astype(np.int64)
        return own_tensors(self._rows.take(indices))

    @cached_property
    def _rows(self) -> _Rows:
        shown = self._dataset.format
        return _Rows(self._dataset.data.table, None if shown["output_all_columns"] else shown["columns"])

    @cached_property
    def _chosen(self) -> _Rows | None:
        return None if self._dataset._indices is None else _Rows(self._dataset._indices.table)

    def __getstate__(self) -> dict[str, Any]:
        return {"_dataset": self._dataset}  # addresses mean nothing to another process


class _TorchRows(_ArrowRows):
    """What the format "torch" makes of numbers, flags, text and lists of numbers, without its work for each value."""

    def __call__(self, indices: Indices) -> dict[str, Any]:
        try:
            batch = super().__call__(indices)
        except LossyConversionError:  # lists of several lengths
            return dict(_formatted(self._dataset, indices))
        return {name: _as_formatted(value) for name, value in batch.items()}


class _Rows:
    """Rows of a table of many record batches, at a cost that grows with those taken alone.

    `pa.Table.take` joins all chunks of a column first, so that each batch would read the whole dataset.
    """

    def __init__(self, table: pa.Table, names: Sequence[str] | None = None) -> None:
        table = table if names is None else table.select(names)
        self._schema = table.schema
        self._batches = [batch for batch in table.to_batches() if batch.num_rows]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        columns = [[batch.column(n) for batch in self._batches] for n in range(table.num_columns)]
        self._columns = [_Span.of(chunks) or _Chunks(chunks) for chunks in columns]

    def take(self, indices: Indices) -> pa.Table:
        """Return rows; negative indices count from the end.

        Raises:
            IndexError: There is no such row.
        """
        num_rows = int(self._starts[-1])
        if len(indices) and not -num_rows <= indices.min() <= indices.max() < num_rows:
            raise IndexError(f"rows {indices.min():,} to {indices.max():,} are asked for; there are {num_rows:,}.")
        indices = np.where(indices < 0, indices + num_rows, indices)
        batch_of = np.searchsorted(self._starts, indices, side="right") - 1
        if len(indices) == 0:
            return self._schema.empty_table()
        if (np.diff(indices) == 1).all():
            first, last = int(batch_of[0]), int(batch_of[-1])
            near = pa.Table.from_batches(self._batches[first : last + 1], self._schema)
            return near.slice(int(indices[0] - self._starts[first]), len(indices))
        row_of = indices - self._starts[batch_of]
        columns = [column.take(batch_of, row_of) for column in self._columns]
        return pa.Table.from_arrays(columns, schema=self._schema)


class _Chunks:
    """The chunks of a column of any type."""

    def __init__(self, chunks: list[pa.Array]) -> None:
        self._chunks = chunks

    def take(self, chunk_of: Indices, row_of: Indices) -> pa.Array:
        """Return the values at some rows, counted in their chunks."""
        chunks, places = self._chunks, zip(chunk_of.tolist(), row_of.tolist(), strict=True)
        return pa.concat_arrays([chunks[chunk].slice(row, 1) for chunk, row in places])


class _Span:
    """The memory from the first to the last chunk of a column of numbers, seen as one array.

    What lies between the chunks is never read. So one gather of NumPy's serves any number of chunks.
    """

    def __init__(self, chunks: list[pa.Array], width: int) -> None:
        self._type = chunks[0].type
        self._chunks = chunks  # keeps the memory
        starts = np.array([chunk.buffers()[1].address + chunk.offset * width for chunk in chunks], np.int64)
        low, stop = int(starts.min()), int((starts + width * np.array([len(chunk) for chunk in chunks])).max())
        self._starts, odd = np.divmod(starts - low, width)
        self._values = np.frombuffer(pa.foreign_buffer(low, (stop - low) // width * width), f"u{width}")
        self.is_aligned = not odd.any()

    @classmethod
    def of(cls, chunks: list[pa.Array]) -> _Span | None:
        """Return None for what is no column of numbers, or has nulls."""
        types, arrow = pa.types, chunks[0].type if chunks else pa.null()
        if not (types.is_integer(arrow) or types.is_floating(arrow) or types.is_temporal(arrow)):
            return None
        if arrow.bit_width > 64 or any(chunk.null_count for chunk in chunks):
            return None
        span = cls(chunks, arrow.bit_width // 8)
        return span if span.is_aligned else None

    def take(self, chunk_of: Indices, row_of: Indices) -> pa.Array:
        """Return the values at some rows, counted in their chunks."""
        taken = self._values.take(self._starts[chunk_of] + row_of)
        return pa.Array.from_buffers(self._type, len(row_of), [None, pa.py_buffer(taken)])


def _is_plain_torch(dataset: datasets.Dataset) -> bool:
    shown, rows = dataset.format, dataset.data.table
    if shown["type"] != "torch" or shown["format_kwargs"] or shown["output_all_columns"]:
        return False
    return all(_is_plain_type(rows.field(name).type) and not rows[name].null_count for name in shown["columns"])


def _is_plain_type(arrow: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(arrow) or types.is_large_list(arrow) or types.is_fixed_size_list(arrow):
        arrow = arrow.value_type
    elif types.is_string(arrow) or types.is_large_string(arrow) or types.is_boolean(arrow):
        return True
    return bool(types.is_floating(arrow) or types.is_integer(arrow)) and arrow != pa.uint64()


def _as_formatted(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bool:
        return value
    return value.to(torch.float32 if value.is_floating_point() else torch.int64)


def own_tensors(table: pa.Table) -> dict[str, Any]:
    """Return tensors whose memory is not the dataset's, which is another's, or a file that must not be written to."""
    schema = plain(table.schema)
    try:
        made: dict[str, Any] = copied(to_torch(table if schema == table.schema else table.cast(schema)))
    except LossyConversionError as exc:
        exc.add_note("  Of a dataset of Hugging Face's: give the loader a collate_fn, or the dataset a format.")
        raise
    return made
