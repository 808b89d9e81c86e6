from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bridge.errors import VolumeError
from bridge.volumes.cache import FileCache
from bridge.volumes.stores import LocalStorage, open_storage
from tests.volumes.cache_chaos import cache_round
from tests.volumes.mount import Volume

pytestmark = pytest.mark.fuse

KIB = 1024
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def cache(tmp_path: Path) -> FileCache:
    return FileCache(tmp_path / "cache", max_bytes=1 << 30)


def put(volume: Volume, *names: str, num_bytes: int = 10 * KIB) -> dict[str, bytes]:
    """Write files to a volume, behind its back."""
    contents = {}
    for name in names:
        contents[name] = random.Random(os.fsencode(name)).randbytes(num_bytes)
        (volume.backing / name).parent.mkdir(parents=True, exist_ok=True)
        (volume.backing / name).write_bytes(contents[name])
    return contents


def _fetch_all(cache: FileCache, folder: Path, names: Sequence[str], seed: int) -> None:
    """Fetch all files with eight threads, each in an order of its own."""
    warnings.simplefilter("error")
    storage = LocalStorage(folder)
    with cache.epoch() as epoch, ThreadPoolExecutor(8) as threads:

        def fetch_all(number: int) -> None:
            for name in random.Random(8 * seed + number).sample(names, len(names)):
                assert epoch.fetch(storage, name).stat().st_size == 10 * KIB

        list(threads.map(fetch_all, range(8)))


def test_two_processes_of_eight_workers_copy_each_file_once(
    mount_volume: Callable[..., Volume], cache: FileCache
) -> None:
    volume = mount_volume(open_us=20_000)
    contents = put(volume, *(f"class {number % 3}/{number}.jpg" for number in range(60)))
    ranks = [SPAWN.Process(target=_fetch_all, args=(cache, volume.path, list(contents), seed)) for seed in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert volume.opens() == dict.fromkeys(contents, 1)
    assert {entry.source: entry.path.read_bytes() for entry in cache.entries()} == {
        f"{volume.path}/{name}": content for name, content in contents.items()
    }


def test_names_that_only_a_volume_has(volume: Volume, cache: FileCache) -> None:
    storage = open_storage(volume.path)
    contents = put(volume, "n" * 255 + "/" + "é" * 127, os.fsdecode(b"\xff\xfe/\xe9.jpg"), "  / # % '=")
    with cache.epoch() as epoch:
        for name, content in contents.items():
            path = epoch.fetch(storage, name)
            assert (path.read_bytes(), f"{path.parent.name}/{path.name}") == (content, name)


def test_a_file_that_changes_on_the_volume(volume: Volume, cache: FileCache) -> None:
    storage = open_storage(volume.path)
    old = put(volume, "a")["a"]
    with cache.epoch() as epoch:
        before = epoch.fetch(storage, "a")
        (volume.backing / "a").write_bytes(b"new")
        assert epoch.fetch(storage, "a").read_bytes() == b"new"
        assert before.read_bytes() == old
        (volume.backing / "a").unlink()
        with pytest.raises(FileNotFoundError, match=f"{volume.path}/a"):
            epoch.fetch(storage, "a")


def test_a_file_that_changes_while_it_is_copied(mount_volume: Callable[..., Volume], cache: FileCache) -> None:
    volume = mount_volume()
    volume.slow(bytes_per_s=4 << 20, match="a")
    put(volume, "a", num_bytes=4 << 20)
    with cache.epoch() as epoch, ThreadPoolExecutor(1) as thread:
        path = thread.submit(epoch.fetch, open_storage(volume.path), "a")
        time.sleep(0.4)
        new = random.Random(1).randbytes(4 << 20)
        (volume.backing / "a").write_bytes(new)
        assert path.result().read_bytes() == new


def test_failures_that_pass_are_not_seen(volume: Volume, cache: FileCache) -> None:
    content = put(volume, "a", num_bytes=9 << 20)["a"]
    volume.fault("eio_read", times=2, match="a")
    volume.fault("eio_open", times=1, match="a")
    volume.fault("eio_stat", times=2, match="a")
    with cache.epoch() as epoch:
        assert epoch.fetch(open_storage(volume.path), "a").read_bytes() == content


@pytest.mark.parametrize("kind", ["eio_read", "eio_stat"])
def test_failures_that_last_name_the_file(volume: Volume, cache: FileCache, kind: str) -> None:
    put(volume, "a", "b")
    storage = open_storage(volume.path)
    volume.fault(kind, match="a")  # type: ignore[arg-type]
    with cache.epoch() as epoch:
        with pytest.raises(VolumeError, match=f"{volume.path}/a cannot be read: Input/output error"):
            epoch.fetch(storage, "a")
        epoch.fetch(storage, "b")
    assert [entry.source for entry in cache.entries()] == [f"{volume.path}/b"]
    assert cache.clear().num_files == 1


def test_killed_at_any_moment(mount_volume: Callable[..., Volume], tmp_path: Path) -> None:
    volume = mount_volume(bytes_per_s=50 << 20)
    for seed in range(6):
        cache_round(tmp_path / "cache", volume.path, seed)


# A cache on a file system that refuses rename and times, and that has an end


def test_a_cache_on_a_mount_that_refuses_most(mount_volume: Callable[..., Volume], tmp_path: Path) -> None:
    disk = mount_volume(capacity_bytes=100 * KIB)
    storage = LocalStorage(tmp_path / "source")
    storage.make_folder()
    cache = FileCache(disk.path / "cache", max_bytes=1 << 30, min_free_bytes=0)
    for number in range(30):
        storage.write(f"{number}", [bytes([number]) * 9 * KIB])
    for number in range(30):
        with cache.epoch() as epoch:
            path = epoch.fetch(storage, f"{number}")
            assert path.is_relative_to(disk.path)
            assert path.read_bytes() == bytes([number]) * 9 * KIB
    kept = sorted(int(entry.path.name) for entry in cache.entries())
    assert kept == list(range(kept[0], 30))  # the first that came went first
    assert len(kept) >= 8
    assert cache.clear().num_files == len(kept)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_full_disk_serves_from_the_volume_with_one_warning(
    mount_volume: Callable[..., Volume], tmp_path: Path, is_told: bool
) -> None:
    disk = mount_volume(capacity_bytes=100 * KIB, free_bytes=-1 if is_told else 1 << 40)
    storage = LocalStorage(tmp_path / "source")
    storage.make_folder()
    for number in range(30):
        storage.write(f"{number}", [bytes([number]) * 9 * KIB])
    cache = FileCache(disk.path / "cache", max_bytes=1 << 30, min_free_bytes=0)
    with cache.epoch() as epoch, pytest.warns(UserWarning, match="all that it holds is in use") as warned:
        paths = [epoch.fetch(storage, f"{number}") for number in range(30)]
    assert [path.read_bytes() for path in paths] == [bytes([number]) * 9 * KIB for number in range(30)]
    assert len(warned) == 1
    served = [path.is_relative_to(disk.path) for path in paths]
    assert served == sorted(served, reverse=True)
    assert 8 <= sum(served) <= 11
    # the parts of what did not fit were given back
    assert len(list((disk.path / "cache" / "files").iterdir())) == sum(served)


def test_a_disk_that_fills_in_the_middle_of_a_copy_makes_room(
    mount_volume: Callable[..., Volume], tmp_path: Path
) -> None:
    disk = mount_volume(capacity_bytes=10 << 20, free_bytes=1 << 40)
    storage = LocalStorage(tmp_path / "source")
    storage.make_folder()
    cache = FileCache(disk.path / "cache", max_bytes=1 << 30, min_free_bytes=0)
    for name in "abcd":
        storage.write(name, [name.encode() * (6 << 20)])
        with cache.epoch() as epoch:
            path = epoch.fetch(storage, name)
            assert path.is_relative_to(disk.path)
            assert path.read_bytes() == name.encode() * (6 << 20)
    assert [entry.path.name for entry in cache.entries()] == ["d"]


def test_a_killed_copy_on_such_a_mount(mount_volume: Callable[..., Volume], tmp_path: Path) -> None:
    disk = mount_volume(bytes_per_s=1 << 20)
    (tmp_path / "a").write_bytes(b"a" * (4 << 20))
    code = (
        "import sys; from pathlib import Path\nfrom bridge.volumes.cache import FileCache\n"
        "from bridge.volumes.stores import LocalStorage\n"
        "FileCache(Path(sys.argv[1]), max_bytes=1 << 30).epoch().fetch(LocalStorage(Path(sys.argv[2])), 'a')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, disk.path / "cache", tmp_path]) as child:
        while not any(path.stat().st_size for path in disk.path.glob("cache/files/*/*/a")):
            time.sleep(0.01)
        child.kill()
    cache = FileCache(disk.path / "cache", max_bytes=1 << 30)
    assert list(cache.entries()) == []
    disk.set(bytes_per_s=0)
    with cache.epoch() as epoch:
        assert epoch.fetch(LocalStorage(tmp_path), "a").read_bytes() == b"a" * (4 << 20)
