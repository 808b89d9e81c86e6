from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.display import (
    did_you_mean,
    format_bytes,
    format_count,
    format_names,
    format_seconds,
    html_table,
    parse_bytes,
    plain_table,
)
from bridge.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0),
        (4096, 4096),
        (np.int64(4096), 4096),
        ("4096", 4096),
        ("4096 B", 4096),
        ("1GiB", 2**30),
        (" 1 gib ", 2**30),
        ("500 MB", 500_000_000),
        ("1.5 kB", 1500),
        ("0.1GiB", 107374182),
        ("2PiB", 2 * 2**50),
    ],
)
def test_a_size_is_read(value: object, size: int) -> None:
    assert parse_bytes(value, name="max_bytes") == size


@pytest.mark.parametrize("value", ["", "12 parsecs", "1G", "-1", "1e9", "GiB", "1 000", "٣MB", "1,5GB"])
def test_text_that_is_no_size_is_refused(value: str) -> None:
    with pytest.raises(ConfigError) as failure:
        parse_bytes(value, name="max_bytes")
    assert str(failure.value) == f'max_bytes is "{value}"; give an integer or a size such as "512MiB" or "1GB".'


@pytest.mark.parametrize("value", [-1, 1.5, True, None, [1]])
def test_what_is_no_count_of_bytes_is_refused(value: object) -> None:
    with pytest.raises(ConfigError) as failure:
        parse_bytes(value, name="shard_bytes")
    assert str(failure.value) == f'shard_bytes is {value!r}; give an integer or a size such as "512MiB" or "1GB".'


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (512 * 2**20, "512 MiB"),
        (2**30, "1.0 GiB"),
        (2**30 - 1, "1.0 GiB"),
        (int(9.3 * 2**30), "9.3 GiB"),
        (int(9.96 * 2**30), "10 GiB"),
        (40 * 2**30, "40 GiB"),
        (5000 * 2**50, "5000 PiB"),
    ],
)
def test_a_size_is_shown_in_the_unit_that_fits(size: int, shown: str) -> None:
    assert format_bytes(size) == shown


@given(st.integers(0, 2**60))
def test_a_shown_size_reads_back_within_rounding(size: int) -> None:
    assert parse_bytes(format_bytes(size), name="size") == pytest.approx(size, rel=0.06, abs=1)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0351, "35 ms"),
        (0.9996, "1.0 s"),
        (4.24, "4.2 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.7, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_a_duration_is_shown_for_humans(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


def test_a_count_has_its_thousands_apart() -> None:
    assert format_count(336776) == "336,776"


def test_names_are_listed_as_far_as_anybody_reads_them() -> None:
    assert format_names([]) == ""
    assert format_names(["a", "b"], most=2) == "a, b"
    assert format_names(["a", "b", "c", "d"], most=2) == "a, b and 2 more"


def test_the_nearest_name_is_offered_in_its_own_spelling() -> None:
    assert did_you_mean("FLIGTHS", ["Flights", "airports"]) == ' Did you mean "Flights"?'
    assert did_you_mean("max_byte", ["cache_max_bytes", "max_bytes"]) == ' Did you mean "max_bytes"?'
    assert did_you_mean("weather", ["Flights"]) == ""


def test_a_plain_table_is_aligned() -> None:
    table = plain_table(["column", "rows", "note"], [["id", 12, None], ["日付", 3456, "a\nb"]])
    assert table.splitlines() == [
        "column  rows  note",
        "------  ----  ----",
        "id        12",
        "日付    3456  a\\nb",
    ]


def test_a_plain_table_may_have_no_rows() -> None:
    assert plain_table(["a", "bc"], []) == "a  bc\n-  --"


def test_an_html_table_is_escaped() -> None:
    table = html_table(["<column>", "rows"], [["<script>alert(1)</script>", 12], ['"&', None]])
    assert "<script>" not in table
    assert '<th style="text-align: left">&lt;column&gt;</th>' in table
    assert '<td style="text-align: right">12</td>' in table
    assert '<td style="text-align: left">&quot;&amp;</td><td style="text-align: right"></td>' in table


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        html_table(["a"], [["x", "y"]])
