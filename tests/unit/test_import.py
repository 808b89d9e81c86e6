from __future__ import annotations

import subprocess
import sys

import pytest

import bridge
from bridge import errors

HEAVY = {"datasets", "numpy", "pandas", "pyarrow", "pydantic", "pyspark", "rich", "torch", "typer", "yaml"}


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, bridge; bridge.BridgeError; dir(bridge); print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in shown.split()}
    assert "bridge" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("home", sorted({"bridge", "bridge.errors", *bridge._HOMES.values()}))
def test_public_names_resolve_in_a_fresh_process(home: str) -> None:
    """A name is found by the first import of its home; those of one home share a process."""
    names = [name for name in bridge.__all__ if _home(name) == home]
    assert names
    code = f"import bridge; print(*(getattr(found, '__name__', found) for found in {_tuple(names)}))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == [bridge.__version__ if name == "__version__" else name for name in names]


def _home(name: str) -> str:
    return bridge._HOMES.get(name, "bridge" if name == "__version__" else "bridge.errors")


def _tuple(names: list[str]) -> str:
    return "(" + "".join(f"bridge.{name}, " for name in names) + ")"


def test_the_public_names_are_listed() -> None:
    assert set(bridge.__all__) <= set(dir(bridge))
    assert {name for name in vars(errors) if name.endswith("Error")} <= set(bridge.__all__)
    assert bridge.__all__ == sorted(bridge.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'bridge' has no attribute 'load_tables'"):
        bridge.load_tables  # noqa: B018
