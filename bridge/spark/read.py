"""Rows out of Spark: Arrow record batches, in order, that can be stopped on the server at any time."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.columns.contract import conform
from bridge.errors import EngineSilentError, EngineUnavailableError, TableTooLargeError
from bridge.spark.channel import answer_within, is_refused
from bridge.spark.failures import Failure, classify, quiet, reason, translated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Batches that wait for the consumer. Two keep the network busy while one is converted, and bound the memory.
_AHEAD = 2

# Seconds without a batch after which the server is asked whether it still lives, and for which its answer is awaited.
_SILENCE_S = 20.0
_PROBE_TIMEOUT_S = 30.0

# How long a server is waited for that was asked to stop an operation.
_STOP_TIMEOUT_S = 10.0

_END = object()


def stream_batches(frame: DataFrame, schema: pa.Schema, name: str) -> Generator[pa.Table]:
    """Yield the rows of `frame` as tables in exactly `schema`, one for each record batch the server sends.

    Nothing is asked of the server before the first `next`. Closing the iterator interrupts the operation there. At
    least one table comes, of 0 rows if there are none. A server that is silent for long is asked whether it still
    lives; if it does, the wait goes on.

    Raises:
        TableTooLargeError: The server refused to send that much (its maxResultSize, or the size of a message).
        EngineSilentError: The server no longer answers.
        EngineUnavailableError: The server is gone.
    """
    spark = frame.sparkSession
    tag = f"bridge-{uuid.uuid4().hex}"
    arrived: queue.Queue[Any] = queue.Queue(_AHEAD)
    stopped = threading.Event()
    fetcher = threading.Thread(target=_fetch, args=(frame, tag, arrived, stopped), name="bridge-fetch", daemon=True)
    fetcher.start()
    finished, wait_s = False, _STOP_TIMEOUT_S
    try:
        while True:
            try:
                item = arrived.get(timeout=_SILENCE_S)
            except queue.Empty:
                wait_s = 0.0  # for one that does not answer now
                _probe(spark, name)
                wait_s = _STOP_TIMEOUT_S
                continue
            if item is _END:
                finished = True
                return
            if isinstance(item, BaseException):
                finished = True
                _raise(item, name)
            yield conform(item, schema, name)
    finally:
        if not finished:
            stopped.set()
            _stop(spark, tag, wait_s, fetcher, arrived)


def _fetch(frame: Any, tag: str, arrived: queue.Queue[Any], stopped: threading.Event) -> None:
    spark, client = frame.sparkSession, frame.sparkSession.client
    # Tags belong to the thread, and the request is sent by the first `next`.
    spark.addTag(tag)
    batches = None
    try:
        with quiet():
            batches = client.to_table_as_iterator(frame._plan.to_proto(client), frame._plan.observations)
            for item in batches:
                if stopped.is_set():
                    return
                if isinstance(item, pa.Table):
                    arrived.put(item)
        arrived.put(_END)
    except BaseException as exc:  # noqa: BLE001 - carried to the consumer, who raises it
        # After an interrupt engines raise errors of their own, each a different one: nobody waits for them.
        if not stopped.is_set():
            arrived.put(exc)
    finally:
        if batches is not None:
            batches.close()
        spark.removeTag(tag)


def _raise(exc: BaseException, name: str) -> None:
    failure = classify(exc)
    if failure is Failure.TOO_LARGE:
        raise TableTooLargeError(
            f"{name} is more than the server sends as one result: {reason(exc)}\n"
            '  Name fewer columns, use limit=, or use route="export".'
        ) from exc
    if failure is Failure.UNAVAILABLE:
        raise EngineUnavailableError(
            f"{name}: the server went away while rows were being read: {reason(exc)}\n"
            "  Connect again and repeat the call."
        ) from exc
    with translated(name):
        raise exc


def _probe(spark: SparkSession, name: str) -> None:
    """Ask a server that has sent nothing for a while whether it lives.

    Raises:
        EngineSilentError: It does not answer.
        EngineUnavailableError: It is gone.
    """
    if is_refused(spark):
        raise EngineUnavailableError(
            f"{name}: the server went away while rows were being read.\n  Connect again and repeat the call."
        )
    try:
        answer_within(_PROBE_TIMEOUT_S, lambda: spark.conf.get("spark.sql.session.timeZone"))
    except TimeoutError as exc:
        raise EngineSilentError(
            f"{name}: the server has stopped answering; nothing was kept of the rows that came.\n"
            "  It may have run out of memory: look at its log, name fewer columns, or use limit=."
        ) from exc
    except Exception as exc:  # noqa: BLE001 - raised as what it means
        _raise(exc, name)


def _stop(
    spark: SparkSession, tag: str, wait_s: float, runner: threading.Thread, arrived: queue.Queue[Any] | None = None
) -> None:
    """Stop an operation on the server and let the thread that runs it end, waiting no longer than `wait_s`.

    A server that answers later gets the interrupt then. The thread may wait for room in `arrived`.
    """
    interrupter = threading.Thread(target=_interrupt, args=(spark, tag), name="bridge-interrupt", daemon=True)
    interrupter.start()
    deadline = time.monotonic() + wait_s
    while (interrupter.is_alive() or runner.is_alive()) and time.monotonic() < deadline:
        runner.join(0.05)
        if arrived is not None:
            with suppress(queue.Empty):
                arrived.get_nowait()


def _interrupt(spark: SparkSession, tag: str) -> None:
    # the operation may have ended by itself, or the server be gone: either way it does not run
    with suppress(Exception), quiet():
        spark.interruptTag(tag)


def _rows(frame: Any) -> pa.Table:
    # toArrow() refuses NULLs in vectors of pyspark.ml
    client = frame.sparkSession.client
    items = client.to_table_as_iterator(frame._plan.to_proto(client), frame._plan.observations)
    return pa.concat_tables([item for item in items if isinstance(item, pa.Table)])


def run_within(frame: DataFrame, timeout_s: float) -> pa.Table | None:
    """Return the rows of a small result, None (and stop it on the server) where it takes longer than `timeout_s`."""
    outcome: list[pa.Table | BaseException] = []
    tag = f"bridge-{uuid.uuid4().hex}"
    spark = frame.sparkSession

    def run() -> None:
        spark.addTag(tag)
        try:
            with quiet():
                outcome.append(_rows(frame))
        except BaseException as exc:  # noqa: BLE001 - carried to the caller, who raises it
            outcome.append(exc)
        finally:
            spark.removeTag(tag)

    runner = threading.Thread(target=run, name="bridge-run", daemon=True)
    runner.start()
    runner.join(timeout_s)
    if not outcome:
        _stop(spark, tag, _STOP_TIMEOUT_S, runner)
        return None
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
