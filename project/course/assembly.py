"""Makes the tree that is graded: the course's files, with the student's where a task or nothing is."""

from __future__ import annotations

import shutil
from pathlib import Path

from course.markers import (
    PACKAGES,
    ROOT,
    CourseError,
    Key,
    Region,
    find_regions,
    read_bodies,
    read_text,
    sources,
    stub,
)
from course.starter_trees import write_tree

LONGEST_FILE = 1 << 20


def assemble(submission: Path, tree: Path, module: int) -> None:
    """Write the tree that is graded.

    Args:
        submission: The student's tree.
        tree: An empty folder.
        module: Tasks of this module and of earlier ones are the student's.
    """

    def ours(region: Region) -> bool:
        return int(region.key.task.split(".")[0]) <= module

    marked: dict[str, list[Region]] = {}
    for file in sources(ROOT):
        regions = [r for r in find_regions(read_text(ROOT / file), file) if ours(r)]
        if regions:
            marked[file] = regions
    tests = {file for file in marked if file.startswith("tests/")}
    theirs = sources(submission)
    written, problem = _written_tests(submission, tests & set(theirs))

    def body_of(region: Region) -> list[str] | None:
        if region.key.file in tests and ours(region):
            missing = region._replace(hint=problem or f"no markers in {region.key.file}")
            return written.get(region.key) or stub(missing)
        return stub(region)  # what the student's own files shall replace

    write_tree(module, tree, body_of)
    for file in theirs:
        if file.split("/")[0] in PACKAGES and (file in marked or not (ROOT / file).exists()):
            if (submission / file).stat().st_size > LONGEST_FILE:
                raise CourseError(f"{submission / file} is larger than {LONGEST_FILE} bytes")
            target = tree / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(submission / file, target)


def _written_tests(submission: Path, files: set[str]) -> tuple[dict[Key, list[str]], str]:
    """Return the bodies of tests that the student wrote, and what is wrong with their markers."""
    try:
        return read_bodies(submission, sorted(files)), ""
    except CourseError as error:
        return {}, str(error)
