from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from bridge.columns.arrays import to_numpy
from bridge.columns.contract import conform, type_contract
from bridge.columns.frames import to_pandas
from bridge.columns.tensors import to_torch
from bridge.errors import LossyConversionError

UTC = dt.UTC
# one value and its type, for each type that a Spark column becomes
VALUES: dict[str, tuple[pa.DataType, Any]] = {
    "boolean": (pa.bool_(), True),
    "tinyint": (pa.int8(), -128),
    "smallint": (pa.int16(), 2**15 - 1),
    "int": (pa.int32(), -(2**31)),
    "bigint": (pa.int64(), 2**63 - 1),
    "float": (pa.float32(), 0.5),
    "double": (pa.float64(), 0.1),
    "string": (pa.string(), "é"),
    "binary": (pa.binary(), b"\x00\xff"),
    "date": (pa.date32(), dt.date(9999, 12, 31)),
    "timestamp": (pa.timestamp("us", "UTC"), dt.datetime(1600, 1, 1, 1, 2, 3, 4, tzinfo=UTC)),
    "timestamp_ntz": (pa.timestamp("us"), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)),
    "interval day to second": (pa.duration("us"), dt.timedelta(days=1, microseconds=1)),
    "decimal(10,2)": (pa.decimal128(10, 2), decimal.Decimal("12345678.90")),
    "decimal(38,0)": (pa.decimal128(38, 0), decimal.Decimal(2**63 - 1)),
    "array<int>": (pa.list_(pa.int32()), [1, 2]),
    "array<string>": (pa.list_(pa.string()), ["1", None]),
    "struct<a:int,b:string>": (pa.struct([("a", pa.int32()), ("b", pa.string())]), {"a": 1, "b": "x"}),
    "map<string,int>": (pa.map_(pa.string(), pa.int32()), {"a": 1}),
    "void": (pa.null(), None),
}
TYPES = pytest.mark.parametrize("spark", list(VALUES))


def one_column(spark: str, *, nulls: bool) -> pa.Table:
    arrow, value = VALUES[spark]
    given = list(value.items()) if isinstance(value, dict) and pa.types.is_map(arrow) else value
    return pa.table({"c": pa.array([given] * 3 + [None] * nulls, arrow)})


def base(text: str) -> str:
    """Return the dtype that an entry of the contract begins with."""
    return text.partition(" (")[0]


@TYPES
@pytest.mark.parametrize("nulls", [False, True])
def test_pandas_gets_what_the_contract_says_with_and_without_nulls(spark: str, nulls: bool) -> None:
    table = one_column(spark, nulls=nulls)
    arrow, value = VALUES[spark]

    (says,) = type_contract(table.schema, {"c": spark})
    series = to_pandas(table)["c"]

    assert (says.name, says.spark, says.arrow) == ("c", spark, str(arrow))
    if says.pandas.endswith("(Arrow)"):
        assert series.dtype == pd.ArrowDtype(arrow)
    else:
        assert str(series.dtype) == base(says.pandas)
    if pa.types.is_list(arrow):
        assert series[0].tolist() == value
    elif pa.types.is_date(arrow):
        assert series[0] == dt.datetime(9999, 12, 31)
    elif value is not None:
        assert series[0] == value
    assert series.isna().sum() == (len(series) if value is None else nulls)


@TYPES
@pytest.mark.parametrize("nulls", [False, True])
def test_numpy_gets_what_the_contract_says_or_raises_for_nulls(spark: str, nulls: bool) -> None:
    table = one_column(spark, nulls=nulls)
    (says,) = type_contract(table.schema, {})

    if nulls and "an error in arrays" in says.nulls:
        with pytest.raises(
            LossyConversionError,
            match=r"column 'c' \(.*\) holds 1 nulls(, which an array of \w+ cannot hold| in the place)",
        ):
            to_numpy(table)
        return
    array = to_numpy(table)["c"]

    assert str(array.dtype) == base(says.numpy).partition(" [")[0]
    assert array.shape == ((3, 2) if "[rows, n]" in says.numpy else (3 + nulls,))
    if "(str)" in says.numpy or "(bytes)" in says.numpy or "(Decimal)" in says.numpy:
        assert type(array[0]).__name__ == says.numpy[8:-1]
    if nulls:
        missing = array[3]
        assert (
            np.isnan(missing) if "NaN" in says.nulls else np.isnat(missing) if "NaT" in says.nulls else missing is None
        )


@TYPES
@pytest.mark.parametrize("nulls", [False, True])
def test_torch_gets_what_the_contract_says_or_raises(spark: str, nulls: bool) -> None:
    table = one_column(spark, nulls=nulls)
    (says,) = type_contract(table.schema, {})

    if says.torch is None:
        with pytest.raises(LossyConversionError, match=r"column 'c' is .*, which no tensor holds exactly"):
            to_torch(table)
    elif nulls and ("in arrays and tensors" in says.nulls or "error in tensors" in says.nulls):
        with pytest.raises(
            LossyConversionError, match=r"column 'c' \(.*\) holds 1 nulls(, which .* cannot hold| in the place)"
        ):
            to_torch(table)
    elif says.torch.startswith("list["):
        values = to_torch(table)["c"]
        assert isinstance(values, list)
        assert type(values[0]).__name__ == says.torch[5:-1]
        assert values[3:] == [None] * nulls
    elif says.torch.startswith("dict of "):
        parts = to_torch(table)["c"]
        assert says.torch == "dict of a: int32, b: list[str]"
        assert (parts["a"].dtype, parts["b"]) == (torch.int32, ["x"] * 3)
    else:
        tensor = to_torch(table)["c"]
        assert isinstance(tensor, torch.Tensor)
        assert str(tensor.dtype) == f"torch.{base(says.torch).partition(' [')[0]}"
        assert torch.isnan(tensor.double()).sum() == nulls


def test_the_contract_is_made_from_types_alone() -> None:
    schema = pa.schema([(name, arrow) for name, (arrow, _) in VALUES.items()])

    contract = type_contract(schema, {name: name for name in VALUES})

    assert [column.name for column in contract] == list(VALUES)
    assert contract == type_contract(schema.empty_table().schema, {name: name for name in VALUES})


def test_it_prints_as_a_table_in_which_names_are_escaped() -> None:
    contract = type_contract(pa.schema([("<b>n\n</b>", pa.int64()), ("p", pa.decimal128(5, 2))]), {"p": "decimal(5,2)"})

    lines = str(contract).splitlines()

    assert lines[0].split() == ["column", "Spark", "Arrow", "pandas", "NumPy", "torch", "datasets", "note"]
    assert len(lines) == 4
    assert lines[3].split()[:3] == ["p", "decimal(5,2)", "decimal128(5,"]
    assert "(none)" in lines[3]
    assert repr(contract) == str(contract)
    assert "&lt;b&gt;n\\n&lt;/b&gt;" in contract._repr_html_()
    assert "<b>" not in contract._repr_html_()


def test_conform_returns_what_fits_already_untouched() -> None:
    table = pa.table({"a": [1]})

    assert conform(table, table.schema, "t") is table


def test_conform_converts_exactly() -> None:
    table = pa.table({"a": pa.array([1, 2]), "at": pa.array([0], pa.timestamp("us", "Asia/Tokyo")).take([0, 0])})
    schema = pa.schema([("b", pa.int8()), ("at", pa.timestamp("us", "UTC"))])

    made = conform(table, schema, "t")

    assert made.schema == schema
    assert made["b"].to_pylist() == [1, 2]
    assert made["at"].cast(pa.int64()).to_pylist() == [0, 0]


@pytest.mark.parametrize(
    ("column", "target"),
    [
        (pa.array([300]), pa.int8()),
        (pa.array([0.5]), pa.int64()),
        (pa.array([2**60 + 1]), pa.float64()),
        (pa.array([1], pa.timestamp("ns")), pa.timestamp("us")),
        (pa.array([decimal.Decimal("1.25")]), pa.decimal128(3, 1)),
        (pa.array(["x"]), pa.int64()),
        (pa.array([{"a": 1}]), pa.int64()),
    ],
    ids=str,
)
def test_conform_loses_nothing(column: pa.Array, target: pa.DataType) -> None:
    with pytest.raises(LossyConversionError, match=r"main\.t: column 'a' came as .* and cannot be held as"):
        conform(pa.table({"a": column}), pa.schema([("a", target)]), "main.t")
