from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import SourceError
from bridge.spark.names import near, parse_name, quote, quote_parts, sql_string

part = st.text(min_size=1, max_size=12).filter(lambda text: bool(text.strip()))
plain = st.text(st.characters(exclude_characters="`."), min_size=1, max_size=12).filter(lambda text: bool(text.strip()))


@given(st.lists(part, min_size=1, max_size=3))
def test_quoted_parts_are_read_back(parts: list[str]) -> None:
    assert parse_name(quote_parts(parts)) == tuple(parts)


@given(st.lists(plain, min_size=1, max_size=3))
def test_plain_parts_need_no_quotes(parts: list[str]) -> None:
    assert parse_name(".".join(parts)) == tuple(parts)


@given(st.text(max_size=20))
def test_every_text_is_a_name_or_an_error(text: str) -> None:
    try:
        parts = parse_name(text)
    except SourceError:
        return
    assert 1 <= len(parts) <= 3
    assert parse_name(quote_parts(parts)) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("t", ("t",)),
        ("main.ml.t", ("main", "ml", "t")),
        ("`a.b`.`c``d`.e f", ("a.b", "c`d", "e f")),
        ("`a`.b", ("a", "b")),
        ("`a/b`", ("a/b",)),
    ],
)
def test_names(text: str, parts: tuple[str, ...]) -> None:
    assert parse_name(text) == parts


@pytest.mark.parametrize(
    "text", ["", ".", "a.", ".a", "a..b", "a.b.c.d", "`a", "a`", "a`b`", "`a`b", "``", "` `", " ", "a. .b", "`a`.", "`"]
)
def test_what_is_no_name_is_told(text: str) -> None:
    with pytest.raises(
        SourceError, match=r"is no table name\.\n  Give table, schema\.table or catalog\.schema\.table;"
    ):
        parse_name(text)


def test_quoting() -> None:
    assert quote("a`b.c") == "`a``b.c`"
    assert quote_parts(["a", "b c"]) == "`a`.`b c`"


def test_a_string_of_sql_has_nothing_that_ends_it() -> None:
    assert sql_string("it's") == r"'it\'s'"
    assert sql_string("a\\") == r"'a\\'"
    assert sql_string("\\' OR 1=1 --") == r"'\\\' OR 1=1 --'"


@given(st.text(st.characters(exclude_characters="\x00"), max_size=30))
def test_a_string_of_sql_is_read_back(text: str) -> None:
    inner = sql_string(text)[1:-1]
    read, rest = "", iter(inner)
    for character in rest:
        assert character != "'"
        read += next(rest) if character == "\\" else character

    assert read == text


def test_near_names_or_what_there_is() -> None:
    assert near("flihgts", ["planes", "flights"]) == 'Did you mean "flights"?'
    assert near("FLIGHTS", ["flights"]) == 'Did you mean "flights"?'
    assert near("x", ["planes", "flights", "planes"]) == "There is: flights, planes."
    assert near("x", []) == ""
    assert near("x", [f"name{n:02d}" for n in range(12)]).endswith("name09 and 2 more.")


@pytest.mark.parametrize("text", ["select * from t", " WITH a AS (SELECT 1) SELECT * FROM a"])
def test_a_query_is_told_from_a_name(text: str) -> None:
    with pytest.raises(SourceError, match=r"the source is a query; give a table's name, or pass the DataFrame"):
        parse_name(text)
