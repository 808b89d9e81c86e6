"""What datasets with an order have in common: epoch, position, rank and worker, and the state that brings them back.

main process:  begin ── which epoch, from where, for which rank; all ranks agree on it ── tells its workers
each process:  items ── its own part of the order, and how many items were handed out
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from bridge import distributed
from bridge.distributed import from_rank_0, resolve_rank
from bridge.errors import RankError
from bridge.loading.order import Indices, Order, batch_rows, num_steps, padding
from bridge.loading.place import Listing, Pass, Place
from bridge.loading.stats import Traffic

STATE_FORMAT = 1

_MOST_WORKERS = 1024
_HEAD = 6  # epoch, consumed, canonical_world_size, rank, world_size, the worker whose turn it is
_SLOT = 4  # of each worker: passes begun since the head was written, item and made of its Pass, digest of its data
_UNSET = -1
_POSITION = ("run", "pulled", "_place", "_is_finished", "_pending", "_running", "_led")


class OrderedDataset(IterableDataset[Any]):
    """A dataset whose order is a function, and whose position is a few integers.

    An iteration that is left begins its epoch anew; one that ends is followed by the next epoch.

    Attributes:
        run: The pass that this process began last.
        pulled: How many items of it this process has yielded, those left out at its start included.
        makes_batches: Whether an item is a batch.
        remedy: What to do where the training loop waits for this dataset.
    """

    makes_batches = False
    remedy = ""

    def __init__(
        self, *, batch_size: int | None, seed: int, shuffle: bool = False, shuffle_window: int = 1,
        drop_last: bool = False, canonical_world_size: int | None = None, rank: int | None = None,
        world_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(batch_size=batch_size, shuffle_window=shuffle_window, canonical_world_size=canonical_world_size)
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise ValueError(f"seed is {seed!r}; give a whole number.")
        if rank is not None or world_size is not None:
            resolve_rank(rank, world_size)
        # NumPy's numbers too; a state is of JSON's
        self.batch_size = None if batch_size is None else int(batch_size)
        self.shuffle = shuffle
        self.shuffle_window = int(shuffle_window)
        self.seed = int(seed)
        self.drop_last = drop_last
        self.canonical_world_size = None if canonical_world_size is None else int(canonical_world_size)
        self.pulled = 0
        self._rank = rank
        self._world_size = world_size
        self._place = Place(0)
        self._is_finished = False
        self._pending: Place | None = None  # where the next iteration begins, if that was said
        self.run: Pass | None = None
        self._running: Pass | None = None  # begun, and neither over nor left
        self._led: Pass | None = None  # begun by `lead`, and not yet iterated over
        # read by workers at each start, also by those that live on from epoch to epoch
        self._shared = torch.zeros(_HEAD + _SLOT * _MOST_WORKERS, dtype=torch.int64).share_memory_()
        self._tell(self._place)

    @cached_property
    def listing(self) -> Listing:
        """What there is, looked up once; under a process group, all ranks ask for it together."""
        raise NotImplementedError

    def _items(self, run: Pass) -> Iterator[Any]:
        """Yield the items of a pass."""
        raise NotImplementedError

    def _options(self) -> dict[str, Any]:
        """Return what all ranks must have in common beside what orders them."""
        return {"batch_size": self.batch_size, "drop_last": self.drop_last}

    @property
    def rows_per_item(self) -> int:
        """How many positions of a rank one item takes."""
        return (self.batch_size or 1) if self.makes_batches else 1

    def num_items(self, run: Pass) -> int:
        """Return how many items a rank has from the place of a pass on."""
        # what is left out is whole batches, also where an item is none
        size = (self.batch_size or 1) if self.drop_last else self.rows_per_item
        return size // self.rows_per_item * num_steps(
            self.listing.num_rows, batch_size=size, world_size=run.world_size, consumed=run.place.consumed,
            drop_last=self.drop_last,
        )  # fmt: skip

    def batch_rows(self, run: Pass, step: int) -> tuple[int, int]:
        """Return how many rows a batch of a pass has on a rank, and how many of them are real."""
        return batch_rows(
            step, self.listing.num_rows, batch_size=self.batch_size or 1, rank=run.rank, world_size=run.world_size,
            consumed=run.place.consumed,
        )  # fmt: skip

    def _order(self, run: Pass) -> Order:
        assert run.place.canonical_world_size is not None
        return Order(
            self.listing.row_counts, seed=self.seed, epoch=run.place.epoch, shuffle=self.shuffle,
            shuffle_window=self.shuffle_window, canonical_world_size=run.place.canonical_world_size,
        )  # fmt: skip

    def _positions(self, run: Pass, rows: Indices) -> Indices:
        """Return the positions of rows that are counted on a rank from the place of a pass on, padding included."""
        rank, world_size, consumed = run.rank, run.world_size, run.place.consumed
        positions: Indices = consumed + (rank - consumed) % world_size + rows * world_size
        num_rows = self.listing.num_rows
        positions[positions >= num_rows] = padding(num_rows, rank=rank, world_size=world_size)
        return positions

    @property
    def traffic(self) -> Traffic:
        """What this process has read for this dataset so far."""
        return Traffic()

    @property
    def epoch(self) -> int:
        """The epoch that the iteration goes through, or that the next one will."""
        return self._place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which begins at its start unless a state of that epoch was loaded.

        An iteration that has begun goes on as it is.
        """
        if self._pending is None or self._pending.epoch != epoch:
            self._set(Place(epoch, digest=self.run.place.digest if self.run else None))

    def state_dict(self) -> dict[str, Any]:
        """Return the position: a few integers, and the digest of the data.

        Raises:
            RuntimeError: Workers of torch's own DataLoader iterate, whose positions are not known here.
        """
        if get_worker_info() is None and bool(self._shared[_HEAD::_SLOT].any()):
            raise RuntimeError(
                "workers of torch.utils.data.DataLoader iterate over this dataset, and only they know where they are.\n"
                "  Use bridge.DataLoader, whose state_dict() counts the batches that the training loop got."
            )
        order = {"seed": self.seed, "shuffle": self.shuffle, "shuffle_window": self.shuffle_window}
        return {"format": STATE_FORMAT, **order, **asdict(self._place)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin where the state was taken.

        Batch size, world_size and num_workers may be others than then; not, though, where a wrapper had made more or
        fewer items than it took. Whether the data is the same is seen when the iteration begins.

        Raises:
            ValueError: It is no state of a dataset, or one of another order.
        """
        if not isinstance(state, Mapping) or state.get("format") != STATE_FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"the state has format {found!r}; this version reads {STATE_FORMAT}.")
        for name in ("seed", "shuffle", "shuffle_window"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state was taken with {name}={state[name]}; this dataset has {getattr(self, name)}.\n"
                    "  Make it with the same arguments, or begin an epoch without the state: set_epoch()."
                )
        place = Place(**{field.name: state[field.name] for field in fields(Place)})
        streams = self.canonical_world_size
        if streams is not None and place.canonical_world_size not in (None, streams):
            raise ValueError(
                f"the state was taken with canonical_world_size={place.canonical_world_size}; this dataset has "
                f"{streams}.\n  Leave it out, and the epoch goes on as it began."
            )
        # JSON makes lists of tuples
        place = replace(
            place,
            items=tuple((int(item), int(made)) for item, made in place.items),
            of_rank=None if place.of_rank is None else (place.of_rank[0], place.of_rank[1]),
        )
        self._set(place)

    def __len__(self) -> int:
        """Items of an epoch on each rank, wherever the position is; under a process group, all ranks call it."""
        return self.num_items(Pass(Place(0), *self.rank_and_world_size()))

    def num_valid(self, step: int) -> int:
        """Return how many rows of a batch are real; those behind them repeat one, so that all ranks have as many.

        Args:
            step: Counted from where the iteration began, so from 0 after a resume.
        """
        run = self.run or Pass(self._pending or Place(0), *self.rank_and_world_size())
        return self.batch_rows(run, step)[1]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None:
            self.run = self._pass_of_worker(info.id, info.num_workers)
            self._compare_data(self.run)
            return self._counted(self.run)
        led, self._led = self._led, None
        return self._counted(led) if led else self._moving(self._begin())

    def lead(self, num_workers: int = 0) -> Pass:
        """Begin a pass whose position `DataLoader` tells, through `moved` and `finish`.

        Args:
            num_workers: Processes that iterate; 0 for this one.
        """
        run = self._begin(max(1, num_workers))
        self._tell(run.place, run)
        return run

    def follow(self, run: Pass) -> None:
        """Let the next iteration in this process be a pass that `lead` began, whatever was called since."""
        self.run = self._running = self._led = run
        self._place, self._is_finished = run.place, False

    def moved(self, run: Pass, items: int) -> None:
        """Note that the training loop has so many items of a pass, of all its workers together."""
        num_rows = self.listing.num_rows
        self._is_finished = items >= self.num_items(run)
        consumed = run.place.consumed + items * self.rows_per_item * run.world_size
        # what drop_last leaves out is done too
        self._place = replace(run.place, consumed=num_rows if self._is_finished else min(consumed, num_rows))

    def moved_apart(self, run: Pass, items: Sequence[tuple[int, int]], next_worker: int) -> None:
        """Note how far each worker is, where a wrapper does not make one item of one."""
        of_rank = (run.rank, run.world_size)
        self._place = replace(run.place, items=tuple(items), next_worker=next_worker, of_rank=of_rank)

    def finish(self, run: Pass) -> None:
        """Go on to the next epoch, where no other was chosen meanwhile."""
        self._pending = self._pending or Place(run.place.epoch + 1, digest=run.place.digest)

    def leave(self, run: Pass) -> None:
        """Note that the loop over a pass is over, or was left."""
        if self._running is run:
            self._running = None
            if self._pending is not None:
                self._set(self._pending)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let the epoch of the next iteration be gone through, and bring the position back that there was."""
        before = {name: getattr(self, name) for name in _POSITION}
        told = self._shared.clone()
        self._running = None
        self._set(Place((self._pending or Place(self._place.epoch + self._is_finished)).epoch))
        try:
            yield
        finally:
            vars(self).update(before)
            self._shared.copy_(told)

    def _moving(self, run: Pass) -> Iterator[Any]:
        try:
            for item in self._counted(run):
                self.moved(run, self.pulled)
                yield item
            self.finish(run)
        finally:
            self.leave(run)

    def _counted(self, run: Pass) -> Iterator[Any]:
        self.pulled = run.item
        for item in self._items(run):
            self.pulled += 1
            yield item

    def _begin(self, num_workers: int = 1) -> Pass:
        rank, world = self.rank_and_world_size()
        digest = self.listing.digest
        place = self._pending or Place(self._place.epoch + self._is_finished)
        if place.digest not in (None, digest):
            raise ValueError(
                f"the state was taken over other data than {self} holds now (digest {place.digest}, not {digest}).\n"
                "  Open the data that it was taken over, or begin an epoch: set_epoch()."
            )
        if place.items and len(place.items) != num_workers:
            raise ValueError(
                f"the state was taken with {len(place.items)} process(es) of a wrapper that does not make one item of "
                f"one; here are {num_workers}.\n  Resume with num_workers={len(place.items)}, or begin an epoch."
            )
        if place.of_rank not in (None, (rank, world)):
            raise ValueError(
                f"the state is of rank {place.of_rank[0]} of {place.of_rank[1]}, under a wrapper that does not make "
                f"one item of one; this is rank {rank} of {world}.\n  Give each rank its own state, on as many ranks."
            )
        streams = place.canonical_world_size or self.canonical_world_size or world
        place = replace(place, canonical_world_size=streams, digest=digest)
        if (rank, world) == (distributed.rank(), distributed.world_size()):
            agree(f"an iteration over a {type(self).__name__}", {
                **self._options(), "digest": digest, "seed": self.seed, "shuffle": self.shuffle,
                "shuffle_window": self.shuffle_window, "epoch": place.epoch, "consumed": place.consumed,
                "canonical_world_size": streams,
            })  # fmt: skip
        self._pending, self._is_finished, self._place = None, False, place
        first = place.items[0] if place.items and num_workers == 1 else (0, 0)
        self.run = self._running = Pass(place, rank, world, item=first[0], made=first[1])
        return self.run

    def _pass_of_worker(self, worker: int, num_workers: int) -> Pass:
        epoch, consumed, streams, rank, world, turn = self._shared[:_HEAD].tolist()
        number = (worker + turn) % num_workers
        slot = self._shared[_HEAD + _SLOT * number :][:_SLOT]
        begun, item, made, _ = slot.tolist()
        if rank == _UNSET:  # of torch's own loader: each pass after the first is of a next epoch
            slot[0] += 1
            rank, world = self.rank_and_world_size()
            if begun:
                epoch, consumed, streams, item, made = epoch + begun, 0, 0, 0, 0
        place = Place(epoch, consumed, streams or self.canonical_world_size or world)
        return Pass(place, rank, world, number, num_workers, item, made)

    def _compare_data(self, run: Pass) -> None:
        """See that all workers have the same data, where each looked for itself."""
        mine = int(self.listing.digest[:15], 16)
        # first say it, then look, so that of two workers one sees the other
        self._shared[_HEAD + _SLOT * run.worker + 3] = mine
        if any(other not in (0, mine) for other in self._shared[_HEAD + 3 :: _SLOT].tolist()):
            raise RankError(
                f"the workers of this loader found different data for {self}: it changed meanwhile.\n"
                "  Call len(dataset) before the loader starts its workers, or use bridge.DataLoader."
            )

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return those given, or those that this process has now."""
        return resolve_rank(self._rank, self._world_size)

    def _set(self, place: Place) -> None:
        self._pending = place
        if self._running is None or self._running.place == self._place:  # no loop stands elsewhere
            self._place, self._is_finished, self._led = place, False, None
        if self._running is None:
            self._tell(place)

    def _tell(self, place: Place, run: Pass | None = None) -> None:
        """Write what workers read when they begin."""
        rank, world = (run.rank, run.world_size) if run else (_UNSET, _UNSET)
        self._shared.zero_()
        self._shared[:_HEAD] = torch.tensor(
            [place.epoch, place.consumed, place.canonical_world_size or 0, rank, world, place.next_worker]
        )
        for worker, (item, made) in enumerate(place.items):
            self._shared[_HEAD + _SLOT * worker + 1 :][:2] = torch.tensor([item, made])

    def __getstate__(self) -> dict[str, Any]:
        if multiprocessing.context.get_spawning_popen() is None:
            return {**self.__dict__, "_led": None, "_running": None}
        # a worker has no process group, and cannot ask the other ranks
        _ = self.listing
        rank, world = self.rank_and_world_size()
        return {**self.__dict__, "_led": None, "_running": None, "_rank": rank, "_world_size": world}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._shared.is_shared():
            self._shared = self._shared.clone().share_memory_()


def agree(what: str, options: Mapping[str, Any]) -> None:
    """Return when all ranks have begun `what` with the same options.

    Raises:
        RankError: A rank differs, or did not come; on every rank, naming the rank and the options.
    """
    from_rank_0(lambda: None, what=what, arguments={name: str(value) for name, value in options.items()})


def check_sizes(**sizes: int | None) -> None:
    """Refuse what is no whole number of at least 1.

    Raises:
        ValueError: One is not; None is taken as not given.
    """
    for name, value in sizes.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
            raise ValueError(f"{name} is {value!r}; give a whole number, 1 or more.")
