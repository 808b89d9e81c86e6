from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.volumes.storage import Storage
from bridge.volumes.stores import FsspecStorage, LocalStorage, open_storage


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield LocalStorage(tmp_path / "root")
        return
    opened = open_storage(f"memory://{tmp_path.name}")
    assert isinstance(opened, FsspecStorage)
    yield opened
    opened._filesystem.store.clear()
    opened._filesystem.pseudo_dirs[:] = [""]
