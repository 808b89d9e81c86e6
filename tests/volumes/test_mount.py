"""The mount itself: what it refuses, what it costs, how it fails, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.volumes.mount import Volume, is_mounted, mounted_volume

pytestmark = pytest.mark.fuse

Mount = Callable[..., Volume]


@contextlib.contextmanager
def refused(*numbers: int) -> Iterator[None]:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        yield
    assert caught.value.errno in numbers


def seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


class TestRefusals:
    @pytest.mark.parametrize(
        ("call", "numbers"),
        [
            pytest.param(lambda file: file.rename(file.with_name("b")), [errno.ENOSYS], id="rename"),
            # newer kernels say EPERM where the file system says ENOSYS
            pytest.param(lambda file: os.link(file, file.with_name("b")), [errno.ENOSYS, errno.EPERM], id="link"),
            pytest.param(lambda file: file.with_name("b").symlink_to(file), [errno.ENOSYS], id="symlink"),
            pytest.param(lambda file: os.mkfifo(file.with_name("b")), [errno.ENOSYS], id="mkfifo"),
            pytest.param(lambda file: file.open("ab"), [errno.EOPNOTSUPP], id="append"),
            pytest.param(lambda file: file.with_name("b").open("ab"), [errno.EOPNOTSUPP], id="append-new"),
            pytest.param(lambda file: file.open("r+b"), [errno.EOPNOTSUPP], id="update"),
            pytest.param(lambda file: os.truncate(file, 1), [errno.EOPNOTSUPP], id="truncate"),
            pytest.param(lambda file: os.truncate(file, 9), [errno.EOPNOTSUPP], id="extend"),
            pytest.param(os.utime, [errno.ENOSYS], id="utime"),
            pytest.param(lambda file: os.setxattr(file, "user.a", b""), [errno.ENOTSUP], id="setxattr"),
            pytest.param(lambda file: os.getxattr(file, "user.a"), [errno.ENOTSUP], id="getxattr"),
        ],
    )
    def test_refused_with_its_number_and_without_effect(
        self, volume: Volume, call: Callable[[Path], object], numbers: list[int]
    ) -> None:
        file = volume.path / "a"
        file.write_bytes(b"abc")
        with refused(*numbers):
            call(file)
        assert os.listdir(volume.backing) == ["a"]
        assert (volume.backing / "a").read_bytes() == b"abc"

    @pytest.mark.parametrize("offset", [0, 2, 4])
    def test_writes_go_from_start_to_end(self, volume: Volume, offset: int) -> None:
        with (volume.path / "a").open("wb", buffering=0) as file:
            file.write(b"abc")
            file.seek(offset)
            with refused(errno.EOPNOTSUPP):
                file.write(b"x")
            file.seek(3)
            file.write(b"def")
        assert (volume.backing / "a").read_bytes() == b"abcdef"

    def test_bytes_that_were_there_are_not_overwritten_in_place(self, volume: Volume) -> None:
        (volume.path / "a").write_bytes(b"abc")
        handle = os.open(volume.path / "a", os.O_WRONLY)
        with refused(errno.EOPNOTSUPP):
            os.write(handle, b"x")
        os.ftruncate(handle, 0)
        os.write(handle, b"x")
        os.close(handle)
        assert (volume.path / "a").read_bytes() == b"x"

    def test_times_are_kept_if_asked(self, mount_volume: Mount) -> None:
        volume = mount_volume(refuse_times=False)
        (volume.path / "a").touch()
        os.utime(volume.path / "a", ns=(1_000, 2_000))
        found = (volume.path / "a").stat()
        assert (found.st_atime_ns, found.st_mtime_ns) == (1_000, 2_000)


class TestWhatWorks:
    def test_whole_files(self, volume: Volume) -> None:
        folder = volume.path / "a" / "b"
        folder.mkdir(parents=True)
        (folder / "c").write_bytes(b"first")
        (folder / "c").write_bytes(b"2nd")
        with (folder / "d").open("xb") as file:
            file.write(b"x")
            os.fsync(file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FileExistsError):
            (folder / "d").open("xb")
        with (folder / "e").open("w+b") as file:
            file.write(b"back")
            file.seek(0)
            assert file.read() == b"back"
        (folder / "c").chmod(0o600)
        assert (folder / "c").read_bytes() == b"2nd"
        shutil.rmtree(volume.path / "a")
        assert os.listdir(volume.path) == []

    def test_shell_tools(self, volume: Volume) -> None:
        script = """
            mkdir -p a/b && echo hello > a/b/c && cp a/b/c a/d && cp -r a e && cat e/d && ls -l e && find . -type f
            cmp a/d e/b/c && rm -r a
        """
        shown = subprocess.run(["sh", "-ec", script], cwd=volume.path, check=True, capture_output=True, text=True)
        assert {"hello", "./a/b/c", "./a/d", "./e/b/c", "./e/d"} <= set(shown.stdout.splitlines())
        assert os.listdir(volume.path) == ["e"]

    def test_arrays_and_tables(self, volume: Volume) -> None:
        np.save(volume.path / "a.npy", np.arange(100_000))
        assert np.load(volume.path / "a.npy", mmap_mode="r").sum() == 4_999_950_000
        pq.write_table(pa.table({"a": range(100_000)}), volume.path / "a.parquet")
        assert pq.read_table(volume.path / "a.parquet")["a"].to_pylist() == list(range(100_000))

    def test_checkpoints(self, volume: Volume) -> None:
        torch = pytest.importorskip("torch")
        torch.save({"a": torch.arange(100_000)}, volume.path / "a.pt")
        assert torch.load(volume.path / "a.pt")["a"].tolist() == list(range(100_000))

    @pytest.mark.parametrize("name", [b"n" * 255, "ä %=#'\"\n".encode(), b"not \xff utf-8 \xfe"])
    def test_names_are_bytes(self, volume: Volume, name: bytes) -> None:
        path = os.path.join(os.fsencode(volume.path), name)
        with open(path, "wb") as file:
            file.write(b"x")
        volume.fault("eio_open", match=name, times=1)
        with refused(errno.EIO):
            os.open(path, os.O_RDONLY)
        with open(path, "rb") as file:
            assert file.read() == b"x"
        assert os.listdir(os.fsencode(volume.path)) == [name]
        assert volume.opens() == {os.fsdecode(name): 1}

    def test_a_name_too_long(self, volume: Volume) -> None:
        with refused(errno.ENAMETOOLONG):
            (volume.path / ("n" * 256)).touch()

    def test_many_files_are_all_listed(self, volume: Volume) -> None:
        names = {f"{i:0200d}" for i in range(2_000)}
        for name in names:
            (volume.backing / name).touch()
        found = os.listdir(volume.path)
        assert len(found) == 2_000
        assert set(found) == names
        assert volume.counts().listings == 1

    def test_changes_behind_the_mount_are_seen(self, volume: Volume) -> None:
        shown, stored = volume.path / "a", volume.backing / "a"
        stored.write_bytes(b"first")
        assert shown.read_bytes() == b"first"
        held = shown.open("rb")
        stored.with_name("b").write_bytes(b"another")
        stored.with_name("b").replace(stored)
        assert (shown.stat().st_size, shown.read_bytes()) == (7, b"another")
        assert held.read() == b"first"
        held.close()
        stored.unlink()
        assert not shown.exists()

    def test_links_of_the_backing_folder(self, volume: Volume) -> None:
        (volume.backing / "file").write_bytes(b"x")
        (volume.backing / "link").symlink_to("file")
        (volume.backing / "loop").symlink_to("loop")
        assert (volume.path / "link").read_bytes() == b"x"
        with refused(errno.ELOOP):
            (volume.path / "loop").read_bytes()


class TestLatency:
    def test_each_call_takes_as_long_as_set(self, volume: Volume) -> None:
        file = volume.path / "a"
        file.write_bytes(b"x")
        volume.set(open_us=30_000)
        assert seconds(file.read_bytes) >= 0.03
        assert seconds((volume.path / "b").touch) >= 0.03
        volume.set(open_us=0, stat_us=30_000)
        assert seconds(file.stat) >= 0.03
        volume.set(stat_us=0, list_us=30_000)
        assert seconds(lambda: os.listdir(volume.path)) >= 0.03

    def test_bandwidth_is_of_each_open_file(self, mount_volume: Mount) -> None:
        volume = mount_volume(bytes_per_s=10_000_000)
        assert seconds(lambda: (volume.path / "a").write_bytes(bytes(1_000_000))) >= 0.1
        (volume.backing / "b").write_bytes(bytes(1_000_000))
        assert seconds((volume.path / "b").read_bytes) >= 0.1

    def test_one_slow_file(self, volume: Volume) -> None:
        for name in ("a", "b"):
            (volume.backing / name).write_bytes(bytes(1_000_000))
        volume.slow(bytes_per_s=5_000_000, match="a")
        volume.slow(latency_us=200_000, times=1, match="b")
        assert seconds((volume.path / "a").read_bytes) >= 0.2
        assert seconds((volume.path / "b").read_bytes) >= 0.2
        assert seconds((volume.path / "b").read_bytes) < 0.2

    @pytest.mark.parametrize("setting", ["open_us", "stat_us"])
    def test_calls_wait_side_by_side(self, volume: Volume, setting: str) -> None:
        # names that the kernel has not met: it would ask for them one by one, had it not been told otherwise
        for i in range(64):
            (volume.backing / f"{i}").touch()
        volume.set(**{setting: 50_000})
        ready = threading.Barrier(64)

        def read(i: int) -> bytes:
            ready.wait()
            return (volume.path / f"{i}").read_bytes()

        with ThreadPoolExecutor(64) as pool:
            assert seconds(lambda: list(pool.map(read, range(64)))) < 64 * 0.05 / 4

    def test_a_name_in_the_cache_costs_nothing(self, mount_volume: Mount) -> None:
        volume = mount_volume(cache_ms=60_000)
        (volume.backing / "a").touch()
        for _ in range(3):
            (volume.path / "a").stat()
        assert volume.counts().stats == 1


class TestLag:
    def test_listings_lack_what_is_new(self, mount_volume: Mount) -> None:
        volume = mount_volume(listing_lag_ms=300)
        (volume.backing / "old").touch()
        (volume.path / "folder").mkdir()
        with (volume.path / "file").open("wb") as file:
            time.sleep(0.4)
            assert sorted(os.listdir(volume.path)) == ["folder", "old"]
            file.write(b"x")
        assert sorted(os.listdir(volume.path)) == ["folder", "old"]
        assert (volume.path / "file").read_bytes() == b"x"
        time.sleep(0.3)
        assert sorted(os.listdir(volume.path)) == ["file", "folder", "old"]

    def test_an_overwritten_file_stays_and_a_made_again_one_does_not(self, mount_volume: Mount) -> None:
        volume = mount_volume()
        (volume.path / "a").touch()
        (volume.path / "b").touch()
        volume.set(listing_lag_ms=60_000)
        (volume.backing / "a").unlink()
        (volume.backing / "a").touch()
        assert os.listdir(volume.path) == []
        volume.set(listing_lag_ms=1)
        (volume.path / "b").write_bytes(b"x")
        time.sleep(0.01)
        assert sorted(os.listdir(volume.path)) == ["a", "b"]
        volume.set(listing_lag_ms=60_000)
        assert os.listdir(volume.path) == []

    def test_names_of_new_files_are_not_found(self, mount_volume: Mount) -> None:
        volume = mount_volume(lookup_lag_ms=300, cache_ms=60_000)
        file = volume.path / "folder" / "a"
        file.parent.mkdir()
        file.write_bytes(b"x")
        assert not file.exists()
        with pytest.raises(FileNotFoundError):
            file.read_bytes()
        with pytest.raises(FileExistsError):
            file.open("xb")
        time.sleep(0.3)
        assert file.read_bytes() == b"x"


class TestFaults:
    @pytest.mark.parametrize(
        ("kind", "call"),
        [
            ("eio_open", lambda folder: (folder / "file").open("rb").close()),
            ("eio_open", lambda folder: (folder / "file-new").touch()),
            ("eio_read", lambda folder: (folder / "file").read_bytes()),
            ("eio_write", lambda folder: (folder / "file").write_bytes(b"x")),
            ("eio_stat", lambda folder: (folder / "file").stat()),
            ("eio_list", lambda folder: os.listdir(folder / "file-folder")),
            ("eio_close", lambda folder: (folder / "file").open("wb").close()),
            ("eio_delete", lambda folder: (folder / "file").unlink()),
        ],
    )
    def test_so_many_times_and_then_no_more(self, volume: Volume, kind: str, call: Callable[[Path], object]) -> None:
        (volume.backing / "file").write_bytes(b"x")
        (volume.backing / "file-folder").mkdir()
        volume.fault(kind, times=2, match="ile")
        for _ in range(2):
            with refused(errno.EIO):
                call(volume.path)
        call(volume.path)

    def test_forever_until_cleared_and_only_what_matches(self, volume: Volume) -> None:
        for name in ("a", "b"):
            (volume.backing / name).write_bytes(b"x")
        volume.fault("eio_read", match="a")
        for _ in range(5):
            with refused(errno.EIO):
                (volume.path / "a").read_bytes()
        assert (volume.path / "b").read_bytes() == b"x"
        volume.clear_faults()
        assert (volume.path / "a").read_bytes() == b"x"

    def test_unknown_names_are_refused(self, volume: Volume) -> None:
        with pytest.raises(ValueError, match="no such setting"):
            volume.set(latency=1)
        with pytest.raises(ValueError, match="no such fault"):
            volume.fault("eio")


class TestRoom:
    def test_full_until_something_is_deleted(self, mount_volume: Mount) -> None:
        volume = mount_volume(capacity_bytes=1_000)
        (volume.backing / "outside").write_bytes(bytes(5_000))
        (volume.path / "a").write_bytes(bytes(600))
        assert shutil.disk_usage(volume.path)[::2] == (1_000, 400)
        with refused(errno.ENOSPC):
            (volume.path / "b").write_bytes(bytes(401))
        (volume.path / "b").write_bytes(bytes(400))
        (volume.path / "a").write_bytes(bytes(500))  # overwriting gives the old bytes back
        assert volume.counts().stored == 900
        (volume.path / "a").unlink()
        (volume.path / "b").unlink()
        assert volume.counts().stored == 0
        (volume.path / "c").write_bytes(bytes(1_000))

    def test_free_room_is_what_it_is_told_to_be(self, volume: Volume) -> None:
        assert shutil.disk_usage(volume.path).total == shutil.disk_usage(volume.backing).total
        volume.set(free_bytes=12_345)
        assert shutil.disk_usage(volume.path).free == 12_345


class TestCounts:
    def test_counts(self, volume: Volume) -> None:
        (volume.backing / "folder").mkdir()
        for name in ("a", "b"):
            (volume.path / "folder" / name).write_bytes(b"12345")
        for name in ("a", "a", "b"):
            (volume.path / "folder" / name).read_bytes()
        counts = volume.counts()
        assert volume.opens() == {"folder/a": 2, "folder/b": 1}
        assert (counts.opens, counts.creates, counts.writes, counts.reads) == (3, 2, 2, 3)
        assert (counts.bytes_written, counts.bytes_read, counts.stored, counts.deletes) == (10, 15, 10, 0)

    def test_a_scan_costs_a_stat_for_each_file(self, volume: Volume) -> None:
        for i in range(10):
            (volume.backing / f"{i}").touch()
        with os.scandir(volume.path) as entries:
            assert all(entry.is_file() for entry in entries)
        assert volume.counts().stats <= 1  # of the folder itself, for which opendir of the C library asks
        with os.scandir(volume.path) as entries:
            assert [entry.stat().st_size for entry in entries] == [0] * 10
        assert volume.counts().stats >= 10
        assert volume.counts().listings == 2


_OWNER = """
import os, sys, time
from pathlib import Path
from tests.volumes.mount import mounted_volume

with mounted_volume(Path(sys.argv[1])) as volume:
    child = os.fork() if sys.argv[2] == "forks" else None
    if child != 0:
        print(volume.pid, child or 0, flush=True)
    time.sleep(60)
"""


class TestEnd:
    def test_nothing_is_left(self, tmp_path: Path) -> None:
        with mounted_volume(tmp_path, stat_us=60_000_000) as volume:
            assert is_mounted(volume.path)
            threading.Thread(target=lambda: os.path.exists(volume.path / "waits"), daemon=True).start()
            wait_until(lambda: volume.counts().stats == 1)
        assert not is_mounted(volume.path)
        assert not psutil.pid_exists(volume.pid)
        assert os.listdir(tmp_path) == ["backing"]

    def test_open_files_do_not_keep_it(self, tmp_path: Path) -> None:
        with mounted_volume(tmp_path) as volume:
            file = (volume.path / "a").open("wb")
        assert not is_mounted(volume.path)
        with pytest.raises(OSError, match=r"not connected|aborted"):
            file.close()

    @pytest.mark.parametrize("habit", ["alone", "forks"])
    def test_it_goes_with_its_owner(self, tmp_path: Path, habit: str) -> None:
        command = [sys.executable, "-c", _OWNER, tmp_path, habit]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout
            server, child = map(int, owner.stdout.readline().split())
            assert is_mounted(tmp_path / "volume")
            owner.kill()
            wait_until(lambda: not psutil.pid_exists(server) and not is_mounted(tmp_path / "volume"))
            if child:
                os.kill(child, signal.SIGKILL)

    def test_a_killed_server_leaves_no_mount(self, tmp_path: Path) -> None:
        with mounted_volume(tmp_path) as volume:
            os.kill(volume.pid, signal.SIGKILL)
            with pytest.raises(ConnectionError, match="no longer served"):
                volume.counts()
        assert not is_mounted(volume.path)
