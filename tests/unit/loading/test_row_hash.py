from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.loading.row_hash import hash_rows

ROWS = 6
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.float16, torch.bfloat16, torch.uint32,
    torch.int32, torch.float32, torch.uint64, torch.int64, torch.float64,
]  # fmt: skip
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

texts = st.one_of(st.none(), st.text(max_size=4), st.binary(max_size=4), st.just("None"), st.just("a\0b"))


def tensor_of(bits: list[int], dtype: torch.dtype, width: int) -> torch.Tensor:
    """Return [rows, width] (or [rows] for 0) values of a dtype, of any bits."""
    shape = [len(bits), width] if width else [len(bits)]
    repeated = np.array(bits, np.uint64).repeat(max(1, width))
    if dtype == torch.bool:
        return torch.from_numpy(repeated % 2 == 1).reshape(shape)
    size = torch.empty(0, dtype=dtype).element_size()
    cut = torch.from_numpy(repeated.view(np.int64)).view(SIGNED[size]).reshape(-1, 8 // size)[:, 0]
    return cut.contiguous().view(dtype).reshape(shape)


def batch(order: list[int]) -> dict[str, Any]:
    """Return rows 0 to 5 of a column of every form, in some order."""
    n = torch.tensor(order)
    lengths = n % 3
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    elements = torch.cat([torch.arange(length) + 10.0 * row for row, length in zip(order, lengths, strict=True)])
    dense = torch.zeros(len(order), 7)
    dense[torch.arange(len(order)), n] = n + 1.0
    return {
        "n": n,
        "vector": torch.stack([n, -n], 1).float(),
        "text": [None if row == 3 else f"row {row}" for row in order],
        "raw": [bytes([row]) for row in order],
        "struct": {"a": n.to(torch.uint16), "b": {"c": n % 2 == 0, "t": [str(row) for row in order]}},
        "offsets": (elements, offsets),
        "jagged": torch.nested.nested_tensor_from_jagged(elements, offsets=offsets),
        "sparse": dense.to_sparse().coalesce(),
    }


@given(st.permutations(range(ROWS)))
@settings(deadline=None)
def test_a_row_hashes_the_same_wherever_it_stands(order: list[int]) -> None:
    expected = hash_rows(batch(list(range(ROWS))))

    assert np.array_equal(hash_rows(batch(order)), expected[order])
    assert len(set(expected.tolist())) == ROWS
    for stop in range(1, ROWS):
        assert np.array_equal(hash_rows(batch(order[:stop])), expected[order[:stop]])


@pytest.mark.parametrize("width", [0, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_hash_the_same_together(dtype: torch.dtype, width: int) -> None:
    column = tensor_of(list(range(9)), dtype, width)
    counts = [1, 2, 3, 1]
    batches: list[Any] = [{**batch(list(range(count))), "x": column[count:][:count]} for count in counts]
    others = [*batches, {"x": column}, {"x": column.reshape(9, -1)[:, 0]}, column, (column, column), {"x": ["a"]}]

    for some in (batches, others):
        assert np.array_equal(hash_rows(*some), np.concatenate([hash_rows(one) for one in some]))
    ones = [{"x": torch.ones(3, dtype=one)} for one in (dtype, dtype, torch.int64, torch.float64)]
    assert np.array_equal(hash_rows(*ones), np.concatenate([hash_rows(one) for one in ones]))


@pytest.mark.parametrize("name", list(batch([0])))
def test_each_form_of_a_column_counts(name: str) -> None:
    order = list(range(ROWS))
    changed = [5, *order[1:]]
    other = {**batch(order), name: batch(changed)[name]}
    before, after = hash_rows({name: batch(order)[name]}), hash_rows({name: other[name]})

    assert (before != after).tolist() == [True, *[False] * (ROWS - 1)]
    assert (hash_rows(batch(order)) != hash_rows(other)).tolist() == [True, *[False] * (ROWS - 1)]
    is_alike = np.array_equal(hash_rows(batch(order), leave_out=["text"]), hash_rows(other, leave_out=["text"]))
    assert is_alike == (name == "text")


@given(
    st.sampled_from(DTYPES), st.integers(0, 3), st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=8), st.data()
)
@settings(deadline=None)
def test_one_bit_changes_the_hash_of_its_row_alone(
    dtype: torch.dtype, width: int, bits: list[int], data: st.DataObject
) -> None:
    values = tensor_of(bits, dtype, width)
    row = data.draw(st.integers(0, len(bits) - 1))
    changed = values.clone()
    # of a bool, the lowest is the only one
    flat = changed.view(torch.uint8).reshape(len(bits), -1)
    at = data.draw(st.integers(0, flat.shape[1] - 1))
    flat[row, at] ^= 1 if dtype == torch.bool else 1 << data.draw(st.integers(0, 7))

    differ = hash_rows({"x": values}) != hash_rows({"x": changed})

    assert np.flatnonzero(differ).tolist() == [row]


@given(st.lists(texts, min_size=1, max_size=6), st.lists(texts, min_size=1, max_size=6))
def test_texts_hash_alike_exactly_where_they_are_alike(left: list[Any], right: list[Any]) -> None:
    hashes = dict(zip([*left, *right], hash_rows({"t": [*left, *right]}).tolist(), strict=True))

    assert len(set(hashes.values())) == len(hashes)
    assert hash_rows({"t": left}).tolist() == [hashes[value] for value in left]


def test_texts_that_differ_behind_a_zero_differ() -> None:
    assert len(set(hash_rows({"t": ["a\0b", "a\0c", "a", "a\0", ""]}).tolist())) == 5


def test_values_that_change_columns_or_places_differ() -> None:
    one, two = torch.tensor([1, 1, 3]), torch.tensor([2, 1, 4])
    pairs = [
        ({"a": one, "b": two}, {"a": two, "b": one}),
        ((one, two), (two, one)),
        (torch.stack([one, two], 1), torch.stack([two, one], 1)),
        ({"s": {"a": one, "b": two}}, {"s": {"a": two, "b": one}}),
        ({"t": [["x", "y"][n % 2] for n in one], "u": ["x"] * 3}, {"t": ["x"] * 3, "u": ["y", "y", "y"]}),
    ]
    for left, right in pairs[:4]:
        assert (hash_rows(left) != hash_rows(right)).tolist() == [True, False, True]
    assert (hash_rows(pairs[4][0]) != hash_rows(pairs[4][1])).all()
    # the names count, and the order of a dict does not
    assert np.array_equal(hash_rows({"a": one, "b": two}), hash_rows({"b": two, "a": one}))


def test_what_compares_equal_and_is_not_the_same_differs() -> None:
    zeros = torch.tensor([0.0, -0.0])
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    for values in (zeros, nans, zeros.reshape(2, 1), nans.reshape(2, 1)):
        assert len(set(hash_rows({"x": values}).tolist())) == 2
    one = [hash_rows({"x": torch.ones(1, dtype=dtype)})[0] for dtype in DTYPES]
    assert len(set(one)) == len(DTYPES)
    assert hash_rows({"x": torch.ones(1, 1)})[0] != hash_rows({"x": torch.ones(1)})[0]


def test_where_the_elements_of_a_row_end_counts() -> None:
    elements = torch.zeros(4)
    jagged = [(elements, torch.tensor([0, *ends, 4])) for ends in ([0, 2], [0, 3], [1, 1])]
    hashes = [hash_rows({"x": one}).tolist() for one in jagged]

    assert hashes[0][0] == hashes[1][0] == hashes[2][1], "no elements"
    assert len({hashes[0][1], hashes[0][0], hashes[1][1], hashes[2][0]}) == 4
    # offsets of a part of the elements
    assert hash_rows({"x": (elements, torch.tensor([1, 3]))})[0] == hashes[0][1]


def test_pinned_tuples_are_lists_and_hash_alike() -> None:
    x, y = torch.rand(3, 2), torch.arange(3)
    pair = (torch.rand(3), torch.tensor([0, 1, 1, 3]))

    assert np.array_equal(hash_rows((x, y)), hash_rows([x, y]))
    assert np.array_equal(hash_rows({"p": pair}), hash_rows({"p": list(pair)}))


def test_large_rows_hash_as_small_batches_of_them() -> None:
    values = torch.rand(50, 3, 20_000)
    whole = hash_rows(values)

    assert np.array_equal(np.concatenate([hash_rows(part) for part in values.split(7)]), whole)
    assert len(hash_rows({"x": torch.empty(4, 0)})) == 4
    assert len(hash_rows({"x": torch.empty(0, 3)})) == 0


def test_the_hash_is_the_same_in_every_process() -> None:
    code = (
        "from tests.unit.loading.test_row_hash import batch; from bridge.loading.row_hash import hash_rows;"
        "print(hash_rows(batch([0, 1, 2, 3, 4, 5])).tolist())"
    )
    shown = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert shown == {f"{hash_rows(batch(list(range(ROWS)))).tolist()}\n"}


def test_what_has_no_rows_to_compare_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'x' of a batch is ndarray, which has no rows to compare"):
        hash_rows({"x": np.arange(3)})
    with pytest.raises(TypeError, match=r"'x' of a batch is a list of int; only strings, bytes and None"):
        hash_rows({"x": ["a", 1]})
    with pytest.raises(TypeError, match="a batch has no columns"):
        hash_rows({})
