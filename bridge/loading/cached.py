"""Columns that name files on a volume: their values become the paths of local copies."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from bridge.columns.policies import mark_of
from bridge.config import load_settings
from bridge.loading.ahead import mapped_ahead
from bridge.volumes.cache import FileCache
from bridge.volumes.stores import open_storage

if TYPE_CHECKING:
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
            paths = local_paths(table.column(index), field.name, epoch or _epoch_of_process(open_cache()))
            table = table.set_column(index, pa.field(field.name, pa.string()), paths)
    return table


def open_cache(folder: str | os.PathLike[str] | None = None) -> FileCache:
    """Return the cache of the settings, or one in another folder."""
    settings = load_settings()
    return _cache(Path(folder or settings.cache_dir), settings.cache_max_bytes)


def local_paths(column: pa.ChunkedArray, name: str, epoch: Epoch) -> pa.ChunkedArray:
    """Return the local path for each value of a column, as `local_files` does."""
    paths: list[str | None] = column.to_pylist()
    open_place = functools.cache(open_storage)

    def fetch(path: str) -> str:
        folder, _, file = path.rpartition("/")
        storage: Storage = open_place(folder or "/")
        try:
            return str(epoch.fetch(storage, file))
        except FileNotFoundError as exc:
            raise FileNotFoundError(f"column {name!r} names {path}, which is not there.") from exc

    wanted = sorted({path for path in paths if path})
    with ThreadPoolExecutor(_THREADS, "bridge-files") as threads:
        local = dict(zip(wanted, mapped_ahead(threads, fetch, wanted, len(wanted)), strict=True))
    # a mask puts "" in the place of NULL
    return pa.chunked_array([[local[path] if path else path for path in paths]], pa.string())


@functools.cache
def _cache(folder: Path, max_bytes: int) -> FileCache:
    return FileCache(folder, max_bytes=max_bytes)


@functools.cache
def _epoch_of_process(cache: FileCache) -> Epoch:
    return cache.epoch()
