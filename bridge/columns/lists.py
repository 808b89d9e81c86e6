"""Columns of arrays, taken apart into their elements and where each row's begin. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.columns.policies import ways_out
from bridge.errors import LossyConversionError

if TYPE_CHECKING:
    import numpy as np


def is_list(arrow: pa.DataType) -> bool:
    """Return whether values are arrays, of any or of one length."""
    return bool(pa.types.is_list(arrow) or pa.types.is_fixed_size_list(arrow) or pa.types.is_large_list(arrow))


def element_type(arrow: pa.DataType) -> pa.DataType:
    """Return the type of the innermost elements."""
    while is_list(arrow):
        arrow = arrow.value_type
    return arrow


def split_equal(column: pa.ChunkedArray, name: str, *, are_elements: bool = False) -> tuple[pa.ChunkedArray, int]:
    """Return the elements of all rows, and how many each row has; without a copy.

    Args:
        are_elements: Whether `column` holds what is inside the arrays of the column called `name`.
    """
    values, offsets = split(column, name)
    if pa.types.is_fixed_size_list(column.type):
        return values, column.type.list_size
    lengths = offsets[1:] - offsets[:-1]
    size = int(lengths[0]) if len(lengths) else 0
    if (lengths != size).any():
        ways = ["to_json()"] if are_elements else ["jagged()", "offsets()"]
        inner = " inside its arrays" if are_elements else ""
        raise LossyConversionError(
            f"column {name!r} holds arrays of {lengths.min():,} to {lengths.max():,} elements{inner}, which do not "
            f"make [rows, n].\n{ways_out(name, *ways)}; to_pandas() holds them."
        )
    return values, size


def split(column: pa.ChunkedArray, name: str) -> tuple[pa.ChunkedArray, np.ndarray[Any, Any]]:
    """Return the elements of all rows and the int64 offsets: row i has those of [offsets[i], offsets[i + 1]).

    Raises:
        LossyConversionError: A row is NULL, which is not the same as empty, or an element is that is no float.
    """
    import numpy as np

    ways = ["fill([])"] if pa.types.is_list(column.type) else []
    if column.null_count:
        raise LossyConversionError(
            f"column {name!r} ({column.type}) holds {column.null_count:,} nulls in the place of arrays.\n"
            f"{ways_out(name, 'drop_nulls()', *ways)}."
        )
    parts, lengths = [], [np.zeros(1, np.int64)]
    for chunk in column.chunks:
        parts.append(chunk.flatten())
        if pa.types.is_fixed_size_list(column.type):
            lengths.append(np.full(len(chunk), column.type.list_size, np.int64))
        else:
            lengths.append(np.diff(chunk.offsets.to_numpy()).astype(np.int64, copy=False))
    values = pa.chunked_array(parts, column.type.value_type)
    types = pa.types
    if values.null_count and (
        types.is_integer(values.type) or types.is_boolean(values.type) or types.is_temporal(values.type)
    ):
        raise LossyConversionError(
            f"column {name!r} ({column.type}) holds {values.null_count:,} nulls in its arrays, as only floats may.\n"
            f"  Replace them in Spark: transform({name}, x -> coalesce(x, ...)), or use to_pandas()."
        )
    return values, np.cumsum(np.concatenate(lengths))
