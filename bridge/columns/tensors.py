"""Arrow to torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.columns.arrays import (
    codes_of,
    column_to_numpy,
    has_array_form,
    is_number,
    nulls_error,
    pick_column,
    to_matrix,
)
from bridge.columns.lists import element_type, is_list, split, split_equal
from bridge.columns.policies import mark_of, ways_out
from bridge.columns.vectors import take_apart
from bridge.errors import LossyConversionError, MissingDependencyError

if TYPE_CHECKING:
    import torch


def require_torch() -> None:
    """Import torch; where it is not installed, say what brings it."""
    try:
        import torch  # noqa: F401
    except ImportError as exc:
        raise MissingDependencyError(
            'tensors need torch, which is not installed.\n  pip install "spark-training-bridge[torch]"'
        ) from exc


def to_torch(table: pa.Table) -> dict[str, Any]:
    """Return one tensor for each column; a list for strings and binary, a dict for a struct.

    Tensors may share memory with the table: copy one before writing into it.

    Raises:
        LossyConversionError: A column has no tensor form, or holds values that its tensor cannot hold.
        MissingDependencyError: torch is not installed.
    """
    require_torch()
    return {
        field.name: field_to_torch(column, field) for field, column in zip(table.schema, table.columns, strict=True)
    }


def field_to_torch(column: pa.ChunkedArray, field: pa.Field) -> Any:
    """Return the values of one column in the form that its field is marked with."""
    import torch

    name, mark = field.name, mark_of(field)
    if mark in ("jagged", "offsets"):
        if not has_array_form(element_type(column.type)):
            raise _no_tensor(column.type, name)
        values, bounds = split(column, name)
        elements, offsets = column_to_torch(values, name, are_elements=True), torch.from_numpy(bounds)
        if mark == "offsets":
            return elements, offsets
        return torch.nested.nested_tensor_from_jagged(elements, offsets=offsets)
    return _sparse(column, name) if mark == "sparse" else column_to_torch(column, name)


def column_to_torch(column: pa.ChunkedArray, name: str, *, are_elements: bool = False) -> Any:
    """Return the values of one column, or those inside its arrays."""
    import torch

    arrow = column.type
    types = pa.types
    if types.is_string(arrow) or types.is_binary(arrow):
        values: list[Any] = column.to_pylist()
        return values
    if types.is_struct(arrow):
        if column.null_count:
            raise LossyConversionError(
                f"column {name!r} (struct) holds {column.null_count:,} nulls in the place of structs.\n"
                f"{ways_out(name, 'drop_nulls()', 'flatten()')}."
            )
        parts = zip(arrow, column.flatten(), strict=True)
        return {child.name: column_to_torch(part, f"{name}.{child.name}") for child, part in parts}
    if is_list(arrow) and has_array_form(element_type(arrow)):
        flat, size = split_equal(column, name, are_elements=are_elements)
        elements = column_to_torch(flat, name, are_elements=True)
        return elements.reshape(len(column), size, *elements.shape[1:])
    if types.is_dictionary(arrow):
        column = codes_of(column, name)
    elif types.is_temporal(arrow):
        if column.null_count:
            raise nulls_error(column, name, "a tensor of int64")
        days = column.cast(pa.int32()) if types.is_date32(arrow) else column
        column = days.cast(pa.int64())
    elif types.is_decimal(arrow) and arrow.scale == 0:
        column = _integers(column, name)
    elif not is_number(arrow):
        raise _no_tensor(arrow, name)
    if column.num_chunks == 1 and not column.null_count and not types.is_boolean(arrow) and len(column):
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(column.chunk(0))
    else:
        if column.null_count and not types.is_floating(column.type):
            raise nulls_error(column, name, f"a tensor of {column.type}")
        tensor = torch.from_numpy(_writable(column_to_numpy(column, name)))
    return tensor


def _integers(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid as exc:
        raise LossyConversionError(
            f"column {name!r} ({column.type}) holds integers that int64 cannot: {exc}.\n"
            f"{ways_out(name, 'as_float64()')}, which rounds them."
        ) from exc


def _sparse(column: pa.ChunkedArray, name: str) -> torch.Tensor:
    """Return pyspark.ml's vectors as one COO tensor of shape [rows, size]."""
    import numpy as np
    import torch

    if column.null_count:
        raise LossyConversionError(
            f"column {name!r} holds {column.null_count:,} nulls in the place of vectors.\n"
            f"{ways_out(name, 'drop_nulls()')}."
        )
    lengths, rows, places, values = take_apart(column)
    sizes = np.unique(lengths)
    if len(sizes) > 1:
        raise LossyConversionError(
            f"column {name!r} holds vectors of {sizes[0]:,} to {sizes[-1]:,} elements, which make no one tensor.\n"
            "  Make them of one size in Spark."
        )
    at, numbers = torch.from_numpy(np.stack([rows, places])), torch.from_numpy(_writable(values))
    shape = (len(column), *(sizes.tolist() or [0]))
    return torch.sparse_coo_tensor(at, numbers, shape, check_invariants=True).coalesce()


def _no_tensor(arrow: pa.DataType, name: str) -> LossyConversionError:
    types = pa.types
    if types.is_decimal(arrow):
        ways = ["as_float64()"]
    else:
        ways = ["to_json()", "flatten()"] if types.is_struct(arrow) else ["to_json()"]
    return LossyConversionError(
        f"column {name!r} is {arrow}, which no tensor holds exactly.\n"
        f"{ways_out(name, *ways)}, leave it out with columns=, or use to_numpy() or to_huggingface()."
    )


def to_torch_matrix(
    table: pa.Table, features: Sequence[str], label: str | None, dtype: Any = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (X, y) as `to_matrix` does. `dtype` may be torch's or NumPy's."""
    require_torch()
    import torch

    matrix, _ = to_matrix(table, features, None, numpy_dtype(dtype))
    return torch.from_numpy(matrix), None if label is None else label_to_torch(table, label)


def label_to_torch(table: pa.Table, label: str) -> torch.Tensor:
    """Return y. It may share memory with the table."""
    import torch

    chosen = pick_column(table, label)
    is_text = pa.types.is_string(chosen.type)
    target = column_to_torch(chosen, label)
    if not isinstance(target, torch.Tensor):
        way = f"{ways_out(label, 'dictionary()')}." if is_text else "  Make numbers of it in Spark."
        raise LossyConversionError(f"label {label!r} is {chosen.type}, which makes no tensor of labels.\n{way}")
    return target


def numpy_dtype(dtype: Any) -> Any:
    """Return a dtype of torch as what NumPy calls it; others as they are."""
    import torch

    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def _writable(array: Any) -> Any:
    return array if array.flags.writeable else array.copy()
