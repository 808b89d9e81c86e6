"""Rows out of Spark: Arrow record batches, in order, that can be stopped on the server at any time."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.columns.contract import conform
from bridge.errors import TableTooLargeError
from bridge.spark import operation
from bridge.spark.failures import Failure, classify, quiet, reason, translated
from bridge.spark.operation import finish_within, probe, stop, tagged

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
    spark = frame.sparkSession
    tag = f"bridge-{uuid.uuid4().hex}"
    arrived: queue.Queue[Any] = queue.Queue(_AHEAD)
    stopped = threading.Event()
    fetcher = threading.Thread(target=_fetch, args=(frame, tag, arrived, stopped), name="bridge-fetch", daemon=True)
    fetcher.start()
    finished, wait_s = False, operation.STOP_TIMEOUT_S
    try:
        while True:
            try:
                item = arrived.get(timeout=operation.SILENCE_S)
            except queue.Empty:
                wait_s = 0.0  # for one that does not answer now
                probe(spark, name)
                wait_s = operation.STOP_TIMEOUT_S
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
            stop(spark, tag, wait_s, fetcher, arrived)


def _fetch(frame: Any, tag: str, arrived: queue.Queue[Any], stopped: threading.Event) -> None:
    spark, client = frame.sparkSession, frame.sparkSession.client
    batches = None
    try:
        # Tags belong to the thread, and the request is sent by the first `next`.
        with tagged(spark, tag), quiet():
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


def _raise(exc: BaseException, name: str) -> None:
    if classify(exc) is Failure.TOO_LARGE:
        raise TableTooLargeError(
            f"{name} is more than the server sends as one result: {reason(exc)}\n"
            '  Name fewer columns, use limit=, or use route="export".'
        ) from exc
    with translated(name):
        raise exc


def _rows(frame: Any) -> pa.Table:
    # toArrow() refuses NULLs in vectors of pyspark.ml
    client = frame.sparkSession.client
    items = client.to_table_as_iterator(frame._plan.to_proto(client), frame._plan.observations)
    return pa.concat_tables([item for item in items if isinstance(item, pa.Table)])


def run_within(frame: DataFrame, timeout_s: float) -> pa.Table | None:
    """Return the rows of a small result, None (and stop it on the server) where it takes longer than `timeout_s`."""
    return finish_within(frame.sparkSession, lambda: _rows(frame), timeout_s)
