"""One contract for every place where bytes are kept."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bridge.volumes.path
from bridge.errors import MissingDependencyError, VolumeError
from bridge.volumes import storage as seam
from bridge.volumes import stores
from bridge.volumes.storage import Entry, Storage, is_transient, wait_for_files, with_retries
from bridge.volumes.stores import FsspecStorage, LocalStorage, open_storage
from tests.volumes.mount import Volume


@pytest.fixture(params=["disk", "memory", pytest.param("volume", marks=pytest.mark.fuse)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "memory":
        opened = open_storage(f"memory://contract/{tmp_path.name}")
        assert isinstance(opened, FsspecStorage)
        yield opened
        opened._filesystem.store.clear()
        opened._filesystem.pseudo_dirs[:] = [""]
    else:
        root = tmp_path if request.param == "disk" else request.getfixturevalue("volume").path
        yield open_storage(root / "root")


def test_what_was_written_is_read(storage: Storage) -> None:
    before = time.time_ns()
    storage.make_folder("a/b")
    storage.write("a/b/file", [b"abc", b"", memoryview(b"defg")[:3]])

    assert storage.read("a/b/file") == b"abcdef"
    found = storage.status("a/b/file")
    assert (found.name, found.is_folder, found.num_bytes) == ("file", False, 6)
    assert found.mtime_ns is not None
    assert before - 10**9 < found.mtime_ns < time.time_ns() + 10**9
    assert storage.status("a").is_folder


def test_a_range_is_half_open_and_ends_with_the_file(storage: Storage) -> None:
    storage.make_folder()
    storage.write("file", [bytes(range(10))])

    assert storage.read("file", 2, 5) == bytes([2, 3, 4])
    assert storage.read("file", 8, 12) == bytes([8, 9])
    assert storage.read("file", 4) == bytes(range(4, 10))
    for start, stop in [(3, 3), (5, 2), (10, 12), (20, 30)]:
        assert storage.read("file", start, stop) == b""


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blocks=st.lists(st.binary(max_size=50), max_size=5), data=st.data())
def test_any_range_of_any_blocks(storage: Storage, blocks: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(blocks)
    storage.make_folder()
    storage.delete("file")
    storage.write("file", blocks)
    start = data.draw(st.integers(0, len(whole) + 2))
    stop = data.draw(st.integers(start, len(whole) + 4))

    assert storage.read("file", start, stop) == whole[start:stop]


def test_a_folder_lists_what_it_holds(storage: Storage) -> None:
    storage.make_folder("folder/below")
    storage.write("folder/file", [b"x"])
    storage.write("folder/empty", [])
    storage.write("folder/below/deeper", [b"x"])

    found = {entry.name: entry.is_folder for entry in storage.list("folder")}

    assert found == {"below": True, "file": False, "empty": False}
    assert [entry.name for entry in storage.list()] == ["folder"]
    assert all(entry.num_bytes in (None, 1) for entry in storage.list("folder") if entry.name == "file")
    assert storage.status("folder/empty").num_bytes == 0
    assert storage.read("folder/empty") == b""


def test_what_is_not_there_is_not_found(storage: Storage) -> None:
    storage.make_folder()

    with pytest.raises(FileNotFoundError):
        storage.status("gone")
    with pytest.raises(FileNotFoundError):
        storage.read("gone")
    with pytest.raises(FileNotFoundError):
        list(storage.list("gone"))
    storage.delete("gone")
    storage.delete_folder("gone")


def test_a_file_is_written_once(storage: Storage) -> None:
    storage.make_folder()
    storage.write("file", [b"first"])

    with pytest.raises(FileExistsError):
        storage.write("file", [b"second"])
    assert storage.read("file") == b"first"
    storage.delete("file")
    storage.write("file", [b"third"])
    assert storage.read("file") == b"third"


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt()])
def test_a_file_that_fails_leaves_nothing(storage: Storage, error: BaseException) -> None:
    storage.make_folder()

    def blocks() -> Iterator[bytes]:
        yield b"x" * 100
        raise error

    with pytest.raises(type(error)):
        storage.write("file", blocks())
    assert list(storage.list()) == []


def test_only_empty_folders_are_deleted(storage: Storage) -> None:
    storage.make_folder("folder")
    storage.make_folder("folder")
    storage.write("folder/file", [b"x"])
    with pytest.raises(OSError, match="not empty") as caught:
        storage.delete_folder("folder")
    assert caught.value.errno == errno.ENOTEMPTY

    storage.delete("folder/file")
    storage.delete_folder("folder")

    assert list(storage.list()) == []


def test_odd_names_are_kept(storage: Storage) -> None:
    names = ["ü", "a b", "100%", "a=b", "#x", "it's", "日本", "x" * 255]
    storage.make_folder()
    for name in names:
        storage.write(name, [name.encode()])

    assert sorted(entry.name for entry in storage.list()) == sorted(names)
    assert all(storage.read(name) == name.encode() for name in names)


def test_many_threads_may_use_it(storage: Storage) -> None:
    storage.make_folder()

    def use(number: int) -> bytes:
        storage.write(f"file{number}", [b"%d" % number])
        return storage.read(f"file{number}")

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(use, range(64))) == [b"%d" % number for number in range(64)]
    assert len(list(storage.list())) == 64


def test_it_prints_as_its_address(storage: Storage) -> None:
    assert str(storage).endswith("root") == (storage.folder is not None)
    if storage.folder is None:
        assert str(storage).startswith("memory://contract/")


def test_files_are_waited_for_by_size(storage: Storage) -> None:
    storage.make_folder()
    storage.write("file", [b"abc"])

    wait_for_files(storage, {"file": 3})
    wait_for_files(storage, {})
    with pytest.raises(VolumeError, match=r"/file holds 3 bytes 0.05 s after 2 bytes were written"):
        wait_for_files(storage, {"file": 2}, timeout_s=0.05)
    with pytest.raises(VolumeError, match=r"/gone is not there 0.05 s after 2 bytes were written"):
        wait_for_files(storage, {"file": 3, "gone": 2}, timeout_s=0.05)


# which storage a path means


def test_links_are_told_from_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "to-folder").symlink_to("folder")
    (tmp_path / "to-nothing").symlink_to("nothing")

    assert sorted(LocalStorage(tmp_path).list(), key=lambda entry: entry.name) == [
        Entry("folder", True),
        Entry("to-folder", True, is_link=True),
        Entry("to-nothing", False, is_link=True),
    ]


def test_a_mount_is_used_where_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing can be mounted at /Volumes for one test alone.
    monkeypatch.setattr(stores, "_mount_error", lambda name: None)

    monkeypatch.setenv("BRIDGE_VOLUME_ROOT", str(tmp_path))

    assert str(open_storage("/Volumes/a/b/c/x")) == "/Volumes/a/b/c/x"


def broken_mount(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOTCONN) -> None:
    error = OSError(number, os.strerror(number))
    monkeypatch.setattr(stores, "_mount_error", lambda name: error)


def test_a_mount_that_does_not_answer_is_told_rather_than_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    broken_mount(monkeypatch)

    with pytest.raises(
        VolumeError, match=r"the mount of /Volumes/a/b/c/x does not answer: Transport endpoint.*\n  Mount it again, or"
    ):
        open_storage("/Volumes/a/b/c/x")

    broken_mount(monkeypatch, errno.EACCES)
    with pytest.raises(VolumeError, match=r"/Volumes/a/b/c/x may not be read: Permission denied\.\n  Ask for READ VOL"):
        open_storage("/Volumes/a/b/c/x")


def test_without_a_mount_the_configured_folder_stands_for_volumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_HOST", "https://example.invalid")
    monkeypatch.setitem(sys.modules, "fsspec_databricks", fake_databricks())
    monkeypatch.setenv("BRIDGE_VOLUME_ROOT", str(tmp_path))

    assert open_storage("/Volumes/a/b/c/x").folder == tmp_path / "a/b/c/x"


def fake_databricks() -> ModuleType:
    """Stand in for fsspec-databricks, which needs a workspace."""
    from fsspec.implementations.memory import MemoryFileSystem

    class DatabricksFileSystem(MemoryFileSystem):  # type: ignore[misc]
        def __init__(self, use_local_fs_in_workspace: bool) -> None:
            assert not use_local_fs_in_workspace
            super().__init__()

    module = ModuleType("fsspec_databricks")
    module.DatabricksFileSystem = DatabricksFileSystem  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("is_broken", [False, True])
def test_without_a_mount_databricks_own_api_is_used_where_it_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    module = fake_databricks()
    monkeypatch.setattr(stores, "find_spec", lambda name: module)
    monkeypatch.setitem(sys.modules, "fsspec_databricks", module)
    monkeypatch.setenv("HOME", str(tmp_path))
    if is_broken:
        broken_mount(monkeypatch)
    else:
        assert open_storage("/Volumes/a/b/c/x").folder == bridge.volumes.path.locate("/Volumes/a/b/c/x").folder()
    (tmp_path / ".databrickscfg").write_text("[DEFAULT]\n")

    opened = open_storage(f"dbfs:/Volumes/a/b/c/{is_broken}")

    assert str(opened) == f"dbfs:/Volumes/a/b/c/{is_broken}"
    opened.make_folder()
    opened.write("file", [b"abc"])
    assert opened._filesystem.cat_file(f"/Volumes/a/b/c/{is_broken}/file") == b"abc"  # type: ignore[attr-defined]


def test_a_folder_that_is_no_volume_is_itself(tmp_path: Path) -> None:
    assert open_storage(tmp_path).folder == tmp_path
    assert open_storage(f"file://{tmp_path}").folder == tmp_path


def test_a_link_to_itself_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")

    assert list(LocalStorage(tmp_path).list()) == [Entry("loop", False, is_link=True)]


@pytest.mark.fuse
def test_a_file_that_fails_is_taken_back_when_it_is_seen(mount_volume: Callable[..., Volume]) -> None:
    volume = mount_volume(lookup_lag_ms=300, capacity_bytes=100_000)
    storage = LocalStorage(volume.path)

    with pytest.raises(OSError, match="No space left on device"):
        storage.write("file", [bytes(200_000)])

    assert volume.counts().stored == 0
    assert os.listdir(volume.backing) == []


def test_a_file_that_another_wrote_in_our_place_stays(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    def blocks() -> Iterator[bytes]:
        yield b"ours"
        storage.delete("file")
        storage.write("file", [b"theirs"])
        raise KeyError

    with pytest.raises(KeyError):
        storage.write("file", blocks())
    assert storage.read("file") == b"theirs"


WAIT = """
import sys
from pathlib import Path
from bridge.volumes.storage import wait_for_files
from bridge.volumes.stores import LocalStorage
print("waiting", flush=True)
wait_for_files(LocalStorage(Path(sys.argv[1])), {str(number): 1 for number in range(100)}, timeout_s=60)
"""


def test_waiting_can_be_interrupted(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAIT, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout
        child.stdout.readline()
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=20)
    assert told.endswith(b"KeyboardInterrupt\n")


def test_an_address_that_needs_a_package_says_which() -> None:
    with pytest.raises(
        MissingDependencyError, match=r"s3://bucket/x cannot be reached: Install s3fs.*\.\n  Install what"
    ):
        open_storage("s3://bucket/x")
    with pytest.raises(VolumeError, match=r"s3:/bucket/x is no address\.\n  Give scheme://"):
        open_storage("s3:/bucket/x")
    with pytest.raises(VolumeError, match=r"nonsense:///x cannot be reached: Protocol not known: nonsense\.\n"):
        open_storage("nonsense:///x")


def test_an_error_of_a_file_system_is_one_of_ours() -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            def call(*args: object, **keywords: object) -> None:
                raise RuntimeError("no token")

            return call

    opened = FsspecStorage(Broken(), "/r", "s3://r")
    for call in (lambda: list(opened.list()), lambda: opened.read("x"), lambda: opened.write("x", [b""])):
        with pytest.raises(VolumeError, match=r"s3://r/x? ?cannot be used: RuntimeError: no token"):
            call()


# errors that pass


def test_what_may_pass_is_tried_again() -> None:
    errors = [errno.EIO, errno.ETIMEDOUT]

    def call() -> str:
        if errors:
            raise OSError(errors.pop(), "away")
        return "done"

    assert with_retries(call) == "done"


@pytest.mark.parametrize("error", [errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.ENOSYS])
def test_what_stays_is_not_tried_again(error: int) -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise OSError(error, os.strerror(error))

    with pytest.raises(OSError, match=os.strerror(error)):
        with_retries(call)
    assert len(calls) == 1
    assert not is_transient(OSError(error, ""))


def test_what_does_not_pass_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "_RETRY_DELAYS_S", (0.0,) * 4)
    calls = []

    def call() -> None:
        calls.append(1)
        raise OSError(errno.EIO, "away")

    with pytest.raises(OSError, match="away"):
        with_retries(call)
    assert len(calls) == 5
