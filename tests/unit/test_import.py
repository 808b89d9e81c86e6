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


@pytest.mark.parametrize("name", bridge.__all__)
def test_each_public_name_resolves_in_a_fresh_process(name: str) -> None:
    code = f"from bridge import {name} as found; print(getattr(found, '__name__', found))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == (bridge.__version__ if name == "__version__" else name)


def test_the_public_names_are_listed() -> None:
    assert set(bridge.__all__) <= set(dir(bridge))
    assert {name for name in vars(errors) if name.endswith("Error")} <= set(bridge.__all__)
    assert bridge.__all__ == sorted(bridge.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'bridge' has no attribute 'load_tables'"):
        bridge.load_tables  # noqa: B018
