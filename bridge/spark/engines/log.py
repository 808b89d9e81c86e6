"""The Delta log of a table on this machine, where a directory listing tells the version without a query."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import unquote

from bridge.spark.engines import Pin

NEWEST = "the newest version when the plan was made"
ASKED = "the version that was asked for"


def pin_from_log(location: str | None, version: int | None) -> Pin | None:
    """Return the version to read: the one asked for, else the newest commit; None where there is no log to look at."""
    folder = _local_path(location) if location else None
    log = folder / "_delta_log" if folder else None
    if log is None or not log.is_dir():
        return None
    versions = {int(name[:20]) for name in os.listdir(log) if re.match(r"\d{20}\.(json|checkpoint)", name)}
    if not versions:
        return None
    chosen = max(versions) if version is None else version
    return Pin(chosen, _fingerprint(log, chosen), NEWEST if version is None else ASKED)


def _local_path(location: str) -> Path | None:
    if location.startswith("/"):
        return Path(location)
    if not location.startswith("file:"):
        return None
    plain = Path("/" + location.removeprefix("file:").lstrip("/"))
    # Some engines encode the path of a file: address, some do not.
    return plain if plain.exists() else Path(unquote(str(plain)))


def _fingerprint(log: Path, version: int) -> str | None:
    """Digest the commit file, whose bytes hold times and random file names; None where only a checkpoint is left."""
    try:
        return hashlib.blake2b((log / f"{version:020d}.json").read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None
