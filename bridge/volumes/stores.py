"""The places where bytes are kept: folders that Python opens, and addresses that fsspec reaches."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bridge.config import load_settings
from bridge.errors import MissingDependencyError, VolumeError
from bridge.volumes.path import locate
from bridge.volumes.storage import Entry, Storage, reason_of, with_retries

_SEEN_S = 10.0
_ADVICE = "  Install what fsspec needs for it: s3fs for s3://, adlfs for abfss://, gcsfs for gs://."
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF}
# keys under which file systems of fsspec tell when a file was last written, in this order
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


class LocalStorage:
    """A folder of a file system: a disk, or the mount of a volume. Errors that may pass are tried again for 3 s."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    @property
    def folder(self) -> Path:
        return self._folder

    def path(self, name: str) -> Path:
        """Return where `name` is."""
        return self._folder / name

    def list(self, name: str = "") -> Iterator[Entry]:
        """Yield what a folder holds; links are told by what they lead to."""

        def scan() -> list[Entry]:
            with os.scandir(self.path(name)) as found:
                return [Entry(entry.name, _is_folder(entry), is_link=entry.is_symlink()) for entry in found]

        return iter(with_retries(scan))

    def status(self, name: str) -> Entry:
        """Return size and time of what is at `name`, links followed."""
        path = self.path(name)
        found = with_retries(path.stat)
        return Entry(path.name, stat.S_ISDIR(found.st_mode), found.st_size, found.st_mtime_ns)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return with_retries(lambda: _read(self.path(name), start, stop))

    def write(self, name: str, blocks: Iterable[bytes | memoryview]) -> None:
        """Write a new file, flushed to the disk together with its name; only a list of blocks can be tried again."""
        path = self.path(name)
        if isinstance(blocks, list):
            with_retries(lambda: _write(path, blocks))
        else:
            _write(path, blocks)
        _sync_folder(path.parent)

    def delete(self, name: str) -> bool:
        try:
            with_retries(self.path(name).unlink)
        except FileNotFoundError:
            return False
        return True

    def make_folder(self, name: str = "") -> None:
        with_retries(lambda: self.path(name).mkdir(parents=True, exist_ok=True))

    def delete_folder(self, name: str = "") -> None:
        with contextlib.suppress(FileNotFoundError):
            with_retries(self.path(name).rmdir)


class FsspecStorage:
    """A folder of any file system that fsspec knows: s3://, abfss://, memory://, or a volume by Databricks' API."""

    def __init__(self, filesystem: Any, root: str, address: str) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._address = address.rstrip("/")

    def __str__(self) -> str:
        return self._address

    @property
    def folder(self) -> None:
        return None

    def list(self, name: str = "") -> Iterator[Entry]:
        """Yield what a folder holds, with size and time."""
        path = self._path(name)
        with self._translated(name):
            self._filesystem.invalidate_cache(path)
            found = self._filesystem.ls(path, detail=True)
        for info in found:
            # object stores may list the folder itself
            if info["name"].strip("/") != path.strip("/"):
                yield _entry(info)

    def status(self, name: str) -> Entry:
        path = self._path(name)
        with self._translated(name):
            self._filesystem.invalidate_cache(self._filesystem._parent(path))
            return _entry(self._filesystem.info(path))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None and stop <= start:
            return b""
        with self._translated(name):
            return bytes(self._filesystem.cat_file(self._path(name), start=start, end=stop))

    def write(self, name: str, blocks: Iterable[bytes | memoryview]) -> None:
        """Write a new file; an object store shows it when it is whole."""
        path = self._path(name)
        with self._translated(name):
            if self._filesystem.exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self}/{name}")
            file = self._filesystem.open(path, "wb")
        try:
            for block in blocks:
                with self._translated(name):
                    file.write(block)
            with self._translated(name):
                file.close()
        except BaseException:
            # what closes the file would publish what was written so far, its own end included
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(Exception):
                file.closed = True
            with contextlib.suppress(Exception):
                self._filesystem.rm_file(path)
            raise

    def delete(self, name: str) -> bool:
        try:
            with self._translated(name):
                self._filesystem.rm_file(self._path(name))
        except FileNotFoundError:
            return False
        return True

    def make_folder(self, name: str = "") -> None:
        """Make a folder where the file system has folders."""
        with self._translated(name):
            self._filesystem.makedirs(self._path(name), exist_ok=True)

    def delete_folder(self, name: str = "") -> None:
        """Delete an empty folder where the file system has folders."""
        with self._translated(name):
            self._filesystem.invalidate_cache()
            if self._filesystem.isdir(self._path(name)):
                self._filesystem.rmdir(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root or "/"

    @contextlib.contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as exc:  # each file system of fsspec has errors of its own
            raise VolumeError(f"{self}/{name} cannot be used: {type(exc).__name__}: {exc}") from exc


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """Return the storage whose root is `path`; nothing is made.

    A volume is, in this order: its mount, where it is there and answers; the folder that is configured to stand for
    volumes; Databricks' Files API, where fsspec-databricks is installed and a workspace is configured; the data folder.
    Addresses such as s3://... go through fsspec.

    Raises:
        VolumeError: A mount is there but does not answer or may not be read, and there is no other way to the volume.
        MissingDependencyError: fsspec needs a package for that kind of address.
    """
    volume_root = load_settings().volume_root
    place = locate(path, volume_root)
    if not place.name.startswith("/Volumes/"):
        return _by_fsspec(place.name) if place.local is None else LocalStorage(place.local)
    broken = _mount_error(place.name)
    if broken is None:
        return LocalStorage(Path(place.name))
    if volume_root is None and _has_workspace() and find_spec("fsspec_databricks"):
        from fsspec_databricks import DatabricksFileSystem

        return FsspecStorage(DatabricksFileSystem(use_local_fs_in_workspace=False), place.name, f"dbfs:{place.name}")
    if isinstance(broken, PermissionError):
        raise VolumeError(
            f"{place.name} may not be read: {broken.strerror}.\n"
            "  Ask for READ VOLUME, and for USE of its catalog and schema."
        ) from broken
    if not isinstance(broken, FileNotFoundError | NotADirectoryError):
        raise VolumeError(
            f"the mount of {place.name} does not answer: {broken.strerror}.\n"
            "  Mount it again, or install fsspec-databricks and set DATABRICKS_HOST to go through the Files API."
        ) from broken
    return LocalStorage(place.folder())


def _mount_error(volume: str) -> OSError | None:
    """Return how the mount of a volume fails, None where it works."""
    try:
        with os.scandir(Path(*Path(volume).parts[:5])) as found:
            next(found, None)
    except OSError as exc:
        return exc
    return None


def _has_workspace() -> bool:
    """Return whether something says which Databricks workspace is meant."""
    named = any(os.environ.get(name) for name in ("DATABRICKS_HOST", "DATABRICKS_CONFIG_PROFILE"))
    return named or Path(os.path.expanduser("~/.databrickscfg")).is_file()


def _by_fsspec(address: str) -> FsspecStorage:
    from fsspec.core import url_to_fs

    try:
        filesystem, root = url_to_fs(address)
    except ImportError as exc:
        raise MissingDependencyError(f"{address} cannot be reached: {reason_of(exc)}.\n{_ADVICE}") from exc
    except Exception as exc:  # each file system of fsspec has errors of its own
        raise VolumeError(f"{address} cannot be reached: {reason_of(exc)}.\n{_ADVICE}") from exc
    if "file" in filesystem.protocol:  # what fsspec takes any text for that it cannot split
        raise VolumeError(f"{address} is no address.\n  Give scheme://..., or a path without a scheme.")
    return FsspecStorage(filesystem, root, address)


def flush_file(descriptor: int, path: Path) -> None:
    """Flush an open file, its name and that of its folder, as far as the file system knows how to.

    Raises:
        OSError: What was written could not be kept.
    """
    _sync(descriptor)
    _sync_folder(path.parent)
    _sync_folder(path.parent.parent)


def _read(path: Path, start: int, stop: int | None) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read() if stop is None else file.read(max(0, stop - start))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        if entry.is_symlink():  # one that leads to itself
            return False
        raise


def _write(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    # closed before it is taken back: some mounts show a file only then
    file = open(path, "xb", buffering=0)  # noqa: SIM115
    made = os.fstat(file.fileno())
    try:
        with file:
            for block in blocks:
                view = memoryview(block).cast("B")
                while view.nbytes:
                    view = view[file.write(view) :]
            _sync(file.fileno())
    except BaseException:
        take_back(path, made)
        raise


def take_back(path: Path, made: os.stat_result | None = None) -> None:
    """Delete a file that we made, which may not be seen yet, unless one that is not `made` has taken its name."""
    deadline = time.monotonic() + _SEEN_S
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            try:
                if made is None or os.path.samestat(path.stat(), made):
                    path.unlink()
                return
            except FileNotFoundError:
                time.sleep(0.05)


def _entry(info: Mapping[str, Any]) -> Entry:
    is_folder = info["type"] == "directory"
    moment = next((info[key] for key in _TIMES if info.get(key) is not None), None)
    if isinstance(moment, datetime):
        moment = moment.timestamp()
    mtime_ns = round(moment * 1e9) if isinstance(moment, int | float) else None
    return Entry(info["name"].rstrip("/").rpartition("/")[2], is_folder, info.get("size"), mtime_ns)


def _sync(descriptor: int) -> None:
    """Flush to the disk, where the file system knows how to."""
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno not in _NOT_SUPPORTED:
            raise


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder, where the file system knows how to."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)
