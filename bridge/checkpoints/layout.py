"""What a checkpoint consists of: files of tensors, an index of what is where, and a marker, written last.

    <root>/<attempt>/rank-00000.0.safetensors   a rank's tensors, front to back; stock safetensors reads it
                     index.json                 every tensor and value, and a digest of each block of each file
                     _bridge.0.json             the marker: size of each file, digest of the index

A file is a header and blocks of 4 MiB behind it. Whatever a rank needs of a tensor, it reads and checks the blocks that
hold it and no others. In a file tensors are sorted by the size of their elements, the largest first, so that each
starts where its type may start. A part of a sharded tensor is named `name[0:4, 8:16]`.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from bridge.errors import CheckpointError, CorruptFileError

FORMAT = 1
INDEX = "index.json"
BLOCK_BYTES = 4 << 20

Box: TypeAlias = tuple[tuple[int, int], ...]
"""The part [start, stop) of each dimension."""

_ALIGNMENT = 64
_PLAIN = (str, bool, type(None))
_MOST_BITS = 2000
# https://github.com/huggingface/safetensors#format; other types of torch are stored as bytes
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16",
    torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A part of a tensor, or a value that is no tensor, at the bytes [start, stop) of a file."""

    file: str
    start: int
    stop: int
    box: Box = ()


@dataclass(frozen=True)
class Stored:
    """A tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class File:
    """A file: its header ends, and its first block starts, at `data_start`. The first digest is that of the header."""

    name: str
    num_bytes: int
    data_start: int
    digests: tuple[str, ...]

    def block(self, number: int) -> tuple[int, int]:
        """Return the bytes [start, stop) of a block; number 0 is the header."""
        if number == 0:
            return 0, self.data_start
        start = self.data_start + (number - 1) * BLOCK_BYTES
        return start, min(start + BLOCK_BYTES, self.num_bytes)

    def blocks(self, start: int, stop: int) -> range:
        """Return the numbers of the blocks that hold the bytes [start, stop) of the data."""
        if start == stop:
            return range(0)
        return range((start - self.data_start) // BLOCK_BYTES + 1, (stop - 1 - self.data_start) // BLOCK_BYTES + 2)


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds: tensors, values that JSON holds, and values that were pickled, each by its name.

    `paths` tells the keys that lead to each name in the nested state, None where it was not nested.
    """

    tensors: dict[str, Stored]
    values: dict[str, Any]
    pickles: dict[str, Part]
    paths: dict[str, list[Any]] | None
    files: tuple[File, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(file.num_bytes for file in self.files)

    def encode(self) -> bytes:
        """Return the bytes of its file."""
        content = {
            "format": FORMAT,
            "tensors": {
                name: [str(stored.dtype).removeprefix("torch."), stored.shape, [_listed(part) for part in stored.parts]]
                for name, stored in self.tensors.items()
            },
            "values": self.values,
            "pickles": {name: _listed(part) for name, part in self.pickles.items()},
            "paths": self.paths,
            "files": [[file.name, file.num_bytes, file.data_start, file.digests] for file in self.files],
        }
        # text as it is, since two halves of a surrogate pair would come back as one character if they were escaped
        return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")

    @classmethod
    def decode(cls, data: bytes, where: str) -> Index:
        """Return the index that `data` holds.

        Raises:
            CheckpointError: It is of another format.
            CorruptFileError: It is none.
        """
        try:
            content = json.loads(data)
            if content["format"] != FORMAT:
                raise CheckpointError(
                    f"{where} has format {content['format']}; this version reads {FORMAT}.\n"
                    "  Load it with a newer bridge."
                )
            index = cls(
                {
                    name: Stored(_dtype(dtype), tuple(shape), tuple(map(_part, parts)))
                    for name, (dtype, shape, parts) in content["tensors"].items()
                },
                content["values"],
                {name: _part(part) for name, part in content["pickles"].items()},
                content["paths"],
                tuple(File(name, size, start, tuple(digests)) for name, size, start, digests in content["files"]),
            )
            index._check()
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as exc:
            raise CorruptFileError(f"{where} is no index: {exc!r}.\n  Load another checkpoint.") from exc
        return index

    def _check(self) -> None:
        """Raise ValueError where parts are not of a file of the checkpoint, or not in it."""
        files = {file.name: file for file in self.files}
        for file in self.files:
            if "/" in file.name or len(file.digests) != 1 + -(-(file.num_bytes - file.data_start) // BLOCK_BYTES):
                raise ValueError(file.name)
        parts = [(part, stored) for stored in self.tensors.values() for part in stored.parts]
        for part, stored in [*parts, *((part, None) for part in self.pickles.values())]:
            file = files[part.file]
            if not file.data_start <= part.start <= part.stop <= file.num_bytes:
                raise ValueError(part)
            sizes = [stop - start for start, stop in part.box]
            if stored is not None and math.prod(sizes) * stored.dtype.itemsize != part.stop - part.start:
                raise ValueError(part)


@dataclass
class Leaf:
    """A value that is saved as one, however it is nested; it is loaded without this around it."""

    value: Any


def _listed(part: Part) -> list[Any]:
    return [part.file, part.start, part.stop, part.box]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    return dtype


def _part(listed: list[Any]) -> Part:
    file, start, stop, box = listed
    return Part(file, start, stop, tuple((low, high) for low, high in box))


@dataclass(frozen=True)
class Entry:
    """What is written to a file under one name: bytes, seen as a tensor of a type and shape."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def file_order(entry: Entry) -> int:
    """Return what entries of a file are sorted by."""
    return -entry.dtype.itemsize


def make_header(entries: Iterable[Entry]) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the header of a file of safetensors, and the bytes [start, stop) of each entry in the file."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt", "bridge": str(FORMAT)}}
    ranges = []
    start = 0
    for entry in entries:
        stop = start + entry.num_bytes
        known = entry.dtype in _NAMES
        described[_free_name(entry.name, described)] = {
            "dtype": _NAMES[entry.dtype] if known else "U8",
            "shape": list(entry.shape) if known else [entry.num_bytes],
            "data_offsets": [start, stop],
        }
        ranges.append((start, stop))
        start = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, [(len(header) + start, len(header) + stop) for start, stop in ranges]


def _free_name(name: str, taken: Container[str]) -> str:
    """Return a name as stock safetensors takes it: text that no other entry of the file has."""
    free = name = name.encode("utf-8", "backslashreplace").decode()
    number = 1
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free


def part_name(name: str, box: Box, shape: Sequence[int]) -> str:
    """Return what a part of a tensor is called in its file: the tensor's own name where it is the whole."""
    if all(start == 0 and stop == size for (start, stop), size in zip(box, shape, strict=True)):
        return name
    return f"{name}[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def is_plain(value: Any) -> bool:
    """Return whether JSON gives a value back as it was."""
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(is_plain, value.values()))
    if type(value) is list:
        return all(map(is_plain, value))
    if type(value) is int:
        return value.bit_length() <= _MOST_BITS  # of more digits than Python wants to read, there are none
    return math.isfinite(value) if type(value) is float else type(value) in _PLAIN


def pickled(name: str, value: Any) -> bytes:
    """Return what `torch.save` makes of a value that torch loads again without running code of others.

    Raises:
        CheckpointError: torch would not.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as exc:  # whatever pickling a value of anybody's class raises
        raise CheckpointError(
            f"{name!r} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be loaded again "
            f"safely: {_reason(exc)}.\n"
            "  Save numbers, text, lists, dicts and tensors, or allow its class: torch.serialization.add_safe_globals."
        ) from exc
    return buffer.getvalue()


def unpickled(data: bytes | memoryview, where: str, map_location: Any = "cpu") -> Any:
    """Return a value that `pickled` stored; nothing is run but what torch allows.

    Raises:
        CorruptFileError: It is something else.
    """
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location=map_location)
    except Exception as exc:  # of bytes that somebody made to harm
        raise CorruptFileError(
            f"{where} is refused: {_reason(exc)}.\n"
            "  If you trust who wrote it, allow its class: torch.serialization.add_safe_globals."
        ) from exc


def _reason(exc: Exception) -> str:
    """Return what torch met; the rest of its text advises to run whatever it is."""
    met = str(exc).rpartition("WeightsUnpickler error:")[2].strip()
    return met.partition("\n")[0].partition(" by default.")[0].rstrip(".")
