"""What differs between the servers that speak Spark Connect: one small protocol, a file for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Pin:
    """Which state of a table is read.

    `version` is None where none can be held fast; `reason` then says why. `fingerprint` tells two tables apart that
    have the same name and version, as after a drop and a new start; of a view it is its text.
    """

    version: int | None
    fingerprint: str | None
    reason: str


class Engine(Protocol):
    """A kind of Spark Connect server."""

    @property
    def name(self) -> str:
        """As plans and receipts show it: "sail", "apache" or "databricks"."""

    @property
    def spark_writes(self) -> bool:
        """Whether Spark writes the shards of an export; where it does not, its rows are streamed and written here."""

    @property
    def is_here(self) -> bool:
        """Whether the server is on this machine, so that a path means the same to both."""

    def pin(
        self, spark: SparkSession, relation: str, location: str | None, version: int | None, timestamp: str | None
    ) -> Pin:
        """Return the version of the Delta table `relation` to read: the one asked for, else the newest.

        Whether the version that was asked for exists is found out by reading it.
        """

    def exact_rows(self, explained: str) -> int | None:
        """Return the rows that the plan text of `EXPLAIN COST` is certain of, None where it only estimates."""

    def spark_path(self, path: Path) -> str:
        """Return how this server must be told a folder that Python opens as `path`."""
