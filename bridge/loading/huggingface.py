"""Batches of Hugging Face datasets: slices of their Arrow tables, never row by row."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import BatchSampler, RandomSampler, default_collate

from bridge import distributed
from bridge.columns.tensors import to_torch
from bridge.loading.dataset import Listing, OrderedDataset, Pass
from bridge.loading.order import Indices, Order, num_steps, num_valid, padding, seed_of
from bridge.volumes.digest import digest_bytes

if TYPE_CHECKING:
    import datasets

Fetch = Callable[[Indices], Any]


def is_huggingface(dataset: Any) -> bool:
    """Return whether it is a dataset of Hugging Face's, map-style or iterable."""
    module: Any = sys.modules.get("datasets")  # whoever made one has imported it
    return module is not None and isinstance(dataset, module.Dataset | module.IterableDataset)


def open_huggingface(
    dataset: Any, *, batch_size: int | None, shuffle: bool, seed: int, drop_last: bool, sampler: Any,
    batch_sampler: Any, collate_fn: Callable[[Any], Any] | None,
) -> OrderedDataset:  # fmt: skip
    """Return the batches of a dataset of Hugging Face's; `bridge.DataLoader` says what the arguments mean.

    Raises:
        ValueError: Arguments exclude each other, or an iterable dataset is to be shuffled here.
    """
    import datasets

    if isinstance(dataset, datasets.IterableDataset):
        if shuffle or sampler is not None or batch_sampler is not None or collate_fn is not None:
            raise ValueError(
                "an iterable dataset takes no shuffle, sampler, batch_sampler or collate_fn here.\n"
                "  Use its own shuffle(buffer_size=...) and map()."
            )
        return StreamBatches(dataset, batch_size=batch_size or 1, drop_last=drop_last, seed=seed)
    fetch = _fetcher(dataset, collate_fn)
    if sampler is None and batch_sampler is None:
        return RowBatches(dataset, fetch, batch_size=batch_size or 1, shuffle=shuffle, seed=seed, drop_last=drop_last)
    if batch_sampler is not None and (batch_size is not None or shuffle or sampler is not None or drop_last):
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
        super().__init__(
            batch_size=batch_size, shuffle=shuffle, shuffle_window=1, seed=seed, drop_last=drop_last,
            canonical_world_size=None, rank=None, world_size=None,
        )  # fmt: skip
        self._fetch = fetch
        # equal for equal data, however it was made; formats, which change it, do not matter for the order
        self._rows = Listing(np.ones(len(dataset), np.int64), str(dataset._fingerprint))

    def __str__(self) -> str:
        return f"a dataset of {self._rows.num_rows:,} rows"

    @property
    def rows_per_item(self) -> int:
        """The rows of a batch."""
        assert self.batch_size is not None
        return self.batch_size

    def listing(self) -> Listing:
        """Return one row group of one row for each row."""
        return self._rows

    def _num_items(self, run: Pass) -> int:
        return num_steps(
            self._rows.num_rows, batch_size=self.rows_per_item, world_size=run.world_size, consumed=run.place.consumed,
            drop_last=self.drop_last,
        )  # fmt: skip

    def _items(self, run: Pass) -> Iterator[Any]:
        num_rows, size, place = self._rows.num_rows, self.rows_per_item, run.place
        assert place.canonical_world_size is not None
        order = Order(
            self._rows.row_counts, seed=self.seed, epoch=place.epoch, shuffle=self.shuffle, shuffle_window=1,
            canonical_world_size=place.canonical_world_size,
        )  # fmt: skip
        first = order.share(rank=run.rank, world_size=run.world_size, consumed=place.consumed).first
        for step in itertools.islice(range(run.worker, self._num_items(run), run.num_workers), run.item, None):
            rest = num_rows - place.consumed - step * size * run.world_size
            valid = num_valid(
                step, num_rows, batch_size=size, rank=run.rank, world_size=run.world_size, consumed=place.consumed
            )
            positions = first + (step * size + np.arange(valid)) * run.world_size
            if valid < min(size, -(-rest // run.world_size)):
                positions = np.append(positions, padding(num_rows, rank=run.rank, world_size=run.world_size))
            yield self._fetch(order.rows_at(positions))


class SampledBatches(OrderedDataset):
    """Batches of a map-style dataset as a sampler chooses them; which ranks get what is the sampler's matter.

    The position counts batches. A RandomSampler without a generator of its own gets one that is seeded for each epoch,
    so that a resumed epoch goes on as it began; other samplers must give the same again.
    """

    makes_batches = True
    remedy = RowBatches.remedy

    def __init__(self, dataset: datasets.Dataset, fetch: Fetch, batches: Any, *, seed: int) -> None:
        super().__init__(
            batch_size=None, shuffle=False, shuffle_window=1, seed=seed, drop_last=False, canonical_world_size=None,
            rank=0, world_size=1,
        )  # fmt: skip
        self._fetch = fetch
        self._batches = batches
        self._fingerprint = str(dataset._fingerprint)
        self._sampler = getattr(batches, "sampler", batches)
        self._generator: torch.Generator | None = None
        if isinstance(self._sampler, RandomSampler) and self._sampler.generator is None:
            self._generator = self._sampler.generator = torch.Generator()

    def __str__(self) -> str:
        return f"a dataset with a {type(self._sampler).__name__}"

    def listing(self) -> Listing:
        """Return one row group for each batch."""
        return Listing(np.ones(len(self._batches), np.int64), self._fingerprint)

    def num_valid(self, step: int) -> int:
        """Refuse: what repeats rows is the sampler.

        Raises:
            TypeError: Always.
        """
        raise TypeError("a sampler chooses the rows, and only it knows which are repeated; leave it out for num_valid.")

    def lead(self, num_workers: int = 0) -> Pass:
        """Begin a pass.

        Raises:
            ValueError: Workers are to iterate, each of which would ask a sampler of its own.
        """
        if num_workers:
            raise ValueError("a sampler goes with num_workers=0: batches are slices of Arrow tables, which are quick.")
        return super().lead()

    def _num_items(self, run: Pass) -> int:
        return len(self._batches) - run.place.consumed

    def _items(self, run: Pass) -> Iterator[Any]:
        for one in {id(one): one for one in (self._batches, self._sampler)}.values():
            if hasattr(one, "set_epoch"):
                one.set_epoch(run.place.epoch)
        if self._generator is not None:
            self._generator.manual_seed(seed_of(f"{self.seed}/{run.place.epoch}/sampler"))
        for indices in itertools.islice(self._batches, run.place.consumed + run.item, None):
            yield self._fetch(np.asarray(indices, np.int64))


class StreamBatches(OrderedDataset):
    """Batches of an iterable dataset. The position counts rows; a resumed epoch reads again what comes before it.

    The dataset's own state would lose what its shuffle buffer holds (huggingface/datasets#7901).
    """

    makes_batches = True
    remedy = "give the dataset more shards and fewer map() steps, or export it and use ParquetDataset"

    def __init__(self, dataset: datasets.IterableDataset, *, batch_size: int, drop_last: bool, seed: int) -> None:
        super().__init__(
            batch_size=batch_size, shuffle=False, shuffle_window=1, seed=seed, drop_last=drop_last,
            canonical_world_size=None, rank=0, world_size=1,
        )  # fmt: skip
        self._dataset = dataset

    def __str__(self) -> str:
        return "an iterable dataset"

    def __len__(self) -> int:
        raise TypeError("an iterable dataset does not know how many rows it has.")

    @property
    def rows_per_item(self) -> int:
        """The rows of a batch."""
        assert self.batch_size is not None
        return self.batch_size

    def num_valid(self, step: int) -> int:
        """Refuse: nothing is padded.

        Raises:
            TypeError: Always.
        """
        raise TypeError("batches of an iterable dataset hold no padding.")

    def listing(self) -> Listing:
        """Return what tells the data from other data, as far as it is known without reading it."""
        return Listing((), digest_bytes(repr(self._dataset.features).encode()))

    def lead(self, num_workers: int = 0) -> Pass:
        """Begin a pass.

        Raises:
            ValueError: Workers or ranks would all get the same rows, or the position is none of this batch size.
        """
        if num_workers:
            raise ValueError("an iterable dataset goes with num_workers=0 here: each worker would give all rows.")
        if distributed.world_size() > 1 and self._dataset._distributed is None:
            raise ValueError(
                "each rank would get all rows of this iterable dataset.\n"
                "  Split it: datasets.distributed.split_dataset_by_node(dataset, rank, world_size)."
            )
        run = super().lead()
        if run.place.consumed % self.rows_per_item:
            raise ValueError(f"the state was taken after {run.place.consumed:,} rows; give the batch_size of then.")
        return run

    def moved(self, run: Pass, items: int) -> None:
        """Note that the training loop has so many batches."""
        self._place = replace(run.place, consumed=run.place.consumed + items * self.rows_per_item)

    def _items(self, run: Pass) -> Iterator[Any]:
        has_format = self._dataset._formatting is not None
        dataset = self._dataset if has_format else self._dataset.with_format("arrow")
        dataset.set_epoch(run.place.epoch)  # on the last one: with_format forgets it
        batches: Iterable[Any] = dataset.iter(self.rows_per_item, drop_last_batch=self.drop_last)
        for batch in itertools.islice(batches, run.place.consumed // self.rows_per_item, None):
            yield batch if has_format else to_torch(batch)


def _fetcher(dataset: datasets.Dataset, collate_fn: Callable[[Any], Any] | None) -> Fetch:
    """Return what makes a batch of some rows."""
    if dataset.format["type"] is None and collate_fn is None and not _decodes(dataset.features):
        return _ArrowRows(dataset)
    if collate_fn is None and not _decodes(dataset.features):
        return _FormattedRows(dataset)
    return _CollatedRows(dataset, collate_fn or default_collate)


class _ArrowRows:
    """Tensors of slices of the table under a dataset."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self._dataset = dataset

    def __call__(self, indices: Indices) -> dict[str, Any]:
        dataset = self._dataset
        # what select, filter, shuffle and sort leave: the rows of the table that the dataset has
        if dataset._indices is not None:
            indices = _taken(dataset._indices.table, indices).column(0).to_numpy()
        return to_torch(_taken(dataset.data.table, indices))


class _FormattedRows:
    """Batches as the dataset's format or transform makes them."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self._dataset = dataset

    def __call__(self, indices: Indices) -> Any:
        return self._dataset[indices.tolist()]


class _CollatedRows:
    """Batches of single rows, for what must be decoded and for functions that expect rows."""

    def __init__(self, dataset: datasets.Dataset, collate: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __call__(self, indices: Indices) -> Any:
        return self._collate(self._dataset.__getitems__(indices.tolist()))


def _taken(table: pa.Table, indices: Indices) -> pa.Table:
    """Return some rows: a slice where they lie behind one another."""
    if len(indices) and (np.diff(indices) == 1).all():
        return table.slice(indices[0], len(indices))
    try:
        return table.take(indices)
    except pa.ArrowInvalid:
        # take joins chunks of text, and fails where they hold more than 2 GiB
        return _taken_by_chunk(table, indices)


def _taken_by_chunk(table: pa.Table, indices: Indices) -> pa.Table:
    batches = table.to_batches()
    ends = np.cumsum([batch.num_rows for batch in batches])
    chunk_of = np.searchsorted(ends, indices, side="right")
    by_chunk = np.argsort(chunk_of, kind="stable")
    parts = []
    for chunk in np.unique(chunk_of):
        start = ends[chunk] - batches[chunk].num_rows
        parts.append(batches[chunk].take(pa.array(indices[chunk_of == chunk] - start)))
    places = np.empty(len(indices), np.int64)
    places[by_chunk] = np.arange(len(indices))
    return pa.Table.from_batches(parts, table.schema).take(places)


def _decodes(feature: Any) -> bool:
    """Return whether values of a feature are decoded when a row is read, as images are."""
    if isinstance(feature, Mapping):
        return any(map(_decodes, feature.values()))
    if isinstance(feature, list):
        return any(map(_decodes, feature))
    inner = getattr(feature, "feature", None)
    return hasattr(feature, "decode_example") or (inner is not None and _decodes(inner))
