from __future__ import annotations

import datetime as dt
import decimal
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from bridge.columns.huggingface import to_dataset, to_iterable_dataset
from bridge.errors import LossyConversionError
from bridge.loading.row_groups import ExportedRowGroups, stream_row_groups
from bridge.manifest import Manifest
from tests.exports import make_export

TABLE = pa.table(
    {
        "n": pa.array([None if n == 5 else n for n in range(60)], pa.int64()),
        "text": [f"é{n}" for n in range(60)],
        "at": pa.array([dt.datetime(1900, 1, 1, tzinfo=dt.UTC)] * 60, pa.timestamp("us", "UTC")),
        "day": pa.array([dt.date(1500, 1, 1)] * 60, pa.date32()),
        "price": pa.array([decimal.Decimal("1.10")] * 60, pa.decimal128(10, 2)),
        "raw": pa.array([b"\x00"] * 60, pa.binary()),
        "items": pa.array([[n, None] for n in range(60)]),
        "pair": pa.array([{"a": n} for n in range(60)]),
    }
)


def streamed(folder: Path, manifest: Manifest) -> object:
    opened = ExportedRowGroups(folder, manifest)
    row_groups = [(opened, index) for index in range(len(opened.row_counts))]
    return to_iterable_dataset(manifest.schema, {}, stream_row_groups, row_groups=row_groups)


def test_a_dataset_holds_the_tables_own_memory() -> None:
    dataset = to_dataset(TABLE, {})

    assert list(dataset) == TABLE.to_pylist()
    assert dataset.data.table["n"].chunk(0).buffers()[1].address == TABLE["n"].chunk(0).buffers()[1].address
    assert dataset.features.arrow_schema.types == TABLE.schema.types
    assert dataset.select_columns(["n"]).with_format("torch")[3]["n"] == torch.tensor(3)


def test_a_streaming_dataset_gives_the_same_rows(tmp_path: Path) -> None:
    dataset = streamed(*make_export(tmp_path, [TABLE.slice(0, 40), TABLE.slice(40)], row_group_rows=7))

    assert list(dataset) == TABLE.to_pylist()  # type: ignore[call-overload]
    assert dataset.features == to_dataset(TABLE, {}).features  # type: ignore[attr-defined]


def test_a_streaming_dataset_is_read_in_batches_and_split(tmp_path: Path) -> None:
    from datasets.distributed import split_dataset_by_node

    dataset = streamed(*make_export(tmp_path, [TABLE], row_group_rows=10))

    parts = [[row["text"] for row in split_dataset_by_node(dataset, rank=rank, world_size=2)] for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(TABLE["text"].to_pylist())
    assert all(len(part) == 30 for part in parts)


def test_a_torch_loader_with_workers_gives_each_row_once(tmp_path: Path) -> None:
    dataset = streamed(*make_export(tmp_path, [TABLE.select(["text"])], row_group_rows=10))

    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2)  # type: ignore[arg-type, var-annotated]
    rows = [text for batch in loader for text in batch["text"]]

    assert sorted(rows) == sorted(TABLE["text"].to_pylist())


def test_a_type_without_a_feature_is_an_error_that_names_the_column() -> None:
    pairs = pa.table({"n": [1], "pairs": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8()))})

    for made in (lambda: to_dataset(pairs, {}), lambda: to_iterable_dataset(pairs.schema, {}, stream_row_groups)):
        with pytest.raises(
            LossyConversionError,
            match=r"column 'pairs' is map<string, int8.*>, for which datasets has no feature\.\n.*to_json\(\)",
        ):
            made()


@pytest.mark.parametrize(
    ("read", "shown"),
    [
        ('rows = iter(table.to_huggingface(streaming=True)); print(next(rows)["text"])', "é0"),
        ('print(next(iter(table.to_loader(4, features=["n"], dtype="float32"))).shape)', "torch.Size([4, 1])"),
    ],
    ids=["streaming", "loader"],
)
def test_the_interpreter_ends_cleanly_after_a_part_was_read(tmp_path: Path, read: str, shown: str) -> None:
    make_export(tmp_path / "t", [TABLE, TABLE], row_group_rows=5)
    code = f"""
        import bridge
        table = bridge.open_export({str(tmp_path)!r})
        {read}
    """

    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )

    assert (child.stdout, child.stderr, child.returncode) == (f"{shown}\n", "", 0)
