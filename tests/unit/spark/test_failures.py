from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from pyspark.errors import AnalysisException, PySparkException

from bridge.errors import BridgeError, EngineError, EngineUnavailableError, SessionLostError
from bridge.spark.failures import Failure, classify, quiet, reason, translated

# What Apache Spark with Delta, and Sail, said to each request; tests/engines asks them again.
APACHE = [
    ("TABLE_OR_VIEW_NOT_FOUND", Failure.NO_TABLE),
    ("SCHEMA_NOT_FOUND", Failure.NO_TABLE),
    ("REQUIRES_SINGLE_PART_NAMESPACE", Failure.NO_TABLE),
    ("PATH_NOT_FOUND", Failure.NO_TABLE),
    ("UNRESOLVED_COLUMN.WITH_SUGGESTION", Failure.NO_COLUMN),
    ("UNRESOLVED_COLUMN.WITHOUT_SUGGESTION", Failure.NO_COLUMN),
    ("DELTA_VERSION_NOT_FOUND", Failure.NO_VERSION),
    ("DELTA_TIMESTAMP_EARLIER_THAN_COMMIT_RETENTION", Failure.NO_VERSION),
    ("DELTA_TIMESTAMP_GREATER_THAN_COMMIT", Failure.NO_VERSION),
    ("UNSUPPORTED_FEATURE.TIME_TRAVEL", Failure.NO_TIME_TRAVEL),
    ("FGAC_TIME_TRAVEL_NOT_SUPPORTED", Failure.NO_TIME_TRAVEL),
    ("PARSE_SYNTAX_ERROR", Failure.OTHER),
    ("PARSE_EMPTY_STATEMENT", Failure.OTHER),
    ("INVALID_HANDLE.SESSION_CLOSED", Failure.SESSION_LOST),
    ("INVALID_HANDLE.SESSION_NOT_FOUND", Failure.SESSION_LOST),
    ("INVALID_HANDLE.SESSION_CHANGED", Failure.SESSION_LOST),
    ("NO_ACTIVE_SESSION", Failure.SESSION_LOST),
    ("INVALID_HANDLE.OPERATION_NOT_FOUND", Failure.OTHER),
    ("USER_RAISED_EXCEPTION", Failure.OTHER),
]
SAIL = [
    ("Table not found: [TABLE_OR_VIEW_NOT_FOUND] Table or view not found: nope", Failure.NO_TABLE),
    ("Invalid table location: No commit files found in _delta_log", Failure.NO_TABLE),
    (
        'attribute ObjectName([Identifier("nope")]) is missing from the schema: cannot resolve attribute',
        Failure.NO_COLUMN,
    ),
    ("Missing commit file: expected final version 9, replay reached 0", Failure.NO_VERSION),
    ("No version of the Delta table exists at or before timestamp 1999-01-01T00:00:00.000000Z", Failure.NO_VERSION),
    ("SQL time travel is only supported for Delta and Iceberg tables, got parquet", Failure.NO_TIME_TRAVEL),
    ("SQL time travel is not supported for temporary views", Failure.NO_TIME_TRAVEL),
    ("invalid argument: session c7ca47b4-a2f8-4d48-8a0c-2c05609bca37 is not running", Failure.SESSION_LOST),
    ("invalid argument: found 'PERMISSION_DENIED' at 3:22 expected end of input", Failure.OTHER),
    ("invalid argument: found 'session\nx is not running' at 3:22 expected end of input", Failure.OTHER),
    # also of an operation that was interrupted
    ("invalid argument: operation not found: 392e8de0-19cb-4ae8-8980-6830ef2afc1a", Failure.OTHER),
    ("invalid argument: found > at 6:7 expected '+', '-', '~', 'NOT', '!'", Failure.OTHER),
    ("invalid argument: found end of input expected any, or expression", Failure.OTHER),
    ("boom", Failure.OTHER),
]
GRPC = """<_MultiThreadedRendezvous of RPC that terminated with:
	status = StatusCode.UNAVAILABLE
	details = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
	debug_error_string = "UNKNOWN:Error received from peer"
>"""


class Said(PySparkException):
    """An error with a condition, as the client of Apache Spark makes them."""

    def __init__(self, text: str, condition: str | None = None) -> None:
        super().__init__(message=text)
        self._said = condition

    def getCondition(self) -> str | None:  # noqa: N802 (pyspark's name)
        return self._said

    def __str__(self) -> str:
        return str(self._message)


@pytest.mark.parametrize(("condition", "failure"), APACHE)
def test_apache_is_understood_by_its_conditions(condition: str, failure: Failure) -> None:
    assert classify(Said(f"[{condition}] something. SQLSTATE: 00000", condition)) is failure


def test_the_text_of_a_query_that_does_not_parse_means_nothing() -> None:
    said = "[PARSE_SYNTAX_ERROR] Syntax error at or near 'AND'. SQLSTATE: 42601\n== SQL ==\nx = 'PERMISSION_DENIED' AND"

    assert classify(Said(said, "PARSE_SYNTAX_ERROR")) is Failure.OTHER


@pytest.mark.parametrize(("text", "failure"), SAIL)
def test_sail_is_understood_by_its_texts(text: str, failure: Failure) -> None:
    assert classify(AnalysisException(message=text)) is failure


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (
            "Job aborted due to stage failure: Total size of serialized results of 3 tasks (1.2 GiB) is bigger than "
            "spark.driver.maxResultSize (1024.0 MiB)",
            Failure.TOO_LARGE,
        ),
        ("status = StatusCode.RESOURCE_EXHAUSTED", Failure.TOO_LARGE),
        (GRPC, Failure.UNAVAILABLE),
        # pyspark's, of a server that answers for another session
        ("Received incorrect server side session identifier for request. Please create a", Failure.SESSION_LOST),
        ("[RESPONSE_ALREADY_RECEIVED] INVALID_HANDLE.SESSION_NOT_FOUND from the server", Failure.SESSION_LOST),
        ("", Failure.OTHER),
    ],
)
def test_what_both_say(text: str, failure: Failure) -> None:
    assert classify(Said(text)) is failure
    assert classify(RuntimeError(text)) is failure


def test_the_reason_is_one_line_for_a_person() -> None:
    apache = (
        "\n[PARSE_SYNTAX_ERROR] Syntax error at or near '>'. SQLSTATE: 42601 (line 1, pos 6)\n\n== SQL ==\nid >>>> (\n"
    )

    assert reason(Said(apache)) == "[PARSE_SYNTAX_ERROR] Syntax error at or near '>'. SQLSTATE: 42601 (line 1, pos 6)"
    assert reason(RuntimeError(GRPC)) == (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    )
    assert reason(RuntimeError("Insufficient privileges:\nUser does not\nmore")) == (
        "Insufficient privileges: User does not"
    )
    assert reason(KeyError()) == "KeyError"
    assert reason(RuntimeError("x" * 301)) == "x" * 297 + "..."
    assert reason(RuntimeError("x" * 300)) == "x" * 300


def test_what_spark_raises_becomes_an_error_about_the_subject() -> None:
    cause = AnalysisException(message="boom\nJVM stacktrace: ...")

    with pytest.raises(EngineError, match=r"^main\.ml\.t: boom$") as caught, translated("main.ml.t"):
        raise cause

    assert caught.value.__cause__ is cause


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "invalid argument: session 7 is not running",
            SessionLostError,
            r"^t: the Spark session has ended: invalid argument: session 7 is not running\n  Open another, spark = br",
        ),
        (
            GRPC,
            EngineUnavailableError,
            r"^t: the server went away: failed to connect to all addresses; .*\n  Connect ag",
        ),
    ],
)
def test_what_a_caller_would_act_on_has_its_own_error(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), translated("t"):
        raise AnalysisException(message=text)


@pytest.mark.parametrize("exc", [BridgeError("ours"), ValueError("another's")])
def test_other_errors_pass(exc: Exception) -> None:
    with pytest.raises(type(exc)) as caught, translated("main.ml.t"):
        raise exc

    assert caught.value is exc


@pytest.mark.parametrize("name", ["SQLQueryContextLogger", "DataFrameQueryContextLogger"])
def test_failed_queries_are_not_printed_meanwhile_and_are_afterwards(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    from pyspark.logger import PySparkLogger

    logger = PySparkLogger.getLogger(name)
    logger.addHandler(caplog.handler)
    try:
        with quiet(), quiet():
            logger.error("hidden")
        with quiet():
            logger.error("hidden too")
        assert caplog.messages == []
        logger.error("shown")
        assert "shown" in caplog.messages
    finally:
        logger.removeHandler(caplog.handler)
    assert not logger.filters


def test_pyspark_can_still_log_what_it_logs() -> None:
    """Its loggers take keywords that a plain logger refuses, so the first to ask for one decides."""
    code = """
from bridge.spark.failures import quiet
with quiet():
    pass
from pyspark.logger import PySparkLogger
PySparkLogger.getLogger("SQLQueryContextLogger").exception("failed", errorClass="X")
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert child.returncode == 0, child.stderr
    assert '"errorClass": "X"' in child.stderr
    assert logging.getLoggerClass() is logging.Logger
