"""Arrow to torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.columns.arrays import column_to_numpy, is_number, pick_column, to_matrix
from bridge.errors import LossyConversionError, MissingDependencyError

if TYPE_CHECKING:
    import torch


def require_torch() -> None:
    """Import torch.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import torch  # noqa: F401
    except ImportError as exc:
        raise MissingDependencyError(
            'tensors need torch, which is not installed.\n  pip install "spark-training-bridge[torch]"'
        ) from exc


def to_torch(table: pa.Table) -> dict[str, torch.Tensor | list[Any]]:
    """Return one tensor for each column, a list for strings and binary.

    Tensors may share memory with the table: copy one before writing into it.

    Raises:
        LossyConversionError: A column has no tensor form, or holds nulls that its tensor cannot hold.
        MissingDependencyError: torch is not installed.
    """
    require_torch()
    return {name: column_to_torch(column, name) for name, column in zip(table.column_names, table.columns, strict=True)}


def column_to_torch(column: pa.ChunkedArray, name: str) -> torch.Tensor | list[Any]:
    """Return the values of one column."""
    import torch

    arrow = column.type
    types = pa.types
    if types.is_string(arrow) or types.is_binary(arrow):
        values: list[Any] = column.to_pylist()
        return values
    if types.is_temporal(arrow):
        if column.null_count:
            raise LossyConversionError(
                f"column {name!r} ({arrow}) holds {column.null_count:,} nulls, which a tensor of int64 cannot hold.\n"
                f'  Read it with where="{name} IS NOT NULL", or use to_numpy(), where they are NaT.'
            )
        days = column.cast(pa.int32()) if types.is_date32(arrow) else column
        column = days.cast(pa.int64())
    elif not is_number(arrow):
        raise LossyConversionError(
            f"column {name!r} is {arrow}, which no tensor holds exactly.\n"
            "  Leave it out with columns=, cast it in a DataFrame and load that, or use to_numpy() or to_huggingface()."
        )
    if column.num_chunks == 1 and not column.null_count and not types.is_boolean(arrow) and len(column):
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(column.chunk(0))
    else:
        tensor = torch.from_numpy(_writable(column_to_numpy(column, name)))
    return tensor


def to_torch_matrix(
    table: pa.Table, features: Sequence[str], label: str | None, dtype: Any = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (X, y) as `to_matrix` does. `dtype` may be torch's or NumPy's."""
    require_torch()
    import torch

    wanted = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    matrix, _ = to_matrix(table, features, None, wanted)
    if label is None:
        return torch.from_numpy(matrix), None
    target = column_to_torch(pick_column(table, label), label)
    if isinstance(target, list):
        raise LossyConversionError(
            f"label {label!r} holds strings or binary, which no tensor holds.\n  Encode it in Spark."
        )
    return torch.from_numpy(matrix), target


def _writable(array: Any) -> Any:
    return array if array.flags.writeable else array.copy()
