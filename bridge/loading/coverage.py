"""Proof that an epoch held each row exactly once: what batches held, compared with what the files hold.

    batches ── a hash of each row ──┐
                                    ├── sums of all ranks ── where these differ: the hashes ── which rows
    files ──── a hash of each row ──┘

The files are read straight, in their own order, by none of the code that orders rows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from bridge import distributed
from bridge.columns.policies import mark_of
from bridge.display import format_count
from bridge.distributed import cpu_group, on_every_rank
from bridge.errors import ConfigError
from bridge.loading.loader import DataLoader
from bridge.loading.parquet import RowGroupDataset
from bridge.loading.place import Pass, Place
from bridge.loading.row_hash import Hashes, hash_rows, mix

T = TypeVar("T")

_NAMED = 20
_BLOCK_ROWS = 1 << 20
_PART_ROWS = 1 << 16  # of a row group that become a batch, or of batches that are hashed at once
_MOST_AT_ONCE = 64


class Row(NamedTuple):
    """Where a row is: number `row` of a row group of a file; "" where rows are in memory."""

    file: str
    row_group: int
    row: int


_Found: TypeAlias = tuple[int, Row, int]  # number of the row group in the dataset, place, hash


@dataclass(frozen=True)
class CoverageReport:
    """What an epoch held of the rows of its files, on all ranks together; equal on all ranks.

    Rows of equal content are told apart by how many there are, and by nothing else.

    Attributes:
        name: What was read.
        num_rows: Rows in the files.
        num_seen: Rows in the batches, without padding.
        num_dropped: Rows that `drop_last` leaves out: fewer than one batch of all ranks.
        num_missing: Rows of the files that no batch held, beyond those that `drop_last` leaves out.
        num_double: Rows that a batch held once more than the files do.
        num_unknown: Rows in batches of a content that no row of the files has.
        missing: Where rows are that no batch held, up to 20 of them, in file order. Where rows are missing beside those
            that `drop_last` leaves out, they are among these.
        double: Where rows are that came more than once, up to 20 of them, in file order.
    """

    name: str
    num_rows: int
    num_seen: int
    num_dropped: int = 0
    num_missing: int = 0
    num_double: int = 0
    num_unknown: int = 0
    missing: tuple[Row, ...] = ()
    double: tuple[Row, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether each row came exactly once, but for those that `drop_last` leaves out."""
        return not self.num_missing and not self.num_double and not self.num_unknown

    def __str__(self) -> str:
        dropped = f"; drop_last leaves out {format_count(self.num_dropped)}" if self.num_dropped else ""
        if self.is_complete:
            what = "each row once" if self.num_seen else "no rows"
            return f"{self.name}: {what}, {format_count(self.num_seen)} of {format_count(self.num_rows)}{dropped}"
        lines = [
            f"{self.name}: not each row once; batches held {format_count(self.num_seen)} rows, the files "
            f"{format_count(self.num_rows)}{dropped}"
        ]
        beside = f" beside these {format_count(self.num_dropped)}, which are named too" if self.num_dropped else ""
        lines += _told(self.num_missing, f"missing{beside}", self.missing, self.num_missing + self.num_dropped)
        lines += _told(self.num_double, "double", self.double, self.num_double)
        lines += _told(self.num_unknown, "unknown: no row of the files has their content", (), 0)
        return "\n".join(lines)


def _told(count: int, what: str, rows: Sequence[Row], num_named: int) -> list[str]:
    if not count:
        return []
    lines = [f"  {format_count(count)} {what}{':' if rows else ''}"]
    lines += [f"    {f'{file}, ' if file else ''}row group {group}, row {row}" for file, group, row in rows]
    more = num_named - len(rows)
    return [*lines, f"    and {format_count(more)} more"] if rows and more > 0 else lines


def verify_epoch(data: RowGroupDataset | DataLoader, batches: Iterable[Any] | None = None) -> CoverageReport:
    """Return whether an epoch held each row of the files exactly once, by the content of rows.

    The files are read once more for it; where rows differ, up to three times. It takes 8 bytes of memory for each row
    of this rank, and 16 to 32 where rows differ or `drop_last` leaves some out. Under a process group all ranks call it
    together. Values of columns with `cached_file()` are paths of copies in batches and do not count.

    Args:
        data: A ParquetDataset, what `Table.to_loader` returned, or a DataLoader over a ParquetDataset, without a
            collate_fn. It is left at the position that it has.
        batches: What a training loop got on this rank, in order, from the start of an epoch; None: the whole epoch is
            gone through here.

    Raises:
        TypeError: `data` is something else, or wraps its dataset; or batches are not as it makes them.
        ConfigError: `data` is of one of several ranks, and no process group is there to ask the others.
        CorruptFileError: A file is damaged, or was written meanwhile.
        RankError: Not all ranks call it.

    Example:
        >>> import bridge
        >>> data = bridge.ParquetDataset("exports/numbers", shuffle=True)  # doctest: +SKIP
        >>> report = bridge.verify_epoch(data)  # doctest: +SKIP
        >>> assert report.is_complete, report  # doctest: +SKIP
    """
    dataset = data if isinstance(data, RowGroupDataset) else getattr(data, "dataset", None)
    if not isinstance(data, RowGroupDataset | DataLoader) or not isinstance(dataset, RowGroupDataset):
        over = f" over {type(dataset).__name__}" if isinstance(data, DataLoader) else ""
        raise TypeError(
            f"data is a {type(data).__name__}{over}; give a ParquetDataset, or a DataLoader whose dataset is one."
        )
    rank, world_size = dataset.rank_and_world_size()
    if world_size > 1 and (rank, world_size) != (distributed.rank(), distributed.world_size()):
        raise ConfigError(
            f"{dataset} is read as rank {rank} of {world_size}, and there is no process group of these ranks: one "
            "rank's rows prove nothing.\n  Call torch.distributed.init_process_group() on all ranks first."
        )
    what = f"verify_epoch({dataset})"
    ranks = _Ranks(None if world_size == 1 else cpu_group())
    check = _Check(dataset, ranks)
    # a loop of somebody's may write into a batch when it gets the next one
    at_once = _MOST_AT_ONCE if batches is None else 1
    with dataset.set_aside() if batches is None else nullcontext():
        seen = ranks.each(lambda: check.seen(data if batches is None else batches, at_once), what)
    return check.report(seen, what)


class _Check:
    """What one rank knows of the rows of a dataset."""

    def __init__(self, dataset: RowGroupDataset, ranks: _Ranks) -> None:
        self._dataset = dataset
        self._ranks = ranks
        self._row_groups = dataset.row_groups
        self._num_rows = dataset.listing.num_rows
        # in batches these are paths of copies
        self._leave_out = {field.name for field in dataset.schema if mark_of(field) == "cached_file"}
        whole = Pass(Place(0), ranks.rank, ranks.size)
        self._num_steps = dataset.num_items(whole)
        self._num_dropped = max(0, self._num_rows - self._num_steps * dataset.rows_per_item * ranks.size)
        # of a rank's last batch, at most one row is padding: it repeats the one before it
        self._last_size, valid = dataset.batch_rows(whole, self._num_steps - 1) if self._num_steps else (0, 0)
        self._is_padded = valid < self._last_size

    def seen(self, batches: Iterable[Any], at_once: int) -> Hashes:
        """Return a hash of each row of this rank's batches, without padding; `at_once` at the most wait for it."""
        made = bytearray()
        steps, last = 0, None
        batches, at_once = iter(batches), max(1, min(at_once, _PART_ROWS // self._dataset.rows_per_item))
        while some := list(itertools.islice(batches, at_once)):
            made += hash_rows(*some, leave_out=self._leave_out).tobytes()
            steps, last = steps + len(some), some[-1]
        # the epoch's last batch ends in it, wherever batches are missing or double before that one
        is_at_end = self._is_padded and (steps >= self._num_steps or made[-16:-8] == made[-8:])
        if is_at_end and last is not None and len(hash_rows(last, leave_out=self._leave_out)) == self._last_size:
            del made[-8:]
        return np.frombuffer(made, np.uint64)

    def report(self, seen: Hashes, what: str) -> CoverageReport:
        """Return what all ranks find together."""
        ranks, name, num_dropped = self._ranks, str(self._dataset), self._num_dropped
        num_seen = sum(ranks.gathered(len(seen)))
        if not num_dropped:
            expected = ranks.each(lambda: _totals(hashes for *_, hashes in self._in_files()), what)
            if not np.sum(ranks.gathered(_totals([seen]) - expected), axis=0, dtype=np.uint64).any():
                return CoverageReport(name, self._num_rows, num_seen)
        held = ranks.exchanged(ranks.each(lambda: _joined(hashes for *_, hashes in self._in_files()), what))
        seen = ranks.exchanged(seen)
        held.sort()
        seen.sort()
        missing, more = _difference(held, seen), _difference(seen, held)
        is_known = np.searchsorted(held, more) < np.searchsorted(held, more, "right")
        double = more[is_known]
        counts = [len(missing), len(double), len(more) - len(double)]
        num_missing, num_double, num_unknown = np.sum(ranks.gathered(counts), axis=0).tolist()
        num_missing = max(0, num_missing - num_dropped)
        del held, seen
        wanted = [
            # of all ranks the smallest, so that any world_size names the same
            Counter(np.sort(np.concatenate(ranks.gathered(hashes[:_NAMED])))[:_NAMED].tolist())
            for hashes in (missing if num_missing else missing[:0], double)
        ]
        found = ranks.each(lambda: self._found(set().union(*wanted)), what) if any(wanted) else []
        places = sorted(place for part in ranks.gathered(found) for place in part)
        return CoverageReport(
            name, self._num_rows, num_seen, num_dropped, num_missing, num_double, num_unknown,
            *(tuple(_chosen(places, one)) for one in wanted),
        )  # fmt: skip

    def _in_files(self) -> Iterator[tuple[int, int, Hashes]]:
        """Yield row groups that are this rank's to read, in parts: its number, the first row, a hash of each row."""
        form = self._dataset.form
        for index in range(self._ranks.rank, len(self._row_groups.row_counts), self._ranks.size):
            rows = self._row_groups.read(index)
            for start in range(0, rows.num_rows, _PART_ROWS):
                batch = form.batch(form.columns([rows.slice(start, _PART_ROWS)]))
                yield index, start, hash_rows(batch, leave_out=self._leave_out)

    def _found(self, wanted: set[int]) -> list[_Found]:
        """Return where this rank's rows with some hashes are: at most 20 of each hash."""
        found: list[_Found] = []
        counts: Counter[int] = Counter()
        places = getattr(self._row_groups, "places", None)
        values = np.array(list(wanted), np.uint64)
        for index, start, hashes in self._in_files():
            file, group = places[index] if places else ("", index)
            for at in np.flatnonzero(np.isin(hashes, values)).tolist():
                value = int(hashes[at])
                counts[value] += 1
                if counts[value] <= _NAMED:
                    found.append((index, Row(file, group, start + at), value))
        return found


class _Ranks:
    """The ranks that read one epoch: those of the process group, or one alone."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = 0 if group is None else distributed.rank()
        self.size = 1 if group is None else distributed.world_size()

    def each(self, call: Callable[[], T], what: str) -> T:
        """Return what a call returns here, when it has succeeded on all ranks."""
        return call() if self._group is None else on_every_rank(call, what=what)

    def gathered(self, value: T) -> list[T]:
        """Return what each rank gives."""
        if self._group is None:
            return [value]
        made: list[Any] = [None] * self.size
        dist.all_gather_object(made, value, group=self._group)
        return made

    def exchanged(self, hashes: Hashes) -> Hashes:
        """Return this rank's part of the hashes that all ranks give: equal ones come to one rank."""
        if self._group is None:
            return hashes
        owners = (hashes % np.uint64(self.size)).astype(np.uint32)
        sent = np.concatenate([hashes[owners == rank] for rank in range(self.size)]).view(np.int64)
        counts = np.bincount(owners, minlength=self.size).tolist()
        received = [given[self.rank] for given in self.gathered(counts)]
        made = torch.empty(sum(received), dtype=torch.int64)
        dist.all_to_all_single(made, torch.from_numpy(sent), received, counts, group=self._group)
        return made.numpy().view(np.uint64)


def _totals(parts: Iterable[Hashes]) -> Hashes:
    """Return how many hashes there are, and two sums of them: equal for the same hashes in any order."""
    total = np.zeros(3, np.uint64)
    for hashes in parts:
        for part in np.split(hashes, range(_BLOCK_ROWS, len(hashes), _BLOCK_ROWS)):
            total += np.array([len(part), part.sum(dtype=np.uint64), mix(part).sum(dtype=np.uint64)], np.uint64)
    return total


def _difference(these: Hashes, others: Hashes) -> Hashes:
    """Return what is in one sorted array beyond the other, as often as it is there more often."""
    kept = []
    for start in range(0, len(these), _BLOCK_ROWS):
        block = these[start : start + _BLOCK_ROWS]
        number = np.arange(start, start + len(block)) - np.searchsorted(these, block)  # among equals
        count = np.searchsorted(others, block, "right") - np.searchsorted(others, block)
        kept.append(block[number >= count])
    return _joined(kept)


def _joined(parts: Iterable[Hashes]) -> Hashes:
    return np.concatenate([np.empty(0, np.uint64), *parts])


def _chosen(places: list[_Found], wanted: Counter[int]) -> Iterator[Row]:
    """Yield the first places of each hash, as many as are wanted of it."""
    left = Counter(wanted)
    for _, row, value in places:
        if left[value]:
            left[value] -= 1
            yield row
