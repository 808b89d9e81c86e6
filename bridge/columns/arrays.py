"""Arrow to NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.display import did_you_mean
from bridge.errors import LossyConversionError, SourceNotFoundError

if TYPE_CHECKING:
    import numpy as np


def to_numpy(table: pa.Table) -> dict[str, np.ndarray[Any, Any]]:
    """Return one array for each column, as the type contract says.

    Raises:
        LossyConversionError: An integer or boolean column holds nulls.
    """
    return {name: column_to_numpy(column, name) for name, column in zip(table.column_names, table.columns, strict=True)}


def column_to_numpy(column: pa.ChunkedArray, name: str) -> np.ndarray[Any, Any]:
    """Return the values of one column; may be a read-only view of the column's memory."""
    import numpy as np

    arrow = column.type
    if column.null_count and (pa.types.is_integer(arrow) or pa.types.is_boolean(arrow)):
        raise LossyConversionError(
            f"column {name!r} ({arrow}) holds {column.null_count:,} nulls, which an array of {arrow} cannot hold.\n"
            f'  Read it with where="{name} IS NOT NULL", fill them in a DataFrame (coalesce), or use to_pandas().'
        )
    if pa.types.is_null(arrow):
        return np.full(len(column), None, dtype=object)
    if pa.types.is_decimal(arrow) or pa.types.is_nested(arrow):
        return np.asarray(column.to_pandas(maps_as_pydicts="strict"), dtype=object)
    array: np.ndarray[Any, Any] = column.to_numpy()
    return array


def to_matrix(
    table: pa.Table, features: Sequence[str], label: str | None, dtype: Any = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Return (X, y): X of shape [rows, features], y of shape [rows] or None.

    X has the one type that all features have, or `dtype`. With a floating `dtype` nulls become NaN; without one they
    are an error in integer and boolean features.

    Raises:
        LossyConversionError: The features are of several types and no `dtype` is given, one holds nulls that X cannot
            hold, or one is no number.
        SourceNotFoundError: A feature or the label is not a column.
    """
    import numpy as np

    columns = {name: pick_column(table, name) for name in features}
    target = np.dtype(dtype) if dtype is not None else np.dtype(_common_type(columns).to_pandas_dtype())
    matrix = np.empty((table.num_rows, len(columns)), dtype=target)
    for index, (name, column) in enumerate(columns.items()):
        if not (
            pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)
        ):
            raise LossyConversionError(
                f"feature {name!r} is {column.type}, which is no number.\n"
                "  Leave it out of features=, or encode it in Spark."
            )
        if column.null_count and target.kind == "f":
            column = column.cast(pa.from_numpy_dtype(target), safe=False)
        matrix[:, index] = column_to_numpy(column, name)
    return matrix, None if label is None else column_to_numpy(pick_column(table, label), label)


def is_number(arrow: pa.DataType) -> bool:
    """Return whether values of this type are integers, floats or booleans."""
    return bool(pa.types.is_integer(arrow) or pa.types.is_floating(arrow) or pa.types.is_boolean(arrow))


def pick_column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """Return a column by name.

    Raises:
        SourceNotFoundError: There is none of that name.
    """
    if name not in table.column_names:
        raise SourceNotFoundError(f"no column {name!r} was loaded.{did_you_mean(name, table.column_names)}")
    return table.column(name)


def _common_type(columns: dict[str, pa.ChunkedArray]) -> pa.DataType:
    types = {column.type for column in columns.values()}
    if len(types) == 1:
        return types.pop()
    shown = ", ".join(f"{name} {column.type}" for name, column in list(columns.items())[:8])
    raise LossyConversionError(
        f"the features are of {len(types)} types ({shown}), and one matrix holds one.\n"
        '  Say which: dtype="float32". Without features= each column comes as an array of its own.'
    )
