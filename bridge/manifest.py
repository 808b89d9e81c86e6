"""What an export holds: its schema, where it came from, and each shard with its row groups and their digests."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.errors import ExportError
from bridge.volumes.digest import digest_ranges

FORMAT_VERSION = 1


@dataclass(frozen=True)
class RowGroup:
    """A row group of a shard, at the bytes [start, stop) of its file."""

    num_rows: int
    start: int
    stop: int
    digest: str


@dataclass(frozen=True)
class Shard:
    """A Parquet file. Its row groups and its footer, [row_groups[-1].stop, num_bytes), cover all its bytes."""

    name: str
    num_rows: int
    num_bytes: int
    row_groups: tuple[RowGroup, ...]
    footer_digest: str

    @property
    def footer_start(self) -> int:
        """Where the footer starts: everything behind the last row group."""
        return self.row_groups[-1].stop if self.row_groups else 0


@dataclass(frozen=True)
class Manifest:
    """What an export holds.

    `num_bytes` is the size of the files, `memory_bytes` about that of the rows as Arrow. `receipt` says what was read,
    by whom, when and with what; `identity` is equal for two exports that hold the same rows of the same state in the
    same shape, and None where that cannot be known.
    """

    table: str
    version: int | None
    identity: str | None
    schema_ipc: str
    num_rows: int
    num_bytes: int
    memory_bytes: int
    shards: tuple[Shard, ...]
    receipt: dict[str, Any]
    format_version: int = FORMAT_VERSION

    @cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema that readers get, whatever Parquet can say of it."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema_ipc)))

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any], where: Path) -> Manifest:
        """Return the manifest that `body`, the marker of the folder `where`, holds.

        Raises:
            ExportError: It was written in a format that this version does not read.
        """
        if body.get("format_version") != FORMAT_VERSION:
            raise ExportError(
                f"{where} has manifest format {body.get('format_version')!r}; this version reads {FORMAT_VERSION}.\n"
                "  Upgrade spark-training-bridge, or export again."
            )
        shards = tuple(
            Shard(**{**shard, "row_groups": tuple(RowGroup(**group) for group in shard["row_groups"])})
            for shard in body["shards"]
        )
        return cls(**{**body, "shards": shards})


def encode_schema(schema: pa.Schema) -> str:
    """Return a schema as it stands in a manifest."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def describe_shards(folder: Path, names: Sequence[str], num_threads: int = 8) -> tuple[Shard, ...]:
    """Read the footer of each file and digest each row group, in parallel; in the order of `names`.

    Raises:
        ExportError: A file holds INT96 timestamps, whose years before 1677 and after 2262 do not survive reading.
    """
    with ThreadPoolExecutor(num_threads) as threads:
        return tuple(threads.map(lambda name: _describe_shard(folder / name), names))


def _describe_shard(path: Path) -> Shard:
    num_bytes = path.stat().st_size
    footer = pq.read_metadata(path)
    for index in range(len(footer.schema)):
        if footer.schema.column(index).physical_type == "INT96":
            raise ExportError(
                f"{path.name}: column {footer.schema.column(index).path!r} was written as INT96, which loses years "
                "outside 1677 to 2262.\n  The server ignored the write option; cast the column to a microsecond type."
            )
    # Each range starts where the one before ends, so that no byte of the file goes unchecked.
    ranges, position = [], 0
    for index in range(footer.num_row_groups):
        chunks = [footer.row_group(index).column(i) for i in range(footer.num_columns)]
        stop = max((_chunk_start(chunk) + chunk.total_compressed_size for chunk in chunks), default=0)
        ranges.append((position, max(position, stop)))
        position = ranges[-1][1]
    digests = digest_ranges(path, [*ranges, (position, num_bytes)])
    groups = tuple(
        RowGroup(footer.row_group(index).num_rows, start, stop, digest)
        for index, ((start, stop), digest) in enumerate(zip(ranges, digests, strict=False))
    )
    return Shard(path.name, footer.num_rows, num_bytes, groups, digests[-1])


def _chunk_start(chunk: Any) -> int:
    """Return where a column chunk starts; writers leave out the dictionary page as None or as 0."""
    return int(min((offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset), default=0))
