from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bridge.columns.arrays import column_to_numpy, pick_column, to_matrix, to_numpy
from bridge.columns.frames import to_pandas
from bridge.errors import LossyConversionError, SourceNotFoundError

TABLE = pa.table(
    {
        "a": pa.array([1, 2, 3], pa.int64()),
        "b": pa.array([4, None, 6], pa.int64()),
        "small": pa.array([1, 2, 3], pa.int8()),
        "f": pa.array([0.5, None, 2.5]),
        "flag": pa.array([True, False, True]),
        "text": pa.array(["x", "y", None]),
        "price": pa.array([decimal.Decimal("1.50")] * 3),
        "big": pa.array([300, 2**53 + 1, -1]),
    }
)


def test_an_array_for_each_column() -> None:
    arrays = to_numpy(TABLE.drop(["b"]))

    assert list(arrays) == ["a", "small", "f", "flag", "text", "price", "big"]
    assert all(array.shape == (3,) for array in arrays.values())
    assert arrays["text"].tolist() == ["x", "y", None]
    assert arrays["price"][0] == decimal.Decimal("1.50")
    assert np.isnan(arrays["f"][1])


def test_one_chunk_is_not_copied() -> None:
    column = pa.chunked_array([np.arange(10)])

    array = column_to_numpy(column, "n")

    assert array.__array_interface__["data"][0] == column.chunk(0).buffers()[1].address


def test_several_chunks_are_one_array() -> None:
    array = column_to_numpy(pa.chunked_array([[1, 2], [], [3]], pa.int64()), "n")

    assert array.tolist() == [1, 2, 3]


def test_nulls_of_integers_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(LossyConversionError) as caught:
        to_numpy(TABLE)

    assert str(caught.value) == (
        "column 'b' (int64) holds 1 nulls, which an array of int64 cannot hold.\n"
        '  Load it with policies={"b": bridge.fill(...)} '
        "(or bridge.mask(), bridge.as_float64(), bridge.drop_nulls()); to_pandas() holds them."
    )


def test_days_of_any_year() -> None:
    days = [dt.date(1500, 2, 28), dt.date(9999, 12, 31), None]

    array = to_numpy(pa.table({"day": pa.array(days, pa.date32())}))["day"]

    assert array.dtype == np.dtype("datetime64[D]")
    assert array[:2].tolist() == days[:2]
    assert np.isnat(array[2])


def test_features_of_one_type_make_a_matrix_of_it() -> None:
    matrix, label = to_matrix(TABLE, ["big", "a"], None)

    assert matrix.dtype == np.int64
    assert matrix.tolist() == [[300, 1], [2**53 + 1, 2], [-1, 3]]
    assert label is None


def test_a_label_is_an_array_of_its_own() -> None:
    matrix, label = to_matrix(TABLE, ["f"], "text")

    assert matrix.shape == (3, 1)
    assert label is not None
    assert label.tolist() == ["x", "y", None]


def test_features_of_several_types_need_a_dtype() -> None:
    with pytest.raises(
        LossyConversionError,
        match=r"the features are of 2 types \(a int64, f double\), and one matrix holds one.\n  Say which: dtype=",
    ):
        to_matrix(TABLE, ["a", "f"], None)

    matrix, _ = to_matrix(TABLE, ["a", "f", "flag", "small"], None, "float32")

    assert matrix.dtype == np.float32
    assert matrix[0].tolist() == [1.0, 0.5, 1.0, 1.0]
    assert np.isnan(matrix[1, 1])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", np.float32])
@pytest.mark.parametrize("column", ["b", "f"])
def test_a_floating_dtype_makes_nulls_nan(dtype: Any, column: str) -> None:
    matrix, _ = to_matrix(TABLE, [column], None, dtype)

    assert matrix.dtype == np.dtype(dtype)
    assert np.isnan(matrix[:, 0]).tolist() == [False, True, False]


def test_booleans_with_nulls_become_floats() -> None:
    matrix, _ = to_matrix(pa.table({"flag": [True, None]}), ["flag"], None, "float32")

    assert matrix[0, 0] == 1.0
    assert np.isnan(matrix[1, 0])


def test_nulls_of_integers_are_an_error_without_a_floating_dtype() -> None:
    for dtype in (None, "int64", "int32"):
        with pytest.raises(LossyConversionError, match=r"column 'b' \(int\d+\) holds 1 nulls"):
            to_matrix(TABLE, ["b"], None, dtype)
    with pytest.raises(LossyConversionError, match=r"column 'b' \(int64\) holds 1 nulls"):
        to_matrix(TABLE, ["a"], "b")


@pytest.mark.parametrize(
    ("column", "dtype"), [("big", "int8"), ("big", "uint8"), ("big", "int32"), ("f", "int64"), ("a", "bool")]
)
def test_an_integer_dtype_takes_only_what_it_holds(column: str, dtype: str) -> None:
    with pytest.raises(
        LossyConversionError, match=rf"feature '{column}' \(\w+\) cannot be held as {dtype}: .*\n  Give a"
    ):
        to_matrix(TABLE, [column], None, dtype)


def test_an_integer_dtype_that_holds_the_values_is_taken() -> None:
    matrix, _ = to_matrix(TABLE, ["a", "flag", "small"], None, "int16")

    assert matrix.dtype == np.int16
    assert matrix.tolist() == [[1, 1, 1], [2, 0, 2], [3, 1, 3]]
    whole, _ = to_matrix(pa.table({"f": [1.0, 2.0]}), ["f"], None, "int8")
    assert whole.tolist() == [[1], [2]]


@pytest.mark.parametrize("column", ["text", "price"])
def test_a_feature_is_a_number(column: str) -> None:
    for dtype in (None, "float32"):
        with pytest.raises(
            LossyConversionError,
            match=rf"feature '{column}' is .*, which is no number\.\n  .*(dictionary|as_float64)",
        ):
            to_matrix(TABLE, [column], None, dtype)


@pytest.mark.parametrize("dtype", ["complex64", "object", "U5", "datetime64[us]"])
def test_a_matrix_is_of_numbers(dtype: str) -> None:
    with pytest.raises(ValueError, match=r"dtype is .*; give a type of floats, integers or booleans"):
        to_matrix(TABLE, ["a"], None, dtype)


def test_a_dtype_is_one_of_numpy() -> None:
    with pytest.raises(
        ValueError, match="dtype is 'bfloat16', which NumPy does not have; convert the matrix afterwards"
    ):
        to_matrix(TABLE, ["a"], None, "bfloat16")


@pytest.mark.parametrize("features", [[], "a", ["a", "f", "a"]])
def test_features_are_names_each_once(features: Any) -> None:
    with pytest.raises(ValueError, match=r"features is .*; give a list of column names, each once"):
        to_matrix(TABLE, features, None)


def test_columns_that_are_not_there_are_told_with_near_names() -> None:
    with pytest.raises(SourceNotFoundError, match=r"no column 'prize' was loaded\. Did you mean \"price\"\?"):
        to_matrix(TABLE, ["prize"], None)
    with pytest.raises(LookupError, match="no column 'nothing' was loaded"):
        to_matrix(TABLE, ["a"], "nothing")
    assert pick_column(TABLE, "a").to_pylist() == [1, 2, 3]


def test_no_rows_make_empty_arrays() -> None:
    empty = TABLE.schema.empty_table()

    assert all(len(array) == 0 for array in to_numpy(empty).values())
    assert to_matrix(empty, ["a", "b"], "f")[0].shape == (0, 2)


EXACT = 2**53 + 1  # not a float64


@pytest.mark.parametrize(
    ("rows", "arrow"),
    [
        ([["a", str(EXACT)]], pa.list_(pa.string())),
        ([{"a": EXACT}, {"a": None}], pa.struct([("a", pa.int64())])),
        ([[("k", EXACT), ("l", None)]], pa.map_(pa.string(), pa.int64())),
        ([[{"a": EXACT}, {"a": None}]], pa.list_(pa.struct([("a", pa.int64())]))),
    ],
    ids=str,
)
def test_a_null_does_not_turn_nested_integers_to_floats(rows: list[Any], arrow: pa.DataType) -> None:
    table = pa.table({"c": pa.array(rows, arrow)})

    assert str(EXACT) in str(to_numpy(table)["c"].tolist())
    assert str(EXACT) in str(to_pandas(table)["c"].tolist())


def test_a_matrix_does_not_overflow_to_infinity() -> None:
    table = pa.table({"x": [1e300, 1.0], "y": [float("inf"), 1.0]})

    with pytest.raises(LossyConversionError, match=r"feature 'x' \(double\) holds values that float32 cannot"):
        to_matrix(table, ["x"], None, "float32")
    assert np.isinf(to_matrix(table, ["y"], None, "float32")[0][0, 0])
