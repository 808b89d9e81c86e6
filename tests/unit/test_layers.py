"""The arrows between rooms, and who may import the heavy libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "bridge"


def test_imports_point_one_way() -> None:
    # in a process of its own: it disables the loggers that are there
    command = [sys.executable, "-c", "import importlinter.cli; importlinter.cli.lint_imports_command()", "--no-cache"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("pyspark", ("spark/",)),
        ("databricks", ("spark/",)),
        ("pysail", ("spark/",)),
        # the demo is what a person would write: a training loop
        ("torch", ("columns/tensors.py", "distributed.py", "loading/", "checkpoints/", "cli/demo.py")),
    ],
)
def test_a_library_is_imported_where_it_belongs(library: str, allowed: tuple[str, ...]) -> None:
    importers = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if library in set(_imports(path))}
    assert {path for path in importers if not path.startswith(allowed)} == set()


def test_imports_for_annotations_only_are_not_counted(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "import os.path\nif TYPE_CHECKING:\n    import torch\nelse:\n    import numpy\n\n"
        "def f():\n    from pyspark import sql\n"
    )
    assert set(_imports(module)) == {"os", "numpy", "pyspark"}


def _imports(path: Path) -> Iterator[str]:
    """Yield the top-level name of each import, without those that only type checkers see."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            pending += node.orelse
        else:
            pending += ast.iter_child_nodes(node)
