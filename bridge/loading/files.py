"""Files of a volume, one after another, as paths of local copies that threads make ahead."""

from __future__ import annotations

import fnmatch
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch.utils.data import get_worker_info

from bridge import distributed
from bridge.distributed import from_rank_0
from bridge.errors import RankError, VolumeError
from bridge.loading.ahead import FetchedAhead
from bridge.loading.cached import open_cache
from bridge.loading.dataset import OrderedDataset, check_sizes
from bridge.loading.order import Order
from bridge.loading.place import Listing, Pass
from bridge.loading.stats import Traffic
from bridge.volumes.cache import Epoch, Fetched, UncachedError
from bridge.volumes.digest import digest_bytes
from bridge.volumes.source import Found, open_source
from bridge.volumes.storage import Storage
from bridge.volumes.stores import open_storage

_LISTING_THREADS = 32  # they wait for the volume
_EMPTY_S = 10.0  # how long a folder may look empty; listings lag behind writes
_MOST_NAMED = 3  # skipped files that are named in warnings
_MOST_TRIED = 16  # files that are tried in the place of one


class UCVolumeDataset(OrderedDataset):
    """Local paths of the files under a folder of a volume, in an order that is a function; each file once an epoch.

    Files are copied ahead into the cache, once for all processes of this machine; later epochs are served from it, and
    a file that changed on the volume is copied again. A path has the file's own name, in a folder named as its own, and
    stays valid until the process that yielded it begins its next iteration, or ends. Every rank gets the same number of
    paths: where the files do not suffice, a rank gets its last one again. Names are sorted; those that begin with `.`
    or `_` are left out, and so is what lies in such folders.

    A dataset that decodes them keeps one in an attribute; `bridge.DataLoader` then saves and restores positions, though
    that dataset knows nothing of them.

    Args:
        path: A folder: `/Volumes/<catalog>/<schema>/<volume>/...`, any other, or an address that fsspec reaches.
        pattern: Files whose name matches it (`*.jpg`), case counting; with a `/` in it, whose path under `path` does,
            where `*` matches `/` too.
        recursive: Whether files in folders below are taken.
        shuffle: Whether files come in another order each epoch.
        batch_size: Files that make a batch in the loader. Workers then take whole batches in turn, so that the number
            of steps does not depend on their number.
        drop_last: Leave out the files at the end that make no whole batch on each rank.
        rank: With `world_size`: which part is given; None: that of the process group or of RANK and WORLD_SIZE, when
            the iteration starts.
        canonical_world_size: Number of streams that an epoch is dealt to; None: world_size.
        cache_dir: Where copies are kept; None: the setting.
        num_threads: The most that copy at once; None: 64.
        prefetch_files: Files that are copied ahead.
        on_error: What happens with a file that cannot be read: "raise", or "skip": the one before it in the order (the
            next one, for the first) takes its place, so that all ranks keep step; it is counted in `traffic`, and
            warned of.
        expected_files: How many there must be; None: at least one.
        timeout_s: How long a listing with fewer is waited for; without `expected_files`, 10 s at the most.

    Raises:
        ValueError: An argument is out of range.

    When iteration starts, it raises FileNotFoundError or NotADirectoryError for what is no folder, and VolumeError for
    one that holds no file or another number than expected; later an OSError for a file that cannot be read.

    Example:
        >>> import bridge, torch
        >>> class Images(torch.utils.data.IterableDataset):
        ...     def __init__(self, files):
        ...         self.files = files
        ...     def __iter__(self):
        ...         for path in self.files:
        ...             yield decode(path)
        >>> files = bridge.UCVolumeDataset("/Volumes/main/ml/images", pattern="*.jpg", shuffle=True)  # doctest: +SKIP
        >>> loader = bridge.DataLoader(Images(files), batch_size=32, num_workers=4)  # doctest: +SKIP
    """

    remedy = (
        "raise num_threads and prefetch_files where files come from the volume for the first time; decode in more "
        "processes (num_workers) where they come from the cache"
    )

    def __init__(
        self, path: str | os.PathLike[str], *, pattern: str | None = None, recursive: bool = True,
        shuffle: bool = False, seed: int = 0, batch_size: int | None = None, rank: int | None = None,
        world_size: int | None = None, canonical_world_size: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None, num_threads: int | None = None, prefetch_files: int = 256,
        drop_last: bool = False, on_error: Literal["raise", "skip"] = "raise", expected_files: int | None = None,
        timeout_s: float = 30.0,
    ) -> None:  # fmt: skip
        super().__init__(
            batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last,
            canonical_world_size=canonical_world_size, rank=rank, world_size=world_size,
        )  # fmt: skip
        check_sizes(num_threads=num_threads, prefetch_files=prefetch_files, expected_files=expected_files)
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error is {on_error!r}; give "raise" or "skip".')
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s >= 0:
            raise ValueError(f"timeout_s is {timeout_s!r}; give seconds, 0 or more.")
        self._path = os.fspath(path)
        self._pattern = pattern
        self._recursive = recursive
        self._cache_dir = cache_dir
        self._num_threads = num_threads or 64
        self._prefetch_files = prefetch_files
        self._last_threads = 1  # of the epoch before
        self._on_error = on_error
        self._expected_files = expected_files
        self._timeout_s = timeout_s
        self._held: Epoch | None = None  # what was handed out: kept for later epochs too, where it is not too much
        self._held_bytes = 0
        self._num_copied_bytes = self._num_cached_bytes = self._num_skipped = 0

    def __str__(self) -> str:
        return f"UCVolumeDataset({self._path!r})"

    @property
    def traffic(self) -> Traffic:
        """What this process has read so far."""
        return Traffic(self._num_copied_bytes, self._num_cached_bytes, self._num_skipped)

    @cached_property
    def listing(self) -> Listing:
        """One row group of one row for each file.

        Raises:
            FileNotFoundError: There is no such folder.
            VolumeError: It holds no file, or another number than expected.
            RankError: A worker was made before the ranks had listed the files.
        """
        digest = digest_bytes(b"\0".join(map(os.fsencode, self._names)))
        return Listing(np.ones(len(self._names), np.int64), digest)

    @cached_property
    def _names(self) -> list[str]:
        group = distributed.rank(), distributed.world_size()
        if group[1] == 1 or self.rank_and_world_size() != group:
            return self._found()
        if get_worker_info() is not None:
            raise RankError(
                f"{self}: a worker cannot ask the other ranks which files there are.\n"
                "  Call len(dataset) on every rank before the loader starts its workers, or use bridge.DataLoader."
            )
        chosen_by = {"pattern": self._pattern, "recursive": self._recursive, "expected": self._expected_files}
        arguments = {name: str(value) for name, value in chosen_by.items()}
        return from_rank_0(self._found, what=f"list the files of {self}", arguments=arguments)

    def _found(self) -> list[str]:
        storage = open_storage(self._path)
        expected = self._expected_files
        within_s = self._timeout_s if expected else min(self._timeout_s, _EMPTY_S)
        deadline, delay = time.monotonic() + within_s, 0.05
        while len(names := self._listed(storage)) < (expected or 1):
            if time.monotonic() > deadline:
                raise VolumeError(
                    f"{self._told(len(names))} after {within_s:g} s; listings lag behind writes.\n"
                    "  Correct path, pattern or expected_files, or begin when the writer is done."
                )
            time.sleep(delay)
            delay = min(2 * delay, 1.0)
        if expected and len(names) > expected:
            raise VolumeError(f"{self._told(len(names))}.\n  Correct pattern or expected_files.")
        return names

    def _listed(self, storage: Storage) -> list[str]:
        try:
            return files_under(open_source(storage), self._is_wanted)
        except FileNotFoundError as exc:
            raise FileNotFoundError(
                f"there is no folder {self._path}.\n  Correct the path, or make the folder."
            ) from exc
        except NotADirectoryError as exc:
            raise NotADirectoryError(f"{self._path} is a file.\n  Give its folder, and pattern= for its name.") from exc

    def _told(self, count: int) -> str:
        matching = "" if self._pattern is None else f" that match {self._pattern}"
        expected = f", not {self._expected_files:,}," if self._expected_files else ""
        return f"{self._path} holds {count or 'no'} files{matching}{expected}"

    def _is_wanted(self, found: Found) -> bool:
        name = found.name.rpartition("/")[2]
        if name.startswith((".", "_")) or found.is_loop:
            return False
        if found.is_folder:
            return self._recursive and not found.problem
        return self._pattern is None or fnmatch.fnmatchcase(found.name if "/" in self._pattern else name, self._pattern)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "on_error": self._on_error}

    def _items(self, run: Pass) -> Iterator[str]:
        # workers take whole batches in turn
        items = np.arange(self.num_items(run))
        mine = items[items // (self.batch_size or 1) % run.num_workers == run.worker][run.item :]
        order, positions = self._order(run), self._positions(run, mine)
        cache = open_cache(self._cache_dir)
        if self._held is not None and self._held_bytes > cache.max_bytes // 2:
            self._held.close()  # so that there is room for others
            self._held = None
        if self._held is None:
            self._held, self._held_bytes = cache.epoch(), 0
        held = self._held
        names, storage = self._names, open_storage(self._path)

        def find(index: int) -> Fetched:
            return held.find(storage, names[index])

        chosen: list[int] = order.rows_at(positions).tolist()
        ahead = FetchedAhead(
            chosen, find, num_threads=self._num_threads, num_ahead=self._prefetch_files, at_first=self._last_threads
        )
        with closing(ahead.results()) as results:
            for index, position, result in zip(chosen, positions.tolist(), results, strict=True):
                if isinstance(result, BaseException):
                    is_its_own = isinstance(result, OSError) and not isinstance(result, UncachedError)
                    if self._on_error == "raise" or not is_its_own:
                        raise result
                    self._note_skipped(names[index], result)
                    result = self._stand_in(order, position, run, find)
                yield self._note(result)
            self._last_threads = ahead.num_threads

    def _stand_in(self, order: Order, position: int, run: Pass, find: Callable[[int], Fetched]) -> Fetched:
        """Return what takes the place of a file that cannot be read: the last one before it of this rank's that can.

        Raises:
            VolumeError: Its neighbours cannot be read either.
        """
        before = np.arange(position - run.world_size, -1, -run.world_size)
        after = np.arange(position + run.world_size, order.num_rows, run.world_size)
        for index in order.rows_at(np.concatenate([before, after])[:_MOST_TRIED]).tolist():
            try:
                return find(index)
            except UncachedError:
                raise
            except OSError:
                continue
        raise VolumeError(
            f"a file of {self._path} cannot be read, nor can {_MOST_TRIED} others beside it.\n"
            "  The warnings name the first; see that the volume answers."
        )

    def _note(self, fetched: Fetched) -> str:
        self._held_bytes += fetched.num_bytes
        if fetched.is_copied:
            self._num_copied_bytes += fetched.num_bytes
        else:
            self._num_cached_bytes += fetched.num_bytes
        return str(fetched.path)

    def _note_skipped(self, name: str, error: BaseException) -> None:
        self._num_skipped += 1
        if self._num_skipped <= _MOST_NAMED:
            more = " Others are only counted, in traffic." if self._num_skipped == _MOST_NAMED else ""
            warnings.warn(f"{self._path}/{name} is skipped: {error}{more}", stacklevel=2)


def files_under(source: Any, is_wanted: Callable[[Found], bool]) -> list[str]:
    """Return the names of the files in a source that are wanted, sorted by their bytes, of folders that are wanted."""
    names: list[str] = []

    def list_folder(folder: str) -> list[Found]:
        return list(filter(is_wanted, source.list(folder)))

    with ThreadPoolExecutor(_LISTING_THREADS, "bridge-list") as threads:
        waiting: set[Future[list[Found]]] = {threads.submit(list_folder, "")}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for found in (found for future in done for found in future.result()):
                if found.is_folder:
                    waiting.add(threads.submit(list_folder, found.name))
                else:
                    names.append(found.name)
    return sorted(names, key=os.fsencode)
