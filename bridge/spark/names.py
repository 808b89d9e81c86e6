"""Names in SQL text: parsing, quoting, near names. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bridge.display import did_you_mean
from bridge.errors import SourceError

_PART = re.compile(r"`((?:[^`]|``)+)`|([^`.]+)")


def parse_name(text: str) -> tuple[str, ...]:
    """Split `catalog.schema.table` into one to three parts; a part in backticks may hold dots and doubled backticks.

    Raises:
        SourceError: It is a query, a part is empty, a backtick is unbalanced, or there are more than three parts.
    """
    if re.match(r"\s*(select|with)\s", text, re.IGNORECASE):
        raise SourceError("the source is a query; give a table's name, or pass the DataFrame of spark.sql(...).")
    parts: list[str] = []
    position = 0
    while True:
        match = _PART.match(text, position)
        if match is None:
            break
        parts.append(match.group(1).replace("``", "`") if match.group(1) else match.group(2))
        position = match.end()
        if position == len(text):
            break
        if text[position] != ".":
            raise _bad_name(text)
        position += 1
    if position != len(text) or text.endswith(".") or not 1 <= len(parts) <= 3 or any(not p.strip() for p in parts):
        raise _bad_name(text)
    return tuple(parts)


def _bad_name(text: str) -> SourceError:
    return SourceError(
        f"{text!r} is no table name.\n"
        "  Give table, schema.table or catalog.schema.table; put a part that holds a dot in backticks."
    )


def quote(name: str) -> str:
    """Return `name` as one quoted identifier."""
    return "`" + name.replace("`", "``") + "`"


def quote_parts(parts: Iterable[str]) -> str:
    """Return the parts of a name as one quoted, dotted identifier."""
    return ".".join(quote(part) for part in parts)


def sql_string(text: str) -> str:
    """Return `text` as a SQL string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def near(name: str, known: Iterable[str]) -> str:
    """Return a sentence that offers the name of `known` nearest to `name`, or says what there is; "" for nothing."""
    known = sorted(set(known))
    shown = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
    return did_you_mean(name, known).strip() or (f"There is: {shown}." if known else "")
