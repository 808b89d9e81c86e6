"""Operations on the server: each in a thread and under a tag of its own, watched, and stopped there when unwanted."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from bridge.errors import EngineSilentError, EngineUnavailableError
from bridge.spark.channel import answer_within, in_thread, is_refused
from bridge.spark.failures import translated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Answer = TypeVar("Answer")

# Seconds without a sign of life after which the server is asked for one, and for which its answer is awaited.
SILENCE_S = 20.0
PROBE_TIMEOUT_S = 30.0

# How long a server is waited for that was asked to stop an operation.
STOP_TIMEOUT_S = 10.0

# Tasks done, tasks known so far, bytes read: of all stages of the operation.
OnProgress = Callable[[int, int, int], None]


def run_watched(
    spark: SparkSession, call: Callable[[], Answer], name: str, *, on_progress: OnProgress | None = None
) -> Answer:
    """Return what `call` does, which keeps the server busy with what is part of `name`.

    When this raises, the server has been told to stop, and was waited for, for 10 s at most: KeyboardInterrupt too. A
    server that is silent for long is asked whether it still lives; if it does, the wait goes on.

    Args:
        call: Runs in a thread of its own.
        on_progress: Called in that thread with the tasks done, the tasks known so far and the bytes read. Sail reports
            none of it.

    Raises:
        EngineSilentError: The server no longer answers.
        EngineUnavailableError: The server is gone, or has ended the session (SessionLostError).
        AccessDeniedError, EngineError: What the server said.
    """
    with translated(name), running(spark, call, on_progress=on_progress) as (outcome, probe):
        while not wait([outcome], SILENCE_S).done:
            probe(name)
        return outcome.result()


def finish_within(spark: SparkSession, call: Callable[[], Answer], timeout_s: float) -> Answer | None:
    """Return what `call` does, None (and stop it on the server) where it takes longer than `timeout_s`."""
    with running(spark, call) as (outcome, _):
        return outcome.result() if wait([outcome], timeout_s).done else None


@contextmanager
def running(
    spark: SparkSession,
    call: Callable[[], Answer],
    *,
    on_progress: OnProgress | None = None,
    thread: str = "bridge-run",
    arrived: queue.Queue[Any] | None = None,
) -> Iterator[tuple[Future[Answer], Callable[[str], None]]]:
    """Run a call in a thread, under a tag by which it is stopped on the server if it has not ended with the context.

    Gives the outcome, and what asks a server that has sent nothing for a while whether it lives; see `_probe`.

    Args:
        arrived: Where the call may wait for room.
    """
    tag = f"bridge-{uuid.uuid4().hex}"
    wait_s = STOP_TIMEOUT_S

    def run() -> Answer:
        spark.addTag(tag)  # tags belong to the thread
        try:
            with _reported(spark, on_progress):
                return call()
        finally:
            spark.removeTag(tag)

    def probe(name: str) -> None:
        nonlocal wait_s
        wait_s = 0.0  # for one that does not answer now
        _probe(spark, name)
        wait_s = STOP_TIMEOUT_S

    outcome = in_thread(run, thread)
    try:
        yield outcome, probe
    finally:
        if not outcome.done():
            _stop(spark, tag, wait_s, outcome, arrived)


@contextmanager
def _reported(spark: Any, on_progress: OnProgress | None) -> Iterator[None]:
    """Hear how far the operations of this thread have come; a session reports those of all threads to all handlers."""
    if on_progress is None:
        yield
        return
    this_thread = threading.get_ident()
    heard: tuple[int, int, int] | None = None

    def hear(stages: Iterable[Any] | None, **_: Any) -> None:
        nonlocal heard
        known = list(stages or ())
        told = (
            sum(stage.num_completed_tasks for stage in known),
            sum(stage.num_tasks for stage in known),
            sum(stage.num_bytes_read for stage in known),
        )
        if known and told != heard and threading.get_ident() == this_thread:
            heard = told
            on_progress(*told)

    spark.registerProgressHandler(hear)
    try:
        yield
    finally:
        with suppress(ValueError):  # the person has cleared all handlers meanwhile
            spark.removeProgressHandler(hear)


def _probe(spark: SparkSession, name: str) -> None:
    """Ask a server whether it lives.

    Raises:
        EngineSilentError: It does not answer.
        EngineUnavailableError: It is gone.
    """
    if is_refused(spark):
        raise EngineUnavailableError(
            f"{name}: the server went away: nothing listens any more where it was.\n"
            "  Connect again and repeat the call."
        )
    try:
        with translated(name):
            answer_within(PROBE_TIMEOUT_S, lambda: spark.conf.get("spark.sql.session.timeZone"))
    except TimeoutError as exc:
        raise EngineSilentError(
            f"{name}: the server has stopped answering; nothing was kept of what it did.\n"
            "  It may have run out of memory: look at its log, name fewer columns, or use limit=."
        ) from exc


def _stop(spark: SparkSession, tag: str, wait_s: float, outcome: Future[Any], arrived: queue.Queue[Any] | None) -> None:
    """Stop an operation on the server and let the thread that runs it end, waiting no longer than `wait_s`.

    A server that answers later gets the interrupt then.
    """
    # the operation may have ended by itself, or the server be gone: either way it does not run, and nobody asks
    interrupted = in_thread(lambda: spark.interruptTag(tag), "bridge-interrupt")
    deadline = time.monotonic() + wait_s
    while wait([interrupted, outcome], 0.05).not_done and time.monotonic() < deadline:
        if arrived is not None:
            with suppress(queue.Empty):
                arrived.get_nowait()
