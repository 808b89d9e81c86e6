"""Apache Spark and Databricks: Delta's history tells the version, and Spark writes Parquet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.spark.engines import Pin
from bridge.spark.engines.log import ASKED, NEWEST, pin_from_log
from bridge.spark.failures import quiet, reason
from bridge.spark.names import sql_string

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class HistoryEngine:
    """A server with DESCRIBE HISTORY; `name` is "apache" or "databricks".

    `is_here` tells whether it is on this machine, so that a path means the same to both.
    """

    name: str
    is_here: bool = False
    spark_writes: bool = True

    def pin(
        self, spark: SparkSession, relation: str, location: str | None, version: int | None, timestamp: str | None
    ) -> Pin:
        """Look at the log where it is at hand, else ask the table's history, which not everybody may read."""
        from pyspark.errors import PySparkException

        pin = pin_from_log(location, version) if self.is_here and timestamp is None else None
        if pin is not None:
            return pin
        history = f"DESCRIBE HISTORY {relation}"
        try:
            with quiet():
                if version is not None:
                    told, found = ASKED, spark.sql(history).filter(f"version = {version}")
                elif timestamp is not None:
                    told = f"the version of {timestamp}"
                    earlier = spark.sql(history).filter(f"timestamp <= timestamp{sql_string(timestamp)}")
                    found = earlier.orderBy("version", ascending=False).limit(1)
                else:
                    told, found = NEWEST, spark.sql(f"{history} LIMIT 1")
                rows = found.collect()
        except PySparkException as exc:
            return Pin(version, None, f"the table's history cannot be read: {reason(exc)}")
        if not rows:
            return Pin(version, None, "the table's history does not reach that far")
        return Pin(int(rows[0]["version"]), f"{rows[0]['version']}@{rows[0]['timestamp'].isoformat()}", told)

    def exact_rows(self, explained: str) -> int | None:
        """Trust rowCount of a LocalRelation or a Range as the topmost node: what Spark says of others is a guess."""
        plan = explained.partition("== Optimized Logical Plan ==")[2].strip()
        found = re.match(r"(?:LocalRelation|Range) .*?rowCount=(\d+)", plan.split("\n", 1)[0])
        return int(found.group(1)) if found else None

    def spark_path(self, path: Path) -> str:
        """Return `path` with its scheme, so that a cluster's default file system does not claim it."""
        return str(path) if path.parts[:2] == ("/", "Volumes") else f"file:{path}"
