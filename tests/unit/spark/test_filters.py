from __future__ import annotations

import pytest

from bridge.spark.filters import where_text

COLUMNS = ["id", "name", "s", "day", "a", "b", "c", "x", "y", "at", "owner", "Größe", "a b", "r"]


@pytest.mark.parametrize(
    "where",
    [
        "id > 3 AND name IN ('a', 'b')",
        "s = 'rand()'",
        'date_add(day, 1) < "2024-01-01"',
        "(a OR b) AND NOT (c BETWEEN 1 AND 2)",
        "coalesce(x, cast(y AS double)) > 0",
        "`a b` = 1 AND größe LIKE 'x%' ESCAPE '/'",
        "s.deep.part > 1.5e3 AND s.`odd part` = 2",
        "day > DATE '2024-01-01' - INTERVAL '1' DAY AND at < timestamp'2024-01-01'",
        "CASE WHEN x THEN 1 ELSE 2 END = .5",
        "x BETWEEN 1 AND 2 OR NAME IS NOT NULL",
    ],
)
def test_a_filter_of_columns_and_literals_may_be_reused(where: str) -> None:
    assert where_text(where, COLUMNS) == (where, True)


@pytest.mark.parametrize(
    "where",
    [
        "rand() < 0.5",
        "id IN (SELECT id FROM other)",
        "unix_timestamp() < x",
        "mine(id)",
        "day = current_date",
        "is_member('team')",
        "owner = SESSION_USER",
        "at < timestamp'now'",
        "day = DATE 'today'",
        "id < threshold",
        "id IN (TABLE picks)",
        "id IN (FROM picks)",
        "EXISTS (VALUES 1)",
        "`rand`() < 0.5",
        "/* ' */ rand() < 0.5 /* ' */",
        "id > 1 -- '",
        "rand/**/() < 0.5",
        r"x = r'C:\' AND rand() < 0.5 AND y = 'z'",
        "x = r'a'",
        "main.ml.upper(x) = 'a'",
        "session.x > 1",
        "threshold.x > 1",
        "`threshold` > 1",
    ],
)
def test_a_filter_that_may_read_something_else_is_not(where: str) -> None:
    assert where_text(where, COLUMNS) == (where, False)


def test_spaces_within_a_filter_count() -> None:
    assert where_text(" s = 'a  b' ")[0] == "s = 'a  b'"
