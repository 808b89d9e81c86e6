"""Where a path is: what Spark must be told, and what Python opens."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from bridge.config import data_folder, load_settings
from bridge.errors import VolumeError

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]*):(?=/)", re.IGNORECASE)
_LOCAL_SCHEMES = ("file", "local")
_LOCAL_KINDS = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
# Readers expand these in a path, Spark's as much as glob.
_GLOB = re.compile(r"[?*\[\]{}]")


@dataclass(frozen=True)
class Place:
    """One place under its two names. `local` is None where Python has no file system for it (s3://, abfss://, ...)."""

    name: str
    local: Path | None

    @property
    def is_stand_in(self) -> bool:
        """Whether it is a volume that is not mounted here, for which another folder stands."""
        return self.name.startswith("/Volumes/") and not is_mounted(self.name)

    @property
    def spark(self) -> str:
        """What Apache Spark and Databricks must be told."""
        if self.local is None or (self.name.startswith("/Volumes/") and is_mounted(self.name)):
            return self.name
        return f"file:{self.local}"

    def folder(self) -> Path:
        """Return the local folder.

        Raises:
            VolumeError: There is none.
        """
        if self.local is None:
            raise VolumeError(
                f"{self.name} is not a folder that Python can open here.\n"
                "  Give a volume (/Volumes/...) or a mounted path."
            )
        return self.local

    def __truediv__(self, child: str) -> Place:
        return Place(f"{self.name.rstrip('/')}/{child}", None if self.local is None else self.local / child)


def is_path(text: str) -> bool:
    """Return whether `text` is a path rather than a table name: it has a slash outside backticks, or starts with ~."""
    return "/" in re.sub(r"`[^`]*`", "", text) or text.startswith("~")


def locate(path: str | os.PathLike[str], volume_root: Path | None = None) -> Place:
    """Return where `path` is.

    `/Volumes/<catalog>/<schema>/<volume>/...`, with or without `dbfs:`, is the mount where there is one and the same
    folders under `volume_root` (default: the data folder) where there is none. Other paths stand as they are.

    Raises:
        VolumeError: A volume path that does not name catalog, schema and volume, or, where volumes are mounted, one
            that is not there.
    """
    text = os.fspath(path)
    text = text.removeprefix("dbfs:") if text.startswith("dbfs:/Volumes/") else text
    if text == "/Volumes" or text.startswith("/Volumes/"):
        parts = [part for part in text.split("/")[2:] if part not in ("", ".")]
        if ".." in parts:
            raise VolumeError(f'{text} holds "..", which a path of a volume may not.\n  Give the path it leads to.')
        if len(parts) < 3:
            raise VolumeError(
                f"{text} does not name a volume.\n"
                "  Give catalog, schema and volume: /Volumes/<catalog>/<schema>/<volume>/..."
            )
        name = "/Volumes/" + "/".join(parts)
        if is_mounted(name):
            return Place(name, Path(name))
        if volume_root is None and _is_there(Path(*Path(name).parts[:3])):
            raise VolumeError(
                f"there is no volume {'.'.join(parts[:3])}, or you may not use it.\n"
                "  Correct the name, or ask for READ VOLUME and for USE of its catalog and schema."
            )
        return Place(name, (volume_root or data_folder() / "volumes").joinpath(*parts))
    scheme = _SCHEME.match(text)
    if scheme and scheme.group(1).lower() not in _LOCAL_SCHEMES:
        return Place(text, None)
    plain = re.sub(r"^/{2,}", "/", text[scheme.end() :]) if scheme else text
    local = Path(os.path.expanduser(plain))  # Path.expanduser raises for a user that is not known
    return Place(str(local), local if local.is_absolute() else Path.cwd() / local)


def volume_path(path: str | os.PathLike[str]) -> str:
    """Return where Python opens `path`: the mount, or the configured root.

    `/Volumes/c/s/v/...` and `dbfs:/Volumes/c/s/v/...` are the mount where there is one, else the same folders under
    the setting `volume_root` (default: `volumes` in the data folder). Other paths come back absolute. Nothing is made
    and nothing is looked for.

    Raises:
        VolumeError: A volume path that does not name catalog, schema and volume, or an address without a file system.

    Example:
        >>> import bridge
        >>> bridge.volume_path("/Volumes/main/ml/exports")  # doctest: +SKIP
        '/Volumes/main/ml/exports'
    """
    return str(locate(path, load_settings().volume_root).folder())


def refuse_glob(place: Place) -> None:
    """Refuse a root that readers would expand as a pattern.

    Raises:
        VolumeError: The path holds one of ? * [ ] { }.
    """
    if _GLOB.search(place.name):
        raise VolumeError(
            f"{place.name} cannot hold exports: readers expand ? * [ ] {{ }} in a path.\n"
            "  Choose a folder without them."
        )


def is_local(folder: Path) -> bool:
    """Return whether a folder lies on a disk or in memory of this machine; False where that is not known."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        real = os.path.realpath(folder)
    except OSError:
        return False
    best, kind = "", ""
    for line in mounts:
        point = line.split()[4].encode().decode("unicode_escape")
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, kind = point, line.partition(" - ")[2].split()[0]
    return kind in _LOCAL_KINDS


def is_mounted(volume: str) -> bool:
    """Return whether the volume of a normalised `/Volumes/c/s/v...` name is there, whether or not it answers."""
    return _is_there(Path(*Path(volume).parts[:5]))


def _is_there(folder: Path) -> bool:
    try:
        return stat.S_ISDIR(folder.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # not ours to use, or broken: not to be taken for one that is not mounted
        return True
