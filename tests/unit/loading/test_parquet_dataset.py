from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
from torch.utils.data import IterableDataset

import bridge
from bridge.errors import ConfigError, CorruptFileError, SourceNotFoundError
from tests.exports import make_export

ROWS = 203
WORKERS_WARNING = "ignore:This DataLoader will create:UserWarning"
pytestmark = pytest.mark.filterwarnings(WORKERS_WARNING)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = pa.table(
        {
            "n": np.arange(ROWS),
            "x": np.arange(ROWS, dtype=np.float32),
            "text": [f"é{n}" for n in range(ROWS)],
            "v": [[n, n + 1] for n in range(ROWS)],
            "u": np.arange(ROWS, dtype=np.uint16),
        }
    )
    return make_export(tmp_path, [table[:90], table[90:90], table[90:]], row_group_rows=13)[0]


def opened(folder: Path, **arguments: Any) -> bridge.ParquetDataset:
    return bridge.ParquetDataset(
        folder, **{"batch_size": 8, "shuffle": True, "shuffle_window": 30, "columns": ["n"], **arguments}
    )


def numbers(batches: Any) -> list[list[int]]:
    return [batch["n"].tolist() for batch in batches]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("streams", [None, 1, 6])
def test_each_row_comes_once_in_equal_steps(
    folder: Path, world_size: int, shuffle: bool, drop_last: bool, streams: int | None
) -> None:
    seen: Counter[int] = Counter()
    shapes = set()
    for rank in range(world_size):
        data = opened(
            folder, shuffle=shuffle, drop_last=drop_last, rank=rank, world_size=world_size, columns=None,
            canonical_world_size=streams,
        )  # fmt: skip
        sizes = []
        for step, batch in enumerate(data):
            sizes.append(len(batch["n"]))
            n = batch["n"]
            assert torch.equal(batch["x"], n.float())
            assert torch.equal(batch["v"], torch.stack([n, n + 1], 1))
            assert torch.equal(batch["u"].long(), n)
            assert batch["text"] == [f"é{one}" for one in n.tolist()]
            seen.update(n[: data.num_valid(step)].tolist())
        assert len(data) == len(sizes)
        shapes.add(tuple(sizes))

    assert len(shapes) == 1, "all ranks take the same steps"
    assert set(seen.values()) == {1}
    assert len(seen) == (ROWS // (8 * world_size) * 8 * world_size if drop_last else ROWS)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [(1, {}), (3, {}), (2, {"drop_last": True}), (3, {"shuffle": False, "canonical_world_size": 2}), (400, {})],
)
def test_workers_do_not_change_what_comes(
    folder: Path, world_size: int, arguments: dict[str, Any], workers: int
) -> None:
    for rank in {0, world_size // 2, world_size - 1}:
        parts = {"rank": rank, "world_size": world_size, **arguments}
        alone = bridge.DataLoader(opened(folder, **parts))
        shared = bridge.DataLoader(opened(folder, **parts), num_workers=workers, persistent_workers=True)
        assert [numbers(alone), numbers(alone)] == [numbers(shared), numbers(shared)]


def test_workers_that_are_spawned_do_not_change_it_either(folder: Path) -> None:
    loader = bridge.DataLoader(opened(folder), num_workers=1, multiprocessing_context="spawn")

    assert numbers(loader) == numbers(opened(folder))


@pytest.mark.parametrize("window", [1, 30, 1000])
def test_features_come_as_rows_of_one_matrix(folder: Path, window: int) -> None:
    rows: list[float] = []
    data = opened(folder, columns=None, features=["x", "n"], label="u", dtype="float64", shuffle_window=window)
    for x, y in data:
        assert x.dtype == torch.float64
        assert torch.equal(x[:, 0], x[:, 1])
        assert torch.equal(y.double(), x[:, 0])
        rows += x[:, 0].tolist()

    assert sorted(rows) == list(range(ROWS))


def test_padding_repeats_the_last_row_of_the_rank_or_of_all(folder: Path) -> None:
    last = opened(folder, rank=2, world_size=3, batch_size=40)
    *_, batch = last
    assert last.num_valid(len(last) - 1) == len(batch["n"]) - 1
    assert batch["n"][-1] == batch["n"][-2]

    rows = [numbers(opened(folder, rank=rank, world_size=400, batch_size=1)) for rank in (202, 203, 399)]
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("features", [None, ["n"]])
def test_padding_repeats_what_was_read_also_where_the_loop_wrote_into_the_batch(
    tmp_path: Path, shuffle: bool, features: list[str] | None
) -> None:
    folder, _ = make_export(tmp_path, [pa.table({"n": range(20)})], row_group_rows=3)
    data = opened(folder, shuffle=shuffle, features=features, batch_size=3, rank=2, world_size=3)
    expected = [batch.clone() if features else batch["n"].clone() for batch in data]
    assert data.num_valid(2) == 0
    assert expected[2].flatten().tolist() == expected[1][-1:].flatten().tolist()

    data.set_epoch(0)
    for batch, before in zip(data, expected, strict=True):
        values = batch if features else batch["n"]
        assert torch.equal(values, before)
        values.zero_()


def resumed_everywhere(make: Callable[[], Any], *, take: Callable[[Any], Any], every: int = 1) -> None:
    """Prove that a state at each step brings the same rest, and whole epochs after it; twice in a row."""
    loader = make()
    list(loader)
    states, batches = [loader.state_dict()], []
    for batch in loader:
        batches.append(take(batch))
        states.append(loader.state_dict())
    following = [take(batch) for batch in loader]
    assert sorted(map(str, following)) != sorted(map(str, batches))
    for step in range(0, len(states), every):
        again = make()
        again.load_state_dict(states[step])
        assert again.state_dict() == states[step]
        again.set_epoch(1)
        batch = next(iter(again), None)
        assert batch is None or take(batch) == batches[step]
        # the state of a resumed run resumes too
        third = make()
        third.load_state_dict(again.state_dict())
        rest = [take(batch) for batch in third]
        if batch is None:  # the epoch has ended, and its state is that of the next one
            assert rest == following
            continue
        assert rest == batches[step + 1 :]
        assert [take(batch) for batch in third] == following


@pytest.mark.parametrize("streams", [None, 6])
def test_a_resumed_epoch_goes_on_bit_for_bit(folder: Path, streams: int | None) -> None:
    resumed_everywhere(
        lambda: bridge.DataLoader(opened(folder, rank=1, world_size=3, canonical_world_size=streams)),
        take=lambda batch: batch["n"].tolist(),
    )


def test_a_dataset_alone_resumes_as_well(folder: Path) -> None:
    resumed_everywhere(lambda: opened(folder), take=lambda batch: batch["n"].tolist())


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_resume_and_later_epochs_are_whole(folder: Path, persistent: bool) -> None:
    resumed_everywhere(
        lambda: bridge.DataLoader(opened(folder), num_workers=2, persistent_workers=persistent),
        take=lambda batch: batch["n"].tolist(),
        every=9,
    )


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 8), (8, 2)])
@pytest.mark.parametrize("steps", [1, 4])
def test_another_world_size_takes_the_rest_once(folder: Path, before: int, after: int, steps: int) -> None:
    seen: Counter[int] = Counter()
    for rank in range(before):
        data = opened(folder, rank=rank, world_size=before)
        for step, batch in zip(range(steps), data, strict=False):
            seen.update(batch["n"][: data.num_valid(step)].tolist())
            state = data.state_dict()
    for rank in range(after):
        data = opened(folder, rank=rank, world_size=after, batch_size=5)
        data.load_state_dict(state)
        for step, batch in enumerate(data):
            seen.update(batch["n"][: data.num_valid(step)].tolist())

    assert seen == dict.fromkeys(range(ROWS), 1)


class Wrapped(IterableDataset[list[int]]):
    """Makes something of batches and knows nothing of positions."""

    def __init__(self, data: Any, how: str) -> None:
        self.parts = {"data": [data]}
        self.how = how

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.parts["data"][0]:
            rows = batch["n"].tolist()
            if self.how == "same":
                yield rows
            elif self.how == "some":
                if rows[0] % 2:
                    yield rows
            else:
                yield from ([row, copy] for row in rows[: rows[0] % 3] for copy in (0, 1))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["same", "some", "many"])
def test_positions_are_kept_under_datasets_that_know_nothing_of_them(folder: Path, how: str, workers: int) -> None:
    resumed_everywhere(
        lambda: bridge.DataLoader(Wrapped(opened(folder), how), num_workers=workers),
        take=lambda rows: rows,
        every=9 if workers else 1,
    )


def test_a_state_is_a_few_integers(folder: Path) -> None:
    loader = bridge.DataLoader(opened(folder))
    next(iter(loader))

    assert len(str(loader.state_dict())) < 400


def test_a_loop_that_is_left_begins_its_epoch_anew(folder: Path) -> None:
    loader = bridge.DataLoader(opened(folder))
    first = next(iter(loader))["n"].tolist()

    assert numbers(loader)[0] == first
    assert loader.epoch == 1


def test_set_epoch_keeps_the_position_of_that_epoch_alone(folder: Path) -> None:
    loader = bridge.DataLoader(opened(folder))
    whole = numbers(loader)
    loader.set_epoch(0)
    next(iter(loader))
    state = loader.state_dict()
    for epoch, expected in ((0, whole[1:]), (0, whole)):
        loader.load_state_dict(state)
        loader.set_epoch(epoch if expected != whole else 7)
        loader.set_epoch(epoch)
        assert numbers(loader) == expected


@pytest.mark.parametrize("how", ["dataset", "wrapper"])
def test_an_iteration_that_has_begun_keeps_its_epoch_and_tells_it(folder: Path, how: str) -> None:
    data = opened(folder)
    loader = bridge.DataLoader(data if how == "dataset" else Wrapped(data, "same"))
    whole = list(loader)
    loader.set_epoch(0)
    one, other = iter(loader), iter(loader)
    loader.set_epoch(5)

    assert str(next(one)) == str(next(other)) == str(whole[0])
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 8)
    assert list(map(str, one)) == list(map(str, whole[1:]))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("how", ["dataset", "wrapper"])
def test_set_epoch_amid_a_loop_is_about_the_next_one(folder: Path, workers: int, persistent: bool, how: str) -> None:
    alone = opened(folder)
    epochs = [numbers(alone) for _ in range(8)]
    data = opened(folder)
    outer = data if how == "dataset" else Wrapped(data, "same")
    loader = bridge.DataLoader(outer, num_workers=workers, persistent_workers=persistent and workers > 0)

    def got(batches: Any) -> list[list[int]]:
        return numbers(batches) if how == "dataset" else list(batches)

    batches = iter(loader)
    loader.set_epoch(5)  # maybe before any worker has begun
    first = got(batches)
    assert first == epochs[0]
    assert (loader.epoch, loader.state_dict()["epoch"]) == (5, 5)
    assert got(loader) == epochs[5]

    batches = iter(loader)
    next(batches)
    loader.set_epoch(2)
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (6, 8), "where the loop is"
    assert got(batches) == epochs[6][1:]
    batches = iter(loader)
    assert [next(batches), loader.epoch][1] == 2
    loader.load_state_dict(state)
    assert got(batches) == epochs[2][1:]
    assert got(loader) == epochs[6][1:], "a state that is loaded amid a loop is for the next one too"
    assert got(loader) == epochs[7]


def test_set_epoch_amid_a_loop_of_a_dataset_alone(folder: Path) -> None:
    data = opened(folder)
    epochs = [numbers(data) for _ in range(4)]
    data.set_epoch(0)
    for _ in data:
        data.set_epoch(3)
    assert numbers(data) == epochs[3]
    data.set_epoch(1)
    for _ in data:
        data.set_epoch(2)
        break
    assert data.epoch == 2
    assert numbers(data) == epochs[2]
    iter(data)
    data.set_epoch(1)
    assert (data.epoch, data.state_dict()["epoch"]) == (1, 1), "also where an iterator was made and never used"
    assert numbers(data) == epochs[1]


def test_workers_that_live_on_forget_a_loop_that_was_left(folder: Path) -> None:
    loader = bridge.DataLoader(opened(folder), num_workers=2, persistent_workers=True)
    alone = opened(folder)
    for steps in (1, 4, 2):
        for _ in zip(range(steps), loader, strict=False):
            pass
        loader.set_epoch(0)

    assert [numbers(loader), numbers(loader)] == [numbers(alone), numbers(alone)]


@pytest.mark.parametrize("made", ["{}", "bridge.DataLoader({})"])
def test_a_process_that_ends_amid_an_iteration_ends_in_silence(folder: Path, made: str) -> None:
    data = f"bridge.ParquetDataset({str(folder)!r}, batch_size=2)"
    code = f"import bridge\nbatches = iter({made.format(data)})\nnext(batches)\nraise SystemExit(3)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_own_loader_takes_it(folder: Path, workers: int) -> None:
    expected = [numbers(data) for data in [opened(folder)] for _ in range(3)]
    data = opened(folder)
    plain: Any = torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers, persistent_workers=workers > 0)

    assert [numbers(plain), numbers(plain)] == expected[:2], "epochs are counted on"
    data.set_epoch(2)
    assert numbers(plain) == expected[2], "set_epoch reaches workers that live on"
    if workers:
        with pytest.raises(RuntimeError, match=r"only they know where they are\.\n  Use bridge\.DataLoader"):
            data.state_dict()


def test_torchs_own_loader_takes_it_into_processes_that_it_spawns(folder: Path) -> None:
    expected = [numbers(data) for data in [opened(folder, rank=1, world_size=3)] for _ in range(3)]
    data = opened(folder, rank=1, world_size=3)
    plain: Any = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=2, persistent_workers=True, multiprocessing_context="spawn"
    )

    assert [numbers(plain), numbers(plain)] == expected[:2]
    data.set_epoch(2)
    assert numbers(plain) == expected[2]


def test_a_resumed_epoch_is_not_resumed_again_by_new_workers(folder: Path) -> None:
    data = opened(folder)
    whole = numbers(data)
    following = numbers(data)
    data.set_epoch(0)
    next(iter(data))
    state = data.state_dict()
    data.load_state_dict(state)
    plain: Any = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2)

    assert [numbers(plain), numbers(plain)] == [whole[1:], following]


def test_a_worker_that_dies_is_told(folder: Path) -> None:
    class Dying(IterableDataset[int]):
        def __init__(self) -> None:
            self.data = opened(folder)

        def __iter__(self) -> Iterator[int]:
            for batch in self.data:
                yield len(batch["n"])
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"DataLoader worker .* (exited unexpectedly|is killed by signal)"):
        list(bridge.DataLoader(Dying(), num_workers=1))


def test_memory_stays_flat_over_epochs(tmp_path: Path) -> None:
    folder, _ = make_export(tmp_path, [pa.table({"n": np.arange(100_000)})] * 2, row_group_rows=10_000)
    loader = bridge.DataLoader(opened(folder, batch_size=1000, shuffle_window=20_000))
    process = psutil.Process()
    sizes = []
    for _ in range(50):
        for batch in loader:
            assert len(batch["n"])
        sizes.append(process.memory_info().rss)

    assert max(sizes[10:]) - max(sizes[:10]) < 20e6


def test_bytes_that_differ_are_found_when_they_are_read(folder: Path) -> None:
    shard = folder / "part-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[200] ^= 1
    shard.write_bytes(content)

    with pytest.raises(CorruptFileError, match=r"part-00000\.parquet is damaged"):
        numbers(bridge.DataLoader(opened(folder)))


@pytest.mark.parametrize("workers", [0, 1])
def test_after_an_error_the_state_tells_what_was_handed_over(folder: Path, workers: int) -> None:
    expected = numbers(opened(folder))
    shard = folder / "part-00002.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    loader = bridge.DataLoader(opened(folder), num_workers=workers)
    seen: list[list[int]] = []
    with pytest.raises(CorruptFileError, match=r"part-00002\.parquet is damaged"):
        seen.extend(batch["n"].tolist() for batch in loader)
    assert 0 < len(seen) < len(expected)
    shard.write_bytes(content)

    again = bridge.DataLoader(opened(folder))
    again.load_state_dict(loader.state_dict())
    assert seen + numbers(again) == expected
    assert numbers(loader) == expected, "a loop that failed begins its epoch anew"


def test_what_is_said_twice_or_wrongly_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"batch_size is given to the loader; ParquetDataset makes the batches"):
        bridge.DataLoader(opened(folder), batch_size=4)
    with pytest.raises(ValueError, match=r"shuffle is given to the loader; give it to the ParquetDataset"):
        bridge.DataLoader(opened(folder), shuffle=True)
    with pytest.raises(TypeError, match=r"list is neither a ParquetDataset.*\n  torch\.utils\.data\.DataLoader"):
        bridge.DataLoader([1, 2])
    with pytest.raises(ValueError, match="holds 2 datasets with an order"):
        bridge.DataLoader(Wrapped([opened(folder), opened(folder)], "same"))
    with pytest.raises(ValueError, match="are about workers: give num_workers"):
        bridge.DataLoader(opened(folder), persistent_workers=True)
    with pytest.raises(ValueError, match="batch_size is None; give the rows of a batch"):
        opened(folder, batch_size=None)
    with pytest.raises(ValueError, match=r"seed is 1\.5; give a whole number"):
        opened(folder, seed=1.5)
    with pytest.raises(ValueError, match="path_or_paths is an empty list"):
        bridge.ParquetDataset([])
    for columns in ("n", [], ["n", "n"]):
        with pytest.raises(ValueError, match=r"columns is .*; give a list of column names, each once"):
            opened(folder, columns=columns)
    with pytest.raises(SourceNotFoundError, match="no column 'm' in ParquetDataset"):
        next(iter(opened(folder, columns=["m"])))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": -1, "world_size": 2}, "rank= is -1 and world_size= 2"),
        ({"rank": 2, "world_size": 2}, "rank= is 2 and world_size= 2"),
        ({"rank": 0}, "rank= is given without world_size="),
        ({"world_size": 2}, "world_size= is given without rank="),
    ],
)
def test_a_rank_that_is_none_is_refused(folder: Path, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(folder, **arguments)


def test_the_rank_is_read_when_iteration_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(folder)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert numbers(data) == numbers(opened(folder, rank=1, world_size=2))
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="WORLD_SIZE is given without RANK"):
        iter(data)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ConfigError, match="RANK is 'x' and WORLD_SIZE '2'; they must be whole numbers"):
        iter(data)


def test_states_of_something_else_are_refused(folder: Path, tmp_path: Path) -> None:
    state = opened(folder).state_dict()
    for changed, message in (
        ({"format": 7}, "the state has format 7; this version reads 1"),
        ({"seed": 5}, "taken with seed=5; this dataset has 0"),
        ({"shuffle": False}, "taken with shuffle=False"),
    ):
        with pytest.raises(ValueError, match=message):
            opened(folder).load_state_dict({**state, **changed})
    with pytest.raises(ValueError, match="canonical_world_size=4; this dataset has 2"):
        opened(folder, canonical_world_size=2).load_state_dict({**state, "canonical_world_size": 4})
    with pytest.raises(ValueError, match="the state has format 'list'"):
        opened(folder).load_state_dict([])  # type: ignore[arg-type]

    data = opened(folder)
    next(iter(data))
    other = opened(make_export(tmp_path / "other", [pa.table({"n": [1]})])[0])
    other.load_state_dict(data.state_dict())
    with pytest.raises(ValueError, match="the state was taken over other data than ParquetDataset"):
        iter(other)


def test_a_wrappers_position_needs_as_many_workers(folder: Path) -> None:
    loader = bridge.DataLoader(Wrapped(opened(folder), "some"), num_workers=2)
    for _ in loader:
        break
    alone = bridge.DataLoader(Wrapped(opened(folder), "some"))
    alone.load_state_dict(loader.state_dict())
    with warnings.catch_warnings(), pytest.raises(ValueError, match=r"Resume with num_workers=2"):
        iter(alone)


def test_a_wrappers_position_is_that_of_its_rank(folder: Path) -> None:
    loader = bridge.DataLoader(Wrapped(opened(folder, rank=1, world_size=2), "some"))
    for _ in loader:
        break
    for rank, world_size in ((0, 2), (1, 3)):
        other = bridge.DataLoader(Wrapped(opened(folder, rank=rank, world_size=world_size), "some"))
        other.load_state_dict(loader.state_dict())
        with pytest.raises(ValueError, match=rf"of rank 1 of 2, .* this is rank {rank} of {world_size}\.\n  Give each"):
            iter(other)


def test_stats_tell_where_the_time_went(folder: Path) -> None:
    loader = bridge.DataLoader(opened(folder))
    assert loader.stats.advice == "Nothing was iterated over yet."
    for _ in loader:
        pass
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert loader.stats.num_batches == len(loader)
    assert 0.4 * size < loader.stats.traffic.volume_bytes <= size
    assert "read fewer columns" in loader.stats.advice
    for options in ({"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        others: Any = bridge.DataLoader(loader.dataset, **options)
        for _ in range(2):
            for _ in others:
                pass
            assert 0.8 * size < others.stats.traffic.volume_bytes <= 2 * size, "of this iteration, in both workers"
    loader.stats.compute_s = 1000
    assert "The training step sets the pace: 0%" in str(loader.stats)


def test_batches_are_moved_to_a_device(folder: Path) -> None:
    batch = next(iter(bridge.DataLoader(opened(folder, columns=None), device="meta", pin_memory=True)))

    assert batch["n"].device.type == "meta"
    assert len(batch["text"]) == 8


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    folder, _ = make_export(tmp_path, [pa.table({"n": range(10)})])
    one = np.int64(1)
    data = bridge.ParquetDataset(folder, batch_size=4 * one, seed=one, shuffle_window=5 * one, canonical_world_size=one)
    assert [len(batch["n"]) for batch in data] == [4, 4, 2]
    json.dumps(data.state_dict())
