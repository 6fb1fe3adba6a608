"""Scripts in a notebook: %run works, shows progress and pictures, and leaves the notebook as it was."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from common.command_line import replace_unprintable

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

SMALL = "--steps 4 --width 16 --context 16 --layers 1"


def outputs(*cells: str) -> list[list[Any]]:
    """Return the outputs of each cell of a notebook that runs in the root of the repository."""
    for name in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(name)
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    format4 = nbformat.v4
    notebook = format4.new_notebook(cells=[format4.new_code_cell(cell) for cell in cells])
    where = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=where).execute()
    return [cell.outputs for cell in notebook.cells]


def text(found: list[Any], name: str) -> str:
    return "".join(each.text for each in found if each.get("name") == name)


def test_the_output_of_a_notebook_needs_no_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # has no reconfigure, as ipykernel's
    replace_unprintable()
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    replace_unprintable()
    print("ß", flush=True)
    assert ascii_only.buffer.getvalue().strip() == b"?"  # type: ignore[attr-defined]


def test_scripts_run_in_a_notebook_with_bars_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MPLBACKEND", raising=False)  # some test of this process may have set it
    gpt, tasks, manual, backend, shell = outputs(
        f"%run project/train_gpt.py {SMALL} --out {tmp_path}/gpt",
        f"%run project/train_tasks.py --task copy --steps 4 --width 16 --out {tmp_path}/tasks",
        f"%run project/run_manual.py --out {tmp_path}/manual",
        "import matplotlib; matplotlib.get_backend()",
        f"import sys\n!{{sys.executable}} project/train_gpt.py {SMALL} --out {tmp_path}/shell",
    )
    for found, written in ((gpt, "loss curve"), (tasks, "copy.png"), (manual, "simple.png")):
        assert written in text(found, "stdout")
        assert any("image/png" in each.get("data", {}) for each in found)
    assert "4/4" in text(gpt, "stderr") and "4/4" in text(tasks, "stderr")
    assert "inline" in backend[0].data["text/plain"]
    assert "all done" in text(shell, "stdout")
