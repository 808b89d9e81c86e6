"""Eight ranks load at once; one of them talks to Spark."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import pytest

from bridge.spark.engines.apache import start_server
from tests.cluster import SHORT_LIVED
from tests.ranks import Ended, run_ranks

pytestmark = [pytest.mark.apache, pytest.mark.delta_jvm]


@dataclass
class Loaded:
    """What eight ranks told, and the events of the server that they used."""

    ranks: list[Ended]
    events: list[dict[str, Any]]

    def told(self, name: str) -> list[Any]:
        for rank, each in enumerate(self.ranks):
            assert each.status == 0, f"rank {rank}: {each.stderr}"
        return [each.told[name] for each in self.ranks]

    def same(self, name: str) -> Any:
        """Return what all ranks told alike."""
        first, *others = [told["value"] for told in self.told(name)]
        assert others == [first] * 7
        return first


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Eight ranks after all they do in `loads`."""
    from pyspark.sql.connect.session import SparkSession

    folder = tmp_path_factory.mktemp("ranks")
    log = folder / "log"
    log.mkdir()
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": log.as_uri(),
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
        "spark.driver.extraJavaOptions": SHORT_LIVED,
    }
    server = start_server("local[2]", spark_jars=os.environ["BRIDGE_SPARK_JARS"], extra_conf=conf)
    try:
        spark = SparkSession.builder.remote(server.remote).create()
        rows = spark.sql("SELECT nullif(id, 5) AS n, concat('word ', id % 10) AS word FROM range(0, 1000, 1, 2)")
        rows.write.format("delta").saveAsTable("t")
        spark.stop()
        ranks = run_ranks(
            "loads", 8, "t", folder / "exports", environment={"BRIDGE_REMOTE": server.remote}, within_s=240.0
        )  # fmt: skip
    finally:
        server.stop()
    events = [json.loads(line) for line in next(log.glob("local-*")).read_text().splitlines()]
    return Loaded(ranks, events)


def test_all_ranks_hold_equal_rows_after_a_collect(loaded: Loaded) -> None:
    route, path, *_ = loaded.same("collect")
    assert (route, path) == ("collect", None)


def test_all_ranks_read_the_same_export(loaded: Loaded) -> None:
    route, path, *_ = loaded.same("export")
    assert route == "export"
    assert loaded.same("reuse")[:2] == ["export", path]


def test_one_rank_talks_to_spark(loaded: Loaded) -> None:
    assert [told["value"] for told in loaded.told("spark")] == [True, *[False] * 7]
    operations = [event for event in loaded.events if event["Event"].endswith("ConnectOperationStarted")]
    assert len({event["sessionId"] for event in operations}) == 2
    by_ranks = [event for event in operations if event["sessionId"] == operations[-1]["sessionId"]]
    writes = [event for event in by_ranks if event["statementText"].startswith("write_operation")]
    assert len(writes) == 1


def test_a_failure_of_rank_0_is_raised_on_all(loaded: Loaded) -> None:
    errors = [(told["error"], told["text"]) for told in loaded.told("no table")]
    assert errors == [("SourceNotFoundError", "t_not does not exist in the current schema.\n  There is: t.")] * 8


def test_a_rank_with_other_arguments_is_named_on_all(loaded: Loaded) -> None:
    errors = [(told["error"], told["text"].splitlines()[0]) for told in loaded.told("other columns")]
    assert errors == [("RankError", "rank 5 and rank 0 called load_table('t'), but differ in columns.")] * 8


def test_plan_table_is_each_rank_s_own(loaded: Loaded) -> None:
    assert [told["value"] for told in loaded.told("plan")] == ["collect", *[None] * 7]
