"""bridge cache ls, bridge cache clear."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import typer

from bridge.cli import options
from bridge.cli.screen import print_table
from bridge.display import format_bytes, format_count, format_seconds, plain_table
from bridge.errors import VolumeError

if TYPE_CHECKING:
    from bridge.volumes.cache import CachedFile, FileCache

app = typer.Typer(no_args_is_help=True, help="Local copies of files on volumes.")


@app.command("ls")
def show(profile: options.Profile = None) -> None:
    """Show what the cache holds, by the folder that the files are from."""
    with _opened(profile) as cache:
        files = list(cache.entries())
    if files:
        _print_folders(files)
        print()
    held = _amount(len(files), sum(file.num_bytes for file in files))
    print(f"{held} of at most {format_bytes(cache.max_bytes)} in {cache.folder}")


@app.command("clear")
def clear(profile: options.Profile = None) -> None:
    """Delete the copies that no process uses. The files themselves stay."""
    with _opened(profile) as cache:
        cleared = cache.clear()
    print(f"freed {_amount(cleared.num_files, cleared.num_bytes)} in {cache.folder}")
    if cleared.kept:
        print(f"kept {_amount(len(cleared.kept), sum(file.num_bytes for file in cleared.kept))}, which are in use:")
        print()
        _print_folders(cleared.kept)


@contextlib.contextmanager
def _opened(profile: str | None) -> Iterator[FileCache]:
    from bridge.config import load_settings
    from bridge.volumes.cache import FileCache

    settings = load_settings(profile=profile)
    try:
        yield FileCache(settings.cache_dir, max_bytes=settings.cache_max_bytes)
    except OSError as exc:
        raise VolumeError(
            f"the cache {settings.cache_dir} cannot be used: {exc.strerror}.\n"
            "  Set cache_dir (BRIDGE_CACHE_DIR) to a new folder."
        ) from exc


def _amount(num_files: int, num_bytes: int) -> str:
    return f"{format_count(num_files)} {'file' if num_files == 1 else 'files'}, {format_bytes(num_bytes)}"


def _print_folders(files: Iterable[CachedFile]) -> None:
    folders: dict[str, list[CachedFile]] = {}
    for file in files:
        folders.setdefault(file.source.rpartition("/")[0], []).append(file)
    now = time.time()
    rows = []
    for folder, held in sorted(folders.items()):
        age = now - max(file.last_used_ns for file in held) / 1e9
        ago = "just now" if age < 60 else f"{format_seconds(age)} ago"
        rows.append([folder, format_count(len(held)), format_bytes(sum(file.num_bytes for file in held)), ago])
    print_table(plain_table(["files from", "files", "size", "last used"], rows))
