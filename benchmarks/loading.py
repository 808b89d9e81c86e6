"""Batches of tensors out of Parquet, beside decoding alone and beside other readers; memory; opening and resuming."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

import bridge
from benchmarks.harness import Bar, Comparison, Contender, Report, Spread, compare, in_child
from bridge.loading.order import Order
from tests.exports import make_export

_BATCH = 4096
_FILES = 8
_GROUPS = 5  # of a file
_ROWS = 2_000_000
_FEATURES = [f"f{index:02d}" for index in range(32)]
_WINDOW = 200_000
_VECTOR_ROWS = 400_000
_SAMPLES = 8_000  # that torch fetches one by one
_PREFETCH = 64 << 20


def measure(*, engine: str, rounds: int, folder: Path) -> Report:
    """Return the speed of batches beside that of decoding, the memory they take, and how soon the first is there."""
    report = Report("loading", engine)
    numbers = _write(folder / "numbers", _ROWS, _numbers, _FILES)
    _compare_readers(report, numbers, rounds)
    _compare_map_style(report, numbers, rounds)
    vectors = _write(folder / "vectors", _VECTOR_ROWS, _vectors, _FILES)
    _compare_form(
        report, "list<float>[128], shuffled", vectors, rounds, most=1 / 0.75, shuffle=True, shuffle_window=40_000
    )
    wide = _write(folder / "wide", 100_000, _wide, 2)
    _compare_form(report, "500 columns of float32", wide, rounds)
    _compare_form(report, "500 columns of float32, shuffled", wide, rounds, shuffle=True)
    strings = _write(folder / "strings", 1_000_000, _strings, 4)
    _compare_form(report, "4 columns of strings, to lists", strings, rounds)
    _compare_form(report, "4 columns of strings, to lists, shuffled", strings, rounds, shuffle=True)
    _measure_memory(report, numbers, _write(folder / "ten-times", 10 * _ROWS, _numbers, 10 * _FILES))
    _measure_opening(report, _write_many(folder / "many"), rounds)
    return report


def _numbers(rng: np.random.Generator, first: int, count: int) -> pa.Table:
    columns = {name: rng.standard_normal(count, np.float32) for name in _FEATURES}
    return pa.table({"id": np.arange(first, first + count), **columns})


def _vectors(rng: np.random.Generator, first: int, count: int) -> pa.Table:
    values = pa.array(rng.standard_normal(count * 128, np.float32))
    offsets = pa.array(np.arange(0, count * 128 + 1, 128, dtype=np.int32))
    return pa.table({"id": np.arange(first, first + count), "vector": pa.ListArray.from_arrays(offsets, values)})


def _wide(rng: np.random.Generator, first: int, count: int) -> pa.Table:
    columns = {f"f{index:03d}": rng.standard_normal(count, np.float32) for index in range(500)}
    return pa.table({"id": np.arange(first, first + count), **columns})


def _strings(rng: np.random.Generator, first: int, count: int) -> pa.Table:
    columns = {f"s{index}": pc.cast(pa.array(rng.integers(0, 1 << 60, count)), pa.string()) for index in range(4)}
    return pa.table({"id": np.arange(first, first + count), **columns})


def _write(folder: Path, rows: int, make: Callable[[np.random.Generator, int, int], pa.Table], files: int) -> Path:
    """Write an export of shards of five row groups each."""
    rng, count = np.random.default_rng(7), rows // files
    folder.mkdir()
    shards = (make(rng, index * count, count) for index in range(files))
    return make_export(folder, list(shards), row_group_rows=count // _GROUPS)[0]


def _write_many(folder: Path) -> Path:
    """Write an export of 1,000 shards of two row groups of 10,000 rows."""
    folder.mkdir()
    shard = pa.table({"id": np.arange(20_000), "x": np.ones(20_000, np.float32)})
    return make_export(folder, [shard] * 1_000, row_group_rows=10_000)[0]


def _decoded(path: Path, columns: Sequence[str] | None = None) -> int:
    """Decode all row groups; this is the limit, which does nothing with them."""
    total = 0
    for name in sorted(path.glob("*.parquet")):
        file = pq.ParquetFile(name)
        for index in range(file.num_row_groups):
            total += pc.sum(file.read_row_group(index, columns=columns, use_threads=True)["id"]).as_py()
    return total


def _summed(batches: Iterable[Any], pick: Callable[[Any], Any]) -> int:
    return sum(int(pick(batch).sum()) for batch in batches)


def _id(batch: Any) -> Any:
    return batch["id"]


def _y(batch: Any) -> Any:
    return batch[1]


def _ours(path: Path, pick: Callable[[Any], Any] = _id, **options: Any) -> Contender:
    return lambda: _summed(bridge.ParquetDataset(path, **{"batch_size": _BATCH, **options}), pick)


def _compare_readers(report: Report, path: Path, rounds: int) -> None:
    files = [str(name) for name in sorted(path.glob("*.parquet"))]
    few = ["id", *_FEATURES[:3]]
    shuffled = {"shuffle": True, "shuffle_window": _WINDOW}
    contenders: dict[str, Contender] = {
        "row groups alone": lambda: _decoded(path),
        "plain": _ours(path),
        "shuffled": _ours(path, **shuffled),
        "(X, y), shuffled": _ours(path, _y, features=_FEATURES, label="id", **shuffled),
        "4 columns alone": lambda: _decoded(path, few),
        "4 columns, shuffled": _ours(path, columns=few, **shuffled),
        "datasets, streaming": lambda: _summed(_streamed(files), _id),
    }
    if importlib.util.find_spec("ray"):
        contenders["Ray Data"] = lambda: _summed(_by_ray(files), _id)
    comparison = compare(contenders, reference="row groups alone", rounds=rounds)
    against = {name: "4 columns alone" for name in contenders if name.startswith("4 columns")}
    report.add_comparison(
        f"{_ROWS:,} rows of 32 float32 and an int64, batches of {_BATCH}", comparison, against=against
    )
    for name, least in {"plain": 0.9, "shuffled": 0.6, "(X, y), shuffled": 0.5}.items():
        report.bars.append(Bar(f"{name}: time over decoding alone", comparison.ratio(name).median, 1 / least, "x"))
    report.bars.append(_times_as_fast(comparison, "shuffled", "datasets, streaming", 2))
    if "Ray Data" in contenders:
        report.bars.append(_times_as_fast(comparison, "shuffled", "Ray Data", 5))


def _times_as_fast(comparison: Comparison, mine: str, other: str, times: float) -> Bar:
    return Bar(f"{mine}: time over {other}", comparison.ratio(mine, to=other).median, 1 / times, "x")


def _streamed(files: list[str]) -> Iterator[Any]:
    from datasets import load_dataset

    stream = load_dataset("parquet", data_files=files, split="train", streaming=True)
    return iter(stream.with_format("torch").batch(_BATCH))


def _by_ray(files: list[str]) -> Iterator[Any]:
    import ray

    ray.init(ignore_reinit_error=True, num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return iter(ray.data.read_parquet(files).iter_torch_batches(batch_size=_BATCH))


def _compare_map_style(report: Report, path: Path, rounds: int) -> None:
    from datasets import Dataset

    rows = Dataset(pq.read_table(path).slice(0, _ROWS // 4)).with_format("torch")
    options = {"batch_size": 256, "shuffle": True}

    def torchs() -> float:
        part = torch.utils.data.Subset(rows, np.random.default_rng(1).permutation(len(rows))[:_SAMPLES].tolist())
        return _timed(lambda: _summed(torch.utils.data.DataLoader(part, batch_size=256), _id)) / _SAMPLES

    def ours() -> float:
        return _timed(lambda: _summed(bridge.DataLoader(rows, **options), _id)) / len(rows)

    ours()
    rows_s = [(ours(), torchs()) for _ in range(rounds)]
    times = {"bridge": [mine for mine, _ in rows_s], "torch": [other for _, other in rows_s]}
    comparison = Comparison("torch", times)
    report.add_table(
        f"datasets, map-style, {len(rows):,} rows, shuffled, batches of 256 (torch's loader: {_SAMPLES:,} of them)",
        ("loader", "median µs a row"),
        [(name, round(1e6 * statistics.median(seconds), 2)) for name, seconds in times.items()],
    )
    report.bars.append(_times_as_fast(comparison, "bridge", "torch", 50))


def _compare_form(
    report: Report, name: str, path: Path, rounds: int, *, most: float | None = None, **options: Any
) -> None:
    contenders = {"row groups alone": lambda: _decoded(path), "bridge": _ours(path, **options)}
    comparison = compare(contenders, reference="row groups alone", rounds=rounds)
    report.add_comparison(name, comparison)
    if most is not None:
        report.bars.append(Bar(f"{name}: time over decoding alone", comparison.ratio("bridge").median, most, "x"))


def _measure_memory(report: Report, small: Path, large: Path) -> None:
    row_bytes = 4 * len(_FEATURES) + 8
    group = _ROWS // _FILES // _GROUPS
    bound = row_bytes * (_WINDOW + group + 2 * _BATCH) + _PREFETCH
    rows = []
    for name, path in (("200 MB", small), ("2 GB", large)):
        opened, once, often = (in_child("benchmarks.loading:epochs", path=str(path), count=n) for n in (0, 1, 3))
        alone = in_child("benchmarks.loading:hold_decoded", path=str(path), count=_WINDOW // group)
        over = [(child.peak_bytes - opened.peak_bytes) >> 20 for child in (once, often, alone)]
        rows.append((name, once.result >> 20, bound >> 20, *over))
        report.bars.append(Bar(f"Arrow's memory at most, {name}", once.result / bound, 1.0, "x the bound"))
        report.bars.append(Bar(f"resident memory at most, {name}", over[0] / (bound >> 20), 1.0, "x the bound"))
    headers = ("data", "Arrow's", "bound", "resident, 1 epoch", "3 epochs", "a window decoded alone and held")
    report.add_table("peak memory in MiB, shuffled, over that of a process that has read a row group", headers, rows)


def epochs(path: str, count: int) -> int:
    """Read an export so many times; return the most bytes that Arrow's pool ever held."""
    order = {"shuffle": True, "shuffle_window": _WINDOW}
    data = bridge.ParquetDataset(path, batch_size=_BATCH, prefetch_bytes=_PREFETCH, **order)
    data.row_groups.read(0)
    for _ in range(count):
        for _ in data:
            pass
    return pa.default_memory_pool().max_memory() or 0


def hold_decoded(path: str, count: int) -> int:
    """Decode all row groups of an export, and keep the last ones."""
    held: deque[pa.Table] = deque(maxlen=count)
    for name in sorted(Path(path).glob("*.parquet")):
        file = pq.ParquetFile(name)
        for index in range(file.num_row_groups):
            held.append(file.read_row_group(index))
    return len(held)


def _measure_opening(report: Report, path: Path, rounds: int) -> None:
    def first(consumed: int = 0) -> float:
        data = bridge.ParquetDataset(path, batch_size=1024, shuffle=True)
        if consumed:
            data.load_state_dict({**state, "consumed": consumed})
        return _timed(lambda: _close_after_first(data))

    data = bridge.ParquetDataset(path, batch_size=1024, shuffle=True)
    _close_after_first(data)
    state = data.state_dict()
    opened = [first() for _ in range(rounds)]
    resumed = [first(18_000_000) for _ in range(rounds)]
    ordered = [_timed(_order_many) for _ in range(rounds)]
    rows = [
        ("first batch of 1,000 shards", *_shown(opened)),
        ("first batch, resumed at 90 %", *_shown(resumed)),
        ("order of 1M row groups", *_shown(ordered)),
    ]
    report.add_table("seconds from opening", ("what", "median", "min", "max"), rows)
    report.bars += [
        Bar("first batch of 1,000 shards", statistics.median(opened), 0.5, "s"),
        Bar(
            "first batch at 90 % over that at the start",
            statistics.median(resumed) / statistics.median(opened),
            1.0,
            "x",
        ),
        Bar("order of 1M row groups", statistics.median(ordered), 0.3, "s"),
    ]


def _close_after_first(data: bridge.ParquetDataset) -> None:
    with closing(iter(data)) as batches:
        next(batches)


def _order_many() -> None:
    order = Order(
        np.full(1_000_000, 10_000), seed=1, epoch=0, shuffle=True, shuffle_window=_WINDOW, canonical_world_size=1
    )
    next(iter(order.taken(rank=0, world_size=1, consumed=0)))


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _shown(seconds: Sequence[float]) -> tuple[float, float, float]:
    spread = Spread.of(seconds)
    return round(spread.median, 3), round(spread.least, 3), round(spread.most, 3)
