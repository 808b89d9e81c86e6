from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import VolumeError
from bridge.volumes.commit import (
    Attempt,
    attempts,
    complete_attempts,
    discard,
    new_attempt,
    read_marker,
    write_marker,
)

BODY = {"name": "é", "rows": [1, 2, {"deep": None}], "digest": "not this one"}


def completed(parent: Path, label: str = "a", body: dict[str, Any] | None = None) -> Attempt:
    attempt = new_attempt(parent, label)
    attempt.folder.mkdir()
    write_marker(attempt, BODY if body is None else body)
    return attempt


def at(parent: Path, generation: int, attempt_id: str, label: str = "a") -> Attempt:
    """Return a complete attempt of that name."""
    attempt = Attempt(parent / f"{generation:08d}-{label}-{attempt_id}", generation, label, attempt_id)
    attempt.folder.mkdir()
    write_marker(attempt, {"id": attempt_id})
    return attempt


def test_a_marker_makes_an_attempt_complete(tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path / "deep/parent", "a")
    assert not attempt.folder.exists()
    attempt.folder.mkdir()
    (attempt.folder / "file").write_text("x")
    assert read_marker(attempt.folder) is None
    assert list(complete_attempts(attempt.folder.parent)) == []

    write_marker(attempt, BODY)

    assert read_marker(attempt.folder) == BODY
    assert list(complete_attempts(attempt.folder.parent)) == [(attempt, BODY)]
    assert list(attempts(attempt.folder.parent)) == [attempt]


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        assert read_marker(path) is None
        assert list(attempts(path)) == []
        assert list(complete_attempts(path)) == []


def test_other_names_are_no_attempts(tmp_path: Path) -> None:
    for name in ("1-a-0123456789ab", "00000001-A-0123456789ab", "00000001-a-0123456789a", "x00000001-a-0123456789ab"):
        (tmp_path / name).mkdir()

    assert list(attempts(tmp_path)) == []


def test_each_attempt_has_a_generation_above_all_that_are_there(tmp_path: Path) -> None:
    first = completed(tmp_path)
    unfinished = new_attempt(tmp_path, "b")
    unfinished.folder.mkdir()
    third = new_attempt(tmp_path, "c")

    assert [attempt.generation for attempt in (first, unfinished, third)] == [1, 2, 3]
    assert len({first.attempt_id, unfinished.attempt_id, third.attempt_id}) == 3


def test_the_highest_generation_wins_then_the_smallest_id(tmp_path: Path) -> None:
    made = [at(tmp_path, *name) for name in [(2, "b" * 12), (3, "c" * 12), (1, "0" * 12), (3, "a" * 12), (2, "d" * 12)]]
    at(tmp_path, 9, "f" * 12, label="other")

    found = [attempt for attempt, _ in complete_attempts(tmp_path, "a")]

    assert [(attempt.generation, attempt.attempt_id[0]) for attempt in found] == [
        (3, "a"), (3, "c"), (2, "b"), (2, "d"), (1, "0"),
    ]  # fmt: skip
    assert sorted(map(str, made)) == sorted(map(str, found))
    assert next(complete_attempts(tmp_path))[0].label == "other"
    assert [body["id"][0] for _, body in complete_attempts(tmp_path, "a")] == ["a", "c", "b", "d", "0"]


def test_an_attempt_without_a_whole_marker_does_not_hide_others(tmp_path: Path) -> None:
    good = completed(tmp_path)
    bad = completed(tmp_path)
    (bad.folder / "_bridge.0.json").write_bytes(b"{}")

    assert [attempt for attempt, _ in complete_attempts(tmp_path)] == [good]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"garbage",
        b"{}\n{}",
        b"[]\n{}",
        b"null\nnull",
        b'{"digest": null}\n{}',
        b"\xff\xfe\n\x00",
        b'{"digest',
    ],
)
def test_garbage_is_no_marker(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "_bridge.0.json").write_bytes(content)

    assert read_marker(tmp_path) is None


def test_every_part_of_a_marker_is_no_marker(tmp_path: Path) -> None:
    path = completed(tmp_path).folder / "_bridge.0.json"
    whole = path.read_bytes()

    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_marker(path.parent) is None, length
    path.write_bytes(whole + b" ")
    assert read_marker(path.parent) is None


@given(st.data())
def test_a_marker_with_one_wrong_bit_is_no_marker(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = completed(tmp_path_factory.mktemp("m")).folder / "_bridge.0.json"
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)

    assert read_marker(path.parent) is None


def test_a_second_marker_counts_where_the_first_is_torn(tmp_path: Path) -> None:
    attempt = completed(tmp_path)
    whole = (attempt.folder / "_bridge.0.json").read_bytes()
    (attempt.folder / "_bridge.0.json").write_bytes(whole[:20])
    (attempt.folder / "_bridge.1.json").write_bytes(whole)

    assert read_marker(attempt.folder) == BODY


def test_a_marker_that_vanishes_while_it_is_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "_bridge.0.json").symlink_to(tmp_path / "gone")  # listed, and not there when it is opened

    assert read_marker(tmp_path) is None


def test_a_marker_is_written_once(tmp_path: Path) -> None:
    attempt = completed(tmp_path)

    with pytest.raises(VolumeError, match=r"the marker .*_bridge\.0\.json cannot be written: File exists"):
        write_marker(attempt, {"another": 1})
    assert read_marker(attempt.folder) == BODY


def test_a_marker_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="cannot be written: No such file or directory"):
        write_marker(new_attempt(tmp_path, "a"), {})


def test_a_marker_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = new_attempt(tmp_path, "a")
    attempt.folder.mkdir()
    # A mount that loses bytes cannot be had for a test.
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"")

    with pytest.raises(VolumeError, match="does not read back as it was written"):
        write_marker(attempt, {})


def test_a_parent_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    with pytest.raises(VolumeError, match=r"file cannot be written: File exists.\n  Give a folder or volume you may"):
        new_attempt(tmp_path / "file", "a")
    with pytest.raises(VolumeError, match=r"file/below cannot be written: Not a directory"):
        new_attempt(tmp_path / "file/below", "a")


def test_discard_deletes_the_marker_first_and_then_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = completed(tmp_path)
    (attempt.folder / "_SUCCESS").write_text("")
    (attempt.folder / "a/b").mkdir(parents=True)
    (attempt.folder / "a/b/file").write_text("x")
    (attempt.folder / "a/link").symlink_to(tmp_path, target_is_directory=True)
    order: list[str] = []
    unlink = Path.unlink

    def noted(self: Path, missing_ok: bool = False) -> None:
        order.append(self.name)
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)

    discard(attempt)
    discard(attempt)

    assert order[0] == "_bridge.0.json"
    assert sorted(order) == ["_SUCCESS", "_bridge.0.json", "file", "link"]
    assert list(tmp_path.iterdir()) == []


WRITER = """
import json, os, signal, sys
from pathlib import Path
from bridge.volumes import commit

parent, step = Path(sys.argv[1]), sys.argv[2]

def die_at(name):
    if step == name:
        os.kill(os.getpid(), signal.SIGKILL)

attempt = commit.new_attempt(parent, "a")
die_at("before the folder")
attempt.folder.mkdir()
die_at("before the files")
(attempt.folder / "file").write_bytes(b"x" * 1000)
die_at("between the files and the marker")
if step == "in the marker":
    fsync = os.fsync
    def half(file):
        os.truncate(file, os.fstat(file).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    os.fsync = half
commit.write_marker(attempt, {"n": 1})
die_at("after the marker")
"""


@pytest.mark.parametrize(
    "step",
    ["before the folder", "before the files", "between the files and the marker", "in the marker", "after the marker"],
)
def test_a_killed_writer_leaves_nothing_that_readers_see(tmp_path: Path, step: str) -> None:
    earlier = completed(tmp_path, body={"n": 0})

    child = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path), step], check=False, env=dict(os.environ))

    assert child.returncode == -signal.SIGKILL
    seen = [body["n"] for _, body in complete_attempts(tmp_path)]
    assert seen == ([1, 0] if step == "after the marker" else [0])
    following = completed(tmp_path, body={"n": 2})
    assert following.generation == earlier.generation + (1 if step == "before the folder" else 2)
    assert next(complete_attempts(tmp_path)) == (following, {"n": 2})


def test_a_marker_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    head, body = (completed(tmp_path).folder / "_bridge.0.json").read_text().split("\n")

    assert list(json.loads(head)) == ["digest"]
    assert json.loads(body) == BODY
