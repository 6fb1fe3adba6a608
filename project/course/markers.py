"""Bodies between markers: where a task is written, and how a body is taken out and put back.

A body stands between two comments, ``# TASK 1.1: hint`` and ``# END TASK 1.1``. In a starter tree the
comments stay, and between them stands ``raise NotImplementedError("Task 1.1: hint")``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

#: The course.
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("minitorch", "kernels")

BEGIN = re.compile(r"^(\s*)# TASK (\d+\.\d+): (.+?)\s*$")
END = re.compile(r"^\s*# END TASK (\d+\.\d+)\s*$")
STUB = re.compile(r'\s*raise NotImplementedError\("(Task .+)"\)')
DEFINITION = re.compile(r"^(\s*)(?:async\s+)?(?:def|class)\s+(\w+)")


class CourseError(Exception):
    """What the user can mend; the text says how."""


class Key(NamedTuple):
    """What names a body in any tree.

    Attributes:
        file: Path inside the tree, with slashes.
        task: "1.1".
        name: Functions and classes around it, joined by dots.
        number: Which one of several of this task in this function.
    """

    file: str
    task: str
    name: str
    number: int = 0


class Region(NamedTuple):
    """A body between markers.

    Attributes:
        key: Its name.
        hint: Of the marker.
        indent: Spaces before the marker.
        start: Index of the first line of the body.
        stop: Index after the last.
    """

    key: Key
    hint: str
    indent: str
    start: int
    stop: int


def find_regions(text: str, file: str) -> list[Region]:
    """Return the bodies of one source, from the top.

    Args:
        text: The source; it need not be valid Python.
        file: Its path inside the tree.

    Raises:
        CourseError: If a marker has no partner.
    """
    lines = text.split("\n")
    regions: list[Region] = []
    seen: dict[Key, int] = {}
    opened: tuple[int, re.Match[str]] | None = None
    for i, line in enumerate(lines):
        begin, end = BEGIN.match(line), END.match(line)
        if begin and opened is None:
            opened = i, begin
        elif end and opened is not None and end[1] == opened[1][2]:
            first, (indent, task, hint) = opened[0], opened[1].groups()
            plain = Key(file, task, _enclosing(lines, first, indent))
            seen[plain] = seen.get(plain, -1) + 1
            key = plain._replace(number=seen[plain])
            regions.append(Region(key, hint, indent, first + 1, i))
            opened = None
        elif (begin or end) and opened is not None:
            raise _never_ended(file, *opened, before=f", before {line.strip()!r} in line {i + 1}")
        elif end:
            raise CourseError(
                f"{file}, line {i + 1}: {line.strip()!r} has no partner; each '# TASK n: …' is "
                "followed by its '# END TASK n', and both stay in the file"
            )
    if opened is not None:
        raise _never_ended(file, *opened)
    return regions


def _never_ended(file: str, at: int, begin: re.Match[str], before: str = "") -> CourseError:
    return CourseError(
        f"{file}, line {at + 1}: '# TASK {begin[2]}: …' is never ended; put '# END TASK {begin[2]}' "
        f"after the body{before}"
    )


def _enclosing(lines: list[str], at: int, indent: str) -> str:
    """Return the functions and classes around a line, by indentation."""
    names: list[str] = []
    width = len(indent)
    for line in reversed(lines[:at]):
        found = DEFINITION.match(line)
        if found and len(found[1]) < width:
            names.insert(0, found[2])
            width = len(found[1])
    return ".".join(names)


def replaced(text: str, file: str, body_of: Callable[[Region], list[str] | None]) -> str:
    """Return a source with bodies exchanged; None leaves one as it is."""
    lines = text.split("\n")
    for region in reversed(find_regions(text, file)):
        body = body_of(region)
        if body is not None:
            lines[region.start : region.stop] = body
    return "\n".join(lines)


def stub(region: Region) -> list[str]:
    """Return what stands in the place of a body that is still to be written."""
    message = f"Task {region.key.task}: {region.hint}".replace("\\", "\\\\").replace('"', "'")
    return [f'{region.indent}raise NotImplementedError("{message}")']


def unwritten(root: Path) -> dict[str, list[str]]:
    """Return the tasks of which a tree has stubs alone, each with what these say."""
    said, begun = dict[str, list[str]](), set[str]()
    for key, body in read_bodies(root).items():
        found = STUB.fullmatch(body[0]) if len(body) == 1 else None
        said.setdefault(key.task, []).append(found[1] if found else "")
        begun |= set() if found else {key.task}
    return {task: texts for task, texts in said.items() if task not in begun}


def sources(root: Path) -> list[str]:
    """Return the files of a tree that may hold bodies, as paths inside it; links are left out."""
    found: list[str] = []
    for folder in (*PACKAGES, "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            parents = [root / parent for parent in relative.parents]
            if not any(p.is_symlink() for p in [path, *parents]) and path.is_file():
                found.append(relative.as_posix())
    return found


def read_bodies(root: Path, files: Iterable[str] | None = None) -> dict[Key, list[str]]:
    """Return every body of a tree.

    Raises:
        CourseError: If a marker has no partner.
    """
    bodies: dict[Key, list[str]] = {}
    for file in sources(root) if files is None else files:
        text = read_text(root / file)
        lines = text.split("\n")
        for region in find_regions(text, file):
            bodies[region.key] = lines[region.start : region.stop]
    return bodies


def marked_regions(root: Path) -> list[Region]:
    """Return the regions of a tree, file by file."""
    return [r for file in sources(root) for r in find_regions(read_text(root / file), file)]


def read_text(path: Path) -> str:
    """Return a source as it is, newlines of any system read as one kind."""
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise CourseError(f"cannot read {path}: {error}; it must be a file in UTF-8") from None


def is_solved(body: list[str]) -> bool:
    """Tell whether a body is more than the stub of a starter tree."""
    return not any("raise NotImplementedError(" in line for line in body)


def fill(tree: Path, tasks: Collection[str], bodies: dict[Key, list[str]]) -> None:
    """Put bodies into a tree.

    Args:
        tree: With markers.
        tasks: Ids of the tasks whose bodies are put in.
        bodies: From :func:`read_bodies` of another tree.
    """
    for file in sources(tree):
        text = read_text(tree / file)
        new = replaced(text, file, lambda r: bodies[r.key] if r.key.task in tasks else None)
        if new != text:
            (tree / file).write_text(new, encoding="utf-8")
