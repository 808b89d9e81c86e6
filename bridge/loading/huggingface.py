"""Batches of Hugging Face datasets: slices of their Arrow tables, never row by row."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, SequentialSampler, default_collate

from bridge.distributed import resolve_rank
from bridge.loading.arrow_rows import Fetch, fetcher, own_tensors
from bridge.loading.dataset import OrderedDataset, agree
from bridge.loading.order import seed_of
from bridge.loading.place import Listing, Pass
from bridge.volumes.digest import digest_bytes

if TYPE_CHECKING:
    import datasets


def is_huggingface(dataset: Any) -> bool:
    """Return whether it is a dataset of Hugging Face's, map-style or iterable."""
    # whoever made one has imported these; a module of somebody's own may be called "datasets" too
    kinds = [("datasets.arrow_dataset", "Dataset"), ("datasets.iterable_dataset", "IterableDataset")]
    return any(isinstance(dataset, getattr(sys.modules.get(module), name, ())) for module, name in kinds)


def open_huggingface(
    dataset: Any, *, batch_size: int | None, shuffle: bool, seed: int, drop_last: bool, sampler: Any,
    batch_sampler: Any, collate_fn: Callable[[Any], Any] | None,
) -> OrderedDataset:  # fmt: skip
    """Return the batches of a dataset of Hugging Face's; `bridge.DataLoader` says what the arguments mean.

    Raises:
        ValueError: Arguments exclude each other, or an iterable dataset is to be shuffled here.
    """
    import datasets
    from datasets.features.features import require_decoding

    if isinstance(dataset, datasets.IterableDataset):
        if shuffle or sampler is not None or batch_sampler is not None:
            raise ValueError(
                "an iterable dataset takes no shuffle, sampler or batch_sampler here.\n"
                "  Use its own shuffle(buffer_size=...)."
            )
        if collate_fn is None and dataset._formatting is None and require_decoding(dataset.features or {}):
            collate_fn = default_collate
        return StreamBatches(dataset, collate_fn, batch_size=batch_size or 1, drop_last=drop_last, seed=seed)
    fetch = fetcher(dataset, collate_fn)
    if sampler is None and batch_sampler is None:
        return RowBatches(dataset, fetch, batch_size=batch_size or 1, shuffle=shuffle, seed=seed, drop_last=drop_last)
    if batch_sampler is not None and (batch_size not in (None, 1) or shuffle or sampler is not None or drop_last):
        raise ValueError("batch_sampler excludes batch_size, shuffle, sampler and drop_last.")
    if sampler is not None and shuffle:
        raise ValueError("sampler excludes shuffle.")
    batches = batch_sampler if batch_sampler is not None else BatchSampler(sampler, batch_size or 1, drop_last)
    return SampledBatches(dataset, fetch, batches, seed=seed)


class RowBatches(OrderedDataset):
    """Batches of a map-style dataset in an order that is a function: each row is a row group of one."""

    makes_batches = True
    remedy = "keep the dataset on a faster disk, read fewer columns (select_columns), or put decoding into num_workers"

    def __init__(
        self, dataset: datasets.Dataset, fetch: Fetch, *, batch_size: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        super().__init__(batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._fetch = fetch
        self.listing = Listing(np.ones(len(dataset), np.int64), _digest(dataset))

    def __str__(self) -> str:
        return f"a dataset of {self.listing.num_rows:,} rows"

    def _items(self, run: Pass) -> Iterator[Any]:
        order = self._order(run)
        for step in range(self.num_items(run))[run.worker :: run.num_workers][run.item :]:
            rows = step * self.rows_per_item + np.arange(self.batch_rows(run, step)[0])
            yield self._fetch(order.rows_at(self._positions(run, rows)))


class SampledBatches(OrderedDataset):
    """Batches of a map-style dataset as a sampler chooses them; which ranks get what is the sampler's matter.

    The position counts batches. A sampler of torch's that draws without a generator of its own gets one that is seeded
    for each epoch, so that a resumed epoch goes on as it began; other samplers must give the same again.
    """

    makes_batches = True
    remedy = RowBatches.remedy

    def __init__(self, dataset: datasets.Dataset, fetch: Fetch, batches: Any, *, seed: int) -> None:
        super().__init__(batch_size=None, seed=seed, rank=0, world_size=1)
        self._fetch = fetch
        self._batches = batches
        self._sampler = getattr(batches, "sampler", batches)
        self.listing = Listing((), _digest(dataset))

    def __str__(self) -> str:
        return f"a dataset with a {type(self._sampler).__name__}"

    def __len__(self) -> int:
        """Batches of an epoch, where the sampler says how many."""
        return len(self._batches)

    def num_valid(self, step: int) -> int:
        raise TypeError("a sampler chooses the rows, and only it knows which are repeated; leave it out for num_valid.")

    def lead(self, num_workers: int = 0) -> Pass:
        inner = self._sampler if type(self._batches) is BatchSampler else self._batches
        is_same = isinstance(inner, list | tuple | range | SequentialSampler) or hasattr(inner, "set_epoch")
        if num_workers and not (is_same or getattr(inner, "generator", inner) is None):
            raise ValueError(
                f"{type(inner).__name__} may choose other rows in each worker; num_workers is {num_workers}.\n"
                "  Take num_workers=0, or a sampler that has set_epoch() or no generator of its own."
            )
        return super().lead(num_workers)

    def moved(self, run: Pass, items: int) -> None:
        self._place = replace(run.place, consumed=run.place.consumed + items)
        try:
            self._is_finished = self._place.consumed >= len(self._batches)
        except TypeError:  # this sampler does not know; the end of the iteration tells
            self._is_finished = False

    def _items(self, run: Pass) -> Iterator[Any]:
        for one in {id(one): one for one in (self._batches, self._sampler)}.values():
            if hasattr(one, "set_epoch"):
                one.set_epoch(run.place.epoch)
        generator = torch.Generator().manual_seed(seed_of(f"{self.seed}/{run.place.epoch}/sampler"))
        first = run.place.consumed + run.item * run.num_workers + run.worker
        for indices in itertools.islice(_drawing(self._batches, generator), first, None, run.num_workers):
            yield self._fetch(np.asarray(indices, np.int64))


class StreamBatches(OrderedDataset):
    """Batches of an iterable dataset. The position counts rows; a resumed epoch reads again what comes before it.

    The dataset's own state would lose what its shuffle buffer holds (huggingface/datasets#7901). Of a dataset that is
    split by node, ranks may get different numbers of batches.
    """

    makes_batches = True
    remedy = "give the dataset more shards and fewer map() steps, or export it and use ParquetDataset"

    def __init__(
        self, dataset: datasets.IterableDataset, collate: Callable[[Any], Any] | None, *, batch_size: int,
        drop_last: bool, seed: int,
    ) -> None:  # fmt: skip
        super().__init__(batch_size=batch_size, seed=seed, drop_last=drop_last, rank=0, world_size=1)
        self._dataset = dataset
        self._collate = collate

    def __str__(self) -> str:
        return "an iterable dataset"

    def __len__(self) -> int:
        raise TypeError("an iterable dataset does not know how many rows it has.")

    def num_valid(self, step: int) -> int:
        raise TypeError("batches of an iterable dataset hold no padding.")

    @cached_property
    def listing(self) -> Listing:
        """What tells the data from other data, as far as it is known without reading it: types and seeds."""
        known = [repr(self._dataset.features), *_seeds(self._dataset._ex_iterable)]
        return Listing((), digest_bytes("\n".join(known).encode()))

    def lead(self, num_workers: int = 0) -> Pass:
        if num_workers:
            raise ValueError("an iterable dataset goes with num_workers=0 here: each worker would give all rows.")
        if resolve_rank()[1] > 1 and self._dataset._distributed is None:
            raise ValueError(
                "each rank would get all rows of this iterable dataset.\n"
                "  Split it: datasets.distributed.split_dataset_by_node(dataset, rank, world_size)."
            )
        run = super().lead()
        agree(f"an iteration over {self}", {"digest": run.place.digest, "epoch": run.place.epoch})
        if run.place.consumed % self.rows_per_item:
            raise ValueError(f"the state was taken after {run.place.consumed:,} rows; give the batch_size of then.")
        return run

    def moved(self, run: Pass, items: int) -> None:
        self._place = replace(run.place, consumed=run.place.consumed + items * self.rows_per_item)

    def _items(self, run: Pass) -> Iterator[Any]:
        as_given = self._collate is not None or self._dataset._formatting is not None
        dataset = self._dataset if as_given else self._dataset.with_format("arrow")
        dataset.set_epoch(run.place.epoch)  # on the last one: with_format forgets it
        size, consumed = self.rows_per_item, run.place.consumed
        if self._collate is None:
            batches: Iterable[Any] = dataset.iter(size, drop_last_batch=self.drop_last)
            for batch in itertools.islice(batches, consumed // size, None):
                yield batch if as_given else own_tensors(batch)
            return
        rows = itertools.islice(dataset, consumed, None)
        while len(batch := list(itertools.islice(rows, size))) > (size - 1 if self.drop_last else 0):
            yield self._collate(batch)


def _drawing(sampler: Any, generator: torch.Generator) -> Any:
    """Return a sampler that draws from `generator` where it has none of its own; the one given stays as it is."""
    other: dict[str, Any] = {}
    if getattr(sampler, "generator", sampler) is None:
        other["generator"] = generator
    if hasattr(sampler, "sampler") and (inner := _drawing(sampler.sampler, generator)) is not sampler.sampler:
        other["sampler"] = inner
    if other:
        sampler = copy.copy(sampler)
        vars(sampler).update(other)
    return sampler


def _seeds(source: Any) -> Iterator[str]:
    """Yield the state of the generators that an iterable dataset shuffles with."""
    if (generator := getattr(source, "generator", None)) is not None:
        yield repr(generator.bit_generator.state)
    for inner in [getattr(source, "ex_iterable", None), *getattr(source, "ex_iterables", [])]:
        if inner is not None:
            yield from _seeds(inner)


def _digest(dataset: datasets.Dataset) -> str:
    """Return what is equal only for equal data, as far as `datasets` knows without reading it all.

    A fingerprint hashes where the data came from and each call that changed it, formats included. Where a function
    could not be hashed, which `datasets` warns of, it is another in each process, and a state is refused.
    """
    return digest_bytes(str(dataset._fingerprint).encode())
