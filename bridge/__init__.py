"""Carries tables and files from Spark and Unity Catalog volumes into training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bridge.errors import (
    AccessDeniedError,
    BridgeError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CopyError,
    CorruptFileError,
    EngineError,
    EngineSilentError,
    EngineUnavailableError,
    ExportError,
    ExportNotFoundError,
    LossyConversionError,
    MissingDependencyError,
    PolicyError,
    RankError,
    SessionLostError,
    SourceError,
    SourceNotFoundError,
    TableTooLargeError,
    VolumeError,
)

if TYPE_CHECKING:
    from bridge.checkpoints.files import load_file, save_file
    from bridge.checkpoints.manager import CheckpointManager, Restored
    from bridge.checkpoints.reader import UCVolumeReader
    from bridge.checkpoints.writer import UCVolumeWriter
    from bridge.columns.policies import (
        as_float32,
        as_float64,
        as_int64,
        cached_file,
        dictionary,
        drop_nulls,
        fill,
        fixed_size,
        flatten,
        jagged,
        mask,
        offsets,
        sparse,
        to_json,
    )
    from bridge.loading.coverage import CoverageReport, verify_epoch
    from bridge.loading.files import UCVolumeDataset
    from bridge.loading.loader import DataLoader
    from bridge.loading.parquet import ParquetDataset
    from bridge.spark.connect import connect
    from bridge.tables.export import export_table, open_export
    from bridge.tables.inventory import ExportInfo, VerifyReport, list_exports, verify_export
    from bridge.tables.load import load_table, plan_table
    from bridge.tables.plan import Plan
    from bridge.tables.retention import PruneReport, prune_exports, remove_export
    from bridge.tables.table import Table
    from bridge.volumes.copy import CopyReport, copy_tree
    from bridge.volumes.path import volume_path

__version__ = "0.1.0"

__all__ = [
    "AccessDeniedError",
    "BridgeError",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "ConfigError",
    "CopyError",
    "CopyReport",
    "CorruptFileError",
    "CoverageReport",
    "DataLoader",
    "EngineError",
    "EngineSilentError",
    "EngineUnavailableError",
    "ExportError",
    "ExportInfo",
    "ExportNotFoundError",
    "LossyConversionError",
    "MissingDependencyError",
    "ParquetDataset",
    "Plan",
    "PolicyError",
    "PruneReport",
    "RankError",
    "Restored",
    "SessionLostError",
    "SourceError",
    "SourceNotFoundError",
    "Table",
    "TableTooLargeError",
    "UCVolumeDataset",
    "UCVolumeReader",
    "UCVolumeWriter",
    "VerifyReport",
    "VolumeError",
    "__version__",
    "as_float32",
    "as_float64",
    "as_int64",
    "cached_file",
    "connect",
    "copy_tree",
    "dictionary",
    "drop_nulls",
    "export_table",
    "fill",
    "fixed_size",
    "flatten",
    "jagged",
    "list_exports",
    "load_file",
    "load_table",
    "mask",
    "offsets",
    "open_export",
    "plan_table",
    "prune_exports",
    "remove_export",
    "save_file",
    "sparse",
    "to_json",
    "verify_epoch",
    "verify_export",
    "volume_path",
]

# imported at the first use of the name, so that `import bridge` stays cheap
_HOMES = {
    "CheckpointManager": "bridge.checkpoints.manager",
    "CopyReport": "bridge.volumes.copy",
    "CoverageReport": "bridge.loading.coverage",
    "DataLoader": "bridge.loading.loader",
    "ExportInfo": "bridge.tables.inventory",
    "ParquetDataset": "bridge.loading.parquet",
    "Plan": "bridge.tables.plan",
    "PruneReport": "bridge.tables.retention",
    "Restored": "bridge.checkpoints.manager",
    "Table": "bridge.tables.table",
    "UCVolumeDataset": "bridge.loading.files",
    "UCVolumeReader": "bridge.checkpoints.reader",
    "UCVolumeWriter": "bridge.checkpoints.writer",
    "VerifyReport": "bridge.tables.inventory",
    "as_float32": "bridge.columns.policies",
    "as_float64": "bridge.columns.policies",
    "as_int64": "bridge.columns.policies",
    "cached_file": "bridge.columns.policies",
    "connect": "bridge.spark.connect",
    "copy_tree": "bridge.volumes.copy",
    "dictionary": "bridge.columns.policies",
    "drop_nulls": "bridge.columns.policies",
    "export_table": "bridge.tables.export",
    "fill": "bridge.columns.policies",
    "fixed_size": "bridge.columns.policies",
    "flatten": "bridge.columns.policies",
    "jagged": "bridge.columns.policies",
    "list_exports": "bridge.tables.inventory",
    "load_file": "bridge.checkpoints.files",
    "load_table": "bridge.tables.load",
    "mask": "bridge.columns.policies",
    "offsets": "bridge.columns.policies",
    "open_export": "bridge.tables.export",
    "plan_table": "bridge.tables.load",
    "prune_exports": "bridge.tables.retention",
    "remove_export": "bridge.tables.retention",
    "save_file": "bridge.checkpoints.files",
    "sparse": "bridge.columns.policies",
    "to_json": "bridge.columns.policies",
    "verify_epoch": "bridge.loading.coverage",
    "verify_export": "bridge.tables.inventory",
    "volume_path": "bridge.volumes.path",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bridge' has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "torch":
            raise
        raise MissingDependencyError(
            f'{name} needs torch, which is not installed.\n  pip install "spark-training-bridge[torch]"'
        ) from exc
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
