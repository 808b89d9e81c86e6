"""Policies one by one, and the rules that apply them to a table."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bridge
from bridge.columns.arrays import to_matrix, to_numpy
from bridge.columns.contract import type_contract
from bridge.columns.decimals import decimals_to_floats
from bridge.columns.frames import to_pandas
from bridge.columns.policies import VECTOR, Policy, marked
from bridge.columns.rules import Policies, Rules, by_spark
from bridge.columns.tensors import to_torch
from bridge.errors import LossyConversionError, PolicyError

D = decimal.Decimal
VECTORS = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def column(values: list[Any], arrow: pa.DataType) -> pa.Table:
    return pa.table({"c": pa.chunked_array([pa.array(values, arrow)])})


def applied(table: pa.Table, policies: Policies) -> pa.Table:
    rules = Rules.choose(table.schema, policies).bound(lambda: [table])
    made = rules.apply(table)
    assert made.schema.equals(rules.schema, check_metadata=True), "types do not depend on rows"
    again = Rules.from_json(table.schema, json.loads(json.dumps(rules.to_json())))
    assert again.apply(table).equals(made), "a receipt gives the same rules"
    return made


@pytest.mark.parametrize(
    ("arrow", "values", "policy", "right"),
    [
        (pa.decimal128(10, 2), [D("1.10"), None], bridge.as_float64(), [1.1, None]),
        (pa.decimal128(38, 0), [D(2**63 - 1), D(-(2**63))], bridge.as_int64(), [2**63 - 1, -(2**63)]),
        (pa.int64(), [2**53, None], bridge.as_float64(), [2.0**53, None]),
        (pa.int32(), [2**24], bridge.as_float32(), [2.0**24]),
        (pa.float64(), [1e-300, math.inf, 0.1], bridge.as_float32(), [0.0, math.inf, float(np.float32(0.1))]),
        (pa.float64(), [3.0], bridge.as_int64(), [3]),
        (pa.int64(), [1, None], bridge.fill(-1), [1, -1]),
        (pa.bool_(), [None, True], bridge.fill(value=False), [False, True]),
        (pa.string(), [None, "a"], bridge.fill("?"), ["?", "a"]),
        (pa.date32(), [None], bridge.fill(dt.date(2000, 1, 1)), [dt.date(2000, 1, 1)]),
        (pa.date32(), [None], bridge.fill("2000-01-01"), [dt.date(2000, 1, 1)]),
        (pa.decimal128(5, 2), [None], bridge.fill(D("1.25")), [D("1.25")]),
        (
            pa.timestamp("us", "UTC"),
            [None],
            bridge.fill(dt.datetime(1999, 12, 31, 23, 59, 59, 1, tzinfo=dt.UTC)),
            [dt.datetime(1999, 12, 31, 23, 59, 59, 1, tzinfo=dt.UTC)],
        ),
        (pa.duration("us"), [None], bridge.fill(dt.timedelta(seconds=1)), [dt.timedelta(seconds=1)]),
        (pa.binary(), [None], bridge.fill(b"\xff"), [b"\xff"]),
        (pa.list_(pa.int32()), [None, [1]], bridge.fill([]), [[], [1]]),
        (pa.list_(pa.int32()), [[1, 2]], bridge.fixed_size(2), [[1, 2]]),
        (pa.string(), ["b", None, "a", "b"], bridge.dictionary(), ["b", None, "a", "b"]),
    ],
    ids=str,
)
def test_a_policy_gives_the_value_that_it_says(arrow: pa.DataType, values: Any, policy: Policy, right: Any) -> None:
    assert applied(column(values, arrow), {"c": policy})["c"].to_pylist() == right


@pytest.mark.parametrize(
    ("arrow", "values", "policy", "says"),
    [
        (pa.int64(), [2**53 + 1], bridge.as_float64(), r"column 'c' \(int64\) holds numbers that float64 cannot"),
        (pa.int32(), [2**24 + 1], bridge.as_float32(), r"holds numbers that float32 cannot .*\n.*as_float64\(\)"),
        (pa.float64(), [1e39, -1e39, 1.0], bridge.as_float32(), r"holds 2 values too large for float32"),
        (pa.decimal128(5, 2), [D("1.50")], bridge.as_int64(), r"holds numbers that int64 cannot hold exactly"),
        (pa.decimal128(38, 0), [D(2**63)], bridge.as_int64(), r"holds numbers that int64 cannot hold exactly"),
        (pa.float64(), [1.5], bridge.as_int64(), r"holds numbers that int64 cannot hold exactly"),
        (pa.list_(pa.int32()), [[1], [1, 2]], bridge.fixed_size(2), r"has arrays of 1 and 2 elements, not 2"),
    ],
    ids=str,
)
def test_a_policy_loses_nothing_that_it_does_not_say(
    arrow: pa.DataType, values: Any, policy: Policy, says: str
) -> None:
    with pytest.raises(LossyConversionError, match=says):
        applied(column(values, arrow), {"c": policy})


@pytest.mark.parametrize(
    ("arrow", "policy"),
    [
        (pa.string(), bridge.as_float64()),
        (pa.timestamp("us"), bridge.as_int64()),
        (pa.int64(), bridge.dictionary()),
        (pa.int64(), bridge.flatten()),
        (pa.int64(), bridge.jagged()),
        (pa.string(), bridge.offsets()),
        (pa.int64(), bridge.cached_file()),
        (pa.list_(pa.float64()), bridge.sparse()),
        (pa.struct([("a", pa.int64())]), bridge.mask()),
        (pa.int64(), bridge.fixed_size(2)),
    ],
    ids=str,
)
def test_a_policy_is_refused_before_rows_are_there_where_it_does_not_fit(arrow: pa.DataType, policy: Policy) -> None:
    with pytest.raises(PolicyError, match=r"column 'c' is .*; .* is for \w+"):
        Rules.choose(pa.schema([("c", arrow)]), {"c": policy})


def without_addresses(value: object) -> str:
    """Name a parameter alike in every process, since those that share the tests must collect the same ones."""
    return str(value).partition(" at 0x")[0]


UTC_US, NAIVE_US = pa.timestamp("us", "UTC"), pa.timestamp("us")
NOON = dt.datetime(2020, 1, 1, 12)


@pytest.mark.parametrize(
    ("arrow", "value"),
    [
        *[(pa.int32(), value) for value in ("x", 1.5, D("5.5"), 2**40, 2**70, True, None, {"a": 1}, object())],
        (pa.list_(pa.int32()), [1.5]),
        (pa.list_(pa.float32()), [1e300]),
        (pa.float64(), True),
        (pa.float64(), 2**60 + 1),
        (pa.float32(), 1e300),
        (pa.date32(), NOON),
        (UTC_US, NOON),
        (NAIVE_US, NOON.replace(tzinfo=dt.UTC)),
        (pa.string(), b"a"),
        (pa.decimal128(5, 2), D("1.255")),
        (pa.struct([("a", pa.int64())]), []),
        (pa.map_(pa.string(), pa.int64()), [("a", 1.7)]),
    ],
    ids=without_addresses,
)
def test_a_fill_is_of_the_columns_type_and_exact(arrow: pa.DataType, value: Any) -> None:
    with pytest.raises(PolicyError, match=r"column 'c' is .*, which cannot hold .* exactly"):
        Rules.choose(pa.schema([("c", arrow)]), {"c": bridge.fill(value)})


@pytest.mark.parametrize(
    ("arrow", "value", "held"),
    [
        (pa.float32(), 0.1, float(np.float32(0.1))),
        (pa.float64(), D("0.5"), 0.5),
        (pa.decimal128(18, 4), 0.1, D("0.1")),
        (pa.float64(), math.inf, math.inf),
        (pa.int64(), np.int64(3), 3),
        (pa.list_(pa.decimal128(5, 1)), [D("1.5")], [D("1.5")]),
        (NAIVE_US, NOON, NOON),
    ],
    ids=str,
)
def test_a_fill_may_be_of_a_kind_that_the_column_holds(arrow: pa.DataType, value: Any, held: Any) -> None:
    assert applied(column([None], arrow), {"c": bridge.fill(value)})["c"].to_pylist() == [held]


def test_a_fill_of_no_number_stands_in_a_receipt_of_json() -> None:
    rules = Rules.choose(pa.schema([("c", pa.float64())]), {"c": bridge.fill(math.nan)})

    assert json.dumps(rules.to_json(), allow_nan=False)
    again = Rules.from_json(rules.source, rules.to_json())
    assert math.isnan(again.apply(column([None], pa.float64()))["c"][0].as_py())


DIGITS = st.lists(st.integers(-(10**38) + 1, 10**38 - 1))


@given(st.integers(0, 38), DIGITS, st.integers(0, 36))
def test_decimals_become_the_nearest_floats(scale: int, digits: list[int], shrink: int) -> None:
    with decimal.localcontext(prec=60):
        values = [None, *(D(digit // 10**shrink).scaleb(-scale) for digit in digits)]
    array = pa.array([D(0), *values], pa.decimal128(38, scale)).slice(1)

    floats = decimals_to_floats(pa.chunked_array([array]))

    assert floats.to_pylist() == [None, *(float(value) for value in values[1:] if value is not None)]


@pytest.mark.parametrize("size", [0, -1, True, "2"])
def test_a_size_is_a_whole_number(size: Any) -> None:
    with pytest.raises(PolicyError, match=r"fixed_size was given .*; give a whole number"):
        bridge.fixed_size(size)


def test_arrays_of_a_size_may_all_be_null() -> None:
    arrow = pa.list_(pa.int32())
    batch = pa.record_batch({"c": pa.array([None, None], arrow)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    received = pa.ipc.open_stream(sink.getvalue()).read_all()

    assert applied(received, {"c": bridge.fixed_size(3)})["c"].to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("arrow", "value", "zero"),
    [
        (pa.int8(), 5, 0),
        (pa.bool_(), True, False),
        (pa.float32(), 0.5, 0.0),
        (pa.string(), "é", ""),
        (pa.binary(), b"x", b""),
        (pa.date32(), dt.date(2000, 1, 1), dt.date(1970, 1, 1)),
        (pa.timestamp("us"), dt.datetime(2000, 1, 1), dt.datetime(1970, 1, 1)),
        (pa.duration("us"), dt.timedelta(1), dt.timedelta(0)),
        (pa.decimal128(38, 18), D("1.5"), D(0)),
        (pa.list_(pa.int8()), [1], []),
    ],
    ids=str,
)
def test_a_mask_says_which_values_are_there(arrow: pa.DataType, value: Any, zero: Any) -> None:
    made = applied(column([value, None], arrow), {"c": bridge.mask()})

    assert made.column_names == ["c", "c__valid"]
    assert made["c"].to_pylist() == [value, zero]
    assert made["c__valid"].to_pylist() == [True, False]


def test_two_columns_of_one_name_are_refused() -> None:
    schema = pa.schema([("c", pa.int64()), ("c__valid", pa.bool_())])

    with pytest.raises(PolicyError, match="two columns would be named 'c__valid'"):
        Rules.choose(schema, {"c": bridge.mask()})


def test_structs_are_taken_apart_and_their_parts_have_policies_of_their_own() -> None:
    rows = [{"x": 1, "y": {"z": None}}, None, {"x": None, "y": {"z": D("0.5")}}]
    arrow = pa.struct([("x", pa.int64()), ("y", pa.struct([("z", pa.decimal128(5, 2))]))])

    made = applied(
        column(rows, arrow),
        {"c": bridge.flatten(), "c.x": bridge.fill(0), "c.y": bridge.flatten(), D: bridge.as_float64()},
    )

    assert made.to_pydict() == {"c.x": [1, 0, 0], "c.y.z": [None, None, 0.5]}


def test_policies_of_a_column_are_applied_in_their_order() -> None:
    made = applied(column([None, "b"], pa.string()), {"c": [bridge.fill("a"), bridge.dictionary()]})

    assert to_torch(made)["c"].tolist() == [0, 1]


def test_a_name_goes_before_a_type() -> None:
    table = pa.table({"a": [1, None], "b": [1, None], "t": ["x", None]})

    made = applied(table, {int: bridge.fill(7), "b": bridge.fill(8)})

    assert made.to_pydict() == {"a": [1, 7], "b": [1, 8], "t": ["x", None]}


def test_a_dictionary_is_one_for_all_batches_and_all_hand_offs() -> None:
    schema = pa.schema([("c", pa.string())])
    parts = [pa.table({"c": part}, schema) for part in (["b", "é"], [], ["a", None, "b"])]

    rules = Rules.choose(schema, {"c": bridge.dictionary()}).bound(lambda: parts)
    made = [rules.apply(part) for part in parts]

    assert rules.categories == {"c": ["a", "b", "é"]}
    assert to_numpy(made[0])["c"].tolist() == [1, 2]
    assert to_numpy(made[0])["c"].dtype == np.int64
    assert to_torch(made[1])["c"].dtype == torch.int64
    assert list(to_pandas(made[2])["c"].cat.categories) == ["a", "b", "é"]
    assert to_pandas(made[2])["c"].cat.codes.tolist() == [0, -1, 1]
    for convert in (to_torch, to_numpy):
        with pytest.raises(LossyConversionError, match=r"column 'c' holds 1 nulls, which have no code\.\n.*fill"):
            convert(made[2])
    assert to_matrix(made[0], ["c"], "c")[0].tolist() == [[1], [2]], "codes may be features"
    with pytest.raises(LossyConversionError, match="column 'c' holds values that its dictionary does not"):
        rules.apply(pa.table({"c": ["new"]}))


def test_arrays_of_one_length_are_a_matrix_that_shares_their_memory() -> None:
    arrays = pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float32()))
    table = pa.table({"c": arrays.slice(1)})

    matrix, tensor = to_numpy(table)["c"], to_torch(table)["c"]

    assert matrix.tolist() == tensor.tolist() == [[3.0, 4.0], [5.0, 6.0]]
    at = arrays.values.buffers()[1].address + 2 * 4
    assert matrix.__array_interface__["data"][0] == tensor.data_ptr() == at


@pytest.mark.parametrize("policy", [None, bridge.fixed_size(2)])
def test_a_list_of_lists_has_a_dimension_for_each(policy: Policy | None) -> None:
    table = column([[[1, 2, 3], [4, 5, 6]]] * 2, pa.list_(pa.list_(pa.int16())))
    made = applied(table, {} if policy is None else {"c": policy})

    assert to_torch(made)["c"].shape == to_numpy(made)["c"].shape == (2, 2, 3)


def test_arrays_of_several_lengths_need_a_policy() -> None:
    table = column([[1, 2], [], [3]], pa.list_(pa.int64()))

    for convert in (to_numpy, to_torch):
        with pytest.raises(LossyConversionError, match=r"column 'c' holds arrays of 0 to 2 elements.*\n.*jagged\(\)"):
            convert(table)
    nested = applied(column([[[1], [1, 2]], [[3]]], pa.list_(pa.list_(pa.int64()))), {"c": bridge.jagged()})
    for convert in (to_numpy, to_torch):
        with pytest.raises(LossyConversionError, match=r"1 to 2 elements inside its arrays.*\n.*to_json\(\)"):
            convert(nested)
    jagged = applied(table, {"c": bridge.jagged()})
    assert [row.tolist() for row in to_torch(jagged)["c"].unbind()] == [[1, 2], [], [3]]
    assert [row.tolist() for row in to_numpy(jagged)["c"]] == [[1, 2], [], [3]]
    offsets = applied(table, {"c": bridge.offsets()})
    for convert in (to_numpy, to_torch):
        values, bounds = convert(offsets)["c"]
        assert (values.tolist(), bounds.tolist()) == ([1, 2, 3], [0, 2, 2, 3])


@pytest.mark.parametrize("rows", [[[1], None], [[1], [None]]], ids=str)
def test_a_null_in_arrays_is_an_error_whatever_the_form(rows: list[Any]) -> None:
    for policies in ({}, {"c": bridge.offsets()}, {"c": bridge.jagged()}):
        made = applied(column(rows, pa.list_(pa.int64())), policies)
        for convert in (to_torch, to_numpy):
            with pytest.raises(LossyConversionError, match=r"column 'c' \(list.*\) holds 1 nulls in"):
                convert(made)


def test_vectors_are_dense_and_sparse_ones_are_filled_with_zeros() -> None:
    rows = [
        {"type": 0, "size": 3, "indices": [0, 2], "values": [1.5, -1.0]},
        {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]},
        {"type": 0, "size": 3, "indices": [], "values": []},
    ]
    schema = pa.schema([marked(pa.field("v", VECTORS), VECTOR)])
    table = pa.table({"v": pa.chunked_array([pa.array(rows[:1], VECTORS), pa.array(rows[1:], VECTORS)])}, schema)
    right = [[1.5, 0.0, -1.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]

    dense, sparse = applied(table, {}), applied(table, {"v": bridge.sparse()})

    assert dense["v"].to_pylist() == right
    assert to_torch(dense)["v"].tolist() == to_numpy(dense)["v"].tolist() == right
    assert to_torch(sparse)["v"].is_sparse
    assert to_torch(sparse)["v"].to_dense().tolist() == right


@given(st.lists(st.none() | st.tuples(st.booleans(), st.lists(st.floats(allow_nan=False), max_size=4)), max_size=8))
def test_any_vectors_are_what_they_were(rows: list[tuple[bool, list[float]] | None]) -> None:
    def encoded(row: tuple[bool, list[float]] | None) -> dict[str, Any] | None:
        if row is None or row[0]:
            return row and {"type": 1, "size": None, "indices": None, "values": row[1]}
        places = [place for place, value in enumerate(row[1]) if value]
        return {"type": 0, "size": len(row[1]), "indices": places, "values": [row[1][place] for place in places]}

    schema = pa.schema([marked(pa.field("v", VECTORS), VECTOR)])
    table = pa.table({"v": pa.array(list(map(encoded, rows)), VECTORS)}, schema)

    assert applied(table, {})["v"].to_pylist() == [row and row[1] for row in rows]


def test_nested_structs_are_dicts_of_tensors() -> None:
    table = column([{"a": 1, "b": {"c": 0.5}}], pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.float64())]))]))

    (says,) = type_contract(table.schema, {})
    tensors = to_torch(table)["c"]

    assert says.torch == "dict of a: int32, b: dict of c: float64"
    assert tensors["b"]["c"].tolist() == [0.5]
    with pytest.raises(LossyConversionError, match=r"column 'c' \(struct\) holds 1 nulls in the place of structs"):
        to_torch(column([None], table.schema.field("c").type))


@pytest.mark.parametrize(
    ("policies", "says"),
    [
        ({"d": bridge.mask()}, r"policies names 'd', which is no column\."),
        ({"c": bridge.mask}, r"policies\['c'\] is a function; call it: bridge\.mask\(\)"),
        ({"c": 3}, r"policies\['c'\] is 3; give a policy"),
        ({"c": []}, r"policies\['c'\] is \[\]; give a policy"),
        (bridge.fill(0), r"policies is fill\(0\); give a dict"),
        ({complex: bridge.mask()}, r"policies has the key <class 'complex'>; give the name of a column, or one of"),
    ],
    ids=without_addresses,
)
def test_what_is_no_policy_is_refused(policies: Any, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        Rules.choose(pa.schema([("c", pa.int64())]), policies)


def test_what_spark_does_is_asked_for_by_name() -> None:
    assert by_spark({"a": [bridge.drop_nulls(), bridge.as_float64()], "b": bridge.to_json()}) == (["a"], ["b"])
    with pytest.raises(PolicyError, match=r"drop_nulls\(\) is done by Spark before types are known: name its columns"):
        by_spark({int: bridge.drop_nulls()})


@pytest.mark.parametrize("policies", [[bridge.fill(0), bridge.drop_nulls()], [bridge.drop_nulls(), bridge.mask()]])
def test_rows_are_dropped_or_filled(policies: list[Policy]) -> None:
    with pytest.raises(PolicyError, match=r"policies\['a'\] both drops the rows where it is NULL and keeps them"):
        by_spark({"a": policies})


@pytest.mark.parametrize("body", [{"policy": "melt"}, {"policy": "fill", "value": 1, "where": "later"}])
def test_a_policy_of_a_later_version_is_told(body: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match=r"the policy .* is not known.*\n  Upgrade"):
        Rules.from_json(pa.schema([("c", pa.int64())]), {"c": [body]})


def test_a_dictionary_is_made_from_its_own_column_alone() -> None:
    schema = pa.schema([("c", pa.struct([("t", pa.string())])), ("n", pa.float64())])
    rules = Rules.choose(schema, {"c": bridge.flatten(), "c.t": bridge.dictionary(), "n": bridge.as_int64()})

    bound = rules.bound(lambda: [pa.table({"c": [{"t": "b"}, {"t": "a"}], "n": [0.5, 1.5]}, schema)])

    assert bound.categories == {"c.t": ["a", "b"]}


def test_vectors_that_are_too_large_when_dense_are_not_made() -> None:
    rows = pa.array([{"type": 0, "size": 2**31 - 1, "indices": [1], "values": [1.0]}] * 4, VECTORS)
    schema = pa.schema([marked(pa.field("v", VECTORS), VECTOR)])

    with pytest.raises(LossyConversionError, match=r"column 'v' holds sparse vectors .*\n.*sparse\(\)"):
        applied(pa.table({"v": rows}, schema), {})


def test_the_contract_tells_policies_and_what_they_make() -> None:
    schema = pa.schema([("n", pa.int64()), ("price", pa.decimal128(18, 4)), ("tags", pa.list_(pa.string()))])
    rules = Rules.choose(schema, {"n": bridge.mask(), "price": bridge.as_float64()})

    n, there, price, tags = type_contract(rules.schema, {"n": "bigint", "price": "decimal(18,4)"}, rules)

    assert (n.torch, n.policies, n.nulls) == ("int64", "mask()", "no nulls")
    assert (there.name, there.torch) == ("n__valid", "bool")
    assert (price.spark, price.arrow, price.torch, price.policies) == (
        "decimal(18,4)",
        "double",
        "float64",
        "as_float64()",
    )
    assert (tags.torch, tags.huggingface) == (None, "List(Value(string))")
