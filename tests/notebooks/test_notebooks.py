"""Each notebook runs as it is committed, in a kernel of this interpreter, and is what its text form says."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted(Path(__file__).parents[2].joinpath("notebooks").glob("*.ipynb"))
TEXTS = sorted(Path(__file__).parents[2].joinpath("notebooks").glob("*.py"))

pytestmark = pytest.mark.notebook


def test_each_notebook_has_its_text_form() -> None:
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in TEXTS] != []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from ipykernel.kernelspec import write_kernel_spec
    from nbclient import NotebookClient

    monkeypatch.setenv("BRIDGE_WAREHOUSE", str(tmp_path / "warehouse"))
    # the kernel "python3" of a person's own folders may be of another interpreter
    write_kernel_spec(tmp_path / "jupyter" / "kernels" / "this-interpreter")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, kernel_name="this-interpreter", timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert any(cell.outputs for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_what_its_text_form_says_and_holds_no_outputs(path: Path) -> None:
    import jupytext
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    text = jupytext.read(path.with_suffix(".py"))
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in text.cells
    ]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
