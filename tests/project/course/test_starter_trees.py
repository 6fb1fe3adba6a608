"""The course can be handed out and graded: starter trees fail where they should, and nowhere else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "project"))

from course import grader as course_grader  # noqa: E402
from course import tree_files  # noqa: E402
from course.command import main  # noqa: E402
from course.grader import Expected, expected_tests, grade_task  # noqa: E402
from course.markers import (  # noqa: E402
    CourseError,
    Key,
    fill,
    find_regions,
    is_solved,
    marked_regions,
    read_bodies,
    replaced,
    stub,
)
from course.starter_trees import left_behind, start  # noqa: E402
from course.tasks import MODULES, TASKS, Task, find_task, tasks_of, tasks_until  # noqa: E402
from course.workplace import Workplace  # noqa: E402

pytestmark = pytest.mark.slow


# -- the table and the markers -------------------------------------------------------------------


def test_every_task_has_a_place_to_write_and_every_place_a_task() -> None:
    assert {r.key.task for r in marked_regions(ROOT)} == {task.id for task in TASKS}
    assert [task.id for task in TASKS] == sorted((t.id for t in TASKS), key=_order)
    places = {r.key.file for r in marked_regions(ROOT) if r.key.file.startswith("tests/")}
    assert places == {"tests/course/test_operators.py"}
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
        ("# TASK 1.1: a\n# TASK 1.2: b\n", "line 1: '# TASK 1.1: .* '# END TASK 1.1' .* in line 2"),
        (
            "# TASK 1.1: a\n# END TASK 1.2\n",
            "line 1: '# TASK 1.1: .* '# END TASK 1.1' .* in line 2",
        ),
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


@pytest.fixture(scope="module")
def expected(workplace: Workplace) -> Expected:
    """Return the tests of every task."""
    return expected_tests(workplace, list(TASKS))


#: Of the tests of a task that is solved, so many run: its tree is the course's then, byte for byte.
SAMPLE = 4
#: Compiles a model and trains it; of the tests of its task two others are left.
LONG = "test_a_transformer_learns_to_copy"


def without_twins(tests: list[str]) -> list[str]:
    """Return tests on one dtype and one backend where there are two: each is compiled by itself."""
    one_dtype = [test for test in tests if "float32" not in test or "float64" in test]
    return [test for test in one_dtype if test.replace("fast", "simple") not in {*tests} - {test}]


def a_sample(tests: list[str]) -> list[str]:
    """Return some tests, from all over the list."""
    few = [test for test in without_twins(tests) if LONG not in test]
    return few[:: -(-len(few) // SAMPLE)]


def outcomes(place: Workplace, simulated: bool, tests: list[str]) -> dict[str, str]:
    """Run tests in a tree, all in the simulator or none: test → its error, or ''."""
    job = {
        "trusted": False, "tree": str(place.tree), "hidden": str(ROOT / ".git"),
        "writable": [str(path) for path in place.writable.values()],
        "memory_mb": 4096, "seconds": 300,
        "arguments": course_grader._arguments(place.tree, tests, ""),
    }  # fmt: skip
    records, end = place.run(job, simulated, 300.0)
    assert any("finished" in record for record in records), (tests[0], end, records[-3:])
    found: dict[str, str] = {}
    for record in records:
        assert "broken" not in record, record
        if "id" in record:
            wrong = record["outcome"] != "passed"
            found[record["id"]] = found.get(record["id"]) or (record["message"] if wrong else "")
    return found


@pytest.mark.parametrize("module", range(len(MODULES)))
def test_a_starter_tree_fails_task_by_task_until_it_is_solved(
    module: int,
    workplace: Workplace,
    expected: Expected,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each task fails with its own message while the ones before it are solved, then passes.

    In the end the tree is that of the next module: what passes here passes there.
    """
    monkeypatch.setenv("MINITORCH_EXAMPLES", "2")
    bodies, tree, tasks, tests = (
        read_bodies(ROOT), workplace.tree, tasks_of(module), expected.tests
    )  # fmt: skip
    shutil.rmtree(tree)
    start(module, tree)
    start(min(module + 1, len(MODULES) - 1), tmp_path / "next")
    solved: Task | None = None
    for task in tasks:
        few = a_sample(tests[solved.id]) if solved is not None else []
        own = without_twins(tests[task.id])
        # Both at once where they run alike, to start fewer processes.
        if solved is not None and solved.simulator == task.simulator:
            found = outcomes(workplace, task.simulator, few + own)
        else:
            found = outcomes(workplace, task.simulator, own)
            found |= outcomes(workplace, not task.simulator, few) if solved is not None else {}
        for test in few:
            assert found[test] == "", f"{test}, whose task is solved: {found[test]}"
        failed = {test: found[test] for test in own if found[test]}
        assert len(own) - len(failed) <= task.free, f"task {task.id}: {set(own) - set(failed)}"
        for test, message in failed.items():
            assert f"Task {task.id}: " in message, f"{test}: {message}"
        fill(tree, [task.id], bodies)
        solved = task
    assert solved is not None
    assert not any(outcomes(workplace, solved.simulator, a_sample(tests[solved.id])).values())
    assert not {r.key.task for r in marked_regions(tree)} - {r.key.task for r in _solved(tree)} & {
        task.id for task in tasks
    }
    have = read_bodies(tree)
    assert {key for key in bodies if int(key.task.split(".")[0]) <= module} <= have.keys()
    for key, body in read_bodies(tmp_path / "next").items():
        if int(key.task.split(".")[0]) <= module < len(MODULES) - 1:
            assert body == have[key] == bodies[key], key


def test_points_grow_task_by_task(
    workplace: Workplace, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a student goes through a module: grade, write a task, grade."""
    monkeypatch.setenv("MINITORCH_EXAMPLES", "2")
    bodies, tree = read_bodies(ROOT), workplace.tree
    shutil.rmtree(tree)
    start(5, tree)
    for task in (find_task("5.3"), find_task("5.4")):
        before = grade_task(workplace, task, expected)
        assert (before.status, before.points) == ("failed", 0)
        assert f"NotImplementedError: Task {task.id}: " in before.message or task.simulator
        if task.id == "5.4":  # 5.5 cannot be tried as a whole before it
            fill(tree, ["5.5"], bodies)
            later = grade_task(workplace, find_task("5.5"), expected)
            assert (later.status, later.points, later.waits_for) == ("waiting", 0, "5.4")
            assert later.message == "waits for task 5.4, which is not written yet"
        fill(tree, [task.id], bodies)
        after = grade_task(workplace, task, expected)
        assert (after.status, after.points) == ("passed", task.points), after.message


def _solved(tree: Path) -> list[Any]:
    bodies = read_bodies(tree)
    return [r for r in marked_regions(tree) if is_solved(bodies[r.key])]


#: Beside what a student reads and writes.
AROUND = ("project/app", "docs/diagrams", ".streamlit")
#: Module → the most files that its tree has without those, and what none of them may name.
SMALL = {
    0: (30, "numba kernels scalar tensor_data"),
    1: (40, "numba kernels tensor_data"),
    2: (90, "flash numba fast_loops test_tensor_general test_conv"),
    3: (134, "flash test_conv accelerated"),
    4: (148, "flash accelerated"),
}


@pytest.mark.parametrize("module", SMALL)
def test_a_starter_tree_has_what_its_module_needs_and_no_more(module: int, tmp_path: Path) -> None:
    most, later = SMALL[module]
    start(module, tmp_path / "tree")
    files = {p.relative_to(tmp_path / "tree").as_posix() for p in (tmp_path / "tree").rglob("*")}
    files = {file for file in files if not file.startswith(AROUND)}
    assert len([file for file in files if (tmp_path / "tree" / file).is_file()]) <= most
    assert not [file for file in files for name in later.split() if name in file]
    assert all(file in files for task in tasks_until(module) for file in task.tests)
    needed = (tmp_path / "tree" / "requirements.txt").read_text(encoding="utf-8")
    assert ("numba" in needed) == (module >= 3)
    stamp = json.loads((tmp_path / "tree" / "course.json").read_text())
    assert stamp["module"] == module and [*stamp["tasks"]] == [t.id for t in tasks_of(module)]
    readme = (tmp_path / "tree" / "README.md").read_text(encoding="utf-8")
    assert f"python -m pytest -m task{module}_1" in readme
    assert len(readme.splitlines()) < 70


#: Opens the app as Streamlit does, and prints each of its pages with its errors.
APP = """
import sys
sys.path[:0] = ["project", "."]
sys.argv = ["project/app.py", "1"]  # as in its Makefile
from streamlit.testing.v1 import AppTest
for page in ("math", "autodiff", "tensor"):
    app = AppTest.from_file("project/app.py", default_timeout=60)
    app.query_params["page"] = page
    app.run()
    print(page, len(app.exception), [e.value for e in app.error], app.sidebar.radio[0].options)
"""


def test_the_app_of_a_starter_tree_shows_its_module_and_says_what_is_missing(
    tmp_path: Path,
) -> None:
    pytest.importorskip("streamlit", reason='the app is not installed: pip install -e ".[app]"')
    start(1, tmp_path / "tree")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", APP], cwd=tmp_path / "tree", env=environment, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    math, autodiff, tensor = done.stdout.splitlines()
    assert math.startswith("math 0 []"), "module 0 is solved in this tree"
    assert autodiff.startswith("autodiff 0") and "not written yet" in autodiff
    assert tensor.startswith("tensor 0 []") and "2 · " not in tensor, "its page is not in this tree"


SCRIPTS = {
    0: "run_manual.py",
    1: "run_scalar.py --EPOCHS 2",
    2: "run_tensor.py --EPOCHS 2",
    3: "run_fast_tensor.py --EPOCHS 2",
}


@pytest.mark.parametrize("module", SCRIPTS)
def test_the_script_of_a_module_runs_in_its_tree_when_it_is_solved(
    module: int, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    start(module, tree)
    fill(tree, [task.id for task in tasks_of(module)], read_bodies(ROOT))
    script, *options = SCRIPTS[module].split()
    command = [sys.executable, f"project/{script}", *options, "--PLOT", "false"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TESTS = """
import numba
import pytest

from minitorch import Scalar, operators

pytestmark = pytest.mark.simulator
#: Of both.
SIZES = [1, 2]
own = pytest.mark.task1_2


def helper() -> None:
    numba.njit()


@pytest.mark.task0_1
@pytest.mark.parametrize("size", SIZES)
def test_first(size: int) -> None:
    operators.add(size, 1)


@own
def test_second() -> None:
    Scalar(1.0)


def test_without_a_task() -> None:
    helper()
"""


def test_tests_of_later_modules_and_of_no_task_are_left_out() -> None:
    zero, one = tree_files.tests_of(TESTS, 0), tree_files.tests_of(TESTS, 1)
    assert "test_first" in zero and "SIZES = [1, 2]" in zero and "simulator" in zero
    assert "from minitorch import operators\n" in zero
    assert not [
        name for name in ("numba", "Scalar", "test_second", "own", "helper") if name in zero
    ]
    assert "test_second" in one and "own = " in one and "test_without" not in one


def test_what_a_tree_lacks_is_left_out_with_what_uses_it() -> None:
    text = "from .a import f, g\n\n\nclass A:\n    x = f\n\n    def y(self):\n        return g\n"
    assert tree_files.without(
        text, "minitorch/b.py", lambda place, name: (place, name) == ("minitorch/a", "f")
    ) == ("from .a import g\n\n\nclass A:\n\n    def y(self):\n        return g\n")


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


def test_what_a_student_wrote_around_the_bodies_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = tmp_path / "zero"
    start(0, zero)
    assert left_behind(zero) == []
    fill(zero, [task.id for task in tasks_of(0)], read_bodies(ROOT))
    assert left_behind(zero) == []
    file = zero / "minitorch" / "operators.py"
    file.write_text(file.read_text(encoding="utf-8") + "\n\ndef helper(): ...\n", encoding="utf-8")
    (zero / "minitorch" / "own.py").touch()
    assert main(["start", "1", str(tmp_path / "one"), "--from", str(zero)]) == 0
    shown = capsys.readouterr().out
    assert "minitorch/operators.py: changed outside of the marked bodies" in shown
    assert "minitorch/own.py: a file of your own" in shown
    assert main(["start", "1", str(tmp_path / "two"), "--from", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["start", "0", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["start", "9", str(tmp_path / "new")]) == 2
    assert "there are 0 to 5" in capsys.readouterr().err
