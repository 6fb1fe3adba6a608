"""A common mistake costs points, and earns a sentence that names it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from course.grader import Expected, expected_tests, grade_task
from course.markers import fill, read_bodies, replaced
from course.starter_trees import start
from course.tasks import find_task, tasks_of
from course.workplace import Workplace, assemble

from .mutants import MUTANTS

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("place"), gpu=False)


@pytest.fixture(scope="module")
def expected(place: Workplace) -> Expected:
    return expected_tests(place, [find_task(name) for name in dict.fromkeys(m[0] for m in MUTANTS)])


@pytest.mark.parametrize(
    ("task", "file", "right", "wrong", "sentence"), MUTANTS, ids=[f"{m[0]}-{m[3]}" for m in MUTANTS]
)
def test_a_common_mistake_earns_its_sentence(
    task: str, file: str, right: str, wrong: str, sentence: str,
    place: Workplace, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("MINITORCH_EXAMPLES", "10")
    chosen, tree = find_task(task), tmp_path / "tree"
    start(chosen.module, tree)
    fill(tree, [t.id for t in tasks_of(chosen.module)], read_bodies(ROOT))
    before = (tree / file).read_text(encoding="utf-8")
    own = {r for r, body in read_bodies(tree, [file]).items() if right.strip() in "\n".join(body)}

    def body_of(region: object) -> list[str] | None:
        if region.key not in own or region.key.task != task:  # type: ignore[attr-defined]
            return None
        body = read_bodies(tree, [file])[region.key]  # type: ignore[attr-defined]
        return "\n".join([*body, ""]).replace(right, wrong).rstrip("\n").split("\n")

    after = replaced(before, file, body_of)
    assert after != before, f"no body of task {task} in {file} has {right!r}"
    (tree / file).write_text(after, encoding="utf-8")
    shutil.rmtree(place.tree)
    assemble(tree, place.tree, chosen.module)
    result = grade_task(place, chosen, expected)
    assert result.status == "failed" and result.points < chosen.points
    # A forged report would give these points.
    assert result.outside < chosen.points
    assert sentence in "\n".join([result.message, *result.also]), result.message
