"""Tables on a terminal, folded to its width; in a pipe each row stays a line."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from bridge.display import format_seconds, plain_table

if TYPE_CHECKING:
    from bridge.columns.contract import TypeContract

_NARROWEST = 12


def print_table(table: object) -> None:
    """Print what prints as a plain table. Where a terminal is too narrow, the text of the last column is folded."""
    lines = str(table).splitlines()
    width = shutil.get_terminal_size((100, 24)).columns
    last_column = lines[1].rfind(" ") + 1
    fold = sys.stdout.isatty() and width - last_column >= _NARROWEST
    for number, line in enumerate(lines):
        if not fold or len(line) <= width:
            print(line)
        elif number == 1:
            print(line[:width])
        else:
            # a path stays whole, so that it can be copied
            pieces = textwrap.wrap(
                line[last_column:], width - last_column, break_on_hyphens=False, break_long_words=False
            )
            print(line[:last_column] + f"\n{' ' * last_column}".join(pieces))


def shown_age(seconds: float) -> str:
    """Return an age in the unit that fits it; a clock that went back shows as none."""
    days = seconds / 86400
    return f"{days:.0f} days" if days >= 2 else format_seconds(max(seconds, 0.0))


def print_types(types: TypeContract) -> None:
    """Print what each column becomes; what is said of many columns is said once, below."""
    headers = ["column", "Spark", "Arrow", "pandas", "NumPy", "torch"]
    print_table(
        plain_table(headers, [[t.name, t.spark, t.arrow, t.pandas, t.numpy, t.torch or "(none)"] for t in types])
    )
    notes: dict[str, list[str]] = {}
    for column in types:
        notes.setdefault(column.nulls.removeprefix("nulls: "), []).append(column.name)
    print()
    print_table(plain_table(["nulls become", "in"], [[note, ", ".join(names)] for note, names in notes.items()]))
