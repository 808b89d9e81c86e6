"""Arrow to NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.columns.lists import element_type, is_list, split, split_equal
from bridge.columns.policies import mark_of, ways_out
from bridge.display import did_you_mean
from bridge.errors import LossyConversionError, SourceNotFoundError

if TYPE_CHECKING:
    import numpy as np


def to_numpy(table: pa.Table) -> dict[str, Any]:
    """Return one array for each column, as the type contract says; (values, offsets) where that was asked for.

    Raises:
        LossyConversionError: An integer or boolean column holds nulls, arrays differ in length, or a map holds the same
            key twice.
    """
    return {
        field.name: field_to_numpy(column, field) for field, column in zip(table.schema, table.columns, strict=True)
    }


def field_to_numpy(column: pa.ChunkedArray, field: pa.Field) -> Any:
    """Return the values of one column in the form that its field is marked with."""
    if mark_of(field) in ("jagged", "offsets"):
        values, offsets = split(column, field.name)
        elements = column_to_numpy(values, field.name, are_elements=True)
        return (elements, offsets) if mark_of(field) == "offsets" else _rows(elements, offsets)
    return column_to_numpy(column, field.name)


def column_to_numpy(column: pa.ChunkedArray, name: str, *, are_elements: bool = False) -> np.ndarray[Any, Any]:
    """Return the values of one column, or those inside its arrays; may be a read-only view of the column's memory."""
    import numpy as np

    arrow = column.type
    if pa.types.is_dictionary(arrow):
        column = codes_of(column, name)
        arrow = column.type
    if column.null_count and (pa.types.is_integer(arrow) or pa.types.is_boolean(arrow)):
        raise nulls_error(column, name, f"an array of {arrow}")
    if pa.types.is_null(arrow):
        return np.full(len(column), None, dtype=object)
    if is_list(arrow) and has_array_form(element_type(arrow)):
        values, size = split_equal(column, name, are_elements=are_elements)
        elements = column_to_numpy(values, name, are_elements=True)
        return elements.reshape(len(column), size, *elements.shape[1:])
    if pa.types.is_decimal(arrow) or pa.types.is_nested(arrow):
        return _objects(column, name)
    array: np.ndarray[Any, Any] = column.to_numpy()
    return array


def _rows(elements: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array of one array for each row."""
    import numpy as np

    rows = np.empty(len(offsets) - 1, dtype=object)
    for index, (start, stop) in enumerate(itertools.pairwise(offsets)):
        rows[index] = elements[start:stop]
    return rows


def codes_of(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Return the codes of categories as int64."""
    if column.null_count:
        raise LossyConversionError(
            f"column {name!r} holds {column.null_count:,} nulls, which have no code.\n"
            f'  Load it with policies={{"{name}": [bridge.fill("..."), bridge.dictionary()]}}, '
            "or leave them out: bridge.drop_nulls()."
        )
    return pa.chunked_array([chunk.indices.cast(pa.int64()) for chunk in column.chunks], pa.int64())


def nulls_error(column: pa.ChunkedArray, name: str, target: str) -> LossyConversionError:
    """Return the error for nulls that `target` cannot hold, with what would take them."""
    arrow = column.type
    numeric = ["as_float64()"] if pa.types.is_integer(arrow) else []
    return LossyConversionError(
        f"column {name!r} ({arrow}) holds {column.null_count:,} nulls, which {target} cannot hold.\n"
        f"{ways_out(name, 'fill(...)', 'mask()', *numeric, 'drop_nulls()')}; to_pandas() holds them."
    )


def has_array_form(arrow: pa.DataType) -> bool:
    """Return whether values of this type are of one size and kind in NumPy."""
    return is_number(arrow) or bool(pa.types.is_temporal(arrow))


def _objects(column: pa.ChunkedArray, name: str) -> np.ndarray[Any, Any]:
    """Return an array of Python objects."""
    import numpy as np

    try:
        return np.asarray(column.to_pandas(maps_as_pydicts="strict", integer_object_nulls=True), dtype=object)
    except pa.ArrowException as exc:
        raise LossyConversionError(
            f"column {name!r} ({column.type}) cannot be held as objects of Python: {exc}\n"
            "  Leave it out with columns=, or use to_arrow()."
        ) from exc


def to_matrix(
    table: pa.Table, features: Sequence[str], label: str | None, dtype: Any = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Return (X, y): X of shape [rows, features], y of shape [rows] or None.

    X has the one type that all features have, or `dtype`. With a floating `dtype` values are rounded to it and nulls
    become NaN; without one nulls are an error in integer and boolean features. An integer `dtype` takes only values
    that it holds exactly.

    Raises:
        LossyConversionError: The features are of several types and no `dtype` is given, one holds nulls or values that
            X cannot hold, or one is no number.
        SourceNotFoundError: A feature or the label is not a column.
        ValueError: `features` is not a list of names, or `dtype` is no type of numbers.
    """
    import numpy as np

    arrays = feature_arrays(table, features, dtype)
    matrix = np.empty((table.num_rows, len(arrays)), dtype=arrays[0].dtype)
    for index, values in enumerate(arrays):
        matrix[:, index] = values
    return matrix, None if label is None else column_to_numpy(pick_column(table, label), label)


def feature_arrays(table: pa.Table, features: Sequence[str], dtype: Any = None) -> list[np.ndarray[Any, Any]]:
    """Return the columns of X, each of shape [rows] and all of one type, as `to_matrix` says; may be read-only."""
    columns = pick_features(table, features)
    for name, column in columns.items():
        if pa.types.is_dictionary(column.type):
            columns[name] = column = codes_of(column, name)
        if not is_number(column.type):
            raise LossyConversionError(
                f"feature {name!r} is {column.type}, which is no number.\n{_ways_to_numbers(name, column.type)}"
            )
    target = _matrix_type(columns, dtype)
    return [_feature_array(column, target, name) for name, column in columns.items()]


def _feature_array(column: pa.ChunkedArray, target: np.dtype[Any], name: str) -> np.ndarray[Any, Any]:
    import numpy as np

    values = column_to_numpy(_as_type(column, target, name), name)
    with np.errstate(over="ignore"):
        made: np.ndarray[Any, Any] = values.astype(target, copy=False)
    narrows = values.dtype != target and pa.types.is_floating(column.type)
    if narrows and (np.isinf(made) & ~np.isinf(values)).any():
        raise LossyConversionError(
            f"feature {name!r} ({column.type}) holds values that {target} cannot: they would become infinite.\n"
            '  Give a wider type: dtype="float64".'
        )
    return made


def _ways_to_numbers(name: str, arrow: pa.DataType) -> str:
    if pa.types.is_decimal(arrow):
        return f"{ways_out(name, 'as_float64()')}, or leave it out of features=."
    if pa.types.is_string(arrow):
        return f"{ways_out(name, 'dictionary()')} for codes, or leave it out of features=."
    return (
        "  Leave it out of features=, or make numbers of it in Spark; to_numpy() without features= gives it as it is."
    )


def is_number(arrow: pa.DataType) -> bool:
    """Return whether values of this type are integers, floats or booleans."""
    return bool(pa.types.is_integer(arrow) or pa.types.is_floating(arrow) or pa.types.is_boolean(arrow))


def pick_column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """Return a column by name."""
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no name; give the name of one column.")
    if name not in table.column_names:
        raise SourceNotFoundError(f"no column {name!r} was loaded.{did_you_mean(name, table.column_names)}")
    return table.column(name)


def pick_features(table: pa.Table, names: Sequence[str]) -> dict[str, pa.ChunkedArray]:
    """Return the columns that make X, by name."""
    if isinstance(names, str) or not list(names) or len(set(names)) < len(names):
        raise ValueError(f"features is {names!r}; give a list of column names, each once.")
    return {name: pick_column(table, name) for name in names}


def _matrix_type(columns: dict[str, pa.ChunkedArray], dtype: Any) -> np.dtype[Any]:
    import numpy as np

    if dtype is None:
        dtype = _common_type(columns).to_pandas_dtype()
    try:
        target: np.dtype[Any] = np.dtype(dtype)
    except TypeError as exc:
        raise ValueError(f"dtype is {dtype!r}, which NumPy does not have; convert the matrix afterwards.") from exc
    if target.kind not in "fiub":
        raise ValueError(f"dtype is {target}; give a type of floats, integers or booleans.")
    return target


def _as_type(column: pa.ChunkedArray, target: np.dtype[Any], name: str) -> pa.ChunkedArray:
    """Return `column` so that writing it into an array of `target` loses nothing that `target` does not imply."""
    wanted = pa.from_numpy_dtype(target)
    if target.kind == "f":
        return column.cast(wanted, safe=False) if column.null_count else column
    try:
        if target.kind == "b" and not pa.types.is_boolean(column.type):
            raise pa.ArrowInvalid("only a boolean column is one of booleans")
        return column if column.type.equals(wanted) else column.cast(wanted)
    except pa.ArrowInvalid as exc:
        raise LossyConversionError(
            f"feature {name!r} ({column.type}) cannot be held as {target}: {exc}.\n"
            '  Give a wider type, or round it: dtype="float32".'
        ) from exc


def _common_type(columns: dict[str, pa.ChunkedArray]) -> pa.DataType:
    types = {column.type for column in columns.values()}
    if len(types) == 1:
        return types.pop()
    shown = ", ".join(f"{name} {column.type}" for name, column in list(columns.items())[:8])
    raise LossyConversionError(
        f"the features are of {len(types)} types ({shown}), and one matrix holds one.\n"
        '  Say which: dtype="float64", or "float32" where its 24 bits are enough. Without features= each column comes '
        "as an array of its own."
    )
