from __future__ import annotations

import errno
import fcntl
import filecmp
import os
import pickle
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bridge
from bridge.errors import CopyError, ExportNotFoundError, VolumeError
from bridge.volumes import copy
from bridge.volumes.commit import begin, collect_garbage
from bridge.volumes.copy import CopyReport, _split, copy_tree
from bridge.volumes.crew import Crew
from bridge.volumes.source import FolderSource, Found, Reader, is_within
from bridge.volumes.storage import Entry
from bridge.volumes.stores import FsspecStorage, LocalStorage, open_storage
from bridge.volumes.target import FolderTarget, is_copied, is_temporary, pieces
from tests.exports import make_export


@pytest.fixture(params=["disk", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Give a place that is not there yet."""
    if request.param == "disk":
        yield str(tmp_path / "target")
    else:
        yield f"memory://copies/{tmp_path.name}"
        filesystem = open_storage("memory://x")._filesystem  # type: ignore[attr-defined]
        filesystem.store.clear()
        filesystem.pseudo_dirs[:] = [""]


def make_tree(root: Path, *, files: int = 60) -> Path:
    """Make folders three deep with files of 0 to 9,999 bytes, and an empty folder."""
    dice = random.Random(7)
    for number in range(files):
        folder = root / f"a{number % 3}" / f"b{number % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.bin").write_bytes(dice.randbytes(0 if number == 5 else dice.randrange(10_000)))
    (root / "empty").mkdir(parents=True)
    return root


def content(root: Path | str) -> dict[str, bytes]:
    """Return the bytes of every file of a place by name, links followed."""
    storage = open_storage(root)
    found: dict[str, bytes] = {}

    def walk(folder: str) -> None:
        for entry in storage.list(folder):
            name = f"{folder}/{entry.name}".lstrip("/")
            if entry.is_folder:
                walk(name)
            else:
                found[name] = storage.read(name)

    walk("")
    return found


def failed(source: Path | str, target: Path | str, **options: int) -> CopyReport:
    """Return the report of a copy that fails."""
    with pytest.raises(CopyError) as caught:
        copy_tree(source, target, **options)
    assert isinstance(caught.value.report, CopyReport)
    return caught.value.report


# what is decided


@given(size=st.integers(0, 2000), piece=st.integers(1, 100))
def test_pieces_cover_a_file_once_in_order(size: int, piece: int) -> None:
    found = list(pieces(size, piece))
    assert [byte for start, stop in found for byte in range(start, stop)] == list(range(size))
    assert all(0 < stop - start <= piece for start, stop in found)


@pytest.mark.parametrize(
    ("there", "keeps_times", "copied"),
    [
        (Entry("f", False, 5, 100), True, True),
        (Entry("f", False, 5, 101), True, False),
        (Entry("f", False, 5, 99), False, False),
        (Entry("f", False, 5, 100), False, True),
        (Entry("f", False, 5, 101), False, True),
        (Entry("f", False, 4, 100), True, False),
        (Entry("f", False, 4, 101), False, False),
        (Entry("f", False, 5, None), False, False),
        (Entry("f", True, 5, 100), True, False),
    ],
)
def test_what_counts_as_copied(there: Entry, keeps_times: bool, copied: bool) -> None:
    assert is_copied(5, 100, there, keeps_times=keeps_times) is copied


def test_without_a_time_nothing_counts_as_copied() -> None:
    assert not is_copied(5, None, Entry("f", False, 5, 100), keeps_times=False)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("a", (".", "a")),
        ("a/b", ("a", "b")),
        ("/b", ("/", "b")),
        ("/a/b/", ("/a", "b")),
        ("file:/b", ("file:/", "b")),
        ("file:///a/b", ("file:///a", "b")),
        ("memory://b", ("memory://", "b")),
        ("memory:///b", ("memory:///", "b")),
        ("s3://bucket/b", ("s3://bucket", "b")),
        ("a:b/c", ("a:b", "c")),
    ],
)
def test_the_folder_of_a_path_or_an_address(path: str, parts: tuple[str, str]) -> None:
    assert _split(path) == parts


def test_is_within_goes_by_whole_names() -> None:
    assert is_within("/a/b", "/a")
    assert is_within("/a", "/a")
    assert is_within("/a", "/")
    assert not is_within("/ab", "/a")


# what is copied


def test_a_tree_arrives_whole(tmp_path: Path, target: str) -> None:
    source = make_tree(tmp_path / "source")
    report = copy_tree(source, target)
    assert content(target) == content(source)
    total = sum(map(len, content(source).values()))
    assert (report.num_files, report.num_bytes, report.num_skipped, report.failures) == (60, total, 0, ())
    assert open_storage(target).status("empty").is_folder


def test_an_address_is_copied_to_a_disk(tmp_path: Path, target: str) -> None:
    source = make_tree(tmp_path / "source")
    copy_tree(source, target)
    assert copy_tree(target, tmp_path / "back").num_files == 60
    assert content(tmp_path / "back") == content(source)
    assert copy_tree(target, tmp_path / "back").num_skipped == 60


def test_times_and_permission_bits_are_kept_on_a_disk(tmp_path: Path) -> None:
    script = tmp_path / "source" / "private" / "run.sh"
    script.parent.mkdir(parents=True, mode=0o700)
    script.write_text("exit")
    script.chmod(0o750)
    os.utime(script, ns=(10**18 + 1, 10**18 + 7))
    copy_tree(tmp_path / "source", tmp_path / "target")
    copied = (tmp_path / "target" / "private" / "run.sh").stat()
    assert copied.st_mtime_ns == 10**18 + 7
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(copied.st_mode) == 0o750 & ~umask
    assert stat.S_IMODE((tmp_path / "target" / "private").stat().st_mode) == 0o700


@pytest.mark.parametrize("size", [(64 << 20) - 1, (64 << 20) + 12345])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_big_file_arrives_whole(tmp_path: Path, size: int, by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crew, "_cpu_seconds", lambda _: 0.0)  # so that there are idle threads
    if not by_kernel:

        def refuse(*_: object) -> int:
            raise OSError(errno.EXDEV, "across file systems")

        monkeypatch.setattr(os, "copy_file_range", refuse)
    source = tmp_path / "source"
    source.write_bytes(random.Random(1).randbytes(1 << 20) * (size >> 20) + bytes(size % (1 << 20)))
    threads: set[int] = set()
    write = os.pwrite

    def traced(*arguments: object) -> int:
        threads.add(threading.get_ident())
        time.sleep(0.005)  # so that one does not do it all before others are there
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", traced)
    copy_tree(source, tmp_path / "target")
    assert filecmp.cmp(source, tmp_path / "target", shallow=False)
    if not by_kernel and size >= 64 << 20:
        assert len(threads) > 2  # one of them made the probe


def test_a_kernel_that_copies_nothing_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tree(tmp_path / "source")
    monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    copy_tree(source, tmp_path / "target")
    assert content(tmp_path / "target") == content(source)


NAMES = [
    b"-rf",
    b"two\nlines",
    b" spaced  out ",
    b"\xff\xfe",
    "grün".encode(),
    b"n" * 255,
    b"?*[x]{y}",
    b"#%=&'\"",
    b".h",
]


def test_names_of_all_kinds(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path / "source")
    for name in NAMES:
        folder = os.path.join(root, b"d" + name[:250])
        os.makedirs(folder)
        with open(os.path.join(folder, name), "wb") as file:
            file.write(name)
    assert copy_tree(tmp_path / "source", tmp_path / "target").num_files == len(NAMES)
    for name in NAMES:
        with open(os.path.join(os.fsencode(tmp_path / "target"), b"d" + name[:250], name), "rb") as file:
            assert file.read() == name
    assert copy_tree(tmp_path / "source", tmp_path / "target").num_skipped == len(NAMES)


def test_a_name_that_an_address_cannot_hold_or_holds_is_told(tmp_path: Path, target: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / os.fsdecode(b"a\xff")).symlink_to("nowhere")
    report = failed(source, target)
    str(report).encode()  # fails for what is no text
    assert "source/a\\udcff: a link to what is not there" in str(report)


def test_folders_200_deep(tmp_path: Path, target: str) -> None:
    deep = tmp_path.joinpath("source", *["d"] * 200)
    deep.mkdir(parents=True)
    (deep / "f").write_bytes(b"deep")
    assert copy_tree(tmp_path / "source", target).num_files == 1
    assert content(target) == {"d/" * 200 + "f": b"deep"}


def test_10_000_folders(tmp_path: Path) -> None:
    for number in range(10_000):
        (tmp_path / "source" / f"{number}").mkdir(parents=True)
    for number in range(0, 10_000, 10):
        (tmp_path / "source" / f"{number}" / "f").write_bytes(b"x")
    assert copy_tree(tmp_path / "source", tmp_path / "target").num_files == 1000
    assert len(os.listdir(tmp_path / "target")) == 10_000


def test_no_files(tmp_path: Path, target: str) -> None:
    (tmp_path / "source").mkdir()
    assert str(copy_tree(tmp_path / "source", target)).startswith("0 files (0 B) copied in ")
    assert content(target) == {}


# single files


@pytest.mark.parametrize("into", ["folder", "folder/", "name", "new/deep/name", "slash/"])
def test_a_file_goes_into_a_folder_or_becomes_the_file(tmp_path: Path, into: str) -> None:
    (tmp_path / "file.txt").write_bytes(b"one")
    (tmp_path / "folder").mkdir()
    copied = tmp_path / into / "file.txt" if into.startswith(("folder", "slash")) else tmp_path / into
    for expected in ((1, 0), (0, 1)):
        report = copy_tree(tmp_path / "file.txt", f"{tmp_path}/{into}")
        assert (report.num_files, report.num_skipped) == expected
        assert copied.read_bytes() == b"one"


def test_a_file_of_an_address(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_bytes(b"one")
    address = f"memory://single/{tmp_path.name}/f"
    copy_tree(tmp_path / "file.txt", address)
    copy_tree(address, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"one"


def test_a_file_right_below_the_root_of_an_address(tmp_path: Path) -> None:
    name = f"{tmp_path.name}.bin"
    (tmp_path / name).write_bytes(b"one")
    copy_tree(tmp_path / name, f"memory://{name}")
    copy_tree(f"memory://{name}", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"one"
    copy_tree(tmp_path / name, "memory://")
    with pytest.raises(VolumeError, match="they are the same"):
        copy_tree(f"memory://{name}", "memory://")
    open_storage("memory://").delete(name)


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f").write_bytes(b"one")
    copy_tree("f", "g")
    assert Path("g").read_bytes() == b"one"


def test_a_volume_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_VOLUME_ROOT", str(tmp_path / "volumes"))
    source = make_tree(tmp_path / "source")
    copy_tree(source, "/Volumes/main/ml/v/images")
    assert content(tmp_path / "volumes" / "main" / "ml" / "v" / "images") == content(source)


# links and what is no file


def test_links_are_followed_and_loops_are_noted(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "o").write_bytes(b"out")
    (source / "a0" / "up").symlink_to("..")
    (source / "top").symlink_to(source)
    (source / "above").symlink_to(tmp_path)
    (source / "away").symlink_to(tmp_path / "outside")
    (source / "one").symlink_to(tmp_path / "outside" / "o")
    (source / "twin").hardlink_to(tmp_path / "outside" / "o")
    report = copy_tree(source, tmp_path / "target")
    assert {Path(path).name for path, _ in report.notes} == {"up", "top", "above"}
    assert f"{source}/a0/up: a link to {source}, in which it lies" in str(report)
    copied = content(tmp_path / "target")
    assert len(copied) == 63
    assert copied["away/o"] == copied["one"] == copied["twin"] == b"out"
    assert not any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))
    assert (tmp_path / "target" / "twin").stat().st_nlink == 1


def test_links_that_lead_to_each_other_end(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / "source" / name).mkdir(parents=True)
        (tmp_path / "source" / name / "f").write_bytes(name.encode())
        (tmp_path / "source" / name / "over").symlink_to(f"../{other}")
    report = copy_tree(tmp_path / "source", tmp_path / "target")
    assert content(tmp_path / "target") == {"a/f": b"a", "a/over/f": b"b", "b/f": b"b", "b/over/f": b"a"}
    assert len(report.notes) == 2


def test_what_is_no_file_fails_by_its_name_and_the_rest_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(tmp_path / "source")
    os.mkfifo(source / "pipe")
    (source / "dangling").symlink_to("nowhere")
    (source / "self").symlink_to("self")
    (source / "null").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(source)  # the path of a socket must be short
        listening.bind("sock")
    report = failed(source, tmp_path / "target")
    reasons = {Path(path).name: reason for path, reason in report.failures}
    assert reasons == {
        "pipe": "a pipe, which holds nothing to copy",
        "sock": "a socket, which holds nothing to copy",
        "null": "a device, which holds nothing to copy",
        "dangling": "a link to what is not there",
        "self": os.strerror(errno.ELOOP),
    }
    assert report.num_files == 60


def test_a_pipe_alone_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert failed(tmp_path / "pipe", tmp_path / "target").failures[0][1].startswith("a pipe")


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(tmp_path / "source", files=1)
    opened = FolderSource.open

    def swap(self: FolderSource, found: Found) -> Reader:
        path = source / found.name
        path.unlink()
        os.mkfifo(path)
        return opened(self, found)

    monkeypatch.setattr(FolderSource, "open", swap)
    report = failed(source, tmp_path / "target")
    assert report.failures == ((f"{source}/a0/b0/0.bin", "a pipe, which holds nothing to copy"),)


# running it again


def test_a_second_run_copies_nothing_and_then_only_what_changed(tmp_path: Path, target: str) -> None:
    source = make_tree(tmp_path / "source")
    copy_tree(source, target)
    report = copy_tree(source, target)
    assert (report.num_files, report.num_bytes, report.num_skipped) == (0, 0, 60)
    time.sleep(0.01)
    changed = source / "a0" / "b0" / "0.bin"
    changed.write_bytes(changed.read_bytes()[::-1])  # of the same size
    (source / "a1" / "new").write_bytes(b"new")
    report = copy_tree(source, target)
    assert (report.num_files, report.num_skipped) == (2, 59)
    assert content(target) == content(source)


def test_what_the_target_holds_besides_stays(tmp_path: Path, target: str) -> None:
    source = make_tree(tmp_path / "source")
    storage = open_storage(target)
    storage.make_folder("a0")
    storage.write("a0/mine", [b"mine"])
    copy_tree(source, target)
    assert content(target) == {**content(source), "a0/mine": b"mine"}


def test_a_folder_in_the_place_of_a_file_fails(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    (tmp_path / "target" / "a0" / "b0" / "0.bin").mkdir(parents=True)
    (tmp_path / "target" / "a1").write_bytes(b"a file")
    reasons = {path.removeprefix(f"{source}/"): reason for path, reason in failed(source, tmp_path / "target").failures}
    assert reasons == {
        "a0/b0/0.bin": f"{os.strerror(errno.EISDIR)} (at {tmp_path}/target/a0/b0/0.bin)",
        "a1": f"{os.strerror(errno.ENOTDIR)} (at {tmp_path}/target/a1)",
    }


def test_an_export_that_lacks_a_shard_is_not_complete_at_its_new_place(tmp_path: Path) -> None:
    folder, _ = make_export(tmp_path / "exports" / "main.ml.t", [pa.table({"x": [1, 2]}), pa.table({"x": [3]})])
    (folder / "part-00001.parquet").unlink()

    report = failed(tmp_path / "exports", tmp_path / "target")

    assert report.failures == (
        (f"{folder}/_bridge.0.json", "not copied: it lists part-00001.parquet, which is not there in full"),
    )
    with pytest.raises(bridge.ExportNotFoundError):
        bridge.open_export(tmp_path / "target")


def test_what_is_collected_while_it_is_copied_leaves_no_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = make_export(tmp_path / "exports" / "main.ml.t", [pa.table({"x": [1, 2]}), pa.table({"x": [3]})])
    target, put = LocalStorage(tmp_path / "target" / "main.ml.t"), FolderTarget.put

    def collected(self: FolderTarget, name: str, reader: Reader, crew: Crew, *, is_there: bool) -> None:
        if name.endswith("_bridge.0.json"):
            assert [attempt.name for attempt in collect_garbage(target, grace_s=-1)] == [folder.name]
            (target.folder / folder.name).mkdir(exist_ok=True)
        put(self, name, reader, crew, is_there=is_there)

    with monkeypatch.context() as patched:
        patched.setattr(FolderTarget, "put", collected)
        report = failed(tmp_path / "exports", tmp_path / "target")
    assert report.failures == (
        (f"{folder}/_bridge.0.json", "not copied: it lists part-00000.parquet, which is not there in full"),
    )
    assert content(tmp_path / "target") == {}
    copy_tree(tmp_path / "exports", tmp_path / "target")
    assert bridge.open_export(tmp_path / "target").num_rows == 3


def test_shards_that_came_while_their_folder_was_listed_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_export(tmp_path / "exports" / "main.ml.t", [pa.table({"x": [n]}) for n in range(5)])
    listing = FolderSource.list

    def early(self: FolderSource, name: str) -> Iterator[Found]:
        return (found for found in listing(self, name) if not found.name.endswith(("1.parquet", "3.parquet")))

    monkeypatch.setattr(FolderSource, "list", early)
    assert copy_tree(tmp_path / "exports", tmp_path / "target").num_files == 6
    assert bridge.open_export(tmp_path / "target").num_rows == 5


COPY_AND_DIE = """
import os, signal, sys
import bridge
source, target, last, count = sys.argv[1:]
replace, done = os.replace, 0
def replace_or_die(old, new):
    global done
    done += 1
    if done > int(count) or new.endswith(last):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(old, new)
os.replace = replace_or_die
bridge.copy_tree(source, target)
"""


def copy_and_die(source: Path, target: Path, *, at: str = "never", after: int = 10**9) -> None:
    ended = subprocess.run([sys.executable, "-c", COPY_AND_DIE, source, target, at, str(after)], check=False)
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.parametrize("after", [0, 1, 30, 59])
def test_killed_in_mid_copy_nothing_partial_is_there_and_a_rerun_finishes(tmp_path: Path, after: int) -> None:
    source, target = make_tree(tmp_path / "source"), tmp_path / "target"
    copy_and_die(source, target, after=after)
    whole = content(source)
    found = content(target)
    left = [name for name in found if is_temporary(Path(name).name)]
    assert left
    assert {name: data for name, data in found.items() if name not in left}.items() <= whole.items()
    report = copy_tree(source, target)
    assert report.num_skipped + report.num_files == 60
    assert report.num_skipped >= after - 8
    assert content(target) == whole


def test_what_another_copy_is_writing_is_left_alone(tmp_path: Path) -> None:
    source, target = make_tree(tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    live, dead = target / ".bridge-copy-00000000-1", target / ".bridge-copy-00000000-2"
    dead.write_bytes(b"half")
    with open(live, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        copy_tree(source, target)
        assert live.exists()
        assert not dead.exists()


def test_a_copy_whose_file_was_taken_for_left_over_writes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_tree(tmp_path / "source", files=3), tmp_path / "target"
    replace, taken = os.replace, []

    def take_first(old: str, new: str) -> None:
        if not taken:
            taken.append(old)
            os.unlink(old)
        replace(old, new)

    monkeypatch.setattr(os, "replace", take_first)
    copy_tree(source, target)
    assert taken
    assert content(target) == content(source)


def test_temporary_files_of_the_source_are_not_copied(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", files=2)
    (source / ".bridge-copy-0123abcd-7").write_bytes(b"half")
    assert copy_tree(source, tmp_path / "target").num_files == 2


# exports


def make_source_export(tmp_path: Path) -> tuple[Path, Path]:
    root = tmp_path / "exports"
    folder, _ = make_export(root / "main.ml.t", [pa.table({"x": list(range(100))}), pa.table({"x": list(range(50))})])
    return root, folder


def test_an_export_is_complete_at_its_new_place(tmp_path: Path) -> None:
    root, folder = make_source_export(tmp_path)
    copy_tree(root, tmp_path / "copied")
    assert bridge.open_export(tmp_path / "copied").num_rows == 150
    copy_tree(folder, tmp_path / "alone")
    assert bridge.open_export(tmp_path / "alone").num_rows == 150


def test_an_export_is_not_seen_until_all_of_it_is_there(tmp_path: Path) -> None:
    root, _ = make_source_export(tmp_path)
    copy_and_die(root, tmp_path / "copied", at="_bridge.0.json")
    with pytest.raises(ExportNotFoundError):
        bridge.open_export(tmp_path / "copied")
    report = copy_tree(root, tmp_path / "copied")
    assert (report.num_files, report.num_skipped) == (1, 2)
    assert bridge.open_export(tmp_path / "copied").num_rows == 150


def test_an_export_of_which_a_part_fails_stays_absent(tmp_path: Path) -> None:
    root, folder = make_source_export(tmp_path)
    make_export(root / "other", [pa.table({"x": [1]})])
    (folder / "deep").mkdir()
    (folder / "deep" / "gone").symlink_to("nowhere")
    report = failed(root, tmp_path / "copied")
    assert {Path(path).name for path, _ in report.failures} == {"gone", "_bridge.0.json"}
    assert "_bridge.0.json: not copied: some of what it makes complete was not" in str(report)
    with pytest.raises(ExportNotFoundError):
        bridge.open_export(tmp_path / "copied" / "main.ml.t" / folder.name)
    assert bridge.open_export(tmp_path / "copied").num_rows == 1


def test_a_marker_goes_before_what_it_lists_is_replaced(tmp_path: Path) -> None:
    root, folder = make_source_export(tmp_path)
    copy_tree(root, tmp_path / "copied")
    for shard in folder.glob("*.parquet"):
        os.utime(shard)
    copy_and_die(root, tmp_path / "copied", after=0)
    with pytest.raises(ExportNotFoundError):
        bridge.open_export(tmp_path / "copied")
    copy_tree(root, tmp_path / "copied")
    assert bridge.open_export(tmp_path / "copied").num_rows == 150
    # a copy that the marker of a folder above covers
    os.utime(folder / "part-00000.parquet")
    copy_tree(folder / "part-00000.parquet", tmp_path / "copied" / "main.ml.t" / folder.name)
    with pytest.raises(ExportNotFoundError):
        bridge.open_export(tmp_path / "copied")


def test_a_marker_of_an_address_is_copied_again(tmp_path: Path) -> None:
    root, folder = make_source_export(tmp_path)
    address = f"memory://remade/{tmp_path.name}"
    copy_tree(root, address)
    time.sleep(0.01)
    os.utime(folder / "part-00000.parquet")
    assert copy_tree(root, address).num_files == 2
    assert content(address) == {name: data for name, data in content(root).items() if "_leases" not in name}


def test_a_marker_stays_where_nothing_that_it_lists_is_replaced(tmp_path: Path) -> None:
    root, folder = make_source_export(tmp_path)
    copy_tree(root, tmp_path / "copied")
    marker = tmp_path / "copied" / "main.ml.t" / folder.name / "_bridge.0.json"
    before = marker.stat()
    (tmp_path / "notes").write_bytes(b"notes")
    copy_tree(tmp_path / "notes", marker.parent)
    assert copy_tree(root, tmp_path / "copied").num_skipped == 3
    assert marker.stat() == before


def test_a_marker_is_taken_back_where_the_copy_is_stopped_before_it_was_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path / "source")
    with begin(storage, "x") as attempt:
        storage.make_folder(attempt.name)
        storage.write(f"{attempt.name}/file", [b"abc"])
        attempt.commit({}, {"file": 3})
    real = copy._Copy._copy_file

    def stopped(self: Any, found: Any, *rest: Any) -> None:
        real(self, found, *rest)
        if "_bridge." in found.name:
            self._crew.stop()

    monkeypatch.setattr(copy._Copy, "_copy_file", stopped)
    copy_tree(tmp_path / "source", tmp_path / "target")

    assert [path.name for path in (tmp_path / "target" / attempt.name).iterdir()] == ["file"]


def test_markers_come_after_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tree(tmp_path / "source")
    for folder in ("", "a0", "a0/b0", "a1"):
        (source / folder / "_bridge.0.json").write_bytes(b"marker")
    came: list[str] = []
    replace = os.replace

    def noted(old: str, new: str) -> None:
        replace(old, new)
        came.append(new.removeprefix(f"{tmp_path}/target/"))

    monkeypatch.setattr(os, "replace", noted)
    copy_tree(source, tmp_path / "target")
    assert [name.endswith("_bridge.0.json") for name in came] == [False] * 60 + [True] * 4


def test_leases_are_not_copied(tmp_path: Path) -> None:
    root, _ = make_source_export(tmp_path)
    (root / "_leases").mkdir(exist_ok=True)
    (root / "_leases" / f"{'0' * 12}.{'1' * 12}.3").write_bytes(b"")
    copy_tree(root, tmp_path / "copied")
    assert list((tmp_path / "copied" / "_leases").iterdir()) == []


# what fails


def test_a_file_that_cannot_be_read_does_not_stop_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tree(tmp_path / "source")
    opened = os.open

    def refuse(path: str, *arguments: object, **options: object) -> int:
        if path.endswith("source/a0/b0/0.bin"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    report = failed(source, tmp_path / "target")
    assert report.failures == ((f"{source}/a0/b0/0.bin", "Permission denied"),)
    assert report.num_files == 59
    monkeypatch.undo()
    assert copy_tree(source, tmp_path / "target").num_files == 1


@pytest.mark.parametrize("change", ["longer", "shorter", "equal"])
@pytest.mark.parametrize("size", [5_000, 3 << 20])
def test_a_file_that_changes_once_is_copied_again(
    tmp_path: Path, change: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "file"
    source.write_bytes(bytes(size))
    os.utime(source, ns=(1, 1))
    copy_range = os.copy_file_range
    new = b"n" * {"longer": size + 100, "shorter": size // 2, "equal": size}[change]

    def changing(*arguments: object) -> int:
        moved = copy_range(*arguments) if change == "equal" else None  # type: ignore[arg-type]
        if source.read_bytes() != new:
            source.write_bytes(new)
        return moved or copy_range(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "copy_file_range", changing)
    copy_tree(source, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == new


@pytest.mark.parametrize("how", ["written", "renamed"])
def test_a_file_that_changes_after_it_was_read_is_written_again(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_renames(monkeypatch)
    source = tmp_path / "file"
    source.write_bytes(b"old")
    os.utime(source, ns=(1, 1))
    write = LocalStorage.write

    def changing(self: LocalStorage, name: str, blocks: Iterator[bytes]) -> None:
        write(self, name, blocks)
        if source.read_bytes() == b"old":
            (tmp_path / "new").write_bytes(b"new")
            os.utime(tmp_path / "new", ns=(2, 2))
            (shutil.move if how == "renamed" else shutil.copy2)(tmp_path / "new", source)

    monkeypatch.setattr(LocalStorage, "write", changing)
    copy_tree(source, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"new"


def test_a_file_of_an_address_that_changes_once_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_storage(f"memory://changing/{tmp_path.name}")
    source.write("f", [b"old"])
    read = FsspecStorage.read

    def changing(self: FsspecStorage, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = read(self, name, start, stop)
        if data == b"old":
            source.delete("f")
            source.write("f", [b"new, and longer"])
        return data

    monkeypatch.setattr(FsspecStorage, "read", changing)
    copy_tree(str(source), tmp_path / "target")
    assert content(tmp_path / "target") == {"f": b"new, and longer"}


def test_a_file_that_keeps_changing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tree(tmp_path / "source", files=2)
    copy_range = os.copy_file_range

    def growing(*arguments: object) -> int:
        with open(source / "a0" / "b0" / "0.bin", "ab") as file:
            file.write(b"more")
        return copy_range(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "copy_file_range", growing)
    monkeypatch.setattr("bridge.volumes.storage._RETRY_DELAYS_S", (0.01, 0.01))
    report = failed(source, tmp_path / "target", num_threads=1)
    assert (f"{source}/a0/b0/0.bin", "it changed while it was copied") in report.failures
    assert list(content(tmp_path / "target")) == ["a1/b1/1.bin"]


def test_a_full_target_ends_the_copy_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tree(tmp_path / "source", files=300)
    copy_range, tries = os.copy_file_range, []

    def fill(*arguments: object) -> int:
        tries.append(1)
        if len(tries) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy_range(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "copy_file_range", fill)
    report = failed(source, tmp_path / "target", num_threads=4)
    assert len(tries) <= 24
    assert 1 <= len(report.failures) <= 4
    assert report.stopped == f"There is no room left in {tmp_path}/target: free some. The rest was not tried."
    assert report.stopped in str(report)
    assert all(not is_temporary(Path(name).name) for name in content(tmp_path / "target"))
    monkeypatch.undo()
    assert copy_tree(source, tmp_path / "target").num_skipped == report.num_files


def test_a_target_that_is_full_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = make_tree(tmp_path / "source")
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *rest: fill() if flags & os.O_CREAT else opened(path, flags))
    with pytest.raises(VolumeError, match=r"target cannot be written: No space left on device\."):
        copy_tree(source, tmp_path / "target")


def test_a_source_that_always_fails_ends_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, opened = make_tree(tmp_path / "source", files=300), os.open
    is_broken = True

    def fail(path: str, *arguments: object, **options: object) -> int:
        if is_broken and path.endswith(".bin"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr("bridge.volumes.storage._RETRY_DELAYS_S", (0.001,))
    report = failed(source, tmp_path / "target", num_threads=8)
    assert 16 <= len(report.failures) <= 32 + 8
    assert re.fullmatch(
        r"The last \d+ tries all failed: see that both places can be read and written\. The rest was not tried\.",
        report.stopped,
    )
    is_broken = False
    assert copy_tree(source, tmp_path / "target").num_files == 300


def test_failures_with_successes_between_do_not_end_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, opened = make_tree(tmp_path / "source", files=300), os.open

    def fail(path: str, *arguments: object, **options: object) -> int:
        if path.endswith(("1.bin", "3.bin", "5.bin")):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr("bridge.volumes.storage._RETRY_DELAYS_S", (0.001,))
    report = failed(source, tmp_path / "target", num_threads=1)
    assert (report.num_files, len(report.failures), report.stopped) == (210, 90, "")


def test_an_error_that_is_no_failure_of_a_file_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(FolderTarget, "put", fail)
    with pytest.raises(ZeroDivisionError):
        copy_tree(make_tree(tmp_path / "source"), tmp_path / "target")


def refuse_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda old, new: (refuse if is_temporary(Path(old).name) else rename)(old, new))
    monkeypatch.setattr(os, "replace", refuse)


@pytest.mark.parametrize("is_other", [True, False])
def test_what_another_copy_wrote_meanwhile_is_not_deleted(
    tmp_path: Path, is_other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Reader) -> None:
        if is_other:
            os.unlink(tmp_path / "target")
            (tmp_path / "target").write_bytes(b"one")
        raise VolumeError("lost")

    refuse_renames(monkeypatch)
    monkeypatch.setattr(Reader, "check", fail)
    (tmp_path / "source").write_bytes(b"one")
    assert failed(tmp_path / "source", tmp_path / "target").failures == ((f"{tmp_path}/source", "lost"),)
    assert (tmp_path / "target").exists() is is_other


def test_an_old_copy_stays_where_the_new_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    refuse_renames(monkeypatch)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"one")
    copy_tree(source, target)
    source.write_bytes(b"other")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", fail)
        assert failed(source, target).failures == ((str(source), "Permission denied"),)
    assert target.read_bytes() == b"one"
    copy_tree(source, target)
    assert target.read_bytes() == b"other"


def test_where_files_cannot_be_renamed_they_are_written_at_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_renames(monkeypatch)
    source, target = make_tree(tmp_path / "source"), tmp_path / "target"
    copy_tree(source, target)
    assert content(target) == content(source)
    assert copy_tree(source, target).num_skipped == 60


def test_where_times_are_not_kept_a_file_that_is_not_older_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    source, target = make_tree(tmp_path / "source"), tmp_path / "target"
    monkeypatch.setattr(os, "utime", refuse)
    copy_tree(source, target)
    assert copy_tree(source, target).num_skipped == 60


# what is refused


@pytest.mark.parametrize(
    ("source", "target", "how"),
    [
        ("tree", "tree/a0/copy", "one of them lies in the other"),
        ("tree/a0", "tree", "one of them lies in the other"),
        ("tree", "tree", "they are the same"),
        ("tree", "alias", "they are the same"),
        ("alias", "tree/new", "one of them lies in the other"),
        ("file", "file", "they are the same"),
        ("file", "hard", "they are the same"),
        ("file", ".", "they are the same"),
    ],
)
def test_a_copy_into_itself_is_refused(tmp_path: Path, source: str, target: str, how: str) -> None:
    make_tree(tmp_path / "tree")
    (tmp_path / "alias").symlink_to("tree")
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "hard").symlink_to("file")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(VolumeError, match=how):
        copy_tree(tmp_path / source, tmp_path / target)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("source", "target", "how"),
    [
        ("tree", "alias", "they are the same"),
        ("alias/0.bin", "tree/0.bin", "they are the same"),
        ("tree", "alias/new/deep", "one of them lies in the other"),
        ("tree/a0/b0", "alias", "one of them lies in the other"),
    ],
)
def test_a_copy_into_itself_by_another_name_is_refused(
    tmp_path: Path, source: str, target: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path / "tree")
    (tmp_path / "tree" / "0.bin").write_bytes(b"x")
    (tmp_path / "alias").symlink_to("tree")
    monkeypatch.setattr(os.path, "realpath", os.path.abspath)  # as if it was mounted at two places
    with pytest.raises(VolumeError, match=how):
        copy_tree(tmp_path / source, tmp_path / target)


def test_an_address_into_itself_is_refused() -> None:
    open_storage("memory://self/a").make_folder("b")
    with pytest.raises(VolumeError, match="one of them lies in the other"):
        copy_tree("memory://self/a", "memory://self/a/b/c")


def test_a_missing_source_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"there is nothing at {tmp_path}/missing"):
        copy_tree(tmp_path / "missing", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_source_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(VolumeError, match=f"{tmp_path}/file/in cannot be read: Not a directory"):
        copy_tree(tmp_path / "file" / "in", tmp_path / "target")


def test_a_target_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(VolumeError, match=f"{tmp_path}/file cannot be written: File exists"):
        copy_tree(make_tree(tmp_path / "source"), tmp_path / "file")


def test_less_than_one_thread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_threads is 0; give 1 or more"):
        copy_tree(tmp_path, tmp_path / "target", num_threads=0)


# interrupts, threads, reports


INTERRUPTED = """
import os, sys, time
import bridge
copy_range = os.copy_file_range
def slow(*arguments):
    print("copying", flush=True)
    time.sleep(0.05)
    return copy_range(*arguments)
os.copy_file_range = slow
bridge.copy_tree(sys.argv[1], sys.argv[2])
"""


def test_an_interrupt_stops_quickly_and_leaves_no_half_file(tmp_path: Path) -> None:
    source, target = make_tree(tmp_path / "source", files=5000), tmp_path / "target"
    command = [sys.executable, "-c", INTERRUPTED, source, target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = process.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert errors.rstrip().endswith("KeyboardInterrupt")
    whole, copied = content(source), content(target)
    assert 0 < len(copied) < 5000
    assert copied.items() <= whole.items()


def test_a_probe_that_another_copy_takes_for_left_over_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, left = fcntl.flock, 2

    def taken(descriptor: int, how: int) -> None:
        nonlocal left
        if left:
            left -= 1
            os.unlink(next(tmp_path.iterdir()))
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", taken)
    began = time.monotonic()
    assert FolderTarget(tmp_path).probe()
    assert (left, list(tmp_path.iterdir())) == (0, [])
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.unlink(next(tmp_path.iterdir())))
    assert not FolderTarget(tmp_path).probe()
    assert time.monotonic() - began < 2


def test_copies_that_start_at_once_leave_each_others_probes_alone(tmp_path: Path) -> None:
    until, sweeper = time.monotonic() + 0.5, FolderTarget(tmp_path)
    found: list[bool] = []

    def probe() -> None:
        while time.monotonic() < until:
            found.append(FolderTarget(tmp_path).probe())

    threads = [threading.Thread(target=probe) for _ in range(2)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        for entry in os.listdir(tmp_path):
            sweeper.sweep(entry)
    for thread in threads:
        thread.join()
    assert all(found)
    assert len(found) > 20


def test_without_what_only_linux_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((os, "posix_fadvise"), (os, "copy_file_range"), (time, "pthread_getcpuclockid")):
        monkeypatch.delattr(module, name)
    source = make_tree(tmp_path / "source")
    assert copy_tree(source, tmp_path / "target").num_files == 60
    assert content(tmp_path / "target") == content(source)


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = threading.active_count()
    copy_tree(make_tree(tmp_path / "source"), tmp_path / "target")
    assert threading.active_count() == before


@pytest.mark.parametrize("num_threads", [1, 2, 40])
def test_any_number_of_threads(tmp_path: Path, num_threads: int) -> None:
    source = make_tree(tmp_path / "source", files=400)
    assert copy_tree(source, tmp_path / "target", num_threads=num_threads).num_files == 400
    assert content(tmp_path / "target") == content(source)


def test_few_files_wait_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.volumes.crew._MOST_WAITING", 100)
    source = make_tree(tmp_path / "source", files=3000)
    most, put = 0, FolderTarget.put

    def watched(self: FolderTarget, name: str, reader: Reader, crew: Crew, *, is_there: bool) -> None:
        nonlocal most
        most = max(most, crew._num_waiting)
        put(self, name, reader, crew, is_there=is_there)

    monkeypatch.setattr(FolderTarget, "put", watched)
    assert copy_tree(source, tmp_path / "target", num_threads=2).num_files == 3000
    assert 0 < most < 100 + 2 * 32


def test_a_listing_that_breaks_off_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    for number in range(300):
        (tmp_path / "source" / f"{number}").write_bytes(b"x")
    scandir, breaks = os.scandir, [50, 250]

    class Breaking:
        def __init__(self, path: str) -> None:
            self.entries, self.seen, self.until = scandir(path), 0, breaks.pop(0) if breaks else 10**9

        def __iter__(self) -> Breaking:
            return self

        def __next__(self) -> os.DirEntry[str]:
            if self.seen == self.until:
                self.entries.close()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.seen += 1
            return next(self.entries)

    monkeypatch.setattr(os, "scandir", Breaking)
    assert copy_tree(tmp_path / "source", tmp_path / "target").num_files == 300
    assert breaks == []
    monkeypatch.undo()
    assert len(os.listdir(tmp_path / "target")) == 300


def test_a_report_prints_what_to_do_next() -> None:
    report = CopyReport(3000, 460_800_000, 0, 0.93, tuple((f"/s/{n}", "Input/output error") for n in range(12)))
    assert str(report).splitlines() == [
        "3,000 files (439 MiB) copied in 930 ms; 0 skipped",
        "12 failed:",
        *(f"  /s/{n}: Input/output error" for n in range(10)),
        "  and 2 more",
        "  Mend that and run it again: what is there is skipped.",
    ]
    assert str(CopyReport(1, 5, 7, 0.001)) == "1 file (5 B) copied in 1 ms; 7 skipped"
    assert "/s/two\\nlines\\udcff: no" in str(CopyReport(0, 0, 0, 0, (("/s/two\nlines\udcff", "no"),)))


def test_the_error_carries_its_report_through_pickling() -> None:
    report = CopyReport(1, 2, 3, 4)
    error = pickle.loads(pickle.dumps(CopyError("not whole", report)))
    assert isinstance(error, OSError)
    assert (str(error), error.report) == ("not whole", report)
