from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bridge.spark.engines.process import free_port
from tests.exports import make_export
from tests.ranks import run_ranks

ROWS = 61
GROUP = 5
FORMS = ("plain", "files in order", "drop_last", "few", "X and y", "text")


def place(n: int) -> list[Any]:
    file, row = ("part-00000.parquet", n) if n < 23 else ("part-00001.parquet", n - 23)
    return [file, row // GROUP, row % GROUP]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_find_together_what_an_epoch_held(tmp_path: Path, world_size: int) -> None:
    table = pa.table({"n": range(ROWS), "x": [n + 0.5 for n in range(ROWS)], "text": [f"é{n}" for n in range(ROWS)]})
    made, _ = make_export(tmp_path, [table[:23], table[23:]], row_group_rows=GROUP)
    (tmp_path / "data").symlink_to(made)

    pq.write_table(table[:1], tmp_path / "one.parquet")
    ended = run_ranks("coverage", world_size, tmp_path, environment={"OTHER_PORT": str(free_port())})

    assert [one.status for one in ended] == [0] * world_size, [one.stderr for one in ended]
    told = [one.told for one in ended]
    last = world_size - 1

    def report(name: str) -> dict[str, Any]:
        found = [one[name].get("value") for one in told]
        assert found[0] is not None, told[0][name]
        assert found == [found[0]] * world_size, "equal on all ranks"
        found[0][2]["is_complete"] = found[0][0]
        facts: dict[str, Any] = found[0][2]
        return facts

    for form in FORMS:
        for name in (form, f"{form}, of a loop"):
            dropped = ROWS % (4 * world_size) if form == "drop_last" else 0
            found = report(name)
            assert found["is_complete"], (name, found)
            assert (found["num_rows"], found["num_seen"], found["num_dropped"]) == (ROWS, ROWS - dropped, dropped)
    assert report("loader")["is_complete"]
    assert report("one row")["is_complete"]
    assert report("one row, of no loop")["missing"] == [[str(tmp_path / "one.parquet"), 0, 0]]
    assert report("beside another backend")["is_complete"]
    assert [one["groups"]["value"] for one in told] == [2] * world_size, "one of gloo beside it, for all that is moved"
    assert told[last]["alone"]["value"][0]

    second = [one["batch"]["value"][0] for one in told]
    third = [one["batch"]["value"][1] for one in told]
    missing = report("missing")
    assert not missing["is_complete"]
    assert missing["missing"] == sorted(map(place, second[last]))
    assert (missing["num_missing"], missing["num_double"], missing["num_unknown"]) == (4, 0, 0)
    double = report("double")
    # the first rank got its second batch twice, the last its third, those between both
    twice = sorted(map(place, chain(*second[:-1], *third[1:])))
    assert double["double"] == twice
    assert (double["num_missing"], double["num_double"], double["num_unknown"]) == (0, len(twice), 0)
    changed = report("changed")
    assert changed["missing"] == [place(second[last][2])]
    assert (changed["num_missing"], changed["num_double"], changed["num_unknown"]) == (1, 0, 1)
    assert report("fewer")["num_missing"] > 0

    for one in told:
        assert one["other data"]["error"] == "ConfigError"
        assert "no process group of these ranks" in one["other data"]["text"]
        assert one["wrong"]["error"] == "TypeError", "on all ranks"
        assert "'n' of a batch is int, which has no rows to compare" in one["wrong"]["text"]
