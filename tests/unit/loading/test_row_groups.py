from __future__ import annotations

import datetime as dt
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import CorruptFileError, LossyConversionError
from bridge.loading.row_groups import ExportedRowGroups, stream_row_groups
from bridge.manifest import Manifest, encode_schema
from tests.exports import make_export

TABLE = pa.table(
    {
        "n": pa.array(range(90), pa.int64()),
        "text": pa.array([None if n % 7 == 0 else f"é{n}" for n in range(90)]),
        "at": pa.array([dt.datetime(1600 + n, 1, 1, tzinfo=dt.UTC) for n in range(90)], pa.timestamp("us", "UTC")),
        "pair": pa.array([{"a": n, "b": [n, None]} for n in range(90)]),
    }
)
SHARDS = [TABLE.slice(0, 50), TABLE.slice(50)]


def read_all(folder: Path, manifest: Manifest) -> pa.Table:
    groups = ExportedRowGroups(folder, manifest)
    return pa.concat_tables([groups.read(index) for index in range(len(groups.row_counts))])


def test_an_export_reads_back_as_it_was_written(tmp_path: Path) -> None:
    groups = ExportedRowGroups(*make_export(tmp_path, SHARDS, row_group_rows=20))

    assert groups.row_counts == [20, 20, 10, 20, 20]
    assert groups.schema == TABLE.schema
    assert [groups.read(index).num_rows for index in range(5)] == groups.row_counts
    assert pa.concat_tables([groups.read(index) for index in range(5)]).equals(TABLE)


def test_row_groups_may_be_read_in_any_order_and_again(tmp_path: Path) -> None:
    groups = ExportedRowGroups(*make_export(tmp_path, SHARDS, row_group_rows=20))

    for index, start in ((4, 70), (0, 0), (2, 40), (4, 70), (1, 20)):
        assert groups.read(index).equals(TABLE.slice(start, groups.row_counts[index]))


def test_several_threads_may_read(tmp_path: Path) -> None:
    groups = ExportedRowGroups(*make_export(tmp_path, SHARDS, row_group_rows=5))
    barrier = threading.Barrier(4)

    def read(thread: int) -> pa.Table:
        barrier.wait()
        return pa.concat_tables([groups.read(index) for index in range(len(groups.row_counts))])

    with ThreadPoolExecutor(4) as threads:
        assert all(table.equals(TABLE) for table in threads.map(read, range(4)))


def test_an_export_without_rows_has_its_schema(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, [TABLE.slice(0, 0)])
    groups = ExportedRowGroups(folder, manifest)

    assert sum(groups.row_counts) == 0
    assert groups.schema == TABLE.schema
    assert all(groups.read(index).equals(TABLE.slice(0, 0)) for index in range(len(groups.row_counts)))


def test_empty_row_groups_and_files_stand_beside_others(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, [TABLE.slice(0, 0), TABLE, TABLE.slice(0, 0)], row_group_rows=50)

    assert read_all(folder, manifest).equals(TABLE)


def test_types_are_those_of_the_manifest(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, [pa.table({"a": [1, 2], "d": [10, 20]})])
    schema = pa.schema([("a", pa.int8()), ("d", pa.duration("us"))])
    narrower = Manifest(**{**manifest.__dict__, "schema_ipc": encode_schema(schema)})

    table = ExportedRowGroups(folder, narrower).read(0)

    assert table.schema == schema
    assert table["d"].to_pylist() == [dt.timedelta(microseconds=10), dt.timedelta(microseconds=20)]


def test_a_value_that_does_not_fit_its_type_is_an_error(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, [pa.table({"a": [1000]})])
    narrower = Manifest(**{**manifest.__dict__, "schema_ipc": encode_schema(pa.schema([("a", pa.int8())]))})

    with pytest.raises(
        LossyConversionError, match=r"part-00000.parquet: column 'a' came as int64 and cannot be held as int8"
    ):
        ExportedRowGroups(folder, narrower).read(0)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    return make_export(tmp_path_factory.mktemp("exported"), SHARDS, row_group_rows=20)


@settings(deadline=None)
@given(st.data())
def test_one_wrong_bit_anywhere_is_found_and_the_file_named(
    exported: tuple[Path, Manifest], data: st.DataObject
) -> None:
    folder, manifest = exported
    shard = data.draw(st.sampled_from(manifest.shards))
    path = folder / shard.name
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    path.write_bytes(damaged)
    try:
        with pytest.raises(CorruptFileError, match=rf"{shard.name} is damaged: bytes \d+ to \d+ differ from what was"):
            read_all(folder, manifest)
    finally:
        path.write_bytes(whole)
    assert read_all(folder, manifest).equals(TABLE)


def test_only_what_is_read_is_checked(exported: tuple[Path, Manifest], tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, SHARDS, row_group_rows=20)
    path = folder / manifest.shards[0].name
    damaged = bytearray(path.read_bytes())
    damaged[manifest.shards[0].row_groups[1].start + 5] ^= 1
    path.write_bytes(damaged)
    groups = ExportedRowGroups(folder, manifest)

    assert groups.read(0).equals(TABLE.slice(0, 20))
    with pytest.raises(CorruptFileError, match="is damaged"):
        groups.read(1)


def test_a_file_that_was_cut_is_found_wherever_it_was_cut(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, SHARDS, row_group_rows=20)
    path = folder / manifest.shards[1].name
    for length in {0, 4, *(group.stop for group in manifest.shards[1].row_groups), manifest.shards[1].num_bytes - 1}:
        os.truncate(path, length)
        with pytest.raises(CorruptFileError, match=rf"part-00001.parquet ends at byte {length}; bytes up to \d+ were"):
            read_all(folder, manifest)
        make_whole(path, SHARDS[1])
    assert read_all(folder, manifest).equals(TABLE)


def make_whole(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, row_group_size=20, compression="zstd")


def test_a_file_that_was_cut_after_its_footer_was_read_is_found(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, SHARDS, row_group_rows=20)
    groups = ExportedRowGroups(folder, manifest)
    groups.read(0)
    os.truncate(folder / manifest.shards[0].name, manifest.shards[0].row_groups[1].start + 3)

    with pytest.raises(CorruptFileError, match="ends at byte"):
        groups.read(1)


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, SHARDS)
    (folder / "part-00001.parquet").unlink()

    with pytest.raises(
        CorruptFileError, match=r"part-00001.parquet is gone, though it was there when this was opened or written\.\n"
    ):
        read_all(folder, manifest)


def test_a_file_that_was_replaced_is_found(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, SHARDS)
    for other in (TABLE.slice(1, 40), TABLE, TABLE.slice(0, 1)):
        make_whole(folder / "part-00001.parquet", other)
        with pytest.raises(CorruptFileError, match=r"part-00001.parquet (is damaged|ends at byte)"):
            read_all(folder, manifest)


def test_bytes_behind_the_end_do_no_harm(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, SHARDS)
    with (folder / "part-00000.parquet").open("ab") as file:
        file.write(b"more")

    assert read_all(folder, manifest).equals(TABLE)


def test_a_stream_gives_row_groups_in_the_order_asked_for(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, SHARDS, row_group_rows=20)

    opened = ExportedRowGroups(folder, manifest)

    read = list(stream_row_groups([(opened, index) for index in (3, 0)]))

    assert [key for key, _ in read] == ["3", "0"]
    assert read[0][1].equals(TABLE.slice(50, 20))
    assert len({re.sub(r"\W", "", key) for key, _ in read}) == 2
