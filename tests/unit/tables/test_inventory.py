from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import bridge
from bridge.errors import CorruptFileError, ExportError, ExportNotFoundError, VolumeError
from bridge.tables import inventory
from bridge.tables.inventory import describe_export
from bridge.volumes import hold
from bridge.volumes.commit import begin, complete_attempts, withdraw_attempt
from bridge.volumes.hold import hold_attempt
from bridge.volumes.lease import count_holders, storage_time_ns
from bridge.volumes.stores import LocalStorage
from tests.exports import make_export

TABLE = pa.table({"n": range(1000), "text": [f"row {index}" for index in range(1000)]})
RECEIPT = {"table": "main.ml.t", "version": 3, "spark_types": {}, "user": "someone"}


def export(root: Path, name: str = "main.ml.t", version: int | None = 3, **facts: Any) -> Path:
    return make_export(root / name.replace(".", "-"), [TABLE], table=name, version=version, **facts)[0]


def written_half(parent: Path) -> Path:
    with begin(LocalStorage(parent), "a") as opened:
        folder = parent / opened.name
        folder.mkdir()
        (folder / "part.parquet").write_bytes(b"x" * 500)
        shutil.copytree(folder, parent / "aside")
    (parent / "aside").rename(folder)
    return folder


# listing


def test_exports_are_listed_by_folder_and_newest_first(tmp_path: Path) -> None:
    first = export(tmp_path, receipt=RECEIPT, query={"columns": ["n"]})
    second = export(tmp_path, version=4)
    other = export(tmp_path, "main.ml.other", None)

    found = bridge.list_exports(tmp_path)

    assert [info.path for info in found] == [str(other), str(second), str(first)]
    assert [info.version for info in found] == [None, 4, 3]
    oldest = found[2]
    assert (oldest.state, oldest.table, oldest.num_rows, oldest.num_shards) == ("complete", "main.ml.t", 1000, 1)
    assert oldest.num_bytes == sum(file.stat().st_size for file in first.glob("*.parquet"))
    assert oldest.receipt == RECEIPT
    assert oldest.query == {"columns": ["n"]}
    assert 0 <= oldest.age_s < 60
    assert oldest.num_holders == 0
    assert [info.path for info in bridge.list_exports(first.parent)] == [str(second), str(first)]


def test_a_table_is_named_by_its_last_parts(tmp_path: Path) -> None:
    made = export(tmp_path, "main.ml.flights")
    half = written_half(made.parent)
    export(tmp_path, "main.ml.planes")

    for name in ("flights", "ml.flights", "main.ml.flights"):
        assert {info.path for info in bridge.list_exports(tmp_path, table=name)} == {str(made), str(half)}
    with pytest.raises(
        ExportNotFoundError, match=r'no complete export of main\.ml\.flihgts\. Did you mean "main\.ml\.flights"\?'
    ):
        bridge.list_exports(tmp_path, table="main.ml.flihgts")


def test_what_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ExportNotFoundError, match=r"is no folder\.\n  Give the one that was given to export_table"):
            bridge.list_exports(path)
    assert bridge.list_exports(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_volume_is_listed_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_VOLUME_ROOT", str(tmp_path))
    made = export(tmp_path / "main/ml/exports")

    assert [info.path for info in bridge.list_exports("/Volumes/main/ml/exports")] == [str(made)]


@pytest.mark.parametrize("name", ["with space", "50%", "a=b", "#1", "quote'\"", "表", "back\\slash", "line\nbreak"])
def test_odd_names_of_tables_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(hold, "_LAG_S", 0)
    made = make_export(tmp_path / name / name, [TABLE], table=name)[0]

    (info,) = bridge.list_exports(tmp_path / name, table=name)

    assert (info.path, info.table) == (str(made), name)
    assert bridge.verify_export(made).is_whole
    bridge.remove_export(made)
    assert bridge.list_exports(tmp_path / name) == []


def test_who_holds_and_who_writes_is_told(tmp_path: Path) -> None:
    made = export(tmp_path)
    held = [hold_attempt(LocalStorage(made.parent), made.name) for _ in range(2)]
    left = written_half(made.parent)
    with begin(LocalStorage(made.parent), "a") as opened:
        folder = made.parent / opened.name
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "part").write_bytes(bytes(100))
        (folder / "part").write_bytes(bytes(20))

        found = {info.path: info for info in bridge.list_exports(tmp_path)}

    assert (found[str(made)].state, found[str(made)].num_holders) == ("complete", 2)
    assert (found[str(folder)].state, found[str(folder)].num_holders) == ("being written", 1)
    assert found[str(folder)].num_bytes == 120
    assert (found[str(left)].state, found[str(left)].num_bytes) == ("left behind", 500)
    assert describe_export(made).num_holders == len(held)
    withdraw_attempt(LocalStorage(made.parent), next(a for a, _ in complete_attempts(LocalStorage(made.parent))))
    assert (describe_export(made).state, describe_export(made).num_holders) == ("withdrawn", 2)


def test_what_cannot_be_read_does_not_hide_the_rest(tmp_path: Path) -> None:
    good = export(tmp_path)
    storage = LocalStorage(good.parent)
    ((_, marker),) = complete_attempts(storage)
    folders = []
    for body in ({**marker.body, "format_version": 99}, {"step": 7}, {**marker.body, "shards": None}):
        with begin(storage, "a") as opened:
            opened.commit(body, {})
        folders.append(str(good.parent / opened.name))
    torn = export(tmp_path)
    content = bytearray((torn / "_bridge.0.json").read_bytes())
    content[len(content) // 2] ^= 1
    (torn / "_bridge.0.json").write_bytes(content)

    found = {info.path: info for info in bridge.list_exports(tmp_path)}

    assert found[str(good)].state == "complete"
    assert [found[folder].state for folder in folders] == ["unreadable", "no export", "unreadable"]
    newer, foreign, broken = (found[folder].problem or "" for folder in folders)
    assert newer.endswith("has manifest format 99; this version reads 1")
    assert foreign == "its marker is of something else"
    assert "has a manifest that this version does not read" in broken
    assert (found[str(torn)].state, found[str(torn)].problem) == ("left behind", "its marker is damaged")


def failing(monkeypatch: pytest.MonkeyPatch, call: str, part: str, error: int) -> None:
    """Let a call of the storage fail for names that hold a part, as for someone who may not."""
    real = getattr(LocalStorage, call)

    def fail(self: LocalStorage, name: str = "", *args: Any) -> Any:
        if part in str(self.path(name)):
            raise OSError(error, os.strerror(error), name)
        return real(self, name, *args)

    monkeypatch.setattr(LocalStorage, call, fail)


def test_a_folder_that_cannot_be_listed_is_shown_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, closed = export(tmp_path, "main.ml.open"), export(tmp_path, "main.ml.closed")
    failing(monkeypatch, "list", "main-ml-closed", errno.EACCES)

    unreadable, complete = bridge.list_exports(tmp_path)

    assert (unreadable.path, unreadable.state) == (str(closed.parent), "unreadable")
    assert unreadable.problem is not None
    assert unreadable.problem.endswith("main-ml-closed cannot be listed: Permission denied")
    assert complete.path == str(made)
    with pytest.raises(VolumeError, match=r"main-ml-closed cannot be listed: Permission denied\."):
        bridge.list_exports(closed.parent)
    with pytest.raises(VolumeError, match=r"main-ml-closed cannot be listed: Permission denied\."):
        describe_export(closed)


def test_a_marker_that_cannot_be_read_is_shown_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = export(tmp_path)
    failing(monkeypatch, "read", made.name, errno.EIO)

    (info,) = bridge.list_exports(tmp_path)

    assert info.state == "unreadable"
    assert info.problem == f"the marker of {made} cannot be read: Input/output error"


def test_who_may_only_read_lists_and_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = export(tmp_path)
    failing(monkeypatch, "write", "", errno.EROFS)
    failing(monkeypatch, "make_folder", "", errno.EROFS)

    (info,) = bridge.list_exports(tmp_path)

    assert (info.path, info.state) == (str(made), "complete")
    assert 0 <= info.age_s < 60
    assert bridge.verify_export(made).is_whole


def test_a_folder_behind_a_link_is_not_listed_twice(tmp_path: Path) -> None:
    made = export(tmp_path)
    (tmp_path / "link").symlink_to(made.parent)

    assert [info.path for info in bridge.list_exports(tmp_path)] == [str(made)]


def test_one_export_is_described_where_it_stands(tmp_path: Path) -> None:
    made = export(tmp_path)
    assert describe_export(made).table == "main.ml.t"

    for path in (
        tmp_path,
        made.parent / made.name.replace(made.name[-1], "z"),
        made.with_name("0" * 13 + "-a-" + "0" * 12),
    ):
        with pytest.raises(
            ExportNotFoundError, match=r"is not the folder of a complete export\.\n  Give one that list"
        ):
            describe_export(path)


# verifying


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_each_region_of_a_shard_is_checked(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, [TABLE, TABLE, TABLE], row_group_rows=300)
    assert bridge.verify_export(folder) == bridge.VerifyReport(str(folder), 3, manifest.num_bytes, {}, ())
    first, second, _ = manifest.shards
    flip(folder / first.name, 0)
    flip(folder / first.name, first.row_groups[2].stop - 1)
    flip(folder / second.name, second.num_bytes - 1)

    report = bridge.verify_export(folder)

    groups = first.row_groups
    assert report.damaged == {
        first.name: f"differs from what was written in row group 0 (bytes 0 to {groups[0].stop:,}), "
        f"row group 2 (bytes {groups[2].start:,} to {groups[2].stop:,})",
        second.name: "differs from what was written in its footer "
        f"(bytes {second.footer_start:,} to {second.num_bytes:,})",
    }
    assert not report.is_whole
    assert bridge.verify_export(folder, read=False).is_whole


def test_a_bit_of_any_byte_is_found(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, [pa.table({"n": [1, 2, 3]})])
    (shard,) = manifest.shards
    whole = (folder / shard.name).read_bytes()
    for position in range(0, shard.num_bytes, 7):
        flip(folder / shard.name, position)
        assert list(bridge.verify_export(folder).damaged) == [shard.name], position
        (folder / shard.name).write_bytes(whole)
    assert bridge.verify_export(folder).is_whole


@pytest.mark.parametrize("read", [True, False])
def test_what_is_cut_longer_gone_or_not_of_it_is_found(tmp_path: Path, read: bool) -> None:
    folder, manifest = make_export(tmp_path, [TABLE] * 4)
    cut, longer, gone, whole = manifest.shards
    os.truncate(folder / cut.name, cut.num_bytes - 1)
    with open(folder / longer.name, "ab") as file:
        file.write(b"x")
    (folder / gone.name).unlink()
    (folder / "deep").mkdir()
    shutil.copy(folder / whole.name, folder / "deep" / "é.parquet")
    shutil.copy(folder / whole.name, folder / "part-99999.parquet")
    (folder / "_SUCCESS").touch()

    report = bridge.verify_export(folder, read=read)

    assert report.damaged == {
        cut.name: f"holds {cut.num_bytes - 1:,} bytes; {cut.num_bytes:,} were written",
        longer.name: f"holds {longer.num_bytes + 1:,} bytes; {longer.num_bytes:,} were written",
        gone.name: "is not there",
    }
    assert report.unlisted == ("deep/é.parquet", "part-99999.parquet")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EACCES, "Permission denied"), "cannot be read: Permission denied"),
        (CorruptFileError("it ends at byte 7.\n  Write it again."), "cannot be read: it ends at byte 7"),
    ],
)
def test_a_shard_that_cannot_be_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, told: str
) -> None:
    folder, manifest = make_export(tmp_path, [TABLE, TABLE])
    real = inventory.digest_ranges

    def fail(path: Path, ranges: Any) -> list[str]:
        if path.name == manifest.shards[0].name:
            raise error
        return real(path, ranges)

    monkeypatch.setattr(inventory, "digest_ranges", fail)

    assert bridge.verify_export(folder).damaged == {manifest.shards[0].name: told}


def test_an_export_is_held_while_it_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = make_export(tmp_path, [TABLE])
    storage = LocalStorage(tmp_path)
    seen = []
    real = inventory.digest_ranges

    def look(path: Path, ranges: Any) -> list[str]:
        seen.append(len(count_holders(storage, now_ns=storage_time_ns(storage))))
        return real(path, ranges)

    monkeypatch.setattr(inventory, "digest_ranges", look)

    assert bridge.verify_export(folder).is_whole
    assert seen == [1]
    assert os.listdir(tmp_path / "_leases") == []


def test_a_copy_is_verified_and_what_is_no_export_is_told(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path / "t", [TABLE])
    shutil.copytree(folder, tmp_path / "copy")
    assert bridge.verify_export(tmp_path / "copy").num_bytes == manifest.num_bytes

    with pytest.raises(ExportNotFoundError, match="is not the folder of a complete export"):
        bridge.verify_export(tmp_path)
    storage = LocalStorage(tmp_path / "t")
    with begin(storage, "a") as newer:
        newer.commit({**manifest.to_json(), "format_version": 99}, {})
    with pytest.raises(ExportError, match="has manifest format 99"):
        bridge.verify_export(tmp_path / "t" / newer.name)


def test_a_writer_that_gives_no_sign_of_life_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begin(LocalStorage(tmp_path / "t"), "a") as opened:
        (tmp_path / "t" / opened.name).mkdir()
        (alive,) = bridge.list_exports(tmp_path)
        for beat in (tmp_path / "t" / "_leases").iterdir():
            os.utime(beat, (beat.stat().st_mtime - 600, beat.stat().st_mtime - 600))
        (silent,) = bridge.list_exports(tmp_path)

    assert (alive.state, alive.problem) == ("being written", None)
    assert silent.state == "being written"
    assert (silent.problem or "").startswith("no sign of life for 10 min 0")
