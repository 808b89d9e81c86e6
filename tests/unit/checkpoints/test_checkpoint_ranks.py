from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from bridge.checkpoints.retention import list_saved
from bridge.volumes.stores import LocalStorage
from tests.ranks import Ended, run_ranks

SAVED, LOADED = (2, 1, 4), (1, 3, 2)


def all_told(ended: list[Ended], name: str, world_size: int) -> list[Any]:
    """Return what the first ranks told."""
    for rank, each in enumerate(ended[:world_size]):
        assert name in each.told, f"rank {rank}, {name}: {each.stderr[-3000:]}"
    return [each.told[name] for each in ended[:world_size]]


def values(ended: list[Ended], name: str, world_size: int = 2) -> list[Any]:
    told = all_told(ended, name, world_size)
    assert all("value" in each for each in told), (name, told)
    return [each["value"] for each in told]


def value(ended: list[Ended], name: str, world_size: int = 2) -> Any:
    """Return what all ranks told alike."""
    first, *others = values(ended, name, world_size)
    assert all(other == first for other in others), (name, first, others)
    return first


def error(ended: list[Ended], name: str, kind: str = "CheckpointError") -> str:
    """Return the text of the error that was raised on all ranks alike, and soon."""
    told = all_told(ended, name, 2)
    assert all("error" in each for each in told), (name, told)
    assert {(each["error"], each["text"]) for each in told} == {(kind, told[0]["text"])}, told
    assert all(each["seconds"] < 60 for each in told), told
    text: str = told[0]["text"]
    return text


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    ended = run_ranks("checkpoint_rank_calls.spread", 4, tmp_path_factory.mktemp("spread"), within_s=280)
    assert [each.status for each in ended] == [0] * 4, [each.stderr[-3000:] for each in ended]
    return ended


@pytest.mark.parametrize("loaded", LOADED)
@pytest.mark.parametrize("saved", SAVED)
def test_tensors_are_equal_on_any_number_of_ranks(spread: list[Ended], saved: int, loaded: int) -> None:
    for kind in ("tensors", "fsdp"):
        before = value(spread, f"saved {saved}: {kind}", saved)
        assert value(spread, f"{saved} on {loaded}: {kind}", loaded) == before
    assert before["optimizer"]["state"], "there was something to compare"
    assert all("module." not in name for name in before["model"])


@pytest.mark.parametrize("loaded", LOADED)
@pytest.mark.parametrize("saved", SAVED)
def test_runs_go_on_on_any_number_of_ranks(spread: list[Ended], saved: int, loaded: int) -> None:
    step, world_size, random, note, state = value(spread, f"{saved} on {loaded}: fsdp manager", loaded)
    assert (step, world_size, note) == (3, saved, 0), "values are those of rank 0"
    assert state == value(spread, f"saved {saved}: fsdp", saved), "as it was when save was called"
    if saved == loaded:
        assert random == "as it was on every rank"
    elif saved > loaded:
        assert random == f"as it was on ranks 0 to {loaded - 1} of {saved}"
    else:
        assert random == f"as it was on ranks 0 to {saved - 1}; seeded anew on the others"


@pytest.mark.parametrize("loaded", LOADED)
@pytest.mark.parametrize("saved", SAVED)
def test_ranks_get_back_what_is_their_own(spread: list[Ended], saved: int, loaded: int) -> None:
    told = values(spread, f"{saved} on {loaded}: ddp manager", loaded)
    # the state of batch norm is of each rank, and that of rank 0 is kept
    before = values(spread, f"saved {saved}: ddp", saved)[0]
    for rank, (step, _, note, count, _, state) in enumerate(told):
        assert (step, note) == (4, {"rank": 0})
        assert count == (10 + rank if saved == loaded else 10), "on another number of ranks, that of rank 0"
        assert state == before
        assert all(not name.startswith("module.") for name in state["model"])
    numbers = values(spread, f"saved {saved}: numbers", saved)
    next_numbers = [each[4] for each in told]
    both = min(saved, loaded)
    assert next_numbers[:both] == numbers[:both], "generators go on where they were, on ranks that were there"
    fresh = [tuple(each) for each in next_numbers[both:]]
    assert len({number for each in fresh for number in each}) == 3 * len(fresh), "ranks that are new have their own"
    assert not {number for each in fresh for number in each} & {number for each in numbers for number in each}


def test_a_rank_reads_its_part_and_no_more(spread: list[Ended]) -> None:
    for count, own, everything in values(spread, "bytes", 4):
        assert own * 4 == everything
        assert own <= count < 1.3 * own


def test_a_path_may_be_saved_to_by_some_ranks_and_then_by_others(spread: list[Ended]) -> None:
    assert value(spread, "groups", 4) == [
        ["2 of 0", "2 of 1"],
        ["2 of 2", "2 of 3"],
        ["1 of 3"],
        ["4 of 0", "4 of 1", "4 of 2", "4 of 3"],
        ["2 of 1", "2 of 2"],
    ]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    ended = run_ranks("checkpoint_rank_calls.faults", 2, tmp_path_factory.mktemp("faults"), within_s=280)
    assert [each.status for each in ended] == [0] * 2, [each.stderr[-3000:] for each in ended]
    return ended


def test_torch_tells_all_ranks_of_a_failure_on_one(faults: list[Ended]) -> None:
    assert list(value(faults, "dcp full disk")) == ["1"]
    assert "No space left" in value(faults, "dcp full disk")["1"][1]
    assert value(faults, "dcp no marker") == []
    assert value(faults, "dcp unreadable")["1"][0] == "VolumeError"
    assert value(faults, "dcp untouched") == 0
    assert {reason[0] for reason in value(faults, "dcp missing").values()} == {"CheckpointError"}
    assert all("does not hold more" in reason[1] for reason in value(faults, "dcp missing").values())
    assert value(faults, "dcp still untouched") == 0
    assert value(faults, "dcp loaded") is True


@pytest.mark.parametrize(
    ("name", "on_0", "on_1"),
    [
        ("shapes", "[2] of torch.float32", "[3] of torch.float32"),
        ("types", "[2] of torch.float32", "[2] of torch.int32"),
    ],
)
def test_what_differs_between_ranks_is_not_mixed(faults: list[Ended], name: str, on_0: str, on_1: str) -> None:
    for kind, text in value(faults, f"mixed {name}").values():
        assert kind == "CheckpointError"
        assert text.startswith(f"{name!r} is {on_0} on rank 0 and {on_1} on rank 1.")


@pytest.mark.parametrize("name", ["kinds", "parts"])
def test_what_differs_so_that_torch_refuses_it_is_not_saved(faults: list[Ended], name: str) -> None:
    assert {kind for kind, _ in value(faults, f"mixed {name}").values()} <= {"AssertionError", "ValueError"}


def test_models_of_different_shapes_are_refused(faults: list[Ended]) -> None:
    text = error(faults, "mixed models")
    assert "step 1 could not be saved" in text
    assert "'model.weight' is [2, 2] of torch.float32 on rank 0 and [3, 2] of torch.float32 on rank 1" in text
    assert value(faults, "mixed steps") == []


def test_ranks_that_save_to_other_paths_are_told(faults: list[Ended]) -> None:
    ((number, (kind, text)),) = value(faults, "other paths").items()
    assert (number, kind) == ("1", "RankError")
    assert "which no rank began" in text


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_save_that_fails_on_one_rank_fails_on_all(faults: list[Ended], kind: str) -> None:
    before = [] if kind == "async" else [3]
    assert "'part' does not give its state on rank 1: ValueError: theirs" in error(faults, f"{kind} state_dict")
    for rank, name in ((1, "full disk"), (0, "full disk on 0"), (0, "full disk at the marker")):
        text = error(faults, f"{kind} {name}")
        assert "step 2 could not be saved" in text
        assert f"rank {rank}: " in text
        assert "No space left" in text
    assert "'values.odd' holds a" in error(faults, f"{kind} odd").replace('"', "'")
    assert value(faults, f"{kind} steps") == before
    assert value(faults, f"{kind} attempts") == len(before), "what failed is deleted"
    value(faults, f"{kind} save")
    assert "rank 1 called save of step 5 to" in error(faults, f"{kind} other steps", "RankError")


def test_a_restore_that_fails_on_one_rank_fails_on_all_and_changes_nothing(faults: list[Ended]) -> None:
    text = error(faults, "unreadable on 1")
    assert "no step of" in text
    assert "rank 1: " in text
    assert "Input/output error" in text
    assert value(faults, "untouched") == [True, 0, 7, None]
    assert "rank_1.more was not saved" in error(faults, "unfit on 1")
    assert "on rank 1" in error(faults, "unfit on 1")
    assert value(faults, "still untouched") == [True, 0, 7, None]
    text = error(faults, "broken on 1")
    assert "'part' does not take its state on rank 1: ValueError: theirs" in text
    assert "may have changed" in text
    assert "rank 1 called restore_latest of" in error(faults, "other roots", "RankError")
    assert "rank 1 called save of step 9 to" in error(faults, "other roots to save", "RankError")


def test_all_ranks_fall_back_to_the_same_step(faults: list[Ended]) -> None:
    step, skipped, warned, count, note, is_equal = value(faults, "fall back")
    assert (step, count, note, is_equal) == (3, 1, 1, True)
    ((number, reason),) = skipped
    assert number == 5
    assert reason.startswith("rank 0, 1: "), "both read that file"
    assert "damaged" in reason
    assert len(warned) == 1
    assert "step 5 is damaged" in warned[0]


def test_ranks_that_see_different_saves_are_refused(faults: list[Ended]) -> None:
    ((_, (kind, text)),) = value(faults, "another attempt").items()
    assert kind == "CheckpointError"
    assert "rank 1" in text
    assert "a listing lags, or another save" in text
    assert value(faults, "apart untouched") == 0
    assert "Raised on rank 1" in error(faults, "no attempt")


def test_all_ranks_skip_the_same_saves_or_wait(faults: list[Ended]) -> None:
    assert value(faults, "first") is True
    assert value(faults, "skipped") == [False, False]
    assert value(faults, "later") >= 4
    assert value(faults, "busy steps") == 2
    assert value(faults, "waited") == [True] * 3
    assert value(faults, "waited steps") == [1000, 1001, 1002]
    assert "step 1 could not be saved" in error(faults, "left")
    assert value(faults, "after it") is True


def test_plans_may_be_cached(faults: list[Ended]) -> None:
    assert value(faults, "cached") == [True] * 6
    assert "1" in value(faults, "cached full disk")
    attempts = value(faults, "cached attempts")
    assert len(attempts) == len(set(attempts)) == 6, "each save is an attempt of its own"


def test_sigterm_on_one_rank_stops_all_at_the_same_step(faults: list[Ended]) -> None:
    assert value(faults, "stopped") == [[2, True], [3, True]], "not skipped, though the one before was being written"
    assert value(faults, "stopped steps") == [2, 3]
    assert value(faults, "given back") is True


def test_a_rank_that_is_lost_ends_the_save_of_the_others(tmp_path: Path) -> None:
    ended = run_ranks("checkpoint_rank_calls.lost", 2, tmp_path / "run", within_s=200)
    assert [each.status for each in ended] == [0, -signal.SIGKILL]
    told = ended[0].told
    assert told["lost"]["error"] == "CheckpointError", told
    assert "step 2 could not be saved" in told["lost"]["text"]
    assert "a rank was lost" in told["lost"]["text"]
    assert told["steps"]["value"] == [1]


def test_ranks_that_end_complete_the_save_that_is_running(tmp_path: Path) -> None:
    ended = run_ranks("checkpoint_rank_calls.leaving", 2, tmp_path / "run", within_s=200)
    assert [each.status for each in ended] == [0, 0], [each.stderr[-3000:] for each in ended]
    assert values(ended, "left") == [True, True]
    assert all(each.told["left"]["seconds"] < 30 for each in ended)
    assert all("a save failed" not in each.stderr for each in ended)
    (saved,) = list_saved(LocalStorage(tmp_path / "run"))
    assert (saved.step, saved.world_size) == (1, 2)
