"""A common mistake costs points, and earns a sentence that names it."""

from __future__ import annotations

import re
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from course.expected import Expected
from course.grader import grade_task
from course.kernel_text import faults
from course.markers import Region, read_text, replaced
from course.starter_trees import write_tree
from course.tasks import Task, find_task
from course.verdict import Verdict, judge
from course.workplace import Ending, Workplace

from .mutants import MUTANTS, WITHOUT_CORE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("place"), gpu=False)


@lru_cache(1)
def write_solved(module: int, tree: Path) -> None:
    """Write the tree of a module with the solutions, unless it is there already."""
    shutil.rmtree(tree)
    write_tree(module, tree, lambda region: None)


def judged_by_text(task: Task, expected: Expected, lacking: dict[str, str]) -> Verdict:
    """Judge a task in which all tests pass and all values are right."""
    tests, values = expected.tests[task.id], expected.values[task.id]
    phases = [(test, when) for test in tests for when in ("setup", "call", "teardown")]
    records: list[Any] = [{"id": i, "when": when, "outcome": "passed"} for i, when in phases]
    records += [{"finished": 0}, {"values": values}]
    return judge(task, tests, values, lacking, records, Ending(0, False))


@pytest.mark.parametrize(
    ("task", "file", "right", "wrong", "sentence"),
    MUTANTS + WITHOUT_CORE,
    ids=[f"{m[0]}-{m[3]}" for m in MUTANTS + WITHOUT_CORE],
)
def test_a_common_mistake_earns_its_sentence(
    task: str, file: str, right: str, wrong: str, sentence: str,
    place: Workplace, expected: Expected, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("MINITORCH_EXAMPLES", "10")
    chosen = find_task(task)
    write_solved(chosen.module, place.tree)
    before = read_text(place.tree / file)
    pattern = re.compile(".*?".join(map(re.escape, right.split("…"))), re.DOTALL)

    def body_of(region: Region) -> list[str] | None:
        body = "\n".join(before.split("\n")[region.start : region.stop])
        other = pattern.sub(lambda found: wrong, f"{body}\n")
        return other.rstrip("\n").split("\n") if region.key.task == task else None

    after = replaced(before, file, body_of)
    assert after != before, f"no body of task {task} in {file} has {right!r}"
    try:
        (place.tree / file).write_text(after, encoding="utf-8")
        lacking = faults(place.tree, task)
        if any(lacking.values()):  # whatever the tests say
            result = judged_by_text(chosen, expected, lacking)
        else:
            result = grade_task(place, chosen, expected)
    finally:
        (place.tree / file).write_text(before, encoding="utf-8")
    most = (
        chosen.points // 2
        if (task, file, right, wrong, sentence) in WITHOUT_CORE
        else chosen.points - 1
    )
    assert result.status == "failed" and result.points <= most
    # A forged report would give these points.
    assert result.outside <= most
    assert sentence in "\n".join([result.message, *result.also]), result.message
