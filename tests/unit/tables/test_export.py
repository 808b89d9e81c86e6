from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import bridge
from bridge.errors import ExportError, ExportNotFoundError, SourceError, VolumeError
from bridge.tables.identity import Identity
from bridge.tables.publish import export_folder, find_reusable, why_new
from bridge.volumes.commit import begin, complete_attempts
from bridge.volumes.path import Place, locate
from bridge.volumes.stores import LocalStorage
from tests.exports import make_export

TABLE = pa.table({"n": range(10)})


@pytest.mark.parametrize("name", ["main.ml.t", "a b%é.*?", "/data/x/y", "表", "a" * 300, "`", "../..", ""])
def test_folders_have_names_that_every_engine_takes(tmp_path: Path, name: str) -> None:
    place = export_folder(locate(tmp_path), name)

    assert place.folder().parent == tmp_path
    assert re.fullmatch(r"[a-z0-9_-]{1,69}", place.folder().name)


def test_each_name_has_a_folder_of_its_own(tmp_path: Path) -> None:
    names = ["a.b", "a-b", "A.b", "a b", "a", "表", "表1"]

    folders = {export_folder(locate(tmp_path), name).folder() for name in names}

    assert len(folders) == len(names)


def test_a_root_that_readers_would_expand_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match=r"a\*b cannot hold exports: readers expand"):
        export_folder(locate(tmp_path / "a*b"), "t")


def find(place: Place, key: str | None, max_age_s: float | None = None, *, is_settled: bool = True) -> Any:
    return find_reusable(place, Identity({}, key, is_settled, "a view has no version"), max_age_s)


def test_what_may_have_changed_is_reused_only_while_it_is_young(tmp_path: Path) -> None:
    place, label = locate(tmp_path), "a" * 32
    made = make_export(tmp_path, [TABLE], label=label)

    assert find(place, label, is_settled=False) is None
    assert find(place, label, 60, is_settled=False) == made
    time.sleep(0.05)
    assert find(place, label, 0.04, is_settled=False) is None
    assert find(place, label, 0.04) == made


def test_why_an_export_is_new(tmp_path: Path) -> None:
    def why(key: str | None, query: dict[str, Any], version: int | None = 3, *, is_settled: bool = True) -> str:
        return why_new(locate(tmp_path), Identity(query, key, is_settled, "a view has no version"), version, None)

    assert why("a", {}) == "new: none is there"
    folder, manifest = make_export(tmp_path, [TABLE], label="a" * 32, query={"user": "ann", "columns": ["n"]})
    same = dict(manifest.query)
    assert why(None, same) == "new: a view has no version"
    assert why("a", same, is_settled=False) == (
        "new: a view has no version; max_age_s= says how old an export may be taken"
    )
    assert why("b", same, 4) == "new: the newest that is there is of version 3"
    assert why("b", same) == "new: the table was made again since"
    assert why("b", {**same, "columns": ["m"]}) == "new: the newest that is there differs in columns"
    assert why("b", {**same, "user": "bob"}) == "new: the newest that is there is for ann, this is for bob"
    assert why("b", {**same, "user": None}) == (
        "new: the newest that is there is for ann, this is for all who say shared=True"
    )
    (folder / "part-00000.parquet").unlink()
    assert why("a" * 32, same) == "new: one is there, but its files are not all there"


def test_an_export_is_reused_while_all_its_files_have_their_size(tmp_path: Path) -> None:
    place, label = locate(tmp_path), "a" * 32
    folder, manifest = make_export(tmp_path, [TABLE, TABLE], label=label)

    assert find(place, label) == (folder, manifest)
    assert find(place, "b" * 32) is None
    assert find(place, None) is None
    assert find(locate("s3://bucket/x"), label) is None
    assert find(locate(tmp_path / "missing"), label) is None

    shard = folder / "part-00001.parquet"
    os.truncate(shard, shard.stat().st_size - 1)
    assert find(place, label) is None
    shard.unlink()
    assert find(place, label) is None


def test_an_older_whole_export_is_reused_rather_than_a_newer_damaged_one(tmp_path: Path) -> None:
    label = "a" * 32
    older, _ = make_export(tmp_path, [TABLE], label=label)
    newer, _ = make_export(tmp_path, [TABLE], label=label)
    assert find(locate(tmp_path), label)[0] == newer  # type: ignore[index]
    (newer / "part-00000.parquet").unlink()

    found = find(locate(tmp_path), label)

    assert found is not None
    assert found[0] == older


def of_table(root: Path, name: str, version: int | None) -> Path:
    return make_export(root / name.replace(".", "-"), [TABLE], table=name, version=version)[0]


def test_the_newest_complete_export_is_opened(tmp_path: Path) -> None:
    of_table(tmp_path, "main.ml.t", 3)
    second = of_table(tmp_path, "main.ml.t", 4)
    unfinished = of_table(tmp_path, "main.ml.t", 5)
    (unfinished / "_bridge.0.json").unlink()

    table = bridge.open_export(tmp_path)

    assert table.path == str(second)
    assert table.to_arrow().equals(TABLE)
    assert table.plan is None
    assert table.route == "export"
    assert bridge.open_export(str(tmp_path), version=3).to_arrow().equals(TABLE)
    assert bridge.open_export(second).path == str(second)


def test_a_volume_is_opened_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_VOLUME_ROOT", str(tmp_path))
    folder = of_table(tmp_path / "main/ml/exports", "main.ml.t", 3)

    assert bridge.open_export("/Volumes/main/ml/exports").path == str(folder)


def test_no_export_is_told(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ExportNotFoundError, match=r"holds no complete export\.\n  Make one: bridge.export_table\("):
            bridge.open_export(root)
    of_table(tmp_path, "main.ml.t", 3)
    with pytest.raises(FileNotFoundError, match=r"holds no complete export of version 4\.\n"):
        bridge.open_export(tmp_path, version=4)


def test_exports_of_several_tables_need_a_name(tmp_path: Path) -> None:
    first = of_table(tmp_path, "main.ml.flights", 1)
    of_table(tmp_path, "main.ml.planes", 2)

    with pytest.raises(
        ExportNotFoundError,
        match=r"holds exports of main\.ml\.flights, main\.ml\.planes\.\n  Say which, in full: table=",
    ):
        bridge.open_export(tmp_path)
    assert bridge.open_export(tmp_path, table="main.ml.flights").path == str(first)
    assert bridge.open_export(tmp_path, version=1).path == str(first)
    with pytest.raises(
        ExportNotFoundError, match=r'no complete export of main\.ml\.flihgts\. Did you mean "main\.ml\.flights"\?'
    ):
        bridge.open_export(tmp_path, table="main.ml.flihgts")
    with pytest.raises(ExportNotFoundError, match=r"no complete export of main\.ml\.flights of version 2\."):
        bridge.open_export(tmp_path, table="main.ml.flights", version=2)


def test_exports_of_other_rows_are_not_taken_for_the_table(tmp_path: Path) -> None:
    parent = tmp_path / "t"
    query = {"columns": ["n"], "where": None, "limit": None, "user": "ann"}
    whole, _ = make_export(parent, [TABLE], query=query)
    newer, _ = make_export(parent, [TABLE], query={**query, "shard_bytes": 5})
    assert bridge.open_export(tmp_path).path == str(newer)
    some, _ = make_export(parent, [TABLE], query={**query, "where": "n<5"}, version=4)

    with pytest.raises(
        ExportNotFoundError,
        match=rf"holds exports of main\.ml\.t that may hold different rows\. Open one by its own folder.*"
        rf"\n  where n<5: {some}\n  where None: {newer}",
    ):
        bridge.open_export(tmp_path)
    assert bridge.open_export(whole).path == str(whole)
    assert bridge.open_export(tmp_path, version=3).path == str(newer)


@pytest.mark.parametrize("version", ["0", True, 1.0])
def test_a_version_is_a_number(tmp_path: Path, version: Any) -> None:
    with pytest.raises(SourceError, match=r"version is .*; give a whole number"):
        bridge.open_export(tmp_path, version=version)


@pytest.mark.parametrize("fact", ["user", "time_zone", "address", "confs"])
def test_exports_of_others_are_not_taken_for_ones_own(tmp_path: Path, fact: str) -> None:
    query = {"columns": ["n"], "where": None, fact: "one"}
    one, _ = make_export(tmp_path / "t", [TABLE], query=query)
    other, _ = make_export(tmp_path / "t", [TABLE], query={**query, fact: "other"})

    with pytest.raises(
        ExportNotFoundError, match=rf"may hold different rows.*\n  {fact} other: {other}\n  {fact} one: {one}"
    ):
        bridge.open_export(tmp_path)


def test_each_dataframe_is_another(tmp_path: Path) -> None:
    for _ in range(2):
        make_export(tmp_path / "t", [TABLE], table="DataFrame", identity=None, query={"columns": ["n"]})

    with pytest.raises(ExportNotFoundError, match="may hold different rows"):
        bridge.open_export(tmp_path)


def test_a_folder_of_one_export_must_be_the_one_asked_for(tmp_path: Path) -> None:
    folder = of_table(tmp_path, "main.ml.t", 3)

    with pytest.raises(ExportNotFoundError, match=r"holds main\.ml\.t version 3, not main\.ml\.t version 4\."):
        bridge.open_export(folder, version=4)
    with pytest.raises(ExportNotFoundError, match=r"holds main\.ml\.t version 3, not main\.ml\.u\."):
        bridge.open_export(folder, table="main.ml.u")
    unpinned = of_table(tmp_path, "a view", None)
    with pytest.raises(ExportNotFoundError, match=r"holds a view, not a view version 0\."):
        bridge.open_export(unpinned, version=0)


def test_a_newer_format_is_told(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path / "t", [TABLE])
    storage = LocalStorage(tmp_path / "t")
    ((_, marker),) = complete_attempts(storage)
    with begin(storage, "a") as newer:
        newer.commit({**marker.body, "format_version": 99}, {})

    with pytest.raises(ExportError, match="has manifest format 99; this version reads 1"):
        bridge.open_export(tmp_path / "t" / newer.name)
    assert bridge.open_export(folder).manifest == manifest
    assert bridge.open_export(tmp_path).path == str(folder)


def test_whole_tables_that_do_not_fit_are_refused_and_streams_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_export(tmp_path / "t", [TABLE])
    monkeypatch.setenv("BRIDGE_CLIENT_MAX_BYTES", "50")
    table = bridge.open_export(tmp_path)

    for hand_off in (
        table.to_arrow, table.to_pandas, table.to_numpy, table.to_torch, lambda: table.to_huggingface(streaming=False),
    ):  # fmt: skip
        with pytest.raises(
            bridge.TableTooLargeError,
            match=r"main\.ml\.t would take about 80 B in memory; client_max_bytes is 50 B\.\n  Use to_loader\(\)",
        ):
            hand_off()
    assert sum(batch.num_rows for batch in table.to_batches()) == 10
    assert len(list(table.to_loader(4))) == 3
    assert len(list(table.to_huggingface())) == 10


def test_a_label_needs_features(tmp_path: Path) -> None:
    make_export(tmp_path / "t", [TABLE])
    table = bridge.open_export(tmp_path)

    for hand_off in (table.to_numpy, table.to_torch):
        with pytest.raises(ValueError, match="label and dtype go with features: name the columns that make X"):
            hand_off(label="n")
        with pytest.raises(ValueError, match="label and dtype go with features"):
            hand_off(dtype="float32")
    assert table.to_numpy(["n"]).shape == table.to_torch(["n"]).shape == (10, 1)


def test_a_name_may_be_given_by_its_last_parts(tmp_path: Path) -> None:
    made = of_table(tmp_path, "main.ml.flights", 1)
    of_table(tmp_path, "main.ml.planes", 2)

    assert (
        bridge.open_export(tmp_path, table="flights").path
        == bridge.open_export(tmp_path, table="ml.flights").path
        == str(made)
    )
    with pytest.raises(ExportNotFoundError, match=r"no complete export of ights\.\n  It holds exports of main\.ml"):
        bridge.open_export(tmp_path, table="ights")
