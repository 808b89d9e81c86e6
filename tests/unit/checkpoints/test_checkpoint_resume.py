from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from tests.exports import make_export
from tests.ranks import run_ranks

ROWS = 61


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = pa.table({"n": range(ROWS), "x": pa.array([number / ROWS for number in range(ROWS)], pa.float32())})
    folder, _ = make_export(tmp_path_factory.mktemp("data"), [rows[:25], rows[25:]], row_group_rows=10)
    return folder


def test_loaders_go_on_at_the_global_position_on_any_number_of_ranks(export: Path, tmp_path: Path) -> None:
    ended = run_ranks("checkpoint_rank_calls.positions", 3, tmp_path, export, within_s=200)
    assert [each.status for each in ended] == [0] * 3, [each.stderr[-3000:] for each in ended]
    for saved in (2, 1, 3):
        before = [row for each in ended[:saved] for row in each.told[f"before {saved}"]["value"]]
        assert len(before) == 3 * 4 * saved
        for loaded in (3, 2, 1):
            told = [each.told[f"{saved} on {loaded}"]["value"] for each in ended[:loaded]]
            rest = [row for one, _ in told for row in one]
            assert Counter(before + rest) == Counter(range(ROWS)), f"{saved} on {loaded}: each row once"
            following = [row for _, one in told for row in one]
            assert Counter(following) == Counter(range(ROWS)), "and so in the next epoch"
            assert following != rest


@pytest.mark.parametrize(("ranks", "kills"), [(1, 20), (2, 4)])
def test_a_run_that_is_killed_ends_as_one_that_is_not(export: Path, tmp_path: Path, ranks: int, kills: int) -> None:
    (ended,) = run_ranks("checkpoint_rank_calls.killed", 1, tmp_path, export, str(ranks), str(kills), within_s=280)
    assert ended.status == 0, ended.stderr[-5000:]
    count, found, steps = ended.told["killed"]["value"]
    assert count == kills
    assert all(found), "weights, optimizer, scheduler, rows in order, losses and generators, bit for bit"
    assert steps == [2 * -(-ROWS // (4 * ranks))] * ranks
