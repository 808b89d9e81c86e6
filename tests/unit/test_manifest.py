from __future__ import annotations

import datetime as dt
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bridge.errors import ExportError
from bridge.manifest import Manifest, Shard, describe_shard, encode_schema
from bridge.volumes.digest import digest_bytes
from tests.exports import make_export

MIXED = pa.table(
    {
        "n": pa.array(range(1000), pa.int64()),
        "text": pa.array([None if n % 7 == 0 else f"t{n % 50}" for n in range(1000)]),
        "d": pa.array([n * 0.1 for n in range(1000)]),
        "items": pa.array([[n] * (n % 3) for n in range(1000)]),
        "pair": pa.array([{"a": n, "b": str(n)} for n in range(1000)]),
    }
)


def ranges(shard: Shard) -> list[tuple[int, int, str]]:
    """Return every range that a reader checks, with its digest."""
    groups = [(group.start, group.stop, group.digest) for group in shard.row_groups]
    return [*groups, (shard.footer_start, shard.num_bytes, shard.footer_digest)]


def check_that_ranges_partition(path: Path, shard: Shard) -> None:
    """Fail unless each byte of the file is in exactly one range, under the right digest."""
    content = path.read_bytes()
    position = 0
    for start, stop, digest in ranges(shard):
        assert start == position
        assert digest == digest_bytes(content[start:stop])
        position = stop
    assert position == len(content) == shard.num_bytes


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "brotli", "lz4", "zstd"])
@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"data_page_version": "2.0"}, {"version": "1.0"}])
def test_the_ranges_of_a_shard_are_all_its_bytes(tmp_path: Path, compression: str, options: dict[str, Any]) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(MIXED, path, compression=compression, row_group_size=300, **options)

    shard = describe_shard(tmp_path / "a.parquet")

    check_that_ranges_partition(path, shard)
    assert shard.num_rows == 1000
    assert [group.num_rows for group in shard.row_groups] == [300, 300, 300, 100]
    footer = pq.read_metadata(path)
    for index, group in enumerate(shard.row_groups):
        for column in range(footer.num_columns):
            chunk = footer.row_group(index).column(column)
            start = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
            assert group.start <= start
            assert start + chunk.total_compressed_size <= group.stop


@pytest.mark.parametrize(
    "options",
    [
        {"write_page_index": True},
        {"write_page_checksum": True},
        {"write_statistics": False},
        {"data_page_size": 64},
        {"bloom_filter_options": {"n": {"ndv": 1000, "fpp": 0.01}}},
    ],
    ids=str,
)
def test_what_stands_between_row_groups_and_footer_is_checked_too(tmp_path: Path, options: dict[str, Any]) -> None:
    try:
        pq.write_table(MIXED, tmp_path / "a.parquet", row_group_size=300, **options)
    except TypeError:
        pytest.skip(f"this pyarrow does not write {', '.join(options)}")

    shard = describe_shard(tmp_path / "a.parquet")

    check_that_ranges_partition(tmp_path / "a.parquet", shard)


@pytest.mark.golden
def test_the_ranges_of_files_of_other_writers_are_all_their_bytes() -> None:
    paths = sorted(Path(os.environ["BRIDGE_TEST_DATA"]).rglob("*.parquet"))
    writers = set()
    for path in paths:
        footer = pq.read_metadata(path)
        if "INT96" in {footer.schema.column(index).physical_type for index in range(len(footer.schema))}:
            continue
        shard = describe_shard(path)
        check_that_ranges_partition(path, shard)
        writers.add(footer.created_by)

    assert any("parquet-mr" in writer for writer in writers)


def test_a_file_without_row_groups_is_all_footer(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.ParquetWriter(path, MIXED.schema).close()

    shard = describe_shard(tmp_path / "a.parquet")

    assert shard.row_groups == ()
    assert (shard.num_rows, shard.footer_start) == (0, 0)
    check_that_ranges_partition(path, shard)


def test_empty_row_groups_have_their_place(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, MIXED.schema) as writer:
        for rows in (0, 3, 0, 2, 0):
            writer.write_table(MIXED.slice(0, rows), row_group_size=10)

    shard = describe_shard(tmp_path / "a.parquet")

    assert [group.num_rows for group in shard.row_groups if group.num_rows] == [3, 2]
    assert sum(group.num_rows for group in shard.row_groups) == pq.read_metadata(path).num_rows == 5
    check_that_ranges_partition(path, shard)


def test_int96_is_refused(tmp_path: Path) -> None:
    times = pa.table({"id": [1], "at": pa.array([dt.datetime(1600, 1, 1)], pa.timestamp("us"))})
    pq.write_table(times, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)

    with pytest.raises(ExportError, match=r"a.parquet: column 'at' was written as INT96, which loses years outside"):
        describe_shard(tmp_path / "a.parquet")


def test_int96_inside_a_struct_is_refused_too(tmp_path: Path) -> None:
    times = pa.table({"pair": pa.array([{"at": dt.datetime(2000, 1, 1)}], pa.struct([("at", pa.timestamp("us"))]))})
    pq.write_table(times, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)

    with pytest.raises(ExportError, match=r"column 'pair\.at' was written as INT96"):
        describe_shard(tmp_path / "a.parquet")


def test_a_manifest_survives_json(tmp_path: Path) -> None:
    _, manifest = make_export(tmp_path, [MIXED, MIXED.slice(0, 5)], row_group_rows=400)

    again = Manifest.from_json(json.loads(json.dumps(manifest.to_json())), tmp_path)

    assert again == manifest
    assert again.schema == MIXED.schema
    assert [len(shard.row_groups) for shard in again.shards] == [3, 1]


def test_a_schema_survives_what_parquet_cannot_say() -> None:
    schema = pa.schema([("a", pa.duration("us")), ("m", pa.map_(pa.string(), pa.int8())), ("d", pa.decimal128(38, 9))])
    manifest = Manifest("t", None, None, {}, encode_schema(schema), 0, 0, 0, (), {})

    assert manifest.schema == schema


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_format_is_refused(tmp_path: Path, version: object) -> None:
    _, manifest = make_export(tmp_path, [MIXED])
    body = {**manifest.to_json(), "format_version": version}

    with pytest.raises(
        ExportError, match=rf"exports has manifest format {version!r}; this version reads 1.\n  Upgrade spark-training"
    ):
        Manifest.from_json(body, Path("/exports"))
    del body["format_version"]
    with pytest.raises(ExportError, match="has manifest format None"):
        Manifest.from_json(body, Path("/exports"))


@pytest.mark.parametrize("change", [{"query": None}, {"shards": None}, {"shards": [{}]}, {"more": 1}], ids=str)
def test_a_manifest_of_other_facts_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    _, manifest = make_export(tmp_path, [MIXED])
    body = {**manifest.to_json(), **change}
    if body["query"] is None:
        del body["query"]

    with pytest.raises(ExportError, match=r"exports has a manifest that this version does not read: .*\n  Upgrade"):
        Manifest.from_json(body, Path("/exports"))


def test_manifests_are_values(tmp_path: Path) -> None:
    _, manifest = make_export(tmp_path, [MIXED])

    assert replace(manifest) == manifest
    assert replace(manifest, num_rows=1) != manifest
