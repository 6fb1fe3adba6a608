"""Starter trees: the library with some of its bodies taken out, and what a student needs around it."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from course.markers import (
    PACKAGES,
    CourseError,
    Key,
    Region,
    marked_regions,
    read_bodies,
    read_text,
    replaced,
    sources,
    stub,
)
from course.pages import write_pages
from course.tasks import MODULES, SPEED, TASKS, Task, tasks_of, tasks_until

ROOT = Path(__file__).resolve().parents[2]
#: Says of which module a starter tree is.
STAMP = "course.json"
#: Of the tests; the grader needs them in every tree.
HELPERS = {"__init__", "conftest", "strategies", "support/tolerances"}


# -- starter trees -------------------------------------------------------------------------------


def start(module: int, out: Path, earlier: Path | None = None, root: Path = ROOT) -> None:
    """Write the starter tree of a module.

    Args:
        module: 0 to 5.
        out: A folder that does not exist, or is empty.
        earlier: A tree of the student's, from which the bodies of earlier modules are taken; the
            course's solutions when None.
        root: The course.

    Raises:
        CourseError: If the folder is in use, there is no such module, or a body is missing in
            ``earlier``.
    """
    if module not in range(len(MODULES)):
        raise CourseError(f"there is no module {module}; there are 0 to {len(MODULES) - 1}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CourseError(
            f"{out} is not empty; name a folder that is, or one that is not there yet"
        )
    if (root / STAMP).exists():
        raise CourseError(
            f"{root} is a starter tree itself, without the solutions; start from the course"
        )
    if earlier is not None and not earlier.is_dir():
        raise CourseError(f"{earlier} is no folder; name the tree of an earlier module")
    solved = _bodies_of_earlier(module, earlier, root) if earlier is not None else {}

    def body_of(region: Region) -> list[str] | None:
        if int(region.key.task.split(".")[0]) >= module:
            return stub(region)
        return solved.get(region.key)

    write_tree(module, out, body_of, root)
    write_pages(module, out, root)


def _bodies_of_earlier(module: int, earlier: Path, root: Path) -> dict[Key, list[str]]:
    needed = [r for r in marked_regions(root) if int(r.key.task.split(".")[0]) < module]
    have = read_bodies(earlier, [f for f in sources(earlier) if f in {r.key.file for r in needed}])
    missing = [r.key for r in needed if r.key not in have]
    if missing:
        lines = [f"  task {key.task}: {key.file}, {key.name}" for key in missing]
        raise CourseError(
            f"{earlier} has no markers around {len(missing)} bodies that are needed; put '# TASK "
            "n: …' and '# END TASK n' back, at the indentation of the body, in\n" + "\n".join(lines)
        )
    return {key: have[key] for key in (r.key for r in needed)}


def left_behind(earlier: Path, root: Path = ROOT) -> list[str]:
    """Return what of a student's tree is not in the next one, a line a file: only bodies are carried.

    Args:
        earlier: The tree.
        root: The course.
    """
    found, known = [], set(sources(root))
    for file in sources(earlier):
        if file not in known:
            found.append(f"{file}: a file of your own")
            continue
        around = [replaced(read_text(tree / file), file, lambda r: []) for tree in (earlier, root)]
        if around[0] != around[1]:
            found.append(f"{file}: changed outside of the marked bodies")
    return found


def write_tree(
    module: int, out: Path, body_of: Callable[[Region], list[str] | None], root: Path = ROOT
) -> None:
    """Write the tree of a module with bodies of the caller's choice.

    Args:
        module: Its tests and those of earlier modules go in.
        out: The folder.
        body_of: Region → lines, or None for the course's own.
        root: The course.
    """
    for file in (*_package_files(root), *_test_files(module, root), *_scripts(module, root)):
        target = out / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.endswith(".py"):
            target.write_text(replaced(read_text(root / file), file, body_of), encoding="utf-8")
        else:
            shutil.copyfile(root / file, target)
    for file in ("setup.py", "requirements.txt", ".gitignore"):
        shutil.copyfile(root / file, out / file)
    marks = [task.mark for task in tasks_until(module)]
    settings = read_text(root / "pyproject.toml")
    # A starter tree, in which a student calls the grader, has a selection of marks there already.
    addopts = 'addopts = "-q --strict-markers'
    chosen = addopts + f" -m '{' or '.join(marks)}'\""
    settings, count = re.subn(f"^{addopts}.*$", lambda match: chosen, settings, flags=re.MULTILINE)
    if count != 1:
        raise CourseError(f"pyproject.toml has {count} lines {addopts}…, not one; mend write_tree")
    (out / "pyproject.toml").write_text(settings, encoding="utf-8")
    (out / "Makefile").write_text(_makefile(module), encoding="utf-8")
    (out / STAMP).write_text(json.dumps({"module": module}) + "\n", encoding="utf-8")


def _package_files(root: Path) -> list[str]:
    return [
        path.relative_to(root).as_posix()
        for package in PACKAGES
        for path in sorted((root / package).rglob("*"))
        if path.is_file() and path.suffix in (".py", ".typed")
    ]


def _test_files(module: int, root: Path) -> list[str]:
    """Return the test files of the tasks up to a module, and the helpers that they import."""
    tasks = tasks_until(module)
    chosen = {file for task in tasks for file in task.tests}
    chosen |= {SPEED for task in tasks if task.speed}
    return _closure(root, root, chosen | {f"tests/{name}.py" for name in HELPERS})


def _scripts(module: int, root: Path) -> list[str]:
    """Return the scripts of the modules up to this one, what they import, and the grader."""
    project = root / "project"
    wanted = {f"project/{name}.py" for m in MODULES[: module + 1] for name in m.scripts}
    wanted |= {path.relative_to(root).as_posix() for path in (project / "course").glob("*.py")}
    return _closure(root, project, wanted | {"project/course.py"})


def _closure(root: Path, base: Path, files: set[str]) -> list[str]:
    """Return files, those that they import from a folder, and the files of the packages they lie in.

    Args:
        root: Of the tree.
        base: Where absolute names are looked up; relative ones are looked up beside the file.
        files: Paths inside the tree.
    """
    todo, done = set(files), set[str]()
    own = root / "tests", root / "project"
    while todo:
        file = todo.pop()
        path = root / file
        if file in done or not path.is_file():
            continue
        done.add(file)
        found = [folder / "__init__.py" for folder in path.parents if folder.is_relative_to(base)]
        for node in ast.walk(ast.parse(read_text(path))):
            start, names = base, list[str]()
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = path.parents[node.level - 1] if node.level else base
                within = [node.module] if node.module else []
                names = [*within, *(".".join((*within, alias.name)) for alias in node.names)]
            found += [start.joinpath(*name.split(".")).with_suffix(".py") for name in names]
        todo |= {
            place.relative_to(root).as_posix()
            for place in found
            if any(place.is_relative_to(folder) for folder in own)
        }
    return sorted(done)


def _expressions(tasks: list[Task]) -> tuple[str, str]:
    """Return pytest's ``-m`` of the tasks without and with the simulator."""
    plain = " or ".join(task.mark for task in tasks if not task.simulator)
    simulated = " or ".join(task.mark for task in tasks if task.simulator)
    return plain, simulated


def _makefile(module: int) -> str:
    plain, simulated = _expressions(tasks_of(module))
    runs = [
        f'$(PYTHON) -m pytest -m "{plain}" $(ARGS)' if plain else "",
        f'NUMBA_ENABLE_CUDASIM=1 $(PYTHON) -m pytest -m "simulator and not cuda and ({simulated})" '
        "$(ARGS)"
        if simulated
        else "",
    ]
    lines = [
        "# make test    the tests of this module, compiled without optimisation, which takes half the time",
        "#              (pytest alone compiles as for use, and looks for the smallest example too)",
        "# make grade   task by task, with points",
        "ARGS ?= -n 2",
        "PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)",
        "",
        ".PHONY: test grade venv",
        "export MINITORCH_SHRINK = 0",
        "",
        "# Numba's cache does not tell what is optimised from what is not.",
        "test: export NUMBA_OPT = 0",
        "test: export NUMBA_CACHE_DIR = $(CURDIR)/build/numba",
        "test:  # what fails first does not keep the rest from running",
        "\t@failed=0; \\",
        *(f"\t{run} || failed=1; \\" for run in runs if run),
        "\texit $$failed",
        "",
        "grade:",
        "\t$(PYTHON) project/course.py grade .",
        "",
        "venv:",
        "\tpython3 -m venv .venv",
        "\t.venv/bin/python -m pip install --quiet --editable '.[plot,test]'",
    ]
    return "\n".join(lines) + "\n"


def module_of(tree: Path) -> int:
    """Return the module of a starter tree; the last one for a tree that is the whole course.

    Raises:
        CourseError: If the stamp cannot be read.
    """
    stamp = tree / STAMP
    if not stamp.exists():
        return TASKS[-1].module
    try:
        module = json.loads(stamp.read_text(encoding="utf-8"))["module"]
        MODULES[module]
        return module
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        raise CourseError(
            f'{stamp} is damaged; it says {{"module": 3}} for the tree of module 3'
        ) from None
