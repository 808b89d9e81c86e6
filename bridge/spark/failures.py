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

from bridge.errors import AccessDeniedError, EngineError, EngineUnavailableError, SessionLostError


class Failure(Enum):
    """What went wrong, as far as a caller would act differently."""

    NO_TABLE = auto()
    NO_COLUMN = auto()
    NO_VERSION = auto()
    NO_TIME_TRAVEL = auto()
    TOO_LARGE = auto()
    DENIED = auto()
    NOT_WRITTEN = auto()
    UNAVAILABLE = auto()
    SESSION_LOST = auto()
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
    # Of tables with row filters or column masks, which only Databricks has: by its documentation.
    "FGAC_TIME_TRAVEL_NOT_SUPPORTED": Failure.NO_TIME_TRAVEL,
    "FGAC_TIME_TRAVEL_SCHEMA_MISMATCH": Failure.NO_TIME_TRAVEL,
    "ROW_LEVEL_SECURITY_COLUMN_MASK_FEATURE_NOT_SUPPORTED": Failure.NO_TIME_TRAVEL,
    "ROW_LEVEL_SECURITY_FEATURE_NOT_SUPPORTED": Failure.NO_TIME_TRAVEL,
    "COLUMN_MASKS_FEATURE_NOT_SUPPORTED": Failure.NO_TIME_TRAVEL,
    "INSUFFICIENT_PERMISSIONS": Failure.DENIED,
    "PERMISSION_DENIED": Failure.DENIED,
    "UNAUTHORIZED_ACCESS": Failure.DENIED,
    # The client's own, once it has heard that the server was started again.
    "NO_ACTIVE_SESSION": Failure.SESSION_LOST,
    "TASK_WRITE_FAILED": Failure.NOT_WRITTEN,
    # Their text holds what was asked, in which anything may stand.
    "PARSE_SYNTAX_ERROR": Failure.OTHER,
    "PARSE_EMPTY_STATEMENT": Failure.OTHER,
}

# Of INVALID_HANDLE, what it says of the session; that of one operation may be invalid because it was interrupted.
_SESSION_HANDLES = frozenset({"SESSION_CLOSED", "SESSION_NOT_FOUND", "SESSION_CHANGED"})

# SQLSTATE 42501 is insufficient privilege, whatever the condition.
_DENIED_STATE = "42501"

_TEXTS = (
    # Sail quotes what it cannot parse, in which anything may stand
    (re.compile(r"invalid argument: found .* expected", re.DOTALL), Failure.OTHER),
    (re.compile(r"TABLE_OR_VIEW_NOT_FOUND|Table not found|Invalid table location: No commit files"), Failure.NO_TABLE),
    (re.compile(r"is missing from the schema: cannot resolve attribute"), Failure.NO_COLUMN),
    (
        re.compile(r"Missing commit file: expected final version|No version of the Delta table exists"),
        Failure.NO_VERSION,
    ),
    (re.compile(r"time travel is (not|only) supported"), Failure.NO_TIME_TRAVEL),
    # Apache gives spark.driver.maxResultSize no condition; gRPC reports a message that is larger than allowed.
    (re.compile(r"is bigger than spark\.driver\.maxResultSize|RESOURCE_EXHAUSTED"), Failure.TOO_LARGE),
    # Databricks sends some refusals without a condition, from below Spark.
    (re.compile(r"PERMISSION_DENIED|INSUFFICIENT_PERMISSIONS|SQLSTATE: 42501"), Failure.DENIED),
    (
        re.compile(
            r"INVALID_HANDLE\.SESSION_(?:CLOSED|NOT_FOUND|CHANGED)|session \S+ is not running"
            r"|incorrect server side session identifier"
        ),
        Failure.SESSION_LOST,
    ),
    (re.compile(r"StatusCode\.UNAVAILABLE|failed to connect to all addresses"), Failure.UNAVAILABLE),
)

# Unity Catalog's words, and those of the older table access control, which joins privileges by commas.
_LACKS = re.compile(
    r"does not have (?:permission )?(?P<privileges>[A-Z][A-Z_ ,]*[A-Z]) on (?P<kind>[A-Za-z][A-Za-z ]*?)"
    r" [`'\"](?P<name>[^`'\"]+)[`'\"]"
)


def classify(exc: BaseException) -> Failure:
    """Return what `exc`, raised by a Spark Connect client, means."""
    condition, _, detail = (getattr(exc, "getCondition", lambda: None)() or "").partition(".")
    if condition == "INVALID_HANDLE":
        return Failure.SESSION_LOST if detail in _SESSION_HANDLES else Failure.OTHER
    if condition in _CONDITIONS:
        return _CONDITIONS[condition]
    if getattr(exc, "getSqlState", lambda: None)() == _DENIED_STATE:
        return Failure.DENIED
    text = str(exc)
    return next((failure for pattern, failure in _TEXTS if pattern.search(text)), Failure.OTHER)


def reason(exc: BaseException) -> str:
    """Return the one line of `exc` that a person can use, without stack traces or gRPC dressing."""
    text = str(exc)
    details = re.search(r'details = "(.*?)"\s*(?:debug_error_string|$)', text, re.DOTALL)
    lines = [line.strip() for line in (details.group(1) if details else text).splitlines() if line.strip()]
    line = lines[0] if lines else type(exc).__name__
    if line.endswith(":") and len(lines) > 1:  # as Databricks breaks its lines
        line = f"{line} {lines[1]}"
    return line if len(line) <= 300 else line[:297] + "..."


def root_cause(exc: BaseException) -> str:
    """Return the first of all causes, where the server tells of several; else the reason."""
    trace = getattr(exc, "getStackTrace", lambda: None)() or ""
    causes = re.findall(r"^Caused by: (?:\([\w.$]+\) )?(?:[\w.$]+: )?(.*)$", trace, re.MULTILINE)
    return causes[-1].strip() if causes else reason(exc)


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
    """Raise what Spark raises as an EngineError about `subject`; errors of `bridge` pass through.

    Raises:
        SessionLostError, EngineUnavailableError, AccessDeniedError: What a caller would act on differently.
    """
    from pyspark.errors import PySparkException

    try:
        with quiet():
            yield
    except PySparkException as exc:
        raise _meaning(subject, exc) from exc


def _meaning(subject: str, exc: BaseException) -> EngineError:
    failure = classify(exc)
    if failure is Failure.SESSION_LOST:
        return SessionLostError(
            f"{subject}: the Spark session has ended: {reason(exc)}\n"
            "  Open another, spark = bridge.connect(), and repeat the call. DataFrames and temporary views of the old "
            "session ended with it: make them again."
        )
    if failure is Failure.UNAVAILABLE:
        return EngineUnavailableError(
            f"{subject}: the server went away: {reason(exc)}\n  Connect again and repeat the call."
        )
    if failure is Failure.DENIED:
        return AccessDeniedError(f"{subject}: {_denial(exc)}")
    return EngineError(f"{subject}: {reason(exc)}")


def _denial(exc: BaseException) -> str:
    """Say what is not granted and what to ask for: Unity Catalog wants the privilege, and USE of all that is above."""
    told = _LACKS.search(str(exc))
    if told is None:
        return f"access is denied: {reason(exc)}\n  Ask who owns it, or an administrator of the workspace."
    kind, parts = told["kind"], told["name"].split(".")
    name = _plain(parts)
    also = []
    if told["privileges"] == "WRITE VOLUME":
        also.append(f"READ VOLUME ON VOLUME {name}")
    if len(parts) > 1:
        also.append(f"USE CATALOG ON CATALOG {_plain(parts[:1])}")
    if len(parts) > 2:
        also.append(f"USE SCHEMA ON SCHEMA {_plain(parts[:2])}")
    return (
        f"{told['privileges']} on {kind.lower()} {name} is not granted to you.\n"
        f"  Ask its owner: GRANT {told['privileges']} ON {kind.upper()} {name} TO `<you>`"
        + (f"; also needed: {', '.join(also)}." if also else ".")
    )


def _plain(parts: list[str]) -> str:
    return ".".join(part if re.fullmatch(r"\w+", part) else f"`{part}`" for part in parts)
