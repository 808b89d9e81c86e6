from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import bridge
from bridge.columns.rules import Policies, Rules
from bridge.errors import ConfigError, ExportError, ExportNotFoundError, VolumeError
from bridge.spark.engines import Pin
from bridge.spark.write import Written
from bridge.tables.publish import _counted, export_folder, find_reusable, identity, shape
from bridge.volumes.commit import begin, complete_attempts
from bridge.volumes.path import locate
from bridge.volumes.stores import LocalStorage
from tests.exports import make_export

TABLE = pa.table({"n": range(10)})


@dataclass(frozen=True)
class Asked:
    """The facts of a source on which an identity depends; a source itself needs a server."""

    name: str = "main.ml.t"
    location: str = "/warehouse/t"
    pin: Pin = field(default_factory=lambda: Pin(3, "f", "the newest"))
    columns: tuple[str, ...] = ("a", "b")
    where: str | None = None
    limit: int | None = None
    is_repeatable: bool = True


@dataclass(frozen=True)
class At:
    address: str = "embedded"
    user: str = "someone"
    time_zone: str = "UTC"


def identity_of(
    asked: Asked | None = None,
    at: At | None = None,
    policies: Policies | None = None,
    sizes: tuple[int, int] = (1000, 100),
) -> str | None:
    rules = Rules.choose(pa.schema([("a", pa.string()), ("b", pa.int64())]), policies)
    return identity(asked or Asked(), at or At(), rules, *sizes)[0]  # type: ignore[arg-type]


def test_the_same_facts_are_the_same_export() -> None:
    made = identity_of()

    assert made == identity_of()
    assert re.fullmatch(r"[0-9a-f]{32}", made or "")


@pytest.mark.parametrize(
    "change",
    [
        {"asked": Asked(name="main.ml.u")},
        {"asked": Asked(location="/elsewhere/t")},
        {"asked": Asked(pin=Pin(4, "f", "the newest"))},
        {"asked": Asked(pin=Pin(3, "g", "the newest"))},
        {"asked": Asked(columns=("b", "a"))},
        {"asked": Asked(columns=("a",))},
        {"asked": Asked(where="a > 1")},
        {"asked": Asked(limit=10)},
        {"policies": {"a": bridge.dictionary()}},
        {"policies": {"b": bridge.fill(0)}},
        {"policies": {"b": bridge.drop_nulls()}},
        {"at": At(address="sc://elsewhere")},
        {"at": At(user="another")},
        {"at": At(time_zone="America/New_York")},
        {"sizes": (1001, 100)},
        {"sizes": (1000, 101)},
    ],
    ids=str,
)
def test_each_fact_counts(change: dict[str, Any]) -> None:
    assert identity_of(**change) not in (None, identity_of())


def test_why_a_version_is_pinned_does_not_count() -> None:
    assert identity_of(Asked(pin=Pin(3, "f", "the version that was asked for"))) == identity_of()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Asked(pin=Pin(None, None, "a view has no version")), "not reused: a view has no version"),
        (Asked(pin=Pin(3, None, "no history")), "not reused: no history"),
        (Asked(where="rand() < 0.5", is_repeatable=False), "not reused: the filter need not give the same rows twice"),
    ],
)
def test_what_cannot_be_known_again_has_no_identity(asked: Asked, reason: str) -> None:
    assert identity(asked, At(), Rules(pa.schema([]), {}), 1, 1) == (None, reason)  # type: ignore[arg-type]


def test_sizes_are_sizes() -> None:
    assert shape("1GiB", 5) == (2**30, 5)
    with pytest.raises(ConfigError, match='shard_bytes is "12 parsecs"; give an integer or a size'):
        shape("12 parsecs", 5)
    with pytest.raises(ConfigError, match=r"row_group_bytes is 1\.5; give an integer or a size"):
        shape(5, 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["main.ml.t", "a b%é.*?", "/data/x/y", "表", "a" * 300, "`", "../..", ""])
def test_folders_have_names_that_every_engine_takes(tmp_path: Path, name: str) -> None:
    place = export_folder(locate(tmp_path), Asked(name=name))  # type: ignore[arg-type]

    assert place.folder().parent == tmp_path
    assert re.fullmatch(r"[a-z0-9_-]{1,69}", place.folder().name)


def test_each_name_has_a_folder_of_its_own(tmp_path: Path) -> None:
    names = ["a.b", "a-b", "A.b", "a b", "a", "表", "表1"]

    folders = {export_folder(locate(tmp_path), Asked(name=name)).folder() for name in names}  # type: ignore[arg-type]

    assert len(folders) == len(names)


def test_a_root_that_readers_would_expand_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match=r"a\*b cannot hold exports: readers expand"):
        export_folder(locate(tmp_path / "a*b"), Asked())  # type: ignore[arg-type]


def test_an_export_is_reused_while_all_its_files_have_their_size(tmp_path: Path) -> None:
    place, label = locate(tmp_path), "a" * 32
    folder, manifest = make_export(tmp_path, [TABLE, TABLE], label=label)

    assert find_reusable(place, label) == (folder, manifest)
    assert find_reusable(place, "b" * 32) is None
    assert find_reusable(place, None) is None
    assert find_reusable(locate("s3://bucket/x"), label) is None
    assert find_reusable(locate(tmp_path / "missing"), label) is None

    shard = folder / "part-00001.parquet"
    os.truncate(shard, shard.stat().st_size - 1)
    assert find_reusable(place, label) is None
    shard.unlink()
    assert find_reusable(place, label) is None


def test_an_older_whole_export_is_reused_rather_than_a_newer_damaged_one(tmp_path: Path) -> None:
    label = "a" * 32
    older, _ = make_export(tmp_path, [TABLE], label=label)
    newer, _ = make_export(tmp_path, [TABLE], label=label)
    assert find_reusable(locate(tmp_path), label)[0] == newer  # type: ignore[index]
    (newer / "part-00000.parquet").unlink()

    found = find_reusable(locate(tmp_path), label)

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
        bridge.open_export(tmp_path)
    assert bridge.open_export(folder).manifest == manifest


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


def test_rows_that_were_written_and_rows_in_the_files_must_agree(tmp_path: Path) -> None:
    shards = make_export(tmp_path, [TABLE, TABLE])[1].shards

    assert _counted(shards, Written(("a", "b"), 20), "main.ml.t") == 20
    with pytest.raises(
        ExportError,
        match=r"^main\.ml\.t: 1,021 rows were written, but the files hold 20\.\n  Another writer may use",
    ):
        _counted(shards, Written(("a", "b"), 1021), "main.ml.t")


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
