"""Grades a tree: the tests of each task, in a process of their own, from the course and not the student.

The tree that is graded is made of the course's files, the files of the student that have tasks in them
and any that the student has added. Points are given for a report in which every test that the course
has for a task has run and passed; neither exit codes nor output count. Tests that must fail run among
them: if one of these passes, the submission has changed what judges it.

What is right may have to be fast as well, for some of the points: as a ratio of two times, measured when
everything else has passed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from course_markers import CourseError
from course_place import Workplace, assemble
from course_tasks import SPEED, Task, tasks_of, tasks_until
from course_trees import ROOT, module_of
from course_verdict import Result, Verdict, judge, notes

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
#: Likewise where speed is measured: a thing is not faster than itself.
SPEED_CANARIES = {
    "assert False": "an assertion that fails",
    "assert_faster(pause, pause, 1.5, lambda *note: None, 'itself')": "any speed at all",
}
CANARY_FILE = """
from time import sleep

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers

{imports}

pytestmark = [{marks}]


def never(n):
    assert n != n


def pause():
    sleep(0.002)

"""
COMPARING = "from .strategies import assert_close\nfrom .tolerances import assert_close_arrays"
TIMING = f"from .{Path(SPEED).stem} import assert_faster"


def add_canaries(tree: Path, task: Task, speed: bool = False) -> dict[str, str]:
    """Write tests that must fail, under names that say nothing; return what each one means."""
    chosen = SPEED_CANARIES if speed else CANARIES
    simulated = task.simulator and not speed
    marks = f"pytest.mark.{task.mark}" + (", pytest.mark.simulator" if simulated else "")
    head = CANARY_FILE.format(marks=marks, imports=TIMING if speed else COMPARING)
    names = {f"test_{secrets.token_hex(6)}": body for body in chosen}
    bodies = "\n\n".join(f"def {name}():\n    {body}\n" for name, body in names.items())
    file = f"tests/test_{secrets.token_hex(6)}.py"
    (tree / file).write_text(head + bodies, encoding="utf-8")
    return {f"{file}::{name}": chosen[body] for name, body in names.items()}


# -- verdicts ------------------------------------------------------------------------------------


def expression(task: Task, gpu: bool) -> str:
    """Return pytest's ``-m`` for the tests that decide."""
    if task.is_simulated(gpu):
        return f"{task.mark} and simulator and not cuda"
    return task.mark if task.simulator else f"{task.mark} and not cuda"


class Expected(NamedTuple):
    """What the course has.

    Attributes:
        tests: Task → the tests that decide.
        speed: Task → those that measure its speed; empty for most.
        no_gpu: Why there is no GPU, or None.
    """

    tests: dict[str, list[str]]
    speed: dict[str, list[str]]
    no_gpu: str | None


def expected_tests(place: Workplace, tasks: list[Task]) -> Expected:
    """Return what the course has for some tasks.

    Raises:
        CourseError: If the course's own tests cannot be read.
    """
    expected = Expected({}, {}, None)
    for simulator, simulated in sorted({_how(task, place) for task in tasks}):
        own = [task for task in tasks if _how(task, place) == (simulator, simulated)]
        files = {file for task in own for file in task.tests}
        marks, no_gpu = _collected(place, files, simulated)
        expected = expected._replace(no_gpu=expected.no_gpu or no_gpu)
        keep = {"simulator"} if simulated else set()
        drop = {"cuda"} if simulated or not simulator else set()
        for task in own:
            expected.tests[task.id] = [
                test
                for test, its in marks.items()
                if test.split("::")[0] in task.tests
                and {task.mark} | keep <= its
                and not drop & its
            ]
    if any(task.speed for task in tasks):
        marks, _ = _collected(place, {SPEED}, False)
        for task in tasks:
            expected.speed[task.id] = [test for test, its in marks.items() if task.mark in its]
    for task in tasks:
        if not expected.tests[task.id] or (task.speed and not expected.speed[task.id]):
            raise CourseError(f"the course has no test, or none of speed, with mark {task.mark}")
    return expected


def _how(task: Task, place: Workplace) -> tuple[bool, bool]:
    return task.simulator, task.is_simulated(place.gpu)


def _collected(
    place: Workplace, files: set[str], simulator: bool
) -> tuple[dict[str, set[str]], str | None]:
    """Return the marks of each of the course's tests in some files, and why there is no GPU."""
    job = {"trusted": True, "tree": str(ROOT), "arguments": _arguments(ROOT, sorted(files), "")}
    records, end = place.run(job, simulator, 180.0)
    if not records or records[0]["code"] != 0:
        raise CourseError(
            f"the course's own tests cannot be collected (exit code {end.code}); run 'python "
            f"-m pytest --collect-only {' '.join(sorted(files))}' in {ROOT} and see why"
        )
    return {t: set(marks) for t, marks in records[0]["tests"].items()}, records[0]["no_gpu"]


def _arguments(tree: Path, files: list[str], chosen: str) -> list[str]:
    """Return pytest's arguments; what the tree's own settings say of them does not count."""
    settings = ["--rootdir", str(tree), "-c", str(tree / "pyproject.toml"), "-o", "addopts="]
    select = ["-m", chosen] if chosen else []
    return [*settings, "-p", "no:cacheprovider", "--tb=line", "--strict-markers", *select, *files]


def grade_task(
    place: Workplace,
    task: Task,
    expected: list[str],
    of_speed: list[str] | None = None,
    root: Path = ROOT,
) -> Result:
    """Run the tests of one task and return what became of it.

    Args:
        place: With the tree.
        task: What to grade.
        expected: The tests that decide.
        of_speed: Those that measure speed, for the task's points of speed; they run if all
            others have passed.
        root: The course.
    """
    result = Result(task.id, task.title, task.mark, possible=task.points, tests=len(expected))
    swapped: dict[Path, bytes] = {}
    if task.own_tests:  # they are judged by whether they tell right code from wrong, the course's
        for path in (place.tree / "minitorch" / "operators.py",):
            swapped[path] = path.read_bytes()
            shutil.copyfile(root / path.relative_to(place.tree), path)
    begin = time.perf_counter()
    verdict, _ = _run(place, task, expected, root)
    for path, content in swapped.items():
        path.write_bytes(content)
    result.passed, result.message = verdict.passed, verdict.message
    result.waits_for, result.speed_possible = verdict.waits_for, task.speed if of_speed else 0
    if verdict.waits_for:
        result.status = "waiting"
    elif not verdict.message:
        result.points = task.points - result.speed_possible
        if of_speed:
            verdict, records = _run(place, task, of_speed, root, speed=True)
            result.speed = notes(records, "speed")
            result.speed_points = 0 if verdict.message else task.speed
            result.points += result.speed_points
            result.message = verdict.message and f"right, but too slow: {verdict.message}"
        result.status = "failed" if result.message else "passed"
    result.seconds = round(time.perf_counter() - begin, 2)
    return result


def _run(
    place: Workplace, task: Task, expected: list[str], root: Path, speed: bool = False
) -> tuple[Verdict, list[Any]]:
    """Run tests of a task, confined, and judge them; return the records too."""
    canaries = add_canaries(place.tree, task, speed)
    canary_file = next(iter(canaries)).split("::")[0]
    files, chosen = ((SPEED,), task.mark) if speed else (task.tests, expression(task, place.gpu))
    job = {
        "trusted": False, "tree": str(place.tree), "hidden": str(root),
        "writable": [str(path) for path in place.writable.values()],
        "memory_mb": task.memory_mb, "seconds": task.seconds,
        "arguments": _arguments(place.tree, [*files, canary_file], chosen),
    }  # fmt: skip
    records, end = place.run(job, task.is_simulated(place.gpu) and not speed, task.seconds)
    (place.tree / canary_file).unlink()
    return judge(task, expected, canaries, records, end), records


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
    limits = {"seconds": seconds, "memory_mb": memory_mb}
    tasks = [replace(task, **{k: v for k, v in limits.items() if v}) for task in tasks]

    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        place = Workplace(Path(folder).resolve(), gpu)
        assemble(submission, place.tree, last)
        expected = expected_tests(place, tasks)
        print(f"{'task':5} {'':32} {'status':8} {'points':>7} {'tests':>8} {'seconds':>8}")
        for task in tasks:
            if task.simulator and not task.is_simulated(gpu) and expected.no_gpu:
                result = Result(task.id, task.title, task.mark, "blocked", possible=task.points)
                result.message = f"needs a GPU: {expected.no_gpu}"
            else:
                own = expected.tests[task.id], expected.speed.get(task.id)
                result = grade_task(place, task, *own)
            open_ = [r.task for r in results if r.task in task.needs and r.status != "passed"]
            if open_ and result.status == "failed":
                result.message += f" (it builds on {', '.join(open_)}, which has not passed)"
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
    for line in (result.message, result.speed and f"speed: {result.speed}"):
        if line:
            print(f"      {line}")
    sys.stdout.flush()


def _finish(results: list[Result], json_file: Path | None) -> int:
    blocked = [result for result in results if result.status == "blocked"]
    waiting = [result for result in results if result.status == "waiting"]
    failed = [result for result in results if result.status in ("failed", "waiting")]
    points = sum(result.points for result in results)
    possible = sum(result.possible for result in results if result not in blocked)
    print(f"points {points} of {possible}")
    if waiting:
        print(f"WAITING for tasks that are not written yet: {', '.join(r.task for r in waiting)}")
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
        _replace(json_file, json.dumps(summary, indent=2) + "\n")
    if failed:
        return 1
    return 2 if len(blocked) == len(results) else 0


def _replace(path: Path, text: str) -> None:
    """Write a file; a link of that name, which a submission may have left there, is not followed."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.absolute().parent, delete=False
    ) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
