"""Everything `bridge` raises on purpose.

A class of its own exists only where a caller would act differently; each also inherits the built-in that fits, so
`except FileNotFoundError` or `except ValueError` keeps working.

    BridgeError
    ├── ConfigError (ValueError)                  a setting, a profile or an environment variable is wrong
    ├── MissingDependencyError (ImportError)      an extra is not installed
    ├── EngineError (RuntimeError)                the Spark side failed
    │   ├── AccessDeniedError (PermissionError)   the person may not read or write it; the message says what to ask for
    │   ├── EngineSilentError (TimeoutError)      a server stopped answering in the middle of a job
    │   └── EngineUnavailableError (ConnectionError)  no engine could be started or reached
    │       └── SessionLostError                  the session has ended on the server: open another
    ├── SourceError (ValueError)                  what was asked for cannot be read as asked
    │   └── SourceNotFoundError (LookupError)     no such table, column, schema or version
    ├── TableTooLargeError (MemoryError)          more bytes than the ceiling allows
    ├── PolicyError (ValueError)                  a policy is not for its column
    ├── LossyConversionError (TypeError)          a target cannot hold a column's values
    ├── VolumeError (OSError)                     a place cannot be read or written
    ├── CopyError (OSError)                       not everything was copied
    ├── ExportError (RuntimeError)                an export could not be completed
    │   └── ExportNotFoundError (FileNotFoundError)   no complete export is there
    ├── CheckpointError (RuntimeError)            a checkpoint could not be saved or loaded
    │   └── CheckpointNotFoundError (FileNotFoundError)  no complete checkpoint is there
    ├── RankError (RuntimeError)                  ranks did not make the same call, or one was lost
    └── CorruptFileError (OSError)                bytes differ from what was recorded when they were written
"""

from __future__ import annotations

from typing import Any


class BridgeError(Exception):
    """Root of all errors that `bridge` raises on purpose."""


class ConfigError(BridgeError, ValueError):
    """A setting, a profile or an environment variable is wrong."""


class MissingDependencyError(BridgeError, ImportError):
    """A call needs a package that is not installed; the message names the extra that brings it."""


class EngineError(BridgeError, RuntimeError):
    """The Spark side failed."""


class EngineUnavailableError(EngineError, ConnectionError):
    """No engine could be started or reached."""


class SessionLostError(EngineUnavailableError):
    """A session has ended on the server, and with it its DataFrames and temporary views; another can be opened."""


class AccessDeniedError(EngineError, PermissionError):
    """The person may not read or write something; the message says what to ask for, and of whom."""


class EngineSilentError(EngineError, TimeoutError):
    """A server stopped answering in the middle of a job."""


class SourceError(BridgeError, ValueError):
    """What was asked for cannot be read as asked."""


class SourceNotFoundError(SourceError, LookupError):
    """No such table, column, schema or version."""


class TableTooLargeError(BridgeError, MemoryError):
    """A result holds more bytes than the ceiling allows."""


class PolicyError(BridgeError, ValueError):
    """A policy is none, or is not for its column."""


class LossyConversionError(BridgeError, TypeError):
    """A target cannot hold a column's values without losing something."""


class VolumeError(BridgeError, OSError):
    """A place cannot be read or written."""


class CopyError(BridgeError, OSError):
    """Not everything was copied; `report`, a CopyReport, tells what was, and why the rest was not."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class ExportError(BridgeError, RuntimeError):
    """An export could not be completed; nothing of it is visible to readers."""


class ExportNotFoundError(ExportError, FileNotFoundError):
    """No complete export is there."""


class CheckpointError(BridgeError, RuntimeError):
    """A checkpoint could not be saved or loaded; what was there before is as it was."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No complete checkpoint is there."""


class CorruptFileError(BridgeError, OSError):
    """Bytes differ from what was recorded when they were written."""


class RankError(BridgeError, RuntimeError):
    """The ranks of a process group did not make the same call, or one of them was lost."""
