"""examples/notebooks: each runs from its first cell to its last, and its file has the outputs of that run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.effort import with_all
from tests.system.examples.command_line import TIMEOUT_S

pytestmark = with_all("a kernel of Jupyter takes seconds to start; .ci/run has them")

NOTEBOOKS = Path(__file__).parents[3] / "examples" / "notebooks"
NAMES = ["first_checkpoint", "numpy_only", "sharding_your_layer"]
_VARIABLE = re.compile(r"\x1b\[[\d;]*m|\b[0-9a-f]{16}\b")
"""Colours, which depend on the version of the kernel, and the ids of attempts."""


def output_of(cell: Any) -> str:
    """Return what a cell shows as text, without what differs from run to run."""
    texts = [
        output.text if output.output_type == "stream" else output.data["text/plain"]
        for output in cell.get("outputs", [])
    ]
    return _VARIABLE.sub("", "".join(texts))  # a kernel may send one line in several parts


@pytest.mark.filterwarnings("default")  # the kernel's client has deprecations of its own
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    shown = [output_of(cell) for cell in notebook.cells]
    # A cell that raises ends the run with an error that shows it.
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, resources=resources).execute()
    assert [output_of(cell) for cell in notebook.cells] == shown
    assert sum(map(bool, shown)) >= 4


def test_all_notebooks_are_tested() -> None:
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES
