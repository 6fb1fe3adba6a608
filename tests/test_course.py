"""The course can be handed out and graded: starter trees fail where they should, and nowhere else."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "project"))

import course_grader  # noqa: E402
from course import main  # noqa: E402
from course_markers import (  # noqa: E402
    CourseError,
    Key,
    fill,
    find_regions,
    is_solved,
    marked_regions,
    read_bodies,
    replaced,
    sources,
    stub,
)
from course_place import Workplace  # noqa: E402
from course_tasks import MODULES, TASKS, Task, tasks_of  # noqa: E402
from course_trees import start  # noqa: E402

pytestmark = pytest.mark.skipif(
    (ROOT / "course.json").exists(), reason="a starter tree has no solutions"
)


# -- the table and the markers -------------------------------------------------------------------


def test_every_task_has_a_place_to_write_and_every_place_a_task() -> None:
    assert {r.key.task for r in marked_regions(ROOT)} == {task.id for task in TASKS}
    assert [task.id for task in TASKS] == sorted((t.id for t in TASKS), key=_order)
    places = {r.key.file for r in marked_regions(ROOT) if r.key.file.startswith("tests/")}
    assert places == {"tests/test_operators.py"}
    assert {task.module for task in TASKS} == {module.number for module in MODULES}


def _order(task: str) -> tuple[int, ...]:
    return tuple(map(int, task.split(".")))


def test_the_files_of_a_task_exist() -> None:
    for task in TASKS:
        assert all((ROOT / file).is_file() for file in task.tests), task.id


# Written with an @, so that this file itself has no markers.
SOURCE = """
class A:
    def f(self):
        \"\"\"Docstring.\"\"\"
        # @TASK 1.1: Do it, "so".
        return 1
        # @END TASK 1.1

    def g(self):
        def inner():
            # @TASK 1.2: Then this.
            return 2
            # @END TASK 1.2

        return inner
""".replace("@", "")


def test_a_body_is_replaced_and_put_back() -> None:
    regions = find_regions(SOURCE, "a.py")
    assert [r.key for r in regions] == [Key("a.py", "1.1", "A.f"), Key("a.py", "1.2", "A.g.inner")]
    from_stub = replaced(SOURCE, "a.py", stub)
    assert "        raise NotImplementedError(\"Task 1.1: Do it, 'so'.\")" in from_stub
    assert "return 1" not in from_stub
    bodies = {Key("a.py", "1.1", "A.f"): ["        return 1"]}
    assert (
        replaced(from_stub, "a.py", lambda r: bodies.get(r.key, ["            return 2"])) == SOURCE
    )
    compile(from_stub, "a.py", "exec")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("# TASK 1.1: a\nx = 1\n", "never ended"),
        ("x = 1\n# END TASK 1.1\n", "line 2: .* no partner"),
        ("# TASK 1.1: a\n# TASK 1.2: b\n# END TASK 1.2\n", "line 2: .* no partner"),
    ],
)
def test_a_marker_without_its_partner_is_named(text: str, match: str) -> None:
    with pytest.raises(CourseError, match=match):
        find_regions(text, "a.py")


# -- starter trees -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Return one place for all trees: what is compiled in one is not compiled in the next."""
    return Workplace(tmp_path_factory.mktemp("place"), gpu=False)


def outcomes(place: Workplace, tasks: list[Task], *more: str) -> dict[str, list[str]]:
    """Run the tests of tasks that run alike, in a tree: id → the errors of the tests that failed."""
    (simulator,) = {task.simulator for task in tasks}
    marks = {task.mark: task.id for task in tasks}
    expression = f"({' or '.join(marks)}) and not cuda" + (" and simulator" if simulator else "")
    files = sorted({file for task in tasks for file in task.tests})
    job = {
        "trusted": False, "tree": str(place.tree), "hidden": str(ROOT / ".git"),
        "writable": [str(path) for path in place.writable.values()],
        "memory_mb": 4096, "seconds": 300,
        "arguments": [*course_grader._arguments(place.tree, files, expression), *more],
    }  # fmt: skip
    records, end = place.run(job, simulator, 300.0)
    assert any("finished" in record for record in records), (tasks, end, records[-3:])
    failed: dict[str, list[str]] = {task.id: [] for task in tasks}
    (collected,) = (record["collected"] for record in records if "collected" in record)
    for record in records:
        assert "broken" not in record, record
        if "id" in record and record["outcome"] != "passed":
            (task,) = {marks[mark] for mark in collected[record["id"]] if mark in marks}
            failed[task].append(record["message"])
    ran = {mark for record in records if "id" in record for mark in collected[record["id"]]}
    assert ran & set(marks), f"no test of {list(marks)} ran"
    return failed


@pytest.mark.parametrize("module", range(len(MODULES)))
def test_a_starter_tree_fails_task_by_task_until_it_is_solved(
    module: int, workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task fails with its own message while the ones before it are solved, then passes.

    In the end the tree is that of the next module: what passes here passes there.
    """
    monkeypatch.setenv("MINITORCH_EXAMPLES", "2")
    bodies, tree = read_bodies(ROOT), workplace.tree
    shutil.rmtree(tree)
    start(module, tree)
    start(min(module + 1, len(MODULES) - 1), tmp_path / "next")
    whole = {file: (ROOT / file).read_bytes() for file in sources(tree)}
    # One dtype: the loops of the other would have to be compiled too.
    fewer = ("-k", "not float32")
    solved: Task | None = None
    for task in tasks_of(module):
        # Two at once, to start fewer processes.
        at_once = solved is not None and solved.simulator == task.simulator
        if solved is not None and at_once:
            failed = outcomes(workplace, [solved, task], *fewer)
        else:
            failed = outcomes(workplace, [task], "--maxfail=1", *fewer)
            failed |= outcomes(workplace, [solved], *fewer) if solved else {}
        if solved is not None:
            assert not failed[solved.id], f"task {solved.id} is solved: {failed[solved.id][0]}"
        assert failed[task.id], f"task {task.id} passes without a solution"
        assert f"Task {task.id}: " in failed[task.id][0], failed[task.id][0]
        fill(tree, [task.id], bodies)
        solved = task
    assert solved is not None
    assert not any(outcomes(workplace, [solved], *fewer).values())
    missing = {r.key.task for r in marked_regions(tree)} - {r.key.task for r in _solved(tree)}
    assert missing == {task.id for task in TASKS if task.module > module} & {
        key.task for key in read_bodies(tree)
    }
    if module + 1 < len(MODULES):
        for file in sources(tree):
            assert (tree / file).read_bytes() == (tmp_path / "next" / file).read_bytes(), file
    fill(tree, [task.id for task in TASKS], bodies)
    for file in sources(tree):
        assert (tree / file).read_bytes() == whole[file], file


def _solved(tree: Path) -> list[Any]:
    bodies = read_bodies(tree)
    return [r for r in marked_regions(tree) if is_solved(bodies[r.key])]


def test_a_starter_tree_has_what_its_module_needs_and_no_more(tmp_path: Path) -> None:
    start(2, tmp_path / "two")
    two = tmp_path / "two"
    names = {path.name for path in (two / "tests").glob("test_*.py")}
    assert {"test_operators.py", "test_tensor.py", "test_tensor_data.py"} <= names
    assert not names & {"test_tensor_general.py", "test_conv.py", "test_course.py"}
    readme = (two / "README.md").read_text(encoding="utf-8")
    assert readme.index("Task 2.1") < readme.index("Task 2.4")
    assert "python -m pytest -m task2_1 tests/test_tensor_data.py" in readme
    assert "task2_4" in (two / "pyproject.toml").read_text(encoding="utf-8")
    assert json.loads((two / "course.json").read_text(encoding="utf-8")) == {"module": 2}
    text = (two / "minitorch" / "fast_ops.py").read_text(encoding="utf-8")
    assert 'raise NotImplementedError("Task 3.1: ' in text


def test_earlier_modules_may_come_from_the_student(tmp_path: Path) -> None:
    zero, one = tmp_path / "zero", tmp_path / "one"
    start(0, zero)
    fill(zero, [task.id for task in tasks_of(0)], read_bodies(ROOT))
    file = zero / "minitorch" / "operators.py"
    own = file.read_text(encoding="utf-8").replace("    return x * y\n", "    return y * x\n")
    file.write_text(own, encoding="utf-8")
    start(1, one, zero)
    assert "return y * x" in (one / "minitorch" / "operators.py").read_text(encoding="utf-8")
    two = tmp_path / "two"
    start(2, two, one)
    assert "return y * x" in (two / "minitorch" / "operators.py").read_text(encoding="utf-8")
    text = (two / "minitorch" / "autodiff.py").read_text(encoding="utf-8")
    assert 'raise NotImplementedError("Task 1.1' in text, "what the student has not solved stays so"
    file.write_text(own.replace("    # TASK 0.1: Multiply x by y.\n", ""), encoding="utf-8")
    with pytest.raises(CourseError, match=r"minitorch/operators.py, line \d+: '# END TASK 0.1'"):
        start(1, tmp_path / "other", zero)
    file.write_text(own.split("def zipWith")[0], encoding="utf-8")
    with pytest.raises(CourseError, match=r"task 0.3: minitorch/operators.py, zipWith"):
        start(1, tmp_path / "other", zero)


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["start", "0", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["start", "9", str(tmp_path / "new")]) == 2
    assert "there are 0 to 5" in capsys.readouterr().err
