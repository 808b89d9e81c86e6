"""Which checkpoint is in a folder: the newest that is complete, or the one that the folder is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bridge.checkpoints.layout import INDEX, Index
from bridge.checkpoints.writer import KIND
from bridge.errors import CheckpointNotFoundError, CorruptFileError, VolumeError
from bridge.volumes.commit import Marker, attempts, complete_attempts, read_marker
from bridge.volumes.digest import digest_bytes
from bridge.volumes.hold import Hold, hold_attempt
from bridge.volumes.storage import Storage
from bridge.volumes.stores import open_storage

STOCK = ".metadata"


@dataclass(frozen=True)
class Opened:
    """A complete checkpoint; `index` is None for one of torch's FileSystemWriter."""

    storage: Storage
    name: str
    marker: Marker | None
    index: Index | None
    hold: Hold | None = None

    @property
    def address(self) -> str:
        """Its folder."""
        return f"{self.storage}/{self.name}" if self.name else str(self.storage)

    def folder(self) -> Path:
        """Return the folder that Python opens."""
        assert self.storage.folder is not None
        return self.storage.folder / self.name

    def within(self, name: str) -> str:
        """Return the name of a file of it, in the storage."""
        return f"{self.name}/{name}" if self.name else name


def open_checkpoint(path: str) -> Opened:
    """Return the checkpoint in a folder, held for as long as the result lives.

    Raises:
        CheckpointNotFoundError: None is complete.
        CorruptFileError: Its index is damaged or gone.
        VolumeError: The folder cannot be read.
    """
    storage = open_storage(path)
    if (marker := read_marker(storage)) is not None:
        parent, _, name = str(path).rstrip("/").rpartition("/")
        held = open_storage(parent or "/") if name else storage
        return Opened(storage, "", marker, read_index(storage, "", marker), hold_attempt(held, name))
    # other things may be kept there too
    found = next((one for one in complete_attempts(storage) if one[1].body.get("kind") == KIND), None)
    if found is not None:
        attempt, marker = found
        hold = hold_attempt(storage, attempt.name)
        return Opened(storage, attempt.name, marker, read_index(storage, attempt.name, marker), hold)
    if storage.folder is not None and (storage.folder / STOCK).is_file():
        return Opened(storage, "", None, None)
    begun = len(attempts(storage))
    told = f"{begun} were begun and not completed" if begun else "nothing was saved there"
    if next(complete_attempts(storage), None) is not None:
        told = "what is complete there is something else, such as a file of bridge.save_file"
    raise CheckpointNotFoundError(f"{path} holds no complete checkpoint: {told}.\n  bridge checkpoints ls shows more.")


def read_index(storage: Storage, name: str, marker: Marker) -> Index:
    """Return the index of a checkpoint.

    Raises:
        CorruptFileError: It is damaged or gone.
        VolumeError: It cannot be read.
    """
    where = f"{storage}/{name}/{INDEX}" if name else f"{storage}/{INDEX}"
    try:
        data = storage.read(f"{name}/{INDEX}" if name else INDEX)
    except FileNotFoundError as exc:
        raise CorruptFileError(f"{where} is gone.\n  Load another checkpoint, or restore the file.") from exc
    except OSError as exc:
        raise VolumeError(f"{where} cannot be read: {exc.strerror or exc}.\n  See that the volume answers.") from exc
    if digest_bytes(data) != marker.body.get("index"):
        raise CorruptFileError(
            f"{where} is damaged: it is not what the marker was written for.\n  Load another checkpoint."
        )
    return Index.decode(data, where)
