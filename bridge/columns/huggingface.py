"""Arrow to Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.errors import LossyConversionError

if TYPE_CHECKING:
    import datasets


def to_dataset(table: pa.Table, categories: Mapping[str, list[str]]) -> datasets.Dataset:
    """Return a map-style dataset over the table's own memory.

    Args:
        categories: The dictionary of each column of categories.

    Raises:
        LossyConversionError: datasets has no feature for a column's type.
    """
    import datasets

    features = _features(table.schema, categories)
    rows = datasets.table.InMemoryTable(to_features(table))
    return datasets.Dataset(rows, datasets.DatasetInfo(features=features))


def to_iterable_dataset(
    schema: pa.Schema,
    categories: Mapping[str, list[str]],
    tables: Callable[..., Iterator[tuple[Any, pa.Table]]],
    **shards: list[Any],
) -> datasets.IterableDataset:
    """Return a streaming dataset over what `tables(**shards)` yields: keys, and tables as `to_features` makes them.

    The lists in `shards` are what datasets splits among ranks and workers, so `tables` must be a module-level function.

    Raises:
        LossyConversionError: datasets has no feature for a column's type.
    """
    import datasets
    from datasets.iterable_dataset import ArrowExamplesIterable

    examples = ArrowExamplesIterable(tables, shards)
    return datasets.IterableDataset(examples, datasets.DatasetInfo(features=_features(schema, categories)))


def to_features(table: pa.Table) -> pa.Table:
    """Return the rows as datasets stores them: codes in the place of categories, no marks."""
    columns, fields = [], []
    for field, column in zip(table.schema, table.columns, strict=True):
        if pa.types.is_dictionary(field.type):
            column = pa.chunked_array([chunk.indices.cast(pa.int64()) for chunk in column.chunks], pa.int64())
        columns.append(column)
        fields.append(pa.field(field.name, column.type))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _features(schema: pa.Schema, categories: Mapping[str, list[str]]) -> datasets.Features:
    import datasets

    features = {}
    for field in schema:
        if pa.types.is_dictionary(field.type):
            features[field.name] = datasets.ClassLabel(names=categories[field.name])
            continue
        try:
            found = datasets.Features.from_arrow_schema(pa.schema([pa.field(field.name, field.type)]))
        except ValueError:
            found = None
        if found is None or found.arrow_schema.field(0).type != field.type:
            stored = "" if found is None else f" but {found.arrow_schema.field(0).type}"
            raise LossyConversionError(
                f"column {field.name!r} is {field.type}, for which datasets has no feature{stored}.\n"
                f'  Pass policies={{"{field.name}": bridge.to_json()}} to load_table, leave it out with columns=, or '
                "cast it in a DataFrame and load that."
            )
        features[field.name] = found[field.name]
    return datasets.Features(features)
