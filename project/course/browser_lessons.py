"""Write the lessons that run in a browser: modules 0 and 1, with Pyodide, without installing anything."""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from course.markers import ROOT, Region, find_regions, read_text, sources
from course.starter_trees import start
from course.tasks import MODULES, Task, tasks_of

#: Modules that need only Python.
PLAIN = (0, 1)
#: What draws a graph, beside the tree of module 1.
DRAWING = ("kernels/common/picture.py", "minitorch/drawing/expression_graph.py")
#: Files of Pyodide that a page fetches.
PYODIDE = (
    "pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json",
)  # fmt: skip


def write_lessons(out: Path, packages: Path) -> None:
    """Write the folder of the lessons.

    Args:
        out: The folder; what is there is replaced.
        packages: A folder with ``node_modules/pyodide`` and ``wheels``.
    """
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(
        ROOT / "docs" / "browser", out, ignore=shutil.ignore_patterns("package*", "*.txt")
    )
    (out / "pyodide").mkdir()
    for name in PYODIDE:
        shutil.copyfile(packages / "node_modules" / "pyodide" / name, out / "pyodide" / name)
    wheels = sorted((packages / "wheels").glob("*.whl"))
    with zipfile.ZipFile(out / "packages.zip", "w", zipfile.ZIP_DEFLATED) as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as one:
                for name in one.namelist():
                    joined.writestr(name, one.read(name))
        joined.write(ROOT / "project" / "course" / "markers.py", "course/markers.py")
    lessons = []
    for number in PLAIN:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            start(number, tree, here=False)
            lessons.append(_lesson(number, tree))
            with zipfile.ZipFile(out / f"module-{number}.zip", "w", zipfile.ZIP_DEFLATED) as packed:
                for path in [*sorted(tree.rglob("*.py")), tree / "pyproject.toml"]:
                    packed.write(path, path.relative_to(tree))
                for file in DRAWING if number else ():
                    packed.write(ROOT / file, file)
    (out / "lessons.json").write_text(json.dumps(lessons), encoding="utf-8")


def _lesson(number: int, tree: Path) -> dict[str, Any]:
    """Return a module and its tasks, each with the functions that a student writes."""
    tasks = [_task(task, tree) for task in tasks_of(number)]
    return {"module": number, "title": MODULES[number].title, "tasks": tasks}


def _task(task: Task, tree: Path) -> dict[str, Any]:
    texts = {file: read_text(tree / file) for file in sources(tree)}
    bodies = [
        _body(region, text.split("\n"))
        for file, text in texts.items()
        for region in find_regions(text, file)
        if region.key.task == task.id
    ]
    return {
        "id": task.id, "title": task.title, "points": task.points, "hint": task.hint, "mark": task.mark,
        "bodies": bodies,
    }  # fmt: skip


def _body(region: Region, lines: list[str]) -> dict[str, Any]:
    """Return a body, and what stands before it from the first line of its function."""
    first = region.start - 1
    while first > 0 and not lines[first].lstrip().startswith("def "):
        first -= 1
    return {
        "key": region.key, "before": "\n".join(lines[first : region.start - 1]),
        "body": "\n".join(lines[region.start : region.stop]),
    }  # fmt: skip
