"""Grades a tree: the tests of each task, in a process of their own, from the course and not the student.

The tree that is graded is made of the course's files, the files of the student that have tasks in them
and any that the student has added. Points are given for a report in which every test that the course
has for a task has run and passed; neither exit codes nor output count. Tests that must fail run among
them: if one of these passes, the submission has changed what judges it.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from course_markers import CourseError
from course_place import Ending, Workplace, assemble
from course_tasks import Task, tasks_of, tasks_until
from course_trees import ROOT, module_of

#: A test that must fail → what it means if it passes.
CANARIES = {
    "assert False": "an assertion that fails",
    "with pytest.raises(ValueError):\n        pass": "a test in which nothing is raised",
    "assert 1.0 == pytest.approx(2.0)": "approx(2.0) and 1.0",
    "assert_close_arrays(np.ones(2), np.zeros(2), np.float64)": "arrays of ones and zeros",
    "np.testing.assert_array_equal([1.0], [2.0])": "[1.0] and [2.0]",
    "np.testing.assert_allclose([1.0], [2.0])": "[1.0] and [2.0], nearly",
    "assert_close(1.0, 2.0)": "1.0 and 2.0, nearly (operators.is_close)",
    "given(integers())(lambda n: never(n))()": "a property that no number has",
}
CANARY_FILE = """
import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers

from .strategies import assert_close
from .tolerances import assert_close_arrays

pytestmark = [{marks}]


def never(n):
    assert n != n

"""


@dataclass
class Result:
    """What became of a task.

    Attributes:
        task: Its id.
        title: Its title.
        mark: Its pytest mark.
        status: "passed", "failed" or "blocked".
        points: Given.
        possible: Given for passing.
        message: One line: the first that went wrong; empty if nothing did.
        tests: How many tests decide.
        passed: How many of them passed.
        seconds: How long they took.
    """

    task: str
    title: str
    mark: str
    status: str = "failed"
    points: int = 0
    possible: int = 0
    message: str = ""
    tests: int = 0
    passed: int = 0
    seconds: float = 0.0


def add_canaries(tree: Path, task: Task) -> dict[str, str]:
    """Write tests that must fail, under names that say nothing; return what each one means."""
    marks = f"pytest.mark.{task.mark}" + (", pytest.mark.simulator" if task.simulator else "")
    names = {f"test_{secrets.token_hex(6)}": body for body in CANARIES}
    bodies = "\n\n".join(f"def {name}():\n    {body}\n" for name, body in names.items())
    file = f"tests/test_{secrets.token_hex(6)}.py"
    (tree / file).write_text(CANARY_FILE.format(marks=marks) + bodies, encoding="utf-8")
    return {f"{file}::{name}": CANARIES[body] for name, body in names.items()}


# -- verdicts ------------------------------------------------------------------------------------


def expression(task: Task, gpu: bool) -> str:
    """Return pytest's ``-m`` for the tests that decide."""
    if not task.simulator:
        return f"{task.mark} and not cuda"
    return task.mark if gpu else f"{task.mark} and simulator and not cuda"


def judge(
    task: Task, expected: list[str], canaries: dict[str, str], records: list[Any], end: Ending
) -> tuple[int, str]:
    """Return how many of the expected tests passed, and the first thing that is wrong, or ''."""
    phases: dict[str, dict[str, Any]] = {}
    for record in records:
        if "id" in record:
            phases.setdefault(record["id"], {})[record["when"]] = record
    good = [test for test in expected if _passed(phases.get(test, {}))]
    running = next((r["begun"] for r in reversed(records) if "begun" in r), "")
    if end.late:
        return len(good), f"stopped after {task.seconds} s" + (
            f", in {_short(running)}" if running else ""
        )
    for record in records:
        if "broken" in record:
            return len(good), f"{record['broken']}: {record['message']}"
    for test in expected:
        for record in phases.get(test, {}).values():
            if record["outcome"] != "passed":
                return len(good), f"{_short(test)}: {_line(record, task)}"
    if not any("finished" in record for record in records):
        how = f"signal {-end.code}" if end.code < 0 else f"exit code {end.code}"
        where = f", in {_short(running)}" if running else ", before the first test"
        return len(good), (
            f"the run ended early ({how}) after {len(good)} of {len(expected)} tests{where}; the "
            f"memory limit is {task.memory_mb} MB"
        )
    missing = [test for test in expected if test not in good]
    if missing:
        return len(
            good
        ), f"{len(missing)} of {len(expected)} tests did not run: {_short(missing[0])}"
    for test, meaning in canaries.items():
        if phases.get(test, {}).get("call", {}).get("outcome") != "failed":
            return len(good), f"the submission makes the tests accept {meaning}"
    return len(good), ""


def _passed(phases: dict[str, Any]) -> bool:
    outcomes = [phases.get(when, {}).get("outcome") for when in ("setup", "call", "teardown")]
    return outcomes == ["passed"] * 3


def _short(test: str) -> str:
    return test.split("::")[-1]


def _line(record: dict[str, Any], task: Task) -> str:
    """Return what went wrong in a test, in one line."""
    lines = [line.strip() for line in record["message"].splitlines() if line.strip()]
    text = lines[0] if lines else record["outcome"]
    if text.startswith(("MemoryError", "numpy._core._exceptions._ArrayMemoryError")):
        text = f"out of memory, the limit is {task.memory_mb} MB ({text})"
    return text if len(text) <= 240 else text[:239] + "…"


def expected_tests(place: Workplace, tasks: list[Task]) -> tuple[dict[str, list[str]], str | None]:
    """Return the tests that the course has for each task, and why there is no GPU, or None.

    Raises:
        CourseError: If the course's own tests cannot be read.
    """
    expected: dict[str, list[str]] = {}
    no_gpu: str | None = None
    for simulator in sorted({task.simulator for task in tasks}):
        own = [task for task in tasks if task.simulator is simulator]
        files = sorted({file for task in own for file in task.tests})
        job = {"trusted": True, "tree": str(ROOT), "arguments": _arguments(ROOT, files, "")}
        records, end = place.run(job, simulator, 180.0)
        if not records or records[0]["code"] != 0:
            raise CourseError(
                f"the course's own tests cannot be collected (exit code {end.code}); run 'python "
                f"-m pytest --collect-only {' '.join(files)}' in {ROOT} and see why"
            )
        no_gpu = records[0]["no_gpu"]
        for task in own:
            keep = {task.mark} | ({"simulator"} if simulator and not place.gpu else set())
            drop = set() if simulator and place.gpu else {"cuda"}
            expected[task.id] = [
                test
                for test, marks in records[0]["tests"].items()
                if test.split("::")[0] in task.tests
                and keep <= set(marks)
                and not drop & set(marks)
            ]
            if not expected[task.id]:
                raise CourseError(f"the course has no test with the mark {task.mark}")
    return expected, no_gpu


def _arguments(tree: Path, files: list[str], chosen: str) -> list[str]:
    """Return pytest's arguments; what the tree's own settings say of them does not count."""
    settings = ["--rootdir", str(tree), "-c", str(tree / "pyproject.toml"), "-o", "addopts="]
    select = ["-m", chosen] if chosen else []
    return [*settings, "-p", "no:cacheprovider", "--tb=line", "--strict-markers", *select, *files]


def grade_task(place: Workplace, task: Task, expected: list[str], root: Path = ROOT) -> Result:
    """Run the tests of one task and return what became of it."""
    result = Result(task.id, task.title, task.mark, possible=task.points, tests=len(expected))
    canaries = add_canaries(place.tree, task)
    canary_file = next(iter(canaries)).split("::")[0]
    swapped: dict[Path, bytes] = {}
    if task.own_tests:  # they are judged by whether they tell right code from wrong, the course's
        for path in (place.tree / "minitorch" / "operators.py",):
            swapped[path] = path.read_bytes()
            shutil.copyfile(root / path.relative_to(place.tree), path)
    job = {
        "trusted": False, "tree": str(place.tree), "hidden": str(root),
        "writable": [str(path) for path in place.writable.values()],
        "memory_mb": task.memory_mb, "seconds": task.seconds,
        "arguments": _arguments(
            place.tree, [*task.tests, canary_file], expression(task, place.gpu)
        ),
    }  # fmt: skip
    begin = time.perf_counter()
    records, end = place.run(job, task.simulator, task.seconds)
    result.seconds = round(time.perf_counter() - begin, 2)
    for path, content in swapped.items():
        path.write_bytes(content)
    (place.tree / canary_file).unlink()
    result.passed, result.message = judge(task, expected, canaries, records, end)
    if not result.message:
        result.status, result.points = "passed", task.points
    return result


def grade(
    submission: Path,
    chosen: list[Task],
    module: int | None = None,
    json_file: Path | None = None,
    gpu: bool = False,
    seconds: int | None = None,
    memory_mb: int | None = None,
) -> int:
    """Grade a tree, print a table and return the exit code.

    Args:
        submission: The student's tree.
        chosen: The tasks; those of ``module`` if empty, or every task that the tree has.
        module: Only the tasks of this one.
        json_file: Where the result goes as JSON too.
        gpu: Run CUDA tasks on the GPU; without one they are blocked, neither passed nor failed.
        seconds: Time limit of each task, in place of its own.
        memory_mb: Memory limit of each task, likewise.

    Returns:
        0 if nothing failed, 1 if something did, 2 if everything was blocked.

    Raises:
        CourseError: If the tree cannot be graded.
    """
    submission = submission.resolve()
    if not (submission / "minitorch").is_dir():
        raise CourseError(f"{submission} has no folder minitorch; name the student's tree")
    last = module_of(submission)
    tasks = chosen or (tasks_until(last) if module is None else tasks_of(module))
    late = [task.id for task in tasks if task.module > last]
    if late or not tasks:
        raise CourseError(
            f"{submission} is the tree of module {last}; it has no task {late or module}"
        )
    own = {"seconds": seconds, "memory_mb": memory_mb}
    tasks = [replace(task, **{k: v for k, v in own.items() if v}) for task in tasks]

    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        place = Workplace(Path(folder).resolve(), gpu)
        assemble(submission, place.tree, last)
        expected, no_gpu = expected_tests(place, tasks)
        print(f"{'task':5} {'':32} {'status':8} {'points':>7} {'tests':>8} {'seconds':>8}")
        for task in tasks:
            if task.simulator and gpu and no_gpu:
                result = Result(task.id, task.title, task.mark, "blocked", possible=task.points)
                result.message = f"needs a GPU: {no_gpu}"
            else:
                result = grade_task(place, task, expected[task.id])
            results.append(result)
            _print_row(result)
    return _finish(results, json_file)


def _print_row(result: Result) -> None:
    points = f"{result.points}/{result.possible}"
    tests = f"{result.passed}/{result.tests}"
    print(
        f"{result.task:5} {result.title:32} {result.status:8} {points:>7} {tests:>8} "
        f"{result.seconds:8.1f}"
    )
    if result.message:
        print(f"      {result.message}")
    sys.stdout.flush()


def _finish(results: list[Result], json_file: Path | None) -> int:
    blocked = [result for result in results if result.status == "blocked"]
    failed = [result for result in results if result.status == "failed"]
    points = sum(result.points for result in results)
    possible = sum(result.possible for result in results if result not in blocked)
    print(f"points {points} of {possible}")
    if blocked:
        open_ = sum(result.possible for result in blocked)
        print(f"BLOCKED, neither passed nor failed: {len(blocked)} tasks, {open_} points")
    if json_file is not None:
        summary = {
            "points": points,
            "possible": possible,
            "blocked": sum(result.possible for result in blocked),
            "all_passed": not failed and not blocked,
            "tasks": [asdict(result) for result in results],
        }
        json_file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if failed:
        return 1
    return 2 if len(blocked) == len(results) else 0
