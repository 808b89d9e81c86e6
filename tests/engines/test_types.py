"""Every Spark type, with and without nulls, by both routes into every hand-off, against what Spark itself says.

Each table is loaded once with a column of each type, and all hand-offs are tried on it.
"""

from __future__ import annotations

import datetime as dt
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.columns.rules import Rules
from tests.typed import KINDS, PATTERNS, TIMES, Kind, references, seen, select

POLICIES = {
    "jagged": bridge.jagged(),
    "offsets": bridge.offsets(),
    "fixed_size": bridge.fixed_size(3),
    "flatten": bridge.flatten(),
    "to_json": bridge.to_json(),
}
GIVEN = {kind.source: POLICIES[kind.policy] for kind in KINDS if kind.policy}
BY_NAME = {kind.name: kind for kind in KINDS}


class Loaded:
    """A table with what Spark says of it; `featured` has only what datasets takes."""

    def __init__(self, kinds: list[Kind], frame: Any, right: dict[str, list[Any]], **arguments: Any) -> None:
        names = dict.fromkeys(kind.source for kind in kinds)
        refused = {kind.source for kind in kinds if "huggingface" in kind.refused}
        carried = [name for name in names if name not in refused]
        arguments["spark"] = frame.sparkSession
        self.right = right
        self.table = bridge.load_table(frame, policies=_given(names), **arguments)
        self.arrow = self.table.to_arrow()
        self.order = np.argsort(self.arrow["row"].to_numpy())
        if not refused:
            self.featured = self.table
        elif self.table.route == "collect":
            self.featured = self.only(*(name for name in self.arrow.column_names if name not in refused))
        else:
            columns = ["row", *carried]
            self.featured = bridge.load_table(frame, columns=columns, policies=_given(carried), **arguments)

    @cached_property
    def pandas(self) -> Any:
        return self.table.to_pandas()

    @cached_property
    def pandas_arrow(self) -> Any:
        return self.table.to_pandas("pyarrow")

    @cached_property
    def map_style(self) -> list[Any]:
        return list(self.featured.to_huggingface(streaming=False))

    @cached_property
    def streaming(self) -> list[Any]:
        return list(self.featured.to_huggingface(streaming=True))

    def only(self, *names: str) -> bridge.Table:
        """Return the table with some columns: with one, another's error does not hide it."""
        return _some(self.table, names)


def _some(table: bridge.Table, names: Sequence[str]) -> bridge.Table:
    rows = table.to_arrow().select(names)
    return bridge.Table.collected(rows, Rules(rows.schema, {}), plan=table.plan, receipt=table.receipt)


def _given(names: Iterable[str]) -> dict[str, Any]:
    return {name: GIVEN[name] for name in names if name in GIVEN}


@pytest.fixture(scope="module")
def load_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loaded]:
    made: dict[Any, Loaded | None] = {}
    right: dict[Any, Any] = {}

    def load(engine: Any, route: str, pattern: str) -> Loaded:
        key = engine.name, route, pattern
        if key not in made:
            made[key] = None
            frame = engine.spark.sql(select(KINDS, pattern))
            if (engine.name, pattern) not in right:
                right[engine.name, pattern] = references(frame, KINDS)
            volume = tmp_path_factory.mktemp("exports")
            made[key] = Loaded(KINDS, frame, right[engine.name, pattern], route=route, volume=volume)
        loaded = made[key]
        assert loaded is not None, "it could not be loaded: see the first error"
        return loaded

    return load


@pytest.fixture(params=list(PATTERNS))
def pattern(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def loaded(load_once: Any, engine: Any, route: str, pattern: str) -> Loaded:
    return load_once(engine, route, pattern)


# --- hand-offs, one column each, in the order of the rows as they came


def _pandas(loaded: Loaded, name: str) -> Any:
    return list(loaded.pandas[name].array)


def _pandas_arrow(loaded: Loaded, name: str) -> Any:
    return list(loaded.pandas_arrow[name].array)


def _rows(values: Any, offsets: Any) -> list[Any]:
    bounds = [int(bound) for bound in offsets]
    assert bounds[-1] == len(values)
    return [values[start:end] for start, end in pairwise(bounds)]


def _numpy(loaded: Loaded, name: str) -> Any:
    values = loaded.only(name).to_numpy()[name]
    if isinstance(values, tuple):
        return _rows(*values)
    assert isinstance(values, np.ndarray)
    return list(values) if values.dtype.kind in "mM" or values.dtype == object else values.tolist()


def _torch(loaded: Loaded, name: str) -> Any:
    return _listed(loaded.only(name).to_torch()[name])


def _listed(values: Any) -> Any:
    if isinstance(values, tuple):
        return [row.tolist() for row in _rows(*values)]
    if isinstance(values, dict):
        columns = {key: _listed(part) for key, part in values.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(values, torch.Tensor) and values.is_nested:
        return [row.tolist() for row in values.unbind()]
    return values.tolist() if isinstance(values, torch.Tensor) else values


def _map_style(loaded: Loaded, name: str) -> Any:
    if "huggingface" in BY_NAME[name].refused:
        return loaded.only(name).to_huggingface(streaming=False)
    return [row[name] for row in loaded.map_style]


def _streaming(loaded: Loaded, name: str) -> Any:
    if "huggingface" in BY_NAME[name].refused:
        return loaded.only(name).to_huggingface(streaming=True)
    return [row[name] for row in loaded.streaming]


HAND_OFFS: dict[str, tuple[Any, str]] = {
    "to_pandas": (_pandas, "pandas"),
    "to_pandas of Arrow": (_pandas_arrow, "pyarrow"),
    "to_numpy": (_numpy, "numpy"),
    "to_torch": (_torch, "torch"),
    "to_huggingface": (_map_style, "huggingface"),
    "to_huggingface, streaming": (_streaming, "huggingface"),
}
# where NaN is the only null that floats have
NAN_IS_NULL = {"pandas", "numpy", "torch"}
NULLS = {"some nulls", "all nulls"}
VALUES = {"no nulls", "some nulls"}


def _is_error(kind: Kind, target: str, pattern: str) -> bool:
    return (
        target in kind.refused
        or (target in kind.no_nulls and pattern in NULLS)
        or (target in kind.not_these and pattern in VALUES)
    )


def _right(loaded: Loaded, kind: Kind, target: str) -> list[Any]:
    """Return Spark's word; NULL as NaN where a float has no other null."""
    right = loaded.right[kind.name]
    if target not in NAN_IS_NULL or "float" not in str(kind.form) or kind.form[0] == "struct":
        return right
    return [_nan(kind.form, value) for value in right]


def _nan(form: Any, value: Any) -> Any:
    if isinstance(form, str):
        return "NaN" if value is None else value
    return value and [_nan(form[1], element) for element in value]


@pytest.mark.parametrize("hand_off", HAND_OFFS)
def test_values_are_sparks_or_an_error_names_the_column(loaded: Loaded, pattern: str, hand_off: str) -> None:
    give, target = HAND_OFFS[hand_off]
    wrong = {}
    for kind in KINDS:
        told = _fault(loaded, kind, pattern, give, target)
        if told is not None:
            wrong[kind.name] = told
    assert not wrong, "\n".join(f"{name}, {pattern}, {hand_off}: {told}" for name, told in wrong.items())


def _fault(loaded: Loaded, kind: Kind, pattern: str, give: Any, target: str) -> str | None:
    """Return what is wrong with a column as it was handed over."""
    is_error = _is_error(kind, target, pattern)
    try:
        values = give(loaded, kind.name)
    except bridge.LossyConversionError as exc:
        ways = "bridge." in str(exc) or "Replace them in Spark" in str(exc)
        names_all = f"column '{kind.name}" in str(exc) and ways
        return None if is_error and names_all else f"raised {exc}"
    except Exception as exc:  # noqa: BLE001 - one column's error is not to hide the others'
        return f"raised {exc!r}"
    if is_error:
        return f"gave {values!r:.300}, not an error"
    right = _right(loaded, kind, target)
    try:
        got = [seen(kind.form, values[index], nan_is_null=target in NAN_IS_NULL) for index in loaded.order]
    except (AssertionError, TypeError, ValueError, AttributeError) as exc:
        return f"gave {values!r:.300}: {exc!r}"
    differ = [(a, b) for a, b in zip(got, right, strict=True) if a != b]
    return f"gave {differ[0][0]!r:.200} for {differ[0][1]!r:.200}" if differ else None


# --- types


def test_types_do_not_depend_on_nulls_or_routes(load_once: Any, engine: Any) -> None:
    tables = {(r, p): load_once(engine, r, p).table for r in ("collect", "export") for p in PATTERNS}
    first, *_ = tables.values()

    for key, table in tables.items():
        assert table.schema.equals(first.schema, check_metadata=True), key
        assert table.to_arrow().schema.equals(first.schema), key
        assert table.types == first.types, key
        assert str(table.types) == str(first.types), key


def test_dtypes_are_those_of_the_contract(loaded: Loaded, pattern: str) -> None:
    told = {column.name: column for column in loaded.table.types}
    wrong = {}
    for kind in KINDS:
        contract = told[kind.name]
        got = {"pandas": str(loaded.pandas[kind.name].dtype)}
        right = {"pandas": kind.pandas}
        for target, wanted in (("numpy", kind.numpy), ("torch", kind.torch)):
            if not _is_error(kind, target, pattern):
                only = loaded.only(kind.name)
                values = (only.to_numpy() if target == "numpy" else only.to_torch())[kind.name]
                got[target] = _dtype(values)
                right[target] = "object" if (kind.policy, target) == ("jagged", "numpy") else wanted
                if kind.policy == "fixed_size" and values.shape != (loaded.table.num_rows, 3):
                    wrong[kind.name] = f"{target} is of shape {values.shape}"
        if got != right:
            wrong[kind.name] = f"{got} for {right}"
        shown = (contract.pandas, contract.numpy, contract.torch or "")
        text = kind.pandas.replace("[pyarrow]", " (Arrow)")
        for a, b in zip(shown, (text, right.get("numpy", ""), right.get("torch", "")), strict=True):
            if b not in a:
                wrong[f"{kind.name} in types"] = f"{a} for {b}"
        refused = {"torch": contract.torch, "huggingface": contract.huggingface}
        if {name for name, what in refused.items() if what is None} != set(kind.refused):
            wrong[f"{kind.name} in types"] = f"none are {refused}"
    assert not wrong, wrong


def _dtype(values: Any) -> str:
    values = values[0] if isinstance(values, tuple) else values
    return str(values.dtype).removeprefix("torch.") if hasattr(values, "dtype") else ""


# --- zones


def test_a_sessions_zone_moves_nothing(engine: Any, route: str, tmp_path: Path) -> None:
    right = None
    for zone in ("UTC", "America/New_York", "Asia/Kolkata"):
        frame = engine.new_session(zone).sql(select(TIMES, "no nulls"))
        told = references(frame, TIMES)
        right = right or told
        assert told == right, f"Spark itself, in {zone}"
        loaded = Loaded(TIMES, frame, told, route=route, volume=tmp_path / zone.replace("/", "-"))
        for hand_off, (give, target) in HAND_OFFS.items():
            for kind in TIMES:
                assert _fault(loaded, kind, "no nulls", give, target) is None, (zone, hand_off, kind.name)


# --- batches


def test_batches_have_one_dtype_though_few_hold_nulls(engine: Any, route: str, tmp_path: Path) -> None:
    big = 9223372036854775707
    frame = engine.spark.range(100).selectExpr(
        "id",
        f"IF(id < 10, NULL, {big} - id) AS filled",
        f"IF(id < 10, NULL, {big} - id) AS masked",
        "IF(id < 10, NULL, id) AS floated",
        "IF(id < 10, NULL, CAST(id AS INT)) AS halved",
        "IF(id < 10, NULL, id * 0.1D) AS d",
        "IF(id < 10, NULL, CAST(id AS FLOAT)) AS f",
        "IF(id < 10, NULL, id % 2 = 0) AS flag",
        "IF(id < 10, NULL, array(id, id + 1)) AS pair",
    )
    policies = {
        "filled": bridge.fill(-1), "masked": bridge.mask(), "floated": bridge.as_float64(),
        "halved": bridge.as_float32(), "flag": bridge.fill(True), "pair": bridge.fill([0, 0]),
    }  # fmt: skip
    table = engine.load(frame, policies=policies, route=route, volume=tmp_path)
    wanted = {
        "id": torch.int64, "filled": torch.int64, "masked": torch.int64, "masked__valid": torch.bool,
        "floated": torch.float64, "halved": torch.float32, "d": torch.float64, "f": torch.float32,
        "flag": torch.bool, "pair": torch.int64,
    }  # fmt: skip

    seen_rows = []
    for shuffle in (False, True):
        rows: dict[int, Any] = {}
        for batch in table.to_loader(batch_size=7, shuffle=shuffle):
            assert {name: values.dtype for name, values in batch.items()} == wanted
            columns = [values.tolist() for values in batch.values()]
            for row in zip(*columns, strict=True):
                rows[row[0]] = dict(zip(wanted, row, strict=True))
        seen_rows.append(rows)
    for rows in seen_rows:
        assert sorted(rows) == list(range(100))
        for i, row in rows.items():
            is_null = i < 10
            assert row["filled"] == (-1 if is_null else big - i)
            assert (row["masked"], row["masked__valid"]) == ((0, False) if is_null else (big - i, True))
            assert repr(row["floated"]) == ("nan" if is_null else repr(float(i)))
            assert repr(row["halved"]) == ("nan" if is_null else repr(float(i)))
            assert repr(row["d"]) == ("nan" if is_null else repr(i * 0.1))
            assert repr(row["f"]) == ("nan" if is_null else repr(float(i)))
            assert row["flag"] == (True if is_null else i % 2 == 0)
            assert row["pair"] == ([0, 0] if is_null else [i, i + 1])
    types = {x.dtype for x in table.to_loader(batch_size=7, features=["d", "floated"])}
    assert types == {torch.float64}


def test_a_batch_with_a_null_that_no_policy_takes(engine: Any, route: str, tmp_path: Path) -> None:
    frame = engine.spark.range(100).selectExpr("id", "IF(id = 57, NULL, id) AS n")
    table = engine.load(frame, route=route, volume=tmp_path)

    with pytest.raises(bridge.LossyConversionError, match=r"column 'n' .*1 nulls"):
        list(table.to_loader(batch_size=10))


# --- policies


def test_rows_with_nulls_are_dropped_and_counted(engine: Any, route: str, tmp_path: Path) -> None:
    frame = engine.spark.range(60).selectExpr(
        "id", "IF(id % 3 = 0, NULL, id) AS a", "IF(id % 4 = 0, NULL, concat('x', id)) AS b"
    )
    source = engine.save(frame) if route == "collect" else frame
    policies = {"a": bridge.drop_nulls(), "b": bridge.drop_nulls()}
    right = [i for i in range(60) if i % 3 and i % 4]

    plan = bridge.plan_table(source, policies=policies, route=route, volume=tmp_path, spark=engine.spark)
    table = engine.load(source, policies=policies, route=route, volume=tmp_path)
    some = engine.load(source, policies={"a": bridge.drop_nulls()}, where="id < 30", route=route, volume=tmp_path)

    assert plan.num_dropped == table.plan.num_dropped == 60 - len(right)
    assert re.search(rf"rows dropped +{60 - len(right)} \(NULL in a or b\)", str(plan))
    assert table.num_rows == table.receipt["num_rows"] == len(right)
    assert sorted(table.to_numpy()["a"].tolist()) == right
    assert sorted(table.to_torch()["a"].tolist()) == right
    assert sorted(table.to_pandas()["b"]) == sorted(f"x{i}" for i in right)
    assert (some.plan.num_dropped, sorted(some.to_numpy()["id"].tolist())) == (10, [i for i in range(30) if i % 3])


def test_codes_are_those_of_the_receipt(engine: Any, tmp_path: Path) -> None:
    words = ["b", "é", "a", "日本", "", "B", "a b"]
    cases = " ".join(f"WHEN {i} THEN '{word}'" for i, word in enumerate(words))
    frame = engine.spark.range(70).selectExpr(
        "id", f"CASE id % 7 {cases} END AS word", f"IF(id % 2 = 0, NULL, CASE id % 7 {cases} END) AS maybe",
        f"IF(id % 2 = 0, NULL, CASE id % 7 {cases} END) AS open",
    )  # fmt: skip
    policies = {
        "word": bridge.dictionary(), "maybe": [bridge.fill("none"), bridge.dictionary()], "open": bridge.dictionary(),
    }  # fmt: skip
    name = engine.save(frame)
    tables = [
        engine.load(name, policies=policies, route="collect"),
        engine.load(name, policies=policies, route="export", volume=tmp_path),
        bridge.open_export(tmp_path),
    ]
    tables.append(engine.load(name, policies=policies, route="export", volume=tmp_path))
    assert tables[-1].path == tables[1].path, "it was not reused"

    for table in tables:
        assert table.receipt["policies"] == tables[0].receipt["policies"]
        assert table.types == tables[0].types
        kept = {column: steps[-1]["values"] for column, steps in table.receipt["policies"].items()}
        assert kept == {"word": sorted(words), "maybe": sorted([*words, "none"]), "open": sorted(words)}
        ids = table.to_arrow()["id"].to_pylist()
        right = [words[i % 7] for i in ids]
        some = _some(table, ["id", "word", "maybe"])
        for codes in (some.to_numpy(), {key: value.numpy() for key, value in some.to_torch().items()}):
            assert codes["word"].dtype == codes["maybe"].dtype == np.int64
            assert [kept["word"][code] for code in codes["word"]] == right
            assert [kept["maybe"][code] for code in codes["maybe"]] == [words[i % 7] if i % 2 else "none" for i in ids]
        frame_ = table.to_pandas()
        assert list(frame_["word"]) == right
        assert list(frame_["word"].cat.categories) == kept["word"]
        assert frame_["open"].isna().sum() == 35
        for streaming in (False, True):
            dataset = table.to_huggingface(streaming=streaming)
            label = dataset.features["word"]
            assert label.names == kept["word"]
            by_id = {row["id"]: row for row in dataset}
            assert [label.int2str(by_id[i]["word"]) for i in ids] == right
            assert [by_id[i]["open"] is None for i in ids] == [i % 2 == 0 for i in ids]
        with pytest.raises(bridge.LossyConversionError, match=r"column 'open' .*35 nulls"):
            table.to_numpy()
        batches = list(some.to_loader(batch_size=9))
        assert [kept["word"][code] for batch in batches for code in batch["word"].tolist()] == right


EXACT = {
    "decimal to int64": ("CAST('9223372036854775807' AS DECIMAL(20,0))", bridge.as_int64(), 2**63 - 1),
    "decimal with zeros to int64": ("CAST('12.0000' AS DECIMAL(18,4))", bridge.as_int64(), 12),
    "double to int64": ("CAST(-9007199254740992 AS DOUBLE)", bridge.as_int64(), -(2**53)),
    "tinyint to int64": ("CAST(-128 AS TINYINT)", bridge.as_int64(), -128),
    "bigint to float64": ("9007199254740992L", bridge.as_float64(), float(2**53)),
    "int to float32": ("CAST(16777216 AS INT)", bridge.as_float32(), float(2**24)),
    "double to float32": ("CAST('0.1' AS DOUBLE)", bridge.as_float32(), float(np.float32(0.1))),
    "infinity to float32": ("CAST('-Infinity' AS DOUBLE)", bridge.as_float32(), float("-inf")),
    "NaN to float32": ("CAST('NaN' AS DOUBLE)", bridge.as_float32(), float("nan")),
    "-0.0 to float32": ("CAST('-0.0' AS DOUBLE)", bridge.as_float32(), -0.0),
    "tiny double to float32": ("CAST('1E-300' AS DOUBLE)", bridge.as_float32(), 0.0),
    "float to float64": ("CAST('0.1' AS FLOAT)", bridge.as_float64(), float(np.float32(0.1))),
    "decimal to float64": ("CAST('0.1' AS DECIMAL(18,4))", bridge.as_float64(), 0.1),
    "negative decimal to float64": ("CAST('-6.6567' AS DECIMAL(18,4))", bridge.as_float64(), -6.6567),
    "small decimal to float64": ("CAST('0.00000070280' AS DECIMAL(38,18))", bridge.as_float64(), 7.028e-07),
    "long decimal to float64": (f"CAST('{'9' * 20}.{'9' * 18}' AS DECIMAL(38,18))", bridge.as_float64(), 1e20),
    "odd decimal to float64": (
        "CAST('12345678901234567.890123456789012345' AS DECIMAL(38,18))", bridge.as_float64(),
        float(Decimal("12345678901234567.890123456789012345")),
    ),
    "largest decimal to float32": (
        f"CAST('{'9' * 38}' AS DECIMAL(38,0))", bridge.as_float32(), float(np.float32(1e38)),
    ),
}  # fmt: skip
LOSSY = {
    "bigint to float64": ("9007199254740993L", bridge.as_float64()),
    "negative bigint to float64": ("-9007199254740993L", bridge.as_float64()),
    "largest bigint to float64": ("9223372036854775807L", bridge.as_float64()),
    "int to float32": ("CAST(16777217 AS INT)", bridge.as_float32()),
    "bigint to float32": ("9223372036854775807L", bridge.as_float32()),
    "double to float32": ("CAST('1E39' AS DOUBLE)", bridge.as_float32()),
    "largest double to float32": ("CAST('-1.7976931348623157E308' AS DOUBLE)", bridge.as_float32()),
    "fraction to int64": ("CAST('1.5' AS DOUBLE)", bridge.as_int64()),
    "decimal fraction to int64": ("CAST('1.5000' AS DECIMAL(18,4))", bridge.as_int64()),
    "2^63 to int64": ("CAST('9223372036854775808' AS DOUBLE)", bridge.as_int64()),
    "long decimal to int64": ("CAST('9223372036854775808' AS DECIMAL(20,0))", bridge.as_int64()),
    "NaN to int64": ("CAST('NaN' AS DOUBLE)", bridge.as_int64()),
    "infinity to int64": ("CAST('Infinity' AS DOUBLE)", bridge.as_int64()),
    "arrays of another size": ("array(1, 2)", bridge.fixed_size(3)),
}


def test_casts_are_exact(engine: Any, route: str, tmp_path: Path) -> None:
    columns = [f"IF(id % 2 = 1, NULL, {sql}) AS `{name}`" for name, (sql, _, _) in EXACT.items()]
    frame = engine.spark.range(4).selectExpr(*columns)
    policies = {name: policy for name, (_, policy, _) in EXACT.items()}

    table = engine.load(frame, policies=policies, route=route, volume=tmp_path).to_arrow()

    wrong = {}
    for name, (_, policy, right) in EXACT.items():
        assert str(policy) == f"as_{np.dtype(table[name].type.to_pandas_dtype())}()"
        got = [value for value in table[name].to_pylist() if value is not None]
        if [_exact(value) for value in got] != [_exact(right)] * 2:
            wrong[name] = (got, right)
    assert not wrong, wrong


def _exact(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if value != value else struct.pack("<d", value)
    return value


@pytest.mark.parametrize("name", LOSSY)
def test_casts_that_would_lose_are_errors(engine: Any, name: str, route: str, tmp_path: Path) -> None:
    sql, policy = LOSSY[name]
    frame = engine.spark.range(6).selectExpr(f"IF(id % 2 = 1, NULL, {sql}) AS n")

    with pytest.raises(bridge.LossyConversionError, match="column 'n'"):
        engine.load(frame, policies={"n": policy}, route=route, volume=tmp_path).to_arrow()


SCALARS = [kind for kind in KINDS if isinstance(kind.form, str) and not kind.policy]
ZEROS = {"bool": False, "float32": 0.0, "float64": 0.0, "text": "", "bytes": b"", "decimal": Decimal(0)}
FILLS: dict[str, Any] = {
    "flag": True, "i8": -128, "i16": 7, "i32": 7, "i64": 9223372036854775707, "f32": 0.5, "f64": 0.1,
    "d38": Decimal("9" * 38), "d20": 5, "d18_4": Decimal("1.5"), "d38_18": "0.000000000000000001", "text": "é",
    "raw": b"\x00", "day": dt.date(1, 1, 1), "at": dt.datetime(9999, 12, 31, tzinfo=dt.UTC),
    "wall": dt.datetime(1600, 1, 1, 0, 0, 0, 1), "span": dt.timedelta(days=-1, microseconds=1),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["fill", "mask"])
def test_values_in_the_place_of_null(engine: Any, policy: str, route: str, tmp_path: Path) -> None:
    frame = engine.spark.sql(select(SCALARS, "some nulls"))
    right = references(frame, SCALARS)
    policies = {k.name: bridge.mask() if policy == "mask" else bridge.fill(FILLS[k.name]) for k in SCALARS}

    table = engine.load(frame, policies=policies, route=route, volume=tmp_path)

    assert str(table.types).count("no nulls") >= len(SCALARS)
    arrays = table.to_numpy()
    order = np.argsort(arrays["row"])
    no_torch = ["d38", *(kind.name for kind in SCALARS if "torch" in kind.refused)]
    tensors = _some(table, [name for name in table.schema.names if name not in no_torch]).to_torch()
    wrong = {}
    for kind in SCALARS:
        zero = FILLS[kind.name] if policy == "fill" else ZEROS.get(kind.form, 0)
        zero = Decimal(zero) if kind.form == "decimal" else zero
        wanted = [seen(kind.form, zero) if value is None else value for value in right[kind.name]]
        got = {"numpy": [seen(kind.form, arrays[kind.name][i]) for i in order]}
        if kind.name not in no_torch:
            values = tensors[kind.name]
            values = values.tolist() if isinstance(values, torch.Tensor) else values
            got["torch"] = [seen(kind.form, values[i]) for i in order]
        for target, values in got.items():
            if values != wanted:
                wrong[kind.name] = f"{target}: {values} for {wanted}"[:400]
        if policy == "mask":
            valid = [bool(arrays[f"{kind.name}__valid"][i]) for i in order]
            if valid != [value is not None for value in right[kind.name]]:
                wrong[f"{kind.name}__valid"] = str(valid)
    assert not wrong, wrong


def test_vectors_of_pyspark_ml_may_be_null(engine: Any, route: str, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(1, Vectors.dense([1.0, 2.0])), (2, Vectors.sparse(2, [1], [3.0])), (3, None)]
    frame = engine.spark.createDataFrame(rows, ["id", "v"])

    table = engine.load(frame, route=route, volume=tmp_path)
    there = engine.load(frame, route=route, volume=tmp_path, policies={"v": bridge.drop_nulls()})

    assert sorted(table.to_arrow().to_pylist(), key=lambda row: row["id"]) == [
        {"id": 1, "v": [1.0, 2.0]}, {"id": 2, "v": [0.0, 3.0]}, {"id": 3, "v": None},
    ]  # fmt: skip
    assert sorted(there.to_torch()["v"].tolist()) == [[0.0, 3.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("policies", "says"),
    [
        ({"n": "to_json"}, r"column 'n' is bigint; to_json\(\) is for structs, maps, arrays and variants"),
        ({"m": "to_json"}, r"policies names 'm', which is not read"),
        ({"m": "drop_nulls"}, r"policies names 'm', which is not read"),
        ({"m": "mask"}, r"policies names 'm', which is no column"),
    ],
    ids=str,
)
def test_a_policy_that_does_not_fit_is_refused_by_the_plan(engine: Any, policies: dict[str, str], says: str) -> None:
    frame = engine.spark.range(3).selectExpr("id AS n")
    given = {name: getattr(bridge, policy)() for name, policy in policies.items()}

    with pytest.raises(bridge.PolicyError, match=says):
        bridge.plan_table(frame, spark=engine.spark, policies=given)


def test_an_export_is_reused_under_any_policies_but_those_of_spark(engine: Any, tmp_path: Path) -> None:
    rows = engine.spark.range(6).selectExpr("id", "IF(id % 2 = 0, id, NULL) AS n", "named_struct('a', id) AS s")
    name = engine.save(rows)

    def export(**arguments: Any) -> bridge.Table:
        return bridge.export_table(name, tmp_path, spark=engine.spark, **arguments)

    plain, filled = export(), export(policies={"n": bridge.fill(-1), "s": bridge.to_json()})

    assert export().path == plain.path
    assert export(policies={"s": bridge.to_json(), "n": bridge.fill(-1)}).path == filled.path != plain.path
    again = export(policies={"n": bridge.fill(-2), "s": bridge.to_json()})
    assert (again.path, again.to_torch()["n"].tolist().count(-2)) == (filled.path, 3)
    other = bridge.open_export(filled.path, policies={"n": bridge.fill(-3)})
    assert (other.to_torch()["n"].tolist().count(-3), other.receipt["policies"].keys()) == (3, {"n"})
    with pytest.raises(bridge.PolicyError, match="are done by Spark"):
        bridge.open_export(filled.path, policies={"n": bridge.drop_nulls()})
    for table in (filled, bridge.open_export(filled.path)):
        assert table.to_torch()["n"].tolist().count(-1) == 3
        assert min(table.to_torch()["s"]) == '{"a":0}'
    assert plain.to_arrow()["n"].null_count == bridge.open_export(plain.path).to_arrow()["n"].null_count == 3
