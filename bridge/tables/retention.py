"""Which exports may go, and their deletion."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bridge.display import format_seconds
from bridge.errors import ConfigError, ExportError, VolumeError
from bridge.tables.inventory import ExportInfo, describe_export, list_exports, not_found
from bridge.volumes.commit import Attempt, collect_garbage
from bridge.volumes.hold import delete_unheld, in_use
from bridge.volumes.lease import GRACE_S
from bridge.volumes.stores import LocalStorage

_NUM_THREADS = 64  # they wait for listings that lag, for seconds


@dataclass(frozen=True)
class PruneReport:
    """What was deleted, or would be in a dry run; what stays, and why; and what could not be deleted, and why."""

    deleted: tuple[ExportInfo, ...]
    kept: tuple[tuple[ExportInfo, str], ...]
    failed: tuple[tuple[ExportInfo, str], ...]
    is_dry_run: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of what was deleted."""
        return sum(info.num_bytes or 0 for info in self.deleted)


def prune_exports(
    root: str | os.PathLike[str],
    *,
    table: str | None = None,
    keep_versions: int | None = None,
    max_age_s: float | None = None,
    dry_run: bool = False,
) -> PruneReport:
    """Delete the exports that no rule keeps, and what writers left behind more than an hour ago.

    The newest export of each table and query always stays, and so does what is in use. Whoever has opened an export
    holds it until its Table is gone; a process that may not write the volume cannot hold one, and is not waited for.

    Args:
        root, table: As in `list_exports`.
        keep_versions: Keep the exports of so many newest versions of each table and query. Each export of what has no
            version counts as one.
        max_age_s: Keep those that were begun less than so many seconds ago, by the clock of the volume.
        dry_run: Delete nothing, and report what would be.

    Raises:
        ConfigError: No rule was given, or one is out of range.
        ExportNotFoundError, VolumeError: As in `list_exports`. What cannot be deleted is in the report.
    """
    if keep_versions is None and max_age_s is None:
        raise ConfigError(
            "nothing says which exports may go; give keep_versions (--keep-versions), max_age_s (--max-age), or both."
        )
    if keep_versions is not None and (type(keep_versions) is not int or keep_versions < 1):
        raise ConfigError(f"keep_versions is {keep_versions!r}; give a whole number, 1 or more.")
    if max_age_s is not None and (type(max_age_s) not in (int, float) or not 0 <= max_age_s < math.inf):
        raise ConfigError(f"max_age_s is {max_age_s!r}; give a number of seconds, 0 or more.")
    exports = list_exports(root, table=table)
    kept = reasons_to_keep(exports, keep_versions=keep_versions, max_age_s=max_age_s)
    may_go = [info for info in exports if info.path not in kept]
    failed: dict[str, str] = {}
    if not dry_run:
        _delete([info for info in may_go if info.state == "complete"], kept, failed)
        for parent in sorted(
            {Path(info.path).parent for info in exports if info.state not in ("unreadable", "no export")}
        ):
            try:
                collect_garbage(LocalStorage(parent))
            except VolumeError as exc:
                exports.append(ExportInfo(path=str(parent), state="unreadable"))
                failed[str(parent)] = str(exc)
        for info in may_go:
            if info.state != "complete" and Path(info.path).exists():
                kept[info.path] = "still held, or not garbage yet"
    return PruneReport(
        deleted=tuple(info for info in may_go if info.path not in kept and info.path not in failed),
        kept=tuple((info, kept[info.path]) for info in exports if info.path in kept),
        failed=tuple((info, failed[info.path]) for info in exports if info.path in failed),
        is_dry_run=dry_run,
    )


def reasons_to_keep(
    exports: Iterable[ExportInfo], *, keep_versions: int | None, max_age_s: float | None
) -> dict[str, str]:
    """Return why exports stay, by path; what is not in it may go, by every rule that was given."""
    kept: dict[str, str] = {}
    queries: dict[str, list[ExportInfo]] = {}
    for info in exports:
        if info.state == "complete":
            # of what nobody can ask for again, each is the only one
            which = [info.table, info.query, info.path if info.identity is None else ""]
            queries.setdefault(json.dumps(which, sort_keys=True), []).append(info)
        elif info.state == "no export":
            kept[info.path] = "it is no export"
        elif info.state == "unreadable":
            kept[info.path] = f"it cannot be read: {info.problem}"
        elif info.num_holders:
            kept[info.path] = f"{info.state}, {in_use(info.num_holders)}"
        elif info.age_s < GRACE_S:
            kept[info.path] = f"{info.state} less than {format_seconds(GRACE_S)} ago"
    for found in queries.values():
        found.sort(key=lambda info: info.age_s)
        # no other may go for the sake of one that is damaged
        whole = [info for info in found if not info.problem]
        versions = sorted({info.version for info in whole if info.version is not None}, reverse=True)
        unpinned = [info.path for info in whole if info.version is None]
        for info in found:
            if whole and info is whole[0]:
                kept[info.path] = "the newest of its table and query"
            elif not whole:
                kept[info.path] = "damaged, but there is no other of its table and query"
            elif info.num_holders:
                kept[info.path] = in_use(info.num_holders)
            elif max_age_s is not None and info.age_s < max_age_s:
                kept[info.path] = f"younger than {format_seconds(max_age_s)}"
            elif keep_versions is not None and not info.problem:
                newer = unpinned.index(info.path) if info.version is None else versions.index(info.version)
                if newer < keep_versions:
                    kept[info.path] = f"one of the {keep_versions} newest versions"
    return kept


def remove_export(path: str | os.PathLike[str]) -> ExportInfo:
    """Delete one export, the newest too, and return what it was.

    Raises:
        ExportNotFoundError: No complete export is there, or it is a copy that is not among exports.
        ExportError: It is in use.
        VolumeError: It could not be deleted, or not all of it.
    """
    info = describe_export(path)
    if info.state == "withdrawn":
        raise ExportError(f"{info.path} is withdrawn already: no reader finds it, and its files go after its readers.")
    if info.state not in ("complete", "unreadable"):
        raise not_found(Path(info.path))
    kept: dict[str, str] = {}
    failed: dict[str, str] = {}
    _delete([info], kept, failed)
    for why in kept.values():
        if describe_export(path).state == "withdrawn":
            raise ExportError(
                f"{info.path} is withdrawn, so that no reader finds it any more; {why}.\n"
                "  Its files go with the next gc, or export of that table, an hour after its readers have ended."
            )
        raise ExportError(
            f"{info.path} is not deleted: {why}.\n"
            "  Let its readers end, then try again. The hold of a process that was killed ends by itself in an hour."
        )
    for why in failed.values():
        raise VolumeError(why)
    return info


def _delete(doomed: Iterable[ExportInfo], kept: dict[str, str], failed: dict[str, str]) -> None:
    """Delete exports that nobody holds; note which stay and which could not be deleted, and why."""
    found: dict[Path, list[Attempt]] = {}
    for path in (Path(info.path) for info in doomed):
        attempt = Attempt.parse(path.name)
        assert attempt is not None
        found.setdefault(path.parent, []).append(attempt)

    def delete(parent: Path) -> None:
        held, problems = delete_unheld(LocalStorage(parent), found[parent])
        kept.update({str(parent / attempt.name): why for attempt, why in held.items()})
        failed.update({str(parent / attempt.name): why for attempt, why in problems.items()})

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        list(threads.map(delete, found))
