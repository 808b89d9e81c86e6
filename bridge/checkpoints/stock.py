"""Folders that torch's FileSystemWriter made, read without running what is in them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from bridge.checkpoints.layout import unpickled
from bridge.errors import CorruptFileError

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
        """
        path = self._folder / ".metadata"
        try:
            metadata: Metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        except CorruptFileError:
            raise
        except Exception as exc:  # of bytes that are anything
            raise CorruptFileError(f"{path} is damaged: {exc}.\n  Load another checkpoint.") from exc
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of this rank."""
        return super().read_data(plan, _Careful(planner, str(self._folder)))  # type: ignore[arg-type]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CorruptFileError(
            f".metadata asks for {module}.{name}, which no checkpoint needs: it is refused.\n"
            "  Load it with torch, if you trust who wrote it, and save it again."
        )


class _Careful:
    """A planner whose values were loaded here before, by what runs no code of others."""

    def __init__(self, planner: LoadPlanner, where: str) -> None:
        self._planner = planner
        self._where = where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        """Load a value safely, and hand on bytes that were made here."""
        made = io.BytesIO()
        torch.save(unpickled(value.getvalue(), f"{item.storage_index.fqn!r} of {self._where}"), made)
        made.seek(0)
        self._planner.load_bytes(item, made)
