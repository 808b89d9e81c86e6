from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from tests.exports import make_export
from tests.ranks import run_ranks


def test_ranks_step_together_and_agree_on_what_they_do(tmp_path: Path) -> None:
    table = pa.table({"n": range(31), "x": range(31)})
    folder, _ = make_export(tmp_path, [table[:2], table[2:25], table[25:]], row_group_rows=5)
    folder.rename(tmp_path / "moved")
    other, _ = make_export(tmp_path / "others", [table])
    for name, target in (("data", tmp_path / "moved"), ("other", other)):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).symlink_to(target)
    (tmp_path / "in" / "files").mkdir()
    for number in range(7):
        (tmp_path / "in" / "files" / f"{number}.bin").write_bytes(b"")

    ended = run_ranks("loading", 3, tmp_path / "in", environment={"BRIDGE_CACHE_DIR": str(tmp_path / "cache")})

    assert [one.status for one in ended] == [0, 0, 0], [one.stderr for one in ended]
    told = [one.told for one in ended]
    for name, everything in (("rows", list(range(31))), ("few", list(range(31)))):
        assert sorted(row for one in told for row in one[name]["value"][0]) == everything
    for name in ("files", "workers"):
        assert sorted(row for one in told for row in one[name]["value"][0]) == [f"{number}.bin" for number in range(7)]
    for name in ("rows", "few", "files", "workers"):
        assert len({str(one[name]["value"][1]) for one in told}) == 1, "the same steps on every rank"
    for name in ("seed", "batch_size", "columns", "digest"):
        errors = {(one[name]["error"], one[name]["text"]) for one in told}
        assert len(errors) == 1, errors
        error, text = errors.pop()
        assert error == "RankError"
        assert f"but differ in {name}" in text.replace("canonical_world_size, ", "")
        assert ("rank 2" if name == "digest" else "rank 1") in text
    for one in told:
        assert "a worker cannot ask the other ranks which files there are" in one["unlisted"]["text"]
        assert one["gone"]["error"] == "FileNotFoundError"
