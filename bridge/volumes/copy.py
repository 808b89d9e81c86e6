"""Copies folders and files between disks, volumes and object stores; what is complete or absent stays so on the way."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from bridge.config import load_settings
from bridge.display import format_bytes, format_count, format_seconds, printable
from bridge.errors import CopyError, VolumeError
from bridge.progress import progress_bar
from bridge.volumes.commit import MARKERS, Marker, read_markers
from bridge.volumes.crew import Crew, Task
from bridge.volumes.lease import is_lease
from bridge.volumes.source import FolderSource, Found, StorageSource, open_source
from bridge.volumes.storage import Entry, Storage, is_full, is_transient, join, reason_of, with_retries
from bridge.volumes.stores import open_storage
from bridge.volumes.target import FolderTarget, StorageTarget, is_copied, is_temporary

_MOST_THREADS = 128
_MOST_FAR_THREADS = 32  # a client of an object store keeps large buffers for each file
_BATCH = 32
_SHOWN = 10
# so many failures in a row, of those that retries did not mend, are about a minute
_MOST_FAILURES, _MOST_FAILURES_EACH = 16, 4
_HEAD = re.compile(r"(?:[a-z][a-z0-9+.-]*:(?=/))?/*", re.IGNORECASE)


@dataclass(frozen=True)
class CopyReport:
    """What a copy did.

    `failures` and `notes` are pairs of a path in the source and a reason: what was not copied, and what was left out
    on purpose. `stopped` says why not everything was tried, "" where everything was.
    """

    num_files: int
    num_bytes: int
    num_skipped: int
    seconds: float
    failures: tuple[tuple[str, str], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    stopped: str = ""

    def __str__(self) -> str:
        lines = [
            f"{format_count(self.num_files)} file{'' if self.num_files == 1 else 's'} ({format_bytes(self.num_bytes)}) "
            f"copied in {format_seconds(self.seconds)}; {format_count(self.num_skipped)} skipped"
        ]
        for what, pairs in (("left out", self.notes), ("failed", self.failures)):
            lines += [f"{format_count(len(pairs))} {what}:"] if pairs else []
            lines += [f"  {printable(path)}: {printable(reason)}" for path, reason in pairs[:_SHOWN]]
            lines += [f"  and {format_count(len(pairs) - _SHOWN)} more"] if len(pairs) > _SHOWN else []
        lines += [f"  {printable(self.stopped)}"] if self.stopped else []
        if self.failures:
            lines.append("  Mend that and run it again: what is there is skipped.")
        return "\n".join(lines)


def copy_tree(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, num_threads: int | None = None
) -> CopyReport:
    """Copy a folder and all that is in it, or one file, and return what was done.

    What differs is replaced, and what is there already is skipped: a file of the same size and time or, where the
    target cannot keep times (volumes, object stores), of the same size and not older. So what was cut off is finished
    by running it again; what only the target has stays. On a disk, a file appears at its name when it is whole; on a
    volume, which cannot rename, it is written at its name and deleted if it fails. Times, and permission bits less the
    umask, are kept on disks; owners are not.

    Links are followed, so that the copy holds none; one to a folder in which it lies is left out, and noted. Pipes,
    sockets and devices are failures. An export or a checkpoint becomes complete at its new place last of all, and only
    if all that it lists is there.

    Args:
        source: A folder or a file: a path, /Volumes/..., or an address that fsspec knows. What was written to a volume
            a moment ago may be missing in its listings, and so in the copy.
        target: The folder that is to hold what the source holds; made with those above it. A single file goes into it
            where it is a folder, else becomes it.
        num_threads: The most threads. None: up to 128, as many as waiting for the two places takes.

    Raises:
        CopyError: Something was not copied; its `report` tells what. All else was, unless there is no room left, or
            nothing has succeeded for about a minute.
        FileNotFoundError: There is nothing at `source`.
        ValueError: `num_threads` is less than 1.
        VolumeError: One of the two lies in the other, or the target cannot be written. Nothing was copied.

    Example:
        >>> import bridge
        >>> print(bridge.copy_tree("/Volumes/main/ml/images", "/local_disk0/images"))  # doctest: +SKIP
        3,000 files (439 MiB) copied in 0.9 s; 0 skipped
    """
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; give 1 or more.")
    began = time.monotonic()
    source, target = os.fspath(source), os.fspath(target)
    origin, goal = open_storage(source), open_storage(target)
    try:
        is_folder = with_retries(lambda: origin.status("")).is_folder
    except FileNotFoundError as exc:
        raise FileNotFoundError(f"there is nothing at {printable(source)}.") from exc
    except OSError as exc:
        raise VolumeError(f"{printable(source)} cannot be read: {reason_of(exc)}.") from exc
    name = new_name = ""
    if not is_folder:
        folder, name = _split(source)
        into_folder = target.endswith("/") or _is_folder(goal)
        new_folder, new_name = (target, name) if into_folder else _split(target)
        _refuse_overlap(origin, open_storage(join(new_folder, new_name)), is_folder=False)
        origin, goal = open_storage(folder), open_storage(new_folder)
    else:
        _refuse_overlap(origin, goal, is_folder=True)
    is_new = not _is_folder(goal)
    is_far = origin.folder is None or goal.folder is None
    with (
        Crew(num_threads or (_MOST_FAR_THREADS if is_far else _MOST_THREADS)) as crew,
        progress_bar("copying", total=None, unit="B", enabled=load_settings().progress) as bar,
    ):
        copy = _Copy(open_source(origin), _open_target(goal), goal, crew)
        first = copy.find_folder if is_folder else partial(copy.find_file, new_name)
        crew.add(folders=[partial(first, name, is_new=is_new)])
        for _ in copy.phases():
            crew.drain(partial(_show, bar, copy))
    report = CopyReport(
        copy.num_files,
        copy.num_bytes,
        copy.num_skipped,
        time.monotonic() - began,
        tuple((f"{origin}/{name}".rstrip("/"), reason) for name, reason in sorted(copy.failures)),
        tuple((f"{origin}/{name}".rstrip("/"), reason) for name, reason in sorted(copy.notes)),
        copy.stopped,
    )
    if report.failures:
        raise CopyError(f"{printable(source)} was not copied whole.\n{report}", report)
    return report


class _Copy:
    """A copy under way: the tasks that do it, and what they have done."""

    def __init__(
        self, source: FolderSource | StorageSource, target: FolderTarget | StorageTarget, goal: Storage, crew: Crew
    ) -> None:
        self.num_files = 0
        self.num_bytes = 0
        self.num_skipped = 0
        self.failures: list[tuple[str, str]] = []
        self.notes: list[tuple[str, str]] = []
        self.stopped = ""
        self._source = source
        self._target = target
        self._goal = goal
        self._crew = crew
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._markers: list[Found] = []
        # what the markers that the target holds in a folder list
        self._covers: dict[str, dict[str, dict[str, int]]] = {}

    def find_folder(self, name: str, *, is_new: bool) -> None:
        """Make a folder, and add the tasks for what it is to hold.

        Args:
            name: Where it is, in the source and in the target.
            is_new: Whether the target holds nothing there; else what it holds is listed.
        """
        try:
            there = {} if is_new else self._there(name)
            if is_new or there is None:
                self._covers[name] = {}
            if there is None or (is_new and name):
                self._target.make_folder(name, self._source.folder_mode(name))
        except OSError as exc:
            self._fail(name, exc)
        else:
            self._find(name, self._source.list(name), there or {}, is_new or there is None)

    def find_file(self, new_name: str, name: str, *, is_new: bool) -> None:
        """Add the task for a single file."""
        try:
            there = None if is_new else self._there("")
            self._find(name, iter([self._source.find(name)]), there or {}, False, new_name)
        except OSError as exc:
            self._fail(name, exc)

    def phases(self) -> Iterator[None]:
        """Yield when tasks are there to be done: all but the markers, then those of folders without a failure."""
        yield
        if self._markers:
            self._target.sync()
        broken = {above for name, _ in self.failures for above in _upwards(name)}
        for found in self._markers:
            if found.name.rpartition("/")[0] in broken:
                self._fail(found.name, VolumeError("not copied: some of what it makes complete was not"))
            else:
                self._crew.add([partial(self._copy_marker, found)])
        yield

    def _there(self, folder: str) -> dict[str, Entry] | None:
        """Return what the target holds in a folder, by last name; None where it is not there."""
        try:
            entries = {entry.name: entry for entry in self._goal.list(folder)}
        except FileNotFoundError:
            return None
        for left in filter(is_temporary, entries):
            self._target.sweep(join(folder, left))
        return entries

    def _find(
        self, name: str, listing: Iterator[Found], there: dict[str, Entry], is_new: bool, new_name: str = ""
    ) -> None:
        """Add tasks for what a listing yields, and one to go on with it where there are enough."""
        files: list[Task] = []
        folders: list[Task] = []
        try:
            for found in listing:
                last = new_name or found.name.rpartition("/")[2]
                if found.is_loop:
                    self.notes.append((found.name, found.problem))
                elif found.problem:
                    self._fail(found.name, VolumeError(found.problem))
                elif found.is_folder:
                    folders.append(partial(self.find_folder, found.name, is_new=is_new))
                elif last in MARKERS and not new_name:
                    self._markers.append(found)
                elif not (is_lease(found.name) or is_temporary(last)):
                    files.append(partial(self._copy_file, found, there.get(last), new_name or found.name, is_new))
                if len(files) + len(folders) == _BATCH:
                    self._crew.check()
                    self._crew.add(files, folders)
                    files, folders = [], []
                    if self._crew.has_enough:
                        folders = [partial(self._find, name, listing, there, is_new)]
                        break
        except OSError as exc:
            self._fail(name, exc)
        self._crew.add(files, folders)

    def _copy_file(self, found: Found, there: Entry | None, name: str, is_new: bool = False) -> None:
        try:
            if there.num_bytes is None and not there.is_folder if there else not is_new:
                # a listing of a mount knows no sizes, and may lag
                there = self._look(name)
            keeps_times = self._target.keeps_times
            is_there = there is not None and is_copied(*self._source.facts(found), there, keeps_times=keeps_times)
            # what its listing told counts for the first try
            tries = itertools.chain([found], itertools.repeat(found._replace(entry=None)))
            size = 0 if is_there else with_retries(partial(self._transfer, tries, name, is_there=there is not None))
        except OSError as exc:
            self._fail(found.name, exc)
            return
        with self._lock:
            self._in_a_row = 0
            self.num_skipped += is_there
            self.num_files += not is_there
            self.num_bytes += size

    def _look(self, name: str) -> Entry | None:
        try:
            return self._goal.status(name)
        except FileNotFoundError:
            return None

    def _transfer(self, tries: Iterator[Found], name: str, *, is_there: bool) -> int:
        self._crew.check()
        with self._source.open(next(tries)) as reader:
            self._uncover(name)
            self._target.put(name, reader, self._crew, is_there=is_there)
            return reader.num_bytes

    def _uncover(self, name: str) -> None:
        """Delete the target's markers that list a file before it is replaced. They are copied again at the end."""
        for folder in itertools.islice(_upwards(name), 1, None):
            if folder not in self._covers:
                found = read_markers(self._goal, folder)  # not by a listing, which may lag
                self._covers.setdefault(folder, {marker_name: marker.sizes for marker_name, marker in found})
            covers = self._covers[folder]
            for marker_name, sizes in covers.copy().items():
                if name.removeprefix(f"{folder}/") in sizes:
                    self._goal.delete(marker_name)
                    covers.pop(marker_name, None)

    def _copy_marker(self, found: Found) -> None:
        """Copy what makes its folder complete if all that it lists is there, and take it back if it then is no more."""
        folder = found.name.rpartition("/")[0]
        try:
            with self._source.open(found) as reader:
                marker = Marker.decode(b"".join(reader.blocks())) or Marker({}, {})
            if missing := self._missing(folder, marker):
                self._crew.share(iter(missing), partial(self._copy_late, folder))
                missing = self._missing(folder, marker)
            if not missing:
                self._copy_file(found, None, found.name)
                try:
                    missing = self._missing(folder, marker)
                except BaseException:  # told to stop, too
                    self._goal.delete(found.name)
                    raise
            if missing:
                self._goal.delete(found.name)
                raise VolumeError(f"not copied: it lists {min(missing)}, which is not there in full")
        except OSError as exc:
            self._fail(found.name, exc)

    def _missing(self, folder: str, marker: Marker) -> list[str]:
        """Return what `marker.missing` does, by the threads that are there: many markers are looked at at once."""
        missing: list[str] = []

        def look(name: str) -> None:
            there = self._look(join(folder, name))
            if there is None or there.num_bytes != marker.sizes[name]:
                missing.append(name)

        self._crew.share(iter(marker.sizes), look)
        return missing

    def _copy_late(self, folder: str, name: str) -> None:
        """Copy a file that came while its folder was listed."""
        with contextlib.suppress(FileNotFoundError):
            found = self._source.find(join(folder, name))
            if not (found.is_folder or found.problem or "/" in name):  # exports hold no folders
                self._copy_file(found, None, found.name)

    def _fail(self, name: str, exc: OSError) -> None:
        # the path in front is that of the source
        place = exc.filename2 or exc.filename or ""
        at = f" (at {place})" if str(place).startswith(f"{self._goal}/") else ""
        self.failures.append((name, reason_of(exc) + at))
        cause = exc.__cause__ if isinstance(exc.__cause__, OSError) else exc
        with self._lock:
            self._in_a_row += is_transient(cause)
            count = format_count(self._in_a_row)
            if is_full(exc):
                self._stop(f"There is no room left in {self._goal}: free some.")
            elif self._in_a_row >= max(_MOST_FAILURES, _MOST_FAILURES_EACH * self._crew.num_threads):
                self._stop(f"The last {count} tries all failed: see that both places can be read and written.")

    def _stop(self, reason: str) -> None:
        self.stopped = self.stopped or f"{reason} The rest was not tried."
        self._crew.stop()


def _show(bar: Any, copy: _Copy) -> None:
    bar.update(copy.num_bytes - bar.n)
    bar.set_postfix_str(f"{format_count(copy.num_files + copy.num_skipped)} files", refresh=False)


def _open_target(goal: Storage) -> FolderTarget | StorageTarget:
    """Make the folder, and find out how files are written there.

    Raises:
        VolumeError: It cannot be written.
    """
    try:
        goal.make_folder()
        target = None if goal.folder is None else FolderTarget(goal.folder)
        return target if target is not None and target.probe() else StorageTarget(goal)
    except OSError as exc:
        raise VolumeError(
            f"{printable(str(goal))} cannot be written: {reason_of(exc)}.\n"
            "  Give a folder or volume you may write (WRITE VOLUME)."
        ) from exc


def _is_folder(storage: Storage) -> bool:
    try:
        return storage.status("").is_folder
    except OSError:
        return False


def _refuse_overlap(origin: Storage, goal: Storage, *, is_folder: bool) -> None:
    here, there = _ways(origin), _ways(goal)
    is_same = here[0] == there[0]
    if is_same or (is_folder and (here[0] in there or there[0] in here)):
        raise VolumeError(
            f"{printable(str(goal))} cannot take {printable(str(origin))}: "
            f"{'they are the same' if is_same else 'one of them lies in the other'}.\n"
            "  What the source holds goes into the target: give a folder outside of the source, and not around it."
        )


def _ways(storage: Storage) -> list[object]:
    """Return what a place and those above it are: files of a disk by their numbers, which names may hide."""

    def identify(name: str) -> object:
        try:
            found = os.stat(name or "/")
        except OSError:
            return name
        return found.st_dev, found.st_ino

    if storage.folder is None:
        return list(_upwards(str(storage)))
    return [identify(name) for name in _upwards(os.path.realpath(storage.folder))]


def _split(path: str) -> tuple[str, str]:
    """Return the folder and the last name of a path or an address."""
    head = _HEAD.findall(path)[0]  # the first slash of a path, all that makes an address one
    folder, _, name = path.removeprefix(head).rstrip("/").rpartition("/")
    return head + folder or ".", name


def _upwards(name: str) -> Iterator[str]:
    """Yield a name and those of the folders above it, "" for the topmost."""
    while name:
        yield name
        name = name.rpartition("/")[0]
    yield ""
