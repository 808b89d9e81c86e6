from __future__ import annotations

import pytest

from bridge.cli.screen import print_table
from bridge.display import plain_table

WIDE = plain_table(
    ["name", "text"], [["a", "one two three four five six"], ["b", f"in {'/long' * 10}"], ["c", "short"]]
)


def test_a_pipe_gets_one_line_for_each_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    print_table(WIDE)
    assert capsys.readouterr().out == WIDE + "\n"


def test_a_terminal_gets_the_last_column_folded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(WIDE)
    assert capsys.readouterr().out.splitlines() == [
        "name  text",
        "----  ------------------",
        "a     one two three four",
        "      five six",
        "b     in",
        "      /long/long/long/long/long/long/long/long/long/long",
        "c     short",
    ]


def test_a_terminal_too_narrow_to_fold_in_gets_it_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(WIDE)
    assert capsys.readouterr().out == WIDE + "\n"
