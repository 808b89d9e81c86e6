"""Exports whose files are damaged, whose types a server gets wrong, and which may be taken again or not."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bridge
from bridge.errors import CorruptFileError, ExportError
from bridge.spark.connect import Connection
from bridge.tables.inventory import verify_export
from tests.engines.conftest import EngineUnderTest
from tests.processes import busy_cores, eventually

NUM_ROWS = 3000
ROWS = f"""
    SELECT id, IF(id % 10 = 0, NULL, id) AS n, concat('w', id % 7) AS word, sha2(CAST(id AS STRING), 256) AS text
    FROM range(0, {NUM_ROWS}, 1, 2)
"""


@pytest.fixture(scope="module")
def _kept() -> dict[str, Any]:
    """What is made once for each engine."""
    return {}


@pytest.fixture
def name(engine: EngineUnderTest, _kept: dict[str, Any]) -> str:
    """A Delta table of ROWS."""
    if engine.name not in _kept:
        _kept[engine.name] = engine.save(engine.spark.sql(ROWS))
    return _kept[engine.name]


@pytest.fixture
def export(
    engine: EngineUnderTest, name: str, _kept: dict[str, Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> bridge.Table:
    """A copy of an export in two shards of several row groups, to be damaged."""
    key = f"{engine.name} exported"
    if key not in _kept:
        root = tmp_path_factory.mktemp("exports")
        made = bridge.export_table(name, root, num_shards=2, row_group_bytes="64KiB", spark=engine.spark)
        _kept[key] = made.path
    shutil.copytree(_kept[key], tmp_path / "copy")
    table = bridge.open_export(tmp_path / "copy")
    assert table.manifest is not None
    assert [len(shard.row_groups) > 1 for shard in table.manifest.shards] == [True, True]
    return table


# --- shards that are damaged afterwards


HAND_OFFS: dict[str, Callable[[bridge.Table], Any]] = {
    "to_arrow": lambda table: table.to_arrow(),
    "to_batches": lambda table: list(table.to_batches()),
    "to_pandas": lambda table: table.to_pandas(),
    "to_loader": lambda table: list(table.to_loader(100, features=["id"])),
    "to_huggingface": lambda table: list(table.to_huggingface()),
    "to_huggingface in memory": lambda table: table.to_huggingface(streaming=False),
}


def check_damage_is_found(folder: str | None, shard: str) -> None:
    for hand_off in HAND_OFFS.values():
        with pytest.raises(CorruptFileError, match=shard):
            hand_off(bridge.open_export(folder or ""))


def _cut(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)


def _halve(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size // 2)


def _replace(shard: Path) -> None:
    rows = pq.read_table(shard)
    pq.write_table(rows.slice(1), shard, compression="zstd")


def _swap(shard: Path) -> None:
    """Put the other shard in its place."""
    other = next(path for path in shard.parent.glob("*.parquet") if path != shard)
    shutil.copyfile(other, shard)


def _pad(shard: Path) -> None:
    """Put something behind another whole file, so that it has the size that it had."""
    num_bytes = shard.stat().st_size
    pq.write_table(pq.read_table(shard).slice(0, 10), shard)
    os.truncate(shard, num_bytes)


@pytest.mark.parametrize("damage", [_cut, _halve, _replace, _swap, _pad, Path.unlink])
def test_a_shard_that_is_not_what_was_written_is_found(export: bridge.Table, damage: Callable[[Path], None]) -> None:
    shard = Path(export.files[1])

    damage(shard)

    check_damage_is_found(export.path, shard.name)
    assert not verify_export(export.path or "").is_whole


def test_a_byte_that_flips_is_found_wherever_it_is(export: bridge.Table) -> None:
    assert export.manifest is not None
    for shard in export.manifest.shards:
        path = Path(export.path or "") / shard.name
        regions = [(group.start, group.stop) for group in shard.row_groups] + [(shard.footer_start, shard.num_bytes)]
        assert [0, *(stop for _, stop in regions)] == [*(start for start, _ in regions), shard.num_bytes]
        for start, stop in regions:
            for number, at in enumerate(sorted({start, start + 1, (start + stop) // 2, stop - 1})):
                with flipped(path, at, 1 << number):
                    with pytest.raises(CorruptFileError, match=rf"{shard.name} is damaged: bytes {start} to {stop} di"):
                        bridge.open_export(export.path or "").to_arrow()
                    if number == 2:
                        check_damage_is_found(export.path, shard.name)
    assert bridge.open_export(export.path or "").to_arrow().num_rows == NUM_ROWS


class flipped:  # noqa: N801 - reads as a statement
    """Flip a bit of a file for the time of a block."""

    def __init__(self, path: Path, at: int, bit: int) -> None:
        self.path, self.at, self.bit = path, at, bit

    def __enter__(self) -> None:
        with open(self.path, "r+b") as file:
            file.seek(self.at)
            (byte,) = file.read(1)
            file.seek(self.at)
            file.write(bytes([byte ^ self.bit]))

    def __exit__(self, *_: object) -> None:
        self.__enter__()


def test_an_export_that_lost_a_file_is_not_taken_again(engine: EngineUnderTest, name: str, tmp_path: Path) -> None:
    def again() -> bridge.Table:
        return bridge.export_table(name, tmp_path, columns=["id"], num_shards=2, spark=engine.spark)

    paths = []
    for damage in (_cut, Path.unlink):
        table = again()
        paths.append(table.path)
        assert again().path == table.path
        damage(Path(table.files[0]))

    whole = again()
    assert len({*paths, whole.path}) == 3
    assert sorted(whole.to_arrow()["id"].to_pylist()) == list(range(NUM_ROWS))
    # a byte that flipped is found where it is read
    with flipped(Path(whole.files[0]), 10, 1):
        taken = again()
        assert taken.path == whole.path
        with pytest.raises(CorruptFileError, match="damaged"):
            taken.to_arrow()


# --- a server that writes instants as INT96, whatever it is told


EPOCH = dt.datetime(1970, 1, 1)
MOMENTS = [
    dt.datetime(1, 1, 1),
    dt.datetime(1600, 1, 1),
    None,
    dt.datetime(1969, 12, 31, 23, 59, 59, 999999),
    dt.datetime(9999, 12, 30, 23, 59, 59, 999999),
]
MICROS = [None if moment is None else (moment - EPOCH) // dt.timedelta(microseconds=1) for moment in MOMENTS]


@pytest.fixture
def int96(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.spark.write._TIMESTAMPS", ("spark.sql.parquet.outputTimestampType", "INT96"))


def moments(engine: EngineUnderTest, kind: str = "timestamp_micros(us)") -> Any:
    values = ", ".join(f"({i}, CAST({'NULL' if us is None else us} AS BIGINT))" for i, us in enumerate(MICROS))
    return engine.spark.sql(f"SELECT i, {kind} AS `at.é`, CAST(i AS STRING) AS text FROM VALUES {values} AS t(i, us)")


@pytest.mark.usefixtures("int96")
@pytest.mark.parametrize("shape", [{}, {"order_by": "at.é", "num_shards": 2}, {"shuffle_at_write": 1}])
def test_instants_written_as_int96_are_written_again(
    apache: EngineUnderTest, shape: dict[str, Any], tmp_path: Path
) -> None:
    table = bridge.export_table(moments(apache), tmp_path, spark=apache.spark, **shape)

    for read in (table, bridge.open_export(tmp_path)):
        rows = read.to_arrow()
        assert str(rows.schema.field("at.é").type) == "timestamp[us, tz=UTC]"
        assert rows.sort_by("i")["at.é"].cast(pa.int64()).to_pylist() == MICROS
    if "order_by" in shape:
        assert rows["i"].to_pylist() == [2, 0, 1, 3, 4]
    assert {str(pq.read_schema(file).field("at.é").type) for file in table.files} == {"int64"}
    assert [info.path for info in bridge.list_exports(tmp_path)] == [table.path]


@pytest.mark.usefixtures("int96")
@pytest.mark.parametrize("kind", ["named_struct('in', timestamp_micros(us))", "array(timestamp_micros(us))"])
def test_instants_within_others_that_are_written_as_int96_are_refused(
    apache: EngineUnderTest, kind: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=r"part-.*: column 'at\.é.*' was written as INT96, which loses years"):
        bridge.export_table(moments(apache, kind), tmp_path, spark=apache.spark)

    assert bridge.list_exports(tmp_path) == []


JULIAN = {"d": "DATE'1500-03-01'", "at": "timestamp_micros(-30000000000000000)", "now": "DATE'2024-02-29'"}


@pytest.fixture
def julian(apache: EngineUnderTest) -> Any:
    """A session that writes the calendar of before 1582, as organisations set it for the sake of older readers."""
    spark = apache.new_session("America/Los_Angeles")
    spark.conf.set("spark.sql.parquet.datetimeRebaseModeInWrite", "LEGACY")
    return spark


def test_a_session_that_writes_the_julian_calendar(julian: Any, tmp_path: Path) -> None:
    frame = julian.sql(f"SELECT {', '.join(f'{value} AS {name}' for name, value in JULIAN.items())}, NULL AS nothing")
    expected = bridge.load_table(frame, route="collect").to_arrow()

    exported = bridge.export_table(frame, tmp_path)

    assert expected["d"].to_pylist() == [dt.date(1500, 3, 1)]
    assert exported.to_arrow().equals(expected)
    assert bridge.open_export(tmp_path).to_arrow().equals(expected)


@pytest.mark.parametrize("name", ["d", "at"])
def test_a_session_that_writes_the_julian_calendar_within_others(julian: Any, name: str, tmp_path: Path) -> None:
    frame = julian.sql(f"SELECT array({JULIAN[name]}) AS days")

    with pytest.raises(ExportError, match=r"(?s)'days.*Julian"):
        bridge.export_table(frame, tmp_path)

    assert bridge.list_exports(tmp_path) == []


# --- an export that is not waited for


def test_an_export_that_is_interrupted_leaves_nothing(engine: EngineUnderTest, tmp_path: Path) -> None:
    endless = engine.spark.range(0, 10**10, 1, 1000).selectExpr("id", "sha2(CAST(id AS STRING), 256) AS text")

    is_over = threading.Event()

    def interrupt() -> None:
        eventually(lambda: is_over.is_set() or any(tmp_path.glob("*/*-*/**/*.parquet")), within_s=60)
        if not is_over.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            bridge.export_table(endless, tmp_path, spark=engine.spark)
    finally:
        is_over.set()
        thread.join()

    (parent,) = tmp_path.iterdir()
    assert [path.name for path in parent.iterdir()] == ["_leases"]
    eventually(lambda: busy_cores() < 0.5)


# --- which exports may be taken again


def test_a_view_is_taken_again_while_it_is_young_enough(engine: EngineUnderTest, name: str, tmp_path: Path) -> None:
    view = f"{name}_view"
    engine.spark.sql(f"CREATE OR REPLACE VIEW {view} AS SELECT id FROM {name} WHERE id < 10")

    def again(source: Any = view, **arguments: Any) -> str | None:
        return bridge.export_table(source, tmp_path, spark=engine.spark, **arguments).path

    first = again()
    assert again(max_age_s=3600) == first
    assert again() != first
    newest = again(max_age_s=0.01)
    assert newest != first
    assert again(max_age_s=3600, where="id < 5") not in (first, newest)
    assert again(max_age_s=3600) == newest


@pytest.mark.parametrize("of", ["frame", "temporary view", "column"])
def test_what_nobody_else_can_mean_is_never_taken_again(sail: EngineUnderTest, of: str, tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    frame = sail.spark.range(10)
    frame.createOrReplaceTempView("passing")
    arguments: dict[str, Any] = {"max_age_s": 3600}
    source = {"frame": frame, "temporary view": "passing"}.get(of) or sail.save(frame)
    if of == "column":
        arguments["where"] = F.col("id") < 5

    tables = [bridge.export_table(source, tmp_path, spark=sail.spark, **arguments) for _ in range(2)]

    assert tables[0].path != tables[1].path
    assert tables[1].plan is not None
    assert tables[1].plan.reuses is None
    sail.spark.catalog.dropTempView("passing")


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Who asks, in place of whom the server knows."""
    who = ["ann"]
    monkeypatch.setattr(Connection, "user", property(lambda _: who[0]))
    return who


def test_only_who_shares_takes_the_export_of_another(sail: EngineUnderTest, user: list[str], tmp_path: Path) -> None:
    name = sail.save(sail.spark.range(10))

    def again(who: str, **arguments: Any) -> bridge.Table:
        user[0] = who
        return bridge.export_table(name, tmp_path, spark=sail.spark, **arguments)

    anns = again("ann")
    bobs = again("bob")
    ours = again("ann", shared=True)
    assert len({anns.path, bobs.path, ours.path}) == 3
    assert bobs.plan is not None
    assert bobs.plan.reuse_reason.endswith("is for ann, this is for bob")
    assert again("bob", shared=True).path == ours.path
    assert again("ann").path == anns.path
    assert again("bob").path == bobs.path
    assert ours.receipt["user"] == "ann"


def test_an_export_made_with_other_policies_is_taken_and_read_by_those_asked_for(
    engine: EngineUnderTest, name: str, tmp_path: Path
) -> None:
    def again(**policies: Any) -> bridge.Table:
        return bridge.export_table(name, tmp_path, policies=policies or None, spark=engine.spark)

    plain = again()
    read = again(n=bridge.fill(-1), word=bridge.dictionary())
    other = again(n=bridge.mask())

    assert plain.path == read.path == other.path
    rows = read.to_arrow().sort_by("id")
    assert rows["n"].to_pylist() == [-1 if number % 10 == 0 else number for number in range(NUM_ROWS)]
    assert rows["word"].cast(pa.string()).to_pylist() == [f"w{number % 7}" for number in range(NUM_ROWS)]
    assert read.to_huggingface(streaming=False).features["word"].names == [f"w{number}" for number in range(7)]
    assert again().to_arrow().equals(plain.to_arrow())
    assert "n__valid" in other.schema.names
    # what opens it gets what it was made with
    assert bridge.open_export(tmp_path).schema == plain.schema
