"""Tables compared as multisets of rows, by value and exactly."""

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any

import pyarrow as pa


def multiset(table: pa.Table) -> Counter[tuple[Any, ...]]:
    """Return how often each row is there; equal for two tables exactly if each value is, to the bit."""
    columns = [[_value(scalar) for scalar in column] for column in table.columns]
    return Counter(zip(*columns, strict=True))


def shape(schema: pa.Schema) -> list[tuple[str, Any]]:
    """Return names and types, without what engines and files differ in: nullability and the names inside lists."""
    return [(field.name, _kind(field.type)) for field in schema]


def _kind(arrow: pa.DataType) -> Any:
    if pa.types.is_struct(arrow):
        return "struct", [(field.name, _kind(field.type)) for field in arrow]
    if pa.types.is_map(arrow):
        return "map", _kind(arrow.key_type), _kind(arrow.item_type)
    if pa.types.is_list(arrow):
        return "list", _kind(arrow.value_type)
    return str(arrow)


def _value(scalar: pa.Scalar) -> Any:
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.StructScalar):
        return tuple(_value(scalar[index]) for index in range(len(scalar.type)))
    if isinstance(scalar, pa.MapScalar):
        # as a map has no order, neither have its pairs
        return tuple(sorted((repr(_value(pair[0])), _value(pair[1])) for pair in scalar.values))
    if isinstance(scalar, pa.ListScalar):
        return tuple(_value(element) for element in scalar.values)
    if isinstance(scalar, pa.TimestampScalar | pa.Date32Scalar | pa.DurationScalar):
        return scalar.value
    value = scalar.as_py()
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else struct.pack("<d", value)
    return value
