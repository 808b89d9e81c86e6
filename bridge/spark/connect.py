"""Sessions: which one is used, and what this process started."""

from __future__ import annotations

import atexit
import getpass
import os
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.config import Settings, load_settings, redact
from bridge.errors import ConfigError, EngineUnavailableError, MissingDependencyError, SessionLostError
from bridge.spark.channel import compare_versions, is_installed, is_refused, open_session
from bridge.spark.engines import Engine, sail
from bridge.spark.engines.history import HistoryEngine
from bridge.spark.engines.process import ConnectServer
from bridge.spark.failures import translated
from bridge.spark.sessions import adopt, hand_over, is_gone, is_lost, left_behind

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

_DATABRICKS_HOSTS = (
    ".databricks.com",
    ".azuredatabricks.net",
    ".databricks.us",
    ".databricks.azure.us",
    ".databricks.azure.cn",
)


_TELLING_CONFS = (
    "spark.sql.ansi.doubleQuotedIdentifiers",
    "spark.sql.ansi.enabled",
    "spark.sql.caseSensitive",
    "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles",
    "spark.sql.legacy.timeParserPolicy",
    "spark.sql.parser.escapedStringLiterals",
    "spark.sql.readSideCharPadding",
)


@dataclass(frozen=True)
class Connection:
    """A session, the kind of server behind it, and how to say where it is.

    `is_embedded` is true for the engine that needs no server. `profile` is the one that `connect` was told, whose other
    settings hold for what is loaded through the session.
    """

    spark: SparkSession
    engine: Engine
    address: str
    is_embedded: bool = False
    profile: str | None = None

    @property
    def time_zone(self) -> str | None:
        """The session's time zone, in which the server reads the hours of a timestamp."""
        with translated(f"the session on {self.address}"):
            return self.spark.conf.get("spark.sql.session.timeZone")

    @property
    def confs(self) -> dict[str, str]:
        """The settings of the session that change what a query gives, as far as they were set."""
        pairs = [(name, None) for name in _TELLING_CONFS]
        with translated(f"the session on {self.address}"):
            values = self.spark.client.get_config_with_defaults(*pairs)
        return {name: value for name, value in zip(_TELLING_CONFS, values, strict=True) if value}

    @cached_property
    def user(self) -> str:
        """Who asks, as the server knows them; the user of this process where it knows nobody, as Sail does."""
        with translated(f"the session on {self.address}"):
            return self.spark.sql("SELECT current_user()").collect()[0][0] or _own_name()


@dataclass(frozen=True)
class _Opened:
    """A connection that this process opened, and all that it takes to open it again."""

    remote: str
    settings: Settings
    connection: Connection


def _own_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container where the user has a number alone
        return str(os.getuid())


# What this process started or looked at. A server costs seconds to start, and one must not be started twice for the
# same remote; nothing else of `bridge` lives from call to call.
_opened: dict[str, _Opened] = {}
_opening = threading.Lock()
_known: weakref.WeakKeyDictionary[Any, Connection] = weakref.WeakKeyDictionary()
_servers: dict[str, ConnectServer] = {}


def connect(remote: str | None = None, *, profile: str | None = None) -> SparkSession:
    """Return a Spark Connect session, opening one if needed.

    The first of these that there is: `remote` (or BRIDGE_REMOTE, or that of a `profile` named here); the session that
    is active in this process; SPARK_REMOTE; Databricks, where databricks-connect is installed and configured; the
    profile of BRIDGE_PROFILE; the embedded engine. A second call with the same answer returns the same session, unless
    it was stopped or has ended on the server: then a new one, with a RuntimeWarning if it was not stopped by you. What
    was started here is stopped when the process ends; other sessions are never stopped, and none is reconfigured.

    Args:
        remote: `sail` (embedded, no Java); `local[N]`, `local[*]` or `local-cluster[N,cores,MB]` (Apache Spark in a
            process of its own, Java 17); `sc://host:port` (a server); `databricks` or `databricks://PROFILE`.
        profile: A file of settings in $BRIDGE_CONF, ./conf or the package: "local", "cluster", "databricks".

    The tables of the embedded engine live in the folder of the setting `warehouse`, as Delta or Parquet, and those of
    `main.default` and of every schema with a folder there keep their names. A new schema needs that folder to keep its
    tables: make `<warehouse>/main/<schema>` before connecting. What is dropped comes back until its folder is deleted.
    Names of tables saved through `local[...]` end with the process; their files stay in `<warehouse>/spark_catalog`.

    Raises:
        EngineUnavailableError: Nothing listens at the address, Java is missing, a server does not start, or it is an
            Apache Spark older than the client.
        MissingDependencyError: The extra that brings the engine is not installed.
        ConfigError: `remote` or `profile` is not known.

    Example:
        >>> import bridge
        >>> bridge.connect().range(3).count()
        3
    """
    found = _resolve(load_settings(profile=profile, remote=remote), by_profile=profile is not None)
    if profile is not None:
        found = _known[found.spark] = replace(found, profile=profile)
    return found.spark


def attach(spark: SparkSession | None, settings: Settings) -> Connection:
    """Return the connection of `spark`, or the one that `connect` would give."""
    if spark is None:
        return _resolve(settings)
    if not hasattr(spark, "client") or not hasattr(spark, "session_id"):
        raise _classic_session()
    if spark.client.is_closed:
        raise SessionLostError(
            "this Spark session was stopped, or has ended on the server.\n"
            "  Open another, spark = bridge.connect(), and repeat the call. DataFrames and temporary views of the old "
            "session ended with it: make them again."
        )
    if is_refused(spark):
        raise EngineUnavailableError(
            "the server of this session is gone: nothing listens any more where it was.\n"
            "  Connect again: bridge.connect(). What was only in the session, such as temporary views, is lost."
        )
    if spark not in _known:
        _known[spark] = _look_at(spark)
    return _known[spark]


def is_replaceable(spark: SparkSession) -> bool:
    """Return whether another session is opened in the place of this one when it is lost: it was opened here."""
    return _opened_as(spark) is not None


def reopen(connection: Connection, settings: Settings) -> Connection:
    """Return a connection in the place of one whose session was lost.

    Raises:
        EngineUnavailableError: The server is not back yet.
    """
    opened = _opened_as(connection.spark)
    return _alive(opened.remote, opened.settings) if opened else _resolve(settings)  # another thread was first


def _opened_as(spark: SparkSession | None) -> _Opened | None:
    return next((opened for opened in _opened.values() if opened.connection.spark is spark), None)


def _resolve(settings: Settings, *, by_profile: bool = False) -> Connection:
    is_named = by_profile or settings.origins["remote"] in ("keyword", "BRIDGE_REMOTE")
    named = settings.remote if is_named else None
    if named is None:
        active = _active_session()
        if active is not None and not is_replaceable(active):
            return attach(active, settings)
        if opened := _opened_as(active or left_behind()):
            return _alive(opened.remote, opened.settings)
    remote = named or os.environ.get("SPARK_REMOTE") or _databricks_settings() or settings.remote or "sail"
    return _alive(remote, settings)


def _alive(remote: str, settings: Settings) -> Connection:
    """Return the connection to `remote`, opened if there is none, or opened again if its session is gone."""
    key = f"{remote} {settings.warehouse} {settings.spark_jars}"
    with _opening:
        opened = _opened.get(key)
        if opened is not None and not is_gone(opened.connection.spark):
            return _known.setdefault(opened.connection.spark, opened.connection)
        fresh = _open(remote, settings, key)
        adopt(fresh.spark, is_sail=fresh.engine.name == "sail")
        replaces = opened is not None and is_lost(opened.connection.spark)
        if opened is not None and replaces:
            fresh = replace(fresh, profile=_known[opened.connection.spark].profile)
            with translated(f"the session on {fresh.address}"):
                hand_over(opened.connection.spark, fresh.spark)
        _opened[key] = _Opened(remote, settings, fresh)
        _known[fresh.spark] = fresh
    if replaces:
        warnings.warn(
            f"the Spark session on {fresh.address} had ended, and another was opened in its place. Temporary views and "
            "settings made in it are gone; its time zone and current schema were kept as far as known.",
            RuntimeWarning,
            stacklevel=2,
        )
    return fresh


def _open(remote: str, settings: Settings, key: str) -> Connection:
    if remote == "sail":
        spark = open_session(_served(key, partial(sail.start_server, settings.warehouse)))
        sail.register_warehouse(spark, settings.warehouse)
        return Connection(spark, sail.EMBEDDED, "embedded", is_embedded=True)
    if remote.startswith("local"):
        from bridge.spark.engines.apache import start_server

        warehouse = settings.warehouse / "spark_catalog"
        start = partial(start_server, remote, spark_jars=settings.spark_jars, warehouse=warehouse)
        return Connection(open_session(_served(key, start)), HistoryEngine("apache", is_here=True), remote)
    if remote.startswith("sc://"):
        spark = open_session(remote)
        connection = _look_at(spark)
        if connection.engine.name == "apache":
            compare_versions(spark, remote)
        return connection
    if remote == "databricks" or remote.startswith("databricks://"):
        spark = _databricks_session(remote)
        return Connection(spark, HistoryEngine("databricks"), str(getattr(spark.client, "host", "") or "databricks"))
    raise ConfigError(
        f"SPARK_REMOTE is {redact(remote)!r}; give local[*], local-cluster[N,cores,MB] or sc://host:port."
    )


def _served(key: str, start: Callable[[], ConnectServer]) -> str:
    """Return the address of the server of `key`, started if it does not run."""
    server = _servers.get(key)
    if server is None or not server.process.is_running:
        server = _servers[key] = start()
        # before a session is made, so that pyspark's own clean-up at exit still finds the server
        atexit.register(server.stop)
    return server.remote


def _look_at(spark: SparkSession) -> Connection:
    """Find out what serves a session that somebody else opened."""
    host = str(getattr(spark.client, "host", "") or "")
    if "DATABRICKS_RUNTIME_VERSION" in os.environ or host.endswith(_DATABRICKS_HOSTS):
        return Connection(spark, HistoryEngine("databricks"), host or "databricks")
    with translated(f"the session on {host}"):
        # Sail answers with its own version here, and with the Spark version it stands for there.
        is_sail = not spark.sql("SELECT version()").collect()[0][0].startswith(spark.version)
    address = str(getattr(getattr(spark.client, "_builder", None), "endpoint", host))
    return Connection(spark, sail.SailEngine(is_here=False) if is_sail else HistoryEngine("apache"), f"sc://{address}")


def _active_session() -> Any:
    if "pyspark" not in sys.modules:
        return None
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.session import SparkSession

    try:
        return SparkSession.active()
    except PySparkException:
        pass
    classic = sys.modules.get("pyspark.sql.session")
    session = getattr(getattr(classic, "SparkSession", None), "_instantiatedSession", None)
    if session is not None and session._sc._jsc is not None:
        raise _classic_session()
    return None


def _classic_session() -> EngineUnavailableError:
    return EngineUnavailableError(
        "the Spark session is a classic one; bridge reads through Spark Connect.\n"
        '  Name an engine: bridge.connect("sail"), bridge.connect("local[*]"), bridge.connect("sc://host:15002").'
    )


def _databricks_settings() -> str | None:
    """Return "databricks" where databricks-connect is installed and something says which workspace."""
    configured = any(os.environ.get(name) for name in ("DATABRICKS_HOST", "DATABRICKS_CONFIG_PROFILE"))
    in_workspace = "DATABRICKS_RUNTIME_VERSION" in os.environ
    if not (configured or in_workspace or Path("~/.databrickscfg").expanduser().is_file()):
        return None
    return "databricks" if is_installed("databricks.connect") else None


def _databricks_session(remote: str) -> SparkSession:
    """Build the session as https://docs.databricks.com/dev-tools/databricks-connect/cluster-config describes."""
    if not is_installed("databricks.connect"):
        raise MissingDependencyError(
            f'remote "{remote}" needs databricks-connect, which is not installed.\n'
            '  pip install "spark-training-bridge[databricks]" in an environment without pyspark.'
        )
    from databricks.connect import DatabricksSession

    builder = DatabricksSession.builder
    profile = remote.removeprefix("databricks").removeprefix("://")
    try:
        session: SparkSession = (builder.profile(profile) if profile else builder).getOrCreate()
    except Exception as exc:  # databricks-connect documents no error type of its own
        raise EngineUnavailableError(
            f"Databricks could not be reached: {str(exc).splitlines()[0] if str(exc) else type(exc).__name__}\n"
            "  Set DATABRICKS_HOST and credentials, or DATABRICKS_CONFIG_PROFILE; name a cluster with "
            "DATABRICKS_CLUSTER_ID or serverless compute with DATABRICKS_SERVERLESS_COMPUTE_ID=auto."
        ) from exc
    return session
