"""Arrow to Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.errors import LossyConversionError

if TYPE_CHECKING:
    import datasets


def to_dataset(table: pa.Table) -> datasets.Dataset:
    """Return a map-style dataset over the table's own memory.

    Raises:
        LossyConversionError: datasets has no feature for a column's type.
    """
    import datasets

    return datasets.Dataset(datasets.table.InMemoryTable(table), datasets.DatasetInfo(features=_features(table.schema)))


def to_iterable_dataset(
    schema: pa.Schema, tables: Callable[..., Iterator[tuple[Any, pa.Table]]], **shards: list[Any]
) -> datasets.IterableDataset:
    """Return a streaming dataset over what `tables(**shards)` yields: keys, and tables in `schema`.

    The lists in `shards` are what datasets splits among ranks and workers, so `tables` must be a module-level function.

    Raises:
        LossyConversionError: datasets has no feature for a column's type.
    """
    import datasets
    from datasets.iterable_dataset import ArrowExamplesIterable

    examples = ArrowExamplesIterable(tables, shards)
    return datasets.IterableDataset(examples, datasets.DatasetInfo(features=_features(schema)))


def _features(schema: pa.Schema) -> datasets.Features:
    import datasets

    for field in schema:
        try:
            datasets.Features.from_arrow_schema(pa.schema([field]))
        except ValueError as exc:
            raise LossyConversionError(
                f"column {field.name!r} is {field.type}, for which datasets has no feature.\n"
                "  Leave it out with columns=, or cast it in a DataFrame and load that."
            ) from exc
    return datasets.Features.from_arrow_schema(schema)
