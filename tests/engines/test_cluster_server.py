from __future__ import annotations

import os
from pathlib import Path

import pytest

SPARK_JARS = os.environ.get("BRIDGE_SPARK_JARS")


@pytest.mark.cluster
@pytest.mark.timeout(300)  # five JVMs
def test_cluster_runs_a_query_on_its_executors(cluster_remote: str, tmp_path: Path) -> None:
    from pyspark.sql.connect.session import SparkSession

    spark = SparkSession.builder.remote(cluster_remote).create()
    try:
        assert "spark://127.0.0.1:" in str(spark.conf.get("spark.master"))
        assert spark.range(0, 100_000, 1, 4).toArrow().num_rows == 100_000
        if SPARK_JARS:
            spark.range(1000).write.format("delta").save(str(tmp_path / "table"))
            assert spark.read.format("delta").load(str(tmp_path / "table")).count() == 1000
    finally:
        spark.stop()
