"""Arrow to pandas."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from bridge.columns.arrays import column_to_numpy

if TYPE_CHECKING:
    import pandas as pd

DtypeBackend = Literal["numpy_nullable", "pyarrow"]


def to_pandas(table: pa.Table, dtype_backend: DtypeBackend = "numpy_nullable") -> pd.DataFrame:
    """Return the rows as pandas holds them without loss: integers and booleans in nullable dtypes, decimals in Arrow's.

    Raises:
        LossyConversionError: A map holds the same key twice.
        ValueError: `dtype_backend` is not one of pandas's own two.
    """
    import pandas as pd

    if dtype_backend == "pyarrow":
        options: dict[str, Any] = {"types_mapper": pd.ArrowDtype}
    elif dtype_backend == "numpy_nullable":
        options = {"types_mapper": _mapper(), "date_as_object": False, "maps_as_pydicts": "strict"}
        options["integer_object_nulls"] = True  # else a NULL turns the integers inside lists and structs to floats
    else:
        raise ValueError(f'dtype_backend is {dtype_backend!r}; give "numpy_nullable" or "pyarrow".')
    try:
        frame: pd.DataFrame = table.to_pandas(**options)
    except pa.ArrowException:
        for name, column in zip(table.column_names, table.columns, strict=True):
            if pa.types.is_nested(column.type):
                column_to_numpy(column, name)  # raises an error that names the column
        raise
    return frame


def _mapper() -> Callable[[pa.DataType], Any]:
    import pandas as pd

    nullable = {
        pa.bool_(): pd.BooleanDtype(),
        pa.int8(): pd.Int8Dtype(),
        pa.int16(): pd.Int16Dtype(),
        pa.int32(): pd.Int32Dtype(),
        pa.int64(): pd.Int64Dtype(),
    }

    def mapper(arrow: pa.DataType) -> Any:
        return pd.ArrowDtype(arrow) if pa.types.is_decimal(arrow) else nullable.get(arrow)

    return mapper
