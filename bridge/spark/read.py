"""Rows out of Spark: Arrow record batches, in order, that can be stopped on the server at any time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.columns.contract import conform
from bridge.errors import TableTooLargeError
from bridge.spark import operation
from bridge.spark.failures import Failure, classify, reason, translated
from bridge.spark.operation import finish_within, running

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Batches that wait for the consumer. Two keep the network busy while one is converted, and bound the memory.
_AHEAD = 2

_END = object()


def stream_batches(frame: DataFrame, schema: pa.Schema, name: str) -> Generator[pa.Table]:
    """Yield the rows of `frame` as tables in exactly `schema`, one for each record batch the server sends.

    Nothing is asked of the server before the first `next`. Closing the iterator interrupts the operation there. At
    least one table comes, of 0 rows if there are none. A server that is silent for long is asked whether it still
    lives; if it does, the wait goes on.

    Raises:
        TableTooLargeError: The server refused to send that much (its maxResultSize, or the size of a message).
        EngineSilentError: The server no longer answers.
        EngineUnavailableError: The server is gone, or has ended the session (SessionLostError).
        AccessDeniedError: The rows may not be read.
    """
    arrived: queue.Queue[Any] = queue.Queue(_AHEAD)
    stopped = threading.Event()
    fetch = partial(_fetch, frame, arrived, stopped)
    with running(frame.sparkSession, fetch, thread="bridge-fetch", arrived=arrived) as (outcome, probe):
        try:
            while True:
                try:
                    item = arrived.get(timeout=operation.SILENCE_S)
                except queue.Empty:
                    if outcome.done() and arrived.empty():  # it failed before it began to fetch
                        _check(outcome, name)
                    probe(name)
                    continue
                if item is _END:
                    _check(outcome, name)
                    return
                yield conform(item, schema, name)
        finally:
            stopped.set()


def _fetch(frame: Any, arrived: queue.Queue[Any], stopped: threading.Event) -> None:
    client, batches = frame.sparkSession.client, None
    try:
        # The request is sent by the first `next`.
        batches = client.to_table_as_iterator(frame._plan.to_proto(client), frame._plan.observations)
        for item in batches:
            if stopped.is_set():
                return
            if isinstance(item, pa.Table):
                arrived.put(item)
    finally:
        if batches is not None:
            batches.close()
        # After an interrupt engines raise errors of their own, each a different one: nobody waits for them.
        if not stopped.is_set():
            arrived.put(_END)


def _check(outcome: Future[None], name: str) -> None:
    """Raise what ended the rows before their end."""
    try:
        outcome.result()
    except BaseException as exc:
        if classify(exc) is Failure.TOO_LARGE:
            raise TableTooLargeError(
                f"{name} is more than the server sends as one result: {reason(exc)}\n"
                '  Name fewer columns, use limit=, or use route="export".'
            ) from exc
        with translated(name):
            raise


def _rows(frame: Any) -> pa.Table:
    # toArrow() refuses NULLs in vectors of pyspark.ml
    client = frame.sparkSession.client
    items = client.to_table_as_iterator(frame._plan.to_proto(client), frame._plan.observations)
    return pa.concat_tables([item for item in items if isinstance(item, pa.Table)])


def run_within(frame: DataFrame, timeout_s: float) -> pa.Table | None:
    """Return the rows of a small result, None (and stop it on the server) where it takes longer than `timeout_s`."""
    return finish_within(frame.sparkSession, lambda: _rows(frame), timeout_s)
