"""Batches of tensors, in a given order, with the next window decoded while one is used."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.columns.arrays import pick_column, pick_features
from bridge.columns.policies import mark_of
from bridge.columns.tensors import require_torch, to_torch, to_torch_matrix
from bridge.loading.files import local_files, open_cache
from bridge.loading.order import Window, windows
from bridge.loading.parquet import RowGroups

if TYPE_CHECKING:
    from bridge.volumes.cache import Epoch

_END = object()


class DataLoader:
    """Iterates over batches of a table; made by `Table.to_loader`.

    A batch is a dict of tensors (lists for strings and binary), or (X, y) when features and a label are named. Every
    row comes once an epoch; the last batch may be shorter unless `drop_last`. The order is a function of the table's
    row groups, `seed`, the epoch and `shuffle_window`; the epoch is counted on when one is finished, or set by
    `set_epoch`.
    """

    def __init__(
        self,
        row_groups: RowGroups,
        *,
        batch_size: int = 1024,
        features: Sequence[str] | None = None,
        label: str | None = None,
        dtype: Any = None,
        shuffle: bool = False,
        shuffle_window: int = 200_000,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("shuffle_window", shuffle_window)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; give a whole number of rows, 1 or more.")
        if features is None and (label is not None or dtype is not None):
            raise ValueError("label and dtype go with features: name the columns that make X.")
        require_torch()
        if features is not None:
            pick_features(row_groups.schema.empty_table(), features)
        if label is not None:
            pick_column(row_groups.schema.empty_table(), label)
        self._row_groups = row_groups
        self._batch_size = batch_size
        self._features = features
        self._label = label
        self._dtype = dtype
        self._shuffle = shuffle
        self._shuffle_window = shuffle_window
        self._seed = seed
        self._drop_last = drop_last
        self._epoch = 0

    def __len__(self) -> int:
        """Steps of an epoch."""
        rows = sum(self._row_groups.row_counts)
        return rows // self._batch_size if self._drop_last else -(-rows // self._batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch; it takes effect when iteration starts."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, steps = self._epoch, len(self)
        with self._files() as files:
            for step, batch in enumerate(self._batches(epoch, files), 1):
                # Before the last batch is handed over: a loop that counts its steps does not ask for one more.
                if step == steps and self._epoch == epoch:
                    self._epoch += 1
                yield batch

    def _batches(self, epoch: int, files: Epoch | None) -> Iterator[Any]:
        planned = windows(
            self._row_groups.row_counts,
            shuffle=self._shuffle,
            shuffle_window=self._shuffle_window,
            seed=self._seed,
            epoch=epoch,
        )
        rest: pa.Table | None = None
        for window in _decoded_ahead(self._read, planned):
            table = window if rest is None else pa.concat_tables([rest, window])
            whole = table.num_rows // self._batch_size * self._batch_size
            for start in range(0, whole, self._batch_size):
                yield self._batch(table.slice(start, self._batch_size), files)
            rest = table.slice(whole) if whole < table.num_rows else None
        if rest is not None and not self._drop_last:
            yield self._batch(rest, files)

    def _read(self, window: Window) -> pa.Table:
        tables = [self._row_groups.read(index) for index in window.groups]
        table = pa.concat_tables(tables)
        if self._features is not None:
            wanted = dict.fromkeys([*self._features, *([] if self._label is None else [self._label])])
            table = table.select(list(wanted))
        # Rows are moved once for the window, so that each batch is a slice of it and no copy.
        return table.combine_chunks() if window.permutation is None else table.take(window.permutation).combine_chunks()

    def _files(self) -> AbstractContextManager[Epoch | None]:
        """Return what holds the copies of files that are handed out, until the epoch ends."""
        names_files = any(mark_of(field) == "cached_file" for field in self._row_groups.schema)
        return open_cache().epoch() if names_files else nullcontext()

    def _batch(self, rows: pa.Table, files: Epoch | None) -> Any:
        if files is not None:
            rows = local_files(rows, files)
        if self._features is None:
            return {name: self._own(values) for name, values in to_torch(rows).items()}
        matrix, target = to_torch_matrix(rows, self._features, self._label, self._dtype)
        return matrix if self._label is None else (matrix, self._own(target))

    def _own(self, values: Any) -> Any:
        """Return what a training step may write into: rows that were not moved may be the table's own memory."""
        if isinstance(values, dict):
            return {name: self._own(part) for name, part in values.items()}
        if isinstance(values, tuple):
            return tuple(map(self._own, values))
        return values if self._shuffle or isinstance(values, list) else values.clone()


def _decoded_ahead(read: Any, planned: Iterator[Window]) -> Iterator[pa.Table]:
    """Yield each window's rows while a thread reads the next one."""
    ready: queue.Queue[Any] = queue.Queue(1)
    stopped = threading.Event()

    def work() -> None:
        try:
            for window in planned:
                if not _put(ready, read(window), stopped):
                    return
            _put(ready, _END, stopped)
        except BaseException as exc:  # noqa: BLE001 - carried to the consumer, who raises it
            _put(ready, exc, stopped)

    thread = threading.Thread(target=work, name="bridge-decode", daemon=True)

    def stop() -> None:
        stopped.set()
        if thread is not threading.current_thread():
            thread.join()

    # A thread that still decodes when the interpreter ends takes the process down with it.
    atexit.register(stop)
    thread.start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop()
        atexit.unregister(stop)


def _put(ready: queue.Queue[Any], item: Any, stopped: threading.Event) -> bool:
    """Hand `item` over; False where nobody wants it any more."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False
