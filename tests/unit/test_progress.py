from __future__ import annotations

import sys
import time
import types

import pytest

from bridge.progress import progress_bar, task_bar


class Terminal:
    """A stderr that may be a terminal, and keeps what is written."""

    def __init__(self, is_a_terminal: bool) -> None:
        self.is_a_terminal = is_a_terminal
        self.text = ""

    def isatty(self) -> bool:
        return self.is_a_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("is_a_terminal", "enabled", "shown"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_it_is_shown_where_someone_can_see_it_or_as_told(
    monkeypatch: pytest.MonkeyPatch, is_a_terminal: bool, enabled: bool | None, shown: bool
) -> None:
    stderr = Terminal(is_a_terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)

    with progress_bar("collect t", total=10, unit=" rows", enabled=enabled) as bar:
        bar.update(3)
        assert bar.disable is not shown
        assert stderr.text == ""  # what is done at once shows no bar
        if shown:
            time.sleep(0.6)
        bar.update(3)

    assert ("collect t" in stderr.text) is shown


@pytest.mark.parametrize(
    ("shell", "shown"), [(None, False), (types.SimpleNamespace(), False), (types.SimpleNamespace(kernel="k"), True)]
)
def test_a_notebook_shows_it_and_a_script_that_imports_ipython_does_not(
    monkeypatch: pytest.MonkeyPatch, shell: object, shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal(False))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]

    with progress_bar("collect t", total=None, unit=" rows") as bar:
        assert bar.disable is not shown


def test_tasks_are_shown_beside_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal(True)
    monkeypatch.setattr(sys, "stderr", stderr)

    with task_bar("export t") as show:
        show(3, 40, 5 << 20)
    assert "export t" in stderr.text
    assert "3.00/40.0" in stderr.text
    assert "5.0 MiB read" in stderr.text
    told = stderr.text
    show(4, 40, 6 << 20)  # of a server that answers late
    assert stderr.text == told
