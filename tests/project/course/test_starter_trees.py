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
from course.assembly import assemble
from course.command import main
from course.expected import Expected, arguments
from course.markers import (
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
from course.starter_trees import left_behind, start
from course.tasks import MODULES, TASKS, tasks_of
from course.tree_files import tree_texts, with_holes
from course.workplace import Workplace

from ...support import packages

ROOT = Path(__file__).parents[3]

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


def without_twins(tests: list[str]) -> list[str]:
    """Return tests on one dtype and one backend where there are two: each is compiled by itself."""
    one_dtype = [test for test in tests if "float32" not in test or "float64" in test]
    return [test for test in one_dtype if test.replace("fast", "simple") not in {*tests} - {test}]


def outcomes(place: Workplace, emulated: bool, tests: list[str]) -> dict[str, str]:
    """Run tests in a tree, all on the emulated GPU or none: test → its error, or ''."""
    job = {
        "trusted": False, "tree": str(place.tree), "memory_mb": 4096, "seconds": 300, "seeds": {},
        "arguments": arguments(place.tree, tests, ""),
    }  # fmt: skip
    records, end = place.run(job, emulated, 300.0)
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
    """Each task fails with its own message while the ones before it are solved.

    In the end the tree is that of the next module, byte for byte the course's.
    """
    monkeypatch.setenv("MINITORCH_EXAMPLES", "2")
    bodies, tree, tasks, tests = (
        read_bodies(ROOT), workplace.tree, tasks_of(module), expected.tests
    )  # fmt: skip
    shutil.rmtree(tree)
    start(module, tree)
    start(min(module + 1, len(MODULES) - 1), tmp_path / "next")
    for task in tasks:
        found = outcomes(workplace, task.emulated, without_twins(tests[task.id]))
        failed = {test: error for test, error in found.items() if error}
        assert len(found) - len(failed) <= 2, f"task {task.id}: {set(found) - set(failed)}"
        for test, message in failed.items():
            assert f"Task {task.id}: " in message, f"{test}: {message}"
        fill(tree, [task.id], bodies)
    first = tasks[0]
    assert not any(outcomes(workplace, first.emulated, tests[first.id]).values())
    assert not {r.key.task for r in marked_regions(tree)} - {r.key.task for r in _solved(tree)} & {
        task.id for task in tasks
    }
    have = read_bodies(tree)
    # What a student writes in tests stays in the tree of module 0, scalars in that of module 1.
    texts = tree_texts(module, module)
    known = {r.key for file, text in texts.items() for r in find_regions(text, file)}
    assert {key for key in known if int(key.task.split(".")[0]) <= module} <= have.keys()
    for key, body in read_bodies(tmp_path / "next").items():
        if int(key.task.split(".")[0]) <= module < len(MODULES) - 1:
            assert body == have[key] == bodies[key], key


def _solved(tree: Path) -> list[Any]:
    bodies = read_bodies(tree)
    return [r for r in marked_regions(tree) if is_solved(bodies[r.key])]


#: Beside what a student reads and writes.
AROUND = ("project/app", "docs/diagrams", ".streamlit")
#: Module → the most files that its tree has without those, the most lines of Python of all its files, and
#: what no file may name.
SMALL = {
    0: (27, 2_250, "numba kernels scalar tensor_data"),
    1: (33, 3_200, "numba kernels tensor_data"),
    2: (70, 6_000, "flash numba fast_loops test_tensor_general test_conv"),
    3: (100, 10_520, "flash test_conv accelerated"),
    4: (100, 10_800, "flash accelerated"),
    5: (190, 23_600, "_mma wgmma accelerated distributed reformer bench kernels/cpu"),
}


@pytest.mark.parametrize("module", SMALL)
def test_a_starter_tree_has_what_its_module_needs_and_no_more(module: int, tmp_path: Path) -> None:
    (most, lines, later), tree = SMALL[module], tmp_path / "tree"
    start(module, tree)
    code = [path.read_text(encoding="utf-8") for path in tree.rglob("*.py")]
    assert sum(text.count("\n") for text in code) <= lines
    files = {p.relative_to(tree).as_posix() for p in tree.rglob("*")}
    files = {file for file in files if not file.startswith(AROUND)}
    assert len([file for file in files if (tree / file).is_file()]) <= most
    assert not [file for file in files for name in later.split() if name in file]
    assert all(file in files for task in tasks_of(module) for file in task.tests)
    needed = (tree / "requirements.txt").read_text(encoding="utf-8")
    assert ("numba" in needed) == (module >= 3)
    stamp = json.loads((tree / "course.json").read_text())
    assert stamp["module"] == module and [*stamp["tasks"]] == [t.id for t in tasks_of(module)]
    readme = (tree / "README.md").read_text(encoding="utf-8")
    assert f"python -m pytest -m task{module}_1" in readme
    assert len(readme.splitlines()) <= 70


SCRIPTS = {
    0: "run_manual.py",
    1: "run_scalar.py --EPOCHS 2",
    2: "run_tensor.py --EPOCHS 2",
    3: "run_fast_tensor.py --EPOCHS 2",
}


@pytest.mark.parametrize("module", SCRIPTS)
def test_the_script_of_a_module_runs_the_code_of_its_tree(module: int, tmp_path: Path) -> None:
    """Although the course is installed, and first on the path."""
    tree = tmp_path / "tree"
    start(module, tree)
    script, *options = SCRIPTS[module].split()
    command = [sys.executable, f"project/{script}", *options, "--PLOT", "false"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_DISABLE_JIT": "1"}

    def run() -> Any:
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)

    assert f"NotImplementedError: Task {module}." in run().stderr
    fill(tree, [task.id for task in tasks_of(module)], read_bodies(ROOT))
    assert (done := run()).returncode == 0, done.stderr


def test_what_lies_beyond_the_modules_of_a_tree_is_left_out() -> None:
    text = """from .a import f  # beyond module 2
from .b import (  # beyond module 2
    g,
)


class A:
    x: int
    y: int  # beyond module 3
    t: int  # until module 3
    u: int  # beyond module 1, until module 2

    @f  # beyond module 2
    def z(self) -> int:  # beyond module 2
        return self.y

    def w(self) -> int:
        return 1
"""
    t, u = (f"    {line}\n" for line in text.split("\n    ")[4:6])
    kept = f"class A:\n    x: int\n{t}    def w(self) -> int:\n        return 1\n"
    assert with_holes(text, 1, 1) == with_holes(text, 1, 0) == kept
    assert with_holes(text, 2, 2) == kept.replace(t, t + u)
    assert "y: int" not in with_holes(text, 3, 3) and "return self.y" in with_holes(text, 3, 3)
    assert with_holes(text, 4, 0) == text
    assert with_holes(text, 4, 4) == text.replace(t + u, "")


def test_earlier_modules_may_come_from_the_student(tmp_path: Path) -> None:
    zero, one = tmp_path / "zero", tmp_path / "one"
    start(0, zero)
    fill(zero, [task.id for task in tasks_of(0)], read_bodies(ROOT))
    assert left_behind(zero) == []
    (zero / "minitorch" / "own.py").touch()
    assert any("own.py: a file of your own" in line for line in left_behind(zero))
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


#: What the files of earlier modules take if it is there.
OPTIONAL = {"minitorch.tensors.extras.Methods"}
#: Imports each module of a tree, and prints why one cannot be.
IMPORT = """
import importlib, pathlib, sys
sys.path[:0] = ["project", "."]
for path in sorted(pathlib.Path().rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__").removeprefix("project.")
    if path.name != "setup.py" and not (name.startswith("app") and "streamlit" in path.read_text()):
        try:
            importlib.import_module(name)
        except Exception as error:
            print(name, repr(error))
"""


@pytest.mark.parametrize("module", range(len(MODULES)))
def test_no_file_of_a_tree_names_one_that_the_tree_lacks(
    module: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = {packages.module_name(file) for file in packages.sources()}
    start(module, tree := tmp_path / "tree")
    assemble(tree, graded := tmp_path / "graded", module)
    for place in (tree, graded):  # with tests of earlier modules, and what only these need
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], cwd=place, capture_output=True, text=True
        )
        assert done.stdout == "" and done.returncode == 0, done.stdout + done.stderr
    monkeypatch.setattr(packages, "ROOT", tree)
    own = {packages.module_name(file) for file in packages.sources()}
    lacking = {
        (file, name)
        for file in packages.sources()
        for name in packages.imported_names(file)
        for place in ("", "project.")
        for part in (name, name.rpartition(".")[0])
        if place + part in course - own
    }
    assert {name for _, name in lacking} <= OPTIONAL, lacking
