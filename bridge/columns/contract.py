"""The type contract: what each Arrow type becomes in pandas, NumPy and torch, decided from the schema alone. Pure.

A column has the same type in every batch, whatever nulls a batch happens to hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from bridge.display import html_table, plain_table
from bridge.errors import LossyConversionError

_TEMPORAL_NULLS = "nulls: NaT; an error in tensors"
_INTEGER_NULLS = "nulls: <NA> in pandas; an error in arrays and tensors"


@dataclass(frozen=True)
class ColumnType:
    """What one column becomes. `torch` is None where no tensor can hold it; `nulls` says where nulls go."""

    name: str
    spark: str
    arrow: str
    pandas: str
    numpy: str
    torch: str | None
    nulls: str


class TypeContract(tuple[ColumnType, ...]):
    """The column types of a table, in order; prints as a table."""

    __slots__ = ()

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        headers = ["column", "Spark", "Arrow", "pandas", "NumPy", "torch", "note"]
        return headers, [[t.name, t.spark, t.arrow, t.pandas, t.numpy, t.torch or "(none)", t.nulls] for t in self]

    def __str__(self) -> str:
        return plain_table(*self._rows())

    def _repr_html_(self) -> str:
        return html_table(*self._rows())

    __repr__ = __str__


def type_contract(schema: pa.Schema, spark_types: Mapping[str, str]) -> TypeContract:
    """Return what each column of `schema` becomes; `spark_types` are shown beside it."""
    return TypeContract(_column_type(field, spark_types.get(field.name, "")) for field in schema)


def _column_type(field: pa.Field, spark: str) -> ColumnType:
    pandas, numpy, torch, nulls = _targets(field.type)
    return ColumnType(field.name, spark, str(field.type), pandas, numpy, torch, nulls)


def _targets(arrow: pa.DataType) -> tuple[str, str, str | None, str]:
    types = pa.types
    if types.is_boolean(arrow):
        return "boolean", "bool", "bool", _INTEGER_NULLS
    if types.is_integer(arrow):
        return str(arrow).capitalize(), str(arrow), str(arrow), _INTEGER_NULLS
    if types.is_floating(arrow):
        name = str(arrow.to_pandas_dtype()().dtype)
        return name, name, name, "nulls: NaN"
    if types.is_string(arrow) or types.is_binary(arrow):
        kind = "str" if types.is_string(arrow) else "bytes"
        return f"object ({kind})", f"object ({kind})", f"list[{kind}]", "nulls: None"
    if types.is_date(arrow):
        return "datetime64[ms]", "datetime64[D]", "int64 (days since 1970)", _TEMPORAL_NULLS
    if types.is_timestamp(arrow):
        zone = ", UTC" if arrow.tz else ""
        return f"datetime64[us{zone}]", "datetime64[us]", f"int64 (us{' UTC' if arrow.tz else ''})", _TEMPORAL_NULLS
    if types.is_duration(arrow):
        return "timedelta64[us]", "timedelta64[us]", "int64 (us)", _TEMPORAL_NULLS
    if types.is_decimal(arrow):
        return f"{arrow} (Arrow)", "object (Decimal)", None, "nulls: <NA>, None"
    return "object", "object", None, "nulls: None"


def conform(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    """Return `table` in exactly the types of `schema`, column by column in order; nothing is rounded or wrapped.

    Raises:
        LossyConversionError: A value does not fit its type.
    """
    if table.schema.equals(schema):
        return table
    columns = []
    for column, field in zip(table.columns, schema, strict=True):
        try:
            columns.append(column if column.type.equals(field.type) else column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
            raise LossyConversionError(
                f"{name}: column {field.name!r} came as {column.type} and cannot be held as {field.type}: {exc}"
            ) from exc
    return pa.Table.from_arrays(columns, schema=schema)
