"""Apache Spark and Databricks: Delta's history tells the version, and Spark writes Parquet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.spark.engines import Pin
from bridge.spark.failures import quiet, reason
from bridge.spark.names import sql_string

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class HistoryEngine:
    """A server with DESCRIBE HISTORY; `name` is "apache" or "databricks"."""

    name: str
    spark_writes: bool = True

    def pin(
        self, spark: SparkSession, relation: str, location: str | None, version: int | None, timestamp: str | None
    ) -> Pin:
        """Ask the table's history; None where the asker may not read it (row filters, column masks)."""
        from pyspark.errors import PySparkException

        statement = f"DESCRIBE HISTORY {relation}"
        try:
            with quiet():
                if version is not None:
                    rows, told = (
                        spark.sql(statement).filter(f"version = {version}").collect(),
                        "the version that was asked for",
                    )
                elif timestamp is not None:
                    earlier = spark.sql(statement).filter(f"timestamp <= timestamp{sql_string(timestamp)}")
                    rows, told = (
                        earlier.orderBy("version", ascending=False).limit(1).collect(),
                        f"the version of {timestamp}",
                    )
                else:
                    rows, told = (
                        spark.sql(f"{statement} LIMIT 1").collect(),
                        "the newest version when the plan was made",
                    )
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
