"""Operations on the server: each in a thread and under a tag of its own, watched, and stopped there when unwanted."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bridge.errors import EngineSilentError, EngineUnavailableError
from bridge.spark.channel import answer_within, is_refused
from bridge.spark.failures import quiet, translated

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
    with translated(name):
        operation = Operation(spark, call, on_progress)
        wait_s = STOP_TIMEOUT_S
        try:
            while not operation.ends_within(SILENCE_S):
                wait_s = 0.0  # for one that does not answer now
                probe(spark, name)
                wait_s = STOP_TIMEOUT_S
        finally:
            operation.stop(wait_s)
        return operation.outcome.result()


def finish_within(spark: SparkSession, call: Callable[[], Answer], timeout_s: float) -> Answer | None:
    """Return what `call` does, None (and stop it on the server) where it takes longer than `timeout_s`."""
    operation = Operation(spark, call)
    try:
        return operation.outcome.result() if operation.ends_within(timeout_s) else None
    finally:
        operation.stop(STOP_TIMEOUT_S)


class Operation(Generic[Answer]):
    """A call that runs in a thread, whose operations carry a tag by which they can be stopped on the server."""

    def __init__(self, spark: SparkSession, call: Callable[[], Answer], on_progress: OnProgress | None = None) -> None:
        self.outcome: Future[Answer] = Future()
        self._spark = spark
        self._tag = f"bridge-{uuid.uuid4().hex}"
        self._thread = threading.Thread(target=self._run, args=(call, on_progress), name="bridge-run", daemon=True)
        self._thread.start()

    def ends_within(self, timeout_s: float) -> bool:
        """Wait for the end, with or without an answer; return whether it came."""
        return bool(wait([self.outcome], timeout_s).done)

    def stop(self, wait_s: float) -> None:
        """Stop what still runs; see `stop`."""
        if not self.outcome.done():
            stop(self._spark, self._tag, wait_s, self._thread)

    def _run(self, call: Callable[[], Answer], on_progress: OnProgress | None) -> None:
        try:
            # Tags belong to the thread.
            with tagged(self._spark, self._tag), _reported(self._spark, on_progress), quiet():
                answer = call()
        except BaseException as exc:  # noqa: BLE001 - carried to the caller, who raises it
            self.outcome.set_exception(exc)
        else:
            self.outcome.set_result(answer)


@contextmanager
def tagged(spark: SparkSession, tag: str) -> Iterator[None]:
    """Give what this thread asks of the server a tag."""
    spark.addTag(tag)
    try:
        yield
    finally:
        spark.removeTag(tag)


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


def probe(spark: SparkSession, name: str) -> None:
    """Ask a server that has sent nothing for a while whether it lives.

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


def stop(
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
