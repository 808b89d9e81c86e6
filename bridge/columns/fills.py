"""Values that are put in the place of NULL: of the column's kind, and exact. Pure."""

from __future__ import annotations

import datetime as dt
import decimal
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

# what Python calls the kinds of Arrow types: the keys by which policies are given, and what a fill is of
KINDS: dict[type, Callable[[pa.DataType], bool]] = {
    bool: pa.types.is_boolean,
    int: pa.types.is_integer,
    float: pa.types.is_floating,
    str: pa.types.is_string,
    bytes: pa.types.is_binary,
    decimal.Decimal: pa.types.is_decimal,
    dt.date: pa.types.is_date,
    dt.datetime: pa.types.is_timestamp,
    dt.timedelta: pa.types.is_duration,
    list: pa.types.is_list,
    dict: pa.types.is_struct,
}
_EPOCH = dt.datetime(1970, 1, 1)
ZEROS: dict[type, Any] = {
    bool: False, int: 0, float: 0.0, str: "", bytes: b"", decimal.Decimal: decimal.Decimal(0), dt.date: _EPOCH.date(),
    dt.datetime: _EPOCH, dt.timedelta: dt.timedelta(0), list: [],
}  # fmt: skip
_ALSO_TAKES: dict[type, tuple[type, ...]] = {float: (int, decimal.Decimal), decimal.Decimal: (int, float)}


def checked_fill(value: Any, arrow: pa.DataType) -> Any:
    """Return what a column of type `arrow` takes for `value`.

    Raises:
        Exception: It is of another kind, or is not held exactly (floats are rounded to the column's width).
    """
    if isinstance(value, np.generic):
        value = value.item()
    kind = next((kind for kind, is_kind in KINDS.items() if is_kind(arrow)), None)
    if kind is list and isinstance(value, list):
        return [checked_fill(element, arrow.value_type) for element in value]
    if kind is bytes and isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    if kind is dt.timedelta and isinstance(value, dict):
        return dt.timedelta(microseconds=value["microseconds"])
    if kind not in (str, bytes, None) and isinstance(value, str):
        value = pa.scalar(value).cast(arrow).as_py()
    takes = _ALSO_TAKES.get(kind, ()) if kind else ()
    if kind is None or not isinstance(value, (kind, *takes)) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"it is no {kind.__name__}" if kind else "no value of such a type is taken")
    if isinstance(value, dt.datetime) and (kind is dt.date or (value.tzinfo is None) != (arrow.tz is None)):
        raise TypeError("it has a time or a zone that the column has not, or lacks the zone that the column has")
    if kind is decimal.Decimal and isinstance(value, float):
        return decimal.Decimal(repr(value))
    if kind is not float:
        return value
    number = float(value)  # type: ignore[arg-type]
    rounded = pa.scalar(number, arrow).as_py()
    if math.isinf(rounded) and not math.isinf(number):
        raise OverflowError("it is too large")
    if isinstance(value, int) and rounded != value:
        raise ValueError("it would be rounded")
    return number


def fill_as_json(value: Any) -> Any:
    """Return a value in JSON's types, which `checked_fill` takes too."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list):
        return [fill_as_json(element) for element in value]
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dt.timedelta):
        return {"microseconds": value // dt.timedelta(microseconds=1)}
    is_known = isinstance(value, bool | int | str | dict) or (isinstance(value, float) and math.isfinite(value))
    return value if is_known else str(value)
