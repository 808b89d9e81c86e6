"""Filters: that they can be used, and whether their text says all of what they give."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bridge.errors import SourceError, SourceNotFoundError
from bridge.spark.failures import Failure, classify, quiet, reason, translated
from bridge.spark.names import quote

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# What a filter may call and still give the same rows of the same version each time. All else may read other tables, the
# clock, the user or chance, or be somebody's own function.
_PURE = frozenset(
    """
    abs and any array_contains array_size array cast ceil ceiling coalesce concat contains date date_add date_sub day
    dayofweek dayofyear datediff decimal element_at endswith exp floor greatest hour if ifnull in instr isnan isnotnull
    isnull least left length like lower ltrim map_keys map_values minute mod month named_struct not nullif nvl or pmod
    pow power quarter regexp_like replace right rlike round rtrim second sign size split sqrt startswith struct
    substr substring timestamp to_date to_timestamp trim try_cast upper varchar weekofyear when year
    """.split()  # noqa: SIM905 - a list of a hundred strings is no easier to read
)
_CALL = re.compile(r"\b([a-z_]\w*)\s*\(", re.IGNORECASE)
# Some are called without parentheses.
_UNSTABLE = re.compile(r"\b(select|current_\w+|localtimestamp|session_user|user)\b", re.IGNORECASE)
# Spark reads timestamp'now' and date'today' from the clock.
_CLOCK = re.compile(r"['\"]\s*(now|today|tomorrow|yesterday)\b", re.IGNORECASE)
_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")


def filtered(frame: DataFrame, where: str | Column, name: str) -> DataFrame:
    """Return the rows of `frame`, which is of `name`, that a filter keeps.

    Raises:
        SourceNotFoundError: It names a column that is not there.
        SourceError: It is no filter, or does not parse.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import Column

    if not isinstance(where, str | Column):
        raise SourceError(f"where is a {type(where).__name__}; give SQL text or a pyspark Column.")
    try:
        with quiet():
            filtered = frame.filter(where)
            # The schema of a filter is that of its input and is not asked for; a projection's is.
            _ = filtered.select(quote(frame.columns[0])).schema
    except PySparkException as exc:
        failure = classify(exc)
        if failure in (Failure.SESSION_LOST, Failure.UNAVAILABLE, Failure.DENIED):
            with translated(name):
                raise
        if failure is Failure.NO_COLUMN:
            raise SourceNotFoundError(
                f"where names a column that {name} does not have: {reason(exc)}\n"
                f"  It has: {', '.join(frame.columns[:20])}."
            ) from exc
        raise SourceError(f"where cannot be used on {name}: {reason(exc)}") from exc
    return filtered


def where_text(where: str | Column | None) -> tuple[str | None, bool]:
    """Return the filter as text, and whether the same text gives the same rows of the same version."""
    if where is None:
        return None, True
    if isinstance(where, str):
        code = _LITERAL.sub("''", where)
        reads_clock = _UNSTABLE.search(code) or _CLOCK.search(where)
        is_pure = not reads_clock and {name.lower() for name in _CALL.findall(code)} <= _PURE
        return where.strip(), is_pure
    return str(where), False
