from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command_line
from benchmarks import harness
from benchmarks.harness import (
    Bar,
    ChildError,
    Comparison,
    MismatchError,
    Report,
    Spread,
    compare,
    in_child,
    own_folders,
    process,
    rotated,
)


def test_each_round_starts_with_the_next_contender() -> None:
    orders = [rotated(["A", "B", "C"], number) for number in range(4)]
    assert ["".join(order) for order in orders] == ["ABC", "BCA", "CAB", "ABC"]


def test_contenders_run_in_rotated_order_after_the_warm_ups() -> None:
    ran: list[str] = []
    compare({name: lambda name=name: ran.append(name) for name in "ABC"}, reference="A", rounds=3, warm_ups=2)  # type: ignore[misc]
    assert "".join(ran) == "ABC" + "ABC" + "ABC" + "BCA" + "CAB"


def test_the_reference_runs_first_in_the_warm_up_and_once() -> None:
    ran: list[str] = []
    compare({name: lambda name=name: ran.append(name) for name in "ABC"}, reference="B", rounds=1)  # type: ignore[misc]
    assert "".join(ran) == "BAC" + "ABC"


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    comparison = Comparison("theirs", {"theirs": [1.0, 10.0, 4.0], "ours": [2.0, 5.0, 4.0]})
    assert comparison.ratio("ours") == Spread(1.0, 0.5, 2.0)
    assert comparison.ratio("theirs", to="ours") == Spread(1.0, 0.5, 2.0)
    assert comparison.ratio("theirs") == Spread(1.0, 1.0, 1.0)
    # the ratio of the medians would hide that ours won twice
    comparison = Comparison("theirs", {"theirs": [1.0, 8.0, 100.0], "ours": [0.5, 9.0, 50.0]})
    assert comparison.ratio("ours").median == 0.5


def test_a_difference_is_paired_too() -> None:
    comparison = Comparison("pass", {"pass": [1.0, 5.0, 2.0], "import": [1.5, 5.25, 4.0]})
    assert comparison.difference("import") == Spread(0.5, 0.25, 2.0)


def test_a_contender_with_another_result_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"slow does not do what fast does.*the results are not equal"):
        compare({"fast": lambda: [1, 2], "slow": lambda: [1, 3]}, reference="fast", rounds=1)


def test_the_check_of_the_caller_decides() -> None:
    def check(expected: list[int], found: list[int]) -> str | None:
        return None if sorted(expected) == sorted(found) else f"{found} is not {expected}"

    compare({"A": lambda: [1, 2], "B": lambda: [2, 1]}, reference="A", rounds=1, check=check)
    with pytest.raises(MismatchError, match=r"\[3\] is not \[1, 2\]"):
        compare({"B": lambda: [3], "A": lambda: [1, 2]}, reference="A", rounds=1, check=check)


@pytest.mark.parametrize(("rounds", "warm_ups"), [(0, 1), (1, 0)])
def test_nothing_is_measured_without_rounds_or_a_check(rounds: int, warm_ups: int) -> None:
    with pytest.raises(ValueError, match=f"rounds is {rounds} and warm_ups is {warm_ups}; give 1 or more"):
        compare({"A": int}, reference="A", rounds=rounds, warm_ups=warm_ups)


def test_an_unknown_reference_is_named() -> None:
    with pytest.raises(ValueError, match="reference is 'C'; the contenders are A, B"):
        compare({"A": int, "B": int}, reference="C")


def test_a_process_is_a_contender() -> None:
    hello = process([sys.executable, "-c", "print('hello')"])
    comparison = compare({"A": hello, "B": hello}, reference="A", rounds=2)
    assert hello() == "hello\n"
    assert all(seconds > 0 for seconds in comparison.seconds["B"])
    with pytest.raises(MismatchError):
        compare({"A": hello, "B": process([sys.executable, "-c", "print('bye')"])}, reference="A")


def test_a_process_that_fails_is_no_measurement() -> None:
    with pytest.raises(ChildError, match=r"(?s)ended with status 1.*no such luck"):
        process([sys.executable, "-c", "raise SystemExit('no such luck')"])()


def test_a_process_that_hangs_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_CHILD_TIMEOUT_S", 0.2)
    with pytest.raises(ChildError, match=r"had not ended after 0\.2 s"):
        process([sys.executable, "-c", "import time; time.sleep(60)"])()


def hold(*, num_bytes: int) -> int:
    return len(bytearray(b"x") * num_bytes)


def test_a_child_tells_its_result_and_its_own_peak() -> None:
    # a child must not be charged with what its parent held
    ballast = bytearray(b"x") * (300 << 20)
    small = in_child(f"{__name__}:hold", num_bytes=1)
    large = in_child(f"{__name__}:hold", num_bytes=200 << 20)
    del ballast
    assert (small.result, large.result) == (1, 200 << 20)
    assert small.peak_bytes < 200 << 20
    assert large.peak_bytes - small.peak_bytes == pytest.approx(200 << 20, rel=0.1)


def test_a_bar_says_by_how_much_it_is_missed() -> None:
    assert Bar("start", 2.9, 3.0, "s").verdict == "met"
    assert Bar("start", 3.0, 3.0, "s").verdict == "met"
    assert Bar("start", 3.6, 3.0, "s").verdict == "missed by 20.0%"
    assert Bar("start", 3.01, 3.0, "s").verdict == "missed by 0.3%"


def test_a_report_shows_ratios_and_keeps_every_measurement() -> None:
    report = Report("collect", "sail")
    comparison = Comparison("theirs", {"theirs": [2.0, 4.0], "ours": [1.0, 2.0]})
    report.add_comparison("a table", comparison)
    report.bars.append(Bar("ours over theirs", comparison.ratio("ours").median, 1.0, "x"))
    shown = str(report)
    assert "collect, engine sail" in shown
    assert any(line.split()[:2] == ["ours", "1.5"] and line.endswith("theirs") for line in shown.splitlines())
    assert "ours over theirs  0.50 x  1.00 x   met" in shown
    kept = json.loads(json.dumps(report.to_json()))
    assert kept["measurements"]["a table"]["seconds"] == {"theirs": [2.0, 4.0], "ours": [1.0, 2.0]}
    assert kept["bars"][0]["verdict"] == "met"


def test_circumstances_name_versions_and_processors() -> None:
    told = harness.circumstances()
    assert {"python", "bridge", "pyarrow"} <= set(told["versions"])
    assert told["cpus"] == os.cpu_count()


def test_own_folders_hide_the_settings_of_the_caller_and_give_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_REMOTE", "sc://elsewhere:1")
    monkeypatch.setenv("BRIDGE_SPARK_JARS", "jars")
    before = dict(os.environ)
    with own_folders() as folder:
        assert "BRIDGE_REMOTE" not in os.environ
        assert os.environ["BRIDGE_SPARK_JARS"] == "jars"
        assert Path(os.environ["BRIDGE_WAREHOUSE"]).parent == folder
    assert dict(os.environ) == before
    assert not folder.exists()


def test_without_a_question_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    command_line.main([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == list(command_line.QUESTIONS)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["colect"], f"no question 'colect'; there are {', '.join(command_line.QUESTIONS)}"),
        (["collect", "--rounds", "0"], "--rounds is 0; give 1 or more"),
        (["collect", "--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
    ],
)
def test_a_wrong_command_is_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(arguments)
    assert told in capsys.readouterr().err


class _Question:
    @staticmethod
    def measure(*, engine: str, rounds: int, folder: Path) -> Report:
        report = Report("fake", engine)
        report.add_table(
            "a table", ("rounds", "warehouse"), [(rounds, os.environ["BRIDGE_WAREHOUSE"].startswith(str(folder)))]
        )
        report.bars.append(Bar("something", 2.0, 1.0, "s"))
        return report


def test_the_command_prints_a_report_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command_line.QUESTIONS, "fake", "a question")
    monkeypatch.setitem(sys.modules, "benchmarks.fake", _Question)  # type: ignore[arg-type]
    command_line.main(["fake", "--engine", "apache", "--rounds", "2", "--json", str(tmp_path / "out.json")])
    assert "missed by 100.0%" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["cpus"] == os.cpu_count()
    assert written["reports"][0]["engine"] == "apache"
    assert written["reports"][0]["measurements"]["a table"] == [{"rounds": 2, "warehouse": True}]
