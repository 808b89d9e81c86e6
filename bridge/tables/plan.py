"""The decision between collect and export, and the plan that explains it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bridge.columns.contract import TypeContract
from bridge.display import format_bytes, format_count, format_names, html_table, plain_table

Route = Literal["collect", "export"]


@dataclass(frozen=True)
class Plan:
    """What a load will do, and why. Prints as a table, in notebooks as HTML.

    `num_rows` and `num_bytes` (of Arrow memory) are None where unknown, and upper bounds where `is_bound`. `version`
    is None where none is held fast; `pin_reason` says why. `volume` is where an export would go, `stand_in` the
    folder that stands for it where it is not mounted; `reuses` is the complete export that would be taken instead of
    a new one; `num_dropped` how many rows are left out because one of the columns `drops_nulls` is NULL, None where
    that took too long to count.
    """

    source: str
    engine: str
    columns: tuple[str, ...]
    where: str | None
    limit: int | None
    version: int | None
    pin_reason: str
    num_rows: int | None
    rows_from: str
    num_bytes: int | None
    bytes_from: str
    is_bound: bool
    max_bytes: int
    route: Route
    reason: str
    volume: str | None
    reuses: str | None
    reuse_reason: str
    types: TypeContract
    drops_nulls: tuple[str, ...] = ()
    num_dropped: int | None = None
    stand_in: str | None = None

    def _rows(self) -> list[tuple[str, str]]:
        at_most = "at most " if self.is_bound else ""
        rows = "unknown" if self.num_rows is None else f"{at_most}{format_count(self.num_rows)}"
        size = "unknown" if self.num_bytes is None else f"{at_most}{format_bytes(self.num_bytes)}"
        version = "none" if self.version is None else str(self.version)
        lines = [
            ("source", self.source),
            ("engine", self.engine),
            ("columns", format_names(self.columns, 8)),
            ("where", self.where),
            ("limit", None if self.limit is None else format_count(self.limit)),
            ("version", f"{version} ({self.pin_reason})"),
            ("rows", f"{rows} ({self.rows_from})"),
            ("rows dropped", self._dropped()),
            ("bytes in memory", f"{size} ({self.bytes_from})"),
            ("route", f"{self.route}: {self.reason}"),
        ]
        if self.route == "export":
            where = "" if self.stand_in is None else f" (not mounted here; {self.stand_in} stands for it)"
            lines += [("volume", f"{self.volume or 'none'}{where}"), ("export", self.reuse_reason or None)]
        return [(name, text) for name, text in lines if text is not None]

    def _dropped(self) -> str | None:
        if not self.drops_nulls:
            return None
        count = "not counted within 10 s" if self.num_dropped is None else format_count(self.num_dropped)
        return f"{count} (NULL in {' or '.join(self.drops_nulls)})"

    def __str__(self) -> str:
        return plain_table(["plan", ""], self._rows())

    def _repr_html_(self) -> str:
        return html_table(["plan", ""], self._rows())

    __repr__ = __str__


def decide(num_bytes: int | None, max_bytes: int, route: str) -> tuple[Route, str]:
    """Return the route and its reason.

    Args:
        num_bytes: Estimated Arrow bytes of the result, None where unknown.
        max_bytes: The ceiling of a collect.
        route: "auto", "collect" or "export".
    """
    if route not in ("auto", "collect", "export"):
        raise ValueError(f'route is {route!r}; give "auto", "collect" or "export".')
    ceiling = format_bytes(max_bytes)
    if route == "collect":
        return "collect", f"asked for; it stops at max_bytes, {ceiling}"
    if route == "export":
        return "export", "asked for"
    if num_bytes is None:
        return "collect", f"the size is unknown; past max_bytes, {ceiling}, it becomes an export"
    if num_bytes <= max_bytes:
        return "collect", f"it fits in max_bytes, {ceiling}"
    return "export", f"it does not fit in max_bytes, {ceiling}"
