"""Arrow to pandas."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

if TYPE_CHECKING:
    import pandas as pd

DtypeBackend = Literal["numpy_nullable", "pyarrow"]


def to_pandas(table: pa.Table, dtype_backend: DtypeBackend = "numpy_nullable") -> pd.DataFrame:
    """Return the rows as pandas holds them without loss: integers and booleans in nullable dtypes, decimals in Arrow's.

    Raises:
        ValueError: `dtype_backend` is not one of pandas's own two.
    """
    import pandas as pd

    if dtype_backend == "pyarrow":
        options: dict[str, Any] = {"types_mapper": pd.ArrowDtype}
    elif dtype_backend == "numpy_nullable":
        options = {"types_mapper": _mapper(), "date_as_object": False, "maps_as_pydicts": "strict"}
    else:
        raise ValueError(f'dtype_backend is {dtype_backend!r}; give "numpy_nullable" or "pyarrow".')
    frame: pd.DataFrame = table.to_pandas(**options)
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
