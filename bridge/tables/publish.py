"""How an export is found again, and made: complete or absent."""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa

from bridge.columns.rules import Rules
from bridge.errors import ExportError, VolumeError
from bridge.loading.row_groups import ExportedRowGroups
from bridge.manifest import Manifest, Shard, describe_shard
from bridge.progress import progress_bar
from bridge.spark.shape import Shape
from bridge.spark.stream import Written, write_stream
from bridge.spark.write import listed_shards
from bridge.tables.identity import Identity
from bridge.volumes.commit import Attempt, begin, collect_garbage, complete_attempts
from bridge.volumes.lease import storage_time_ns
from bridge.volumes.path import Place, refuse_glob
from bridge.volumes.storage import with_retries
from bridge.volumes.stores import LocalStorage

# How long what Spark wrote may stay unseen.
SEEN_S = 30.0

_DESCRIBING_THREADS = 16


def export_folder(root: Place, name: str) -> Place:
    """Return the folder under `root` for the exports of the table of that name."""
    refuse_glob(root)
    # Names of tables may hold anything; engines agree on few characters of a path.
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    plain = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")[-60:] or "table"
    return root / f"{plain}-{digest}"


def find_reusable(folder: Place, identity: Identity, max_age_s: float | None) -> tuple[Path, Manifest] | None:
    """Return the complete export of that identity whose files are all there in full size.

    Args:
        max_age_s: How old one may be that need not hold what a new one would.
    """
    if identity.key is None or folder.local is None or not (identity.is_settled or max_age_s):
        return None
    storage = LocalStorage(folder.local)
    for attempt, marker in complete_attempts(storage, identity.key):
        if not identity.is_settled:
            age_s = storage_time_ns(storage) / 1e9 - attempt.generation / 1e3
            if age_s > (max_age_s or 0):
                return None
        if not marker.missing(storage, attempt.name):
            path = folder.local / attempt.name
            return path, Manifest.from_json(marker.body, path)
    return None


def why_new(folder: Place, identity: Identity, version: int | None, max_age_s: float | None) -> str:
    """Return why no export that is there was taken."""
    if identity.key is None:
        return f"new: {identity.reason}"
    if not (identity.is_settled or max_age_s):
        return f"new: {identity.reason}; max_age_s= says how old an export may be taken"
    for attempt, manifest in readable_exports(folder.folder()):
        if attempt.label == identity.key:
            told = "its files are not all there" if identity.is_settled else f"it is older than {max_age_s:g} s"
            return f"new: one is there, but {told}"
        told = identity.differs_from(manifest.query)
        if not told and manifest.version != version:
            of = "no version" if manifest.version is None else f"version {manifest.version}"
            told = f"the newest that is there is of {of}"
        return f"new: {told or 'the table was made again since'}"
    return "new: none is there"


def readable_exports(folder: Path) -> Iterator[tuple[Attempt, Manifest]]:
    """Yield the complete exports in the folder of a table, the newest first, but for those of other formats."""
    for attempt, marker in complete_attempts(LocalStorage(folder)):
        with contextlib.suppress(ExportError):
            yield attempt, Manifest.from_json(marker.body, folder / attempt.name)


def publish(
    parent: Place,
    label: str,
    name: str,
    schema: pa.Schema,
    write: Callable[[Place], Written],
    describe: Callable[[tuple[Shard, ...], Path], Manifest],
    *,
    by_server: bool = False,
    show: bool | None = None,
) -> tuple[Path, Manifest]:
    """Make an attempt under `parent` complete: write its shards, see and digest them, commit what describes them.

    Args:
        label: By which the attempt is found.
        name: What is exported, for errors.
        schema: The types that readers will get.
        by_server: Whether the engine writes the shards, and not this process.
    """
    storage = LocalStorage(parent.folder())
    with begin(storage, label, by_server=by_server) as attempt:
        folder = storage.folder / attempt.name
        try:
            written = write(parent / attempt.name)
            shards = _seen(folder, written, schema, name, show)
            manifest = describe(shards, folder)
        except OSError as exc:
            if isinstance(exc, VolumeError) or exc.errno is None:
                raise
            raise VolumeError(f"{name} could not be written to {folder}: {exc.strerror or exc}.") from exc
        attempt.commit(manifest.to_json(), {shard.name: shard.num_bytes for shard in shards})
    # what killed writers left; the export itself stands whether or not that works
    with contextlib.suppress(VolumeError):
        collect_garbage(storage)
    return folder, manifest


def bind(folder: Path, manifest: Manifest, rules: Rules) -> Rules:
    """Return the rules with dictionaries of what an export holds."""
    return ExportedRowGroups(folder, manifest).under(rules).rules


def _seen(folder: Path, written: Written, schema: pa.Schema, name: str, show: bool | None) -> tuple[Shard, ...]:
    """Describe the shards as they come to be seen, until they hold all rows; delete what is no part of them."""
    known: dict[str, Shard] = {}
    total = None if written.names is None else len(written.names)
    bar = progress_bar(f"check {name}", total=total, unit=" shards", enabled=show)

    def describe(path: Path) -> Shard | None:
        try:
            shard = with_retries(lambda: describe_shard(path, schema, written.as_integers))
        except (FileNotFoundError, pa.ArrowInvalid):  # it was listed, and may be seen later, or in part
            return None
        bar.update()
        return shard

    deadline = time.monotonic() + SEEN_S
    with bar, ThreadPoolExecutor(_DESCRIBING_THREADS, "bridge-digest") as threads:
        while True:
            names = list(written.names) if written.names is not None else _listed(folder)
            unknown = [folder / one for one in names if one not in known]
            if seen := {shard.name: shard for shard in threads.map(describe, unknown) if shard is not None}:
                known |= seen
                deadline = time.monotonic() + SEEN_S
            found = sum(known[one].num_rows for one in names if one in known)
            if found == written.num_rows and all(one in known for one in names) and (names or found == 0):
                break
            # Too many may become right, when a list of what was committed is seen.
            if time.monotonic() > deadline or (written.names is not None and found > written.num_rows):
                raise ExportError(_incomplete(folder, name, len(known), found, written.num_rows))
            time.sleep(0.2)
    # strangers, and what committers and file systems leave: readers of the folder see the shards alone
    for path in folder.iterdir():
        if path.name not in names and not path.is_dir():
            with_retries(partial(path.unlink, missing_ok=True))
    if names:
        return tuple(known[one] for one in names)
    # readers of "*.parquet" want a file, and some engines write none for no rows
    return _seen(folder, write_stream([], folder, schema, Shape()), schema, name, show)


def _listed(folder: Path) -> list[str]:
    """Return the shards that Spark wrote, as far as they are seen."""
    try:
        return with_retries(lambda: listed_shards(folder))
    except (FileNotFoundError, ValueError):  # nothing is seen yet, or a list of files in part
        return []


def _incomplete(folder: Path, name: str, num_files: int, found: int, written: int) -> str:
    if num_files == 0:
        return (
            f"{name}: {written:,} rows were written, but no file of them can be seen at {folder}.\n"
            "  Use a volume that both the cluster and this process have."
        )
    return (
        f"{name}: {written:,} rows were written, but the files hold {found:,}.\n"
        "  Another writer may use the same folder; nothing of this export is kept. Export again."
    )
