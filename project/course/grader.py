"""Grades a tree: the tests of each task, in a process of their own, from the course and not the student.

The tree that is graded is made of the course's files, the files of the student that have tasks in them
and any that the student has added. Points are given for each test of the course that has run and passed,
but no more than for the values that the submission computes from drawn arguments, which are compared
with the course's outside of its process: see ``probing``.

What is right may have to be fast as well, for some of the points: as a ratio of two times, measured when
everything else has passed. Tasks run beside each other; speed is measured while no other task runs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from course.markers import ROOT, CourseError
from course.report import finish, print_row, refuse_unwritable
from course.starter_trees import module_of, write_tree
from course.tasks import SPEED, Task, expression, tasks_of
from course.verdict import Result, Verdict, judge, notes
from course.workplace import Workplace, assemble


class Expected(NamedTuple):
    """What the course has.

    Attributes:
        tests: Task → the tests that decide.
        speed: Task → those that measure its speed; empty for most.
        no_gpu: Why there is no GPU, or None.
        seeds: Task → the secret seed of its probes.
        values: Task → what the course's solution computes from it.
    """

    tests: dict[str, list[str]]
    speed: dict[str, list[str]]
    no_gpu: str | None
    seeds: dict[str, int]
    values: dict[str, dict[str, Any]]


def expected_tests(place: Workplace, tasks: list[Task]) -> Expected:
    """Return what the course has for some tasks.

    A solved tree of their module is asked, which needs only the packages that a student has.

    Raises:
        CourseError: If the course's own tests cannot be read.
    """
    write_tree(max(task.module for task in tasks), place.solved, lambda region: None)
    seeds = {task.id: secrets.randbits(62) for task in tasks}
    expected = Expected({}, {}, None, seeds, {})
    for simulator, simulated in sorted({_how(task, place) for task in tasks}):
        own = [task for task in tasks if _how(task, place) == (simulator, simulated)]
        files = {file for task in own for file in task.tests}
        files |= {SPEED for task in own if task.speed}
        own_seeds = {task.id: seeds[task.id] for task in own}
        (found, *values) = _collected(place, files, own_seeds, simulated)
        expected = expected._replace(no_gpu=expected.no_gpu or found["no_gpu"])
        expected.values.update((record["task"], record["values"]) for record in values)
        marks = {test: set(its) for test, its in found["tests"].items()}
        keep = {"simulator"} if simulated else set()
        drop = {"cuda"} if simulated or not simulator else set()
        for task in own:
            found = [
                test
                for test, its in marks.items()
                if test.split("::")[0] in task.tests
                and {task.mark} | keep <= its
                and not drop & its
            ]
            # What fails first is shown in full.
            found.sort(key=lambda test: task.tests.index(test.split("::")[0]))
            expected.tests[task.id] = found
            expected.speed[task.id] = [
                test for test, its in marks.items() if test.startswith(SPEED) and task.mark in its
            ]
    for task in tasks:
        if not expected.tests[task.id] or (task.speed and not expected.speed[task.id]):
            raise CourseError(f"the course has no test, or none of speed, with mark {task.mark}")
        if not expected.values.get(task.id) and not expected.no_gpu:
            raise CourseError(
                f"the course's own solution of task {task.id} gives no values; run its tests"
            )
    return expected


def _how(task: Task, place: Workplace) -> tuple[bool, bool]:
    return task.simulator, task.is_simulated(place.gpu)


def _collected(
    place: Workplace, files: set[str], seeds: dict[str, int], simulator: bool
) -> list[dict[str, Any]]:
    """Return the course's tests in some files with their marks, and then the values of probes."""
    arguments = _arguments(place.solved, sorted(files), "")
    job = {"trusted": True, "tree": str(place.solved), "arguments": arguments, "seeds": seeds}
    records, end = place.run(job, simulator, 180.0)
    if not records or records[0]["code"] != 0:
        if missing := _missing():
            raise CourseError(missing)
        raise CourseError(
            f"the course's own tests cannot be collected (exit code {end.code}); run 'python "
            f"-m pytest --collect-only {' '.join(sorted(files))}' in {ROOT} and see why"
        )
    return records


def _missing() -> str:
    """Return which packages of the grader are missing, and the command that installs them."""
    names = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if not names:
        return ""
    return (
        f"the grader needs {' and '.join(names)}, which {sys.executable} lacks; in {ROOT} run\n"
        f'  {sys.executable} -m pip install -e ".[course]"'
    )


def _arguments(tree: Path, files: list[str], chosen: str) -> list[str]:
    """Return pytest's arguments; what the tree's own settings say of them does not count."""
    settings = ["--rootdir", str(tree), "-c", str(tree / "pyproject.toml"), "-o", "addopts="]
    select = ["-m", chosen] if chosen else []
    return [*settings, "-p", "no:cacheprovider", "--tb=line", "--strict-markers", *select, *files]


def grade_task(place: Workplace, task: Task, expected: Expected) -> Result:
    """Run the tests of one task and return what became of it.

    Args:
        place: With the tree.
        task: What to grade.
        expected: Of the course.
    """
    return _grade_fast(place, task, _grade_right(place, task, expected), expected)


def _grade_right(place: Workplace, task: Task, expected: Expected) -> Result:
    """Run the tests that decide; the points of speed are open still."""
    tests = expected.tests[task.id]
    result = Result(task.id, task.title, task.mark, possible=task.points, tests=len(tests))
    operators = place.tree / "minitorch" / "operators.py"
    theirs = operators.read_bytes()
    if task.own_tests:  # they are judged by whether they tell right code from wrong, the course's
        shutil.copyfile(ROOT / "minitorch" / "operators.py", operators)
    begin = time.perf_counter()
    verdict, _ = _run(place, task, tests, expected)
    operators.write_bytes(theirs)
    result.passed, result.message, result.also = verdict.passed, verdict.message, [*verdict.also]
    result.waits_for, result.speed_possible = verdict.waits_for, task.speed
    result.refused = [*verdict.refused]
    if verdict.waits_for:
        result.status = "waiting"
    elif not verdict.message:
        result.status, result.points = "passed", task.points - task.speed
    elif verdict.honest:
        right = int((task.points - task.speed) * verdict.right)
        result.points = min(task.points_for(verdict.passed, len(tests)), right)
    result.seconds = round(time.perf_counter() - begin, 2)
    return result


def _grade_fast(place: Workplace, task: Task, result: Result, expected: Expected) -> Result:
    """Measure what is right, if that gives points; return the result with them."""
    if not task.speed or result.status != "passed":
        return result
    begin = time.perf_counter()
    verdict, records = _run(place, task, expected.speed[task.id], speed=True)
    seconds = round(result.seconds + time.perf_counter() - begin, 2)
    measured = replace(result, speed=notes(records, "speed"), seconds=seconds)
    measured.refused = [*dict.fromkeys((*result.refused, *verdict.refused))]
    if verdict.message:
        slow = f"right, but too slow: {verdict.message}"
        return replace(measured, status="failed", message=slow)
    points = result.points + task.speed
    return replace(measured, points=points, speed_points=task.speed)


def _run(
    place: Workplace, task: Task, tests: list[str], expected: Expected | None = None,
    speed: bool = False,
) -> tuple[Verdict, list[Any]]:  # fmt: skip
    """Run tests of a task, confined, and judge them; return the records too."""
    files, chosen = task.tests, expression(task, place.gpu)
    if speed:
        files, chosen = (SPEED,), task.mark
    seeds, values = {}, {}
    if expected is not None:
        seeds, values = {task.id: expected.seeds[task.id]}, expected.values[task.id]
    job = {
        "trusted": False, "tree": str(place.tree), "seeds": seeds,
        "memory_mb": task.memory_mb, "seconds": task.seconds,
        "arguments": _arguments(place.tree, [*files], chosen),
    }  # fmt: skip
    simulator = task.is_simulated(place.gpu) and not speed
    records, end = place.run(job, simulator, task.seconds, optimised=speed)
    try:
        return judge(task, tests, values, records, end), records
    except (AttributeError, KeyError, TypeError, ValueError):
        return Verdict(
            0, "the process has written a report that makes no sense", refused=end.refused
        ), []


def _grade_all(
    places: list[Workplace], tasks: list[Task], expected: Expected
) -> Generator[Result, None, None]:
    """Yield the result of each task, in order.

    Module after module: its tasks beside each other, each in a place that is free, and then how fast
    they are, one by one.
    """
    free: SimpleQueue[Workplace] = SimpleQueue()
    for place in places:
        free.put(place)

    def right(task: Task) -> Result:
        place = free.get()
        try:
            blocked = task.simulator and not task.is_simulated(place.gpu) and expected.no_gpu
            if blocked:
                text = f"needs a GPU: {expected.no_gpu}"
                return Result(
                    task.id, task.title, task.mark, "blocked", possible=task.points, message=text
                )
            return _grade_right(place, task, expected)
        finally:
            free.put(place)

    pool = ThreadPoolExecutor(len(places))
    try:
        for _, tasks_of_module in groupby(tasks, lambda task: task.module):
            group = list(tasks_of_module)
            runs = [pool.submit(right, task) for task in group]
            for task, run in zip(group, runs, strict=True):
                result = run.result()
                if task.speed and result.status == "passed":
                    wait(runs)
                yield _grade_fast(places[0], task, result, expected)
    finally:  # after an interrupt too
        pool.shutdown(wait=False, cancel_futures=True)
        for place in places:
            place.close()
        pool.shutdown()


def grade(
    submission: Path,
    chosen: list[Task],
    module: int | None = None,
    json_file: Path | None = None,
    gpu: bool = False,
    seconds: int | None = None,
    memory_mb: int | None = None,
    jobs: int = 2,
) -> int:
    """Grade a tree, print a table and return the exit code.

    Args:
        submission: The student's tree.
        chosen: The tasks; those of ``module`` if empty.
        module: The module of the tree when None.
        json_file: Where the result goes as JSON too.
        gpu: Run CUDA tasks on the GPU; without one they are blocked, neither passed nor failed.
        seconds: Time limit of each task, in place of its own.
        memory_mb: Memory limit of each task, likewise.
        jobs: Tasks that are graded at the same time; on a GPU, which they would share, one.

    Returns:
        0 if nothing failed, 1 if something did, 2 if everything was blocked.

    Raises:
        CourseError: If the tree cannot be graded.
    """
    submission = submission.resolve()
    if json_file is not None:
        refuse_unwritable(json_file)
    if not (submission / "minitorch").is_dir():
        raise CourseError(f"{submission} has no folder minitorch; name the student's tree")
    last = module_of(submission)
    tasks = chosen or tasks_of(last if module is None else module)
    late = [task.id for task in tasks if task.module > last]
    if late or not tasks:
        raise CourseError(
            f"{submission} is the tree of module {last}; it has no task {late or module}"
        )
    limits = {"seconds": seconds, "memory_mb": memory_mb}
    tasks = [replace(task, **{k: v for k, v in limits.items() if v}) for task in tasks]

    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        places = [
            Workplace(Path(folder).resolve() / str(i), gpu)
            for i in range(1 if gpu else min(jobs, os.cpu_count() or 1))
        ]
        for place in places:
            assemble(submission, place.tree, last)
        expected = expected_tests(places[0], tasks)
        print(f"{'task':5} {'':32} {'status':8} {'points':>7} {'tests':>8} {'seconds':>8}")
        with closing(_grade_all(places, tasks, expected)) as graded:
            for task, result in zip(tasks, graded, strict=True):
                open_ = [r.task for r in results if r.task in task.needs and r.status != "passed"]
                if open_ and result.status == "failed":
                    result.message += f" (it builds on {', '.join(open_)}, which has not passed)"
                results.append(result)
                print_row(result)
    return finish(results, json_file)
