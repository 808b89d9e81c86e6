from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridge.errors import EngineUnavailableError, MissingDependencyError
from bridge.spark.engines.process import SparkProcess, find_java, free_port, spark_environment, spark_home


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SparkProcess]]:
    started: list[SparkProcess] = []

    def start(*command: str) -> SparkProcess:
        scratch = tmp_path / f"scratch-{len(started)}"
        scratch.mkdir()
        process = SparkProcess.start(
            command, name="a stand-in", environment=os.environ, log=tmp_path / "log", scratch=scratch
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.stop(timeout_s=1)


def wait_until(condition: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def make_java(folder: Path, *lines: str) -> Path:
    java = folder / "java"
    folder.mkdir(parents=True, exist_ok=True)
    java.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    java.chmod(0o755)
    return java


def make_pyspark(folder: Path, *, programs: tuple[str, ...]) -> Path:
    home = folder / "pyspark"
    (home / "bin").mkdir(parents=True)
    (home / "__init__.py").touch()
    for program in programs:
        (home / "bin" / program).touch()
    return home


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "on-path"))


# Programs


def test_program_that_ends_early_shows_its_log(start: Callable[..., SparkProcess], tmp_path: Path) -> None:
    process = start("/bin/sh", "-c", "echo the reason; exit 3")
    with pytest.raises(EngineUnavailableError) as caught:
        process.wait_for_port("127.0.0.1", free_port(), timeout_s=30)
    assert str(caught.value) == (
        f"a stand-in ended with status 3 before it was ready.\n  | the reason\n  Log: {tmp_path / 'log'}"
    )


def test_port_of_another_program_is_not_taken_for_ours(start: Callable[..., SparkProcess]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        process = start("/bin/sh", "-c", "exit 4")
        wait_until(lambda: not process.is_running)
        with pytest.raises(EngineUnavailableError, match="ended with status 4"):
            process.wait_for_port("127.0.0.1", other.getsockname()[1], timeout_s=30)


def test_program_that_never_listens(start: Callable[..., SparkProcess]) -> None:
    process = start("sleep", "60")
    with pytest.raises(EngineUnavailableError, match=r"a stand-in was not ready on 127\.0\.0\.1:\d+ after 0\.3 s\."):
        process.wait_for_port("127.0.0.1", free_port(), timeout_s=0.3)
    assert process.is_running


def test_program_that_listens(start: Callable[..., SparkProcess]) -> None:
    port = free_port()
    process = start(sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port))
    process.wait_for_port("127.0.0.1", port, timeout_s=30)


def test_stop_ends_the_program_and_its_children(start: Callable[..., SparkProcess]) -> None:
    process = start("/bin/sh", "-c", "sleep 60 & sleep 60")
    assert os.getsid(process.pid) == process.pid  # Ctrl-C does not reach it
    process.stop()
    assert not process.is_running
    assert not process.scratch.exists()
    wait_until(lambda: not group_exists(process.pid))
    process.stop()


def test_stop_kills_what_does_not_heed(start: Callable[..., SparkProcess], tmp_path: Path) -> None:
    process = start("/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done")
    wait_until(lambda: "ready" in (tmp_path / "log").read_text())
    began = time.monotonic()
    process.stop(timeout_s=0.3)
    assert time.monotonic() - began < 5
    wait_until(lambda: not group_exists(process.pid))


PARENT = """
import os, sys, time
from pathlib import Path
from bridge.spark.engines.process import SparkProcess
log, scratch = Path(sys.argv[1]), Path(sys.argv[2])
command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
process = SparkProcess.start(command, name="a stand-in", environment=os.environ, log=log, scratch=scratch)
while not log.read_text().endswith("\\n"):
    time.sleep(0.02)
"""


def test_program_dies_with_a_killed_parent(tmp_path: Path) -> None:
    log, scratch = tmp_path / "log", tmp_path / "scratch"
    scratch.mkdir()
    code = PARENT + "print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, log, scratch], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        program = int(log.read_text())
        assert exists(program)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not exists(program))
    wait_until(lambda: not scratch.exists())


def test_fork_of_the_parent_neither_stops_the_program_nor_keeps_it(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = PARENT + (
        "fork = os.fork()\n"
        "if fork == 0:\n"
        "    process.stop(); os.write(1, b'fork '); time.sleep(60); os._exit(0)\n"
        "time.sleep(0.5); running = process.is_running; began = time.monotonic(); process.stop()\n"
        "os.kill(fork, 9); os.waitpid(fork, 0)\n"
        "print(running, process.is_running, time.monotonic() - began < 5)"
    )
    parent = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "log", scratch], capture_output=True, text=True, check=True
    )
    assert parent.stdout == "fork True False True\n"


# Java


@pytest.mark.usefixtures("no_java")
def test_no_java() -> None:
    with pytest.raises(EngineUnavailableError) as caught:
        find_java()
    assert str(caught.value) == (
        "Apache Spark needs Java 17 or newer; no java was found in JAVA_HOME or PATH. Install one (Debian: apt install "
        'openjdk-17-jre-headless), or use the embedded engine: bridge.connect("sail").'
    )


@pytest.mark.usefixtures("no_java")
@pytest.mark.parametrize("version", ["1.8.0_392", "11.0.2", "16-ea"])
def test_java_too_old(tmp_path: Path, version: str) -> None:
    java = make_java(tmp_path / "on-path", f"echo 'openjdk version \"{version}\" 2019-01-15' >&2")
    message = f"needs Java 17 or newer; {java} is version {version}. Install one"
    with pytest.raises(EngineUnavailableError, match=re.escape(message)):
        find_java()


@pytest.mark.usefixtures("no_java")
def test_java_that_is_none(tmp_path: Path) -> None:
    java = make_java(tmp_path / "on-path", "echo 'Unable to locate a Java Runtime.' >&2; exit 1")
    with pytest.raises(EngineUnavailableError, match=re.escape(f"{java} -version named no version")):
        find_java()
    java.write_text("#!/nowhere\n")
    with pytest.raises(EngineUnavailableError, match=re.escape(f"{java} could not be run")):
        find_java()


@pytest.mark.usefixtures("no_java")
def test_java_home_goes_before_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prints_21 = ("echo 'Picked up JAVA_TOOL_OPTIONS: -Xshare:auto' >&2", "echo 'openjdk version \"21\" 2023' >&2")
    on_path = make_java(tmp_path / "on-path", *prints_21)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert find_java() == (on_path, "21")
    in_home = make_java(tmp_path / "home" / "bin", *prints_21)
    assert find_java() == (in_home, "21")


# pyspark


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    monkeypatch.setattr(sys, "path", [str(site)])
    return site


def test_pyspark_missing(site: Path) -> None:
    with pytest.raises(
        MissingDependencyError, match=r"pyspark is not installed\. .*pip install \"spark-training-bridge\[spark\]\""
    ):
        spark_home()


def test_pyspark_client_alone(site: Path) -> None:
    home = make_pyspark(site, programs=())
    message = (
        f"Apache Spark needs the full pyspark package; the pyspark in {home} is the client alone. "
        'Install it: pip install "spark-training-bridge[spark]"'
    )
    with pytest.raises(MissingDependencyError, match=re.escape(message)):
        spark_home()


@pytest.mark.usefixtures("no_java")
def test_environment_of_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, site: Path) -> None:
    home = make_pyspark(site, programs=("spark-submit",))
    make_java(tmp_path / "on-path", "echo 'openjdk version \"17.0.15\" 2025-04-15' >&2")
    for name in (
        *("SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_CONNECT_AUTHENTICATE_TOKEN"),
        *("PYSPARK_DRIVER_PYTHON", "PYSPARK_SUBMIT_ARGS", "PYSPARK_PYTHON", "SPARK_HOME", "JAVA_HOME"),
    ):
        monkeypatch.setenv(name, "the caller's")
    monkeypatch.setenv("SPARK_CONF_DIR", "/etc/spark")
    environment = spark_environment()
    assert "the caller's" not in environment.values()
    assert environment["SPARK_HOME"] == str(home)
    assert environment["PYSPARK_PYTHON"] == sys.executable
    assert environment["SPARK_CONF_DIR"] == "/etc/spark"
