"""A loaded table, and every way to hand it over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from bridge.columns.contract import TypeContract, type_contract
from bridge.columns.rules import Rules
from bridge.config import available_memory
from bridge.display import format_bytes, format_count
from bridge.distributed import local_world_size
from bridge.errors import MissingDependencyError, TableTooLargeError
from bridge.loading.cached import local_files
from bridge.loading.row_groups import CollectedRowGroups, ExportedRowGroups, RowGroups, stream_row_groups
from bridge.manifest import Manifest
from bridge.tables.plan import Plan, Route
from bridge.volumes.hold import hold_attempt
from bridge.volumes.stores import LocalStorage

if TYPE_CHECKING:
    import datasets
    import pandas as pd

    from bridge.loading.loader import DataLoader


class Table:
    """Rows that were loaded: in memory after a collect, in Parquet shards after an export.

    No method goes back to Spark. Whole-table hand-offs (`to_arrow`, `to_pandas`, `to_numpy`, `to_torch`,
    `to_huggingface(streaming=False)`) of an export that would not fit in memory raise TableTooLargeError; `to_loader`,
    `to_batches` and `to_huggingface(streaming=True)` need little memory for any size.

    Attributes:
        plan: What was decided and why; None for what `open_export` opened.
        receipt: What was read, by whom, when, with which versions: JSON values.
        path: The folder of an export; None after a collect.
        manifest: What an export holds; None after a collect.
    """

    def __init__(
        self, row_groups: RowGroups, rules: Rules, *, plan: Plan | None, receipt: dict[str, Any],
        path: str | None = None, manifest: Manifest | None = None, client_max_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self._row_groups = row_groups
        self._rules = rules
        self.plan = plan
        self.receipt = receipt
        self.path = path
        self.manifest = manifest
        self._client_max_bytes = client_max_bytes

    @classmethod
    def collected(cls, rows: pa.Table, rules: Rules, *, plan: Plan, receipt: dict[str, Any]) -> Table:
        """Return a table over rows in memory."""
        made = rules.apply(rows) if rules.changes else rows
        return cls(CollectedRowGroups(made), rules, plan=plan, receipt=receipt)

    @classmethod
    def exported(
        cls, folder: Path, manifest: Manifest, rules: Rules | None = None, *, plan: Plan | None = None,
        client_max_bytes: int | None = None,
    ) -> Table:  # fmt: skip
        """Return a table over the shards in `folder`; by the policies they were exported with where none are given.

        Raises:
            VolumeError: They were deleted meanwhile.
        """
        rules = rules or Rules.from_json(manifest.schema, manifest.receipt.get("policies", {}))
        receipt = {**manifest.receipt, "policies": rules.to_json()}
        hold = hold_attempt(LocalStorage(folder.parent), folder.name)
        return cls(
            ExportedRowGroups(folder, manifest, rules, hold), rules, plan=plan, receipt=receipt, path=str(folder),
            manifest=manifest, client_max_bytes=client_max_bytes,
        )  # fmt: skip

    @property
    def schema(self) -> pa.Schema:
        """The Arrow types of the columns, in order."""
        return self._row_groups.schema

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return sum(self._row_groups.row_counts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows in memory after a collect, of the files after an export."""
        if isinstance(self._row_groups, CollectedRowGroups):
            return int(self._row_groups.table.nbytes)
        assert self.manifest is not None
        return self.manifest.num_bytes

    @property
    def version(self) -> int | None:
        """The version of the Delta table that was read; None where none could be held fast."""
        version: int | None = self.receipt["version"]
        return version

    @property
    def route(self) -> Route:
        """How the rows came: "collect" or "export"."""
        return "export" if self.manifest else "collect"

    @property
    def types(self) -> TypeContract:
        """What each column is in Spark and Arrow, and what it becomes; prints as a table."""
        return type_contract(self.schema, self.receipt["spark_types"], self._rules)

    @property
    def files(self) -> list[str]:
        """The paths of an export's shards, in order; [] after a collect."""
        return [str(Path(self.path or "") / shard.name) for shard in self.manifest.shards] if self.manifest else []

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as record batches, in order; at most one row group is in memory at a time."""
        for index in range(len(self._row_groups.row_counts)):
            yield from local_files(self._row_groups.read(index)).to_batches()

    def to_arrow(self) -> pa.Table:
        """Return the rows as a `pyarrow.Table`, in order; every instant in UTC."""
        if isinstance(self._row_groups, CollectedRowGroups):
            return local_files(self._row_groups.table)
        self._check_memory("to_arrow")
        tables = [self._row_groups.read(index) for index in range(len(self._row_groups.row_counts))]
        return local_files(pa.concat_tables(tables) if tables else self.schema.empty_table())

    def to_pandas(self, dtype_backend: Literal["numpy_nullable", "pyarrow"] = "numpy_nullable") -> pd.DataFrame:
        """Return the rows as a DataFrame with a plain index.

        Integers and booleans come in pandas's nullable dtypes, so that a BIGINT beside a NULL stays exact; floats as
        NumPy's with NaN for NULL; instants as datetime64[us, UTC]; decimals in Arrow's dtype. `table.types` shows it.

        Args:
            dtype_backend: "numpy_nullable", or "pyarrow" for Arrow's dtypes throughout.
        """
        from bridge.columns.frames import to_pandas

        return to_pandas(self.to_arrow(), dtype_backend)

    def to_numpy(self, features: Sequence[str] | None = None, label: str | None = None, *, dtype: Any = None) -> Any:
        """Return a dict of arrays, one of shape [rows] for each column; not one 2-D array of everything.

        Columns of arrays of numbers are of shape [rows, n]; where rows differ in length, say how with the policies
        `jagged()` or `offsets()`. Categories are int64 codes.

        With `features`: X of shape [rows, features], in the one type that all features have, or in `dtype`; with
        `label` too: (X, y).
        Arrays may be read-only views.

        Raises:
            LossyConversionError: A column holds nulls or values that its array cannot hold; the message says which.
        """
        from bridge.columns.arrays import to_matrix, to_numpy

        if features is None:
            _refuse_label(label, dtype)
            return to_numpy(self.to_arrow())
        matrix, target = to_matrix(self.to_arrow(), features, label, dtype)
        return matrix if label is None else (matrix, target)

    def to_torch(self, features: Sequence[str] | None = None, label: str | None = None, *, dtype: Any = None) -> Any:
        """Return a dict of tensors (lists for strings and binary, dicts for structs), X, or (X, y): as `to_numpy` does.

        Dates are int64 days and instants int64 microseconds since 1970 in UTC. Tensors may share memory with the table:
        clone one before writing into it.

        Raises:
            LossyConversionError: A column holds nulls or values that its tensor cannot hold; the message says which.
            MissingDependencyError: torch is not installed.
        """
        from bridge.columns.tensors import to_torch, to_torch_matrix

        if features is None:
            _refuse_label(label, dtype)
            return to_torch(self.to_arrow())
        matrix, target = to_torch_matrix(self.to_arrow(), features, label, dtype)
        return matrix if label is None else (matrix, target)

    def to_loader(
        self,
        batch_size: int = 1024,
        *,
        features: Sequence[str] | None = None,
        label: str | None = None,
        dtype: Any = None,
        shuffle: bool = False,
        shuffle_window: int = 200_000,
        seed: int = 0,
        drop_last: bool = False,
        canonical_world_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> DataLoader:
        """Return a loader of batches of tensors, on either route; its state resumes a run exactly.

        Under a process group each rank gets its part, in as many batches as the others; `ParquetDataset` says how, and
        what the arguments mean. `bridge.DataLoader(bridge.ParquetDataset(table.path))` takes more of them.

        Raises:
            ValueError: An argument is out of range.
            SourceNotFoundError: A feature or the label was not loaded.
        """
        from bridge.columns.tensors import require_torch

        require_torch()
        from bridge.loading.loader import DataLoader
        from bridge.loading.parquet import RowGroupDataset

        name = f"{self.receipt['table']}, {format_count(self.num_rows)} rows"
        dataset = RowGroupDataset(
            partial(_itself, self._row_groups), name=name, features=features, label=label, dtype=dtype,
            batch_size=batch_size, shuffle=shuffle, shuffle_window=shuffle_window, seed=seed, drop_last=drop_last,
            canonical_world_size=canonical_world_size, rank=rank, world_size=world_size,
        )  # fmt: skip
        dataset.check()
        return DataLoader(dataset)

    def to_huggingface(self, streaming: bool | None = None) -> datasets.Dataset | datasets.IterableDataset:
        """Return the rows as a Hugging Face dataset.

        Args:
            streaming: True for an IterableDataset, False for a Dataset in memory; None: True after an export, False
                after a collect.

        Raises:
            LossyConversionError: datasets has no feature for a column's type.
        """
        from bridge.columns.huggingface import to_dataset, to_iterable_dataset

        is_streaming = self.manifest is not None if streaming is None else streaming
        if not is_streaming:
            return to_dataset(self.to_arrow(), self._rules.categories)
        row_groups = [(self._row_groups, index) for index in range(len(self._row_groups.row_counts))]
        return to_iterable_dataset(self.schema, self._rules.categories, stream_row_groups, row_groups=row_groups)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Hand the rows to whatever reads Arrow streams (Polars, DuckDB, pyarrow), batch by batch."""
        reader = pa.RecordBatchReader.from_batches(self.schema, self.to_batches())
        return reader.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        version = "" if self.version is None else f" version {self.version}"
        filtered = "".join(f" {name} {self.receipt[name]}" for name in ("where", "limit") if self.receipt.get(name))
        where = f", {format_count(len(self.files))} file(s) in {self.path}" if self.manifest else ""
        what = f"{self.receipt['table']}{version}{filtered}"
        shape = f"{format_count(self.num_rows)} rows x {len(self.schema)} columns"
        return f"Table({what}: {shape}, {format_bytes(self.num_bytes)} by {self.route}{where})"

    def receipt_json(self) -> str:
        """Return the receipt as indented JSON."""
        return json.dumps(self.receipt, indent=2, ensure_ascii=False)

    def log_to_mlflow(self) -> None:
        """Log the receipt to the active MLflow run, or a new one: as an artifact, its main facts as parameters.

        Raises:
            MissingDependencyError: mlflow is not installed.
        """
        try:
            import mlflow
        except ImportError as exc:
            raise MissingDependencyError("log_to_mlflow needs mlflow.\n  pip install mlflow") from exc
        name = self.receipt["table"]
        mlflow.log_dict(self.receipt, f"bridge/{name.replace('/', '_')}.json")
        facts = {key: self.receipt[key] for key in ("table", "version", "num_rows", "schema_digest")}
        mlflow.log_params({f"{name}.{key}".replace("/", "_"): value for key, value in facts.items()})

    def _check_memory(self, call: str) -> None:
        assert self.manifest is not None
        needed = self.manifest.memory_bytes
        allowed = self._client_max_bytes or available_memory() // (2 * local_world_size())
        if needed > allowed:
            raise TableTooLargeError(
                f"{self.receipt['table']} would take about {format_bytes(needed)} in memory; client_max_bytes is "
                f"{format_bytes(allowed)}.\n"
                "  Use to_loader() or to_huggingface(streaming=True), or raise BRIDGE_CLIENT_MAX_BYTES."
            )


def _refuse_label(label: str | None, dtype: Any) -> None:
    if label is not None or dtype is not None:
        raise ValueError("label and dtype go with features: name the columns that make X.")


def _itself(row_groups: RowGroups) -> RowGroups:
    return row_groups
