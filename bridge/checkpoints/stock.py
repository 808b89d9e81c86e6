"""Folders that torch's FileSystemWriter made, read without running what is in them."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from bridge.checkpoints.layout import unpickled
from bridge.errors import CorruptFileError, VolumeError

# what the metadata of a checkpoint is made of
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath"},
    "builtins": {"list", "dict", "tuple", "set", "int", "str"},
}  # fmt: skip


class StockReader(FileSystemReader):
    """Reads such a folder. Its bytes hold nothing that they could be checked against."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any) -> Metadata:
        """Return what the folder holds.

        Raises:
            CorruptFileError: Its metadata is damaged, or would run code.
            VolumeError: It cannot be read.
        """
        path = self._folder / ".metadata"
        try:
            metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
            if not isinstance(metadata, Metadata):
                raise TypeError(f"it holds a {type(metadata).__name__}")
        except CorruptFileError:
            raise
        except OSError as exc:
            raise VolumeError(f"{path} cannot be read: {exc.strerror or exc}.") from exc
        except Exception as exc:  # of bytes that are anything
            raise CorruptFileError(f"{path} is damaged: {exc}.\n  Load another checkpoint.") from exc
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of this rank, when all values were loaded safely.

        Raises:
            CorruptFileError: A value would run code, or a file is cut or damaged so that torch notices.
            VolumeError: A file cannot be read.
        """
        values = _Values(str(self._folder))
        kinds = {kind: replace(plan, items=[item for item in plan.items if item.type == kind]) for kind in LoadItemType}
        try:
            super().read_data(kinds[LoadItemType.BYTE_IO], values)  # type: ignore[arg-type]
            done = super().read_data(kinds[LoadItemType.TENSOR], planner)
        except (CorruptFileError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as exc:  # of bytes that are anything
            told = f"{type(exc).__name__}: {exc}; some tensors may have changed"
            if isinstance(exc, OSError) and not isinstance(exc, FileNotFoundError):
                raise VolumeError(f"a file of {self._folder} cannot be read: {told}.") from exc
            raise CorruptFileError(
                f"a file of {self._folder} is damaged or gone: {told}.\n  Load another checkpoint."
            ) from exc
        for item, value in values.loaded:
            planner.load_bytes(item, value)
        return done


class _Unpickler(pickle._Unpickler):
    # the one that is written in Python, which lets us see what would be changed
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        """Give an object its attributes; those of a class are not for a file to change."""
        changed = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(changed, type):
            raise CorruptFileError(f".metadata would change {changed!r}: it is refused.\n  Do not load it.")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CorruptFileError(
            f".metadata asks for {module}.{name}, which no checkpoint needs: it is refused.\n"
            "  Load it with torch, if you trust who wrote it, and save it again."
        )


class _Values:
    """Takes values as a planner does, loads them by what runs no code of others, and keeps bytes made of them here."""

    def __init__(self, where: str) -> None:
        self.loaded: list[tuple[ReadItem, io.BytesIO]] = []
        self._where = where

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        """Load a value safely."""
        made = io.BytesIO()
        torch.save(unpickled(value.getvalue(), f"{item.storage_index.fqn!r} of {self._where}"), made)
        made.seek(0)
        self.loaded.append((item, made))
