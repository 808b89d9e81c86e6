"""Tables on a terminal, folded to its width; in a pipe each row stays a line."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridge.display import plain_table

if TYPE_CHECKING:
    from bridge.columns.contract import TypeContract


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; where the terminal is too narrow for it, the text of wide columns is folded."""
    text = plain_table(headers, rows)
    width = shutil.get_terminal_size((100, 24)).columns
    if not sys.stdout.isatty() or all(len(line) <= width for line in text.splitlines()):
        print(text)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for header in headers:
        table.add_column(Text(f"{header}\n{'-' * len(header)}"), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(width=width, highlight=False).print(table)


def print_types(types: TypeContract) -> None:
    """Print what each column becomes; what is said of many columns is said once, below."""
    print_table(
        ["column", "Spark", "Arrow", "pandas", "NumPy", "torch"],
        [[t.name, t.spark, t.arrow, t.pandas, t.numpy, t.torch or "(none)"] for t in types],
    )
    notes: dict[str, list[str]] = {}
    for column in types:
        notes.setdefault(column.nulls.removeprefix("nulls: "), []).append(column.name)
    print()
    print_table(["nulls become", "in"], [[note, ", ".join(names)] for note, names in notes.items()])
