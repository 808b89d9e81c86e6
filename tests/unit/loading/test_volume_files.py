from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import bridge
from bridge.errors import ConfigError, RankError, VolumeError
from bridge.loading.files import UCVolumeDataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
FILES = 41


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "files"
    for number in range(FILES):
        make(made / ("deep/er" if number % 3 else ".").strip(".") / f"{number:02}.bin", str(number))
    return made


def make(path: Path, content: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, ns=(10**18, 10**18 + 1))  # long ago, and not at a whole second


def names(paths: Any) -> list[str]:
    return [os.path.basename(path) for path in paths]


class Decoded(IterableDataset[int]):
    """Reads what it is given, and knows nothing of positions."""

    def __init__(self, files: UCVolumeDataset, times: int = 1) -> None:
        self.files = files
        self.times = times

    def __iter__(self) -> Iterator[int]:
        for path in self.files:
            yield from [int(Path(path).read_text())] * self.times


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_file_comes_once_in_equal_steps(folder: Path, world_size: int, shuffle: bool, drop_last: bool) -> None:
    seen: Counter[int] = Counter()
    steps = set()
    for rank in range(world_size):
        files = UCVolumeDataset(folder, shuffle=shuffle, drop_last=drop_last, rank=rank, world_size=world_size)
        loader = bridge.DataLoader(Decoded(files), batch_size=3)
        sizes = []
        for step, batch in enumerate(loader):
            sizes.append(len(batch))
            seen.update(batch[: loader.num_valid(step)].tolist())
        assert sum(sizes) == len(files)
        steps.add(tuple(sizes))

    assert len(steps) == 1
    assert set(seen.values()) <= {1}
    assert len(seen) == (FILES // (3 * world_size) * 3 * world_size if drop_last else FILES)


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_take_whole_batches_in_turn(folder: Path, workers: int) -> None:
    alone = [batch.tolist() for batch in bridge.DataLoader(Decoded(UCVolumeDataset(folder)), batch_size=5)]
    loader = bridge.DataLoader(Decoded(UCVolumeDataset(folder, batch_size=5)), num_workers=workers)
    assert [batch.tolist() for batch in loader] == alone

    plain: Any = torch.utils.data.DataLoader(
        Decoded(UCVolumeDataset(folder, batch_size=5)), batch_size=5, num_workers=workers
    )
    assert [batch.tolist() for batch in plain] == alone


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_goes_on_as_it_began(folder: Path, times: int, workers: int) -> None:
    def loader() -> bridge.DataLoader:
        files = UCVolumeDataset(folder, shuffle=True, batch_size=3)
        return bridge.DataLoader(Decoded(files, times), num_workers=workers)

    first = loader()
    states, batches = [first.state_dict()], []
    for batch in first:
        batches.append(batch.tolist())
        states.append(first.state_dict())
    following = [batch.tolist() for batch in first]
    for step in range(0, len(states), 6 if workers else 1):
        again = loader()
        again.load_state_dict(states[step])
        assert [batch.tolist() for batch in again] == batches[step:]
        assert [batch.tolist() for batch in again] == following


def test_paths_have_the_names_of_the_files_and_hold_their_bytes(folder: Path) -> None:
    paths = list(UCVolumeDataset(folder))

    assert sorted(names(paths)) == [f"{number:02}.bin" for number in range(FILES)]
    assert all(Path(path).read_text() == str(int(Path(path).stem)) for path in paths)
    assert not any(Path(path).is_relative_to(folder) for path in paths)


def test_files_are_chosen_by_rule(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    for name in (
        "a.jpg",
        "b.JPG",
        "c.png",
        "x/d.jpg",
        "x/y/e.jpg",
        "_SUCCESS",
        ".h.jpg",
        "_m/f.jpg",
        ".i/g.jpg",
        "k" * 251 + ".jpg",
    ):
        make(folder / name)
    (folder / "loop").symlink_to(folder)
    (folder / "x" / "link.jpg").symlink_to(folder / "a.jpg")
    strange = os.fsencode(folder) + b"/\xff.jpg"
    Path(os.fsdecode(strange)).write_bytes(b"")
    os.utime(strange, ns=(10**18, 10**18 + 1))

    every = names(UCVolumeDataset(folder, pattern="*.jpg"))
    assert every == ["a.jpg", "k" * 251 + ".jpg", "d.jpg", "link.jpg", "e.jpg", os.fsdecode(b"\xff.jpg")]
    assert names(UCVolumeDataset(folder, pattern="*.jpg", recursive=False)) == [every[0], every[1], every[-1]]
    assert names(UCVolumeDataset(folder, pattern="x/*")) == ["d.jpg", "link.jpg", "e.jpg"]


def test_one_file_and_fewer_files_than_ranks(tmp_path: Path) -> None:
    make(tmp_path / "files" / "a", "7")
    for rank in (0, 5):
        files = UCVolumeDataset(tmp_path / "files", rank=rank, world_size=6)
        assert [Path(path).read_text() for path in files] == ["7"]
        assert files.num_valid(0) == (rank == 0)


def test_what_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    make(tmp_path / "one" / "a.txt")
    for arguments, message in (
        ({"path": tmp_path / "empty", "timeout_s": 0.1}, r"holds no files after 0\.1 s; listings lag behind writes"),
        ({"path": tmp_path / "one", "pattern": "*.jpg", "timeout_s": 0}, r"holds no files that match \*\.jpg"),
        ({"path": tmp_path / "one", "expected_files": 3, "timeout_s": 0.1}, r"holds 1 files, not 3, after 0\.1 s"),
    ):
        with pytest.raises(VolumeError, match=message):
            iter(UCVolumeDataset(**arguments))
    make(tmp_path / "one" / "b.txt")
    with pytest.raises(VolumeError, match=r"holds 2 files, not 1,"):
        iter(UCVolumeDataset(tmp_path / "one", expected_files=1))
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        iter(UCVolumeDataset(tmp_path / "nowhere"))
    with pytest.raises(NotADirectoryError, match=r"a\.txt is a file"):
        iter(UCVolumeDataset(tmp_path / "one" / "a.txt"))
    for arguments, text in (
        ({"on_error": "ignore"}, 'on_error is \'ignore\'; give "raise" or "skip"'),
        ({"timeout_s": -1}, "timeout_s is -1"),
        ({"prefetch_files": 0}, "prefetch_files is 0"),
    ):
        with pytest.raises(ValueError, match=text):
            UCVolumeDataset(tmp_path, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rank= is -1"):
        UCVolumeDataset(tmp_path, rank=-1, world_size=1)


def test_a_listing_that_lags_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = threading.Timer(0.3, lambda: make(folder / "late.bin", "99"))
    timer.start()
    assert len(UCVolumeDataset(folder, expected_files=FILES + 1)) == FILES + 1
    timer.join()


@pytest.mark.parametrize("workers", [0, 2, 4])
@pytest.mark.parametrize("start", [0, 5, 7])
def test_the_file_before_takes_the_place_of_one_that_is_gone(folder: Path, workers: int, start: int) -> None:
    gone = [f"{number:02}.bin" for number in (0, 6, 7, 40)]
    files = UCVolumeDataset(folder, on_error="skip", batch_size=1)
    order = names(files)
    loader = bridge.DataLoader(UCVolumeDataset(folder, on_error="skip", batch_size=1), num_workers=workers)
    loader.load_state_dict({**files.state_dict(), "epoch": 0, "consumed": start})
    len(loader)
    for path in [*folder.rglob("*.bin")]:
        if path.name in gone:
            path.unlink()
    expected = []
    for at, name in enumerate(order):
        before = [one for one in reversed(order[:at]) if one not in gone]
        after = [one for one in order[at:] if one not in gone]
        expected.append(name if name not in gone else [*before, *after][0])

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")  # in workers too
        assert [os.path.basename(batch[0]) for batch in loader] == expected[start:]
    num_skipped = sum(name in gone for name in order[start:])
    assert loader.stats.traffic.num_skipped == num_skipped
    if not workers:
        assert [str(one.message).partition(" is skipped: ")[1] for one in told] == [" is skipped: "] * min(
            3, num_skipped
        )


def test_a_file_that_is_gone_is_an_error_that_names_it(folder: Path) -> None:
    files = UCVolumeDataset(folder)
    assert len(files) == FILES
    (folder / "00.bin").unlink()

    with pytest.raises(FileNotFoundError, match=r"00\.bin"):
        list(files)


def test_a_file_that_changed_comes_new_in_the_next_epoch(folder: Path) -> None:
    files = UCVolumeDataset(folder)
    assert min(Path(path).read_text() for path in files) == "0"
    before = files.traffic
    assert list(files)
    assert files.traffic.volume_bytes == before.volume_bytes, "later epochs come from the cache"
    (folder / "00.bin").write_text("new")

    assert max(Path(path).read_text() for path in files) == "new"


def test_workers_that_see_other_files_are_refused(folder: Path) -> None:
    class Adding(UCVolumeDataset):
        def __iter__(self) -> Iterator[str]:
            info = torch.utils.data.get_worker_info()
            if info is not None and info.id == 1:
                time.sleep(0.5)
                make(folder / "added.bin", "1")
            return super().__iter__()

    plain: Any = torch.utils.data.DataLoader(Adding(folder), batch_size=None, num_workers=2)
    with pytest.raises(RankError, match=r"found different data .*\n.*len\(dataset\) before"):
        list(plain)


def test_a_second_batch_size_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="batch_size is 4 here and 3 in UCVolumeDataset; give it once"):
        bridge.DataLoader(Decoded(UCVolumeDataset(folder, batch_size=3)), batch_size=4)
    with pytest.raises(TypeError, match="has no len"):
        len(bridge.DataLoader(Decoded(UCVolumeDataset(folder)), batch_size=4))


@pytest.mark.parametrize("made", ["{}", "bridge.DataLoader({})"])
def test_a_process_that_ends_amid_an_iteration_ends_in_silence(folder: Path, made: str) -> None:
    data = f"bridge.UCVolumeDataset({str(folder)!r})"
    code = f"import bridge\nbatches = iter({made.format(data)})\nnext(batches)\nraise SystemExit(3)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stderr) == (3, "")


def test_no_thread_is_left_when_a_loop_is_left(folder: Path) -> None:
    for _ in UCVolumeDataset(folder, prefetch_files=2):
        break

    assert not [thread for thread in threading.enumerate() if thread.name == "bridge-fetch"]
