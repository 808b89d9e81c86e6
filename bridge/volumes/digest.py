"""Digests of byte ranges: xxh3 in 128 bits, which guards against damage, not against forgery."""

from __future__ import annotations

import io
import os
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from bridge.errors import CorruptFileError, VolumeError
from bridge.volumes.storage import with_retries

_BLOCK = 2 << 20


def digest_bytes(data: bytes | memoryview) -> str:
    """Return the digest of `data` in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


class DigestSink(io.RawIOBase):
    """A file that keeps nothing but the digest of what is written."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Digest some bytes."""
        self._state.update(data)
        return memoryview(data).nbytes

    def digest(self) -> str:
        """Return the digest of all bytes so far."""
        return self._state.hexdigest()


def digest_ranges(path: Path, ranges: list[tuple[int, int]]) -> list[str]:
    """Return the digest of each half-open range (start, stop) of a file, in the order given."""
    digests = []
    with open(path, "rb", buffering=0) as file:
        for start, stop in ranges:
            state = xxhash.xxh3_128()
            position = start
            while position < stop:
                block = os.pread(file.fileno(), min(_BLOCK, stop - position), position)
                if not block:
                    raise CorruptFileError(
                        f"{path} ends at byte {os.fstat(file.fileno()).st_size}; bytes up to {stop} were written."
                    )
                state.update(block)
                position += len(block)
            digests.append(state.hexdigest())
    return digests


def read_range(file: int, path: Path, start: int, target: memoryview, expected: str) -> None:
    """Fill `target` with the bytes of an open file from `start` on, and check them unless `expected` is empty.

    Raises:
        CorruptFileError: The file is shorter than that, or its bytes differ from what `expected` was made of.
        VolumeError: It cannot be read, also after some tries.
    """
    filled = 0
    while filled < len(target):
        try:
            count = with_retries(partial(os.preadv, file, [target[filled:]], start + filled))
        except OSError as exc:
            raise VolumeError(f"{path} cannot be read: {exc.strerror}.\n  See that the volume answers.") from exc
        if count == 0:
            raise CorruptFileError(
                f"{path} ends at byte {os.fstat(file).st_size}; bytes up to {start + len(target)} were written."
            )
        filled += count
    if expected and digest_bytes(target) != expected:
        raise CorruptFileError(
            f"{path} is damaged: bytes {start} to {start + len(target)} differ from what was written.\n"
            "  Restore the file, or write it again (an export: with reuse=False, or --fresh)."
        )
