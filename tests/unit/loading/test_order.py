from __future__ import annotations

import hashlib
import itertools
from collections import Counter, deque
from dataclasses import dataclass
from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.loading.order import Order, num_steps, num_valid, padding

Row = tuple[int, int]  # a row group, and the row in it


@dataclass(frozen=True)
class Case:
    """An epoch; its order is told again here, in the words of the definition."""

    row_counts: list[int]
    seed: int = 0
    epoch: int = 0
    canonical_world_size: int = 1
    shuffle: bool = False
    shuffle_window: int = 200_000

    @property
    def order(self) -> Order:
        return Order(**vars(self))

    @property
    def num_rows(self) -> int:
        return sum(self.row_counts)

    def groups(self) -> list[int]:
        """Row groups are permuted per epoch."""
        count = len(self.row_counts)
        return permutation(f"{self.seed}/{self.epoch}/row groups", count) if self.shuffle else list(range(count))

    def streams(self) -> list[list[Row]]:
        """Stream s takes the next N // C + (s < N % C) rows, permuted in windows."""
        sequence = [(group, row) for group in self.groups() for row in range(self.row_counts[group])]
        size, longer = divmod(len(sequence), self.canonical_world_size)
        made = []
        for stream in range(self.canonical_world_size):
            count = size + (stream < longer)
            rows, sequence = sequence[:count], sequence[count:]
            made.append(self.permuted(rows, stream) if self.shuffle else rows)
        assert not sequence
        return made

    def permuted(self, rows: list[Row], stream: int) -> list[Row]:
        windows: list[list[Row]] = [[]]
        for _, piece in itertools.groupby(rows, key=lambda row: row[0]):
            if len(windows[-1]) >= self.shuffle_window:
                windows.append([])
            windows[-1] += piece
        made = []
        for number, window in enumerate(windows):
            places = permutation(f"{self.seed}/{self.epoch}/window {stream} {number}", len(window))
            made += [window[place] for place in places]
        return made

    def rows(self) -> list[Row]:
        """Position p is row p // C of stream p % C."""
        streams, count = self.streams(), self.canonical_world_size
        return [streams[position % count][position // count] for position in range(self.num_rows)]


def permutation(key: str, count: int) -> list[int]:
    digest = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little")
    made: list[int] = np.random.RandomState(np.random.Philox(key=digest)).permutation(count).tolist()
    return made


def taken(case: Case, rank: int, world_size: int, consumed: int = 0) -> list[Row]:
    """Return the rows of a rank as a reader finds them: windows are opened when a row of theirs is needed."""
    order = case.order
    share = order.share(rank=rank, world_size=world_size, consumed=consumed)
    ahead = order.taken(share)
    waiting: list[deque[Row]] = [deque() for _ in range(share.num_streams)]
    made = []
    for number in range(share.num_rows):
        stream = waiting[number % share.num_streams]
        if not stream:
            one = next(ahead)
            assert one.stream == number % share.num_streams, "windows come in the order in which they are needed"
            read = [(piece.group, row) for piece in one.window.pieces for row in range(piece.start, piece.stop)]
            permuted = one.window.permutation()
            places = np.arange(len(read)) if permuted is None else permuted
            stream.extend(read[place] for place in places[one.offset :: one.step])
            assert len(stream) == one.num_rows > 0
        made.append(stream.popleft())
    assert next(ahead, None) is None
    assert not any(waiting)
    return made


cases = st.builds(
    Case,
    row_counts=st.lists(st.integers(0, 30), max_size=12),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 10_000),
    canonical_world_size=st.integers(1, 9),
    shuffle=st.booleans(),
    shuffle_window=st.integers(1, 120),
)
worlds = st.integers(1, 9)


@settings(deadline=None, max_examples=300)
@given(cases, worlds)
def test_each_row_goes_to_one_rank_once(case: Case, world_size: int) -> None:
    rows = itertools.chain.from_iterable(taken(case, rank, world_size) for rank in range(world_size))

    assert sorted(rows) == [(group, row) for group, count in enumerate(case.row_counts) for row in range(count)]


@settings(deadline=None, max_examples=300)
@given(cases, worlds, st.data())
def test_from_any_position_on_each_rank_has_the_positions_that_are_its_own(
    case: Case, world_size: int, data: st.DataObject
) -> None:
    consumed = data.draw(st.integers(0, case.num_rows))
    expected = case.rows()

    for rank in range(world_size):
        own = [expected[position] for position in range(consumed, case.num_rows) if position % world_size == rank]
        assert taken(case, rank, world_size, consumed) == own


@given(cases)
def test_streams_are_consecutive_parts_that_differ_by_a_row_at_most(case: Case) -> None:
    size, longer = divmod(case.num_rows, case.canonical_world_size)
    bounds = [case.order.bounds(stream) for stream in range(case.canonical_world_size)]

    assert [stop - start for start, stop in bounds] == [
        size + (stream < longer) for stream in range(case.canonical_world_size)
    ]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == case.num_rows


@given(cases)
def test_windows_hold_what_was_asked_for_and_no_piece_more_than_that_needs(case: Case) -> None:
    for stream in range(case.canonical_world_size):
        windows = list(case.order.windows(stream))
        start, stop = case.order.bounds(stream)
        assert sum(window.num_rows for window in windows) == stop - start
        assert [window.first for window in windows] == [
            sum(before.num_rows for before in windows[:number]) for number in range(len(windows))
        ]
        for window in windows:
            pieces = [piece.stop - piece.start for piece in window.pieces]
            assert sum(pieces) == window.num_rows
            assert all(pieces)
            if case.shuffle:
                assert sum(pieces[:-1]) < case.shuffle_window
                assert window is windows[-1] or window.num_rows >= case.shuffle_window
            else:
                assert len(pieces) == 1


@given(cases, st.data())
def test_windows_from_a_row_on_are_the_last_of_all(case: Case, data: st.DataObject) -> None:
    stream = data.draw(st.integers(0, case.canonical_world_size - 1))
    start, stop = case.order.bounds(stream)
    row = data.draw(st.integers(0, max(0, stop - start - 1)))

    windows = [window for window in case.order.windows(stream) if window.first + window.num_rows > row]

    assert list(case.order.windows(stream, row)) == windows


@settings(deadline=None)
@given(cases, st.integers(1, 12), st.data())
def test_with_canonical_world_size_fixed_each_global_batch_has_the_same_rows_on_any_world_size(
    case: Case, batch: int, data: st.DataObject
) -> None:
    consumed = data.draw(st.integers(0, case.num_rows))
    expected = case.rows()[consumed:]
    for world_size in (size for size in range(1, 10) if case.canonical_world_size % size == 0):
        total = batch * world_size
        ranks = [taken(case, rank, world_size, consumed) for rank in range(world_size)]
        for start in range(0, case.num_rows - consumed, total):
            step = start // total
            own = [rows[step * batch : (step + 1) * batch] for rows in ranks]
            assert Counter(itertools.chain(*own)) == Counter(expected[start : start + total])


@given(cases, worlds, st.data())
def test_no_more_row_groups_are_read_than_the_bound_allows(case: Case, world_size: int, data: st.DataObject) -> None:
    reads = 0
    for rank in range(world_size):
        share = case.order.share(rank=rank, world_size=world_size)
        windows = list(case.order.taken(share))
        assert share.num_streams == case.canonical_world_size // gcd(case.canonical_world_size, world_size)
        reads += sum(len(one.window.pieces) for one in windows)
    filled = sum(count > 0 for count in case.row_counts)
    bound = world_size // gcd(world_size, case.canonical_world_size)

    assert reads <= bound * (filled + case.canonical_world_size - 1)


@given(
    st.integers(0, 200), st.integers(0, 220), st.integers(1, 9), worlds, st.booleans(),
)  # fmt: skip
def test_steps_and_real_rows_are_those_of_the_definition(
    num_rows: int, consumed: int, batch_size: int, world_size: int, drop_last: bool
) -> None:
    consumed, total = min(consumed, num_rows), batch_size * world_size
    batches = [range(start, min(start + total, num_rows)) for start in range(consumed, num_rows, total)]
    if drop_last and batches and len(batches[-1]) < total:
        batches.pop()

    steps = num_steps(num_rows, batch_size=batch_size, world_size=world_size, consumed=consumed, drop_last=drop_last)
    counts = [
        [
            num_valid(
                step, num_rows, batch_size=batch_size, rank=rank, world_size=world_size, consumed=consumed
            )
            for rank in range(world_size)
        ]
        for step in range(steps)
    ]  # fmt: skip

    assert steps == len(batches)
    assert counts == [
        [sum(position % world_size == rank for position in batch) for rank in range(world_size)] for batch in batches
    ]
    if counts:
        # so that the others fill up to as many rows as the largest has
        assert max(counts[-1]) == -(-len(batches[-1]) // world_size)
        assert all(max(counts[-1]) - count in (0, 1) for count in counts[-1])


def test_behind_the_last_batch_no_row_is_real() -> None:
    assert num_valid(2, 10, batch_size=5, rank=0, world_size=1, consumed=0) == 0
    assert num_steps(3, batch_size=1, world_size=1, consumed=5, drop_last=False) == 0


@given(st.integers(1, 60), worlds)
def test_padding_repeats_the_last_row_of_the_rank_or_else_of_all(num_rows: int, world_size: int) -> None:
    for rank in range(world_size):
        own = [position for position in range(num_rows) if position % world_size == rank]
        assert padding(num_rows, rank=rank, world_size=world_size) == (own[-1] if own else num_rows - 1)


@given(
    st.integers(0, 60), st.integers(0, 2**70), st.integers(0, 99), st.integers(1, 9), st.booleans(),
    st.lists(st.booleans(), max_size=10),
)  # fmt: skip
def test_of_row_groups_of_one_row_the_order_is_told_at_once(
    count: int, seed: int, epoch: int, canonical_world_size: int, shuffle: bool, empty: list[bool]
) -> None:
    row_counts = [1] * count + [0 if is_empty else 1 for is_empty in empty]
    case = Case(row_counts, seed, epoch, canonical_world_size, shuffle, shuffle_window=1)
    expected = [group for group, _ in case.rows()]

    assert case.order.rows_of_ones(0, case.num_rows, 1).tolist() == expected
    assert case.order.rows_of_ones(2, case.num_rows, 3).tolist() == expected[2::3]
    assert case.order.rows_at(np.arange(case.num_rows)[::-1]).tolist() == expected[::-1]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_million_row_groups_are_no_hurdle(shuffle: bool) -> None:
    row_counts = np.full(1_000_000, 3)
    order = Order(row_counts, canonical_world_size=64, shuffle=shuffle, shuffle_window=2000)
    consumed = order.num_rows // 2

    first = next(order.taken(order.share(rank=1, world_size=8, consumed=consumed)))
    number, stream = divmod(consumed + 1, 64)

    assert first.stream == 0
    assert first.window.first <= number < first.window.first + first.window.num_rows
    assert first.window.first + first.offset == number
    assert order.bounds(stream)[0] == stream * order.num_rows // 64
    ones = Order(np.ones(1_000_000, np.int64), canonical_world_size=64, shuffle=shuffle)
    assert sorted(ones.rows_of_ones(0, 1_000_000, 1).tolist()) == list(range(1_000_000))


@given(cases)
def test_the_order_depends_on_its_arguments_alone(case: Case) -> None:
    first = taken(case, 0, 1)
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()

    assert taken(case, 0, 1) == first
    assert np.random.get_state()[1].tolist() == before


@given(st.tuples(st.integers(), st.integers(0, 99)), st.tuples(st.integers(), st.integers(0, 99)))
def test_another_seed_or_epoch_is_another_order(one: tuple[int, int], other: tuple[int, int]) -> None:
    orders = [taken(Case([20] * 5, seed, epoch, shuffle=True, shuffle_window=40), 0, 1) for seed, epoch in (one, other)]

    assert (orders[0] == orders[1]) is (one == other)


def test_windows_of_one_epoch_are_permuted_independently() -> None:
    order = Order([50] * 8, canonical_world_size=2, shuffle=True, shuffle_window=50)
    made = [window.permutation() for stream in range(2) for window in order.windows(stream)]

    assert len({tuple(permuted.tolist()) for permuted in made if permuted is not None}) == 8


def test_without_shuffle_rows_stand_as_in_the_files() -> None:
    rows = [(group, row) for group, count in enumerate([3, 0, 5, 1]) for row in range(count)]

    assert taken(Case([3, 0, 5, 1], seed=7, epoch=5), 0, 1) == rows
    assert taken(Case([3, 0, 5, 1], canonical_world_size=3), 1, 3) == rows[3:6]


def test_no_rows_no_windows() -> None:
    for row_counts in ([], [0, 0]):
        order = Order(row_counts, canonical_world_size=3, shuffle=True)
        share = order.share(rank=2, world_size=3)
        assert share.num_rows == 0
        assert list(order.taken(share)) == []
        assert order.rows_of_ones(0, 0, 1).tolist() == []


def test_the_stream_stays_what_it_is() -> None:
    """Golden values: a change of them would give every training run another order, and states another place."""

    def shown(seed: int, epoch: int, canonical_world_size: int) -> list[int]:
        case = Case([3, 1, 4, 1, 5], seed, epoch, canonical_world_size, shuffle=True, shuffle_window=6)
        starts = [0, 3, 4, 8, 9]
        return [starts[group] + row for group, row in taken(case, 0, 1)]

    assert shown(0, 0, 1) == [12, 9, 13, 10, 11, 5, 4, 7, 6, 1, 8, 0, 2, 3]
    assert shown(0, 1, 1) == [12, 9, 0, 10, 8, 1, 13, 11, 2, 7, 6, 3, 4, 5]
    assert shown(42, 7, 2) == [6, 9, 8, 10, 5, 2, 3, 13, 4, 11, 7, 1, 0, 12]
    assert shown(-1, 0, 3) == [9, 8, 6, 12, 2, 5, 13, 4, 7, 11, 1, 3, 10, 0]
