"""pyspark.ml's vectors. Pure."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge.columns.policies import ways_out
from bridge.display import format_bytes
from bridge.errors import LossyConversionError

Numbers: TypeAlias = np.ndarray[Any, Any]

_MOST_ELEMENTS = 1 << 27  # of the dense vectors that are made at once


def take_apart(column: pa.ChunkedArray) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return the length of each vector (0 for NULL), then the row of each number, its place in the row and its value.

    Vectors are structs of (type, size, indices, values), the type 1 where they are dense; what is not told is 0.
    """
    kinds, sizes, indices, values = column.combine_chunks().flatten()  # NULL in each part where a row is
    is_dense = pc.fill_null(pc.equal(kinds, 1), fill_value=False).to_numpy(zero_copy_only=False)
    counts = pc.fill_null(pc.list_value_length(values), 0).to_numpy()
    lengths = np.where(is_dense, counts, pc.fill_null(sizes, 0).to_numpy()).astype(np.int64)
    rows = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    places[~is_dense[rows]] = pc.list_flatten(pc.if_else(pa.array(is_dense), None, indices)).to_numpy()
    return lengths, rows, places, pc.list_flatten(values).to_numpy()


def dense_vectors(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Return pyspark.ml's vectors as lists of float64."""
    lengths, rows, places, values = take_apart(column)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    if bounds[-1] > _MOST_ELEMENTS:
        raise LossyConversionError(
            f"column {name!r} holds sparse vectors that would take {format_bytes(8 * int(bounds[-1]))} as dense ones.\n"
            f"{ways_out(name, 'sparse()')}."
        )
    out = np.zeros(bounds[-1])
    out[bounds[rows] + places] = values
    starts = pa.array(bounds.astype(np.int32), mask=np.append(column.is_null().to_numpy(), False))
    return pa.chunked_array([pa.ListArray.from_arrays(starts, pa.array(out))])
