"""The engines that the same tests run against."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import bridge
from tests.cluster import SHORT_LIVED, standalone_cluster

# each of hundreds of small queries brings code of its own, which is never run often enough for the second compiler
JVM = f"{SHORT_LIVED} -Dspark.sql.shuffle.partitions=4"


@dataclass
class EngineUnderTest:
    """An engine, and a schema in it whose tables are Delta."""

    name: str
    spark: Any
    catalog: str
    folder: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _sessions: list[Any] = field(default_factory=list)

    def save(self, frame: Any, *, mode: str = "error", name: str | None = None, provider: str = "delta") -> str:
        """Save rows as a table and return its full name."""
        name = name or f"t{next(self._numbers)}"
        frame.write.format(provider).mode(mode).saveAsTable(f"demo.{name}")
        return f"{self.catalog}.demo.{name}"

    def path(self, table: str) -> str:
        """Return the folder of a table that `save` made."""
        rows = self.spark.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
        return next(row["data_type"] for row in rows if row["col_name"] == "Location")

    def load(self, source: Any, **arguments: Any) -> bridge.Table:
        """Load through this engine's session."""
        return bridge.load_table(source, spark=self.spark, **arguments)

    def new_session(self, zone: str) -> Any:
        """Open another session on the same server, in a zone of its own; what is active stays so."""
        from pyspark.sql.connect.session import SparkSession

        spark = SparkSession(self.spark.client._builder)
        spark.conf.set("spark.sql.session.timeZone", zone)
        self._sessions.append(spark)
        return spark

    def close(self) -> None:
        """Close what `new_session` opened: at exit pyspark tries for ten minutes to reach a server that is gone."""
        for spark in self._sessions:
            spark.client.close()


def _start(name: str, remote: str, folder: Path) -> EngineUnderTest:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRIDGE_WAREHOUSE", str(folder / "warehouse"))
        patch.setenv("SPARK_SUBMIT_OPTS", JVM)
        spark = bridge.connect(remote)
    catalog = spark.sql("SELECT current_catalog()").collect()[0][0]
    schema_folder = folder / "warehouse" / catalog / "demo"
    schema_folder.mkdir(parents=True)
    spark.sql(f"CREATE SCHEMA demo LOCATION '{schema_folder}'")
    return EngineUnderTest(name, spark, catalog, schema_folder)


@pytest.fixture(scope="session")
def _engines(tmp_path_factory: pytest.TempPathFactory, _bare_environment: None) -> Iterator[Any]:
    """Start each engine once, when the first test asks for it."""
    started: dict[str, EngineUnderTest] = {}

    def start(name: str, remote: str | None = None) -> EngineUnderTest:
        if name not in started:
            remote = remote or {"sail": "sail", "apache": "local[2]"}[name]
            started[name] = _start(name, remote, tmp_path_factory.mktemp(name))
        return started[name]

    yield start
    for engine in started.values():
        engine.close()


@pytest.fixture(scope="session")
def cluster_remote(_bare_environment: None) -> Iterator[str]:
    """The address of a standalone cluster: five JVMs, with Delta where its jars are at hand."""
    with standalone_cluster(os.environ.get("BRIDGE_SPARK_JARS")) as remote:
        yield remote


SAIL = pytest.param("sail", id="sail")
APACHE = pytest.param("apache", id="apache", marks=[pytest.mark.apache, pytest.mark.delta_jvm])
CLUSTER = pytest.param("cluster", id="cluster", marks=[pytest.mark.cluster, pytest.mark.delta_jvm])


@pytest.fixture(params=[SAIL, APACHE])
def engine(request: pytest.FixtureRequest, _engines: Any) -> EngineUnderTest:
    """Sail and Apache Spark."""
    return _engines(request.param)


@pytest.fixture(params=[SAIL, APACHE, CLUSTER])
def any_engine(request: pytest.FixtureRequest, _engines: Any) -> EngineUnderTest:
    """Sail, Apache Spark, and a standalone cluster through sc://."""
    remote = request.getfixturevalue("cluster_remote") if request.param == "cluster" else None
    return _engines(request.param, remote)


@pytest.fixture(params=[SAIL])
def sail(request: pytest.FixtureRequest, _engines: Any) -> EngineUnderTest:
    """The embedded engine alone."""
    return _engines(request.param)


@pytest.fixture(params=[APACHE])
def apache(request: pytest.FixtureRequest, _engines: Any) -> EngineUnderTest:
    """Apache Spark alone."""
    return _engines(request.param)


@pytest.fixture(params=["collect", "export"])
def route(request: pytest.FixtureRequest) -> str:
    """Both routes."""
    return request.param
