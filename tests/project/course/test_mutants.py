"""A common mistake costs points, and earns a sentence that names it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from course.grader import Expected, expected_tests, grade_task
from course.markers import Region, read_text, replaced
from course.starter_trees import write_tree
from course.tasks import find_task
from course.workplace import Workplace

from .mutants import MUTANTS

pytestmark = pytest.mark.slow


Solved = Callable[[int], Workplace]


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Solved:
    """Return the workplace of a module whose tree has the solutions, written once."""

    def place(module: int) -> Workplace:
        made = Workplace(tmp_path_factory.mktemp("place"), gpu=False)
        write_tree(module, made.tree, lambda region: None)
        return made

    return cache(place)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    tasks = [find_task(name) for name in dict.fromkeys(m[0] for m in MUTANTS)]
    return expected_tests(Workplace(tmp_path_factory.mktemp("expected"), gpu=False), tasks)


@pytest.mark.parametrize(
    ("task", "file", "right", "wrong", "sentence"), MUTANTS, ids=[f"{m[0]}-{m[3]}" for m in MUTANTS]
)
def test_a_common_mistake_earns_its_sentence(
    task: str, file: str, right: str, wrong: str, sentence: str,
    solved: Solved, expected: Expected, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("MINITORCH_EXAMPLES", "10")
    chosen = find_task(task)
    place = solved(chosen.module)
    before = read_text(place.tree / file)

    def body_of(region: Region) -> list[str] | None:
        body = "\n".join(before.split("\n")[region.start : region.stop])
        is_own = region.key.task == task and right.strip() in body
        return f"{body}\n".replace(right, wrong).rstrip("\n").split("\n") if is_own else None

    after = replaced(before, file, body_of)
    assert after != before, f"no body of task {task} in {file} has {right!r}"
    try:
        (place.tree / file).write_text(after, encoding="utf-8")
        result = grade_task(place, chosen, expected)
    finally:
        (place.tree / file).write_text(before, encoding="utf-8")
    assert result.status == "failed" and result.points < chosen.points
    # A forged report would give these points.
    assert result.outside < chosen.points
    assert sentence in "\n".join([result.message, *result.also]), result.message
