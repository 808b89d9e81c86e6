"""Single objects on volumes: complete or absent, verified, and loaded without running what is in them."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from bridge.checkpoints.layout import pickled, unpickled
from bridge.errors import CheckpointNotFoundError, CorruptFileError, VolumeError
from bridge.volumes.commit import begin, collect_garbage, complete_attempts, delete_attempt, read_marker
from bridge.volumes.digest import digest_bytes
from bridge.volumes.storage import Storage, translated
from bridge.volumes.stores import open_storage

_LABEL = "file"
_NAME = "data.pt"


def save_file(obj: Any, path: str | os.PathLike[str]) -> None:
    """Save an object as `torch.save` does, so that `load_file` gets it whole or not at all.

    `path` becomes a folder, since a volume renames nothing: what is saved there again is read when it is complete, and
    what was there before is deleted then.

    Raises:
        CheckpointError: The object holds what `load_file` would refuse, as a whole module does: give its state_dict().
        VolumeError: The place cannot be written. In each case what was there before is as it was.

    Example:
        >>> import bridge
        >>> bridge.save_file({"threshold": 0.5}, "/Volumes/main/ml/models/best.pt")  # doctest: +SKIP
    """
    storage = open_storage(path)
    if _is_file(storage):
        raise VolumeError(f"{path} is a file, and save_file makes a folder.\n  Give another name.")
    data = pickled(os.fspath(path), obj)
    with begin(storage, _LABEL) as attempt:
        with translated(f"{path} cannot be written"):
            storage.make_folder(attempt.name)
            storage.write(f"{attempt.name}/{_NAME}", [data])
        attempt.commit({"kind": _LABEL, "digest": digest_bytes(data)}, {_NAME: len(data)})
    # the file itself stands whether or not that works
    with contextlib.suppress(OSError):
        for older, _ in complete_attempts(storage, _LABEL):
            if older.rank > attempt.attempt.rank:
                delete_attempt(storage, older)
        collect_garbage(storage)


def load_file(path: str | os.PathLike[str], *, map_location: Any = "cpu") -> Any:
    """Return what `save_file` saved last: numbers, text, tensors, and lists and dicts of them.

    Raises:
        CheckpointNotFoundError: Nothing complete is there.
        CorruptFileError: It is damaged, or it would run code.
        VolumeError: It cannot be read.
    """
    storage = open_storage(path)
    for attempt, marker in complete_attempts(storage, _LABEL):
        where = f"{storage}/{attempt.name}/{_NAME}"
        try:
            data = storage.read(f"{attempt.name}/{_NAME}")
        except FileNotFoundError as exc:
            if read_marker(storage, attempt.name) is None:
                return load_file(path, map_location=map_location)  # saved anew meanwhile
            raise CorruptFileError(f"{where} is gone.\n  Save it again, or restore the file.") from exc
        except OSError as exc:
            raise VolumeError(f"{where} cannot be read: {exc.strerror or exc}.") from exc
        if digest_bytes(data) != marker.body["digest"]:
            raise CorruptFileError(
                f"{where} is damaged: it is not what was saved.\n  Save it again, or restore the file."
            )
        return unpickled(data, where, map_location)
    told = "holds nothing that bridge.save_file completed.\n  Correct the path."
    if _is_file(storage):
        told = "is a file, which bridge.save_file does not make.\n  torch.load(path, weights_only=True) may read it."
    raise CheckpointNotFoundError(f"{path} {told}")


def _is_file(storage: Storage) -> bool:
    return storage.folder is not None and storage.folder.is_file()
