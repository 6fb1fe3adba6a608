"""Starter trees: the library with some of its bodies taken out, and what a student needs around it."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from course.markers import (
    ROOT,
    CourseError,
    Key,
    Region,
    find_regions,
    read_bodies,
    read_text,
    replaced,
    sources,
    stub,
)
from course.pages import write_pages
from course.tasks import MODULES, TASKS, expression, tasks_of, tasks_until
from course.tree_files import tree_texts

#: Says of which module a starter tree is.
STAMP = "course.json"
#: What every tree has beside its Python files: file → the course's.
COPIED = {
    "project/course.py": "project/course/tree_course.py",
    **{file: file for file in (".gitignore", ".streamlit/config.toml")},
}
#: A library, in an import or by its name.
IMPORTED = re.compile(r"""(?:^ *(?:import|from) |["'])(\w+)""", re.MULTILINE)

# -- starter trees -------------------------------------------------------------------------------
#: A constant of setup.py: its name, and its value as a literal.
CONSTANT = re.compile(r'^([A-Z]+) = (".+"|\[.+\])$', re.M)


def start(module: int, out: Path, earlier: Path | None = None, here: bool = True) -> None:
    """Write the starter tree of a module.

    Args:
        module: 0 to 5.
        out: A folder that does not exist, or is empty.
        earlier: A tree of the student's, from which the bodies of earlier modules are taken; the
            course's solutions when None.
        here: The tree is graded by this course, on this machine.

    Raises:
        CourseError: If the folder is in use, there is no such module, or a body is missing in
            ``earlier``.
    """
    if module not in range(len(MODULES)):
        raise CourseError(f"there is no module {module}; there are 0 to {len(MODULES) - 1}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CourseError(f"{out} is not empty; choose an empty or a new folder")
    if earlier is not None and not earlier.is_dir():
        raise CourseError(f"{earlier} is no folder; name the tree of an earlier module")
    solved = _bodies_of_earlier(module, earlier) if earlier is not None else {}

    def body_of(region: Region) -> list[str] | None:
        if int(region.key.task.split(".")[0]) >= module:
            return stub(region)
        return solved.get(region.key)

    write_tree(module, out, body_of, module)
    write_pages(module, out)
    tasks = {t.id: [t.title, expression(t, False), t.emulated] for t in tasks_of(module)}
    stamp = {"module": module, "course": str(ROOT) if here else None, "tasks": tasks}
    (out / STAMP).write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")


def _bodies_of_earlier(module: int, earlier: Path) -> dict[Key, list[str]]:
    texts = tree_texts(module, module)
    marked = [region for file, text in texts.items() for region in find_regions(text, file)]
    needed = [r for r in marked if int(r.key.task.split(".")[0]) < module]
    have = read_bodies(earlier, [f for f in sources(earlier) if f in {r.key.file for r in needed}])
    missing = [r.key for r in needed if r.key not in have]
    if missing:
        lines = [f"  task {key.task}: {key.file}, {key.name}" for key in missing]
        raise CourseError(
            f"{earlier} has no markers around {len(missing)} bodies that are needed; put '# TASK "
            "n: …' and '# END TASK n' back, at the indentation of the body, in\n" + "\n".join(lines)
        )
    return {key: have[key] for key in (r.key for r in needed)}


def left_behind(earlier: Path) -> list[str]:
    """Return what of a student's tree is not in the next one, a line a file: only bodies are carried.

    Args:
        earlier: The tree.
    """
    found, known = [], tree_texts(module := module_of(earlier), module)
    for file in sources(earlier):
        if file not in known:
            found.append(f"{file}: a file of your own")
            continue
        texts = read_text(earlier / file), known[file]
        around = [replaced(text, file, lambda r: []) for text in texts]
        if around[0] != around[1]:
            found.append(f"{file}: changed outside of the marked bodies")
    return found


def write_tree(
    module: int,
    out: Path,
    body_of: Callable[[Region], list[str] | None],
    first: int = 0,
) -> None:
    """Write the tree of a module with bodies of the caller's choice.

    Args:
        module: 0 to 5.
        out: The folder.
        body_of: Region → lines, or None for the course's own.
        first: The first module whose tests go in.
    """
    texts = tree_texts(module, first)
    for file, text in texts.items():
        target = out / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(replaced(text, file, body_of), encoding="utf-8")
    for file, source in COPIED.items():
        (out / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / source, out / file)
    named = {word for text in texts.values() for word in IMPORTED.findall(text)}
    if "numba" in named:
        named.add("scipy")  # numba takes BLAS from there
    needed = read_text(ROOT / "requirements.txt").splitlines(keepends=True)
    needed = [line for line in needed if line[0] != "#" and re.split(r"\W", line)[0] in named]
    (out / "requirements.txt").write_text("".join(needed), encoding="utf-8")
    (out / "setup.py").write_text(_setup(module), encoding="utf-8")
    marks = " or ".join(task.mark for task in tasks_until(module) if task.module >= first)
    plain = 'addopts = "-q --strict-markers'
    parts = read_text(ROOT / "pyproject.toml").split(f'{plain}"')
    if len(parts) != 2:
        raise CourseError(f"pyproject.toml has {len(parts) - 1} lines {plain}, not one")
    (out / "pyproject.toml").write_text(f"{plain} -m '{marks}'\"".join(parts), encoding="utf-8")
    (out / "Makefile").write_text(_makefile(module), encoding="utf-8")


def _setup(module: int) -> str:
    """Return the ``setup.py`` of a tree: the course's extras that a student needs, and no more."""
    source = read_text(ROOT / "setup.py")
    python = re.findall(r'python_requires="(.+)"', source)[0]
    names = {name: ast.literal_eval(value) for name, value in CONSTANT.findall(source)}
    extras = {
        name: [names.get(one, one.strip('"')) for one in re.findall(r'"[^"]+"|[A-Z]+', listed)]
        for name, listed in re.findall(r'^    "(plot|digits|app|cuda)": \[(.+)\],$', source, re.M)
    }
    extras["course"] = names["COURSE"]
    lines = [
        '"""What this tree needs: the packages of requirements.txt, and extras by name."""',
        "",
        "from pathlib import Path",
        "",
        "from setuptools import find_packages, setup",
        "",
        "setup(",
        f'    name="minitorch-module-{module}",',
        '    packages=find_packages(include=["minitorch*", "kernels*"]),',
        f'    python_requires="{python}",',
        '    install_requires=Path(__file__).with_name("requirements.txt").read_text().splitlines(),',
        f"    extras_require={extras!r},",
        ")",
    ]
    return "\n".join(lines) + "\n"


def _makefile(module: int) -> str:
    lines = [
        "# make test    the tests of this module, compiled without optimisation, which takes half the time",
        "#              (pytest alone compiles as for use, and looks for the smallest example too)",
        "# make grade   task by task",
        "# make app     this module's ideas in a browser, computed by your code",
        "ARGS ?= -n 2",
        "PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)",
        "",
        ".PHONY: test grade app venv",
        "",
        "test:",
        "\t$(PYTHON) project/course.py test . $(ARGS)",
        "",
        "grade:",
        "\t$(PYTHON) project/course.py grade .",
        "",
        "app:",
        "\ttest -x .venv/bin/python || $(MAKE) venv",
        "\t.venv/bin/python -m pip install --quiet --editable '.[app]'",
        f"\t.venv/bin/python -m streamlit run project/app.py -- {module}",
        "",
        "venv:",
        "\tpython3 -m venv .venv",
        "\t.venv/bin/python -m pip install --quiet --editable '.[plot,course]'",
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
