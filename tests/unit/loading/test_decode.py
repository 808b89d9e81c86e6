from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import bridge
from bridge.columns.rules import Rules
from bridge.loading import form
from bridge.loading.loader import DataLoader
from bridge.loading.parquet import RowGroupDataset
from tests.unit.loading.test_loader import Rows

COUNT = 300
N = np.arange(COUNT)


def make_rows() -> Rows:
    """Return row groups of columns of all kinds, each of which tells the number of its row."""
    table = pa.table(
        {
            "n": N,
            "half": N.astype(np.float16),
            "bool": N % 2 == 0,
            "u8": (N % 250).astype(np.uint8),
            "u64": N.astype(np.uint64),
            "holes": pa.array([None if n % 3 == 0 else float(n) for n in range(COUNT)]),
            "list": pa.array([[n, n + 1] for n in range(COUNT)]),
            "u16s": pa.array([[n] for n in range(COUNT)], pa.list_(pa.uint16())),
            "fixed": pa.array([[float(n)] * 3 for n in range(COUNT)], pa.list_(pa.float32(), 3)),
            "time": pa.array(N, pa.timestamp("us")),
            "decimal": pa.array(range(COUNT)).cast(pa.decimal128(19, 0)),
            "struct": pa.array([{"a": n, "l": [n, n]} for n in range(COUNT)]),
            "text": [f"{n}" for n in range(COUNT)],
            "code": pa.array([f"{n % 3}" for n in range(COUNT)]).dictionary_encode(),
            "jagged": pa.array([[n] * (n % 3) for n in range(COUNT)]),
        }
    )
    table = Rules.choose_for_files(table.schema, {"jagged": bridge.jagged()}).apply(table)
    return Rows(*(table[start : start + 47] for start in range(0, COUNT, 47)))


def check(batch: dict[str, Any]) -> None:
    """See that all columns tell the same rows."""
    n = batch["n"]
    for name in ("half", "u64", "time", "decimal"):
        assert torch.equal(batch[name].long(), n), name
    assert torch.equal(batch["bool"], n % 2 == 0)
    assert torch.equal(batch["u8"].long(), n % 250)
    assert torch.equal(torch.isnan(batch["holes"]), n % 3 == 0)
    assert torch.equal(batch["holes"].nan_to_num().long(), torch.where(n % 3 == 0, 0, n))
    assert torch.equal(batch["list"], torch.stack([n, n + 1], 1))
    assert torch.equal(batch["u16s"].long(), n[:, None])
    assert torch.equal(batch["fixed"].long(), n[:, None].expand(-1, 3))
    assert torch.equal(batch["struct"]["a"], n)
    assert torch.equal(batch["struct"]["l"], torch.stack([n, n], 1))
    assert batch["text"] == [f"{one}" for one in n.tolist()]
    assert torch.equal(batch["code"], n % 3)
    assert [one.tolist() for one in batch["jagged"].unbind()] == [[one] * (one % 3) for one in n.tolist()]


def write_into(batch: Any) -> None:
    """Do what a careless training step may do."""
    if isinstance(batch, torch.Tensor):
        (batch.values() if batch.is_nested else batch).zero_()
        return
    for part in batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else ():
        write_into(part)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("streams", "world_size"), [(1, 1), (3, 1), (1, 2), (3, 2), (2, 7)])
def test_columns_of_all_kinds_come_row_for_row_whatever_the_training_step_writes(
    shuffle: bool, streams: int, world_size: int
) -> None:
    rows = make_rows()
    tables, before = rows.tables, [str(table.to_pydict()) for table in rows.tables]
    seen: list[int] = []
    for rank in range(world_size):
        dataset = RowGroupDataset(
            lambda: rows, name="rows", batch_size=16, shuffle=shuffle, shuffle_window=60,
            canonical_world_size=streams, rank=rank, world_size=world_size,
        )  # fmt: skip
        loader = DataLoader(dataset)
        for step, batch in enumerate(loader):
            check(batch)
            seen += batch["n"][: loader.num_valid(step)].tolist()
            write_into(batch)

    assert sorted(seen) == list(range(COUNT))
    assert [str(table.to_pydict()) for table in tables] == before


def test_more_text_in_a_window_than_its_offsets_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "_MOST_BYTES", 1000)
    texts = [f"{n}" * (n % 5) or None for n in range(COUNT)]
    table = pa.table({"n": N, "text": texts, "raw": pa.array(texts).cast(pa.binary())})
    rows = Rows(*(table[start : start + 47] for start in range(0, COUNT, 47)))
    seen: list[int] = []
    for batch in RowGroupDataset(lambda: rows, name="rows", batch_size=16, shuffle=True, shuffle_window=200):
        seen += batch["n"].tolist()
        assert batch["text"] == [texts[n] for n in batch["n"].tolist()]
        assert batch["raw"] == [None if text is None else text.encode() for text in batch["text"]]

    assert sorted(seen) == list(range(COUNT))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("features", "label"), [(["n"], None), (["n", "u64"], "n"), (["half"], "list")])
def test_pairs_come_row_for_row_whatever_the_training_step_writes(
    shuffle: bool, features: list[str], label: str | None
) -> None:
    rows = make_rows()
    tables, before = rows.tables, [str(table.to_pydict()) for table in rows.tables]
    dataset = RowGroupDataset(
        lambda: rows, name="rows", features=features, label=label, dtype="float64", batch_size=16, shuffle=shuffle,
        shuffle_window=60, canonical_world_size=2,
    )  # fmt: skip
    seen: list[float] = []
    for pair in DataLoader(dataset):
        x = pair if label is None else pair[0]
        assert torch.equal(x, x[:, :1].expand(-1, len(features)))
        if label is not None:
            assert torch.equal(pair[1].reshape(len(x), -1)[:, 0].double(), x[:, 0])
        seen += x[:, 0].tolist()
        write_into(pair)

    assert sorted(seen) == list(range(COUNT))
    assert [str(table.to_pydict()) for table in tables] == before
