from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import bridge
from bridge.distributed import resolve_rank
from bridge.errors import ConfigError
from bridge.spark.engines.process import free_port
from bridge.tables import ranks
from tests.ranks import Ended, digest, run_ranks, tables

TOGETHER = "\n  All ranks must make the same calls, in the same order and with the same arguments."


def all_told(ended: list[Ended], name: str) -> list[Any]:
    """Return what each rank told."""
    for rank, each in enumerate(ended):
        assert name in each.told, f"rank {rank}: {each.stderr}"
    return [each.told[name] for each in ended]


def values(ended: list[Ended], name: str) -> list[Any]:
    return [told["value"] for told in all_told(ended, name)]


def errors(ended: list[Ended], name: str) -> list[tuple[str, str]]:
    return [(told["error"], told["text"]) for told in all_told(ended, name)]


def test_one_process_alone_calls_without_torch() -> None:
    code = (
        "import sys\n"
        "from bridge import distributed as d\n"
        "print(d.rank(), d.world_size(), d.local_world_size(), d.from_rank_0(lambda: 7, what='f'),\n"
        "      d.on_every_rank(lambda: 8, what='f'), 'torch' in sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["0", "1", "1", "7", "8", "False"]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Three ranks after all they do in `in_turn`."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks("in_turn", 3, folder, environment={"OTHER_PORT": str(free_port())})


def test_each_rank_knows_its_numbers(three: list[Ended]) -> None:
    assert values(three, "numbers") == [[0, 3, 3], [1, 3, 3], [2, 3, 3]]


def test_a_value_of_rank_0_is_returned_on_every_rank(three: list[Ended]) -> None:
    assert values(three, "value") == [{"made on": 0}] * 3


def test_a_value_may_be_larger_than_the_store_takes(three: list[Ended]) -> None:
    assert values(three, "large") == [9 << 20] * 3


def test_an_error_of_rank_0_is_raised_on_every_rank(three: list[Ended]) -> None:
    assert errors(three, "error") == [("SourceNotFoundError", "no table t\n  near: u")] * 3
    assert [told["notes"] for told in all_told(three, "error")] == [[], *[["Raised on rank 0."]] * 2]


def test_an_error_that_cannot_be_read_back_is_told_in_words(three: list[Ended]) -> None:
    assert errors(three, "odd error") == [
        ("OddError", "7: odd"),
        *[("EngineError", "rank 0 raised OddError: 7: odd")] * 2,
    ]


def test_a_value_that_cannot_be_pickled_fails_on_every_rank(three: list[Ended]) -> None:
    # the class differs between versions of Python
    assert all("pickle" in text for _, text in errors(three, "odd value"))


def test_what_ends_rank_0_is_an_error_on_the_others(three: list[Ended]) -> None:
    assert errors(three, "exit") == [("SystemExit", "3"), *[("EngineError", "rank 0 raised SystemExit: 3")] * 2]


def test_a_rank_with_other_arguments_is_named(three: list[Ended]) -> None:
    text = f"rank 2 and rank 0 called f(), but differ in b.{TOGETHER}"
    assert errors(three, "other arguments") == [("RankError", text)] * 3


def test_a_rank_that_makes_another_call_is_named(three: list[Ended]) -> None:
    assert errors(three, "other call") == [("RankError", f"rank 1 called g(), rank 0 f().{TOGETHER}")] * 3


def test_the_first_rank_that_fails_in_its_own_part_is_heard_by_all(three: list[Ended]) -> None:
    assert errors(three, "own part") == [("OSError", "no room on 1")] * 3
    assert all(told["notes"] == ["Raised on rank 1."] for told in all_told(three, "own part"))


def test_each_rank_gets_what_its_own_part_made(three: list[Ended]) -> None:
    assert values(three, "all parts") == [0, 10, 20]


def test_a_rank_that_never_calls_is_named_also_to_itself_when_it_comes(three: list[Ended]) -> None:
    assert errors(three, "rank 2 late") == [("RankError", f"rank 2 did not call f() within 1 s.{TOGETHER}")] * 3


def test_nobody_waits_for_a_rank_0_that_never_calls(three: list[Ended]) -> None:
    assert errors(three, "rank 0 late") == [("RankError", f"rank 0 did not call f() within 1 s.{TOGETHER}")] * 3


def test_ranks_are_in_step_after_errors(three: list[Ended]) -> None:
    assert values(three, "in step") == ["again"] * 3


def test_the_store_does_not_grow(three: list[Ended]) -> None:
    (before, after), *_ = values(three, "200 calls")
    assert before == after


@pytest.mark.parametrize("name", ["over gloo", "beside another backend"])
def test_rows_come_in_the_same_record_batches(three: list[Ended], name: str) -> None:
    expected = [[digest(table), [batch.num_rows for batch in table.to_batches()]] for table in tables()]
    assert values(three, name) == [expected] * 3


def test_another_backend_gets_one_group_for_all_rows(three: list[Ended]) -> None:
    assert values(three, "groups") == [2] * 3


def test_an_export_that_shows_late_is_waited_for(three: list[Ended]) -> None:
    paths = {value.pop(0) for value in values(three, "late")}
    assert len(paths) == 1
    assert values(three, "late") == [[307, 298, 299, 300, 301]] * 3


def test_an_export_that_a_rank_does_not_see_fails_on_every_rank(three: list[Ended]) -> None:
    found = errors(three, "elsewhere")
    assert found == [found[0]] * 3
    kind, text = found[0]
    assert kind == "VolumeError"
    assert re.fullmatch(
        r"rank 1 does not see what rank 0 exported: /proc/self/cwd/\S+ shows no marker within 0\.5 s\.\n"
        r"  Every rank needs the same volume at the same path\.",
        text,
    )


def test_a_rank_0_that_works_for_long_is_waited_for(three: list[Ended]) -> None:
    assert values(three, "long") == [None] * 3


def test_a_killed_rank_0_is_missed_by_its_heartbeat(three: list[Ended]) -> None:
    assert three[0].status == -9
    text = "rank 0 was lost during f(): it gave no sign of life for 1.5 s.\n  The log of that rank says why."
    assert errors(three[1:], "lost") == [("RankError", text)] * 2
    assert all(told["seconds"] < 10 for told in all_told(three[1:], "lost"))


def test_a_killed_rank_0_is_missed_with_its_store(three: list[Ended]) -> None:
    assert [each.status for each in three[1:]] == [-9, 0]
    text = "rank 0 was lost during f(), with the process group's store.\n  The log of that rank says why."
    assert errors(three[2:], "lost with the store") == [("RankError", text)]
    assert all(told["seconds"] < 10 for told in all_told(three[2:], "lost with the store"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": bridge.fill(0), str: [bridge.dictionary()]}, {str: (bridge.dictionary(),), "a": bridge.fill(0)}),
        (Path("/a/b"), "/a/b"),
        (pa.table({}), pa.table({"n": [1]})),
        ((name for name in "ab"), (name for name in "ab")),
    ],
)
def test_arguments_of_two_processes_are_alike(one: Any, other: Any) -> None:
    assert ranks._text(one) == ranks._text(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a", "b"], ["b", "a"]),
        (None, "None"),
        (1, True),
        ({"a": bridge.fill(0)}, {"a": bridge.fill(1)}),
        ({str: bridge.mask()}, {bytes: bridge.mask()}),
        (datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 2, tzinfo=UTC)),
    ],
)
def test_arguments_of_two_processes_differ(one: Any, other: Any) -> None:
    assert ranks._text(one) != ranks._text(other)


def set_environment(monkeypatch: pytest.MonkeyPatch, rank: str | None, world_size: str | None) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("rank", "world_size", "expected"),
    [(None, None, (0, 1)), ("", "", (0, 1)), (None, "1", (0, 1)), ("0", "1", (0, 1)), ("2", "3", (2, 3))],
)
def test_without_a_group_the_environment_tells_the_rank(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, world_size: str | None, expected: tuple[int, int]
) -> None:
    set_environment(monkeypatch, rank, world_size)
    assert resolve_rank() == expected
    assert resolve_rank(1, 2) == (1, 2), "what is given counts more"


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (None, "2", r"WORLD_SIZE is given without RANK\.\n  Give both, or neither: torchrun sets them\."),
        ("0", None, "RANK is given without WORLD_SIZE"),
        ("2", "2", "RANK is 2 and WORLD_SIZE 2; ranks count from 0 to world_size - 1"),
        ("-1", "2", "RANK is -1 and WORLD_SIZE 2"),
        ("0", "0", "RANK is 0 and WORLD_SIZE 0"),
        ("one", "2", "RANK is 'one' and WORLD_SIZE '2'; they must be whole numbers"),
    ],
)
def test_an_environment_that_tells_no_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, world_size: str | None, message: str
) -> None:
    set_environment(monkeypatch, rank, world_size)
    with pytest.raises(ConfigError, match=message):
        resolve_rank()


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (-1, 2, "rank= is -1 and world_size= 2"),
        (2, 2, "rank= is 2 and world_size= 2"),
        (0, None, "rank= is given without world_size="),
        (None, 2, "world_size= is given without rank="),
    ],
)
def test_arguments_that_are_no_rank_are_refused(rank: int | None, world_size: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_rank(rank, world_size)


def test_a_group_counts_more_than_the_environment() -> None:
    ended = run_ranks("resolving", 2)
    assert values(ended, "group") == [[0, 2], [1, 2]]
    assert values(ended, "given") == [[4, 5]] * 2
    assert values(ended, "environment") == [[7, 8]] * 2
