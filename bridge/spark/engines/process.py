"""Run a server as a child that never outlives us."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bridge.errors import EngineUnavailableError, MissingDependencyError

MIN_JAVA_VERSION = 17

# The caller's own Spark settings: with any of these a child would act as a client, or as the caller's driver.
_CALLERS_OWN = ("SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_", "SPARK_API_MODE", "PYSPARK_")

# The pipe on stdin tells the wrapper that we are done (a line) or dead (end of file); the kernel closes it even after
# SIGKILL. PR_SET_PDEATHSIG would not do: it fires when the thread that started the child ends. The last TERM reaches
# what the program left in its process group (executors), and the wrapper's own watcher.
_WRAPPER = """
grace_s=$1 scratch=$2; shift 2
exec 3<&0
"$@" </dev/null 3<&- &
program=$!
( read -r _ <&3; kill "$program"; sleep "$grace_s"; kill -KILL "$program" ) &
wait "$program"; status=$?
trap '' TERM
kill -TERM 0
rm -rf -- "$scratch"
exit "$status"
"""
_GRACE_S = 8


class SparkProcess:
    """A started program, with its log and a scratch folder that is removed when it ends.

    The program runs in a session of its own, so that Ctrl-C in a terminal or a notebook does not reach it. It is
    stopped by `stop`, by the end of this process, and by SIGKILL of this process.
    """

    def __init__(self, wrapper: subprocess.Popen[bytes], *, name: str, log: Path, scratch: Path) -> None:
        self.name = name
        self.log = log
        self.scratch = scratch
        self._wrapper = wrapper
        self._owner = os.getpid()

    @classmethod
    def start(
        cls, command: Sequence[str], *, name: str, environment: Mapping[str, str], log: Path, scratch: Path
    ) -> SparkProcess:
        """Start `command`; return at once.

        Args:
            command: The program and its arguments.
            name: What errors call it.
            environment: The whole environment of the child; `spark_environment` makes one.
            log: Gets stdout and stderr.
            scratch: A folder for the program alone, removed when it ends.
        """
        with log.open("ab") as output:
            wrapper = subprocess.Popen(
                ["/bin/sh", "-c", _WRAPPER, "sh", str(_GRACE_S), str(scratch), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        return cls(wrapper, name=name, log=log, scratch=scratch)

    @property
    def pid(self) -> int:
        """The wrapper's process id, which is also the id of the program's process group."""
        return self._wrapper.pid

    @property
    def is_running(self) -> bool:
        return self._wrapper.poll() is None

    def wait_for_port(self, host: str, port: int, timeout_s: float) -> None:
        """Return when something listens on `host:port` and the program is alive.

        Raises:
            EngineUnavailableError: The program ended first, or nothing listened within `timeout_s`. The message
                holds the last lines of the log. The program is not stopped.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            is_open = _is_open(host, port)
            # Asked after the port: one that another program holds must not pass for ours.
            if not self.is_running:
                raise EngineUnavailableError(
                    f"{self.name} ended with status {self._wrapper.returncode} before it was ready.\n{self._log_tail()}"
                )
            if is_open:
                return
            time.sleep(0.02)
        raise EngineUnavailableError(
            f"{self.name} was not ready on {host}:{port} after {timeout_s:g} s.\n{self._log_tail()}"
        )

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the program: ask, wait up to `timeout_s`, then kill its process group. Does nothing the second time.

        A process forked from the one that started the program does nothing here.
        """
        if os.getpid() != self._owner:
            return
        stdin = self._wrapper.stdin
        assert stdin is not None
        if not stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it has ended by itself
                # A line, because closing alone is not seen while a forked child holds a copy of the pipe.
                os.write(stdin.fileno(), b"\n")
            stdin.close()
        try:
            self._wrapper.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._wrapper.pid, signal.SIGKILL)
            self._wrapper.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _log_tail(self, max_lines: int = 20) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        # Stack frames would push the reason out of sight.
        telling = [line for line in lines if not re.match(r"\s+(at|\.\.\.) ", line)][-max_lines:]
        return "\n".join([*(f"  | {line}" for line in telling), f"  Log: {self.log}"])


@dataclass(frozen=True)
class ConnectServer:
    """A running Spark Connect server that we started."""

    remote: str = field(repr=False)  # may hold a token
    process: SparkProcess

    def stop(self) -> None:
        """End the server; its scratch folder and its log go with it."""
        self.process.stop()
        self.process.log.unlink(missing_ok=True)


def serve(
    command: Sequence[str],
    *,
    name: str,
    environment: Mapping[str, str],
    port: int,
    remote: str,
    scratch: Path,
    timeout_s: float,
) -> ConnectServer:
    """Start a server and return when it listens on `port` of 127.0.0.1.

    Its log goes into the temporary folder, where it stays if the start fails.

    Raises:
        EngineUnavailableError: It ended, or did not listen within `timeout_s`.
    """
    handle, log = tempfile.mkstemp(prefix="bridge-server-", suffix=".log")
    os.close(handle)
    process = SparkProcess.start(command, name=name, environment=environment, log=Path(log), scratch=scratch)
    try:
        process.wait_for_port("127.0.0.1", port, timeout_s)
    except BaseException:
        process.stop()
        raise
    return ConnectServer(remote, process)


def find_java() -> tuple[Path, str]:
    """Return the `java` that Spark will run, the one in JAVA_HOME, else the first in PATH, and its version."""
    home = os.environ.get("JAVA_HOME")
    found = (home and shutil.which("java", path=os.path.join(home, "bin"))) or shutil.which("java")
    if not found:
        raise EngineUnavailableError(_java_message("no java was found in JAVA_HOME or PATH"))
    try:
        answer = subprocess.run(
            [found, "-version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise EngineUnavailableError(_java_message(f"{found} could not be run")) from exc
    version = re.search(r'version "((?:1\.)?(\d+)[^"]*)"', answer)
    if version is None:
        raise EngineUnavailableError(_java_message(f"{found} -version named no version"))
    if int(version[2]) < MIN_JAVA_VERSION:
        raise EngineUnavailableError(_java_message(f"{found} is version {version[1]}"))
    return Path(found), version[1]


def _java_message(what_was_seen: str) -> str:
    return (
        f"Apache Spark needs Java {MIN_JAVA_VERSION} or newer; {what_was_seen}. Install one (Debian: apt install "
        'openjdk-17-jre-headless), or use the embedded engine: bridge.connect("sail").'
    )


def spark_home() -> Path:
    """Return the folder of the installed pyspark, which holds Spark's programs in `bin` and its jars."""
    spec = importlib.util.find_spec("pyspark")
    if spec is not None and spec.origin is not None:
        home = Path(spec.origin).parent
        if (home / "bin" / "spark-submit").exists():
            return home
        seen = f"the pyspark in {home} is the client alone"
    else:
        seen = "pyspark is not installed"
    raise MissingDependencyError(
        f'Apache Spark needs the full pyspark package; {seen}. Install it: pip install "spark-training-bridge[spark]"'
    )


def spark_environment() -> dict[str, str]:
    """Return our environment as one of Spark's programs should see it: this pyspark, this Python, the checked Java."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_CALLERS_OWN)}
    java, _ = find_java()
    # Spark takes JAVA_HOME even where no java is in it.
    if java.parent != Path(environment.get("JAVA_HOME", "")) / "bin":
        environment.pop("JAVA_HOME", None)
    return environment | {"SPARK_HOME": str(spark_home()), "PYSPARK_PYTHON": sys.executable}


def free_port() -> int:
    """Return a port that was free on 127.0.0.1 a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_open(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False
