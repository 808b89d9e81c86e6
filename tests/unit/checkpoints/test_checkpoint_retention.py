"""Which saves of a run stay."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bridge.checkpoints.retention import Retention, Saved, list_saved
from bridge.volumes.commit import Attempt, begin
from bridge.volumes.stores import LocalStorage

metrics = st.dictionaries(st.sampled_from(["loss", "score"]), st.floats(), max_size=2)


@st.composite
def histories(draw: st.DrawFn) -> list[Saved]:
    """Return the saves of a run in any order: steps may be saved twice, and be smaller than those before."""
    steps = draw(st.lists(st.integers(0, 30), max_size=12))
    made = [
        Saved(step, Attempt(1000 + number, f"step{step}", f"{number:012x}"), draw(metrics), 1, 1)
        for number, step in enumerate(steps)
    ]
    return draw(st.permutations(made))


retentions = st.builds(
    Retention,
    keep_last=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 10),
    best=st.none() | st.tuples(st.sampled_from(["loss", "score", "other"]), st.sampled_from(["min", "max"])),
)


def saved(step: int, generation: int | None = None, **measured: float) -> Saved:
    generation = 1000 + step if generation is None else generation
    return Saved(step, Attempt(generation, f"step{step}", f"{generation:012x}"), measured, 1, 1)


def kept(retention: Retention, history: list[Saved], protected: set[str] = frozenset()) -> list[Saved]:  # type: ignore[assignment]
    doomed = retention.doomed(history, protected)
    return [one for one in history if one not in doomed]


def read_of(history: list[Saved]) -> dict[int, Saved]:
    """Return what readers pick of each step."""
    return {one.step: one for one in sorted(history, key=lambda one: one.attempt.rank, reverse=True)}


@given(retentions, histories())
def test_the_save_that_was_made_last_is_always_kept(retention: Retention, history: list[Saved]) -> None:
    """After a fallback to an older step, steps that are damaged may be higher than those that are saved now."""
    assume(history)

    assert min(history, key=lambda one: one.attempt.rank) in kept(retention, history)


@given(retentions, histories())
def test_as_many_of_the_last_as_are_asked_for_are_kept(retention: Retention, history: list[Saved]) -> None:
    made = sorted(read_of(history).values(), key=lambda one: one.attempt.rank)

    assert {one.attempt.name for one in made[: retention.keep_last]} <= {
        one.attempt.name for one in kept(retention, history)
    }


@given(retentions, histories())
def test_every_so_many_steps_are_kept(retention: Retention, history: list[Saved]) -> None:
    every = retention.keep_every
    assume(every is not None)
    steps = {one.step for one in kept(retention, history)}

    assert {one.step for one in history if one.step % (every or 1) == 0} <= steps


@given(retentions, histories())
def test_the_best_is_kept_and_what_is_no_number_is_never_it(retention: Retention, history: list[Saved]) -> None:
    assume(retention.best is not None)
    name, mode = retention.best or ("", "min")
    sign = 1 if mode == "min" else -1
    measured = [one for one in read_of(history).values() if not math.isnan(one.metrics.get(name, math.nan))]
    best = retention.best_of(list(read_of(history).values()))

    assert (best is None) == (not measured)
    if best is not None:
        assert all(sign * best.metrics[name] <= sign * one.metrics[name] for one in measured)
        assert best in kept(retention, history)


@given(retentions, histories(), st.randoms(use_true_random=False))
def test_what_is_protected_is_kept(retention: Retention, history: list[Saved], random: object) -> None:
    protected = {one.attempt.name for one in history if random.random() < 0.5}  # type: ignore[attr-defined]

    assert protected <= {one.attempt.name for one in kept(retention, history, protected)}


@given(retentions, histories())
def test_what_no_rule_names_goes(retention: Retention, history: list[Saved]) -> None:
    last = len({one.step for one in history if retention.keep_every and one.step % retention.keep_every == 0})

    # the last ones and the best
    assert len(kept(retention, history)) <= retention.keep_last + last + 1


@given(retentions, histories())
def test_it_does_not_matter_in_which_order_they_are_given(retention: Retention, history: list[Saved]) -> None:
    assert retention.doomed(history) == retention.doomed(history[::-1])


@given(retentions, histories())
def test_what_is_kept_is_kept_again(retention: Retention, history: list[Saved]) -> None:
    assert retention.doomed(kept(retention, history)) == []


@given(retentions, histories())
def test_the_oldest_goes_first(retention: Retention, history: list[Saved]) -> None:
    steps = [one.step for one in retention.doomed(history)]

    assert steps == sorted(steps)


def test_of_a_step_that_was_saved_twice_what_readers_pick_is_kept() -> None:
    history = [saved(1, generation) for generation in (5, 7, 6)]

    assert kept(Retention(3), history) == [history[1]]


@pytest.mark.parametrize(("mode", "step"), [("min", 2), ("max", 4)])
def test_of_equals_the_earliest_is_best(mode: Literal["min", "max"], step: int) -> None:
    history = [
        saved(1, loss=math.nan),
        saved(2, loss=0.5),
        saved(3, loss=0.5),
        saved(4, loss=3.0),
        saved(5),
        saved(6, loss=3.0),
    ]

    best = Retention(1, best=("loss", mode)).best_of(history)

    assert best is not None
    assert best.step == step


def test_where_nothing_was_measured_none_is_best() -> None:
    assert Retention(1, best=("loss", "min")).best_of([saved(1), saved(2, loss=math.nan)]) is None
    assert Retention(1).best_of([saved(1, loss=1.0)]) is None


def test_saves_that_failed_do_not_count(tmp_path: object) -> None:
    storage = LocalStorage(tmp_path)  # type: ignore[arg-type]

    def save(step: int, *, is_complete: bool) -> None:
        with begin(storage, f"step{step}") as opened:
            storage.make_folder(opened.name)
            storage.write(f"{opened.name}/data", [b"x"])
            if is_complete:
                facts = {"step": step, "metrics": {"loss": math.nan}}
                body = {"kind": "checkpoint", "facts": facts, "num_bytes": 1, "world_size": 1}
                opened.commit(body, {"data": 1})
            else:
                (storage.folder / opened.name).rename(storage.folder / f"0000000001000-step{step}-{step:012x}")

    for step in range(6):
        save(step, is_complete=step < 3)

    found = list_saved(storage)
    assert [one.step for one in found] == [2, 1, 0]
    assert math.isnan(found[0].metrics["loss"])
    assert [one.step for one in Retention(2).doomed(found)] == [0]
