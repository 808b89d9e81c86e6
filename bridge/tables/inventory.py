"""What exports there are, and whether they are whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bridge.display import did_you_mean
from bridge.errors import BridgeError, ExportNotFoundError, VolumeError
from bridge.manifest import Manifest, Shard
from bridge.volumes.commit import Attempt, read_marker
from bridge.volumes.digest import digest_ranges
from bridge.volumes.hold import hold_attempt
from bridge.volumes.path import volume_path
from bridge.volumes.storage import reason_of, with_retries
from bridge.volumes.stores import LocalStorage
from bridge.volumes.survey import Look, Standing, survey

_NUM_THREADS = 16


@dataclass(frozen=True)
class ExportInfo(Standing):
    """One export, or what there is of one: how it stands, and what it holds.

    Attributes:
        path, state, age_s, num_holders, num_bytes, problem: As of `Standing`; the state is "no export" where something
            else was committed.
        table: None unless it is complete, like all that follow.
        query: What was asked for: exports of the same table and query differ in their versions alone.
        identity: As of the manifest; None for what nobody can ask for again, such as a DataFrame.
        receipt: What was read, by whom, when, with which versions.
    """

    table: str | None = None
    version: int | None = None
    identity: str | None = None
    query: dict[str, Any] = field(default_factory=dict)
    receipt: dict[str, Any] = field(default_factory=dict)
    num_rows: int | None = None
    num_shards: int | None = None


@dataclass(frozen=True)
class VerifyReport:
    """What was found of the files of an export.

    Attributes:
        damaged: What is wrong with a shard, by its name.
        unlisted: Parquet files in its folder that its manifest does not list: readers of the whole folder take their
            rows for the export's.
    """

    path: str
    num_shards: int
    num_bytes: int
    damaged: dict[str, str]
    unlisted: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damaged and not self.unlisted


def list_exports(root: str | os.PathLike[str], *, table: str | None = None) -> list[ExportInfo]:
    """Return the exports in a folder, by folder and newest first, incomplete ones and those that cannot be read too.

    Args:
        root: The folder that was given as `volume`, or the one of a single table in it.
        table: Name of a table, in full or its last parts: only exports of it, and what is incomplete beside them.

    Raises:
        ExportNotFoundError: The folder is not there, or holds no export of `table`.
        VolumeError: The folder cannot be listed.
    """
    folder = Path(volume_path(root))
    try:
        # what a link leads to would be there twice
        inside = sorted(found.name for found in LocalStorage(folder).list() if found.is_folder and not found.is_link)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise ExportNotFoundError(
            f"{folder} is no folder.\n  Give the one that was given to export_table as volume."
        ) from exc
    except OSError as exc:
        raise VolumeError(f"{folder} cannot be listed: {reason_of(exc)}.") from exc
    if Attempt.parse(folder.name):
        raise ExportNotFoundError(f"{folder} is one export.\n  Give the folder above: {folder.parent}.")
    parents = [folder, *(folder / name for name in inside if not Attempt.parse(name))]
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        looks = [look for found in threads.map(_survey, parents) for look in found]
        exports = list(threads.map(lambda look: look(), looks))
    if table is None:
        return exports
    names = {info.table for info in exports if info.table}
    named = {name for name in names if is_named(name, table)}
    if not named:
        raise ExportNotFoundError(f"{folder} holds no complete export of {table}.{did_you_mean(table, names)}")
    beside = {Path(info.path).parent for info in exports if info.table in named}
    return [
        info for info in exports if info.table in named or (info.table is None and Path(info.path).parent in beside)
    ]


def _survey(parent: Path) -> list[Callable[[], ExportInfo]]:
    """Return what looks at each attempt of a folder."""
    try:
        return [partial(_describe, look) for look in survey(LocalStorage(parent)).values()]
    except VolumeError as exc:
        return [partial(ExportInfo, path=str(parent), state="unreadable", problem=reason_of(exc))]


def _describe(look: Look) -> ExportInfo:
    seen, marker = look()
    info, path = ExportInfo(**vars(seen)), Path(seen.path)
    if marker is None:
        return info
    if not {"format_version", "shards"} <= marker.body.keys():
        return replace(info, state="no export", problem="its marker is of something else")
    try:
        manifest = Manifest.from_json(marker.body, path)
    except BridgeError as exc:
        return replace(info, state="unreadable", problem=reason_of(exc))
    return replace(
        info,
        table=manifest.table,
        version=manifest.version,
        identity=manifest.identity,
        query=manifest.query,
        receipt=manifest.receipt,
        num_rows=manifest.num_rows,
        num_shards=len(manifest.shards),
        problem=_missing(path, manifest),
    )


def _missing(path: Path, manifest: Manifest) -> str | None:
    """Say how many shards are gone. Sizes are not looked at: verify does."""
    try:
        there = set(os.listdir(path))
    except OSError as exc:
        return reason_of(exc)
    gone = [shard.name for shard in manifest.shards if shard.name not in there]
    return f"{len(gone)} of {len(manifest.shards)} shards gone, {gone[0]} among them" if gone else None


def is_named(name: str, asked: str) -> bool:
    """Return whether `asked` is `name`, or its last parts."""
    return f".{name}".endswith(f".{asked}")


def describe_export(path: str | os.PathLike[str]) -> ExportInfo:
    """Return what there is of one export.

    Raises:
        ExportNotFoundError: There is no such folder among exports; a copy elsewhere is not among them.
        VolumeError: What is beside it cannot be read.
    """
    folder = Path(volume_path(path))
    for attempt, look in survey(LocalStorage(folder.parent)).items():
        if attempt.name == folder.name:
            return _describe(look)
    raise not_found(folder)


def verify_export(path: str | os.PathLike[str], *, read: bool = True) -> VerifyReport:
    """Check every byte of an export against the digests in its manifest.

    Args:
        path: The folder of one export; a copy elsewhere may be checked too.
        read: False looks only whether each shard is there in full size.

    Raises:
        ExportNotFoundError: No complete export is there.
        ExportError: Its manifest is in a format that this version does not read.
        VolumeError: The folder cannot be read, or the export was deleted meanwhile.
    """
    folder = Path(volume_path(path))
    marker = read_marker(LocalStorage(folder))
    if marker is None:
        raise not_found(folder)
    manifest = Manifest.from_json(marker.body, folder)
    held = hold_attempt(LocalStorage(folder.parent), folder.name)
    try:
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            found = threads.map(lambda shard: _damage(folder / shard.name, shard, read=read), manifest.shards)
            damaged = {shard.name: what for shard, what in zip(manifest.shards, found, strict=True) if what}
        listed = {folder / shard.name for shard in manifest.shards}
        unlisted = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.parquet") if file not in listed)
    finally:
        if held is not None:
            held.end()
    return VerifyReport(str(folder), len(manifest.shards), manifest.num_bytes, damaged, tuple(unlisted))


def _damage(path: Path, shard: Shard, *, read: bool) -> str:
    """Return what is wrong with a shard, "" where nothing is."""
    try:
        num_bytes = with_retries(path.stat).st_size
        if num_bytes != shard.num_bytes:
            return f"holds {num_bytes:,} bytes; {shard.num_bytes:,} were written"
        if not read:
            return ""
        ranges = [(group.start, group.stop) for group in shard.row_groups] + [(shard.footer_start, shard.num_bytes)]
        digests = with_retries(lambda: digest_ranges(path, ranges))
    except FileNotFoundError:
        return "is not there"
    except OSError as exc:
        return f"cannot be read: {reason_of(exc)}"
    expected = [*(group.digest for group in shard.row_groups), shard.footer_digest]
    names = [*(f"row group {index}" for index in range(len(shard.row_groups))), "its footer"]
    changed = [
        f"{name} (bytes {start:,} to {stop:,})"
        for name, (start, stop), seen, digest in zip(names, ranges, digests, expected, strict=True)
        if seen != digest
    ]
    return f"differs from what was written in {', '.join(changed)}" if changed else ""


def not_found(folder: Path) -> ExportNotFoundError:
    return ExportNotFoundError(
        f"{folder} is not the folder of a complete export.\n  Give one that list_exports(root) shows."
    )
