from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.errors import VolumeError
from bridge.volumes.commit import Attempt, Marker, begin, withdraw_attempt
from bridge.volumes.lease import Lease
from bridge.volumes.storage import Entry, Storage
from bridge.volumes.stores import LocalStorage
from bridge.volumes.survey import survey


def completed(storage: Storage) -> Attempt:
    with begin(storage, "a") as opened:
        storage.make_folder(opened.name)
        storage.write(f"{opened.name}/file", [b"abc"])
        opened.commit({"said": 1}, {"file": 3})
    return opened.attempt


def test_each_attempt_is_told_as_it_stands(storage: Storage) -> None:
    complete, withdrawn = completed(storage), completed(storage)
    withdraw_attempt(storage, withdrawn)
    left = Attempt(1, "a", "0" * 12)
    storage.make_folder(f"{left.name}/deep")
    storage.write(f"{left.name}/deep/part", [bytes(100)])
    storage.write(f"{left.name}/part", [bytes(20)])
    torn = Attempt(2, "a", "1" * 12)
    storage.make_folder(torn.name)
    storage.write(f"{torn.name}/_bridge.1.json", [b"{"])
    reader = Lease(storage, complete.attempt_id)
    reader.start()
    with begin(storage, "a") as opened:
        storage.make_folder(opened.name)
        found = {attempt: look() for attempt, look in survey(storage).items()}
    reader.end()

    assert list(found) == [opened.attempt, withdrawn, complete, torn, left]
    assert found[complete][1] == Marker({"said": 1}, {"file": 3})
    assert [marker for attempt, (_, marker) in found.items() if attempt != complete] == [None] * 4
    assert [(one.state, one.num_holders, one.num_bytes, one.problem) for one, _ in found.values()] == [
        ("being written", 1, 0, None),
        ("withdrawn", 0, 3, None),
        ("complete", 1, 3, None),
        ("left behind", 0, 1, "its marker is damaged"),
        ("left behind", 0, 120, None),
    ]
    assert [one.path for one, _ in found.values()] == [f"{storage}/{attempt.name}" for attempt in found]
    assert 0 <= found[complete][0].age_s < 60


def test_nothing_is_written_where_there_is_nothing(tmp_path: Path) -> None:
    assert survey(LocalStorage(tmp_path)) == survey(LocalStorage(tmp_path / "missing")) == {}
    assert list(tmp_path.iterdir()) == []


def test_leases_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    completed(LocalStorage(tmp_path))

    class Closed(LocalStorage):
        def list(self, name: str = "") -> Iterator[Entry]:
            if name == "_leases":
                raise PermissionError(13, "Permission denied")
            return super().list(name)

    with pytest.raises(VolumeError, match=rf"the leases of {tmp_path} cannot be read: Permission denied\."):
        survey(Closed(tmp_path))
