"""What ranks call in tests; `tests.ranks` starts them. Every rank runs the whole function."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch.distributed as dist

import bridge
from bridge import distributed
from bridge.distributed import from_rank_0, on_every_rank, rank
from bridge.manifest import Manifest
from bridge.tables import ranks
from bridge.tables import rows as rows_module
from tests.exports import make_export
from tests.ranks import digest, tables, tell

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LATE_S = 1.0


class OddError(Exception):
    """An error that can be pickled, and not read back."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


def fail(error: BaseException) -> Any:
    raise error


def in_turn(folder: str) -> None:
    """Do all that needs no engine; rank 2 alone survives."""
    dist.init_process_group("gloo")
    dist.new_group([0, 1])
    values_and_errors()
    rows("over gloo")
    exports(Path(folder))
    dist.destroy_process_group()

    # a backend that moves nothing, as that of a GPU moves nothing in the memory of a CPU
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    port = int(os.environ["OTHER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=RANK == 0)
    dist.init_process_group("fake", store=store, rank=RANK, world_size=WORLD_SIZE)
    rows("beside another backend")
    tell("groups", lambda: len(dist.distributed_c10d._world.pg_map))
    dist.destroy_process_group()

    distributed.LOST_S, distributed._BEAT_S = 1.5, 0.3
    dist.init_process_group("gloo", f"file://{folder}/store", rank=RANK, world_size=WORLD_SIZE)
    # rank 0 works for longer than the others would wait for a sign of life
    tell("long", lambda: from_rank_0(lambda: time.sleep(2.5), what="f()"))
    tell("lost", lambda: from_rank_0(die, what="f()"))
    dist.destroy_process_group()

    dist.init_process_group("gloo", rank=RANK - 1, world_size=WORLD_SIZE - 1)
    tell("lost with the store", lambda: from_rank_0(die, what="f()"))
    os._exit(0)  # what is left of the group could not be taken down in order


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def values_and_errors() -> None:
    tell("numbers", lambda: [distributed.rank(), distributed.world_size(), distributed.local_world_size()])
    tell("value", lambda: from_rank_0(lambda: {"made on": rank()}, what="f()"))
    tell("large", lambda: len(from_rank_0(lambda: bytes(9 << 20), what="f()")))
    error = bridge.SourceNotFoundError("no table t\n  near: u")
    tell("error", lambda: from_rank_0(lambda: fail(error), what="f()"))
    tell("odd error", lambda: from_rank_0(lambda: fail(OddError(7, "odd")), what="f()"))
    tell("odd value", lambda: from_rank_0(lambda: lambda: None, what="f()"))
    tell("exit", lambda: from_rank_0(lambda: fail(SystemExit(3)), what="f()"))
    tell("other arguments", lambda: from_rank_0(int, what="f()", arguments={"a": "1", "b": str(rank() // 2)}))
    tell("other call", lambda: from_rank_0(int, what="g()" if rank() == 1 else "f()"))
    tell("own part", lambda: on_every_rank(lambda: fail(OSError(f"no room on {rank()}")) if rank() else 0, what="f()"))
    tell("all parts", lambda: on_every_rank(lambda: rank() * 10, what="f()"))

    distributed.ARRIVAL_S = LATE_S
    time.sleep(3 * LATE_S if rank() == 2 else 0)
    tell("rank 2 late", lambda: from_rank_0(int, what="f()"))
    time.sleep(0 if rank() else 2.5 * LATE_S)
    tell("rank 0 late", lambda: from_rank_0(int, what="f()"))
    distributed.ARRIVAL_S = 60.0
    tell("in step", lambda: from_rank_0(lambda: "again", what="f()"))

    store = dist.distributed_c10d._get_default_store()

    def repeat() -> list[int]:
        before = from_rank_0(store.num_keys, what="count")
        for number in range(200):
            assert from_rank_0(lambda number=number: number, what="f()") == number
        return [before, from_rank_0(store.num_keys, what="count")]

    tell("200 calls", repeat)


def rows(name: str) -> None:
    rows_module._CHUNK_BYTES = 1000

    def received() -> list[Any]:
        found = [rows_module.broadcast_rows(None if rank() else table, what="f()") for table in tables()]
        return [[digest(table), [batch.num_rows for batch in table.to_batches()]] for table in found]

    tell(name, received)


def exports(folder: Path) -> None:
    late = folder / "late"

    def load(export: Callable[[], bridge.Table]) -> Any:
        table = ranks.shared(export, "load_table", {"source": "t"})
        return [table.path, table.num_rows, *table.to_arrow()["n"].to_pylist()[298:302]]

    def made() -> tuple[Path, Manifest]:
        return make_export(folder, [pa.table({"n": range(300)}), pa.table({"n": range(300, 307)})])

    def show_late() -> bridge.Table:
        found, manifest = made()

        def show() -> None:
            late.mkdir()
            # the marker first
            for file in sorted(found.iterdir()):
                time.sleep(LATE_S / 2)
                shutil.copy(file, late)

        threading.Thread(target=show).start()
        return bridge.Table.exported(late, manifest)

    def here() -> bridge.Table:
        found, manifest = made()
        os.chdir(folder)
        # this path leads to another folder on each rank, as that of a machine's own disk does
        return bridge.Table.exported(Path("/proc/self/cwd", found.name), manifest)

    tell("late", lambda: load(show_late))
    ranks.SEEN_S = 0.5
    tell("elsewhere", lambda: load(here))


def loads(table: str, folder: str) -> None:
    dist.init_process_group("gloo")

    def told(table: bridge.Table) -> Any:
        row_counts = table._row_groups.row_counts
        return [table.route, table.path, digest(table.to_arrow()), row_counts, str(table.plan), table.receipt]

    policies = {"n": bridge.fill(0), "word": bridge.dictionary()}
    tell("collect", lambda: told(bridge.load_table(table, columns=["word", "n"], policies=policies)))
    tell("export", lambda: told(bridge.load_table(table, route="export", volume=folder)))
    tell("reuse", lambda: told(bridge.export_table(table, folder)))
    tell("no table", lambda: bridge.load_table(f"{table}_not"))
    tell("other columns", lambda: bridge.load_table(table, columns=["n" if rank() == 5 else "word"]))
    tell("plan", lambda: bridge.plan_table(table).route if rank() == 0 else None)
    tell("spark", lambda: "pyspark" in sys.modules)
    dist.destroy_process_group()


def loading(folder: str) -> None:
    """Load what does not divide by the ranks, all_reduce at each step, and differ in what must be equal."""
    import torch

    dist.init_process_group("gloo")

    def steps(loader: Any) -> list[Any]:
        seen, counts = [], []
        for step, batch in enumerate(loader):
            rows = batch["n"].tolist() if isinstance(batch, dict) else list(map(os.path.basename, batch))
            total = torch.tensor(len(rows))
            dist.all_reduce(total)
            counts.append(int(total))
            seen += rows[: loader.num_valid(step)]
        return [seen, counts]

    data = Path(folder, "data")
    tell("rows", lambda: steps(bridge.DataLoader(bridge.ParquetDataset(data, batch_size=4, shuffle=True))))
    files = Path(folder, "files")
    tell("files", lambda: steps(bridge.DataLoader(bridge.UCVolumeDataset(files, shuffle=True), batch_size=2)))
    tell("workers", lambda: steps(bridge.DataLoader(bridge.UCVolumeDataset(files), batch_size=2, num_workers=2)))
    few = bridge.ParquetDataset(data, batch_size=100)
    tell("few", lambda: steps(bridge.DataLoader(few)))
    for name, arguments in (
        ("seed", {"seed": RANK, "shuffle": True}),
        ("batch_size", {"batch_size": 4 + (RANK == 1)}),
        ("columns", {"columns": ["n", "x"][: 1 + RANK % 2]}),
    ):
        tell(name, lambda given=arguments: list(bridge.ParquetDataset(data, **given)))  # type: ignore[misc]
    other = Path(folder, "other") if RANK == 2 else data
    tell("digest", lambda: list(bridge.ParquetDataset(other)))
    plain = torch.utils.data.DataLoader(bridge.UCVolumeDataset(files), batch_size=None, num_workers=1)
    tell("unlisted", lambda: list(plain))
    if RANK == 0:
        shutil.rmtree(files)
    dist.barrier()
    tell("gone", lambda: len(bridge.UCVolumeDataset(files)))
    dist.destroy_process_group()


def coverage(folder: str) -> None:
    """Compare what epochs held with the files, all ranks together."""
    import copy
    from dataclasses import asdict

    dist.init_process_group("gloo")

    def report(data: Any, batches: Any = None) -> Any:
        found = bridge.verify_epoch(data, batches)
        return [found.is_complete, str(found), asdict(found)]

    def opened(**arguments: Any) -> bridge.ParquetDataset:
        return bridge.ParquetDataset(Path(folder, "data"), **{"batch_size": 4, "shuffle": True, **arguments})

    def got(**arguments: Any) -> list[Any]:
        return copy.deepcopy(list(opened(**arguments)))

    is_last = RANK == WORLD_SIZE - 1
    for name, arguments in (
        ("plain", {}), ("files in order", {"shuffle": False}), ("drop_last", {"drop_last": True}),
        ("few", {"batch_size": 100}), ("X and y", {"features": ["x"], "label": "n"}), ("text", {"columns": ["text"]}),
    ):  # fmt: skip
        tell(name, lambda given=arguments: report(opened(**given)))  # type: ignore[misc]
        tell(f"{name}, of a loop", lambda given=arguments: report(opened(**given), got(**given)))  # type: ignore[misc]
    tell("loader", lambda: report(bridge.DataLoader(opened(), num_workers=1)))
    tell("one row", lambda: report(bridge.ParquetDataset(Path(folder, "one.parquet"))))
    tell("one row, of no loop", lambda: report(bridge.ParquetDataset(Path(folder, "one.parquet")), []))
    tell("alone", lambda: report(opened(rank=0, world_size=1)) if is_last else None)

    batches = got()
    tell("batch", lambda: [batches[1]["n"].tolist(), batches[2]["n"].tolist()])
    tell("missing", lambda: report(opened(), batches[: 1 + (not is_last)] + batches[2:]))
    tell("double", lambda: report(opened(), batches[: 3 - (RANK == 0)] + batches[1 + is_last :]))
    if is_last:
        batches[1]["x"][2] = -0.0
    tell("changed", lambda: report(opened(), batches))
    tell("fewer", lambda: report(opened(drop_last=True), batches[:-1][not is_last :]))
    tell("other data", lambda: report(opened(rank=RANK, world_size=WORLD_SIZE + 1)))
    tell("wrong", lambda: report(opened(), [{"n": 3}] if is_last else batches))

    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    dist.destroy_process_group()
    port = int(os.environ["OTHER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=RANK == 0)
    dist.init_process_group("fake", store=store, rank=RANK, world_size=WORLD_SIZE)
    tell("beside another backend", lambda: report(opened(drop_last=True)))
    tell("groups", lambda: len(dist.distributed_c10d._world.pg_map))
    dist.destroy_process_group()


def resolving() -> None:
    """Ask for the rank where the environment tells of another."""
    dist.init_process_group("gloo")
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "7", "8"
    tell("group", distributed.resolve_rank)
    tell("given", lambda: distributed.resolve_rank(4, 5))
    dist.destroy_process_group()
    tell("environment", distributed.resolve_rank)
