from __future__ import annotations

import json
import os
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import bridge
from bridge.columns.policies import VECTOR, marked
from bridge.errors import ConfigError, CorruptFileError
from bridge.loading import coverage
from bridge.loading.coverage import Row
from tests.exports import make_export

ROWS = 203
GROUP = 13
BATCH = 8
FIRST = 90  # rows of the first file
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = pa.table(
        {
            "n": np.arange(ROWS),
            "x": np.arange(ROWS, dtype=np.float32),
            "text": [None if n % 7 == 0 else f"é{n}" for n in range(ROWS)],
            "v": [[n, n + 1] for n in range(ROWS)],
            "u": np.arange(ROWS, dtype=np.uint16),
            "flag": np.arange(ROWS) % 2 == 0,
        }
    )
    parent = tmp_path_factory.mktemp("exports")
    return make_export(parent, [table[:FIRST], table[FIRST:FIRST], table[FIRST:]], row_group_rows=GROUP)[0]


def place(n: int) -> Row:
    """Return where the row with this n is."""
    file, row = ("part-00000.parquet", n) if n < FIRST else ("part-00002.parquet", n - FIRST)
    return Row(file, row // GROUP, row % GROUP)


def opened(folder: Path, **arguments: Any) -> bridge.ParquetDataset:
    return bridge.ParquetDataset(folder, **{"batch_size": BATCH, "shuffle": True, "shuffle_window": 30, **arguments})


def numbers(data: Any) -> list[list[int]]:
    return [batch["n"].tolist() for batch in data]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "form", [{}, {"columns": ["text", "n"]}, {"features": ["x"]}, {"features": ["x"], "label": "n"}]
)
def test_a_whole_epoch_is_complete(folder: Path, shuffle: bool, drop_last: bool, form: dict[str, Any]) -> None:
    data = opened(folder, shuffle=shuffle, drop_last=drop_last, **form)
    given_batches = list(data)
    data.set_epoch(3)

    for report in (bridge.verify_epoch(data), bridge.verify_epoch(bridge.DataLoader(data), given_batches)):
        dropped = ROWS % BATCH if drop_last else 0
        assert report.is_complete
        assert (report.num_rows, report.num_seen, report.num_dropped) == (ROWS, ROWS - dropped, dropped)
        assert (report.missing, report.double) == ((), ())
        assert str(report) == (
            f"{data}: each row once, 200 of 203; drop_last leaves out 3"
            if drop_last
            else f"{data}: each row once, 203 of 203"
        )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_position_stays(folder: Path, num_workers: int) -> None:
    def loader() -> bridge.DataLoader:
        return bridge.DataLoader(opened(folder), num_workers=num_workers)

    expected = [numbers(one) for one in [loader()] for _ in range(3)]
    one = loader()

    assert bridge.verify_epoch(one).is_complete
    assert numbers(one) == expected[0]
    assert bridge.verify_epoch(one).is_complete
    batches = iter(one)
    begun = [next(batches) for _ in range(5)]
    state = one.state_dict()
    del batches
    assert bridge.verify_epoch(one).is_complete
    assert numbers([*begun]) == expected[1][:5]
    assert numbers(one) == expected[1], "one that was left begins anew"

    resumed = loader()
    resumed.load_state_dict(state)
    assert bridge.verify_epoch(resumed).is_complete
    assert numbers(resumed) == expected[1][5:]
    assert numbers(resumed) == expected[2]

    state["digest"] = "other"
    resumed.load_state_dict(state)
    assert bridge.verify_epoch(resumed).is_complete
    with pytest.raises(ValueError, match="the state was taken over other data"):
        iter(resumed)


@pytest.mark.parametrize("made", [lambda data: data, bridge.DataLoader])
def test_a_loop_that_has_begun_goes_on_as_it_was(folder: Path, made: Any) -> None:
    data, alone = opened(folder), opened(folder)
    expected, after = numbers(alone), numbers(alone)
    one = made(data)
    batches = iter(one)
    begun = numbers(next(batches) for _ in range(5))
    state = one.state_dict()
    assert bridge.verify_epoch(one).is_complete

    assert one.state_dict() == state
    assert one.num_valid(len(expected) - 1) == len(expected[-1])
    assert begun + numbers(batches) == expected
    assert numbers(one) == after


def test_an_epoch_that_was_left_at_its_last_batch_is_done(folder: Path) -> None:
    data = opened(folder)
    for _ in zip(range(len(data)), data, strict=False):
        pass

    assert bridge.verify_epoch(data).is_complete
    alone = opened(folder)
    alone.set_epoch(1)
    assert numbers(data) == numbers(alone)


def test_a_resumed_epoch_is_complete(folder: Path) -> None:
    one = bridge.DataLoader(opened(folder))
    batches = iter(one)
    got = [next(batches) for _ in range(7)]
    other = bridge.DataLoader(opened(folder))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))

    assert bridge.verify_epoch(other, [*got, *other]).is_complete
    assert not bridge.verify_epoch(other, got).is_complete


@given(st.data())
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_that_are_missing_double_or_changed_are_named(folder: Path, data: st.DataObject) -> None:
    dataset = opened(folder)
    batches = list(dataset)
    last = len(batches) - 1  # not a full batch
    dropped = set(data.draw(st.lists(st.integers(0, last), unique=True, max_size=2)))
    doubled = data.draw(st.lists(st.integers(0, last).filter(lambda at: at not in dropped), unique=True, max_size=2))
    changed = data.draw(st.one_of(st.none(), st.integers(0, ROWS - 1)))
    name = data.draw(st.sampled_from(["n", "x", "text", "v", "u", "flag"]))
    made = [batches[at] for at in range(last + 1) if at not in dropped] + [batches[at] for at in doubled]
    rows_of = {at: batch["n"].tolist() for at, batch in enumerate(batches)}
    lost = {n for at in dropped for n in rows_of[at]}
    twice = {n for at in doubled for n in rows_of[at]}
    unknown = 0
    if changed is not None and changed not in lost | twice:
        lost.add(changed)
        unknown = 1
        for batch in made:
            for row in np.flatnonzero(batch["n"].numpy() == changed):
                change(batch, name, int(row))

    report = bridge.verify_epoch(dataset, made)

    assert report.is_complete == (not lost and not twice)
    assert (report.num_missing, report.num_double, report.num_unknown) == (len(lost), len(twice), unknown)
    assert report.num_seen == ROWS - len(lost) + len(twice) + unknown
    assert report.missing == tuple(sorted(map(place, lost)))
    assert report.double == tuple(sorted(map(place, twice)))


def change(batch: dict[str, Any], name: str, row: int) -> None:
    """Change the least that can be in one value, in place."""
    values = batch[name]
    if isinstance(values, list):
        values[row] = "nan" if values[row] is None else None
    else:
        values[row].view(torch.uint8)[..., :1].bitwise_xor_(1) if values.dim() > 1 else flip(values, row)


def flip(values: torch.Tensor, row: int) -> None:
    values.view(torch.uint8).view(len(values), -1)[row, 0] ^= 1


def test_where_many_are_missing_twenty_are_named(folder: Path) -> None:
    data = opened(folder)
    batches = list(data)

    report = bridge.verify_epoch(data, batches[:10] + batches[:10] + batches[:10])

    assert (report.num_missing, report.num_double) == (123, 160)
    assert len(set(report.missing)) == 20
    assert 10 <= len(set(report.double)) == len(report.double) <= 20
    assert list(report.missing) == sorted(report.missing)
    seen = {place(n) for batch in batches[:10] for n in batch["n"].tolist()}
    assert not seen & set(report.missing)
    assert set(report.double) <= seen
    text = str(report)
    assert text.startswith(
        f"{data}: not each row once; batches held 240 rows, the files 203\n  123 missing:\n    part-0"
    )
    assert "    and 103 more\n  160 double:\n    part-0" in text


def test_what_drop_last_leaves_out_is_not_missing(folder: Path) -> None:
    data = opened(folder, drop_last=True)
    batches = list(data)
    left_out = set(range(ROWS)) - {n for batch in batches for n in batch["n"].tolist()}

    batches[4] = {name: values[1:] for name, values in batches[4].items()}
    report = bridge.verify_epoch(data, batches)

    assert (report.num_missing, report.num_dropped, report.num_double) == (1, 3, 0)
    assert {place(n) for n in left_out} < set(report.missing)
    assert len(report.missing) == 4
    assert "  1 missing beside these 3, which are named too:\n    part-0" in str(report)
    assert "more" not in str(report)


def test_fewer_rows_than_one_batch(folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(5)}), tmp_path / "few.parquet")
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), tmp_path / "none.parquet")
    few = bridge.ParquetDataset(tmp_path / "few.parquet", drop_last=True)
    none = bridge.ParquetDataset(tmp_path / "none.parquet")

    assert str(bridge.verify_epoch(few)) == f"{few}: no rows, 0 of 5; drop_last leaves out 5"
    assert str(bridge.verify_epoch(none)) == f"{none}: no rows, 0 of 0"
    report = bridge.verify_epoch(none, [{"n": torch.arange(2)}])
    assert str(report) == (
        f"{none}: not each row once; batches held 2 rows, the files 0\n"
        "  2 unknown: no row of the files has their content"
    )


def test_rows_of_equal_content_are_counted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1, 2, 1, 1, 2, 3]}), tmp_path / "a.parquet", row_group_size=4)
    file = str(tmp_path / "a.parquet")
    data = bridge.ParquetDataset(file, batch_size=2, shuffle=True)

    def report(*values: int) -> bridge.CoverageReport:
        return bridge.verify_epoch(data, [{"n": torch.tensor(values)}])

    assert bridge.verify_epoch(data).is_complete
    assert report(3, 2, 2, 1, 1, 1).is_complete
    lacking = report(1, 2, 3)
    assert lacking.num_missing == 3
    assert lacking.missing == (Row(file, 0, 0), Row(file, 0, 1), Row(file, 0, 2))
    swapped = report(1, 1, 2, 2, 2, 3)
    assert (swapped.num_missing, swapped.num_double, swapped.num_unknown) == (1, 1, 0)
    assert (swapped.missing, swapped.double) == ((Row(file, 0, 0),), (Row(file, 0, 1),))
    often = report(*[1] * 3, *[2] * 2, *[3] * 9)
    assert (often.num_double, often.double) == (8, (Row(file, 1, 1),))


def test_rows_in_memory_have_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.columns.rules import Rules
    from bridge.loading import row_groups

    monkeypatch.setattr(row_groups, "_GROUP_ROWS", 10)
    rows = pa.table({"n": range(25)})
    table = bridge.Table(
        row_groups.CollectedRowGroups(rows), Rules(rows.schema, {}), plan=None, receipt={"table": "main.ml.t"}
    )
    loader = table.to_loader(4, shuffle=True)

    assert bridge.verify_epoch(loader).is_complete
    report = bridge.verify_epoch(loader, [{"n": torch.arange(1, 24)}])
    assert report.missing == (Row("", 0, 0), Row("", 2, 4))
    assert str(report).endswith("  2 missing:\n    row group 0, row 0\n    row group 2, row 4")


def test_columns_of_every_form(tmp_path: Path) -> None:
    rows = 40
    vectors = [
        {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0, float(n)]}
        if n % 2
        else {"type": 0, "size": 4, "indices": [n % 4], "values": [float(n)]}
        for n in range(rows)
    ]
    vector = pa.struct(
        {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())}
    )
    table = pa.table(
        {
            "j": [list(range(n % 4)) for n in range(rows)],
            "o": [[float(n)] * (n % 3) for n in range(rows)],
            "nested": [[[n, 1], [2, n]] for n in range(rows)],
            "s": [{"a": n, "b": {"t": str(n)}} for n in range(rows)],
            "when": pa.array([datetime(2020, 1, 1 + n % 28) for n in range(rows)], pa.timestamp("us", "UTC")),
            "d": pa.array([Decimal(n) for n in range(rows)], pa.decimal128(10, 0)),
            "f": pa.array([None if n % 5 == 0 else n / 3 for n in range(rows)], pa.float64()),
            "raw": [bytes([n]) for n in range(rows)],
            "word": [f"word {n % 3}" for n in range(rows)],
            "vec": pa.array(vectors, vector),
        }
    )
    schema = table.schema.set(9, marked(pa.field("vec", vector), VECTOR))
    folder, _ = make_export(tmp_path, [table.cast(schema)], row_group_rows=7)
    policies = {"j": bridge.jagged(), "o": bridge.offsets(), "word": bridge.dictionary(), "vec": bridge.sparse()}
    data = bridge.ParquetDataset(folder, policies=policies, batch_size=6, shuffle=True, shuffle_window=15)
    batches = list(data)

    assert bridge.verify_epoch(data).is_complete
    assert bridge.verify_epoch(data, batches).is_complete
    for name in table.column_names:
        others = [*batches]
        others[0] = {**batches[0], name: batches[1][name]}
        report = bridge.verify_epoch(data, others)
        assert not report.is_complete, name
        assert report.num_unknown == report.num_missing > 0, name


def test_paths_of_copies_do_not_count(tmp_path: Path) -> None:
    paths = []
    for n in range(5):
        path = tmp_path / f"{n}.bin"
        path.write_bytes(bytes([n]))
        paths.append(str(path))
    pq.write_table(pa.table({"n": range(5), "file": paths}), tmp_path / "t.parquet")

    for columns in (["n", "file"], ["file"]):
        data = bridge.ParquetDataset(
            tmp_path / "t.parquet", policies={"file": bridge.cached_file()}, batch_size=2, columns=columns
        )
        batches = list(data)
        assert bridge.verify_epoch(data).is_complete
        assert not bridge.verify_epoch(data, batches[1:]).is_complete


@pytest.mark.parametrize("block", [1, 7])
def test_blocks_do_not_matter(folder: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(folder)
    batches = list(data)
    expected = bridge.verify_epoch(data, batches[2:] + batches[5:7])
    monkeypatch.setattr(coverage, "_BLOCK_ROWS", block)
    monkeypatch.setattr(coverage, "_PART_ROWS", block)

    assert bridge.verify_epoch(data).is_complete
    assert bridge.verify_epoch(data, batches[2:] + batches[5:7]) == expected


class Wrapper(IterableDataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        yield from self.data


def test_what_cannot_be_compared_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = bridge.DataLoader(Wrapper(opened(folder)))
    with pytest.raises(TypeError, match="data is a DataLoader over Wrapper; give a ParquetDataset"):
        bridge.verify_epoch(wrapped)
    with pytest.raises(TypeError, match="data is a list; give"):
        bridge.verify_epoch([1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is read as rank 1 of 2, and there is no process group of these ranks"):
        bridge.verify_epoch(opened(folder, rank=1, world_size=2))
    assert bridge.verify_epoch(opened(folder, rank=0, world_size=1)).is_complete
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="is read as rank 0 of 3"):
        bridge.verify_epoch(opened(folder))


def test_a_damaged_file_is_an_error(folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(1000)}), tmp_path / "t.parquet")
    data = bridge.ParquetDataset(tmp_path / "t.parquet")
    batches = list(data)
    os.utime(tmp_path / "t.parquet", ns=(0, 0))

    with pytest.raises(CorruptFileError, match="was written again since"):
        bridge.verify_epoch(data, batches)
