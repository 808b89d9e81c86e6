"""Sizes, times, counts and names for humans, tables as plain text and HTML, and near names for error messages."""

from __future__ import annotations

import difflib
import html
import operator
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal

from rich.cells import cell_len

from bridge.errors import ConfigError

_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL_UNITS)} | {
    unit.lower(): 1024**power for power, unit in enumerate(_BINARY_UNITS)
}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[a-zA-Z]*)", re.ASCII)


def parse_bytes(value: object, *, name: str) -> int:
    """Return a number of bytes, given as an integer or as text such as "512MiB", "1.5 GB" or "4096".

    Units are B, kB to PB (powers of 1000) and KiB to PiB (powers of 1024), in any case. "1G" is refused, since it is
    read both ways.

    Args:
        value: What was given.
        name: What it was given for; the error names it.

    Raises:
        ConfigError: `value` is negative or not a size.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        factor = _FACTORS.get((match["unit"] or "B").lower()) if match else None
        if match and factor:
            return int(Decimal(match["number"]) * factor)
    elif not isinstance(value, bool):
        try:
            size = operator.index(value)  # type: ignore[arg-type]  # any integer type, NumPy's too, and no float
        except TypeError:
            pass
        else:
            if size >= 0:
                return size
    seen = f'"{value}"' if isinstance(value, str) else repr(value)
    raise ConfigError(f'{name} is {seen}; give an integer or a size such as "512MiB" or "1GB".')


def format_bytes(size: float) -> str:
    """Return a size in the binary unit that fits, such as "512 B", "9.3 GiB" or "40 GiB"."""
    units = iter(_BINARY_UNITS)
    unit = next(units)
    # 1023.5 KiB would be printed as 1024 KiB: it is 1.0 MiB
    while size >= 1023.5 and unit != _BINARY_UNITS[-1]:
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if unit == "B" or size >= 9.95 else f"{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration such as "35 ms", "4.2 s", "42 s", "3 min 20 s" or "2 h 05 min"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_count(count: int) -> str:
    """Return a count with its thousands apart, such as "336,776"."""
    return f"{count:,}"


def format_names(names: Sequence[str], most: int = 10) -> str:
    """Return the first names, and how many there are beyond, such as "a, b and 3 more"."""
    more = f" and {format_count(len(names) - most)} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with a leading space, such as ' Did you mean "flights"?', or "" if no known name is near."""
    spelled = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), spelled, n=1)
    return f' Did you mean "{spelled[near[0]]}"?' if near else ""


def plain_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an aligned table of text without a trailing newline: a line of headers, a rule, a line for each row.

    Numbers stand right, everything else left; None is an empty cell. Every row has as many cells as there are headers.
    """
    body = list(rows)
    columns = [[headers[i], *(row[i] for row in body)] for i in range(len(headers))]
    padded = [_pad_column([_text(cell) for cell in column], right=_holds_numbers(column[1:])) for column in columns]
    lines = ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
    rule = "  ".join("-" * cell_len(column[0]) for column in padded)
    return "\n".join([*lines[:1], rule, *lines[1:]])


def html_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the table of `plain_table` as an HTML `<table>`, with every header and cell escaped."""
    body = list(rows)
    columns = [[row[i] for row in body] for i in range(len(headers))]
    aligns = ["right" if _holds_numbers(column) else "left" for column in columns]

    def line(tag: str, cells: Sequence[object]) -> str:
        made = (
            f'<{tag} style="text-align: {align}">{html.escape(_text(cell))}</{tag}>'
            for align, cell in zip(aligns, cells, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    head, lines = line("th", headers), "\n".join(line("td", row) for row in body)
    return f"<table>\n<thead>\n{head}\n</thead>\n<tbody>\n{lines}\n</tbody>\n</table>"


def printable(text: str) -> str:
    """Escape what is not to be shown: a name may hold line breaks, terminal codes and bytes that are no text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _text(cell: object) -> str:
    return "" if cell is None else printable(str(cell))


def _holds_numbers(cells: Sequence[object]) -> bool:
    given = [cell for cell in cells if cell is not None]
    return bool(given) and all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in given)


def _pad_column(cells: Sequence[str], *, right: bool) -> list[str]:
    width = max(map(cell_len, cells))
    gaps = (" " * (width - cell_len(cell)) for cell in cells)
    return [gap + cell if right else cell + gap for cell, gap in zip(cells, gaps, strict=True)]
