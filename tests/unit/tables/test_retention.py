from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bridge
from bridge.errors import ConfigError, ExportError, ExportNotFoundError, VolumeError
from bridge.tables import retention
from bridge.tables.inventory import ExportInfo, describe_export
from bridge.tables.retention import reasons_to_keep
from bridge.volumes import hold as holds
from bridge.volumes.commit import WITHDRAWN, Attempt, begin, collect_garbage
from bridge.volumes.hold import Hold, hold_attempt
from bridge.volumes.stores import LocalStorage
from tests.exports import make_export
from tests.processes import eventually

TABLE = pa.table({"n": range(10)})
DAY_S = 86400.0


@pytest.fixture(autouse=True)
def _nothing_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "_LAG_S", 0.0)


def export(root: Path, version: int | None, *, age_s: float = 0.0, name: str = "main.ml.t", **query: Any) -> Path:
    """Make an export that was begun so long ago."""
    folder, _ = make_export(root / name, [TABLE], table=name, version=version, query=query)
    return aged(folder, age_s)


def aged(folder: Path, age_s: float) -> Path:
    attempt = Attempt.parse(folder.name)
    assert attempt is not None
    older = Attempt(attempt.generation - round(age_s * 1000), attempt.label, attempt.attempt_id)
    return folder.rename(folder.with_name(older.name))


def hold(folder: Path) -> Hold | None:
    return hold_attempt(LocalStorage(folder.parent), folder.name)


def rows(folder: Path) -> int:
    return sum(pq.read_metadata(file).num_rows for file in folder.glob("*.parquet"))


def outcome(report: bridge.PruneReport) -> tuple[list[str], dict[str, str], dict[str, str]]:
    return (
        sorted(Path(info.path).name for info in report.deleted),
        {Path(info.path).name: why for info, why in report.kept},
        {Path(info.path).name: why for info, why in report.failed},
    )


# rules


def info(version: int | None, age_s: float, **facts: Any) -> ExportInfo:
    return ExportInfo(**{"path": f"{version}-{age_s}", "state": "complete", "age_s": age_s, "table": "t",
                         "identity": "k", "version": version, **facts})  # fmt: skip


def test_no_whole_export_goes_for_the_sake_of_a_damaged_one() -> None:
    exports = [
        info(3, 10, problem="a shard is gone"),
        info(2, 20),
        info(1, 30),
        info(4, 40, query={"limit": 1}, problem="gone"),
    ]

    assert reasons_to_keep(exports, keep_versions=1, max_age_s=None) == {
        "2-20": "the newest of its table and query",
        "4-40": "damaged, but there is no other of its table and query",
    }
    assert "3-10" in reasons_to_keep(exports, keep_versions=1, max_age_s=15)


def test_what_nobody_can_ask_for_again_is_the_only_one() -> None:
    exports = [info(None, age, identity=None) for age in (10, 20)]

    assert set(reasons_to_keep(exports, keep_versions=1, max_age_s=None)) == {"None-10", "None-20"}


def test_the_newest_versions_of_each_table_and_query_stay() -> None:
    exports = [
        info(5, 10), info(5, 20), info(4, 5), info(3, 7), info(2, 30),
        info(1, 50, query={"where": "a"}), info(0, 60, query={"where": "a"}), info(9, 50, table="u"),
    ]  # fmt: skip

    kept = reasons_to_keep(exports, keep_versions=2, max_age_s=None)

    assert kept == {
        "5-10": "one of the 2 newest versions",
        "5-20": "one of the 2 newest versions",
        "4-5": "the newest of its table and query",
        "1-50": "the newest of its table and query",
        "0-60": "one of the 2 newest versions",
        "9-50": "the newest of its table and query",
    }


def test_what_has_no_version_counts_by_its_age() -> None:
    exports = [info(None, age_s) for age_s in (30, 10, 40, 20)]

    assert sorted(reasons_to_keep(exports, keep_versions=2, max_age_s=None)) == ["None-10", "None-20"]


def test_both_rules_must_let_it_go() -> None:
    exports = [info(version, (9 - version) * 10) for version in range(9)]

    by_version = set(reasons_to_keep(exports, keep_versions=3, max_age_s=None))
    by_age = set(reasons_to_keep(exports, keep_versions=None, max_age_s=55))
    both = reasons_to_keep(exports, keep_versions=3, max_age_s=55)

    assert by_version == {"8-10", "7-20", "6-30"}
    assert by_age == by_version | {"5-40", "4-50"}
    assert set(both) == by_version | by_age
    assert both["5-40"] == "younger than 55 s"


def test_what_is_not_complete_is_left_to_those_who_work_on_it() -> None:
    exports = [
        info(None, 7200, path="a", state="being written", num_holders=1),
        info(None, 7200, path="b", state="left behind"),
        info(None, 3599, path="c", state="left behind"),
        info(None, 7200, path="d", state="withdrawn", num_holders=2),
        info(None, 7200, path="e", state="unreadable", problem="it is odd"),
    ]

    assert reasons_to_keep(exports, keep_versions=1, max_age_s=0) == {
        "a": "being written, in use by 1 holder",
        "c": "left behind less than 1 h 00 min ago",
        "d": "withdrawn, in use by 2 holders",
        "e": "it cannot be read: it is odd",
    }


@given(
    exports=st.lists(
        st.builds(
            info,
            version=st.none() | st.integers(0, 5),
            age_s=st.floats(0, 100),
            table=st.sampled_from("tu"),
            num_holders=st.integers(0, 1),
        ),
        unique_by=lambda made: made.path,
    ),
    keep_versions=st.none() | st.integers(1, 4),
    max_age_s=st.floats(0, 100),
)
def test_the_newest_and_what_is_held_always_stay(
    exports: list[ExportInfo], keep_versions: int | None, max_age_s: float
) -> None:
    kept = reasons_to_keep(exports, keep_versions=keep_versions, max_age_s=max_age_s)

    for table in {made.table for made in exports}:
        assert min((made for made in exports if made.table == table), key=lambda made: made.age_s).path in kept
    for made in exports:
        assert made.path in kept or (made.num_holders == 0 and made.age_s >= max_age_s)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, "nothing says which exports may go; give keep_versions \\(--keep-versions\\), max_age_s"),
        ({"keep_versions": 0}, "keep_versions is 0; give a whole number, 1 or more"),
        ({"max_age_s": -1}, "max_age_s is -1; give a number of seconds"),
        ({"keep_versions": True}, "keep_versions is True; give a whole number"),
        ({"keep_versions": "1"}, "keep_versions is '1'; give a whole number"),
        ({"max_age_s": math.nan}, "max_age_s is nan; give a number of seconds"),
        ({"max_age_s": math.inf}, "max_age_s is inf; give a number of seconds"),
        ({"max_age_s": "30d"}, "max_age_s is '30d'; give a number of seconds"),
    ],
)
def test_rules_are_checked_first(tmp_path: Path, rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bridge.prune_exports(tmp_path / "missing", **rules)


# pruning


def test_old_exports_go_and_the_rest_stays(tmp_path: Path) -> None:
    old = [export(tmp_path, version, age_s=40 * DAY_S - version) for version in range(3)]
    young = export(tmp_path, 1, age_s=3 * DAY_S)
    newest = export(tmp_path, 5)
    lone = export(tmp_path, 0, name="main.ml.lone", age_s=400 * DAY_S)
    num_bytes = sum(describe_export(folder).num_bytes or 0 for folder in old)

    dry = bridge.prune_exports(tmp_path, max_age_s=30 * DAY_S, dry_run=True)
    assert all(folder.is_dir() for folder in [*old, young, newest, lone])
    report = bridge.prune_exports(tmp_path, max_age_s=30 * DAY_S)

    assert outcome(dry) == outcome(report)
    assert outcome(report) == (
        sorted(folder.name for folder in old),
        {
            young.name: "younger than 720 h 00 min",
            newest.name: "the newest of its table and query",
            lone.name: "the newest of its table and query",
        },
        {},
    )
    assert (dry.is_dry_run, report.is_dry_run) == (True, False)
    assert dry.num_bytes == report.num_bytes == num_bytes
    assert [folder.is_dir() for folder in [*old, young, newest, lone]] == [False] * 3 + [True] * 3


def test_only_the_table_that_is_named_is_pruned(tmp_path: Path) -> None:
    folders = [
        export(tmp_path, version, name=name, age_s=10) for name in ("main.ml.t", "main.ml.u") for version in (1, 2)
    ]
    folders[1].touch()

    report = bridge.prune_exports(tmp_path, table="u", keep_versions=1)

    assert outcome(report)[0] == [folders[2].name]
    with pytest.raises(ExportNotFoundError, match="holds no complete export of v"):
        bridge.prune_exports(tmp_path, table="v", keep_versions=1)


def left_by_a_killed_writer(parent: Path, age_s: float) -> Path:
    folder = parent / Attempt(int((time.time() - age_s) * 1000), "a", f"{int(age_s):012x}").name
    folder.mkdir(parents=True)
    (folder / "part").write_bytes(bytes(1000))
    return folder


def test_what_writers_left_goes_when_it_is_old(tmp_path: Path) -> None:
    parent = export(tmp_path, 1).parent
    old, young = left_by_a_killed_writer(parent, 7200), left_by_a_killed_writer(parent, 60)
    with begin(LocalStorage(parent), "a") as opened:
        (parent / opened.name).mkdir()
        held = aged(parent / opened.name, 7200)
        dry = bridge.prune_exports(tmp_path, keep_versions=1, dry_run=True)
        assert old.exists()

        report = bridge.prune_exports(tmp_path, keep_versions=1)

        deleted, kept, _ = outcome(report)
        assert outcome(dry) == outcome(report)
        assert (deleted, report.num_bytes) == ([old.name], 1000)
        assert kept[young.name] == "left behind less than 1 h 00 min ago"
        assert kept[held.name] == "being written, in use by 1 holder"
        assert held.exists()


def test_what_cannot_be_deleted_does_not_keep_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third, newest = (export(tmp_path, version, age_s=10 - version) for version in range(4))
    garbage = left_by_a_killed_writer(first.parent, 7200)
    real = LocalStorage.delete

    def delete(self: LocalStorage, name: str) -> bool:
        if name.startswith((f"{first.name}/_bridge", f"{second.name}/part", garbage.name)):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), name)
        return real(self, name)

    monkeypatch.setattr(LocalStorage, "delete", delete)

    report = bridge.prune_exports(tmp_path, keep_versions=1)

    deleted, kept, failed = outcome(report)
    assert deleted == [third.name]
    assert list(kept) == [newest.name, garbage.name]
    assert kept[garbage.name] == "still held, or not garbage yet"
    assert failed[first.name].endswith("cannot be withdrawn, and may still be complete: Permission denied.")
    assert failed[second.name].endswith("not complete any more, but not all of it could be deleted: Permission denied.")
    assert garbage.name in failed[first.parent.name]


def test_leases_that_cannot_be_read_keep_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newest = (export(tmp_path, version, age_s=10 - version) for version in range(2))

    def fail(*_: object, **__: object) -> dict[str, int]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(holds, "count_holders", fail)

    deleted, kept, failed = outcome(bridge.prune_exports(tmp_path, keep_versions=1))

    assert (deleted, list(kept)) == ([], [newest.name])
    assert failed == {older.name: f"the leases of {older.parent} cannot be read: Input/output error."}
    assert bridge.verify_export(older).is_whole
    with pytest.raises(VolumeError, match=r"the leases of .* cannot be read: Input/output error\."):
        bridge.remove_export(older)


# readers, in each order that reader and deleter can take


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return an old export that retention lets go, and the newest."""
    return export(tmp_path, 1, age_s=2 * DAY_S), export(tmp_path, 2, age_s=DAY_S)


def before(monkeypatch: pytest.MonkeyPatch, step: str, act: Callable[[], object], where: Any = holds) -> None:
    """Let something happen right before a step of the deleter."""
    real = getattr(where, step)

    def run(*args: Any) -> Any:
        act()
        return real(*args)

    monkeypatch.setattr(where, step, run)


def test_a_reader_that_was_first_keeps_its_export(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    old, _ = pair
    held = [hold(old), hold(old)]

    report = bridge.prune_exports(tmp_path, keep_versions=1)

    assert outcome(report)[0] == []
    assert outcome(report)[1][old.name] == "in use by 2 holders"
    assert bridge.verify_export(old).is_whole
    held.clear()
    eventually(lambda: describe_export(old).num_holders == 0)
    assert outcome(bridge.prune_exports(tmp_path, keep_versions=1))[0] == [old.name]


def test_a_reader_that_opens_after_the_listing_keeps_its_export(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = pair
    held: list[Hold | None] = []
    before(monkeypatch, "_delete", lambda: held.append(hold(old)), retention)

    report = bridge.prune_exports(tmp_path, keep_versions=1)

    assert outcome(report)[1][old.name] == "in use by 1 holder"
    assert bridge.verify_export(old).is_whole


@pytest.mark.parametrize("step", ["withdraw_attempt", "_wait_for_listings"])
def test_a_reader_that_opens_while_it_is_withdrawn(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    old, _ = pair
    held: list[Hold | None] = []
    told: list[VolumeError] = []

    def read() -> None:
        try:
            held.append(hold(old))
        except VolumeError as exc:
            told.append(exc)

    before(monkeypatch, step, read)
    # another process collects garbage at the same time
    before(monkeypatch, "_wait_for_listings", lambda: collect_garbage(LocalStorage(old.parent)))

    report = bridge.prune_exports(tmp_path, keep_versions=1)

    if step == "_wait_for_listings":
        assert [str(exc).partition("\n")[0] for exc in told] == [f"{old} was deleted while it was opened."]
        assert held == []
        return
    assert outcome(report)[1][old.name] == "opened at the last moment, its files go later: in use by 1 holder"
    assert rows(old) == 10  # what is open can be read to its end
    assert describe_export(old).state == "withdrawn"
    with pytest.raises(VolumeError, match="was deleted while it was opened"):
        hold(old)
    os.utime(old / WITHDRAWN, (time.time() - 3601,) * 2)
    eventually(lambda: describe_export(old).num_holders == 1)  # the second reader has let go
    bridge.prune_exports(tmp_path, keep_versions=1)
    assert rows(old) == 10

    held.clear()
    eventually(lambda: describe_export(old).num_holders == 0)
    assert outcome(bridge.prune_exports(tmp_path, keep_versions=1))[0] == [old.name]
    assert not old.exists()


def test_a_reader_that_comes_after_all_is_told(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = pair
    told: list[str] = []

    def read() -> None:
        with pytest.raises(VolumeError, match="was deleted while it was opened") as caught:
            hold(old)
        told.append(str(caught.value))

    before(monkeypatch, "delete_attempt", read)

    assert outcome(bridge.prune_exports(tmp_path, keep_versions=1))[0] == [old.name]
    assert len(told) == 1
    assert not old.exists()


READER = """
import sys
import bridge
table = bridge.open_export(sys.argv[1], version=1)
batches = table.to_batches()
print(next(batches).num_rows, flush=True)
input()
print(sum(batch.num_rows for batch in batches), flush=True)
input()
"""


def reader_of(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", READER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(reader: subprocess.Popen[str], told: str = "") -> str:
    assert reader.stdin is not None
    assert reader.stdout is not None
    if told:
        reader.stdin.write(told)
        reader.stdin.flush()
    return reader.stdout.readline()


def test_a_reader_at_work_finishes_while_newer_versions_come_and_old_ones_go(tmp_path: Path) -> None:
    old, _ = make_export(tmp_path / "t", [TABLE] * 3, version=1, query={})
    with reader_of(tmp_path) as reader:
        assert line(reader) == "10\n"
        make_export(tmp_path / "t", [TABLE], version=2, query={})
        newest, _ = make_export(tmp_path / "t", [TABLE], version=3, query={})

        report = bridge.prune_exports(tmp_path, keep_versions=1)

        assert [info.version for info in report.deleted] == [2]
        assert outcome(report)[1][old.name].startswith("in use by ")
        assert bridge.open_export(tmp_path).path == str(newest)
        assert line(reader, "\n") == "20\n"
        reader.communicate("\n")
    assert reader.returncode == 0

    assert [info.version for info in bridge.prune_exports(tmp_path, keep_versions=1).deleted] == [1]
    assert not old.exists()


def test_a_reader_that_was_killed_is_waited_for_an_hour(tmp_path: Path) -> None:
    old, _ = make_export(tmp_path / "t", [TABLE] * 3, version=1, query={})
    make_export(tmp_path / "t", [TABLE], version=2, query={})
    with reader_of(tmp_path) as reader:
        assert line(reader) == "10\n"
        reader.kill()
    assert bridge.prune_exports(tmp_path, keep_versions=1).deleted == ()

    for beat in (tmp_path / "t" / "_leases").iterdir():
        os.utime(beat, (time.time() - 3601,) * 2)

    assert [info.path for info in bridge.prune_exports(tmp_path, keep_versions=1).deleted] == [str(old)]
    assert list((tmp_path / "t" / "_leases").iterdir()) == []


# removing one


def test_one_export_is_removed_even_the_newest(tmp_path: Path) -> None:
    older, newest = export(tmp_path, 1), export(tmp_path, 2)

    removed = bridge.remove_export(newest)

    assert (removed.path, removed.version) == (str(newest), 2)
    assert not newest.exists()
    assert bridge.open_export(tmp_path).path == str(older)
    with pytest.raises(ExportNotFoundError, match="is not the folder of a complete export"):
        bridge.remove_export(newest)


def test_what_is_in_use_is_not_removed(tmp_path: Path) -> None:
    folder = export(tmp_path, 1)
    held = hold(folder)

    with pytest.raises(
        ExportError,
        match=r"is not deleted: in use by 1 holder\.\n  Let its readers end.* killed ends by itself in an hour\.",
    ):
        bridge.remove_export(folder)
    assert bridge.verify_export(folder).is_whole
    del held


def test_an_export_in_a_newer_format_can_be_removed(tmp_path: Path) -> None:
    folder, manifest = make_export(tmp_path, [TABLE], query={})
    with begin(LocalStorage(tmp_path), "a") as newer:
        newer.commit({**manifest.to_json(), "format_version": 99}, {})

    assert bridge.remove_export(tmp_path / newer.name).state == "unreadable"
    assert [info.path for info in bridge.list_exports(tmp_path)] == [str(folder)]


def test_what_is_not_complete_or_a_copy_is_not_removed(tmp_path: Path) -> None:
    left = left_by_a_killed_writer(tmp_path, 7200)
    copied = export(tmp_path, 1).rename(tmp_path / "copy")

    for path in (left, copied):
        with pytest.raises(ExportNotFoundError, match="is not the folder of a complete export"):
            bridge.remove_export(path)
        assert path.exists()


def test_what_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export(tmp_path, 1)

    def fail(self: LocalStorage, name: str) -> bool:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete", fail)
        with pytest.raises(VolumeError, match=r"cannot be written: Permission denied|leases of .* Permission denied"):
            bridge.remove_export(folder)
    assert bridge.verify_export(folder).is_whole


def test_what_is_no_export_is_not_removed(tmp_path: Path) -> None:
    with begin(LocalStorage(tmp_path / "t"), "a") as opened:
        (tmp_path / "t" / opened.name).mkdir()
        (tmp_path / "t" / opened.name / "weights").write_bytes(b"w")
        opened.commit({"step": 7}, {"weights": 1})

    with pytest.raises(ExportNotFoundError):
        bridge.remove_export(tmp_path / "t" / opened.name)
    bridge.prune_exports(tmp_path, max_age_s=0)

    assert (tmp_path / "t" / opened.name / "weights").read_bytes() == b"w"
    assert [info.state for info in bridge.list_exports(tmp_path)] == ["no export"]
