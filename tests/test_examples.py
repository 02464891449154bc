"""The examples run as they are stored, and are stored as they were written: without outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

nbformat = pytest.importorskip("nbformat", reason="needs nbformat, of the extra 'dev'")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient, of the extra 'dev'")
pytest.importorskip("ipykernel", reason="needs ipykernel, of the extra 'dev'")

NOTEBOOKS = sorted((REPOSITORY / "examples").glob("*.ipynb"))


def kinds(cell: Any) -> set[str]:
    """What a cell printed or showed, by type."""
    return {kind for output in cell.outputs for kind in output.get("data", {output.output_type: ""})}


def test_there_are_examples() -> None:
    assert [path.name for path in NOTEBOOKS] == ["first_run.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_the_first_run_answers_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(REPOSITORY / "examples" / "first_run.ipynb", as_version=4)
    where = {"metadata": {"path": str(REPOSITORY)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    run, *figures = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "chat: 600 of 600 requests completed" in run.outputs[0].text
    assert len(figures) == 2
    assert all("application/vnd.plotly.v1+json" in kinds(figure) for figure in figures)
