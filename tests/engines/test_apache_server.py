from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import psutil
import pytest

from bridge.errors import ConfigError, EngineUnavailableError
from bridge.spark.engines.apache import delta_conf, start_server
from bridge.spark.engines.process import ConnectServer
from tests import cluster

SPARK_JARS = os.environ.get("BRIDGE_SPARK_JARS")
SHORT_LIVED = {f"spark.{role}.extraJavaOptions": cluster.SHORT_LIVED for role in ("driver", "executor")}


def test_no_jars_no_delta() -> None:
    assert delta_conf(None) == {}
    assert delta_conf("") == {}


def test_delta_from_a_folder_a_list_or_maven(tmp_path: Path) -> None:
    delta, storage = tmp_path / "delta-spark_4.2_2.13-4.4.0.jar", tmp_path / "delta-storage-4.4.0.jar"
    delta.touch()
    storage.touch()
    from_folder = delta_conf(str(tmp_path))
    assert from_folder == {
        "spark.jars": f"{delta},{storage}",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",
    }
    assert delta_conf(f"{delta},{storage}") == from_folder
    assert delta_conf(f"{storage},s3://jars/delta-spark.jar")["spark.jars"] == f"{storage},s3://jars/delta-spark.jar"
    coordinate = "io.delta:delta-spark_4.2_2.13:4.4.0"
    assert delta_conf(coordinate)["spark.jars.packages"] == coordinate


def test_wrong_jars(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"names {tmp_path}/nowhere, which is neither a folder nor a file")):
        delta_conf(f"{tmp_path}/nowhere")
    (tmp_path / "other.jar").touch()
    with pytest.raises(ConfigError, match=re.escape(f"spark_jars holds no delta-spark jar: {tmp_path}.")):
        delta_conf(str(tmp_path))
    with pytest.raises(ConfigError, match=r"spark_jars holds no delta-spark jar: org\.other:thing:1\.0\."):
        delta_conf("org.other:thing:1.0")


def use(server: ConnectServer, table: Path) -> None:
    """Run a query, and a Delta round trip where Delta is at hand."""
    from pyspark.sql.connect.session import SparkSession

    spark = SparkSession.builder.remote(server.remote).create()
    try:
        assert spark.range(10).toArrow().num_rows == 10
        if SPARK_JARS:
            spark.range(1000).write.format("delta").save(str(table))
            assert spark.read.format("delta").load(str(table)).count() == 1000
    finally:
        spark.stop()


def assert_nothing_left(server: ConnectServer) -> None:
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while True:  # executors end a moment after the driver
            os.killpg(server.process.pid, 0)
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert not server.process.scratch.exists()
    assert not server.process.log.exists()


@pytest.mark.apache
def test_local_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.errors.exceptions.connect import SparkConnectGrpcException
    from pyspark.sql.connect.session import SparkSession

    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    server = start_server("local[2]", spark_jars=SPARK_JARS, warehouse=tmp_path / "warehouse", extra_conf=SHORT_LIVED)
    try:
        use(server, tmp_path / "table")

        address, _, token = server.remote.partition("/;token=")
        assert token not in repr(server)
        spark = SparkSession.builder.remote(f"{address}/;token=wrong").create()
        with pytest.raises(SparkConnectGrpcException, match="Invalid authentication token"):
            spark.range(1).toArrow()
        spark.client.close()

        children = psutil.Process(server.process.pid).children(recursive=True)
        processes = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        assert not any(token in argument for process in processes for argument in process.cmdline())
        listening = {
            connection.laddr.ip
            for process in processes
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
    finally:
        server.stop()
    assert_nothing_left(server)
    assert not list(Path.cwd().iterdir())


@pytest.mark.apache
@pytest.mark.timeout(300)  # three JVMs
def test_local_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    server = start_server("local-cluster[2,1,1024]", spark_jars=SPARK_JARS, extra_conf=SHORT_LIVED)
    try:
        use(server, tmp_path / "table")
    finally:
        server.stop()
    assert_nothing_left(server)
    assert not list(Path.cwd().iterdir())


@pytest.mark.apache
def test_server_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(EngineUnavailableError) as caught:
        start_server("local[many]", spark_jars=None)
    message = str(caught.value)
    assert message.startswith("Apache Spark's Connect server (local[many]) ended with status 1 before it was ready.")
    assert "Could not parse Master URL: 'local[many]'" in message
    (log,) = tmp_path.iterdir()
    assert message.endswith(f"Log: {log}")
