"""An attempt becomes an export when its files are seen and hold the rows that were written, and else nothing."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bridge
from bridge.errors import ExportError, SourceError, VolumeError
from bridge.manifest import Manifest, Shard, describe_shard
from bridge.spark.shape import Shape
from bridge.spark.stream import Written, write_stream
from bridge.tables.publish import publish
from bridge.volumes.commit import attempts
from bridge.volumes.path import Place, locate
from bridge.volumes.stores import LocalStorage
from tests.exports import make_manifest

SCHEMA = pa.schema({"n": pa.int64()})


def publish_written(
    parent: Path, write: Callable[[Path], Written], *, schema: pa.Schema = SCHEMA
) -> tuple[Path, Manifest]:
    def write_into(place: Place) -> Written:
        folder = place.folder()
        folder.mkdir()
        return write(folder)

    return publish(
        locate(parent), "a" * 32, "main.ml.t", schema, write_into, lambda shards, _: make_manifest(shards, schema)
    )


def spark_file(folder: Path, task: int, start: int, stop: int, *, part: int = 0) -> Path:
    """Write a file as a task of Spark does, and return it."""
    path = folder / f"part-{task:05d}-77f47763-71cf-44c9-b5f6-d8832522fa78-c{part:03d}.zstd.parquet"
    pq.write_table(pa.table({"n": range(start, stop)}, schema=SCHEMA), path, compression="zstd")
    return path


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.parquet"))


def check_rows(folder: Path, num_rows: int) -> None:
    table = bridge.open_export(folder)
    assert table.to_arrow()["n"].to_pylist() == list(range(num_rows))
    assert [Path(file).name for file in table.files] == files_of(folder)


def check_nothing_is_left(parent: Path) -> None:
    assert attempts(LocalStorage(parent)) == []
    assert [path for path in parent.rglob("*") if path.is_file()] == []


@pytest.fixture
def later() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Return what does something in a moment, while `publish` waits."""
    timers = []

    def start(act: Callable[[], object]) -> None:
        timers.append(threading.Timer(0.4, act))
        timers[-1].start()

    yield start
    for timer in timers:
        timer.join()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.tables.publish.SEEN_S", 0.5)


# --- what is seen late


Later = Callable[[Callable[[], object]], None]


@pytest.mark.parametrize("late", [1, 3])
def test_files_that_listings_show_late_are_waited_for(tmp_path: Path, later: Later, late: int) -> None:
    (tmp_path / "elsewhere").mkdir()

    def write(folder: Path) -> Written:
        made = [spark_file(tmp_path / "elsewhere", task, 10 * task, 10 * task + 10) for task in range(3)]
        for path in made[late:]:
            path.rename(folder / path.name)
        later(lambda: [path.rename(folder / path.name) for path in made[:late]])
        return Written(30)

    check_rows(publish_written(tmp_path / "exports", write)[0], 30)


def test_a_file_that_shows_before_it_is_whole_is_waited_for(tmp_path: Path, later: Later) -> None:
    def write(folder: Path) -> Written:
        spark_file(folder, 0, 0, 10)
        whole = spark_file(folder, 1, 10, 1000)
        content = whole.read_bytes()
        os.truncate(whole, len(content) // 2)
        later(lambda: whole.write_bytes(content))
        return Written(1000)

    check_rows(publish_written(tmp_path, write)[0], 1000)


def test_files_keep_the_order_of_tasks_and_of_the_files_of_each(tmp_path: Path) -> None:
    def write(folder: Path) -> Written:
        for number, (task, part) in enumerate([(2, 0), (2, 1), (9, 0), (10, 0), (100_000, 0)]):
            spark_file(folder, task, number, number + 1, part=part)
        return Written(5)

    folder, manifest = publish_written(tmp_path, write)

    assert bridge.open_export(folder).to_arrow()["n"].to_pylist() == list(range(5))
    assert [shard.num_rows for shard in manifest.shards] == [1] * 5


def test_files_that_were_read_are_not_read_again_while_another_is_waited_for(
    tmp_path: Path, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[str] = Counter()

    def count(path: Path, *args: object) -> Shard:
        shard = describe_shard(path, *args)  # type: ignore[arg-type]
        read[path.name] += 1
        return shard

    def write(folder: Path) -> Written:
        written = write_stream([pa.table({"n": range(30)}, schema=SCHEMA)], folder, SCHEMA, Shape(num_shards=3), 30)
        first = folder / (written.names or ())[0]
        hidden = first.rename(tmp_path / "hidden")
        later(lambda: hidden.rename(first))
        return written

    monkeypatch.setattr("bridge.tables.publish.describe_shard", count)

    folder, _ = publish_written(tmp_path / "exports", write)

    assert read == dict.fromkeys(files_of(folder), 1)


@pytest.mark.usefixtures("impatient")
def test_the_wait_begins_when_the_files_that_are_seen_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = spark_file(tmp_path, 1, 10, 20)

    def slowly(path: Path, *args: object) -> Shard:
        time.sleep(0.6)  # more than is waited
        if hidden.exists():
            hidden.rename(path.with_name(hidden.name))
        return describe_shard(path, *args)  # type: ignore[arg-type]

    def write(folder: Path) -> Written:
        spark_file(folder, 0, 0, 10)
        return Written(20)

    monkeypatch.setattr("bridge.tables.publish.describe_shard", slowly)

    check_rows(publish_written(tmp_path / "exports", write)[0], 20)


# --- what tasks that failed left: https://docs.databricks.com/data/manage-table-writes


def committed(folder: Path, *added: Path, removed: tuple[Path, ...] = ()) -> bytes:
    """Write the list of a commit's files, and return it."""
    content = json.dumps({"added": [each.name for each in added], "removed": [each.name for each in removed]}).encode()
    (folder / "_committed_7153420982736152").write_bytes(content)
    return content


@pytest.mark.parametrize("is_removed", [False, True])
def test_what_a_commit_does_not_list_is_no_part_of_it(tmp_path: Path, is_removed: bool) -> None:
    def write(folder: Path) -> Written:
        made = [spark_file(folder, task, 10 * task, 10 * task + 10) for task in range(2)]
        stray = spark_file(folder, 0, 0, 7, part=1)
        (folder / "_committed_vacuum123").write_bytes(b"not ours")
        (folder / "_started_7153420982736152").touch()
        committed(folder, *made, *[stray] * is_removed, removed=(stray,) * is_removed)
        return Written(20)

    check_rows(publish_written(tmp_path, write)[0], 20)


def test_a_list_of_files_that_shows_after_them_is_waited_for(tmp_path: Path, later: Later) -> None:
    def write(folder: Path) -> Written:
        made = [spark_file(folder, task, 10 * task, 10 * task + 10) for task in range(2)]
        spark_file(folder, 0, 0, 7, part=1)
        later(lambda: committed(folder, *made))
        return Written(20)

    check_rows(publish_written(tmp_path, write)[0], 20)


def test_a_list_of_files_in_part_is_waited_for(tmp_path: Path, later: Later) -> None:
    def write(folder: Path) -> Written:
        made = [spark_file(folder, task, 10 * task, 10 * task + 10) for task in range(2)]
        spark_file(folder, 0, 0, 7, part=1)
        content = committed(folder, *made)
        path = folder / "_committed_7153420982736152"
        path.write_bytes(content[:-20])
        later(lambda: path.write_bytes(content))
        return Written(20)

    check_rows(publish_written(tmp_path, write)[0], 20)


def test_files_that_a_list_names_and_that_show_late_are_waited_for(tmp_path: Path, later: Later) -> None:
    def write(folder: Path) -> Written:
        made = [spark_file(folder, task, 10 * task, 10 * task + 10) for task in range(2)]
        spark_file(folder, 1, 10, 20, part=1)  # as many rows as the one that is missing
        hidden = made[1].rename(tmp_path / "hidden")
        committed(folder, *made)
        later(lambda: hidden.rename(made[1]))
        return Written(20)

    folder, manifest = publish_written(tmp_path / "exports", write)

    check_rows(folder, 20)
    assert manifest.shards[1].name.endswith("-c000.zstd.parquet")


# --- other rows than were written


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("written", "told"), [(9, "9 rows were written, but the files hold 10"), (11, "hold 10")])
def test_other_rows_than_were_written_are_no_export(tmp_path: Path, written: int, told: str) -> None:
    def write(folder: Path) -> Written:
        spark_file(folder, 0, 0, 10)
        return Written(written)

    with pytest.raises(ExportError, match=rf"main\.ml\.t: .*{told}\.\n.* nothing of this export is kept\. Export aga"):
        publish_written(tmp_path, write)
    check_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("impatient")
def test_files_that_are_never_seen_are_no_export(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"10 rows were written, but no file of them can be seen at .*\n  Use a volume"
    ):
        publish_written(tmp_path, lambda _: Written(10))
    check_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("content", [b"", b"PAR1 half of a file"])
def test_a_file_that_never_becomes_whole_is_no_export(tmp_path: Path, content: bytes) -> None:
    def write(folder: Path) -> Written:
        spark_file(folder, 0, 0, 10)
        spark_file(folder, 1, 10, 20).write_bytes(content)
        return Written(20)

    with pytest.raises(ExportError, match="20 rows were written, but the files hold 10"):
        publish_written(tmp_path, write)
    check_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("impatient")
def test_a_shard_of_a_stream_that_is_gone_is_no_export(tmp_path: Path) -> None:
    def write(folder: Path) -> Written:
        rows = [pa.table({"n": range(20)}, schema=SCHEMA)]
        written = write_stream(rows, folder, SCHEMA, Shape(num_shards=2), 20)
        (folder / (written.names or ())[0]).unlink()
        return written

    with pytest.raises(ExportError, match="20 rows were written, but the files hold 10"):
        publish_written(tmp_path, write)
    check_nothing_is_left(tmp_path)


def test_files_of_others_beside_a_stream_are_deleted(tmp_path: Path) -> None:
    def write(folder: Path) -> Written:
        spark_file(folder, 0, 0, 10)
        return write_stream([pa.table({"n": range(20)}, schema=SCHEMA)], folder, SCHEMA, Shape())

    check_rows(publish_written(tmp_path, write)[0], 20)


# --- no rows


def test_no_rows_are_a_file_where_spark_wrote_none(tmp_path: Path) -> None:
    schema = pa.schema({"n": pa.int64(), "wait": pa.duration("us"), "nothing": pa.null()})

    folder, _ = publish_written(tmp_path, lambda _: Written(0), schema=schema)

    assert files_of(folder) == ["part-00000.parquet"]
    assert bridge.open_export(folder).to_arrow().equals(schema.empty_table())


def test_no_rows_may_be_a_file_of_spark(tmp_path: Path) -> None:
    def write(folder: Path) -> Written:
        spark_file(folder, 0, 0, 0)
        return Written(0)

    folder, manifest = publish_written(tmp_path, write)

    check_rows(folder, 0)
    assert [shard.name for shard in manifest.shards] == files_of(folder)


# --- other types than were read


@pytest.mark.parametrize(
    ("found", "wanted", "told"),
    [
        ({"n": pa.int32()}, {"n": pa.int64()}, "column 'n' was written as int32, not as int64"),
        ({"n": pa.timestamp("us")}, {"n": pa.timestamp("us", "UTC")}, "column 'n' was written as timestamp"),
        ({"n": pa.decimal128(5, 2)}, {"n": pa.decimal128(7, 2)}, "column 'n' was written as decimal128"),
        ({"n": pa.list_(pa.float32())}, {"n": pa.list_(pa.float64())}, "column 'n' was written as list"),
        ({"m": pa.int64()}, {"n": pa.int64()}, "holds the columns m, not n"),
        ({"n": pa.int64()}, {"n": pa.int64(), "m": pa.int64()}, "holds the columns n, not n, m"),
        ({"n": pa.struct({"a": pa.int8()})}, {"n": pa.struct({"b": pa.int8()})}, "column 'n' was written as struct"),
    ],
)
def test_files_of_other_columns_are_no_export(
    tmp_path: Path, found: dict[str, pa.DataType], wanted: dict[str, pa.DataType], told: str
) -> None:
    def write(folder: Path) -> Written:
        pq.write_table(
            pa.table({name: pa.nulls(3, kind) for name, kind in found.items()}), folder / "part-00000.parquet"
        )
        return Written(3)

    with pytest.raises(ExportError, match=rf"part-00000\.parquet:? .*{told}"):
        publish_written(tmp_path, write, schema=pa.schema(wanted))
    check_nothing_is_left(tmp_path)


# --- what fails


def test_what_the_file_system_refuses_is_told_with_the_name(tmp_path: Path) -> None:
    def write(folder: Path) -> Written:
        spark_file(folder, 0, 0, 10)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(VolumeError, match=r"main\.ml\.t could not be written to .*: No space left on device\."):
        publish_written(tmp_path, write)
    check_nothing_is_left(tmp_path)


@pytest.mark.parametrize("error", [SourceError("no"), VolumeError("no"), KeyboardInterrupt("no")])
def test_other_failures_stand_as_they_are_and_leave_nothing(tmp_path: Path, error: BaseException) -> None:
    def write(folder: Path) -> Written:
        spark_file(folder, 0, 0, 10)
        raise error

    with pytest.raises(type(error), match="no"):
        publish_written(tmp_path, write)
    check_nothing_is_left(tmp_path)


def test_a_root_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "exports").write_bytes(b"a file")

    with pytest.raises(VolumeError, match=r"exports cannot be written: .*\n  Give a folder or volume you may write"):
        publish_written(tmp_path / "exports", lambda _: Written(0))


def test_what_was_left_long_ago_is_collected_by_the_next_export(tmp_path: Path) -> None:
    old = tmp_path / f"{10**12}-{'b' * 32}-0123456789ab"
    old.mkdir()
    spark_file(old, 0, 0, 10)

    made, _ = publish_written(tmp_path, lambda _: Written(0))

    assert [attempt.name for attempt in attempts(LocalStorage(tmp_path))] == [made.name]
