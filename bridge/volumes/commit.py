"""Complete or absent: write-once attempt folders, each made visible by its own marker, written last.

A folder holds attempts `<generation>-<label>-<attempt id>`. An attempt is complete when it holds a marker
`_bridge.<n>.json` whose digest is right; readers believe nothing else. Only creating files is relied on: no rename,
append, link or truncate, which volume mounts refuse. Where several attempts are complete, the one of the highest
generation wins, then the one of the smallest attempt id, so that everybody who sees the same attempts picks the same.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.errors import VolumeError
from bridge.volumes.digest import digest_bytes

_NAME = re.compile(r"(?P<generation>\d{8})-(?P<label>[a-z0-9]{1,32})-(?P<id>[0-9a-f]{12})")
_MARKER = re.compile(r"_bridge\.\d+\.json")


@dataclass(frozen=True)
class Attempt:
    """One try at writing something: a folder of its own, whether or not it exists yet.

    `label` is what the writer wants to find attempts by, in [a-z0-9].
    """

    folder: Path
    generation: int
    label: str
    attempt_id: str

    @property
    def rank(self) -> tuple[int, str]:
        """Attempts sort by this; the first is the one that readers pick."""
        return (-self.generation, self.attempt_id)


def new_attempt(parent: Path, label: str) -> Attempt:
    """Return a fresh attempt in `parent`, of a generation above all that are there. Its folder is not made.

    Raises:
        VolumeError: `parent` cannot be made or listed.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        generation = max((attempt.generation for attempt in attempts(parent)), default=0) + 1
    except OSError as exc:
        raise VolumeError(
            f"{parent} cannot be written: {exc.strerror}.\n  Give a folder or volume you may write (WRITE VOLUME)."
        ) from exc
    attempt_id = secrets.token_hex(6)
    return Attempt(parent / f"{generation:08d}-{label}-{attempt_id}", generation, label, attempt_id)


def attempts(parent: Path) -> Iterator[Attempt]:
    """Yield every attempt in `parent`, complete or not, in no order; none where the folder is missing."""
    for name in os.listdir(parent) if parent.is_dir() else ():
        match = _NAME.fullmatch(name)
        if match:
            yield Attempt(parent / name, int(match["generation"]), match["label"], match["id"])


def write_marker(attempt: Attempt, body: dict[str, Any]) -> None:
    """Make an attempt complete: write its marker, flush it, and read it back.

    Raises:
        VolumeError: The marker could not be written, or does not read back as written.
    """
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    data = (json.dumps({"digest": digest_bytes(text.encode())}) + "\n" + text).encode()
    path = attempt.folder / "_bridge.0.json"
    try:
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written = path.read_bytes()
    except OSError as exc:
        raise VolumeError(f"the marker {path} cannot be written: {exc.strerror}.") from exc
    if written != data:
        raise VolumeError(f"the marker {path} does not read back as it was written.")


def read_marker(folder: Path) -> dict[str, Any] | None:
    """Return the body of a folder's marker, None where there is none that is whole."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for name in filter(_MARKER.fullmatch, names):
        try:
            head, _, text = (folder / name).read_bytes().partition(b"\n")
            if json.loads(head)["digest"] == digest_bytes(text):
                body: dict[str, Any] = json.loads(text)
                return body
        # FileNotFoundError: its writer has discarded the attempt meanwhile
        except (ValueError, KeyError, TypeError, FileNotFoundError):
            continue
    return None


def complete_attempts(parent: Path, label: str | None = None) -> Iterator[tuple[Attempt, dict[str, Any]]]:
    """Yield the complete attempts of `parent` with what their markers say, the one that readers pick first."""
    chosen = (attempt for attempt in attempts(parent) if label is None or attempt.label == label)
    for attempt in sorted(chosen, key=lambda attempt: attempt.rank):
        body = read_marker(attempt.folder)
        if body is not None:
            yield attempt, body


def discard(attempt: Attempt) -> None:
    """Delete what an attempt of ours that failed has written: its marker first, so that no reader sees a part."""
    if not attempt.folder.is_dir():
        return
    for path in sorted(
        attempt.folder.rglob("*"), key=lambda path: (not _MARKER.fullmatch(path.name), -len(path.parts))
    ):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    attempt.folder.rmdir()
