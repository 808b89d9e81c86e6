"""How the rows of an export are laid out in shards. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from bridge.display import parse_bytes
from bridge.errors import ConfigError, SourceError
from bridge.spark.names import near

_OFF, _OFF_LITTLE = 0.2, 0.125
_FILES_OFF, _SHARE_OFF = 2, 0.05
_FILES_OF_A_TASK = 4


@dataclass(frozen=True)
class Shape:
    """What the shards of an export should be like.

    `shard_bytes` is about the size of a file, `row_group_bytes` about that of a row group before compression.
    `num_shards` takes the place of `shard_bytes`. `order_by` names columns by which all rows are sorted;
    `shuffle_at_write` is the seed by which they are mixed.
    """

    shard_bytes: int = 1 << 30
    row_group_bytes: int = 64 << 20
    num_shards: int | None = None
    order_by: tuple[str, ...] = ()
    shuffle_at_write: int | None = None

    @classmethod
    def checked(
        cls,
        shard_bytes: int | str = shard_bytes,
        row_group_bytes: int | str = row_group_bytes,
        num_shards: int | None = None,
        order_by: str | Sequence[str] | None = None,
        shuffle_at_write: int | None = None,
    ) -> Shape:
        """Return the shape that a caller asks for.

        Raises:
            ConfigError: A size is none, or is 0; a number is no whole number in its range; `order_by` and
                `shuffle_at_write` are both given.
        """
        sizes = {"shard_bytes": shard_bytes, "row_group_bytes": row_group_bytes}
        shards, row_groups = (parse_bytes(size, name=name) for name, size in sizes.items())
        if min(shards, row_groups) < 1:
            raise ConfigError(f"shard_bytes is {shard_bytes} and row_group_bytes {row_group_bytes}; give 1 or more.")
        if num_shards is not None and not _is_whole(num_shards, 1, 2**31):
            raise ConfigError(f"num_shards is {num_shards!r}; give a whole number, 1 or more.")
        if shuffle_at_write is not None and not _is_whole(shuffle_at_write, 0, 2**31):
            raise ConfigError(
                f"shuffle_at_write is {shuffle_at_write!r}; give a seed: a whole number from 0 to 2**31 - 1."
            )
        if order_by is not None and shuffle_at_write is not None:
            raise ConfigError("order_by and shuffle_at_write were both given; rows are either sorted or mixed.")
        names = (order_by,) if isinstance(order_by, str) else order_by if order_by is not None else ()
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"order_by is {order_by!r}; give the name of a column, or a list of names.")
        count, seed = (None if each is None else operator.index(each) for each in (num_shards, shuffle_at_write))
        return cls(shards, row_groups, count, tuple(names), seed)

    def spelled(self, schema: pa.Schema) -> Shape:
        """Return the same with the columns of `order_by` in the table's own spelling."""
        known = {column.lower(): column for column in schema.names}
        for name in self.order_by:
            if name.lower() not in known:
                raise SourceError(
                    f"order_by names {name!r}, which is not read.\n  {near(name, schema.names)}\n"
                    "  Give columns that are read, as a list of names; rows are sorted ascending."
                )
            if pa.types.is_map(schema.field(known[name.lower()]).type):
                raise SourceError(f"order_by names {name!r}, a map, by which Spark cannot sort.")
        return replace(self, order_by=tuple(known[name.lower()] for name in self.order_by))

    def to_json(self) -> dict[str, Any]:
        """Return what makes two layouts of the same rows differ."""
        size = {"shard_bytes": self.shard_bytes} if self.num_shards is None else {"num_shards": self.num_shards}
        given = {"order_by": list(self.order_by) or None, "shuffle_at_write": self.shuffle_at_write}
        return size | {"row_group_bytes": self.row_group_bytes} | {k: v for k, v in given.items() if v is not None}


# what `to_json` may tell
LAYOUT = frozenset(field.name for field in fields(Shape))


def fitted(partition_rows: Sequence[int], shard_rows: int) -> tuple[int, int]:
    """Return how many tasks should write, and how many rows a file may hold, so that files come near `shard_rows`.

    No row is moved: a task writes some partitions one after the other (Spark's `coalesce`), and begins a new file when
    one is full. It is the way with the most tasks in which no more than two files, or a twentieth of them, are off by
    more than an eighth, else by more than a fifth; where there is none, the one in which the fewest are. A task writes
    four files or fewer, but for those of a single partition.

    Args:
        partition_rows: The rows of each partition, in Spark's order; at least one.
    """
    rows = np.asarray(partition_rows, dtype=np.int64)
    ways = [(way, way.off(shard_rows, _OFF), way.off(shard_rows, _OFF_LITTLE)) for way in _ways(rows, shard_rows)]
    for way, _, off in ways:
        if off <= way.may_be_off:
            return way.num_tasks, way.limit
    # the first of the best is the one with the most tasks
    best, _, _ = min(ways, key=lambda found: max(0, found[1] - found[0].may_be_off))
    return best.num_tasks, best.limit


@dataclass(frozen=True)
class _Way:
    """Files of `limit` rows each but for the last of a task, of which there are `rest`; 0 is no file."""

    num_tasks: int
    limit: int
    num_full: int
    rest: np.ndarray[Any, Any]

    @property
    def may_be_off(self) -> float:
        """How many files are let off."""
        return max(_FILES_OFF, _SHARE_OFF * (self.num_full + int((self.rest > 0).sum())))

    def off(self, shard_rows: int, share: float) -> int:
        """Return how many files are off by more than a share; the last ones can only be too small."""
        is_near = (1 - share) * shard_rows <= self.limit <= (1 + share) * shard_rows
        small = int(((self.rest > 0) & (self.rest < (1 - share) * shard_rows)).sum())
        return small + (0 if is_near else self.num_full)


def _ways(rows: np.ndarray[Any, Any], shard_rows: int) -> Iterator[_Way]:
    count = len(rows)
    fewest = min(count, max(1, math.ceil(rows.sum() / (_FILES_OF_A_TASK * shard_rows))))
    together, most_together = 1, -(-count // fewest)
    while together <= most_together:
        num_tasks = max(fewest, -(-count // together))
        # as coalesce groups them where no place is preferred
        groups = np.add.reduceat(rows, np.arange(num_tasks) * count // num_tasks)
        largest = int(groups.max())
        for files in (max(1, largest // shard_rows), max(1, -(-largest // shard_rows))):
            limit = max(1, -(-largest // files))
            yield _Way(num_tasks, limit, int((groups // limit).sum()), groups % limit)
        together = max(together + 1, together * 17 // 16)


def _is_whole(value: Any, start: int, stop: int) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and start <= value < stop
