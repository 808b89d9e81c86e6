from __future__ import annotations

import datetime as dt
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from bridge.columns.tensors import to_torch, to_torch_matrix
from bridge.errors import LossyConversionError, SourceNotFoundError


def test_one_chunk_without_nulls_is_not_copied() -> None:
    table = pa.table(
        {"n": np.arange(10), "d": np.arange(10.0), "at": pa.array([0, 1], pa.timestamp("us")).take([0] * 10)}
    )

    tensors = to_torch(table)

    for name in table.column_names:
        assert tensors[name].data_ptr() == table[name].chunk(0).buffers()[1].address, name


def test_several_chunks_and_nulls_are_copied() -> None:
    table = pa.table({"n": pa.chunked_array([[1], [2, 3]]), "d": pa.chunked_array([[0.5, None], [1.5]])})

    tensors = to_torch(table)

    assert tensors["n"].tolist() == [1, 2, 3]
    assert torch.isnan(tensors["d"]).tolist() == [False, True, False]
    tensors["n"][0] = 9
    assert table["n"][0].as_py() == 1


def test_booleans_and_slices() -> None:
    table = pa.table({"flag": [True, False, True], "n": [1, 2, 3]}).slice(1)

    tensors = to_torch(table)

    assert tensors["flag"].tolist() == [False, True]
    assert tensors["flag"].dtype == torch.bool
    assert tensors["n"].tolist() == [2, 3]


@pytest.mark.parametrize("year", [1500, 9999])
def test_days_and_times_count_from_1970(year: int) -> None:
    day, time = dt.date(year, 1, 2), dt.datetime(year, 1, 2, 3, 4, 5, 6)

    tensors = to_torch(
        pa.table(
            {
                "day": pa.array([day], pa.date32()),
                "at": pa.array([time.replace(tzinfo=dt.UTC)], pa.timestamp("us", "UTC")),
                "span": pa.array([time - dt.datetime(1970, 1, 1)], pa.duration("us")),
            }
        )
    )

    assert dt.date(1970, 1, 1) + dt.timedelta(days=int(tensors["day"][0])) == day
    assert tensors["day"].dtype == torch.int64
    for name in ("at", "span"):
        assert dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=int(tensors[name][0])) == time


def test_nulls_of_times_say_where_they_can_go() -> None:
    with pytest.raises(LossyConversionError) as caught:
        to_torch(pa.table({"day": pa.array([None, dt.date(2000, 1, 1)])}))

    assert str(caught.value) == (
        "column 'day' (date32[day]) holds 1 nulls, which a tensor of int64 cannot hold.\n"
        '  Load it with policies={"day": bridge.fill(...)} '
        "(or bridge.mask(), bridge.drop_nulls()); to_pandas() holds them."
    )


def test_no_rows_are_tensors_too() -> None:
    schema = pa.schema(
        [("n", pa.int16()), ("d", pa.float32()), ("day", pa.date32()), ("flag", pa.bool_()), ("t", pa.string())]
    )

    tensors = to_torch(schema.empty_table())

    assert [str(getattr(value, "dtype", "list")) for value in tensors.values()] == [
        "torch.int16", "torch.float32", "torch.int64", "torch.bool", "list",
    ]  # fmt: skip
    assert all(len(value) == 0 for value in tensors.values())


@pytest.mark.parametrize("dtype", [torch.float32, "float32", np.float32])
def test_a_dtype_may_be_of_torch_or_numpy(dtype: Any) -> None:
    matrix, label = to_torch_matrix(pa.table({"a": [1, 2], "b": [0.5, None], "y": [7, 8]}), ["b", "a"], "y", dtype)

    assert matrix.dtype == torch.float32
    assert matrix[0].tolist() == [0.5, 1.0]
    assert label is not None
    assert (label.dtype, label.tolist()) == (torch.int64, [7, 8])


def test_a_dtype_that_numpy_lacks_is_refused() -> None:
    with pytest.raises(
        ValueError, match="dtype is 'bfloat16', which NumPy does not have; convert the matrix afterwards"
    ):
        to_torch_matrix(pa.table({"a": [1]}), ["a"], None, torch.bfloat16)


def test_a_label_is_a_tensor() -> None:
    table = pa.table({"a": [1], "text": ["x"], "raw": [b"x"]})

    for label in ("text", "raw"):
        with pytest.raises(LossyConversionError, match=rf"label '{label}' is \w+, which makes no tensor of labels"):
            to_torch_matrix(table, ["a"], label)
    with pytest.raises(SourceNotFoundError, match="no column 'y' was loaded"):
        to_torch_matrix(table, ["a"], "y")
    assert to_torch_matrix(table, ["a"], None)[1] is None


def test_without_torch_the_extra_is_named() -> None:
    code = """
import sys
sys.modules["torch"] = None  # an import of it fails
import pyarrow as pa
from bridge.columns.tensors import to_torch
import bridge
from bridge.errors import MissingDependencyError
try:
    CALL
except MissingDependencyError as exc:
    print(exc)
"""
    for call, what in (
        ("to_torch(pa.table({'n': [1]}))", "tensors need"),
        ("bridge.DataLoader(None)", "DataLoader needs"),
        ("bridge.ParquetDataset('t')", "ParquetDataset needs"),
        ("bridge.UCVolumeDataset('t')", "UCVolumeDataset needs"),
    ):
        shown = subprocess.run(
            [sys.executable, "-c", code.replace("CALL", call)], capture_output=True, text=True, check=True
        ).stdout
        assert shown == (f'{what} torch, which is not installed.\n  pip install "spark-training-bridge[torch]"\n'), call
