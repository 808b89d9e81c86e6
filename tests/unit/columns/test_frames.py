from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from bridge.columns.arrays import to_numpy
from bridge.columns.frames import to_pandas
from bridge.errors import LossyConversionError

BIG = 2**63 - 1


def test_integers_beside_nulls_stay_exact() -> None:
    frame = to_pandas(pa.table({"n": [BIG, None], "flag": [True, None], "tiny": pa.array([1, None], pa.int8())}))

    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {
        "n": "Int64",
        "flag": "boolean",
        "tiny": "Int8",
    }
    assert frame.n[0] == BIG
    assert frame.n[1] is pd.NA
    assert list(frame.index) == [0, 1]


def test_decimals_stay_decimals() -> None:
    value = decimal.Decimal("12345678901234567890.123456789012345678")

    frame = to_pandas(pa.table({"p": pa.array([value, None], pa.decimal128(38, 18))}))

    assert frame.p[0] == value
    assert frame.p[1] is pd.NA


@pytest.mark.parametrize("year", [1, 1500, 1582, 1677, 1970, 2262, 9999])
def test_days_and_times_of_any_year_are_exact(year: int) -> None:
    day, time = dt.date(year, 12, 31), dt.datetime(year, 12, 31, 23, 59, 59, 999999)

    frame = to_pandas(
        pa.table(
            {
                "day": pa.array([day, None], pa.date32()),
                "at": pa.array([time.replace(tzinfo=dt.UTC), None], pa.timestamp("us", "UTC")),
                "local": pa.array([time, None], pa.timestamp("us")),
            }
        )
    )

    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {
        "day": "datetime64[ms]", "at": "datetime64[us, UTC]", "local": "datetime64[us]",
    }  # fmt: skip
    assert frame.day.dt.year[0] == year
    assert frame["at"][0].to_pydatetime() == time.replace(tzinfo=dt.UTC)
    assert frame.local[0].to_pydatetime() == time
    assert frame.isna().sum().tolist() == [1, 1, 1]


def test_arrow_dtypes_are_arrow_throughout() -> None:
    table = pa.table(
        {
            "n": [BIG, None],
            "text": ["a", None],
            "day": pa.array([dt.date(9999, 1, 1), None]),
            "pairs": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int8())),
        }
    )

    frame = to_pandas(table, "pyarrow")

    assert [dtype.pyarrow_dtype for dtype in frame.dtypes] == table.schema.types
    assert frame.n[0] == BIG
    assert pa.Table.from_pandas(frame).replace_schema_metadata() == table


@pytest.mark.parametrize("backend", ["numpy", "", None])
def test_other_backends_are_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match=r'dtype_backend is .*; give "numpy_nullable" or "pyarrow"'):
        to_pandas(pa.table({"n": [1]}), backend)


def test_a_map_is_a_dict_and_twice_the_same_key_is_an_error() -> None:
    arrow = pa.map_(pa.string(), pa.int8())

    assert to_pandas(pa.table({"m": pa.array([[("a", 1), ("b", 2)]], arrow)})).m[0] == {"a": 1, "b": 2}
    twice = pa.table({"n": [1], "m": pa.array([[("a", 1), ("a", 2)]], arrow)})
    with pytest.raises(
        LossyConversionError, match=r"column 'm' \(map<.*\) cannot be held as objects of Python: .*dupl"
    ):
        to_pandas(twice)
    with pytest.raises(LossyConversionError, match="column 'm'"):
        to_numpy(twice)


def test_many_chunks_make_one_frame() -> None:
    chunk = pa.table({"n": [1, None], "text": ["a", "b"]})

    frame = to_pandas(pa.concat_tables([chunk, chunk]))

    assert frame.n.tolist() == [1, pd.NA, 1, pd.NA]
    assert to_pandas(chunk.schema.empty_table()).dtypes.astype(str).tolist() == ["Int64", "object"]
