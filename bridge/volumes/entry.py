"""What a cache consists of on its disk: a tag, and entries, each for a file in one state."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import VolumeError
from bridge.volumes.digest import digest_bytes
from bridge.volumes.source import ChangedError, Found, open_source
from bridge.volumes.storage import Entry, Storage

RECORD = "entry.json"
_KEY = re.compile(r"[0-9a-f]{32}\.([0-9]+)")
_BLOCK = 4096
_TAG_NAME = "CACHEDIR.TAG"
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# Copies of files on volumes, made by bridge; "bridge cache clear" deletes them. https://bford.info/cachedir/
"""


def is_cache(folder: Path) -> bool:
    """Return whether a folder bears the tag; False where it is empty or not there.

    Raises:
        FileExistsError: It holds other things.
    """
    if not folder.exists() or not os.listdir(folder):
        return False
    with contextlib.suppress(FileNotFoundError):
        # read after the listing, as others may be making it; one who was killed then left the beginning of it
        if _TAG.startswith(read(f"{folder}/{_TAG_NAME}")):
            return True
    text = f"it holds other things, and no {_TAG_NAME} of such a cache"
    raise FileExistsError(errno.EEXIST, text, str(folder))


def make_cache(folder: Path) -> None:
    """Make a folder where it is missing, and tag it, so that backup tools leave it out."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), open(f"{folder}/{_TAG_NAME}", "xb") as file:
        file.write(_TAG)


def list_entries(files: str) -> Iterator[tuple[str, int]]:
    """Yield key and size of the entries that are there, complete or not."""
    with contextlib.suppress(FileNotFoundError):
        for key in os.listdir(files):
            if match := _KEY.fullmatch(key):
                yield key, disk_bytes(int(match[1]))


def disk_bytes(num_bytes: int) -> int:
    """Return what the entry of a file takes on a disk, which gives whole blocks: its record and its folders three."""
    return (-(-num_bytes // _BLOCK) + 3) * _BLOCK


@dataclass(frozen=True, slots=True)
class Source:
    """A file in one state: its size and time."""

    storage: Storage
    name: str
    num_bytes: int
    mtime_ns: int | None

    @classmethod
    def find(cls, storage: Storage, name: str, status: Entry | None = None) -> Source:
        """Return a file in the state that `status` tells of, or in the one it has now where that is not known."""
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"name is {name!r}; give the name of a file in {storage}.")
        if status is None or status.num_bytes is None or status.mtime_ns is None:
            with _naming(storage, name):
                status = storage.status(name)
        if status.is_folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), f"{storage}/{name}")
        if status.num_bytes is None:
            raise VolumeError(f"{storage}/{name} cannot be copied: {storage} does not tell its size.")
        return cls(storage, name, status.num_bytes, status.mtime_ns)

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes from front to back.

        Raises:
            ChangedError: The file is gone, or no longer in that state.
            VolumeError: It cannot be read.
        """
        try:
            status = Entry(self.name.rpartition("/")[2], False, self.num_bytes, self.mtime_ns)
            with (
                _naming(self.storage, self.name),
                open_source(self.storage).open(Found(self.name, entry=status)) as file,
            ):
                if file.num_bytes != self.num_bytes or self.mtime_ns not in (None, file.mtime_ns):
                    raise ChangedError
                yield from file.blocks()
                file.check()
        except (FileNotFoundError, IsADirectoryError) as exc:
            raise ChangedError from exc


@contextlib.contextmanager
def _naming(storage: Storage, name: str) -> Iterator[None]:
    """Let failures name the file."""
    try:
        yield
    except ChangedError:
        raise
    except FileNotFoundError as exc:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{storage}/{name}") from exc
    except OSError as exc:
        raise VolumeError(f"{storage}/{name} cannot be read: {exc.strerror or exc}.") from exc


class Copy:
    """Where the copy belongs of one file in one state, which is its time or what else tells it from others."""

    def __init__(self, files: str, address: str, num_bytes: int, state: int | str) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.record = json.dumps([address, num_bytes, state]).encode()
        self.key = f"{digest_bytes(self.record)}.{num_bytes}"
        self.disk_bytes = disk_bytes(num_bytes)
        self.folder = f"{files}/{self.key}"
        self.record_path = f"{self.folder}/{RECORD}"
        folder, _, name = address.rpartition("/")
        parent = folder.rpartition("/")[2]
        self.path = f"{self.folder}/{'_' if parent in ('', '.', '..', RECORD) else parent}/{name}"

    def is_whole(self) -> bool:
        """Return whether the copy is there, with its record and all its bytes."""
        try:
            return read(self.record_path) == self.record and os.stat(self.path).st_size == self.num_bytes
        except (FileNotFoundError, NotADirectoryError):
            return False


def empty(folder: str) -> None:
    """Delete what an entry holds: the record first, without which it counts for nothing."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{folder}/{RECORD}")
    for name in os.listdir(folder):
        shutil.rmtree(f"{folder}/{name}")


def read(path: str) -> bytes:
    """Return what a small file holds."""
    with open(path, "rb", buffering=0) as file:
        return file.read()
