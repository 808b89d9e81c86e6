from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bridge.config import load_settings
from bridge.volumes.cache import FileCache
from bridge.volumes.stores import LocalStorage
from tests.unit.cli.conftest import Run


@pytest.fixture
def cache() -> FileCache:
    settings = load_settings()
    return FileCache(settings.cache_dir, max_bytes=settings.cache_max_bytes)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "volume")
    for name in ("cats/1.jpg", "cats/2.jpg", "dogs/1.jpg"):
        storage.make_folder(name.partition("/")[0])
        storage.write(name, [bytes(2048)])
    return storage


def fields(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_ls_shows_folders_and_the_limits(run: Run, cache: FileCache, storage: LocalStorage) -> None:
    with cache.epoch() as epoch:
        for name in ("cats/1.jpg", "cats/2.jpg", "dogs/1.jpg"):
            epoch.fetch(storage, name)
    result = run("cache", "ls")
    assert result.exit_code == 0, result.output
    header, _, cats, dogs, _, total = fields(result.stdout)
    assert header == ["files", "from", "files", "size", "last", "used"]
    assert cats == [f"{storage}/cats", "2", "32", "KiB", "just", "now"]
    assert dogs == [f"{storage}/dogs", "1", "16", "KiB", "just", "now"]
    assert " ".join(total) == f"3 files, 48 KiB of at most 50 GiB in {cache.folder}"


def test_ls_tells_when_a_folder_was_last_used(run: Run, cache: FileCache, storage: LocalStorage) -> None:
    with cache.epoch() as epoch:
        path = epoch.fetch(storage, "cats/1.jpg")
    used = time.time() - 2 * 3600 - 5 * 60
    os.utime(path.parents[1] / "entry.json", (used, used))
    assert run("cache", "ls").stdout.splitlines()[2].endswith("  2 h 05 min ago")


def test_clear_keeps_what_is_in_use(run: Run, cache: FileCache, storage: LocalStorage) -> None:
    with cache.epoch() as epoch:
        epoch.fetch(storage, "cats/1.jpg")
    with cache.epoch() as epoch:
        held = epoch.fetch(storage, "dogs/1.jpg")
        result = run("cache", "clear")
        assert result.exit_code == 0, result.output
        first, second, *_, last = result.stdout.splitlines()
        assert first == f"freed 1 file, 16 KiB in {cache.folder}"
        assert second == "kept 1 file, 16 KiB, which are in use:"
        assert last.startswith(f"{storage}/dogs ")
        assert held.exists()
    assert run("cache", "clear").stdout == f"freed 1 file, 16 KiB in {cache.folder}\n"
    assert storage.path("cats/1.jpg").exists()


def test_a_cache_that_was_never_used_is_empty(run: Run, cache: FileCache) -> None:
    assert run("cache", "ls").stdout == f"0 files, 0 B of at most 50 GiB in {cache.folder}\n"
    assert run("cache", "clear").stdout == f"freed 0 files, 0 B in {cache.folder}\n"
    assert not cache.folder.exists()


@pytest.mark.parametrize("command", ["ls", "clear"])
@pytest.mark.parametrize(
    ("made", "reason"),
    [("", "Not a directory"), ("files", "it holds other things, and no CACHEDIR.TAG of such a cache")],
)
def test_what_is_no_cache_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, made: str, reason: str
) -> None:
    path = tmp_path / "cache" / made
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    monkeypatch.setenv("BRIDGE_CACHE_DIR", str(tmp_path / "cache"))
    result = run("cache", command)
    assert result.exit_code == 1
    assert result.stderr == (
        f"VolumeError: the cache {tmp_path}/cache cannot be used: {reason}.\n"
        "  Set cache_dir (BRIDGE_CACHE_DIR) to a new folder.\n"
    )
    assert path.read_bytes() == b""
