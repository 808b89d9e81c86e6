from __future__ import annotations

from collections import Counter
from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.loading.order import Order, batch_rows, num_steps, padding

counts = st.lists(st.integers(0, 40), max_size=20)
worlds = st.integers(1, 9)
windows = st.integers(1, 100)
seeds = st.integers(-(2**40), 2**64)
epochs = st.integers(0, 10_000)

Row = tuple[int, int]


def rows_of_streams(order: Order) -> list[list[Row]]:
    """Return (row group, row in it) for the rows of each stream, as its windows give them."""
    streams = []
    for stream in range(order.canonical_world_size):
        rows: list[Row] = []
        for window in order.windows(stream):
            read = [(piece.group, row) for piece in window.pieces for row in range(piece.start, piece.stop)]
            permutation = window.permutation()
            rows += read if permutation is None else [read[index] for index in permutation]
        streams.append(rows)
    return streams


def rows_in_order(order: Order) -> list[Row]:
    """Return the rows by position, as the definition says."""
    streams, size = rows_of_streams(order), order.canonical_world_size
    return [streams[position % size][position // size] for position in range(order.num_rows)]


def rows_of_rank(order: Order, rank: int, world_size: int, consumed: int = 0) -> list[Row]:
    """Return the rows of a rank, as its windows give them; they come when a row of theirs is needed, in that order."""
    streams: dict[int, list[Row]] = {}
    num_streams = order.num_streams(world_size)
    for taken in order.taken(rank=rank, world_size=world_size, consumed=consumed):
        firsts = [len(streams.get(stream, [])) * num_streams + stream for stream in range(num_streams)]
        assert taken.stream == firsts.index(min(firsts))
        read = [(piece.group, row) for piece in taken.window.pieces for row in range(piece.start, piece.stop)]
        permutation = taken.window.permutation()
        rows = read if permutation is None else [read[index] for index in permutation]
        mine = rows[taken.offset :: taken.step]
        assert len(mine) == taken.num_rows
        streams.setdefault(taken.stream, []).extend(mine)
    num_rows = sum(map(len, streams.values()))
    return [streams[row % num_streams][row // num_streams] for row in range(num_rows)]


@given(counts, worlds, st.booleans(), windows, seeds, epochs)
def test_each_row_has_one_position(
    row_counts: list[int], streams: int, shuffle: bool, window: int, seed: int, epoch: int
) -> None:
    order = Order(
        row_counts, seed=seed, epoch=epoch, canonical_world_size=streams, shuffle=shuffle, shuffle_window=window
    )

    assert sorted(rows_in_order(order)) == [(group, row) for group, n in enumerate(row_counts) for row in range(n)]


@given(counts, worlds, st.booleans(), windows)
def test_streams_take_equal_parts_of_the_sequence_in_turn(
    row_counts: list[int], streams: int, shuffle: bool, window: int
) -> None:
    order = Order(row_counts, canonical_world_size=streams, shuffle=shuffle, shuffle_window=window)
    whole = Order(row_counts, shuffle=shuffle, shuffle_window=window)
    groups = [piece.group for one in whole.windows(0) for piece in one.pieces]
    sequence = [(group, row) for group in groups for row in range(row_counts[group])]

    at = 0
    for stream in range(streams):
        size = order.num_rows // streams + (stream < order.num_rows % streams)
        assert order.bounds(stream) == (at, at + size)
        pieces = [piece for one in order.windows(stream) for piece in one.pieces]
        assert [(p.group, row) for p in pieces for row in range(p.start, p.stop)] == sequence[at : at + size]
        at += size


@given(counts, worlds, windows, seeds, epochs)
def test_windows_hold_what_was_asked_for_and_no_piece_more(
    row_counts: list[int], streams: int, window: int, seed: int, epoch: int
) -> None:
    order = Order(row_counts, seed=seed, epoch=epoch, canonical_world_size=streams, shuffle=True, shuffle_window=window)
    for stream in range(streams):
        made = list(order.windows(stream))
        assert all(one.num_rows >= window for one in made[:-1])
        for one in made:
            last = one.pieces[-1]
            assert one.num_rows - (last.stop - last.start) < window
            permutation = one.permutation()
            assert permutation is not None
            assert np.array_equal(np.sort(permutation), np.arange(one.num_rows))
            assert all(piece.start < piece.stop for piece in one.pieces)


@given(counts, worlds, windows)
def test_without_shuffle_rows_keep_the_order_of_the_files(row_counts: list[int], streams: int, window: int) -> None:
    order = Order(row_counts, canonical_world_size=streams, shuffle_window=window)

    rows = [row for stream in rows_of_streams(order) for row in stream]
    assert rows == [(group, row) for group, count in enumerate(row_counts) for row in range(count)]
    assert all(len(one.pieces) == 1 for stream in range(streams) for one in order.windows(stream))


@given(counts, worlds, worlds, st.booleans(), windows, st.data())
def test_a_rank_has_the_positions_that_are_its_own_from_any_position_on(
    row_counts: list[int], streams: int, world_size: int, shuffle: bool, window: int, data: st.DataObject
) -> None:
    order = Order(row_counts, canonical_world_size=streams, shuffle=shuffle, shuffle_window=window)
    consumed = data.draw(st.integers(0, order.num_rows))
    rows = rows_in_order(order)
    for rank in range(world_size):
        mine = [rows[position] for position in range(consumed, order.num_rows) if position % world_size == rank]
        assert rows_of_rank(order, rank, world_size, consumed) == mine
    assert order.num_streams(world_size) == streams // gcd(streams, world_size)


@given(counts, worlds, st.integers(1, 10), st.booleans(), st.data())
def test_steps_are_equal_and_batches_hold_the_positions_of_their_step(
    row_counts: list[int], world_size: int, batch_size: int, drop_last: bool, data: st.DataObject
) -> None:
    num_rows = sum(row_counts)
    consumed = data.draw(st.integers(0, num_rows))
    batch = batch_size * world_size
    sizes = {"batch_size": batch_size, "world_size": world_size, "consumed": consumed}
    steps = num_steps(num_rows, drop_last=drop_last, **sizes)

    rest = num_rows - consumed
    assert steps == (rest // batch if drop_last else -(-rest // batch))
    for step in range(steps):
        start = consumed + step * batch
        positions = range(start, min(start + batch, num_rows))
        for rank in range(world_size):
            num_here, valid = batch_rows(step, num_rows, rank=rank, **sizes)
            assert valid == sum(position % world_size == rank for position in positions)
            assert num_here == -(-len(positions) // world_size)
            assert num_here - valid in (0, 1), "one row pads at the most"


@given(st.integers(1, 100), worlds)
def test_padding_is_the_last_row_of_the_rank_or_of_all(num_rows: int, world_size: int) -> None:
    for rank in range(world_size):
        mine = [position for position in range(num_rows) if position % world_size == rank]
        assert padding(num_rows, rank=rank, world_size=world_size) == (mine[-1] if mine else num_rows - 1)


@settings(max_examples=30)
@given(counts, st.integers(1, 8), seeds)
def test_with_a_fixed_number_of_streams_each_step_has_the_same_rows_on_every_world_size(
    row_counts: list[int], per_rank: int, seed: int
) -> None:
    order = Order(row_counts, seed=seed, canonical_world_size=8, shuffle=True, shuffle_window=30)
    batch = 8 * per_rank
    found = []
    for world_size in (1, 2, 4, 8):
        size = batch // world_size
        ranks = [rows_of_rank(order, rank, world_size) for rank in range(world_size)]
        steps = num_steps(order.num_rows, batch_size=size, world_size=world_size, consumed=0, drop_last=False)
        found.append([Counter(r for rows in ranks for r in rows[k * size : (k + 1) * size]) for k in range(steps)])

    assert all(one == found[0] for one in found)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), worlds, worlds)
def test_little_is_read_twice(row_counts: list[int], streams: int, world_size: int) -> None:
    order = Order(row_counts, canonical_world_size=streams, shuffle=True, shuffle_window=50)
    read = 0
    for rank in range(world_size):
        for taken in order.taken(rank=rank, world_size=world_size):
            read += len(taken.window.pieces)

    pieces = len(row_counts) + streams - 1
    assert read <= world_size / gcd(world_size, streams) * pieces


@given(st.integers(0, 60), worlds, st.booleans(), seeds, st.integers(1, 5))
def test_row_groups_of_one_row_are_found_without_windows(
    count: int, streams: int, shuffle: bool, seed: int, step: int
) -> None:
    order = Order([1] * count, seed=seed, canonical_world_size=streams, shuffle=shuffle, shuffle_window=1)
    expected = [group for group, _ in rows_in_order(order)]

    assert order.rows_at(np.arange(0, count, 1)).tolist() == expected
    assert order.rows_at(np.arange(min(2, count), count, step)).tolist() == expected[2::step]
    assert order.rows_at(np.arange(count)[::-1]).tolist() == expected[::-1]


@given(st.tuples(seeds, epochs), st.tuples(seeds, epochs))
def test_another_seed_or_epoch_is_another_order(one: tuple[int, int], other: tuple[int, int]) -> None:
    orders = [
        rows_in_order(Order([40] * 10, seed=seed, epoch=epoch, shuffle=True, shuffle_window=100))
        for seed, epoch in (one, other)
    ]

    assert (orders[0] == orders[1]) is (one == other)


def test_the_order_depends_on_its_arguments_alone() -> None:
    order = Order([7, 5, 9], seed=3, shuffle=True, shuffle_window=8)
    before = rows_in_order(order)
    np.random.seed(1)
    state = str(np.random.get_state())

    assert rows_in_order(Order([7, 5, 9], seed=3, shuffle=True, shuffle_window=8)) == before
    assert str(np.random.get_state()) == state, "and leaves NumPy's own state alone"


@given(counts, worlds, windows, st.data())
def test_windows_from_a_row_on_are_the_last_of_all(
    row_counts: list[int], streams: int, window: int, data: st.DataObject
) -> None:
    order = Order(row_counts, canonical_world_size=streams, shuffle=True, shuffle_window=window)
    stream = data.draw(st.integers(0, streams - 1))
    row = data.draw(st.integers(0, order.num_rows))

    assert list(order.windows(stream, row)) == [one for one in order.windows(stream) if one.first + one.num_rows > row]


def test_a_window_far_behind_is_found_among_a_million_row_groups() -> None:
    order = Order(np.full(1_000_000, 10_000), shuffle=True)

    window = next(order.windows(0, 9_000_000_000))

    assert window.first <= 9_000_000_000 < window.first + window.num_rows


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "43 40 44 41 42 21 20 23 22 01 30 00 02 10"),
        ({"epoch": 1}, "43 40 00 41 30 01 44 42 02 23 22 10 20 21"),
        ({"seed": 42, "epoch": 7}, "22 30 21 10 20 23 00 44 41 40 02 43 01 42"),
        ({"seed": -1, "canonical_world_size": 2}, "43 21 40 30 42 20 00 22 44 23 01 02 41 10"),
    ],
)
def test_the_stream_stays_what_it_is(arguments: dict[str, int], expected: str) -> None:
    """Golden values: a change of them would give every training run another order."""
    order = Order([3, 1, 4, 1, 5], shuffle=True, shuffle_window=6, **arguments)

    assert " ".join(f"{group}{row}" for group, row in rows_in_order(order)) == expected
