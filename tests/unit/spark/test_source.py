from __future__ import annotations

import pytest
from pyspark.errors import PySparkException

from bridge.errors import EngineError, SourceError, SourceNotFoundError
from bridge.spark.source import _time_travel


class Said(PySparkException):
    """An error with a condition, as a server sends it."""

    def __init__(self, condition: str) -> None:
        super().__init__(message=f"[{condition}] no.")
        self._said = condition

    def getCondition(self) -> str:  # noqa: N802 (pyspark's name)
        return self._said

    def __str__(self) -> str:
        return str(self._message)


@pytest.mark.parametrize(
    ("condition", "error", "message"),
    [
        # a table with row filters or column masks, which only Databricks has
        (
            "FGAC_TIME_TRAVEL_NOT_SUPPORTED",
            SourceError,
            r"^main\.ml\.t cannot be read as of version 3: \[FGAC_TIME_TRAVEL_NOT_SUPPORTED\] no\.",
        ),
        ("DELTA_VERSION_NOT_FOUND", SourceNotFoundError, r"^main\.ml\.t has no version 3: \[DELTA_VERSION_NOT_FOUND\]"),
        ("PATH_NOT_FOUND", SourceNotFoundError, r"^main\.ml\.t is no Delta table: \[PATH_NOT_FOUND\] no\.\n  Give the"),
        ("USER_RAISED_EXCEPTION", EngineError, r"^main\.ml\.t: \[USER_RAISED_EXCEPTION\] no\.$"),
    ],
)
def test_what_a_failed_read_of_a_version_means(condition: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), _time_travel("main.ml.t", 3, None):
        raise Said(condition)


def test_the_newest_version_is_named_as_such() -> None:
    with pytest.raises(SourceNotFoundError, match=r"^t has no newest version: "), _time_travel("t", None, None):
        raise Said("DELTA_VERSION_NOT_FOUND")


def test_a_timestamp_is_named_as_it_was_given() -> None:
    with (
        pytest.raises(SourceNotFoundError, match=r"has no timestamp '1999-01-01': "),
        _time_travel("t", None, "1999-01-01"),
    ):
        raise Said("DELTA_TIMESTAMP_EARLIER_THAN_COMMIT_RETENTION")
