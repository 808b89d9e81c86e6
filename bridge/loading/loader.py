"""A loop over batches that knows how far the training has come.

    dataset ── worker: batches, each marked with how far it has come ── loader: counts what is handed over ── loop

The dataset that has the order may lie under others that decode, filter or augment what it yields, and know nothing of
positions. It counts what is asked of it, and the marks tell of that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, default_collate

from bridge.loading.dataset import OrderedDataset, check_sizes
from bridge.loading.device import on_device, pinned
from bridge.loading.huggingface import is_huggingface, open_huggingface
from bridge.loading.place import Pass
from bridge.loading.stats import Stats, Traffic

_DEPTH = 8  # of datasets within datasets


class Mark(NamedTuple):
    """How far a worker has come with an item.

    Attributes:
        worker: Its number.
        item: Items of the ordered dataset that were done before those that this one was made of.
        made: Items that have been made of these.
        is_plain: Whether each item so far was made of one.
    """

    worker: int
    item: int
    made: int
    is_plain: bool


class Marked(NamedTuple):
    """A batch, the mark of its last item, how many items of the outermost dataset it has, and what was read so far."""

    mark: Mark
    num_items: int
    traffic: Traffic
    batch: Any


class DataLoader:
    """Batches for a training loop, with a position that can be saved and restored exactly.

    For `ParquetDataset`, `UCVolumeDataset`, datasets that wrap one of them in an attribute, and Hugging Face's. The
    state counts what the loop got, not what workers made ahead. It is exact under wrappers too that make several items
    of one, or none, as long as they make the same of the same and hold nothing back; a buffer of theirs is lost.

    Args:
        dataset: What is iterated over.
        batch_size: Items of a batch. None: what the dataset says; it may be said once.
        shuffle, sampler, batch_sampler, drop_last, seed: For a dataset of Hugging Face's. Ours have an order of their
            own.
        num_workers: Processes that iterate; 0: this one. `ParquetDataset` is fastest with 0, as it decodes in threads.
        collate_fn: Makes a batch of a list of items, or of one item where there is no batch_size.
        pin_memory: Whether batches come in memory from which a GPU copies without waiting; where CUDA is.
        device: Where batches are moved to: "cuda", while the step before is computed, or any other device.
        prefetch_factor, persistent_workers, multiprocessing_context, worker_init_fn, timeout: As torch's.

    Raises:
        TypeError: There is no dataset with an order in `dataset`.
        ValueError: An argument is out of range, or said twice.

    Example:
        >>> import bridge
        >>> data = bridge.ParquetDataset("exports/numbers", batch_size=256, shuffle=True)  # doctest: +SKIP
        >>> loader = bridge.DataLoader(data)  # doctest: +SKIP
        >>> for batch in loader:  # doctest: +SKIP
        ...     torch.save(loader.state_dict(), "position.pt")
    """

    def __init__(
        self, dataset: Any, *, batch_size: int | None = None, shuffle: bool | None = None, sampler: Any = None,
        batch_sampler: Any = None, drop_last: bool = False, seed: int = 0, num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None, pin_memory: bool = False, device: Any = None,
        prefetch_factor: int | None = None, persistent_workers: bool = False, multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None, timeout: float = 0,
    ) -> None:  # fmt: skip
        check_sizes(batch_size=batch_size)
        self.dataset = dataset
        self.num_workers = num_workers
        self.stats = Stats()
        if is_huggingface(dataset):
            ordered: OrderedDataset
            ordered = outer = open_huggingface(
                dataset, batch_size=batch_size, shuffle=bool(shuffle), seed=seed, drop_last=drop_last, sampler=sampler,
                batch_sampler=batch_sampler, collate_fn=collate_fn,
            )  # fmt: skip
            collate_fn = batch_size = None
        else:
            ordered, outer = _find_ordered(dataset), dataset
            own = {"shuffle": shuffle, "sampler": sampler, "batch_sampler": batch_sampler, "drop_last": drop_last}
            for name, value in {**own, "seed": seed}.items():
                if value:
                    raise ValueError(f"{name} is given to the loader; give it to the {type(ordered).__name__}.")
            batch_size = _agreed_batch_size(ordered, batch_size)
        self.batch_size = batch_size or ordered.batch_size
        self.device = None if device is None else torch.device(device)
        self._pin_memory = pin_memory
        self._ordered = ordered
        self._outer = outer
        self._marking = _Marking(outer, ordered, batch_size, collate_fn)
        self._processes: Any = None
        if num_workers:
            self._processes = torch.utils.data.DataLoader(
                self._marking, batch_size=None, collate_fn=_same, num_workers=num_workers, pin_memory=pin_memory,
                prefetch_factor=prefetch_factor, persistent_workers=persistent_workers, timeout=timeout,
                multiprocessing_context=multiprocessing_context, worker_init_fn=worker_init_fn,
            )  # fmt: skip
        elif prefetch_factor is not None or persistent_workers or timeout:
            raise ValueError("prefetch_factor, persistent_workers and timeout are about workers: give num_workers.")

    def __len__(self) -> int:
        """Batches of an epoch on each rank, wherever the position is.

        Raises:
            TypeError: A dataset wraps the one with the order, and does not say how many items it makes.
        """
        items = len(self._outer)
        if self._marking.batch_size is None:
            return items
        return items // self._marking.batch_size if self._ordered.drop_last else -(-items // self._marking.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which begins at its start unless a state of that epoch was loaded."""
        self._ordered.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """The epoch that the iteration goes through, or that the next one will."""
        return self._ordered.epoch

    def num_valid(self, step: int) -> int:
        """Return how many rows of a batch are real, as `ParquetDataset.num_valid` does."""
        return self._ordered.num_valid(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the batch that was handed over last: values of JSON, a few hundred bytes."""
        return self._ordered.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin where a state was taken, as `ParquetDataset.load_state_dict` does."""
        self._ordered.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        run = self._ordered.lead(self.num_workers)
        source: Iterator[Marked] = iter(self._processes if self.num_workers else self._marking)
        if self._pin_memory and not self.num_workers:
            source = pinned(source)
        if self.device is not None:
            source = on_device(source, self.device)
        self.stats = Stats(remedy=self._ordered.remedy)
        return self._handed_over(run, source)

    def _handed_over(self, run: Pass, source: Iterator[Marked]) -> Iterator[Any]:
        ordered, stats = self._ordered, self.stats
        if not self.num_workers:
            ordered.follow(run)
        num_workers = max(1, self.num_workers)
        done = list(run.place.items) or [(0, 0)] * num_workers
        traffic = [Traffic()] * num_workers
        is_plain, num_items = not run.place.items, 0
        began = time.perf_counter()
        try:
            for mark, count, read, batch in source:
                stats.wait_s += time.perf_counter() - began
                is_plain = is_plain and mark.is_plain
                num_items += count
                done[mark.worker] = (mark.item, mark.made)
                if is_plain:
                    ordered.moved(run, num_items)
                else:
                    ordered.moved_apart(run, done, (mark.worker + 1) % num_workers)
                traffic[mark.worker] = read
                stats.traffic = sum(traffic[1:], traffic[0])
                stats.num_batches += 1
                began = time.perf_counter()
                yield batch
                del batch
                stats.compute_s += time.perf_counter() - began
                began = time.perf_counter()
            ordered.finish(run)
        finally:
            ordered.leave(run)


class _Marking(IterableDataset[Marked]):
    """Batches of a dataset's items, each with a mark; iterated over in each worker."""

    def __init__(
        self, dataset: Iterable[Any], ordered: OrderedDataset, batch_size: int | None,
        collate_fn: Callable[[Any], Any] | None,
    ) -> None:  # fmt: skip
        self.batch_size = batch_size
        self._dataset = dataset
        self._ordered = ordered
        self._collate = collate_fn or (_same if batch_size is None else default_collate)

    def __iter__(self) -> Iterator[Marked]:
        items: list[Any] = []
        before = self._ordered.traffic  # of iterations before, and of the process that this one was forked from

        def marked(mark: Mark, items: list[Any]) -> Marked:
            batch = self._collate(items[0] if self.batch_size is None else items)
            return Marked(mark, len(items), self._ordered.traffic - before, batch)

        for item, mark in self._followed():
            items.append(item)
            if len(items) == (self.batch_size or 1):
                yield marked(mark, items)
                items = []
        if items and not self._ordered.drop_last:
            yield marked(mark, items)

    def _followed(self) -> Iterator[tuple[Any, Mark]]:
        """Yield items with a mark, without those that were handed over before the position was taken."""
        ordered = self._ordered
        if self._dataset is ordered:
            for item in ordered:
                assert ordered.run is not None
                yield item, Mark(ordered.run.worker, ordered.pulled, 0, True)
            return
        at: _At | None = None
        last: Any = None
        for item in self._dataset:
            # only now it is known whether the one before was the last of what it was made of
            assert ordered.run is not None
            now = at.followed(ordered.pulled) if at else _At(ordered.run.item, ordered.pulled, 1, True)
            if at and not at.is_known(ordered.run):
                yield last, at.mark(ordered, is_done=now.made == 1)
            at, last = now, item
        if at and ordered.run and not at.is_known(ordered.run):
            yield last, at.mark(ordered, is_done=True)


class _At(NamedTuple):
    """Where an item of a wrapper stands: it is number `made` of those that were made of [start, stop) under it."""

    start: int
    stop: int
    made: int
    was_plain: bool
    """Whether all items before it were made of one each."""

    def followed(self, pulled: int) -> _At:
        """Return where the next item stands, for which the dataset under it has come to `pulled`."""
        if pulled == self.stop:
            return self._replace(made=self.made + 1)
        return _At(self.stop, pulled, 1, self.is_plain)

    @property
    def is_plain(self) -> bool:
        return self.was_plain and self.made == 1 and self.stop == self.start + 1

    def is_known(self, run: Pass) -> bool:
        """Return whether it was handed over before the position was taken."""
        return self.start == run.item and self.made <= run.made

    def mark(self, ordered: OrderedDataset, *, is_done: bool) -> Mark:
        """Return the mark behind it. What was asked for is done with when the next item needs more."""
        assert ordered.run is not None
        item, made = (self.stop, 0) if is_done else (self.start, self.made)
        return Mark(ordered.run.worker, item, made, self.is_plain and is_done)


def _find_ordered(dataset: Any) -> OrderedDataset:
    """Return the dataset that has the order: `dataset`, or one that it or what it holds has in an attribute.

    Raises:
        TypeError: There is none.
        ValueError: There are several.
    """
    found: dict[int, OrderedDataset] = {}
    seen: set[int] = set()
    todo = deque([(dataset, 0)])
    while todo:
        one, depth = todo.popleft()
        if id(one) in seen or depth > _DEPTH:
            continue
        seen.add(id(one))
        if isinstance(one, OrderedDataset):
            found[id(one)] = one
        elif isinstance(one, Mapping):
            todo.extend((part, depth + 1) for part in one.values())
        elif isinstance(one, list | tuple):
            todo.extend((part, depth + 1) for part in one)
        elif hasattr(one, "__dict__") and not isinstance(one, type | torch.nn.Module):
            todo.extend((part, depth + 1) for part in vars(one).values())
    if not found:
        raise TypeError(
            f"{type(dataset).__name__} is neither a ParquetDataset, a UCVolumeDataset nor a dataset of Hugging Face's, "
            "and holds none in an attribute.\n  torch.utils.data.DataLoader takes any other."
        )
    if len(found) > 1:
        raise ValueError(
            f"{type(dataset).__name__} holds {len(found)} datasets with an order, and a position tells of one.\n"
            "  Give each a loader of its own, and zip them."
        )
    return next(iter(found.values()))


def _agreed_batch_size(ordered: OrderedDataset, batch_size: int | None) -> int | None:
    """Return how many items make a batch here; None where items are batches."""
    name = type(ordered).__name__
    if ordered.makes_batches:
        if batch_size is not None:
            raise ValueError(f"batch_size is given to the loader; {name} makes the batches: give it batch_size.")
        return None
    if ordered.batch_size is None:
        # so that workers take whole batches in turn
        ordered.batch_size = batch_size
    elif batch_size not in (None, ordered.batch_size):
        raise ValueError(f"batch_size is {batch_size} here and {ordered.batch_size} in {name}; give it once.")
    return ordered.batch_size


def _same(batch: Any) -> Any:
    return batch
