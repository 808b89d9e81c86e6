"""Spark types as Arrow types: one schema for a table, whatever a batch happens to hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from bridge.columns.policies import VECTOR, marked
from bridge.errors import SourceError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

# pyspark has an Arrow form for these, but not both routes have: Apache Spark neither sends nor writes TIME, and Parquet
# writers take apart the encoded bytes of the others.
_NOT_CARRIED = {"time", "variant", "geometry", "geography"}


def arrow_schema(schema: StructType, name: str) -> pa.Schema:
    """Return the Arrow schema of the rows that `name` gives.

    Instants are microseconds in UTC, whatever the session's zone. Every field may hold nulls, since engines differ in
    what they promise (map keys excepted, which never do).

    Raises:
        SourceError: A column's type has no Arrow form that is the same on every engine.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_type

    fields = []
    for column in schema.fields:
        refusal = (
            f"{name}: column {column.name!r} is {column.dataType.simpleString()}, which cannot be carried.\n"
            f"  {_way_out(column.name, column.dataType)}"
        )
        if _is_not_carried(column.dataType):
            raise SourceError(refusal)
        try:
            arrow = to_arrow_type(column.dataType, timezone="UTC")
        except (PySparkException, NotImplementedError) as exc:
            raise SourceError(refusal) from exc
        field = pa.field(column.name, _nullable(arrow))
        fields.append(marked(field, VECTOR) if type(column.dataType).__name__ == "VectorUDT" else field)
    return pa.schema(fields)


def _way_out(name: str, spark_type: DataType) -> str:
    from pyspark.sql.types import VariantType, YearMonthIntervalType

    if isinstance(spark_type, VariantType):
        return f'Pass policies={{"{name}": bridge.to_json()}}, or leave it out with columns=.'
    target = "INT (months)" if isinstance(spark_type, YearMonthIntervalType) else "STRING"
    return f"Leave it out with columns=, or cast it to {target} in a DataFrame and pass that."


def _is_not_carried(spark_type: DataType) -> bool:
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(spark_type, StructType):
        return any(_is_not_carried(field.dataType) for field in spark_type.fields)
    if isinstance(spark_type, ArrayType):
        return _is_not_carried(spark_type.elementType)
    if isinstance(spark_type, MapType):
        return _is_not_carried(spark_type.keyType) or _is_not_carried(spark_type.valueType)
    return spark_type.typeName() in _NOT_CARRIED


def _nullable(arrow: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(arrow):
        return pa.struct([pa.field(child.name, _nullable(child.type)) for child in arrow])
    if pa.types.is_map(arrow):
        return pa.map_(_nullable(arrow.key_type), _nullable(arrow.item_type))
    if pa.types.is_list(arrow):
        return pa.list_(_nullable(arrow.value_type))
    return arrow
