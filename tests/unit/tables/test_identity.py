"""What makes two exports the same."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from bridge.spark.engines import Pin
from bridge.spark.shape import Shape
from bridge.tables.identity import Identity, normalized

SCHEMA = pa.schema([("a", pa.string()), ("b", pa.int64())])


@dataclass(frozen=True)
class On:
    is_here: bool = True


@dataclass(frozen=True)
class Asked:
    """The facts of a source on which an identity depends; a source itself needs a server."""

    name: str = "main.ml.t"
    location: str = "/warehouse/t"
    pin: Pin = field(default_factory=lambda: Pin(3, "f", "the newest"))
    columns: tuple[str, ...] = ("a", "b")
    where: str | None = None
    limit: int | None = None
    is_repeatable: bool = True
    is_temporary: bool = False
    where_is_text: bool = True
    engine: On = field(default_factory=On)
    asked_at: str | None = None
    schema: pa.Schema = SCHEMA


@dataclass(frozen=True)
class At:
    address: str = "embedded"
    user: str = "someone"
    time_zone: str = "UTC"
    confs: Any = field(default_factory=dict)


def identity_of(asked: Asked | None = None, at: At | None = None, shape: Shape | None = None, **given: Any) -> Identity:
    facts = {"drop_nulls": [], "to_json": [], "is_shared": False, **given}
    return Identity.of(asked or Asked(), at or At(), shape or Shape(), **facts)  # type: ignore[arg-type]


def test_the_same_facts_are_the_same_export() -> None:
    made = identity_of()

    assert made == identity_of()
    assert made.is_settled
    assert re.fullmatch(r"[0-9a-f]{32}", made.key or "")


@pytest.mark.parametrize(
    "change",
    [
        {"asked": Asked(name="main.ml.u")},
        {"asked": Asked(location="/elsewhere/t")},
        {"asked": Asked(pin=Pin(4, "f", "the newest"))},
        {"asked": Asked(pin=Pin(3, "g", "the newest"))},
        {"asked": Asked(columns=("b", "a"))},
        {"asked": Asked(columns=("a",))},
        {"asked": Asked(where="a > 1")},
        {"asked": Asked(limit=10)},
        {"drop_nulls": ["b"]},
        {"to_json": ["b"]},
        {"is_shared": True},
        {"at": At(address="sc://elsewhere")},
        {"at": At(user="another")},
        {"at": At(time_zone="America/New_York")},
        {"at": At(confs={"spark.sql.ansi.enabled": "false"})},
        {"asked": Asked(schema=pa.schema([("a", pa.string()), ("b", pa.string())]))},
        {"shape": Shape(shard_bytes=1001)},
        {"shape": Shape(row_group_bytes=101)},
        {"shape": Shape(num_shards=3)},
        {"shape": Shape(order_by=("a",))},
        {"shape": Shape(shuffle_at_write=0)},
    ],
    ids=str,
)
def test_each_fact_counts(change: dict[str, Any]) -> None:
    assert identity_of(**change).key not in (None, identity_of().key)


def test_why_a_version_is_pinned_does_not_count() -> None:
    assert identity_of(Asked(pin=Pin(3, "f", "the version that was asked for"))) == identity_of()


def test_users_who_share_have_one_identity() -> None:
    ann, bob = (identity_of(at=At(user=user), is_shared=True) for user in ("ann", "bob"))

    assert ann == bob
    assert ann.key != identity_of(at=At(user="ann")).key


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Asked(pin=Pin(None, None, "a view has no version")), "a view has no version"),
        (Asked(pin=Pin(3, None, "no history")), "no history"),
        (Asked(where="rand() < 0.5", is_repeatable=False), "the filter need not give the same rows twice"),
    ],
    ids=str,
)
def test_what_may_have_changed_has_an_identity_for_a_time(asked: Asked, reason: str) -> None:
    made = identity_of(asked)

    assert (made.key is not None, made.is_settled, made.reason) == (True, False, reason)
    assert identity_of(asked) == made


UNKNOWN = Pin(None, None, "the engine does not tell")


def test_another_version_or_time_is_another_export_where_none_is_pinned() -> None:
    asked = [
        Asked(pin=UNKNOWN, asked_at="2024-01-01"),
        Asked(pin=UNKNOWN, asked_at="2024-01-02"),
        Asked(pin=UNKNOWN),
        Asked(pin=Pin(1, None, "no history")),
        Asked(pin=Pin(2, None, "no history")),
    ]

    assert len({identity_of(each).key for each in asked}) == 5


@pytest.mark.parametrize("name", ["ignoreMissingFiles", "ignoreCorruptFiles"])
def test_rows_that_may_be_left_out_are_not_settled(name: str) -> None:
    made = identity_of(at=At(confs={f"spark.sql.files.{name}": "true"}))

    assert (made.is_settled, made.reason) == (False, f"spark.sql.files.{name} is on, so rows may be left out")
    assert identity_of(at=At(confs={f"spark.sql.files.{name}": "false"})).is_settled


def test_names_of_an_engine_of_ones_own_are_not_those_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    view = Asked(pin=Pin(None, None, "a view has no version"))
    elsewhere = Asked(pin=Pin(None, None, "a view has no version"), engine=On(is_here=False))
    tunnel = At(address="sc://localhost:15002")
    before = identity_of(view).key, identity_of(elsewhere).key, identity_of().key, identity_of(elsewhere, tunnel).key

    monkeypatch.setattr("platform.node", lambda: "another")

    assert identity_of(view).key != before[0]
    assert (identity_of(elsewhere).key, identity_of().key) == before[1:3]
    assert identity_of(elsewhere, tunnel).key != before[3]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Asked(pin=Pin(None, None, "a DataFrame's plan has no version"), is_temporary=True), "exported anew each time"),
        (Asked(where="(a > 1)", where_is_text=False, is_repeatable=False), "give it as text"),
    ],
    ids=str,
)
def test_what_nobody_can_ask_for_again_has_none(asked: Asked, reason: str) -> None:
    made = identity_of(asked)

    assert made.key is None
    assert reason in made.reason


@pytest.mark.parametrize(
    ("where", "same"),
    [
        ("  a >  1\n AND b='x  y' ", "a>1 AND b='x  y'"),
        ("a IN ( 1, 2 )", "a IN(1,2)"),
        ('`a  b` = "c  d"', '`a  b`="c  d"'),
        ("a - -1 > 0", "a - -1>0"),
        (" a > 1 -- b  c", "a > 1 -- b  c"),
        ("a = 'it\\'s  so'  ", "a = 'it\\'s  so'"),
        ("a /* b  c */ > 1", "a /* b  c */ > 1"),
    ],
)
def test_spaces_that_mean_nothing_do_not_count(where: str, same: str) -> None:
    assert normalized(where) == same
