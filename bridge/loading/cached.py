"""Columns that name files on a volume: their values become the paths of local copies."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pyarrow as pa

from bridge.columns.policies import mark_of
from bridge.config import load_settings
from bridge.loading.prefetch import mapped_ahead
from bridge.volumes.cache import FileCache
from bridge.volumes.stores import open_storage

if TYPE_CHECKING:
    from pathlib import Path

    from bridge.volumes.cache import Epoch
    from bridge.volumes.storage import Storage

_THREADS = 32  # they wait for the volume


def local_files(table: pa.Table, epoch: Epoch | None = None) -> pa.Table:
    """Return the rows with a local path for each value of the columns that `cached_file()` marks.

    A copy stays in the cache until `epoch` is closed; without one, as long as the process lives.

    Raises:
        FileNotFoundError: A file is not there.
        VolumeError: A file cannot be read.
    """
    for index, field in enumerate(table.schema):
        if mark_of(field) == "cached_file":
            paths = _fetched(table.column(index).to_pylist(), field.name, epoch or _epoch_of_process(open_cache()))
            table = table.set_column(index, pa.field(field.name, pa.string()), pa.array(paths, pa.string()))
    return table


def open_cache() -> FileCache:
    """Return the cache of the settings."""
    settings = load_settings()
    return _cache(settings.cache_dir, settings.cache_max_bytes)


def _fetched(paths: list[str | None], column: str, epoch: Epoch) -> list[str | None]:
    open_place = functools.cache(open_storage)

    def fetch(path: str) -> str:
        folder, _, name = path.rpartition("/")
        storage: Storage = open_place(folder or "/")
        try:
            return str(epoch.fetch(storage, name))
        except FileNotFoundError as exc:
            raise FileNotFoundError(f"column {column!r} names {path}, which is not there.") from exc

    wanted = sorted({path for path in paths if path})
    with ThreadPoolExecutor(_THREADS, "bridge-files") as threads:
        local = dict(zip(wanted, mapped_ahead(threads, fetch, wanted, len(wanted)), strict=True))
    return [local[path] if path else path for path in paths]  # a mask puts "" in the place of NULL


@functools.cache
def _cache(folder: Path, max_bytes: int) -> FileCache:
    return FileCache(folder, max_bytes=max_bytes)


@functools.cache
def _epoch_of_process(cache: FileCache) -> Epoch:
    return cache.epoch()
