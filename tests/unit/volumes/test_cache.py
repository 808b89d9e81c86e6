from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from bridge.errors import ConfigError, VolumeError
from bridge.volumes import cache as cache_module
from bridge.volumes import pins
from bridge.volumes.cache import Epoch, FileCache
from bridge.volumes.entry import list_entries
from bridge.volumes.storage import Entry, Storage
from bridge.volumes.stores import FsspecStorage, LocalStorage, open_storage

KIB = 1024
TAKES = 24 * KIB  # what the copy of a file of 10 KiB takes on the disk
FULL = "all that it holds is in use; max_bytes is 1.0 KiB, and 0 B of its disk are kept free"
PLAIN = multiprocessing.get_context("spawn")


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    (tmp_path / "volume" / "cats").mkdir(parents=True)
    return LocalStorage(tmp_path / "volume")


@pytest.fixture
def cache(tmp_path: Path) -> FileCache:
    return FileCache(tmp_path / "cache", max_bytes=10 * TAKES, min_free_bytes=0)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Storage]:
    opened = open_storage(f"memory://{tmp_path.name}")
    assert isinstance(opened, FsspecStorage)
    yield opened
    opened._filesystem.store.clear()


def put(storage: LocalStorage, name: str, content: bytes = b"content", *, hour: int = 0) -> bytes:
    """Write a file; each hour gives it a time of its own."""
    storage.path(name).write_bytes(content)
    os.utime(storage.path(name), (hour * 3600, hour * 3600))
    return content


def cached(cache: FileCache) -> list[str]:
    return sorted(entry.source.rpartition("/")[2] for entry in cache.entries())


def folders(cache: FileCache) -> list[Path]:
    return sorted((cache.folder / "files").iterdir())


def from_cache(cache: FileCache, path: Path) -> bool:
    return path.is_relative_to(cache.folder)


# Copies


@pytest.mark.parametrize(
    "name",
    [
        "cats/tom.jpg",
        "tom.jpg",
        "cats/empty",
        "cats/" + "n" * 255,
        "cats/ümläut #%=' .jpg",
        os.fsdecode(b"cats/\xff\xfe.bin"),
    ],
)
def test_a_copy_has_the_bytes_and_the_names_of_its_file(storage: LocalStorage, cache: FileCache, name: str) -> None:
    content = put(storage, name, b"" if name == "cats/empty" else os.urandom(5000))
    with cache.epoch() as epoch:
        path = epoch.fetch(storage, name)
        assert path.read_bytes() == content
    assert from_cache(cache, path)
    assert (path.name, path.parent.name) == (storage.path(name).name, storage.path(name).parent.name)
    (entry,) = cache.entries()
    assert (entry.source, entry.num_bytes, entry.path) == (
        str(storage.path(name)),
        12 * KIB if not content else 20 * KIB,
        path,
    )


def test_a_folder_named_as_the_record_gets_another_name(storage: LocalStorage, cache: FileCache) -> None:
    storage.make_folder("entry.json")
    put(storage, "entry.json/a", b"x")
    with cache.epoch() as epoch:
        path = epoch.fetch(storage, "entry.json/a")
    assert (path.read_bytes(), path.parent.name) == (b"x", "_")


def test_a_file_of_many_blocks(storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.volumes.source._BLOCK", 1000)
    content = put(storage, "a", os.urandom(9001))
    cache = FileCache(tmp_path / "cache", max_bytes=9001)
    with cache.epoch() as epoch:
        assert epoch.fetch(storage, "a").read_bytes() == content


def test_addresses_are_copied_too(memory: Storage, cache: FileCache) -> None:
    memory.write("cats/a.jpg", [b"abc"])
    with cache.epoch() as epoch:
        path = epoch.fetch(memory, "cats/a.jpg")
    assert (path.read_bytes(), path.parent.name, from_cache(cache, path)) == (b"abc", "cats", True)


def test_a_copy_is_made_once(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a", b"abc")
    status = storage.status("a")
    with cache.epoch() as epoch:
        first = epoch.fetch(storage, "a", status)
    storage.delete("a")
    with cache.epoch() as epoch:
        assert epoch.fetch(storage, "a", status) == first
        assert first.read_bytes() == b"abc"


def test_only_the_user_can_look_into_the_cache(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a")
    with cache.epoch() as epoch:
        epoch.fetch(storage, "a")
        assert {(cache.folder / name).stat().st_mode & 0o777 for name in ("files", "pins")} == {0o700}


# Files that change, go away or fail


def test_a_changed_file_is_copied_anew_and_the_old_copy_stays_for_the_epoch(
    storage: LocalStorage, cache: FileCache
) -> None:
    put(storage, "a", b"old", hour=1)
    with cache.epoch() as epoch:
        old = epoch.fetch(storage, "a")
        put(storage, "a", b"new", hour=2)
        with cache.epoch() as later:
            assert later.fetch(storage, "a").read_bytes() == b"new"
        assert old.read_bytes() == b"old"
        assert [entry.path for entry in cache.clear().kept] == [old]


def test_a_listing_that_is_out_of_date_does_no_harm(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a", b"old content", hour=1)
    status = storage.status("a")
    put(storage, "a", b"new", hour=2)
    with cache.epoch() as epoch:
        assert epoch.fetch(storage, "a", status).read_bytes() == b"new"
        # what listings of mounts tell: nothing
        assert epoch.fetch(storage, "a", Entry("a", False)).read_bytes() == b"new"


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_file_that_is_gone_is_named(storage: LocalStorage, cache: FileCache, is_listed: bool) -> None:
    put(storage, "cats/gone")
    status = storage.status("cats/gone") if is_listed else None
    storage.delete("cats/gone")
    with cache.epoch() as epoch, pytest.raises(FileNotFoundError, match=f"{storage}/cats/gone"):
        epoch.fetch(storage, "cats/gone", status)
    assert cached(cache) == []


@pytest.mark.parametrize("name", ["/etc/passwd", "../volume/a", "cats/../a"])
def test_a_name_that_leads_elsewhere_is_refused(storage: LocalStorage, cache: FileCache, name: str) -> None:
    put(storage, "a")
    with cache.epoch() as epoch, pytest.raises(ValueError, match=f"name is '{name}'; give the name of a file in"):
        epoch.fetch(storage, name)


def test_a_folder_is_refused(storage: LocalStorage, cache: FileCache) -> None:
    with cache.epoch() as epoch, pytest.raises(IsADirectoryError, match=f"{storage}/cats"):
        epoch.fetch(storage, "cats")


class OtherStorage(LocalStorage):
    """A folder whose files are said to be something else."""

    def __init__(self, folder: Path, tell: Callable[[Entry], Entry], *, is_local: bool = True) -> None:
        super().__init__(folder)
        self.tell = tell
        self.is_local = is_local

    @property
    def folder(self) -> Path | None:  # type: ignore[override]
        return super().folder if self.is_local else None

    def status(self, name: str) -> Entry:
        return self.tell(super().status(name))


def test_a_file_that_never_rests_is_named(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a")
    restless = OtherStorage(storage.folder, lambda found: Entry("a", False, found.num_bytes, time.monotonic_ns()))
    with cache.epoch() as epoch, pytest.raises(VolumeError, match="volume/a changed 5 times while it was copied"):
        epoch.fetch(restless, "a")
    assert folders(cache) == []


def test_a_file_that_is_shorter_than_its_status_is_not_kept(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a")
    longer = OtherStorage(storage.folder, lambda found: Entry("a", False, 100, 1))
    with cache.epoch() as epoch, pytest.raises(VolumeError, match="changed 5 times"):
        epoch.fetch(longer, "a")
    assert folders(cache) == []


def test_a_file_without_a_size_is_refused(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a")
    silent = OtherStorage(storage.folder, lambda found: Entry("a", False))
    with (
        cache.epoch() as epoch,
        pytest.raises(VolumeError, match=r"volume/a cannot be copied: .* does not tell its size"),
    ):
        epoch.fetch(silent, "a")


def test_a_file_without_a_time_is_copied_in_each_epoch(storage: LocalStorage, cache: FileCache) -> None:
    timeless = OtherStorage(storage.folder, lambda found: Entry("a", False, found.num_bytes))
    put(storage, "a", b"old")
    with cache.epoch() as epoch:
        old = epoch.fetch(timeless, "a")
        assert epoch.fetch(timeless, "a") == old
        put(storage, "a", b"new")
        with cache.epoch() as later:
            assert later.fetch(timeless, "a").read_bytes() == b"new"
        # also by the workers of that epoch
        assert pickle.loads(pickle.dumps(epoch)).fetch(timeless, "a") == old


@pytest.mark.parametrize(("age_s", "content"), [(0, b"new"), (10, b"old")])
def test_a_change_within_a_tick_of_a_clock_of_seconds_is_seen(
    storage: LocalStorage, cache: FileCache, age_s: int, content: bytes
) -> None:
    modified = int(time.time()) - age_s
    for each in (b"old", b"new"):
        storage.path("a").write_bytes(each)
        os.utime(storage.path("a"), (modified, modified))
        with cache.epoch() as epoch:
            path = epoch.fetch(storage, "a")
    assert path.read_bytes() == content


# What is no entry


def test_a_damaged_or_short_record_is_none(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a")
    with cache.epoch() as epoch:
        path = epoch.fetch(storage, "a")
    record = path.parents[1] / "entry.json"
    good = record.read_bytes()
    flipped = [
        good[: bit // 8] + bytes([good[bit // 8] ^ 1 << bit % 8]) + good[bit // 8 + 1 :] for bit in range(8 * len(good))
    ]
    for bad in [*flipped, *(good[:length] for length in range(len(good))), good + b" ", b"[]", b"null"]:
        record.write_bytes(bad)
        assert list(cache.entries()) == [], bad
    record.write_bytes(good)
    assert cached(cache) == ["a"]


@pytest.mark.parametrize("is_record", [True, False])
def test_what_is_damaged_is_copied_again(storage: LocalStorage, cache: FileCache, is_record: bool) -> None:
    content = put(storage, "a", b"abcdef")
    with cache.epoch() as epoch:
        path = epoch.fetch(storage, "a")
    damaged = path.parents[1] / "entry.json" if is_record else path
    os.truncate(damaged, damaged.stat().st_size - 1)
    assert cached(cache) == []
    with cache.epoch() as epoch:
        assert epoch.fetch(storage, "a").read_bytes() == content
    assert cached(cache) == ["a"]


def test_what_is_not_of_the_cache_is_left_alone(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a")
    with cache.epoch() as epoch:
        epoch.fetch(storage, "a")
    theirs = [cache.folder / name for name in ("files/file", "files/thesis.2024/1.png", "pins/notes", "pins/1-2")]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"theirs")
    full = FileCache(cache.folder, max_bytes=KIB, min_free_bytes=0)
    put(storage, "b")
    with full.epoch() as epoch:
        epoch.fetch(storage, "b")
    assert cached(cache) == ["b"]
    assert cache.clear().num_files == 1
    assert sorted(path for path in cache.folder.glob("*/**/*") if path.is_file()) == sorted(theirs)


def test_a_folder_of_others_is_not_used(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a")
    theirs = {cache.folder / "CACHEDIR.TAG": b"Signature: theirs", cache.folder / f"files/{'0' * 32}.1/a": b"a"}
    for path, content in theirs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    text = "it holds other things, and no CACHEDIR.TAG of such a cache"
    with cache.epoch() as epoch:
        with pytest.warns(UserWarning, match=f"not from the cache {cache.folder}: it cannot be used: {text}"):
            assert epoch.fetch(storage, "a") == storage.path("a")
        assert epoch.fetch(storage, "a") == storage.path("a")
    for call in (cache.clear, lambda: list(cache.entries())):
        with pytest.raises(FileExistsError, match=text):
            call()
    assert {path: path.read_bytes() for path in cache.folder.rglob("*") if path.is_file()} == theirs


@pytest.mark.parametrize("length", [0, 20, None])
def test_a_cache_bears_a_tag_for_backup_tools(storage: LocalStorage, cache: FileCache, length: int | None) -> None:
    cache.folder.mkdir()
    put(storage, "a")
    with cache.epoch() as epoch:
        epoch.fetch(storage, "a")
    tag = (cache.folder / "CACHEDIR.TAG").read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")
    # its maker was killed
    (cache.folder / "CACHEDIR.TAG").write_bytes(tag[:length])
    put(storage, "b")
    with cache.epoch() as epoch:
        assert from_cache(cache, epoch.fetch(storage, "b"))


# Room


def test_the_longest_unused_make_room(storage: LocalStorage, cache: FileCache) -> None:
    for number in range(14):
        put(storage, f"{number:02}", bytes(10 * KIB))
        with cache.epoch() as epoch:
            assert from_cache(cache, epoch.fetch(storage, f"{number:02}"))
            epoch.fetch(storage, "00")  # used each time
        time.sleep(0.01)  # the clock of a file system ticks slowly
    # whenever one more did not fit, a tenth more than needed was given back, so that the next does
    assert cached(cache) == ["00", "05", "06", "07", "08", "09", "10", "11", "12", "13"]


def test_files_stay_while_their_epoch_lasts(storage: LocalStorage, cache: FileCache) -> None:
    for number in range(30):
        put(storage, f"{number}", bytes(10 * KIB))
    with cache.epoch() as epoch:
        held = [epoch.fetch(storage, f"{number}") for number in range(5)]
        with cache.epoch() as other:
            for number in range(5, 9):
                other.fetch(storage, f"{number}")
        for number in range(9, 30):
            with cache.epoch() as other:
                assert from_cache(cache, other.fetch(storage, f"{number}"))
        assert all(path.exists() for path in held)
        assert sorted(entry.path for entry in cache.clear().kept) == sorted(held)
    assert cache.clear().num_files == 5
    assert list((cache.folder / "pins").iterdir()) == []


def test_what_other_processes_copy_is_counted(storage: LocalStorage, cache: FileCache) -> None:
    others = pickle.loads(pickle.dumps(cache))
    for number in range(20):
        put(storage, f"{number}", bytes(10 * KIB))
        with (cache, others)[number % 2].epoch() as epoch:
            assert from_cache(cache, epoch.fetch(storage, f"{number}"))
        assert sum(entry.num_bytes for entry in cache.entries()) <= cache.max_bytes


def test_small_files_count_with_what_they_take_on_the_disk(storage: LocalStorage, tmp_path: Path) -> None:
    cache = FileCache(str(tmp_path / "cache"), max_bytes="1 MiB", min_free_bytes="0B")
    for number in range(80):
        put(storage, f"{number}", bytes(100))
        with cache.epoch() as epoch:
            assert from_cache(cache, epoch.fetch(storage, f"{number}"))
    entries = list(cache.entries())
    assert 55 < len(entries) <= 64
    assert sum(entry.num_bytes for entry in entries) == len(entries) * 16 * KIB
    assert sum(path.stat().st_blocks * 512 for path in cache.folder.rglob("*/*")) <= 1 << 20


def test_sizes_are_checked(tmp_path: Path) -> None:
    for sizes in ({"max_bytes": -1}, {"max_bytes": "1G"}, {"max_bytes": 1, "min_free_bytes": -1}):
        with pytest.raises(ConfigError, match=f"{list(sizes)[-1]} is .*; give an integer or a size such as"):
            FileCache(tmp_path, **sizes)


def test_a_full_cache_serves_the_file_itself_and_says_so_once(storage: LocalStorage, tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", max_bytes=KIB, min_free_bytes=0)
    for name in "abc":
        put(storage, name, bytes(600))
    with cache.epoch() as epoch:
        kept = epoch.fetch(storage, "a")
        with pytest.warns(UserWarning, match=FULL) as warned:
            assert epoch.fetch(storage, "b") == storage.path("b")
        assert epoch.fetch(storage, "c") == storage.path("c")
        assert epoch.fetch(storage, "a") == kept
    assert [warning.filename for warning in warned] == [__file__]
    assert len(folders(cache)) == 1


def test_a_full_cache_is_tried_again_after_a_while(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_FULL_S", 0.2)
    cache = FileCache(tmp_path / "cache", max_bytes=KIB, min_free_bytes=0)
    for name in "ab":
        put(storage, name, bytes(600))
    with cache.epoch() as epoch:
        epoch.fetch(storage, "a")
        with pytest.warns(UserWarning, match="is in use"):
            epoch.fetch(storage, "b")
    with cache.epoch() as epoch:
        assert epoch.fetch(storage, "b") == storage.path("b")
        time.sleep(0.2)
        assert from_cache(cache, epoch.fetch(storage, "b"))


def test_a_file_larger_than_the_cache_is_served_itself(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "small", bytes(50 * KIB))
    put(storage, "large", bytes(241 * KIB))
    with cache.epoch() as epoch:
        epoch.fetch(storage, "small")
    with cache.epoch() as epoch, pytest.warns(UserWarning, match="large takes 241 KiB, and max_bytes is 240 KiB"):
        assert epoch.fetch(storage, "large") == storage.path("large")
    assert cached(cache) == ["small"]


def test_an_address_without_a_path_is_an_error_where_there_is_no_room(memory: Storage, tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", max_bytes=KIB)
    memory.write("a", [bytes(2000)])
    with cache.epoch() as epoch, pytest.raises(VolumeError) as raised:
        epoch.fetch(memory, "a")
    assert str(raised.value) == (
        f"{memory}/a (2.0 KiB) cannot be copied to the cache {cache.folder}: {memory}/a takes 2.0 KiB, and max_bytes "
        "is 1.0 KiB.\n"
        "  Raise cache_max_bytes (BRIDGE_CACHE_MAX_BYTES), or let cache_dir (BRIDGE_CACHE_DIR) be a new folder on a "
        "disk with more room."
    )


def test_the_disk_keeps_its_free_bytes(storage: LocalStorage, tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    cache = FileCache(tmp_path / "cache", max_bytes=KIB, min_free_bytes=free.f_blocks * free.f_frsize)
    put(storage, "a")
    with cache.epoch() as epoch, pytest.warns(UserWarning, match=r"of its disk are kept free \(.* are\)"):
        assert epoch.fetch(storage, "a") == storage.path("a")
    assert folders(cache) == []


def test_others_that_fill_the_disk_meanwhile_are_noticed(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.volumes.source._BLOCK", 100)
    free = iter([20_000, 20_000, 900, 20_000, 20_000, 900, 900])
    monkeypatch.setattr(FileCache, "_free_bytes", lambda self: next(free))
    cache = FileCache(tmp_path / "cache", max_bytes=KIB, min_free_bytes=1000)
    put(storage, "a", bytes(400))
    with cache.epoch() as epoch, pytest.warns(UserWarning, match="is in use"):
        assert epoch.fetch(storage, "a") == storage.path("a")
    assert folders(cache) == []
    assert next(free, None) is None


def test_a_mount_that_tells_no_free_bytes_is_filled(
    storage: LocalStorage, cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([0] * 11))
    put(storage, "a")
    with cache.epoch() as epoch:
        assert from_cache(cache, epoch.fetch(storage, "a"))


def test_a_cache_that_cannot_be_written_is_not_used(storage: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = FileCache(tmp_path / "file", max_bytes=KIB)
    put(storage, "a")
    with cache.epoch() as epoch:
        with pytest.warns(UserWarning, match=f"not from the cache {tmp_path}/file: it cannot be used: Not a directory"):
            assert epoch.fetch(storage, "a") == storage.path("a")
        assert epoch.fetch(storage, "a") == storage.path("a")


def test_a_disk_without_room_for_a_pin_serves_the_file_itself(
    storage: LocalStorage, cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(storage, "a")
    write = os.write
    with cache.epoch() as epoch:
        epoch.fetch(storage, "a")
    with cache.epoch() as epoch:
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:10]))
        with pytest.warns(UserWarning, match="is in use"):
            assert epoch.fetch(storage, "a") == storage.path("a")
        monkeypatch.undo()
        epoch._cache._ledgers.clear()
        path = epoch.fetch(storage, "a")
        assert [entry.path for entry in cache.clear().kept] == [path]


def test_folders_that_are_never_the_same_are_not_tried_for_ever(
    storage: LocalStorage, cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "_is_still_at", lambda path, file: False)
    put(storage, "a")
    with cache.epoch() as epoch, pytest.warns(UserWarning, match="it cannot be used: Stale file handle"):
        assert epoch.fetch(storage, "a") == storage.path("a")


def test_a_lock_is_that_of_the_folder_which_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "entry"
    order = []

    def wait() -> None:
        with pins.hold_folder(str(folder), fcntl.LOCK_EX, grows=str(folder / "a"), make=True):
            order.append("waiter")

    waiter = threading.Thread(target=wait)
    with pins.hold_folder(str(folder), fcntl.LOCK_EX, make=True):
        waiter.start()
        time.sleep(0.1)
        # evicted, and made anew by another
        folder.rmdir()
        new = os.open((folder.mkdir(), folder)[1], os.O_RDONLY)
        fcntl.flock(new, fcntl.LOCK_EX)
    time.sleep(0.2)
    order.append("other")
    os.close(new)
    waiter.join()
    assert order == ["other", "waiter"]


# Threads and processes


def test_threads_that_want_the_same_file_copy_it_once(storage: LocalStorage, cache: FileCache) -> None:
    reads: list[str] = []
    counting = OtherStorage(storage.folder, lambda found: found, is_local=False)
    read = counting.read
    counting.read = lambda *range_: (reads.append(range_[0]), time.sleep(0.05), read(*range_))[2]  # type: ignore[method-assign]
    names = [f"cats/{number}" for number in range(4)]
    contents = [put(storage, name, name.encode()) for name in names]
    with cache.epoch() as epoch, ThreadPoolExecutor(16) as threads:
        paths = list(threads.map(lambda name: epoch.fetch(counting, name), names * 4))
    assert [path.read_bytes() for path in paths] == contents * 4
    assert sorted(reads) == sorted(names)


def test_a_closed_epoch_fetches_nothing(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a")
    epoch = cache.epoch()
    epoch.close()
    epoch.close()
    with pytest.raises(ValueError, match="the epoch is closed; fetch within"):
        epoch.fetch(storage, "a")


@pytest.mark.parametrize("lost", ["", "pins"])
def test_what_is_handed_out_after_somebody_cleaned_up_is_held(
    storage: LocalStorage, cache: FileCache, lost: str
) -> None:
    put(storage, "a")
    put(storage, "b")
    with cache.epoch() as epoch:
        epoch.fetch(storage, "a")
        shutil.rmtree(cache.folder / lost)
        epoch.fetch(storage, "b")
        assert cached(cache) == (["a", "b"] if lost else ["b"])
        epoch.fetch(storage, "a")
        assert sorted(entry.path.name for entry in cache.clear().kept) == ["a", "b"]
    assert cache.clear().num_files == 2
    assert list((cache.folder / "pins").iterdir()) == []


def test_a_new_pin_that_does_not_get_all_keys_gets_them_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin, held, write = pins.Pin(str(tmp_path / "pins")), pins.Pins(str(tmp_path / "pins")), os.write
    pin.hold("first")
    pin.hold("second")
    shutil.rmtree(tmp_path / "pins")
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:10]))
    with pytest.raises(OSError, match="No space left"):
        pin.hold("second")
    monkeypatch.undo()
    pin.hold("second")
    held.refresh()
    assert held.keys >= {"first", "second"}
    pin.close()


def test_what_is_fetched_often_is_noted_once(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a")
    with cache.epoch() as epoch:
        for _ in range(3):
            path = epoch.fetch(storage, "a")
        (pin,) = (cache.folder / "pins").iterdir()
        assert pin.read_text().split() == [path.parents[1].name]


def test_an_epoch_that_is_dropped_is_closed(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a")
    epoch = cache.epoch()
    epoch.fetch(storage, "a")
    descriptors = len(os.listdir("/proc/self/fd"))
    child = os.fork()
    if child == 0:
        del epoch
        os._exit(0)
    os.waitpid(child, 0)
    assert len(cache.clear().kept) == 1  # it is its parent's
    del epoch
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    assert list((cache.folder / "pins").iterdir()) == []


@pytest.mark.parametrize("call", ["unlink", "close"])
def test_an_epoch_whose_close_was_interrupted_can_be_closed(
    storage: LocalStorage, cache: FileCache, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    put(storage, "a")
    epoch = cache.epoch()
    epoch.fetch(storage, "a")

    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupt)
    with pytest.raises(KeyboardInterrupt):
        epoch.close()
    epoch.close()
    assert list((cache.folder / "pins").iterdir()) == []
    assert cache.clear().num_files == 1


def _fetch_and_wait(epoch: Epoch, storage: Storage, name: str, pipe: Connection) -> None:
    pipe.send(epoch.fetch(storage, name))
    pipe.recv()
    epoch.close()
    pipe.send(None)
    pipe.recv()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_holds_what_it_fetched_and_nothing_of_its_parent(
    storage: LocalStorage, cache: FileCache, method: str
) -> None:
    put(storage, "a")
    put(storage, "b")
    with cache.epoch() as epoch:
        parents = epoch.fetch(storage, "a")
        ours, theirs = multiprocessing.Pipe()
        worker = multiprocessing.get_context(method).Process(target=_fetch_and_wait, args=(epoch, storage, "b", theirs))
        worker.start()
        workers = ours.recv()
        assert sorted(entry.path for entry in cache.clear().kept) == sorted([parents, workers])
        ours.send(None)
        ours.recv()
        assert [entry.path for entry in cache.clear().kept] == [parents]
        ours.send(None)
        worker.join()
    assert cache.clear().kept == ()


def test_a_fork_while_a_thread_copies_does_not_keep_the_lock(
    storage: LocalStorage, cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "_STALLED_S", 1.0)
    put(storage, "a", b"abc")
    is_reading, may_read = threading.Event(), threading.Event()

    class SlowStorage(OtherStorage):
        def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            is_reading.set()
            may_read.wait()
            return super().read(name, start, stop)

    slow = SlowStorage(storage.folder, lambda found: found, is_local=False)
    with cache.epoch() as epoch, ThreadPoolExecutor(1) as thread:
        path = thread.submit(epoch.fetch, slow, "a")
        is_reading.wait()
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        may_read.set()
        try:
            path.result()
            epoch.close()
            assert cache.clear().num_files == 1
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def test_a_cache_is_pickled_as_its_settings(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", max_bytes=5, min_free_bytes=6)
    cache._ledger()
    copy = pickle.loads(pickle.dumps(cache))
    assert (copy.folder, copy.max_bytes, copy.min_free_bytes) == (tmp_path / "cache", 5, 6)


def _hold_for_ever(cache: FileCache, storage: Storage, pipe: Connection) -> None:
    epoch = cache.epoch()
    pipe.send(epoch.fetch(storage, "a"))
    time.sleep(60)


def test_a_killed_process_holds_nothing(storage: LocalStorage, cache: FileCache) -> None:
    put(storage, "a")
    ours, theirs = PLAIN.Pipe()
    holder = PLAIN.Process(target=_hold_for_ever, args=(cache, storage, theirs), daemon=True)
    holder.start()
    path = ours.recv()
    assert [entry.path for entry in cache.clear().kept] == [path]
    holder.kill()
    holder.join()
    assert (cache.clear().num_files, cache.clear().kept) == (1, ())
    assert list((cache.folder / "pins").iterdir()) == []


def test_an_owner_that_stands_still_is_not_waited_for(
    storage: LocalStorage, cache: FileCache, memory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "_STALLED_S", 0.3)
    put(storage, "a")
    with cache.epoch() as epoch:
        path = epoch.fetch(storage, "a")
    path.unlink()
    owner = os.open(path.parents[1], os.O_RDONLY)
    fcntl.flock(owner, fcntl.LOCK_EX)

    def copy_slowly() -> None:
        for length in range(5):
            path.write_bytes(bytes(length))
            time.sleep(0.15)

    copier = threading.Thread(target=copy_slowly)
    copier.start()
    began = time.monotonic()
    with cache.epoch() as epoch, pytest.warns(UserWarning, match="another process that copies a stands still"):
        assert epoch.fetch(storage, "a") == storage.path("a")
    assert time.monotonic() - began > 0.75  # as long as it went on, it was waited for
    copier.join()
    os.close(owner)
    with cache.epoch() as epoch:
        assert epoch.fetch(storage, "a") == path


def _work(cache: FileCache, storage: LocalStorage, seed: int, seconds: float) -> None:
    """Fetch at random, and check that all that was handed out is there until the end of its epoch."""
    warnings.simplefilter("ignore")
    choice, end = random.Random(seed), time.monotonic() + seconds

    def epochs(_: int) -> None:
        while time.monotonic() < end:
            with cache.epoch() as epoch:
                held = {}
                for number in choice.choices(range(40), k=choice.randrange(1, 4)):
                    held[number] = epoch.fetch(storage, f"{number}")
                time.sleep(choice.random() / 200)
                for number, path in held.items():
                    assert path.read_bytes() == bytes([number]) * 10 * KIB, path

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(epochs, range(3)))


def test_what_is_handed_out_is_never_evicted(storage: LocalStorage, tmp_path: Path) -> None:
    for number in range(40):
        put(storage, f"{number}", bytes([number]) * 10 * KIB)
    # up to 27 are held at a time, and 20 fit: nearly every fetch evicts, and some find all in use
    cache = FileCache(tmp_path / "cache", max_bytes=20 * TAKES, min_free_bytes=0)
    workers = [PLAIN.Process(target=_work, args=(cache, storage, seed, 2.5), daemon=True) for seed in range(3)]
    for worker in workers:
        worker.start()
    most = 0
    while any(worker.is_alive() for worker in workers):
        most = max(most, sum(size for _, size in list_entries(f"{cache.folder}/files")))
        time.sleep(0.01)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    # each of nine threads has made a folder before it looked for room
    assert 15 * TAKES < most <= (20 + 9) * TAKES


def test_it_works_in_a_process_of_its_own(storage: LocalStorage, tmp_path: Path) -> None:
    put(storage, "a", b"abc")
    code = (
        "import sys; from pathlib import Path\nfrom bridge.volumes.cache import FileCache\n"
        "from bridge.volumes.stores import open_storage\n"
        "with FileCache(Path(sys.argv[1]), max_bytes=9, min_free_bytes=0).epoch() as epoch:\n"
        "    print(epoch.fetch(open_storage(sys.argv[2]), 'a').read_text())"
    )
    command = [sys.executable, "-W", "error", "-c", code, tmp_path / "cache", storage.folder]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "abc\n"


# Failures of the file


def test_a_file_that_cannot_be_read_is_named(
    storage: LocalStorage, cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.volumes.storage._RETRY_DELAYS_S", (0.0,))
    put(storage, "a")

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with cache.epoch() as epoch, pytest.raises(VolumeError, match="volume/a cannot be read: Input/output error"):
        epoch.fetch(storage, "a")
    assert folders(cache) == []
