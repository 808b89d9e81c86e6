"""Filters: that they can be used, and whether their text says all of what they give."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
    abs and any array array_contains array_size between cast ceil ceiling coalesce concat contains date date_add
    date_sub datediff day dayofweek dayofyear decimal element_at endswith exp floor greatest hour if ifnull in instr
    isnan isnotnull isnull least left length like lower ltrim map_keys map_values minute mod month named_struct not
    nullif nvl or pmod pow power quarter regexp_like replace right rlike round rtrim second sign size split sqrt
    startswith struct substr substring then timestamp to_date to_timestamp trim try_cast upper varchar weekofyear
    when year
    """.split()  # noqa: SIM905 - a list of a hundred strings is no easier to read
)
# What else stands in a filter without being a column. Not FROM, SELECT, TABLE or EXISTS: they read other tables.
_WORDS = frozenset(
    """
    and as asc between bigint binary boolean byte case cast char date day days dec decimal desc div double else end
    escape false float hour hours ilike in int integer interval is like long minute minutes month months not null
    numeric or real regexp rlike second seconds short smallint string then timestamp timestamp_ltz timestamp_ntz
    tinyint true varchar week weeks when year years
    """.split()  # noqa: SIM905
)
_TOKEN = re.compile(
    r"""\s+ | (?P<literal>'[^']*'|"[^"]*") | (?P<quoted>`[^`]*`) | (?P<number>\d[\w.]*|\.\d\w*)
    | (?P<word>[^\W\d]\w*) | (?P<symbol>.)""",
    re.VERBOSE | re.DOTALL,
)
# Spark reads timestamp'now' and date'today' from the clock.
_CLOCK = re.compile(r"['\"]\s*(now|today|tomorrow|yesterday|epoch)\b", re.IGNORECASE)
# words that may stand right before a literal; r'...' means another thing
_TYPED = frozenset({"date", "timestamp", "timestamp_ntz", "timestamp_ltz", "interval", "x"})


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


def where_text(where: str | Column | None, columns: Iterable[str] = ()) -> tuple[str | None, bool]:
    """Return the filter as text, and whether the same text gives the same rows of the same version.

    Args:
        columns: Of what is filtered. Any other name may be a variable of the session.
    """
    if where is None:
        return None, True
    if isinstance(where, str):
        return where.strip(), _is_pure(where.strip(), {column.lower() for column in columns})
    return str(where), False


def _is_pure(where: str, columns: set[str]) -> bool:
    # either may change what a quote means, and so hide what is called
    if "\\" in where or "--" in where or "/*" in where or _CLOCK.search(where):
        return False
    tokens = [found for found in _TOKEN.finditer(where) if not found.group().isspace()]
    for index, token in enumerate(tokens):
        before = tokens[index - 1] if index else None
        after = tokens[index + 1].group() if index + 1 < len(tokens) else ""
        kind, text = token.lastgroup, token.group().strip("`").lower()
        is_part = before is not None and before.group() == "."
        if kind in ("word", "quoted") and after == "(":
            if kind == "quoted" or is_part or text not in _PURE:
                return False
        elif kind == "quoted" or (kind == "word" and text not in _WORDS):
            # a part of a struct stands behind its column, which was looked at
            if not is_part and text not in columns:
                return False
        elif kind == "literal" and before is not None and before.lastgroup == "word":
            is_close = before.end() == token.start()
            if is_close and before.group().lower() not in _TYPED:
                return False
    return True
