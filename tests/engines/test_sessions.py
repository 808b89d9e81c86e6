"""Sessions that end on the server, servers that go away, and what is asked of them meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from pyspark.sql.connect.client import SparkConnectClient

import bridge
from bridge.errors import EngineError, EngineSilentError, EngineUnavailableError, SessionLostError, SourceError
from bridge.spark.channel import open_session
from bridge.spark.engines import apache as apache_engine
from bridge.spark.engines.process import free_port, serve
from bridge.spark.operation import run_watched
from tests.cluster import SHORT_LIVED
from tests.processes import eventually

ROWS = 400_000
_REPLACED = "had ended, and another was opened in its place"


class Server:
    """A Spark Connect server of our own, which can be killed and started again on its port."""

    def __init__(self, start: Callable[[float], Any], *, needs_java: bool = False) -> None:
        self.needs_java = needs_java
        self._start = start
        self._running: Any = None
        self._forgets = True

    @property
    def remote(self) -> str:
        return self._running.remote

    def start(self, *, session_timeout_s: float | None = None) -> None:
        """Start it anew; sessions that ask nothing for so long are forgotten."""
        self.stop()
        self._forgets = session_timeout_s is not None
        self._running = self._start(session_timeout_s or 3600)

    def ensure(self) -> None:
        """See that it runs and forgets no session."""
        if self._forgets:
            self.start()

    def kill(self) -> None:
        """Kill the server's own process, so that it has no time for farewells, and wait until the port is free."""
        self.program().kill()
        self._running.stop()

    def program(self) -> psutil.Process:
        """Return the server's own process."""
        processes = psutil.Process(self._running.process.pid).children(recursive=True)
        return next(each for each in processes if each.name() == "java" or "pysail" in each.cmdline())

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()


def _sail(scratch: Path) -> Iterator[Server]:
    port = free_port()

    def start(session_timeout_s: float) -> Any:
        return serve(
            [sys.executable, "-m", "pysail", "spark", "server", "--ip", "127.0.0.1", "--port", str(port)],
            name="Sail",
            environment={
                **os.environ, "RUST_LOG": "error", "SAIL_SPARK__SESSION_TIMEOUT_SECS": f"{session_timeout_s:.0f}",
            },
            port=port, remote=f"sc://127.0.0.1:{port}", scratch=scratch / f"s{time.monotonic_ns()}", timeout_s=30,
        )  # fmt: skip

    server = Server(start)
    yield server
    server.stop()


def _apache(scratch: Path) -> Iterator[Server]:
    port = free_port()

    def start(session_timeout_s: float) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(apache_engine, "free_port", lambda: port)
            patch.setattr(apache_engine.secrets, "token_urlsafe", lambda length: "the-same")
            return apache_engine.start_server(
                "local[2]",
                spark_jars=os.environ["BRIDGE_SPARK_JARS"],
                extra_conf={
                    "spark.connect.session.manager.defaultSessionTimeout": f"{session_timeout_s:.0f}s",
                    "spark.connect.session.manager.maintenanceInterval": "1s",
                    "spark.connect.progress.reportInterval": "200ms",
                    "spark.driver.extraJavaOptions": SHORT_LIVED,
                    "spark.driver.memory": "2g",
                },
            )

    server = Server(start, needs_java=True)
    yield server
    server.stop()


@pytest.fixture(
    scope="module",
    params=["sail", pytest.param("apache", marks=[pytest.mark.apache, pytest.mark.delta_jvm])],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Sail and Apache Spark, as servers at an sc:// address."""
    scratch = tmp_path_factory.mktemp(request.param)
    yield from {"sail": _sail, "apache": _apache}[request.param](scratch)


@pytest.fixture
def sail_server(tmp_path: Path) -> Iterator[Server]:
    yield from _sail(tmp_path)


@pytest.fixture(autouse=True)
def closed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget the sessions of a test, so that the next finds none that is active."""
    from bridge.spark import connect

    before = set(connect._opened)
    yield
    for key in set(connect._opened) - before:
        spark = connect._opened.pop(key).connection.spark
        spark.client.close()
        spark.stop()


@pytest.fixture
def remote(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Give the session of the server's address, which is where `bridge` reads by default."""

    def connect() -> Any:
        monkeypatch.setenv("BRIDGE_REMOTE", server.remote)
        return bridge.connect()

    return connect


def _save(spark: Any, path: Path) -> None:
    spark.range(0, ROWS, 1, 8).selectExpr("id", "repeat(md5(CAST(id AS STRING)), 6) AS text").write.format(
        "delta"
    ).save(str(path))


# --- expired while idle


def test_a_session_that_expired_is_replaced_if_we_opened_it(
    server: Server, remote: Callable[[], Any], tmp_path: Path
) -> None:
    # a JVM that has just been started may take seconds for one answer, which is no time to forget a session
    timeout_s = 10 if server.needs_java else 2
    server.start(session_timeout_s=timeout_s)
    theirs = open_session(server.remote)
    theirs.range(10).write.format("delta").save(str(tmp_path / "table"))
    frame = theirs.range(3)
    second = bridge.connect(_as_second(server))
    spark = remote()
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    bridge.load_table(tmp_path / "table")
    time.sleep(timeout_s + 2.5)

    for source, session in ((frame, None), (str(tmp_path / "table"), theirs)):
        with pytest.raises(SessionLostError, match=r"the Spark session has ended: .*\n  Open another, spark = bridge"):
            bridge.load_table(source, spark=session)
    with pytest.warns(RuntimeWarning, match=_REPLACED):
        table = bridge.load_table(tmp_path / "table")
    assert table.num_rows == 10
    assert table.receipt["session_time_zone"] == "Asia/Kolkata"
    assert bridge.connect().session_id != spark.session_id
    with pytest.raises(SessionLostError, match="this Spark session was stopped, or has ended on the server"):
        bridge.load_table(tmp_path / "table", spark=spark)
    with pytest.warns(RuntimeWarning, match=_REPLACED):
        again = bridge.connect(_as_second(server))
    assert again.session_id != second.session_id
    assert again.range(3).count() == 3
    theirs.client.close()


def _as_second(server: Server) -> str:
    return server.remote + (";" if "/;" in server.remote else "/;") + "user_id=second"


# --- a server that goes away


@contextmanager
def _once(monkeypatch: pytest.MonkeyPatch, module: str, act: Callable[[], None]) -> Iterator[list[int]]:
    """Act once while rows stream into `module`, after the second batch; give how often rows were asked for."""
    from bridge.spark import read

    asked: list[int] = []

    def stream(*arguments: Any) -> Any:
        asked.append(1)
        for number, batch in enumerate(read.stream_batches(*arguments)):
            yield batch
            if number == 1 and len(asked) == 1:
                act()

    monkeypatch.setattr(f"{module}.stream_batches", stream)
    yield asked


def test_a_collect_is_read_again_when_the_server_comes_back(
    server: Server, remote: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.ensure()
    spark = remote()
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    _save(spark, tmp_path / "table")
    starter = threading.Thread(target=server.start)

    def lose() -> None:
        spark.range(ROWS, ROWS + 5).selectExpr("id", "'later' AS text").write.format("delta").mode("append").save(
            str(tmp_path / "table")
        )
        server.kill()
        starter.start()

    # of a server elsewhere Sail does not tell the newest version, so that it cannot be held fast
    version = None if server.needs_java else 0
    with _once(monkeypatch, "bridge.tables.fetch", lose) as asked, pytest.warns(RuntimeWarning, match=_REPLACED):
        table = bridge.load_table(tmp_path / "table", version=version, route="collect", max_bytes="2GiB")
    starter.join()

    assert len(asked) == 2
    assert (table.num_rows, table.version) == (ROWS, 0)
    assert sorted(table.to_arrow()["id"].to_pylist()) == list(range(ROWS))
    assert table.receipt["session_time_zone"] == "Asia/Kolkata"
    newest, asked_for = "the newest version when the plan was made", "the version that was asked for"
    assert table.plan.pin_reason == table.receipt["version_reason"] == (newest if server.needs_java else asked_for)
    assert bridge.connect().session_id != spark.session_id


def test_an_export_is_written_again_in_another_session(
    server: Server, remote: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.ensure()
    spark = remote()
    _save(spark, tmp_path / "table")
    exports = tmp_path / "exports"

    def end_the_session() -> None:
        """End it as the server itself does: to start a JVM again takes too long for a test."""
        eventually(lambda: list(exports.rglob("*.parquet")), within_s=60)
        other = SparkConnectClient(f"{server.remote};session_id={spark.session_id}", user_id=spark.client._user_id)
        other.release_session()
        other.close()

    def lose() -> None:
        server.kill()
        server.start()

    # Spark's own writing is seen in the folder, ours in the stream
    watcher = threading.Thread(target=end_the_session)
    if server.needs_java:
        watcher.start()
    with _once(monkeypatch, "bridge.spark.write", lose), pytest.warns(RuntimeWarning, match=_REPLACED):
        table = bridge.export_table(tmp_path / "table", exports)

    assert table.num_rows == ROWS == sum(pq.read_metadata(file).num_rows for file in table.files)
    folders = [folder.name for folder in Path(table.path).parent.iterdir() if folder.is_dir()]
    assert [name for name in folders if not name.startswith("_")] == [Path(table.path).name]


def _embedded(spark: Any) -> psutil.Process:
    """Return the process of the embedded engine that serves a session."""
    port = spark.client._builder.endpoint.rpartition(":")[2]
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if each.name().startswith("python") and each.cmdline()[-1:] == [port]:
                return each
    raise AssertionError("no embedded engine runs")


def test_an_embedded_engine_that_dies_is_started_again_and_read_at_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDGE_WAREHOUSE", str(tmp_path))
    monkeypatch.setenv("BRIDGE_REMOTE", "sail")
    (tmp_path / "main/demo").mkdir(parents=True)
    spark = bridge.connect()
    spark.catalog.setCurrentDatabase("demo")
    spark.range(0, ROWS, 1, 8).selectExpr("id", "uuid() AS text").write.format("delta").saveAsTable("numbers")
    spark.range(3).write.format("delta").saveAsTable("main.default.numbers")
    program = _embedded(spark)

    def lose() -> None:
        spark.range(5).selectExpr("id", "'later' AS text").write.format("delta").mode("append").saveAsTable("numbers")
        program.kill()

    with _once(monkeypatch, "bridge.tables.fetch", lose) as asked, pytest.warns(RuntimeWarning, match=_REPLACED):
        table = bridge.load_table("numbers", route="collect", max_bytes="2GiB")

    assert len(asked) == 2
    assert (table.num_rows, table.version, table.plan.source) == (ROWS, 0, "main.demo.numbers")
    assert table.plan.pin_reason == table.receipt["version_reason"] == "the newest version when the plan was made"
    assert bridge.load_table("numbers").num_rows == ROWS + 5


def test_a_table_made_anew_meanwhile_is_not_taken_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDGE_WAREHOUSE", str(tmp_path / "warehouse"))
    monkeypatch.setenv("BRIDGE_REMOTE", "sail")
    spark = bridge.connect()
    path = tmp_path / "table"
    _save(spark, path)
    program = _embedded(spark)

    def lose() -> None:
        shutil.rmtree(path)
        spark.range(5).selectExpr("id", "'other' AS text").write.format("delta").save(str(path))
        program.kill()

    with (
        _once(monkeypatch, "bridge.tables.fetch", lose),
        pytest.raises(SourceError, match=rf"^{path} was made anew while the session was being replaced: version 0 is"),
        pytest.warns(RuntimeWarning, match=_REPLACED),
    ):
        bridge.load_table(path, route="collect", max_bytes="2GiB")


def test_a_server_that_does_not_come_back_is_given_up(
    sail_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sail_server.start()
    monkeypatch.setenv("BRIDGE_REMOTE", sail_server.remote)
    monkeypatch.setattr("bridge.tables.replay._PATIENCE_S", 1.0)
    _save(bridge.connect(), tmp_path / "table")
    began = time.monotonic()

    with (
        _once(monkeypatch, "bridge.tables.fetch", sail_server.kill),
        pytest.raises(
            EngineUnavailableError,
            match=rf"^{tmp_path}/table: the server went away and was not back after 1 s: no Spark Connect server "
            rf"answers at {sail_server.remote}: Connection refused",
        ),
    ):
        bridge.load_table(tmp_path / "table", route="collect", max_bytes="2GiB")

    assert time.monotonic() - began < 30


def test_a_sail_that_was_started_again_is_not_taken_for_the_same(
    sail_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sail_server.start()
    monkeypatch.setenv("BRIDGE_REMOTE", sail_server.remote)
    spark = bridge.connect()
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    bridge.connect()
    sail_server.kill()
    sail_server.start()

    assert spark.conf.get("spark.sql.session.timeZone") != "Asia/Kolkata"
    with pytest.warns(RuntimeWarning, match=_REPLACED):
        assert bridge.connect().conf.get("spark.sql.session.timeZone") == "Asia/Kolkata"


def test_what_is_only_in_the_session_is_not_read_again(sail_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sail_server.start()
    monkeypatch.setenv("BRIDGE_REMOTE", sail_server.remote)

    def lose() -> None:
        sail_server.kill()
        sail_server.start()

    for of in ("mine", "DataFrame"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of the session that the turn before lost
            frame = bridge.connect().range(0, 10**7).selectExpr("id", "id * 2 AS twice")
        frame.createTempView("mine")
        with (
            _once(monkeypatch, "bridge.tables.fetch", lose) as asked,
            pytest.raises(EngineError, match=rf"^{of}: "),
        ):
            bridge.load_table("mine" if of == "mine" else frame, route="collect", max_bytes="2GiB")
        assert len(asked) == 1


# --- a client that is newer than the server


@pytest.mark.parametrize("client", ["4.9.1", "9.1.0"])
def test_an_apache_server_older_than_the_client_is_told(
    server: Server, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sail is not: it has no version of Spark but the one that it stands for."""
    server.ensure()
    monkeypatch.setattr("pyspark.__version__", client)
    if not server.needs_java:
        assert bridge.connect(server.remote).range(3).count() == 3
        return
    theirs = open_session(server.remote).version
    advice = (
        rf"pip install \"pyspark\[connect\]=={theirs.rpartition('.')[0]}\.\*\", or upgrade the server to Spark {client}"
    )

    if client.startswith("4"):
        with pytest.warns(
            RuntimeWarning, match=rf"is Spark {theirs}, older than the client, pyspark {client}: .*{advice}"
        ):
            assert bridge.connect(server.remote).range(3).count() == 3
        return
    with pytest.raises(
        EngineUnavailableError, match=rf"is Spark {theirs}, older than the client, pyspark {client}\.\n  {advice}"
    ) as caught:
        bridge.connect(server.remote)

    assert "the-same" not in str(caught.value)  # the token


# --- operations


def test_ctrl_c_ends_an_operation_on_the_server(server: Server, tmp_path: Path) -> None:
    server.ensure()
    spark = open_session(server.remote)
    folder = tmp_path / "written"
    endless = spark.range(0, 10**12, 1, 2_000).selectExpr("id", "rand(1) AS x")
    # Sail is never asked to write Parquet
    call = partial(endless.write.parquet, str(folder)) if server.needs_java else endless.groupBy().max("x").collect

    def interrupt() -> None:
        if server.needs_java:
            eventually(lambda: _files(folder), within_s=60)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        run_watched(spark, call, "written")
    interrupter.join()

    left = _files(folder)
    time.sleep(1.5)
    assert _files(folder) == left
    assert spark.interruptAll() == []
    assert spark.range(3).count() == 3
    spark.client.close()


def _files(folder: Path) -> dict[str, int]:
    """Return the size of what is in a folder, whose files may go while it is looked at."""
    sizes = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                sizes[str(path)] = path.stat().st_size
    return sizes


def test_progress_is_told_and_the_persons_own_handlers_stay(server: Server, tmp_path: Path) -> None:
    server.ensure()
    spark: Any = open_session(server.remote)
    theirs: list[Any] = []

    def hear(**told: Any) -> None:
        theirs.append(told)

    spark.registerProgressHandler(hear)
    ours: list[tuple[int, int, int]] = []
    beside: list[tuple[int, int, int]] = []
    frame = spark.range(0, 8 * 10**6, 1, 16).selectExpr("id", "rand(1) AS x")
    frame.write.parquet(str(tmp_path / "read"))
    reading = spark.read.parquet(str(tmp_path / "read")).selectExpr("sum(x)")
    other = threading.Thread(
        target=run_watched,
        args=(spark, reading.collect, "beside"),
        kwargs={"on_progress": lambda *told: beside.append(told)},
    )

    other.start()
    written = run_watched(
        spark, lambda: frame.write.parquet(str(tmp_path / "written")), "t", on_progress=lambda *told: ours.append(told)
    )
    other.join()

    assert written is None
    assert spark.client._progress_handlers == [hear]
    assert theirs
    if server.needs_java:
        assert all(0 <= done <= total for done, total, _ in ours)
        assert ours[-1][1] == 16
        assert beside[-1][2] > 0
        assert max(num_bytes for _, _, num_bytes in ours) == 0, "a range reads nothing; what it heard is another's"
    spark.client.close()


def test_what_the_server_says_is_raised_as_an_error_about_the_subject(server: Server) -> None:
    server.ensure()
    spark = open_session(server.remote)
    frame = spark.sql("SELECT raise_error('boom')")

    with pytest.raises(EngineError, match=r"^main\.ml\.t: .*boom"):
        run_watched(spark, frame.collect, "main.ml.t")
    with pytest.raises(ZeroDivisionError):
        run_watched(spark, lambda: 1 // 0, "main.ml.t")
    spark.client.close()


def test_a_server_that_falls_silent_ends_the_wait(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.ensure()
    monkeypatch.setattr("bridge.spark.operation.SILENCE_S", 0.5)
    monkeypatch.setattr("bridge.spark.operation.PROBE_TIMEOUT_S", 1.0)
    spark = open_session(server.remote)
    endless = spark.range(0, 10**12, 1, 20_000).filter("id % 2 = 0").groupBy().max("id")
    program = server.program()
    threading.Timer(1.0, program.suspend).start()
    began = time.monotonic()

    try:
        with pytest.raises(EngineSilentError, match=r"^t: the server has stopped answering"):
            run_watched(spark, endless.collect, "t")
        assert time.monotonic() - began < 10
    finally:
        program.resume()
    # the interrupt has waited for the server, so that nothing runs on
    eventually(lambda: not spark.interruptAll(), within_s=60)
    spark.client.close()
