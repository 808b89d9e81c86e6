"""Carries tables and files from Spark and Unity Catalog volumes into training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bridge.errors import (
    BridgeError,
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
    SourceError,
    SourceNotFoundError,
    TableTooLargeError,
    VolumeError,
)

if TYPE_CHECKING:
    from bridge.loading.loader import DataLoader
    from bridge.spark.connect import connect
    from bridge.tables.export import export_table, open_export
    from bridge.tables.load import load_table, plan_table
    from bridge.tables.plan import Plan
    from bridge.tables.table import Table
    from bridge.volumes.copy import CopyReport, copy_tree
    from bridge.volumes.path import volume_path

__version__ = "0.1.0"

__all__ = [
    "BridgeError",
    "ConfigError",
    "CopyError",
    "CopyReport",
    "CorruptFileError",
    "DataLoader",
    "EngineError",
    "EngineSilentError",
    "EngineUnavailableError",
    "ExportError",
    "ExportNotFoundError",
    "LossyConversionError",
    "MissingDependencyError",
    "Plan",
    "SourceError",
    "SourceNotFoundError",
    "Table",
    "TableTooLargeError",
    "VolumeError",
    "__version__",
    "connect",
    "copy_tree",
    "export_table",
    "load_table",
    "open_export",
    "plan_table",
    "volume_path",
]

# imported at the first use of the name, so that `import bridge` stays cheap
_HOMES = {
    "CopyReport": "bridge.volumes.copy",
    "DataLoader": "bridge.loading.loader",
    "Plan": "bridge.tables.plan",
    "Table": "bridge.tables.table",
    "connect": "bridge.spark.connect",
    "copy_tree": "bridge.volumes.copy",
    "export_table": "bridge.tables.export",
    "load_table": "bridge.tables.load",
    "open_export": "bridge.tables.export",
    "plan_table": "bridge.tables.load",
    "volume_path": "bridge.volumes.path",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bridge' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
