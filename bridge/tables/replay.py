"""Once more, in a new session: what is done where a session is lost while a table is read."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.config import Settings, load_settings
from bridge.errors import EngineError, EngineSilentError, EngineUnavailableError, SourceError
from bridge.spark.connect import Connection, attach, is_replaceable, reopen
from bridge.spark.failures import translated
from bridge.spark.names import parse_name
from bridge.spark.sessions import ended_meanwhile
from bridge.tables.fetch import fetch
from bridge.tables.prepare import Prepared, prepare
from bridge.volumes.path import is_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge.tables.table import Table

_TRIES = 3  # a query may be what ends the server
_PATIENCE_S = 60.0
_PAUSE_S = 0.5


def with_replay(source: Any, *, spark: SparkSession | None = None, **query: Any) -> Table:
    """Prepare and fetch, from the start again where the session is lost that `bridge` opened, three times in all.

    Again means: the same table by its full name, at the version that was found the first time, in a session with the
    time zone and the current schema of the first. A server that is gone is waited for, for a minute. DataFrames and
    temporary views end with their session, so they are not read again; nor is anything in a session that was given.

    Args:
        source, spark, query: What `prepare` takes.

    Raises:
        SessionLostError, EngineUnavailableError: The session was lost and cannot be replaced, or its server did not
            come back.
        SourceError: The table was made anew meanwhile, so that the same version is of another table.
    """
    if spark is not None or hasattr(source, "sparkSession"):
        with prepare(source, spark=spark, **query) as prepared:
            return fetch(prepared)
    settings = load_settings()
    connection = attach(None, settings)
    first: Prepared | None = None
    tries = 1
    while True:
        try:
            named, asked = (source, query) if first is None else _pinned(query, first)
            with translated(str(source)), prepare(named, spark=connection.spark, **asked) as prepared:
                if first is not None:
                    prepared = _as_first(prepared, first)
                first = first or prepared
                return fetch(prepared)
        except EngineError as exc:
            may_repeat = is_replaceable(connection.spark) and _means_the_same(source, query, first)
            is_silent = isinstance(exc, EngineSilentError)
            if tries == _TRIES or is_silent or not may_repeat or not ended_meanwhile(connection.spark):
                raise
            tries += 1
            connection = _wait_for_another(connection, settings, str(source), exc)


def _means_the_same(source: Any, query: dict[str, Any], first: Prepared | None) -> bool:
    """Return whether a new session can be asked for the same rows.

    What a filter reads beside the table may be a temporary view's, or a variable of the session; only a table that was
    resolved tells.
    """
    if first is not None:
        return first.source.again is not None and first.source.is_repeatable
    if query.get("where") is not None:
        return False
    return not isinstance(source, str) or is_path(source) or len(parse_name(source)) == 3


def _pinned(query: dict[str, Any], first: Prepared) -> tuple[Any, dict[str, Any]]:
    version = first.source.pin.version
    pin = {} if version is None else {"version": version, "timestamp": None}
    return first.source.again, query | pin


def _as_first(prepared: Prepared, first: Prepared) -> Prepared:
    """Check that the version is of the same table, and tell why it is read as it was told the first time."""
    now, then = prepared.source.pin, first.source.pin
    if None not in (now.fingerprint, then.fingerprint) and now.fingerprint != then.fingerprint:
        raise SourceError(
            f"{first.source.name} was made anew while the session was being replaced: version {now.version} is of "
            "another table.\n  Repeat the call."
        )
    return replace(
        prepared,
        source=replace(prepared.source, pin=replace(now, reason=then.reason)),
        plan=replace(prepared.plan, pin_reason=then.reason),
    )


def _wait_for_another(connection: Connection, settings: Settings, name: str, lost: EngineError) -> Connection:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return reopen(connection, settings)
        except EngineUnavailableError as exc:
            if time.monotonic() > deadline:
                raise EngineUnavailableError(
                    f"{name}: the server went away and was not back after {_PATIENCE_S:.0f} s: {exc}"
                ) from lost
        time.sleep(_PAUSE_S)
