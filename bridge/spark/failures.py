"""What a Spark Connect server meant by an error.

Apache Spark and Databricks send error conditions; Sail sends text. Both are read here and nowhere else, and each
line of the two tables has a test against the engine it was seen on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

from bridge.errors import EngineError


class Failure(Enum):
    """What went wrong, as far as a caller would act differently."""

    NO_TABLE = auto()
    NO_COLUMN = auto()
    NO_VERSION = auto()
    NO_TIME_TRAVEL = auto()
    SYNTAX = auto()
    TOO_LARGE = auto()
    UNAVAILABLE = auto()
    OTHER = auto()


# Conditions of Apache Spark, Delta and Databricks: https://spark.apache.org/docs/latest/sql-error-conditions.html
_CONDITIONS = {
    "TABLE_OR_VIEW_NOT_FOUND": Failure.NO_TABLE,
    "SCHEMA_NOT_FOUND": Failure.NO_TABLE,
    "NO_SUCH_CATALOG_EXCEPTION": Failure.NO_TABLE,
    "CATALOG_NOT_FOUND": Failure.NO_TABLE,
    "REQUIRES_SINGLE_PART_NAMESPACE": Failure.NO_TABLE,
    "PATH_NOT_FOUND": Failure.NO_TABLE,
    "DELTA_TABLE_NOT_FOUND": Failure.NO_TABLE,
    "DELTA_MISSING_DELTA_TABLE": Failure.NO_TABLE,
    "DELTA_PATH_DOES_NOT_EXIST": Failure.NO_TABLE,
    "UNRESOLVED_COLUMN": Failure.NO_COLUMN,
    "DELTA_VERSION_NOT_FOUND": Failure.NO_VERSION,
    "DELTA_TIMESTAMP_EARLIER_THAN_COMMIT_RETENTION": Failure.NO_VERSION,
    "DELTA_TIMESTAMP_GREATER_THAN_COMMIT": Failure.NO_VERSION,
    "UNSUPPORTED_FEATURE": Failure.NO_TIME_TRAVEL,
    "FGAC_TIME_TRAVEL_NOT_SUPPORTED": Failure.NO_TIME_TRAVEL,  # Databricks, by its documentation
    "PARSE_SYNTAX_ERROR": Failure.SYNTAX,
    "PARSE_EMPTY_STATEMENT": Failure.SYNTAX,
}

_TEXTS = (
    (re.compile(r"TABLE_OR_VIEW_NOT_FOUND|Table not found|Invalid table location: No commit files"), Failure.NO_TABLE),
    (re.compile(r"is missing from the schema: cannot resolve attribute"), Failure.NO_COLUMN),
    (
        re.compile(r"Missing commit file: expected final version|No version of the Delta table exists"),
        Failure.NO_VERSION,
    ),
    (re.compile(r"time travel is (not|only) supported"), Failure.NO_TIME_TRAVEL),
    (re.compile(r"invalid argument: found .* expected"), Failure.SYNTAX),
    # Apache gives spark.driver.maxResultSize no condition; gRPC reports a message that is larger than allowed.
    (re.compile(r"is bigger than spark\.driver\.maxResultSize|RESOURCE_EXHAUSTED"), Failure.TOO_LARGE),
    (re.compile(r"StatusCode\.UNAVAILABLE|failed to connect to all addresses"), Failure.UNAVAILABLE),
)


def classify(exc: BaseException) -> Failure:
    """Return what `exc`, raised by a Spark Connect client, means."""
    condition = (getattr(exc, "getCondition", lambda: None)() or "").partition(".")[0]
    if condition in _CONDITIONS:
        return _CONDITIONS[condition]
    text = str(exc)
    return next((failure for pattern, failure in _TEXTS if pattern.search(text)), Failure.OTHER)


def reason(exc: BaseException) -> str:
    """Return the one line of `exc` that a person can use, without stack traces or gRPC dressing."""
    text = str(exc)
    details = re.search(r'details = "(.*?)"\s*(?:debug_error_string|$)', text, re.DOTALL)
    lines = [line.strip() for line in (details.group(1) if details else text).splitlines() if line.strip()]
    line = lines[0] if lines else type(exc).__name__
    return line if len(line) <= 300 else line[:297] + "..."


@contextmanager
def quiet() -> Iterator[None]:
    """Keep pyspark from printing a failed query as JSON on stderr: the error that is raised says it."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    loggers = _query_loggers()
    for logger in loggers:
        logger.addFilter(drop)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(drop)


def _query_loggers() -> list[logging.Logger]:
    try:
        from pyspark.logger import PySparkLogger
    except ImportError:  # a pyspark older than 4.0 prints no failed queries
        return []
    # Asked for through pyspark: a plain logger of the same name would refuse what pyspark gives it to print.
    return [PySparkLogger.getLogger(f"{context}QueryContextLogger") for context in ("SQL", "DataFrame")]


@contextmanager
def translated(subject: str) -> Iterator[None]:
    """Raise what Spark raises as an EngineError about `subject`; errors of `bridge` pass through."""
    from pyspark.errors import PySparkException

    try:
        with quiet():
            yield
    except PySparkException as exc:
        raise EngineError(f"{subject}: {reason(exc)}") from exc
