"""Opening a Spark Connect session on a server that listens."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import threading
import urllib.request
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlparse

from bridge.config import redact
from bridge.errors import ConfigError, EngineUnavailableError, MissingDependencyError
from bridge.spark.failures import quiet, reason

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Answer = TypeVar("Answer")

# One message holds at least one record batch, so pyspark's own limit of 128 MiB refuses tables of large rows.
_NO_LIMIT = -1
_WAITS_FOR_A_DEAD_SERVER = 4  # of 0.05, 0.2, 0.8 and 3.2 s


def open_session(remote: str, *, timeout_s: float = 30.0) -> SparkSession:
    """Return a new session on the server at `remote`, an `sc://` address.

    Raises:
        EngineUnavailableError: Nothing listens there, or what listens does not answer within `timeout_s`.
        MissingDependencyError: pyspark is not installed.
    """
    if not import_client():
        raise MissingDependencyError(
            "a Spark Connect session needs pyspark with its Connect client.\n"
            '  pip install "spark-training-bridge[local]" (no Java) or "spark-training-bridge[spark]".'
        )
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.client import DefaultChannelBuilder
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    options = [("grpc.max_receive_message_length", _NO_LIMIT)]
    if _is_loopback(_host(remote)):
        options.append(("grpc.enable_http_proxy", 0))  # gRPC asks the proxy of the environment even for localhost
    try:
        builder = DefaultChannelBuilder(remote, options)
    except (ValueError, PySparkException):  # whose text may hold the token
        raise ConfigError(
            f"{redact(remote)} is no address of a Spark Connect server.\n"
            "  Give sc://host:port, or sc://host:port/;token=...;use_ssl=true."
        ) from None
    _knock(remote, timeout_s)
    # pyspark.sql.functions chooses between its two implementations by this variable, which pyspark's own builder sets
    # too; that builder takes no channel options.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    spark = cast("SparkSession", ConnectSession.builder.channelBuilder(builder).create())
    client: Any = spark.client
    client.set_retry_policies([_retry_policy(spark)])
    _greet(spark, remote, timeout_s)
    return spark


def import_client() -> bool:
    """Import pyspark's Connect client; return whether it is installed."""
    try:
        import pyspark.sql.connect.session  # noqa: F401
    except ImportError:
        return False
    return True


def is_installed(module: str) -> bool:
    """Return whether `module`, which may be inside a package, could be imported; nothing but its package is."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def is_refused(spark: SparkSession) -> bool:
    """Return whether nothing listens any more where a session's server was; the client itself retries for minutes."""
    endpoint = urlparse("//" + str(getattr(getattr(spark.client, "_builder", None), "endpoint", "")))
    if not endpoint.hostname or endpoint.port is None or not _is_direct(endpoint.hostname):
        return False
    try:
        socket.create_connection((endpoint.hostname, endpoint.port), timeout=5.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass  # nothing is known: a name that does not resolve now, a network that is slow
    return False


def compare_versions(spark: SparkSession, remote: str) -> None:
    """Warn of a server that is older than its client, and close the session where the major version is.

    Spark promises that a client works with servers of its version and newer ones. Sail names the version it stands for,
    and Databricks' client looks for itself.
    """
    from pyspark import __version__ as ours

    theirs = spark.version
    server, client = ([int(number) for number in re.findall(r"\d+", text)[:2]] for text in (theirs, ours))
    told = f"the server at {redact(remote)} is Spark {theirs}, older than the client, pyspark {ours}"
    line = ".".join(map(str, server))
    advice = f'pip install "pyspark[connect]=={line}.*", or upgrade the server to Spark {ours}'
    if server[:1] < client[:1]:
        closing: Any = spark.client
        closing.close()
        spark.stop()
        raise EngineUnavailableError(f"{told}.\n  {advice}.")
    if server < client:
        warnings.warn(f"{told}: what it does not know fails there. {advice}.", RuntimeWarning, stacklevel=2)


def _retry_policy(spark: SparkSession) -> Any:
    """Return pyspark's own policy, ten minutes of retries, but a few seconds where nothing listens any more.

    A server that was started again knows nothing of the session, and the process could not end: pyspark waits at exit
    until the last execution is released and the session closed.
    """
    from pyspark.sql.connect.client.retries import DefaultPolicy, RetryPolicyState

    class Waits(RetryPolicyState):
        taken = 0

        def can_retry(self, exception: BaseException) -> bool:
            enough = _WAITS_FOR_A_DEAD_SERVER if threading.main_thread().is_alive() else 0
            return super().can_retry(exception) and not (self.taken >= enough and is_refused(spark))

        def next_attempt(self, exception: BaseException | None = None) -> int | None:
            self.taken += 1
            return super().next_attempt(exception)

    class Patience(DefaultPolicy):
        def to_state(self) -> RetryPolicyState:
            return Waits(self)

    return Patience(max_retries=125, max_backoff=5_000)


def in_thread(call: Callable[[], Answer], name: str) -> Future[Answer]:
    """Start a call in a thread that does not keep the process alive; return where what it does, or raises, will be."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            with quiet():
                answer = call()
        except BaseException as exc:  # noqa: BLE001 - carried to whoever asks for the result
            future.set_exception(exc)
        else:
            future.set_result(answer)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def answer_within(timeout_s: float, call: Callable[[], Answer]) -> Answer:
    """Return, or raise, what `call` does: it asks the server, and the client itself would retry for minutes.

    Raises:
        TimeoutError: Nothing came within `timeout_s`; the call goes on in its thread.
    """
    return in_thread(call, "bridge-ask").result(timeout_s)


def _host(remote: str) -> str:
    return urlparse("http" + remote[2:]).hostname or ""


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _is_direct(host: str) -> bool:
    """Return whether no proxy stands between."""
    return _is_loopback(host) or not urllib.request.getproxies() or bool(urllib.request.proxy_bypass(host))


def _knock(remote: str, timeout_s: float) -> None:
    """Fail at once where nothing listens: the client itself retries for minutes."""
    host, port = _host(remote), urlparse("http" + remote[2:]).port or 15002
    if not _is_direct(host):
        return
    try:
        socket.create_connection((host, port), timeout=min(timeout_s, 10.0)).close()
    except OSError as exc:
        raise EngineUnavailableError(
            f"no Spark Connect server answers at {redact(remote)}: {exc.strerror or exc}.\n"
            '  Start one, correct the address, or use the embedded engine: bridge.connect("sail").'
        ) from exc


def _greet(spark: SparkSession, remote: str, timeout_s: float) -> None:
    """Ask for the server's version, so that a port of something else is named as such within `timeout_s`."""
    try:
        answer_within(timeout_s, lambda: spark.version)
    except Exception as exc:
        # Closed, it no longer counts as the process's active session.
        client: Any = spark.client
        client.close()
        seen = f"no answer within {timeout_s:.0f} s" if isinstance(exc, TimeoutError) else reason(exc)
        raise EngineUnavailableError(
            f"{redact(remote)} did not answer as a Spark Connect server: {seen}\n"
            "  Check the address, the token and use_ssl."
        ) from exc
