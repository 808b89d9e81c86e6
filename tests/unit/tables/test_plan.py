from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from bridge.columns.contract import type_contract
from bridge.tables.plan import Plan, decide

KIB = 1024
SMALL = Plan(
    source="main.ml.t",
    engine="sail (embedded)",
    columns=("a", "b"),
    where=None,
    limit=None,
    version=7,
    pin_reason="the newest version when the plan was made",
    num_rows=1_234_567,
    rows_from="counted from the Delta log",
    num_bytes=300 * KIB,
    bytes_from="the width of its types",
    is_bound=False,
    max_bytes=512 * KIB,
    route="collect",
    reason="it fits in max_bytes, 512 KiB",
    volume="/data/exports",
    reuses=None,
    reuse_reason="new: none of this version is there",
    types=type_contract(pa.schema([("a", pa.int64()), ("b", pa.string())]), {}),
)


@pytest.mark.parametrize(
    ("num_bytes", "route", "chosen", "reason"),
    [
        (0, "auto", "collect", "it fits in max_bytes, 512 KiB"),
        (512 * KIB, "auto", "collect", "it fits in max_bytes, 512 KiB"),
        (512 * KIB + 1, "auto", "export", "it does not fit in max_bytes, 512 KiB"),
        (None, "auto", "collect", "the size is unknown; past max_bytes, 512 KiB, it becomes an export"),
        (0, "collect", "collect", "asked for; it stops at max_bytes, 512 KiB"),
        (2**50, "collect", "collect", "asked for; it stops at max_bytes, 512 KiB"),
        (None, "collect", "collect", "asked for; it stops at max_bytes, 512 KiB"),
        (0, "export", "export", "asked for"),
        (2**50, "export", "export", "asked for"),
        (None, "export", "export", "asked for"),
    ],
)
def test_the_route(num_bytes: int | None, route: str, chosen: str, reason: str) -> None:
    assert decide(num_bytes, 512 * KIB, route) == (chosen, reason)


@pytest.mark.parametrize("route", ["Auto", "", "both", None])
def test_there_are_three_routes(route: Any) -> None:
    with pytest.raises(ValueError, match=r'route is .*; give "auto", "collect" or "export"'):
        decide(1, 1, route)


def test_a_plan_prints_what_was_decided_and_why() -> None:
    lines = [line.split(maxsplit=1) for line in str(SMALL).splitlines()]

    assert lines[2:] == [
        ["source", "main.ml.t"],
        ["engine", "sail (embedded)"],
        ["columns", "a, b"],
        ["version", "7 (the newest version when the plan was made)"],
        ["rows", "1,234,567 (counted from the Delta log)"],
        ["bytes", "in memory  300 KiB (the width of its types)"],
        ["route", "collect: it fits in max_bytes, 512 KiB"],
    ]
    assert repr(SMALL) == str(SMALL)


def test_a_plan_tells_what_is_unknown_and_what_is_a_bound() -> None:
    unknown = str(replace(SMALL, version=None, pin_reason="a view has no version", num_rows=None, num_bytes=None))
    bound = str(replace(SMALL, is_bound=True, where="a > 1", limit=2000))

    assert "none (a view has no version)" in unknown
    assert "unknown (counted from the Delta log)" in unknown
    assert "unknown (the width of its types)" in unknown
    assert "at most 1,234,567 (" in bound
    assert "at most 300 KiB (" in bound
    assert "where            a > 1" in bound
    assert "limit            2,000" in bound


def test_a_plan_of_an_export_tells_where_it_goes() -> None:
    plan = replace(SMALL, route="export", reason="asked for")

    assert "volume           /data/exports" in str(plan)
    assert "export           new: none of this version is there" in str(plan)
    assert "volume           none" in str(replace(plan, volume=None))
    assert "/data/exports" not in str(SMALL)


def test_many_columns_are_counted() -> None:
    plan = replace(SMALL, columns=tuple(f"c{index}" for index in range(11)))

    assert "c0, c1, c2, c3, c4, c5, c6, c7 and 3 more" in str(plan)


def test_in_notebooks_text_is_escaped() -> None:
    shown = replace(SMALL, where="a < 1 AND b = '<script>'", columns=("<i>",))._repr_html_()

    assert "a &lt; 1 AND b = &#x27;&lt;script&gt;&#x27;" in shown
    assert "<script>" not in shown
    assert "<i>" not in shown
    assert shown.count("<tr>") == 9
