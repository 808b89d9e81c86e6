from __future__ import annotations

import pytest

from bridge.spark.filters import where_text


@pytest.mark.parametrize(
    "where",
    [
        "id > 3 AND name IN ('a', 'b')",
        "s = 'rand()'",
        'date_add(day, 1) < "2024-01-01"',
        "(a OR b) AND NOT (c BETWEEN 1 AND 2)",
        "coalesce(x, cast(y AS double)) > 0",
    ],
)
def test_a_filter_of_columns_and_literals_may_be_reused(where: str) -> None:
    assert where_text(where) == (where, True)


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
    ],
)
def test_a_filter_that_may_read_something_else_is_not(where: str) -> None:
    assert where_text(where) == (where, False)


def test_spaces_within_a_filter_count() -> None:
    assert where_text(" s = 'a  b' ")[0] == "s = 'a  b'"
