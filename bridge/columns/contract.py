"""The type contract: what each Arrow type becomes in pandas, NumPy and torch, decided from the schema alone. Pure.

A column has the same type in every batch, whatever nulls a batch happens to hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from bridge.columns.lists import element_type, is_list
from bridge.columns.policies import DropNulls, Fill, Mask, Policy, mark_of
from bridge.columns.rules import Rules
from bridge.display import html_table, plain_table
from bridge.errors import LossyConversionError

_FLOAT_NULLS = "nulls: NaN"
_TEMPORAL_NULLS = "nulls: NaT; an error in tensors"
_INTEGER_NULLS = "nulls: <NA> in pandas; an error in arrays and tensors"
_LIST_NULLS = "nulls: None in pandas; an error in arrays and tensors"


@dataclass(frozen=True)
class ColumnType:
    """What one column becomes.

    `torch` is None where no tensor can hold it, `huggingface` where datasets has no feature.
    `nulls` says where nulls go, and what else there is to know; `policies` what was asked to be done.
    """

    name: str
    spark: str
    arrow: str
    pandas: str
    numpy: str
    torch: str | None
    huggingface: str | None
    nulls: str
    policies: str = ""


class TypeContract(tuple[ColumnType, ...]):
    """The column types of a table, in order; prints as a table."""

    __slots__ = ()

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        headers = ["column", "Spark", "Arrow", "pandas", "NumPy", "torch", "datasets", "note"]
        rows = [
            [
                t.name, t.spark, t.arrow, t.pandas, t.numpy, t.torch or "(none)", t.huggingface or "(none)",
                "; ".join(filter(None, [t.policies, t.nulls])),
            ]
            for t in self
        ]  # fmt: skip
        return headers, rows

    def __str__(self) -> str:
        return plain_table(*self._rows())

    def _repr_html_(self) -> str:
        return html_table(*self._rows())

    __repr__ = __str__


def type_contract(schema: pa.Schema, spark_types: Mapping[str, str], rules: Rules | None = None) -> TypeContract:
    """Return what each column of `schema` becomes; `spark_types` and the policies of `rules` are shown beside it."""
    policies = rules.policies if rules else {}
    masks = {f"{name}__valid" for name, given in policies.items() if any(isinstance(one, Mask) for one in given)}
    return TypeContract(
        _column_type(field, spark_types.get(field.name, ""), policies.get(field.name, ()), field.name in masks)
        for field in schema
    )


def _column_type(field: pa.Field, spark: str, policies: Sequence[Policy], is_mask: bool) -> ColumnType:
    pandas, numpy, torch, nulls = _targets(field)
    if is_mask or any(isinstance(policy, Fill | Mask | DropNulls) for policy in policies):
        nulls = "no nulls"
    shown = " + ".join(map(str, policies))
    return ColumnType(field.name, spark, str(field.type), pandas, numpy, torch, _feature(field.type), nulls, shown)


def _targets(field: pa.Field) -> tuple[str, str, str | None, str]:
    arrow, mark = field.type, mark_of(field)
    if mark == "sparse":
        return "object", "object", "float64 [rows, size], sparse COO", "nulls: an error in tensors"
    if mark == "jagged":
        return "object", "object (arrays)", _with_elements(arrow.value_type, 2, "{} jagged"), _LIST_NULLS
    if mark == "offsets":
        numpy = _with_elements(arrow.value_type, 1, "({} values, int64 offsets)") or "(object, int64 offsets)"
        return "object", numpy, _with_elements(arrow.value_type, 2, "({} values, int64 offsets)"), _LIST_NULLS
    types = pa.types
    elements = _values(element_type(arrow)) if is_list(arrow) else None
    if elements:
        return "object", f"{elements[1]} {_shape(arrow)}", f"{elements[2]} {_shape(arrow)}", _LIST_NULLS
    if found := _values(arrow):
        return found
    if types.is_string(arrow) or types.is_binary(arrow):
        kind = "str" if types.is_string(arrow) else "bytes"
        return f"object ({kind})", f"object ({kind})", f"list[{kind}]", "nulls: None"
    if types.is_dictionary(arrow):
        return "category", "int64 (codes)", "int64 (codes)", _INTEGER_NULLS
    if types.is_decimal(arrow):
        torch = "int64" if arrow.scale == 0 else None
        nulls = "nulls: <NA>, None; an error in tensors" if torch else "nulls: <NA>, None"
        return f"{arrow} (Arrow)", "object (Decimal)", torch, nulls
    if types.is_struct(arrow):
        parts = [_targets(child)[2] for child in arrow]
        torch = "dict of " + ", ".join(f"{c.name}: {part}" for c, part in zip(arrow, parts, strict=True))
        return "object", "object", torch if None not in parts else None, "nulls: None; an error in tensors"
    return "object", "object", None, "nulls: None"


def _values(arrow: pa.DataType) -> tuple[str, str, str, str] | None:
    """Return what values of one size become."""
    types = pa.types
    if types.is_boolean(arrow):
        return "boolean", "bool", "bool", _INTEGER_NULLS
    if types.is_integer(arrow):
        return str(arrow).capitalize(), str(arrow), str(arrow), _INTEGER_NULLS
    if types.is_floating(arrow):
        name = str(arrow.to_pandas_dtype()().dtype)
        return name, name, name, _FLOAT_NULLS
    if types.is_date(arrow):
        return "datetime64[ms]", "datetime64[D]", "int64 (days since 1970)", _TEMPORAL_NULLS
    if types.is_timestamp(arrow):
        zone = ", UTC" if arrow.tz else ""
        return f"datetime64[us{zone}]", "datetime64[us]", f"int64 (us{' UTC' if arrow.tz else ''})", _TEMPORAL_NULLS
    if types.is_duration(arrow):
        return "timedelta64[us]", "timedelta64[us]", "int64 (us)", _TEMPORAL_NULLS
    return None


def _with_elements(arrow: pa.DataType, target: int, form: str) -> str | None:
    """Return `form` with what elements become in NumPy (1) or torch (2); None where they are no numbers."""
    found = _values(element_type(arrow))
    shape = f" {_shape(arrow)}" if is_list(arrow) else ""
    return form.format(found[target] + shape) if found else None


def _shape(arrow: pa.DataType) -> str:
    sizes = ["rows"]
    while is_list(arrow):
        sizes.append(str(arrow.list_size) if pa.types.is_fixed_size_list(arrow) else "n")
        arrow = arrow.value_type
    return f"[{', '.join(sizes)}]"


def _feature(arrow: pa.DataType) -> str | None:
    types = pa.types
    if types.is_dictionary(arrow):
        return "ClassLabel"
    if is_list(arrow):
        inner = _feature(arrow.value_type)
        length = f", length={arrow.list_size}" if types.is_fixed_size_list(arrow) else ""
        return inner and f"List({inner}{length})"
    if types.is_struct(arrow):
        parts = {child.name: _feature(child.type) for child in arrow}
        return None if None in parts.values() else "{" + ", ".join(f"{k}: {v}" for k, v in parts.items()) + "}"
    return None if types.is_map(arrow) else f"Value({arrow})"


def conform(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    """Return `table` in exactly the types of `schema`, column by column in order; nothing is rounded or wrapped."""
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
