"""Columns of every Spark type, what Spark itself says that they hold, and Python's values put beside that.

The reference of a column is text that Spark SQL makes of it. `known` reads that text, `seen` what a hand-off gave; both
know nothing of `bridge`, and what they return is equal exactly if the values are, floats to the bit.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd

# "int", "bool", "float32", "float64", "decimal", "text", "bytes", "date", "instant", "wall" or "span", or one of these
# with what it is made of: ("list", form), ("map", form), ("struct", {name: form})
Form = Any

EPOCH = np.datetime64(0, "us")
BOTH = ("numpy", "torch")

PATTERNS = {
    "no nulls": ("{value}", "range({n})", "id"),
    "some nulls": ("IF(id % 2 = 1, NULL, {value})", "range(2 * {n})", "CAST(floor(id / 2) AS BIGINT)"),
    "all nulls": ("IF(id >= 0, NULL, {value})", "range({n})", "id"),
    "empty": ("{value}", "range({n}) WHERE id < 0", "id"),
}


@dataclass(frozen=True)
class Kind:
    """A column: its values in SQL, how Spark is asked for them, and what the hand-offs owe.

    Attributes:
        spark: The type that the values are cast to; "" where they have it.
        column: The column of the source, where the policies give another name to what comes of it.
        refused: Hand-offs that take no column of the type.
        no_nulls: Hand-offs that take the column only without nulls.
        not_these: Hand-offs that do not take the values here.
        pandas, numpy, torch: The types of what comes; for lists and torch that of the elements. "" for torch's lists
            and dicts.
    """

    name: str
    form: Form
    spark: str
    values: Sequence[str]
    pandas: str
    numpy: str
    torch: str
    reference: str = "CAST({c} AS STRING)"
    column: str = ""
    refused: Sequence[str] = ()
    no_nulls: Sequence[str] = ()
    not_these: Sequence[str] = ()
    policy: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def source(self) -> str:
        """The name of the column that Spark has."""
        return self.column or self.name

    def sql(self, pattern: str, count: int) -> str:
        """Return the expression of the column."""
        cast = [f"CAST({value} AS {self.spark})" if self.spark else value for value in self.values]
        cases = " ".join(f"WHEN {i} THEN {value}" for i, value in enumerate(cast))
        value = f"CASE {PATTERNS[pattern][2]} % {len(cast)} {cases} ELSE {cast[0]} END" if len(cast) > 1 else cast[0]
        return f"{PATTERNS[pattern][0].format(value=value, n=count)} AS `{self.source}`"


def select(kinds: Sequence[Kind], pattern: str) -> str:
    """Return the query that gives all columns, each value at least once, and `row`, which numbers the rows."""
    count = max(len(kind.values) for kind in kinds)
    columns = {kind.source: kind.sql(pattern, count) for kind in kinds}
    return f"SELECT id AS row, {', '.join(columns.values())} FROM {PATTERNS[pattern][1].format(n=count)}"


def references(frame: Any, kinds: Sequence[Kind]) -> dict[str, list[Any]]:
    """Return what Spark says that each column holds, by row."""
    asked = [f"{kind.reference.format(c=f'`{kind.source}`')} AS `{kind.name}`" for kind in kinds]
    told = frame.selectExpr("row", *asked).toArrow().sort_by("row")
    return {kind.name: [known(kind.form, text) for text in told[kind.name].to_pylist()] for kind in kinds}


def known(form: Form, text: Any) -> Any:
    """Return what Spark's text says."""
    if text is None:
        return None
    if not isinstance(form, str):
        return _from_json(form, json.loads(text))
    if form == "text":
        return bytes.fromhex(text).decode()
    if form == "bytes":
        return bytes.fromhex(text)
    if form == "bool":
        return {"true": True, "false": False}[text]
    if form == "wall":
        return _micros(np.datetime64(text.replace(" ", "T"), "us"))
    if form == "span":
        return _interval(text)
    if form == "decimal":
        return Decimal(text)
    return seen(form, text if form.startswith("float") else int(text))


def _from_json(form: Form, value: Any) -> Any:
    if value is None or isinstance(form, str):
        return Decimal(value) if form == "decimal" and value is not None else seen(form, value)
    kind, inner = form
    if kind == "list":
        return [_from_json(inner, element) for element in value]
    # to_json leaves out what is NULL
    return {key: _from_json(inner if kind == "map" else inner[key], element) for key, element in value.items()}


def seen(form: Form, value: Any, *, nan_is_null: bool = False) -> Any:
    """Return what a hand-off gave, in the terms of `known`.

    Args:
        nan_is_null: Whether the hand-off has no other null for floats than NaN.
    """
    if value is None or value is pd.NA or value is pd.NaT:
        return _bits("float64", float("nan")) if nan_is_null and str(form).startswith("float") else None
    if isinstance(form, tuple):
        kind, inner = form
        if kind == "list":
            return [seen(inner, element, nan_is_null=nan_is_null) for element in value]
        pairs = dict(value).items()
        if kind == "map":
            return {key: seen(inner, element, nan_is_null=nan_is_null) for key, element in pairs}
        # to_json leaves out what is NULL
        return {key: seen(inner[key], element) for key, element in pairs if element is not None}
    if form.startswith("float"):
        return _bits(form, value)
    if form == "bool":
        assert isinstance(value, bool | np.bool_), type(value)
        return bool(value)
    if form == "text":
        assert isinstance(value, str), type(value)
        return value
    if form == "bytes":
        assert isinstance(value, bytes), type(value)
        return value
    if form == "decimal":
        assert isinstance(value, Decimal | int | np.integer), type(value)
        return Decimal(value) if isinstance(value, Decimal) else Decimal(int(value))
    if isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64):
        return int(value)
    assert form in ("date", "instant", "wall", "span"), type(value)
    return _time(form, value)


def _bits(form: str, value: Any) -> str:
    number = np.float32(value) if form == "float32" else float(value)
    return "NaN" if number != number else struct.pack("<d", float(number)).hex()


def _time(form: str, value: Any) -> int | None:
    if form == "date" and isinstance(value, dt.datetime) and not isinstance(value, pd.Timestamp):
        # a date within a struct, in pandas
        assert value.time() == dt.time(), value
        value = value.date()
    if isinstance(value, dt.datetime) and not isinstance(value, pd.Timestamp):
        assert (value.tzinfo is not None) == (form == "instant"), value
        # Python's own arithmetic: exact to the microsecond in all years
        since = value.replace(tzinfo=None) - (value.utcoffset() or dt.timedelta()) - dt.datetime(1970, 1, 1)
        return since // dt.timedelta(microseconds=1)
    if isinstance(value, dt.timedelta) and not isinstance(value, pd.Timedelta):
        return value // dt.timedelta(microseconds=1)
    if isinstance(value, dt.date) and not isinstance(value, pd.Timestamp):
        return (value - dt.date(1970, 1, 1)).days
    if isinstance(value, pd.Timestamp):
        assert (value.tzinfo is not None) == (form == "instant"), value
    value = value.asm8 if isinstance(value, pd.Timestamp | pd.Timedelta) else value
    if np.isnat(value):
        return None
    if form == "span":
        return int(value.astype("timedelta64[us]").astype(np.int64))
    if form == "date":
        day = value.astype("datetime64[D]")
        assert day == value, value
        return int(day.astype(np.int64))
    return _micros(value)


def _micros(moment: np.datetime64) -> int:
    return int((moment.astype("datetime64[us]") - EPOCH).astype(np.int64))


def _interval(text: str) -> int:
    parts = re.fullmatch(r"INTERVAL '(-?)(\d+) (\d+):(\d+):(\d+)(?:\.(\d+))?' DAY TO SECOND", text)
    assert parts, text
    sign, days, hours, minutes, seconds, fraction = parts.groups()
    whole = ((int(days) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)
    return (-1 if sign else 1) * (whole * 1_000_000 + int((fraction or "").ljust(6, "0")))


def _micros_sql(*moments: str) -> list[str]:
    return [f"timestamp_micros({_micros(np.datetime64(moment))})" for moment in moments]


def _ints(name: str, spark: str, bits: int, torch: str) -> Kind:
    values = [f"'{value}'" for value in (0, 1, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)))]
    if bits == 64:
        values += ["'9223372036854775707'", "'9007199254740993'"]
    return Kind(name, "int", spark, values, f"Int{bits}", f"int{bits}", torch, no_nulls=BOTH)


TIMES = [
    Kind(
        "at", "instant", "",
        _micros_sql(
            "1600-01-01T00:00:00.000001", "9999-12-31T23:59:59.999999", "1969-12-31T23:59:59.999999",
            "1970-01-01", "2024-03-10T10:30:00.000001", "1883-11-18T17:00:00", "1582-10-04T12:00:00.5",
        ),
        "datetime64[us, UTC]", "datetime64[us]", "int64", reference="CAST(unix_micros({c}) AS STRING)",
        no_nulls=["torch"],
    ),
    Kind(
        "wall", "wall", "TIMESTAMP_NTZ",
        ["'1600-01-01 00:00:00.000001'", "'9999-12-31 23:59:59.999999'", "'1969-12-31 23:59:59.999999'",
         "'2024-03-10 02:30:00'", "'0001-01-01 00:00:00'", "'1582-10-10 00:00:00'"],
        "datetime64[us]", "datetime64[us]", "int64", no_nulls=["torch"],
    ),
]  # fmt: skip

_TINY_ARRAYS = ["array(1, 2, 3)", "array(-2147483648, 0, 2147483647)"]
_RAGGED = ["array(1, 2, 3)", "array()", "array(2147483647)"]
_LISTS = {"no_nulls": BOTH, "reference": "to_json({c})"}

KINDS = [
    Kind("flag", "bool", "", ["true", "false"], "boolean", "bool", "bool", no_nulls=BOTH),
    _ints("i8", "TINYINT", 8, "int8"),
    _ints("i16", "SMALLINT", 16, "int16"),
    _ints("i32", "INT", 32, "int32"),
    _ints("i64", "BIGINT", 64, "int64"),
    Kind(
        "f32", "float32", "FLOAT",
        ["'NaN'", "'-0.0'", "'0.0'", "'Infinity'", "'-Infinity'", "'1.4E-45'", "'3.4028235E38'", "'0.1'"],
        "float32", "float32", "float32",
    ),
    Kind(
        "f64", "float64", "DOUBLE",
        ["'NaN'", "'-0.0'", "'0.0'", "'Infinity'", "'-Infinity'", "'4.9E-324'", "'1.7976931348623157E308'", "'0.1'"],
        "float64", "float64", "float64",
    ),
    Kind(
        "d38", "decimal", "DECIMAL(38,0)", [f"'{'9' * 38}'", f"'-{'9' * 38}'", "'0'", "'9007199254740993'"],
        "decimal128(38, 0)[pyarrow]", "object", "int64", no_nulls=["torch"], not_these=["torch"],
    ),
    Kind(
        "d20", "decimal", "DECIMAL(20,0)", ["'9223372036854775807'", "'-9223372036854775808'", "'0'"],
        "decimal128(20, 0)[pyarrow]", "object", "int64", no_nulls=["torch"],
    ),
    Kind(
        "d18_4", "decimal", "DECIMAL(18,4)", [f"'{'9' * 14}.9999'", f"'-{'9' * 14}.9999'", "'0.0001'", "'1.5'"],
        "decimal128(18, 4)[pyarrow]", "object", "", refused=["torch"],
    ),
    Kind(
        "d38_18", "decimal", "DECIMAL(38,18)",
        [f"'{'9' * 20}.{'9' * 18}'", f"'-{'9' * 20}.{'9' * 18}'", f"'0.{'0' * 17}1'"],
        "decimal128(38, 18)[pyarrow]", "object", "", refused=["torch"],
    ),
    Kind(
        "text", "text", "STRING",
        ["''", "'é日本😀'", "X'610062'", "repeat('x', 70000)", "' a '", "'NULL'", "'nan'"],
        "object", "object", "", reference="hex({c})",
    ),
    Kind("raw", "bytes", "", ["X''", "X'00FF80'", "X'C328'"], "object", "object", "", reference="hex({c})"),
    Kind(
        "day", "date", "DATE",
        ["'0001-01-01'", "'9999-12-31'", "'1582-10-15'", "'1582-10-04'", "'1969-12-31'", "'1970-01-01'"],
        "datetime64[ms]", "datetime64[D]", "int64",
        reference="CAST(datediff({c}, DATE'1970-01-01') AS STRING)", no_nulls=["torch"],
    ),
    *TIMES,
    Kind(
        "span", "span", "",
        [f"INTERVAL '{text}' DAY TO SECOND" for text in (
            "0 00:00:00", "1 02:03:04.000005", "-0 00:00:00.000001", "106751991 04:00:54.775807",
            "-106751991 04:00:54.775807")],
        "timedelta64[us]", "timedelta64[us]", "int64", no_nulls=["torch"],
    ),
    Kind("ints3", ("list", "int"), "ARRAY<INT>", _TINY_ARRAYS, "object", "int32", "int32", **_LISTS),
    Kind(
        "sure", ("list", "int"), "", ["array(CAST(id AS BIGINT), 9223372036854775707)"],
        "object", "int64", "int64", **_LISTS,
    ),
    Kind(
        "floats2", ("list", "float32"), "ARRAY<FLOAT>",
        ["array('0.1', '-0.0')", "array('NaN', '3.4028235E38')", "array(NULL, '1.4E-45')"],
        "object", "float32", "float32", **_LISTS,
    ),
    Kind(
        "holes", ("list", "int"), "ARRAY<INT>", ["array(1, NULL)", "array(2147483647, 0)"],
        "object", "int32", "int32", not_these=BOTH, **_LISTS,
    ),
    Kind(
        "ragged", ("list", "int"), "ARRAY<INT>", _RAGGED,
        "object", "int32", "int32", not_these=BOTH, **_LISTS,
    ),
    Kind(
        "ragged_floats", ("list", "float32"), "ARRAY<FLOAT>", ["array('0.1')", "array('NaN', '-0.0')"],
        "object", "float32", "float32", not_these=BOTH, **_LISTS,
    ),
    Kind("jag", ("list", "int"), "ARRAY<INT>", _RAGGED, "object", "int32", "int32", policy="jagged", **_LISTS),
    Kind(
        "jag_floats", ("list", "float32"), "ARRAY<FLOAT>", ["array('0.1')", "array()", "array('NaN', '-0.0')"],
        "object", "float32", "float32", policy="jagged", **_LISTS,
    ),
    Kind("offs", ("list", "int"), "ARRAY<INT>", _RAGGED, "object", "int32", "int32", policy="offsets", **_LISTS),
    Kind(
        "fixed", ("list", "int"), "ARRAY<INT>", _TINY_ARRAYS,
        "object", "int32", "int32", policy="fixed_size", **_LISTS,
    ),
    Kind(
        "matrix", ("list", ("list", "float64")), "ARRAY<ARRAY<DOUBLE>>",
        ["array(array(0.1D, -0.0D), array(1D, 2D))", "array(array(4.9E-324D, 3D), array(1.7976931348623157E308D, 5D))"],
        "object", "float64", "float64", **_LISTS,
    ),
    Kind(
        "days", ("list", "date"), "ARRAY<DATE>", ["array(DATE'0001-01-01', DATE'9999-12-31')"],
        "object", "datetime64[D]", "int64",
        reference="to_json(transform({c}, d -> datediff(d, DATE'1970-01-01')))", no_nulls=BOTH,
    ),
    Kind(
        "moments", ("list", "instant"), "",
        [f"array({', '.join(TIMES[0].values[:2])})", f"array({', '.join(TIMES[0].values[2:4])})"],
        "object", "datetime64[us]", "int64", reference="to_json(transform({c}, t -> unix_micros(t)))", no_nulls=BOTH,
    ),
    Kind(
        "bits", ("list", "bool"), "ARRAY<BOOLEAN>", ["array(true, false)", "array(false, false)"],
        "object", "bool", "bool", **_LISTS,
    ),
    Kind(
        "prices", ("list", "decimal"), "ARRAY<DECIMAL(38,18)>", [f"array('{'9' * 20}.{'9' * 18}', NULL)", "array()"],
        "object", "object", "", reference="to_json(transform({c}, d -> CAST(d AS STRING)))", refused=["torch"],
    ),
    Kind(
        "records", ("list", ("struct", {"a": "int", "b": "text"})), "ARRAY<STRUCT<a: BIGINT, b: STRING>>",
        ["array(named_struct('a', 9223372036854775707, 'b', 'é'), named_struct('a', NULL, 'b', NULL))", "array()"],
        "object", "object", "", reference="to_json({c})", refused=["torch"],
    ),
    Kind(
        "stamped", ("struct", {"t": "instant", "d": "date", "w": "wall"}), "",
        [f"named_struct('t', {at}, 'd', DATE'{day}', 'w', TIMESTAMP_NTZ'{day} 00:00:00.000001')"
         for at, day in zip(TIMES[0].values[:3], ["0001-01-01", "9999-12-31", "1582-10-04"], strict=True)],
        "object", "object", "",
        reference="IF({c} IS NULL, NULL, to_json(named_struct('t', unix_micros({c}.t), 'd', "
        "datediff({c}.d, DATE'1970-01-01'), 'w', "
        "unix_micros(CAST(CAST({c}.w AS STRING) || '+00:00' AS TIMESTAMP)))))",
        no_nulls=["torch"],
    ),
    Kind(
        "words", ("list", "text"), "ARRAY<STRING>", ["array('é', '', NULL)", "array()", "array('NULL')"],
        "object", "object", "", reference="to_json({c})", refused=["torch"],
    ),
    Kind(
        "both", ("struct", {"a": "int", "b": "text"}), "STRUCT<a: INT, b: STRING>",
        ["named_struct('a', 1, 'b', 'é')", "named_struct('a', 2147483647, 'b', '')"],
        "object", "object", "", reference="to_json({c})", no_nulls=["torch"],
    ),
    Kind(
        "parts", ("struct", {"a": "int", "b": "float64"}), "STRUCT<a: BIGINT, b: DOUBLE>",
        ["named_struct('a', 9223372036854775707, 'b', 0.5D)", "named_struct('a', NULL, 'b', NULL)"],
        "object", "object", "", reference="to_json({c})", no_nulls=["torch"], not_these=["torch"],
    ),
    Kind(
        "flat.a", "int", "STRUCT<a: BIGINT, b: STRING>",
        ["named_struct('a', 9223372036854775707, 'b', 'é')", "named_struct('a', -1, 'b', '')"],
        "Int64", "int64", "int64", reference="CAST({c}.a AS STRING)", column="flat", policy="flatten", no_nulls=BOTH,
    ),
    Kind(
        "flat.b", "text", "STRUCT<a: BIGINT, b: STRING>",
        ["named_struct('a', 9223372036854775707, 'b', 'é')", "named_struct('a', -1, 'b', '')"],
        "object", "object", "", reference="hex({c}.b)", column="flat", policy="flatten",
    ),
    Kind(
        "pairs", ("map", "int"), "MAP<STRING, INT>", ["map('k', 1, 'é', 2147483647)", "map()"],
        "object", "object", "", reference="to_json({c})", refused=["torch", "huggingface"],
    ),
    Kind(
        "pairs_json", "text", "MAP<STRING, INT>", ["map('k', 1, 'é', 2147483647)", "map()"],
        "object", "object", "", reference="hex(to_json({c}))", policy="to_json",
    ),
    Kind(
        "variant_json", "text", "",
        ["""parse_json('{"a": [1, 2.5, null]}')""", "parse_json('1')", "parse_json('null')", """parse_json('"é"')"""],
        "object", "object", "", reference="hex(to_json({c}))", policy="to_json",
    ),
    Kind(
        "matrix_json", "text", "ARRAY<ARRAY<DOUBLE>>", ["array(array(1D))", "array()"],
        "object", "object", "", reference="hex(to_json({c}))", policy="to_json",
    ),
]  # fmt: skip
