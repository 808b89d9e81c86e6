"""pyspark.ml's vectors. Pure."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge.columns.policies import ways_out
from bridge.display import format_bytes
from bridge.errors import LossyConversionError

_MOST_ELEMENTS = 1 << 27  # of the dense vectors that are made at once


def dense_vectors(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Return pyspark.ml's vectors, structs of (type, size, indices, values), as lists of float64.

    Raises:
        LossyConversionError: They would take more than 1 GiB.
    """
    rows = column.combine_chunks()
    if isinstance(rows, pa.ChunkedArray):
        rows = pa.concat_arrays(rows.chunks)
    kinds, sizes, indices, values = (rows.field(i) for i in range(4)) if rows.offset == 0 else rows.flatten()
    is_dense = pc.fill_null(pc.equal(kinds, 1), fill_value=False).to_numpy(zero_copy_only=False)
    is_null = rows.is_null().to_numpy(zero_copy_only=False)
    counts = pc.fill_null(pc.list_value_length(values), 0).to_numpy()
    lengths = np.where(is_dense, counts, pc.fill_null(sizes, 0).to_numpy())
    lengths[is_null] = 0
    counts = np.where(is_null, 0, counts)
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if bounds[-1] > _MOST_ELEMENTS:
        raise LossyConversionError(
            f"column {name!r} holds sparse vectors that would take {format_bytes(8 * int(bounds[-1]))} as dense ones.\n"
            f"{ways_out(name, 'sparse()')}."
        )
    # each given value: its row, its place in that row, and where the row begins
    row_of = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    from_sparse = ~is_dense[row_of]
    place[from_sparse] = pc.list_flatten(pc.if_else(pa.array(is_dense | is_null), None, indices)).to_numpy()
    out = np.zeros(bounds[-1])
    out[bounds[row_of] + place] = pc.list_flatten(pc.if_else(pa.array(is_null), None, values)).to_numpy()
    starts = pa.array(bounds.astype(np.int32), mask=np.append(is_null, False))
    return pa.chunked_array([pa.ListArray.from_arrays(starts, pa.array(out))])
