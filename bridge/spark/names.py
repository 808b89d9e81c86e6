"""Names in SQL text: parsing, quoting, near names. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bridge.display import did_you_mean, format_names
from bridge.errors import SourceError

_PART = r"`(?:[^`]|``)+`|[^`.]+"
_NAME = re.compile(rf"(?:{_PART})(?:\.(?:{_PART})){{0,2}}")


def parse_name(text: str) -> tuple[str, ...]:
    """Split `catalog.schema.table` into one to three parts; a part in backticks may hold dots and doubled backticks."""
    if re.match(r"\s*(select|with)\s", text, re.IGNORECASE):
        raise SourceError("the source is a query; give a table's name, or pass the DataFrame of spark.sql(...).")
    parts = re.findall(_PART, text) if _NAME.fullmatch(text) else []
    parts = [part[1:-1].replace("``", "`") if part.startswith("`") else part for part in parts]
    if not parts or not all(part.strip() for part in parts):
        raise SourceError(
            f"{text!r} is no table name.\n"
            "  Give table, schema.table or catalog.schema.table; put a part that holds a dot in backticks."
        )
    return tuple(parts)


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
    return did_you_mean(name, known).strip() or (f"There is: {format_names(known)}." if known else "")
