"""Exporters that are killed, and what must be so afterwards."""

from __future__ import annotations

import io
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

import bridge
from bridge.manifest import Manifest, Shard
from bridge.spark import stream
from bridge.spark.channel import import_client
from bridge.spark.engines.process import free_port, serve
from bridge.spark.shape import Shape
from bridge.tables import publish
from bridge.tables.inventory import verify_export
from bridge.volumes.commit import attempts, collect_garbage, complete_attempts, delete_attempt
from bridge.volumes.path import Place, locate
from bridge.volumes.stores import LocalStorage
from tests.exports import make_manifest
from tests.processes import eventually
from tests.volumes.commit_chaos import Killing, Report, ended, events_and_status, forked

ROWS = pa.table({"id": range(3000), "text": [f"row {number} é" for number in range(3000)]})


def export_round(remote: str, table: Path, root: Path, seed: int, *, longest_s: float = 0.8) -> int:
    """Kill two processes that export a table, each at a random moment; return how many exports they had completed.

    Nothing of `bridge` may have spoken to a server in this process, which forks.

    Raises:
        AssertionError: As of `check_exports`.
    """
    root.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    living = dict(forked(partial(_export_on, remote, table, root, seed * 10 + number)) for number in range(2))
    events: list[str] = []
    try:
        for pid in list(living):
            assert os.read(living[pid], len("ready\n")) == b"ready\n"
            time.sleep(rng.uniform(0, longest_s))
            os.kill(pid, signal.SIGKILL)
            events += ended(pid, living.pop(pid), expected=-signal.SIGKILL)
    finally:
        for pid, reader in living.items():
            os.kill(pid, signal.SIGKILL)
            events_and_status(pid, reader)
    check_exports(root, events)
    return len(events)


@contextmanager
def served_table(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the address of a Sail server, and the folder of a Delta table that holds ROWS."""
    import_client()  # once, for all that are forked
    port = free_port()
    remote, table = f"sc://127.0.0.1:{port}", folder / "table"
    server = serve(
        [sys.executable, "-m", "pysail", "spark", "server", "--ip", "127.0.0.1", "--port", str(port)],
        name="Sail",
        environment=os.environ | {"RUST_LOG": "error"},
        port=port,
        remote=remote,
        scratch=Path(tempfile.mkdtemp(prefix="bridge-sail-")),
        timeout_s=60,
    )
    try:
        ended(*forked(partial(_save, remote, table)), expected=0)
        yield remote, table
    finally:
        server.stop()


def publish_at_every_step(root: Path, *, every: int = 1) -> int:
    """Kill an exporter before, in and after each of its effects in turn, then check; return how many steps there were.

    Args:
        every: 2 for every second step, and so on.

    Raises:
        AssertionError: As of `check_exports`.
    """
    events = ended(*forked(partial(publish_one, locate(root / "t"))), expected=0)
    for step in itertools.count(0, every):
        more, status = events_and_status(*forked(partial(_publish_and_die, root, step)))
        check_exports(root, events + more)
        events = []
        if status == 0:
            assert more, "the one that lived has exported nothing"
            return step
        assert status == -signal.SIGKILL, status
    raise AssertionError


def check_exports(root: Path, events: list[str]) -> None:
    """Check that what is complete is whole, what was returned is there, and what is left can be collected.

    Afterwards only the newest two exports are left.

    Raises:
        AssertionError: It is not so.
    """
    complete = [Path(info.path) for info in bridge.list_exports(root) if info.state == "complete"]
    for path in complete:
        _check_export(path)
    if complete:
        assert Path(bridge.open_export(root).path or "") in complete
    done = {event.removeprefix("exported ") for event in events}
    assert not (lost := done - {path.name for path in complete}), f"lost: {lost}"

    for folder in root.iterdir():
        storage = LocalStorage(folder)
        collect_garbage(storage, grace_s=0)
        kept = {attempt.name for attempt in attempts(storage)}
        assert kept == {path.name for path in complete if path.parent == folder}, f"garbage: {kept}"
        eventually(lambda: not list(storage.list("_leases")))  # noqa: B023 - called at once; our own end soon
        assert {entry.name for entry in storage.list()} == kept | {"_leases"}
        for attempt, _ in list(complete_attempts(storage))[2:]:
            delete_attempt(storage, attempt)


def _check_export(path: Path) -> None:
    table = bridge.open_export(path)
    assert table.to_arrow().sort_by("id").equals(ROWS), f"half visible: {path}"
    assert sorted(map(str, path.glob("*.parquet"))) == sorted(table.files)
    assert verify_export(path).is_whole


def _save(remote: str, table: Path, _: Report) -> None:
    frame = bridge.connect(remote).range(len(ROWS)).selectExpr("id", "concat('row ', id, ' é') AS text")
    frame.write.format("delta").save(str(table))


def _export_on(remote: str, table: Path, root: Path, seed: int, report: Report) -> None:
    spark = bridge.connect(remote)
    rng = random.Random(seed)
    report("ready")
    while True:
        shape: dict[str, Any] = {"num_shards": rng.randint(1, 3), "row_group_bytes": rng.choice(("16KiB", "64MiB"))}
        shape |= rng.choice(({}, {"order_by": "text"}, {"shuffle_at_write": seed}))
        # the log of a table is not read for a server that may be elsewhere
        shape |= rng.choice(({"reuse": False}, {"max_age_s": 3600}))
        made = bridge.export_table(table, root, spark=spark, **shape)
        report(f"exported {Path(made.path or '').name}")


def publish_one(parent: Place, report: Report) -> None:
    """Export ROWS in two shards, beside a file that is no part of them."""

    def write_rows(place: Place) -> stream.Written:
        folder = place.folder()
        folder.mkdir()
        (folder / "stranger.parquet").write_bytes(b"PAR1")
        return stream.write_stream([ROWS[:1000], ROWS[1000:]], folder, ROWS.schema, Shape(num_shards=2), len(ROWS))

    def describe(shards: Sequence[Shard], _: Path) -> Manifest:
        return make_manifest(shards, ROWS.schema, identity="chaos")

    folder, _ = publish.publish(parent, "chaos", "t", ROWS.schema, write_rows, describe)
    report(f"exported {folder.name}")


def _publish_and_die(root: Path, step: int, report: Report) -> None:
    killing: Any = Killing(LocalStorage(root / "t"), step)

    class File(io.FileIO):
        """Takes what it is given in two halves."""

        def write(self, data: Any) -> int:
            view = memoryview(data).cast("B")
            killing.step()
            for half in (view[: len(view) // 2], view[len(view) // 2 :]):
                super().write(half)
                killing.step()
            return len(view)

    # this process ends with its names
    publish.LocalStorage = lambda _: killing  # type: ignore[assignment, misc]
    pa.OSFile = File
    stream.flush_file = killing.around(stream.flush_file)
    Path.unlink = killing.around(Path.unlink)  # type: ignore[method-assign]
    publish_one(locate(root / "t"), report)


# --- exporters that race


def race(remote: str, table: str, root: Path, num_exporters: int) -> None:
    """Export the same table from several processes at once, then again; check that all end with the same rows.

    Raises:
        AssertionError: One failed, a complete export holds other rows, or they do not take the same one afterwards.
    """
    start = root.with_name(f"{root.name}.start")
    racers = [forked(partial(_export_once, remote, table, root, start)) for _ in range(num_exporters)]
    for _, reader in racers:
        assert os.read(reader, len("ready\n")) == b"ready\n"
    start.touch()
    paths = [event for racer in racers for event in ended(*racer, expected=0)]
    assert len(paths) == num_exporters
    for path in paths:
        _check_export(Path(path))

    (newest,) = {bridge.open_export(root).path}
    late = [forked(partial(_export_once, remote, table, root, start)) for _ in range(2)]
    assert [event for one in late for event in ended(*one, expected=0)] == ["ready", newest] * 2
    (folder,) = (path for path in root.iterdir())
    collect_garbage(LocalStorage(folder), grace_s=0)
    assert {attempt.name for attempt in attempts(LocalStorage(folder))} == {Path(path).name for path in paths}


def _export_once(remote: str, table: str, root: Path, start: Path, report: Report) -> None:
    spark = bridge.connect(remote)
    report("ready")
    eventually(start.exists)
    report(bridge.export_table(table, root, num_shards=2, max_age_s=3600, spark=spark).path or "")


if __name__ == "__main__":
    import_client()
    for number in map(int, sys.argv[4:]):
        race(sys.argv[1], sys.argv[2], Path(sys.argv[3]) / f"by {number}", number)
