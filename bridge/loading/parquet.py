"""Batches of tensors out of Parquet, in an order that is a function, in equal steps on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from bridge.columns.policies import mark_of
from bridge.columns.rules import Policies, Rules
from bridge.config import load_settings
from bridge.display import did_you_mean, parse_bytes
from bridge.errors import SourceNotFoundError
from bridge.loading.cached import local_paths, open_cache
from bridge.loading.dataset import OrderedDataset
from bridge.loading.decode import Batches
from bridge.loading.foreign import find_files, open_files
from bridge.loading.form import Columns, Form, join, last_row
from bridge.loading.order import padding
from bridge.loading.place import Listing, Pass
from bridge.loading.row_groups import ExportedRowGroups, RowGroups
from bridge.loading.stats import Traffic
from bridge.manifest import Manifest
from bridge.volumes.cache import Epoch
from bridge.volumes.commit import read_marker
from bridge.volumes.hold import hold_attempt
from bridge.volumes.path import locate
from bridge.volumes.stores import LocalStorage

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class RowGroupDataset(OrderedDataset):
    """Batches of the rows of row groups; `ParquetDataset` says all about them.

    Args:
        open_row_groups: Called once, when rows are first asked for.
    """

    makes_batches = True
    remedy = (
        "read fewer columns (columns=), keep the files on a faster disk (bridge.copy_tree), or, where the step leaves "
        "cores idle, split it into larger batches"
    )

    def __init__(
        self, open_row_groups: Callable[[], RowGroups], *, name: str, columns: Sequence[str] | None = None,
        features: Sequence[str] | None = None, label: str | None = None, dtype: Any = None, batch_size: int = 1024,
        shuffle: bool = False, shuffle_window: int = 200_000, seed: int = 0, drop_last: bool = False,
        canonical_world_size: int | None = None, rank: int | None = None, world_size: int | None = None,
        prefetch_bytes: int | str = "256MiB",
    ) -> None:  # fmt: skip
        super().__init__(
            batch_size=batch_size, shuffle=shuffle, shuffle_window=shuffle_window, seed=seed, drop_last=drop_last,
            canonical_world_size=canonical_world_size, rank=rank, world_size=world_size,
        )  # fmt: skip
        if batch_size is None:
            raise ValueError("batch_size is None; give the rows of a batch, which this dataset makes whole.")
        self._open_row_groups = open_row_groups
        self._name = name
        if columns is not None and (isinstance(columns, str) or not columns or len(set(columns)) < len(columns)):
            raise ValueError(f"columns is {columns!r}; give a list of column names, each once.")
        self._columns = columns
        self._features = features
        self._label = label
        self._dtype = dtype
        self._prefetch_bytes = parse_bytes(prefetch_bytes, name="prefetch_bytes")

    def __str__(self) -> str:
        return self._name

    @cached_property
    def row_groups(self) -> RowGroups:
        """What is read: the columns that batches are made of, and no others."""
        opened = self._open_row_groups()
        if self._columns is not None:
            for name in self._columns:
                if name not in opened.schema.names:
                    raise SourceNotFoundError(f"no column {name!r} in {self}.{did_you_mean(name, opened.schema.names)}")
            opened = opened.narrowed(self._columns)
        needed = Form(opened.schema, self._features, self._label, self._dtype).needed
        return opened if needed == opened.schema.names else opened.narrowed(needed)

    @cached_property
    def form(self) -> Form:
        """What a batch is."""
        row_groups = self.row_groups
        return Form(row_groups.schema, self._features, self._label, self._dtype, is_shared=row_groups.is_shared)

    def check(self) -> None:
        """Open the rows, and see that there are the columns that were named.

        Raises:
            SourceNotFoundError: One is not there.
        """
        _ = self.form

    @property
    def schema(self) -> pa.Schema:
        """The Arrow types of the columns that batches are made of."""
        return self.row_groups.schema

    @property
    def traffic(self) -> Traffic:
        """What this process has read so far."""
        return Traffic(volume_bytes=self.row_groups.bytes_read)

    @cached_property
    def listing(self) -> Listing:
        """The rows of each row group."""
        return Listing(self.row_groups.row_counts, self.row_groups.digest)

    def _options(self) -> dict[str, Any]:
        schema = self.form.features or self.schema.names
        return {**super()._options(), "columns": schema, "label": self._label, "dtype": self._dtype}

    def _items(self, run: Pass) -> Iterator[Any]:
        names_files = any(mark_of(field) == "cached_file" for field in self.schema)
        with open_cache().epoch() if names_files else nullcontext() as files:
            for columns in self._columns_of(run):
                yield self.form.batch(self._with_copies(columns, files) if files else columns)

    def _columns_of(self, run: Pass) -> Iterator[Columns]:
        """Yield the columns of this worker's batches, padded so that those of all ranks have as many rows."""
        order, size = self._order(run), self.rows_per_item
        steps = range(run.item * run.num_workers + run.worker, self.num_items(run))
        if not steps:
            return
        # only the last batch may be short
        last_size, last_valid = self.batch_rows(run, steps[-1])
        ranks = {"rank": run.rank, "world_size": run.world_size}
        consumed = run.place.consumed + steps[0] * size * run.world_size
        sizes = [*(size for _ in steps[:-1]), *([last_valid] if last_valid else [])]
        batches = Batches(self.row_groups, self.form, prefetch_bytes=self._prefetch_bytes)
        with closing(batches.of(order, sizes, consumed=consumed, **ranks)) as made:
            for step in steps:
                columns = next(made, None)
                if columns is None:  # no row is left for this rank
                    columns = batches.row(order, padding(order.num_rows, **ranks))
                elif step == steps[-1] and last_valid < last_size:
                    columns = join([columns, last_row(columns)], self.form.names)
                if (step - run.worker) % run.num_workers == 0:
                    yield columns

    def _with_copies(self, columns: Columns, files: Epoch) -> Columns:
        """Return the columns with paths of local copies in those that name files."""
        return [
            local_paths(column, field.name, files) if mark_of(field) == "cached_file" else column
            for field, column in zip(self.schema, columns, strict=True)
        ]


class ParquetDataset(RowGroupDataset):
    """Batches of tensors from an export, or from any Parquet files, for `bridge.DataLoader` or a loop of one's own.

    A batch is a dict with a tensor for each column (a list for strings and binary), or (X, y) where features and a
    label are named; the types are those of `Table.to_torch`. The order is a function of the data, seed, epoch,
    canonical_world_size and shuffle_window. Every rank gets the same number of batches, of the same sizes, and each row
    goes to one rank, once an epoch; where the rows do not suffice, the last batch repeats a row at its end, and
    `num_valid` tells how many are real. A background thread decodes; workers are not needed.

    Of an export, each row group is checked against its digest when it is read. Files of others are only known by their
    footers, and files that were written since are refused.

    Args:
        path_or_paths: The folder of an export (`table.path`), a folder of Parquet files, a file, or a list of files.
        columns: Those to read; None: all.
        features: The columns of X, of shape [batch_size, features]; they must be of one type unless `dtype` is given.
        label: The column of y; without it a batch is X alone.
        dtype: The type of X.
        policies: As in `load_table`, but for those of Spark; None: those that an export was made with.
        batch_size: Rows of a batch on each rank.
        shuffle: Permute row groups for each epoch, and rows within windows of them.
        shuffle_window: Rows that are mixed together, at least; memory grows with it.
        drop_last: Leave out the last rows of all ranks where they make no whole batch on each.
        canonical_world_size: Number of streams that the epoch is dealt to; None: world_size. Where it is fixed, each
            step has the same rows on any world_size that divides it.
        rank: With `world_size`: which part is given; None: that of the process group or of RANK and WORLD_SIZE, when
            the iteration starts.
        prefetch_bytes: How much decoded data may wait, beside the windows in use.

    Raises:
        ValueError: An argument is out of range.

    When it is first read, it raises FileNotFoundError or CorruptFileError for files that are not there or damaged,
    SourceError for files that make no one table, LossyConversionError for what a tensor cannot hold.

    Example:
        >>> import bridge
        >>> data = bridge.ParquetDataset("exports/numbers", features=["x"], label="odd", shuffle=True)  # doctest: +SKIP
        >>> for X, y in bridge.DataLoader(data):  # doctest: +SKIP
        ...     ...
    """

    def __init__(
        self, path_or_paths: Paths, *, columns: Sequence[str] | None = None, features: Sequence[str] | None = None,
        label: str | None = None, dtype: Any = None, policies: Policies | None = None, batch_size: int = 1024,
        shuffle: bool = False, shuffle_window: int = 200_000, seed: int = 0, drop_last: bool = False,
        canonical_world_size: int | None = None, rank: int | None = None, world_size: int | None = None,
        prefetch_bytes: int | str = "256MiB",
    ) -> None:  # fmt: skip
        are_columns_named = columns is not None or features is not None
        paths: list[Any] = [path_or_paths] if isinstance(path_or_paths, str | os.PathLike) else list(path_or_paths)
        if not paths:
            raise ValueError("path_or_paths is an empty list; give the files to read.")
        super().__init__(
            partial(_open, paths, policies, are_columns_named), name=_shown(paths), columns=columns, features=features,
            label=label, dtype=dtype, batch_size=batch_size, shuffle=shuffle, shuffle_window=shuffle_window, seed=seed,
            drop_last=drop_last, canonical_world_size=canonical_world_size, rank=rank, world_size=world_size,
            prefetch_bytes=prefetch_bytes,
        )  # fmt: skip


def _shown(paths: Sequence[Any]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"ParquetDataset({os.fspath(paths[0])!r}{more})"


def _open(paths: Sequence[Any], policies: Policies | None, are_columns_named: bool) -> RowGroups:
    root = load_settings().volume_root
    folders = [locate(path, root).folder() for path in paths]
    if len(folders) == 1 and (marker := read_marker(LocalStorage(folders[0]))) is not None:
        folder, manifest = folders[0], Manifest.from_json(marker.body, folders[0])
        rules = Rules.from_json(manifest.schema, manifest.receipt.get("policies", {}))
        hold = hold_attempt(LocalStorage(folder.parent), folder.name)
        held = ExportedRowGroups(folder, manifest, rules, hold)
        return held if policies is None else held.under(Rules.choose_for_files(manifest.schema, policies))
    found: list[Path] = []
    for path in folders:
        found += [path] if path.is_file() else find_files(path, are_columns_named=are_columns_named)
    return open_files(found, policies)
