"""Sessions, each in a process of its own: one that is active decides for all that follow."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.config import load_settings
from bridge.errors import ConfigError, EngineUnavailableError, MissingDependencyError
from bridge.spark.connect import attach

SERVERS = """
import json, os, sys
import bridge
from pysail.spark import SparkConnectServer

def serve():
    os.environ["RUST_LOG"] = "error"
    server = SparkConnectServer()
    server.start()
    del os.environ["RUST_LOG"]
    host, port = server.listening_address
    return server, f"sc://{host}:{port}"

def where(spark):
    return "sc://" + spark.client._builder.endpoint

def tell(value):
    print(json.dumps(value))
"""


def run(code: str, *, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    child = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", SERVERS + textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if check:
        assert child.returncode == 0, child.stderr
        assert child.stderr == ""
    return child


def told(code: str, **environment: str) -> Any:
    return json.loads(run(code, **environment).stdout)


def test_argument_then_active_session_then_spark_remote(tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("remote: ${THERE}\n")
    code = """
        (a, at_a), (b, at_b) = serve(), serve()
        os.environ["THERE"] = at_b
        os.environ["SPARK_REMOTE"] = at_a
        on_a = bridge.connect()
        assert where(on_a) == at_a, "SPARK_REMOTE"
        os.environ["SPARK_REMOTE"] = at_b
        assert bridge.connect() is on_a, "the active session wins over SPARK_REMOTE"
        on_b = bridge.connect(at_b)
        assert where(on_b) == at_b, "the argument wins over the active session"
        assert bridge.connect(at_b) is on_b, "the second call"
        os.environ["BRIDGE_REMOTE"] = at_a
        assert bridge.connect() is on_a, "BRIDGE_REMOTE wins over the active session"
        assert bridge.connect(at_b) is on_b, "the argument wins over BRIDGE_REMOTE"
        assert bridge.connect(profile="there") is on_a, "and BRIDGE_REMOTE over a profile"
        del os.environ["BRIDGE_REMOTE"]
        bridge.connect(at_a)
        assert bridge.connect(profile="there") is on_b, "a profile that is named wins over the active session"
        on_a.stop()
        on_b.stop()
        again = bridge.connect()
        assert where(again) == at_b and again is not on_b, "a session that was stopped is not given again"
        assert again.range(3).count() == 3
        assert bridge.connect("sail") is not again, "the embedded engine"
        tell("done")
    """

    assert told(code, BRIDGE_CONF=str(tmp_path)) == "done"


def test_without_anything_it_is_the_profile_and_then_the_embedded_engine(tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("remote: ${THERE}\n")
    code = """
        server, there = serve()
        os.environ["THERE"] = there
        os.environ["BRIDGE_PROFILE"] = "there"
        on_profile = bridge.connect()
        assert where(on_profile) == there
        on_profile.stop()
        del os.environ["BRIDGE_PROFILE"]
        embedded = bridge.connect()
        assert where(embedded) != there
        assert bridge.connect("sail") is embedded
        embedded.stop()
        again = bridge.connect()
        assert again is not embedded
        assert where(again) == where(embedded), "the server runs on"
        assert again.range(3).count() == 3
        tell([name for name in os.environ if name.startswith(("SAIL_", "RUST_LOG"))])
    """

    assert told(code, BRIDGE_CONF=str(tmp_path)) == []


def test_settings_of_sail_that_the_person_made_stand() -> None:
    code = """
        spark = bridge.connect()
        assert spark.range(3).count() == 3
        tell({name: value for name, value in os.environ.items() if name.startswith(("SAIL_", "RUST_LOG"))})
    """

    assert told(code, SAIL_EXECUTION__BATCH_SIZE="77") == {"SAIL_EXECUTION__BATCH_SIZE": "77"}


def test_what_was_started_ends_with_the_process() -> None:
    host, _, port = told("tell(where(bridge.connect()))").removeprefix("sc://").partition(":")

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)


def test_a_session_of_somebody_else_is_neither_stopped_nor_reconfigured() -> None:
    code = """
        import atexit
        from pyspark.sql import SparkSession
        server, there = serve()
        mine = SparkSession.builder.remote(there).getOrCreate()
        mine.sql("SELECT 1 AS one").createTempView("x")
        before = dict(mine.conf.getAll)

        @atexit.register  # the first that is registered runs last
        def after_all():
            tell([mine.is_stopped, views])

        assert bridge.connect() is mine
        assert bridge.load_table(mine.range(3)).num_rows == 3
        assert bridge.load_table("x").num_rows == 1
        assert dict(mine.conf.getAll) == before
        bridge.connect("sail")
        views = [view.name for view in mine.catalog.listTables()]
    """

    assert told(code) == [False, ["x"]]


def test_tables_keep_their_names_in_a_new_process(tmp_path: Path) -> None:
    warehouse = tmp_path / "my warehouse"
    # made here, since Sail itself writes beside a location that holds a space
    (warehouse / "main/demo").mkdir(parents=True)
    names = ["plain", "a b", "50%", "x#y", "a'b", "u+0020", "a/b", "😀"]
    write = f"""
        spark = bridge.connect()
        for rows, name in enumerate({names!r}):
            spark.range(rows + 1).write.format("delta").saveAsTable(f"main.demo.`{{name}}`")
        spark.range(7).write.format("delta").saveAsTable("in_default")
        tell(sorted(table.name for table in spark.catalog.listTables("demo")))
    """
    read = f"""
        counts = {{name: bridge.load_table(f"main.demo.`{{name}}`").num_rows for name in {names!r}}}
        counts["in_default"] = bridge.load_table("in_default").num_rows
        spark = bridge.connect()
        spark.range(5).write.format("delta").mode("append").saveAsTable("main.demo.`a b`")
        counts["more"] = bridge.load_table("demo.`a b`").num_rows
        tell(counts)
    """

    assert told(write, BRIDGE_WAREHOUSE=str(warehouse)) == sorted(names)
    # Sail writes a table of this name into two folders; one that another engine made has its name.
    shutil.copytree(warehouse / "main/demo/plain", warehouse / "main/demo/é")
    names[0] = "é"
    read = read.replace("'plain'", "'é'")
    assert told(read, BRIDGE_WAREHOUSE=str(warehouse)) == {
        **{name: rows + 1 for rows, name in enumerate(names)}, "in_default": 7, "more": 7,
    }  # fmt: skip
    assert told(read, BRIDGE_WAREHOUSE=str(warehouse))["more"] == 12
    assert not [path.name for path in Path.cwd().iterdir() if path.name.startswith(("spark-warehouse", "in_default"))]


def test_a_table_that_cannot_be_read_does_not_take_the_others_away(tmp_path: Path) -> None:
    (tmp_path / "main/demo/broken/_delta_log").mkdir(parents=True)
    code = """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            spark = bridge.connect()
        tell([str(warning.message) for warning in caught if warning.category is RuntimeWarning])
    """

    (warning,) = told(code, BRIDGE_WAREHOUSE=str(tmp_path))

    assert warning.startswith(f"{tmp_path}/main/demo/broken could not be registered as `main`.`demo`.`broken`: ")


def test_a_warehouse_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BRIDGE_WAREHOUSE", str(tmp_path / "file/warehouse"))

    with pytest.raises(
        EngineUnavailableError, match=r"file/warehouse cannot be made: Not a directory\.\n  Set BRIDGE_WAREHOUSE to a"
    ):
        bridge.connect("sail")


def test_a_classic_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        EngineUnavailableError, match=r"the Spark session is a classic one; .*\n  Name an engine: bridge"
    ):
        attach(object(), load_settings())  # type: ignore[arg-type]

    # A JVM would take seconds: this is all that is looked at.
    code = """
        import pyspark.sql.session
        from types import SimpleNamespace
        classic = SimpleNamespace(_sc=SimpleNamespace(_jsc=object()))
        pyspark.sql.session.SparkSession._instantiatedSession = classic
        try:
            bridge.connect()
        except bridge.EngineUnavailableError as exc:
            tell(str(exc))
    """
    assert told(code).startswith("the Spark session is a classic one; bridge reads through Spark Connect.\n")


@pytest.mark.parametrize("remote", ["yarn", "sc:/host", "spark://host:7077"])
def test_a_wrong_spark_remote_is_told(remote: str) -> None:
    code = """
        try:
            bridge.connect()
        except bridge.ConfigError as exc:
            tell(str(exc))
    """

    assert told(code, SPARK_REMOTE=remote) == (
        f"SPARK_REMOTE is {remote!r}; give local[*], local-cluster[N,cores,MB] or sc://host:port."
    )


def test_a_wrong_remote_or_profile_is_told() -> None:
    with pytest.raises(ConfigError, match="remote is not of a known form; give one of sail, databricks"):
        bridge.connect("yarn")
    with pytest.raises(ConfigError, match=r'There is no profile "claster"\. Did you mean "cluster"\?'):
        bridge.connect(profile="claster")


DATABRICKS = """
calls = []

class Client:
    is_closed = False

class Conf:
    def get(self, key, default=None):
        return "UTC"

class Session:
    client = Client()
    conf = Conf()

class Builder:
    def __init__(self, made=()):
        self.made = made
    def profile(self, name):
        return Builder((*self.made, ["profile", name]))
    def getOrCreate(self):
        calls.append([*self.made, ["getOrCreate"]])
        if any(call == ["profile", "broken"] for call in self.made):
            raise Exception("no such profile: broken\\nsecond line")
        return Session()

class DatabricksSession:
    builder = Builder()
"""


@pytest.fixture
def databricks(tmp_path: Path) -> dict[str, str]:
    """An environment with a stand-in for databricks-connect, which needs a workspace; its builder records calls."""
    package = tmp_path / "site/databricks/connect"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(DATABRICKS)
    (tmp_path / "home").mkdir()
    paths = [str(tmp_path / "site"), str(Path(bridge.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HOME": str(tmp_path / "home")}


CALLS = """
from databricks.connect import calls, Session
"""


def test_databricks_is_found_by_its_settings(databricks: dict[str, str]) -> None:
    code = CALLS + textwrap.dedent("""
        first = bridge.connect()
        assert isinstance(first, Session)
        assert bridge.connect() is first
        assert bridge.connect("databricks") is first
        tell(calls)
    """)

    for variable in ("DATABRICKS_HOST", "DATABRICKS_CONFIG_PROFILE", "DATABRICKS_RUNTIME_VERSION"):
        assert told(code, **databricks, **{variable: "x"}) == [[["getOrCreate"]]]
    (Path(databricks["HOME"]) / ".databrickscfg").write_text("[DEFAULT]\n")
    assert told(code, **databricks) == [[["getOrCreate"]]]


def test_a_databricks_profile_is_passed_on(databricks: dict[str, str]) -> None:
    code = CALLS + textwrap.dedent("""
        first = bridge.connect("databricks://prod")
        assert bridge.connect("databricks://prod") is first
        assert bridge.connect("databricks://test") is not first
        tell(calls)
    """)

    assert told(code, **databricks) == [
        [["profile", "prod"], ["getOrCreate"]], [["profile", "test"], ["getOrCreate"]],
    ]  # fmt: skip


def test_spark_remote_wins_over_databricks_and_databricks_over_the_embedded_engine(databricks: dict[str, str]) -> None:
    code = """
        server, there = serve()
        os.environ["SPARK_REMOTE"] = there
        tell(where(bridge.connect()) == there)
    """

    assert told(code, **databricks, DATABRICKS_HOST="x") is True
    assert told("tell(where(bridge.connect())[:5])", **databricks) == "sc://"


def test_a_workspace_that_cannot_be_reached_is_told(databricks: dict[str, str]) -> None:
    code = """
        try:
            bridge.connect("databricks://broken")
        except bridge.EngineUnavailableError as exc:
            tell(str(exc))
    """

    assert told(code, **databricks) == (
        "Databricks could not be reached: no such profile: broken\n"
        "  Set DATABRICKS_HOST and credentials, or DATABRICKS_CONFIG_PROFILE; name a cluster with "
        "DATABRICKS_CLUSTER_ID or serverless compute with DATABRICKS_SERVERLESS_COMPUTE_ID=auto."
    )


def test_without_databricks_connect_its_settings_do_not_count_and_its_name_is_an_error() -> None:
    if "databricks.connect" in sys.modules:
        pytest.skip("databricks-connect is installed")

    for remote in ("databricks", "databricks://prod"):
        with pytest.raises(
            MissingDependencyError,
            match=rf'remote "{remote}" needs databricks-connect, which is not installed\.\n  pip install "spark-',
        ):
            bridge.connect(remote)
    assert told("tell(bridge.connect().range(2).count())", DATABRICKS_HOST="x") == 2


def test_ctrl_c_stops_a_collect_and_leaves_the_engine_usable(tmp_path: Path) -> None:
    told = run(
        """
        import os, signal, threading, time
        import bridge

        spark = bridge.connect("sail")
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            bridge.load_table(spark.range(10**10).filter("id % 2 = 0"), route="collect", max_bytes="100TB")
        except KeyboardInterrupt:
            print("interrupted")
        print(bridge.load_table(spark.range(3)).num_rows)
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            bridge.load_table(spark.range(10**10).filter("id % 2 = 0"), route="export")
        except KeyboardInterrupt:
            print("interrupted")
        print(bridge.load_table(spark.range(3)).num_rows)
        """,
        XDG_DATA_HOME=str(tmp_path),
    )

    assert told.stdout.split() == ["interrupted", "3", "interrupted", "3"]
    assert not list(tmp_path.rglob("*.parquet"))


def test_the_settings_of_a_profile_hold_for_what_is_loaded_through_its_session(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("remote: sail\nmax_bytes: 1KiB\nvolume: here\n")
    told = run(
        """
        import bridge

        spark = bridge.connect(profile="small")
        plan = bridge.plan_table(spark.range(1000))
        print(plan.max_bytes, plan.volume.endswith("here"), bridge.plan_table(spark.range(3), max_bytes=5).max_bytes)
        """,
        XDG_DATA_HOME=str(tmp_path),
        BRIDGE_CONF=str(tmp_path),
    )

    assert told.stdout.split() == ["1024", "True", "5"]


def test_an_embedded_server_that_died_is_started_again(tmp_path: Path) -> None:
    done = run(
        """
        import warnings
        import bridge, psutil

        spark = bridge.connect()
        spark.range(3).write.format("delta").saveAsTable("kept")
        children = psutil.Process().children(recursive=True)
        server = next(child for child in children if "pysail" in child.cmdline() and child.name().startswith("python"))
        server.kill()
        server.wait()
        try:
            bridge.load_table("kept", spark=spark)
        except bridge.EngineUnavailableError as exc:
            print("gone" in str(exc))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(bridge.load_table("kept").num_rows, bridge.connect() is not spark)
        print(*[str(warning.message)[:45] for warning in caught if warning.category is RuntimeWarning])
        """,
        XDG_DATA_HOME=str(tmp_path),
    )

    assert done.stdout.splitlines() == ["True", "3 True", "the Spark session on embedded had ended, and "]


@pytest.mark.parametrize("remote", ["sc://localhost:port", "sc://localhost:1/;token=a;SECRET"])
def test_an_address_that_is_none_is_told_without_its_token(remote: str) -> None:
    with pytest.raises(ConfigError, match=r"is no address of a Spark Connect server\.\n  Give sc://") as caught:
        bridge.connect(remote)
    assert "SECRET" not in str(caught.value)


def test_a_process_whose_server_was_killed_ends_soon(tmp_path: Path) -> None:
    """Else pyspark tries for ten minutes to release what ran there, and `run` fails after 100 s."""
    run(
        """
        import psutil

        spark = bridge.connect()
        children = psutil.Process().children(recursive=True)
        server = next(child for child in children if "pysail" in child.cmdline() and child.name().startswith("python"))
        spark.sql("select 1").collect()
        spark.range(3).count()
        server.kill()
        """,
        XDG_DATA_HOME=str(tmp_path),
    )
