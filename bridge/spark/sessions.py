"""Sessions that we opened: whether they still live, and what they were set to, for those that take their place."""

from __future__ import annotations

import sys
import uuid
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.spark.channel import answer_within, is_refused
from bridge.spark.failures import Failure, classify, quiet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ANSWER_TIMEOUT_S = 30.0
_ZONE = "spark.sql.session.timeZone"

# Sail that was started again takes the number of an old session for a new one, which then has lost all it held, its
# time zone among it. A conf that only the old one had tells the two apart.
_MARK = "spark.bridge.session"


@dataclass
class _State:
    """What is known of a session: `place` is its current catalog and schema."""

    mark: str | None
    time_zone: str | None = None
    place: tuple[str, str] | None = None
    is_lost: bool = False


_states: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()


def adopt(spark: SparkSession, *, is_sail: bool) -> None:
    """Count a session as ours, from its opening on."""
    mark = uuid.uuid4().hex if is_sail else None
    if mark is not None:
        spark.conf.set(_MARK, mark)
    _states[spark] = _State(mark)


def is_gone(spark: SparkSession) -> bool:
    """Return whether a session of ours was stopped or has ended on the server; then it counts as stopped from now on.

    One whose server takes its time is not gone.
    """
    client: Any = spark.client
    if not client.is_closed and (is_refused(spark) or not _is_answered(spark)):
        _states[spark].is_lost = True
        # Closed first: `stop` then asks nothing of the server, and takes the session's place as the active one away.
        client.close()
        spark.stop()
    return bool(client.is_closed)


def _is_answered(spark: SparkSession) -> bool:
    from pyspark.errors import PySparkException

    state = _states[spark]

    def ask() -> bool:
        zone, mark = spark.conf.get(_ZONE), state.mark and spark.conf.get(_MARK, "")
        if mark == state.mark:
            state.time_zone = zone
        return mark == state.mark

    try:
        with quiet():
            return answer_within(_ANSWER_TIMEOUT_S, ask)
    except TimeoutError:
        return True
    except PySparkException as exc:
        return classify(exc) not in (Failure.SESSION_LOST, Failure.UNAVAILABLE)


def remember_place(spark: SparkSession, catalog: str, schema: str) -> None:
    """Note the current catalog and schema of a session, if it is ours."""
    if spark in _states:
        _states[spark].place = (catalog, schema)


def ended_meanwhile(spark: SparkSession) -> bool:
    """Return whether a session of ours has ended while it was used, which is not for the person to have stopped it."""
    gone = is_gone(spark)
    _states[spark].is_lost |= gone
    return gone


def is_lost(spark: SparkSession) -> bool:
    """Return whether a session of ours ended without being stopped by the person."""
    return spark in _states and _states[spark].is_lost


def hand_over(old: SparkSession, new: SparkSession) -> None:
    """Give a session the time zone, current catalog and schema of one that was lost, as far as they are known."""
    from pyspark.errors import PySparkException

    state = _states[old]
    if state.time_zone is not None and new.conf.get(_ZONE) != state.time_zone:
        new.conf.set(_ZONE, state.time_zone)
    if state.place is not None:
        # of a server that was started again they may be gone
        with suppress(PySparkException), quiet():
            new.catalog.setCurrentCatalog(state.place[0])
            new.catalog.setCurrentDatabase(state.place[1])


def left_behind() -> Any:
    """Return the session that is still this process's active one although its client has closed itself; or None.

    The client does so when it hears that the server was started again. What the person stops is active no longer.
    """
    if "pyspark.sql.connect.session" not in sys.modules:
        return None
    from pyspark.sql.connect.session import SparkSession

    active = getattr(SparkSession._active_session, "session", None) or SparkSession._default_session
    if active is None or active not in _states:
        return None
    _states[active].is_lost |= active.is_stopped
    return active
