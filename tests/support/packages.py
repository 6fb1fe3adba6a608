"""The packages of the project, as the table in docs/architecture.md declares them, and who imports whom."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FLOORS = ("kernels", "minitorch", "project")


class Package(NamedTuple):
    """One row of the table.

    Attributes:
        folder: Relative to the root; what lies in folders without a row of their own belongs to it too.
        modules: Patterns of the names of files at the root of the floor that belong to the package.
        height: 0 for the lowest package.
    """

    folder: str
    modules: tuple[str, ...]
    height: int


def declared() -> list[Package]:
    """Return the packages, the highest first."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split("| package |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `([\w/]+)` \|([^|]*)\|", table, re.MULTILINE)
    return [
        Package(folder, tuple(re.findall(r"`([\w*]+)`", modules)), len(rows) - 1 - i)
        for i, (folder, modules) in enumerate(rows)
    ]


def package_of(path: str, packages: list[Package]) -> Package | None:
    """Return the package of a file, ``kernels/cuda/launch.py``, or None if it has none."""
    folder, _, name = path.rpartition("/")
    if "/" not in folder:
        found = (p for p in packages if p.folder.split("/")[0] == folder)
        return next((p for p in found if any(fnmatch(name[:-3], m) for m in p.modules)), None)
    if name == "__init__.py" and not (ROOT / path).read_text(encoding="utf-8").strip():
        return None  # it only lets Python import its folder
    return next((one for one in packages if one.folder == folder), None)


def sources() -> list[str]:
    """Return the files of all floors, relative to the root."""
    return [
        path.relative_to(ROOT).as_posix()
        for floor in FLOORS
        for path in sorted((ROOT / floor).rglob("*.py"))
    ]


def module_name(path: str) -> str:
    """Return the dotted name of a file."""
    return path[:-3].replace("/", ".").removesuffix(".__init__")


def imported_names(path: str) -> Iterator[str]:
    """Yield the absolute names that a file imports anywhere: also for types, also within functions.

    ``from a import b`` yields ``a.b``, which may be a module or a name in the module ``a``.
    """
    parent = module_name(path) if path.endswith("__init__.py") else path.rpartition("/")[0]
    parts = parent.replace("/", ".").split(".")
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def imports() -> dict[str, set[str]]:
    """Return for each file the files that it imports, within a function or for types too."""
    by_name = {module_name(path): path for path in sources()}

    def file_of(name: str, importer: str) -> str | None:
        # Scripts of project/ have their own folder and project/ on the path.
        places = [""]
        if importer.startswith("project/"):
            places = [module_name(importer).rpartition(".")[0] + ".", "project.", ""]
        for place in places:
            for part in (name, name.rpartition(".")[0]):
                if part and place + part in by_name:
                    return by_name[place + part]
        return None

    found = {path: {file_of(name, path) for name in imported_names(path)} for path in sources()}
    return {path: {each for each in files if each} - {path} for path, files in found.items()}
