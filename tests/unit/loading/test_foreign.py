from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bridge
from bridge.errors import CorruptFileError, LossyConversionError, PolicyError, SourceError, VolumeError
from bridge.loading.row_groups import _Memory
from bridge.manifest import RowGroup
from tests.exports import make_export

TABLE = pa.table(
    {
        "n": pa.array(range(500), pa.int32()),
        "x": np.linspace(0, 1, 500),
        "word": [f"{n % 7}" for n in range(500)],
        "v": [[float(n), 1.0] for n in range(500)],
    }
)


def rows(path: Any, **arguments: Any) -> dict[str, Any]:
    """Return all rows in file order as one batch."""
    data = bridge.ParquetDataset(path, batch_size=10_000, rank=0, world_size=1, **arguments)
    batches = list(data)
    assert len(batches) <= 1
    return dict(batches[0]) if batches else {}


def assert_is_table(batch: dict[str, Any]) -> None:
    assert {name: v if isinstance(v, list) else v.tolist() for name, v in batch.items()} == TABLE.to_pydict()


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "lz4", "zstd", "brotli"])
@pytest.mark.parametrize("use_dictionary", [False, True])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_all_codecs_and_page_formats(tmp_path: Path, compression: str, use_dictionary: bool, version: Any) -> None:
    pq.write_table(
        TABLE, tmp_path / "a.parquet", compression=compression, use_dictionary=use_dictionary,
        data_page_version=version, row_group_size=90, write_statistics=use_dictionary,
        write_page_index=not use_dictionary,
    )  # fmt: skip

    first = rows(tmp_path / "a.parquet")
    assert_is_table(first)
    assert_is_table(rows(tmp_path))
    assert_is_table(first)  # also when the memory that was decoded from was used again


def test_a_few_columns_of_many(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=90)
    data = bridge.ParquetDataset(tmp_path, columns=["v", "n"], batch_size=1000)

    (batch,) = data
    assert list(batch) == ["v", "n"]
    assert batch["v"].tolist() == TABLE["v"].to_pylist()
    assert data.traffic.volume_bytes < (tmp_path / "a.parquet").stat().st_size / 2


def test_int96_holds_years_that_nanoseconds_do_not(tmp_path: Path) -> None:
    times = [dt.datetime(1500, 1, 1), dt.datetime(2500, 6, 1, 12, 30, 0, 5)]
    table = pa.table({"at": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)

    assert rows(tmp_path)["at"].tolist() == table["at"].cast(pa.int64()).to_pylist()


def test_empty_row_groups_and_files_are_left_out(tmp_path: Path) -> None:
    with pq.ParquetWriter(tmp_path / "a.parquet", TABLE.schema) as writer:
        for part in (TABLE[:0], TABLE[:200], TABLE[:0], TABLE[200:]):
            writer.write_table(part)
    pq.write_table(TABLE[:0], tmp_path / "b.parquet")

    assert_is_table(rows(tmp_path))
    assert rows(tmp_path / "b.parquet") == {}


def test_files_come_by_name_and_hidden_ones_do_not(tmp_path: Path) -> None:
    parent = tmp_path / "ä b%20'c=#"
    (parent / "deep").mkdir(parents=True)
    (parent / "_temporary").mkdir()
    for name, part in (("b.parquet", TABLE[100:]), ("a ü.parquet", TABLE[:100])):
        pq.write_table(part, parent / "deep" / name)
    for name in (".a.parquet", "_b.parquet", "_temporary/c.parquet", "readme.txt"):
        (parent / name).write_bytes(b"no")

    assert_is_table(rows(parent))
    assert_is_table(rows([parent / "deep" / "a ü.parquet", parent / "deep" / "b.parquet"]))


def test_dictionaries_of_single_files_become_values(tmp_path: Path) -> None:
    for number, words in enumerate((["b", "a"], ["c", "b"])):
        column = pa.array(words).dictionary_encode()
        large = pa.array([["x"], ["y", "z"]], pa.large_list(pa.large_string()))
        pq.write_table(
            pa.table({"w": column, "t": pa.array(words, pa.large_string()), "l": large}), tmp_path / f"{number}.parquet"
        )

    batch = rows(tmp_path, columns=["w", "t"])
    assert batch == {"w": ["b", "a", "c", "b"], "t": ["b", "a", "c", "b"]}
    codes = rows(tmp_path, columns=["w"], policies={"w": bridge.dictionary()})
    assert codes["w"].tolist() == [1, 0, 2, 1]


def test_structs_hold_what_tables_of_spark_hold(tmp_path: Path) -> None:
    for number, is_nullable in enumerate([True, False]):
        kind = pa.struct(
            [
                pa.field("t", pa.large_string(), nullable=is_nullable),
                pa.field("s", pa.struct([pa.field("n", pa.int32(), nullable=is_nullable)])),
            ]
        )
        column = pa.array([{"t": f"{number}", "s": {"n": number}}], kind)
        pq.write_table(pa.table({"p": column}), tmp_path / f"{number}.parquet")

    batch = rows(tmp_path)
    assert batch["p"]["t"] == ["0", "1"]
    assert batch["p"]["s"]["n"].tolist() == [0, 1]


def test_a_file_may_be_larger_than_memory(tmp_path: Path) -> None:
    # as a row group far behind in a file of many; only its own pages are touched
    group = RowGroup(1, 1 << 42, (1 << 42) + 1000, "")
    with _Memory([group]).holding(group) as (memory, source):
        memory[:] = bytes(range(250)) * 4
        source.seek(group.start)
        assert source.read(1000) == bytes(range(250)) * 4


def test_what_pandas_and_polars_leave_in_files(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1, 2], "c": pd.Categorical(["u", "v"])}, index=pd.Index([5, 9], name="k"))
    frame.to_parquet(tmp_path / "a.parquet")
    batch = rows(tmp_path)
    assert (batch["a"].tolist(), batch["c"], batch["k"].tolist()) == ([1, 2], ["u", "v"], [5, 9])

    pq.write_table(pa.table({"t": pa.array(["x"]).cast(pa.string_view())}), tmp_path / "a.parquet")
    assert rows(tmp_path) == {"t": ["x"]}


def test_the_order_of_columns_is_that_of_the_first_file(tmp_path: Path) -> None:
    pq.write_table(TABLE[:100], tmp_path / "a.parquet")
    pq.write_table(TABLE[100:].select(["word", "v", "n", "x"]), tmp_path / "b.parquet")
    assert_is_table(rows(tmp_path))


def test_a_file_without_columns_has_no_rows(tmp_path: Path) -> None:
    pq.write_table(TABLE.select([]), tmp_path / "a.parquet")
    assert rows(tmp_path) == {}


def test_a_dictionary_of_all_files_skips_empty_row_groups(tmp_path: Path) -> None:
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("w", pa.string())])) as writer:
        for words in ([], ["b", "a"], [], ["c"]):
            writer.write_table(pa.table({"w": pa.array(words, pa.string())}))
    assert rows(tmp_path, policies={"w": bridge.dictionary()})["w"].tolist() == [1, 0, 2]


def test_a_relative_path_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    pq.write_table(TABLE[:100], tmp_path / "data" / "a.parquet")
    pq.write_table(TABLE[100:], tmp_path / "data" / "deep" / "b.parquet")
    monkeypatch.chdir(tmp_path)
    found = bridge.ParquetDataset("data", batch_size=1000)
    assert_is_table(rows(["data/a.parquet", Path("data", "deep", "b.parquet")]))
    assert len(found) == 1
    monkeypatch.chdir("/")
    assert_is_table(next(iter(found)))


def test_names_with_dots(tmp_path: Path) -> None:
    table = pa.table({"a": [{"b": 1}, {"b": 2}], "a.b": [3, 4]})
    pq.write_table(table, tmp_path / "a.parquet")

    assert rows(tmp_path)["a.b"].tolist() == [3, 4]
    assert rows(tmp_path, columns=["a"])["a"]["b"].tolist() == [1, 2]
    assert rows(tmp_path, columns=["a.b"])["a.b"].tolist() == [3, 4]


def test_files_of_other_columns_or_types_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": ["1"]}), tmp_path / "b.parquet")
    with pytest.raises(SourceError, match=r"b\.parquet: column 'n' is string; in .*a\.parquet it is int64"):
        rows(tmp_path)
    pq.write_table(pa.table({"m": [1]}), tmp_path / "b.parquet")
    with pytest.raises(SourceError, match=r"do not have the same columns: m, n\."):
        rows(tmp_path)


def test_folders_that_are_more_than_their_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no Parquet file"):
        rows(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nothing\.parquet"):
        rows(tmp_path / "nothing.parquet")
    parent = tmp_path / "hive" / "day=1"
    parent.mkdir(parents=True)
    pq.write_table(TABLE, parent / "a.parquet")
    with pytest.raises(SourceError, match=r"a column in the names of its folders \(day=1\)"):
        rows(tmp_path / "hive")
    assert_is_table(rows(tmp_path / "hive", columns=TABLE.column_names))

    (tmp_path / "delta" / "_delta_log").mkdir(parents=True)
    with pytest.raises(SourceError, match=r"is a Delta table.*\n  Load it: bridge\.load_table"):
        rows(tmp_path / "delta")

    folder, _ = make_export(tmp_path / "exports", [TABLE])
    with pytest.raises(SourceError, match=r"holds exports, of which each has all rows\.\n  Give the folder of one"):
        rows(tmp_path / "exports")
    assert_is_table(rows(folder))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path, row_group_size=100)
    whole = path.read_bytes()
    for content, message in (
        (b"", "is no Parquet file, or was cut"),
        (whole[:-100], "is no Parquet file, or was cut"),
        (whole[:-60] + bytes(52) + whole[-8:], "has a footer that cannot be read"),
    ):
        path.write_bytes(content)
        with pytest.raises(CorruptFileError, match=rf"a\.parquet {message}"):
            rows(path)
    path.write_bytes(whole[:4] + bytes(3000) + whole[3004:])
    with pytest.raises(CorruptFileError, match=r"a\.parquet: row group 0 cannot be decoded"):
        rows(path)


def with_footer(path: Path, old: bytes, new: bytes, *, number: int | None = None) -> None:
    """Replace bytes of a footer by as many: in all places, or in one, counted from 0."""
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    parts = content[start:].split(old)
    assert len(parts) > 1
    footer = b"".join(
        part + (b"" if part is parts[-1] else new if number in (None, at) else old) for at, part in enumerate(parts)
    )
    path.write_bytes(content[:start] + footer)


@pytest.mark.parametrize("name", [b"others", b"other\xee"])
def test_what_a_damaged_footer_calls_a_column_does_not_matter(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"number": range(100)})
    pq.write_table(
        table, path, row_group_size=50, store_schema=False, compression="none", use_dictionary=False,
        write_statistics=False,
    )  # fmt: skip
    with_footer(path, b"number", name, number=2)  # in the second row group; first comes the schema

    assert rows(path)["number"].tolist() == list(range(100)), "not the first row group once more"


def test_a_footer_that_tells_of_more_rows_than_there_are_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(100)}), path, use_dictionary=False, write_statistics=False, store_schema=False)
    with_footer(path, b"\xc8\x01", b"\xd2\x01")  # 100 and 105, as Thrift has them

    with pytest.raises(CorruptFileError, match=r"a\.parquet: row group 0 holds 100 rows, not 105 as its footer says"):
        rows(path)


def test_a_footer_of_more_columns_than_its_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1], "m": [2]}), path, use_dictionary=False, write_statistics=False,
                   store_schema=False)  # fmt: skip
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[start:-8]
    element = footer.index(b"\x01m"), footer.index(b"\x00", footer.index(b"\x01m")) + 1
    begin = footer.index(b"\x00", footer.index(b"\x01n")) + 1
    footer = footer[:begin] + footer[element[1] :]  # the schema without "m", as Thrift has it
    footer = footer.replace(b"\x3c", b"\x2c", 1).replace(b"schema\x15\x04", b"schema\x15\x02")
    footer = footer.replace(bytes.fromhex("192c1c00001c000000"), bytes.fromhex("191c1c000000"))  # order of columns
    path.write_bytes(content[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    code = f"import bridge\nbridge.ParquetDataset({str(path)!r}).check()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert ended.returncode == 1, "Arrow ended the process"
    assert "a.parquet has a footer whose row groups do not have the columns of its schema" in ended.stderr


def test_links_are_followed_but_for_loops_and_those_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    pq.write_table(TABLE[:100], tmp_path / "data" / "a.parquet")
    pq.write_table(TABLE[100:200], tmp_path / "elsewhere.parquet")
    (tmp_path / "other").mkdir()
    pq.write_table(TABLE[200:], tmp_path / "other" / "c.parquet")
    (tmp_path / "data" / "b.parquet").symlink_to(tmp_path / "elsewhere.parquet")
    (tmp_path / "data" / "c").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "deep" / "loop").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "_nothing").symlink_to(tmp_path / "nothing")
    assert_is_table(rows(tmp_path / "data"))

    (tmp_path / "data" / "d.parquet").symlink_to(tmp_path / "nothing")
    with pytest.raises(VolumeError, match=r"data/d\.parquet is a link to what is not there\.\n  Remove it, or give"):
        rows(tmp_path / "data")
    (tmp_path / "data" / "d.parquet").unlink()
    (tmp_path / "data" / "self").symlink_to(tmp_path / "data" / "self")
    with pytest.raises(VolumeError, match=r"data/self is .*symbolic links"):
        rows(tmp_path / "data")


def test_a_file_that_was_written_again_or_is_gone_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path)
    data = bridge.ParquetDataset(path)
    assert len(data) == 1
    pq.write_table(TABLE, path)
    os.utime(path, ns=(0, 0))
    with pytest.raises(CorruptFileError, match=r"a\.parquet was written again since this was opened"):
        list(data)
    path.unlink()
    with pytest.raises(CorruptFileError, match=r"a\.parquet is gone"):
        list(data)


def test_what_only_spark_does_is_refused(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    with pytest.raises(PolicyError, match=r"done by Spark: export the table with them"):
        rows(tmp_path, policies={"n": bridge.drop_nulls()})


def test_arrays_of_several_lengths_need_a_policy(tmp_path: Path) -> None:
    table = pa.table({"v": pa.array([[1.0]] * 10 + [[1.0, 2.0]] * 10)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    with pytest.raises(LossyConversionError, match=r"column 'v' holds arrays .*\n.*bridge\.jagged\(\)"):
        rows(tmp_path)
    with pytest.raises(LossyConversionError, match="column 'v' holds arrays"):
        rows(tmp_path, shuffle=True)
    assert rows(tmp_path, policies={"v": bridge.offsets()})["v"][1].tolist()[-1] == 30
