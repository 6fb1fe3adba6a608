"""Grades a tree: the tests of each task, in a process of their own, from the course and not the student.

The tree that is graded is made of the course's files, the files of the student that have tasks in them
and any that the student has added. Points are given for each test of the course that has run and passed,
but no more than for what is judged outside of the submission's process: the values that it computes from
drawn arguments, see ``probing``, and the text of its kernels, see ``kernel_text``.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from course.assembly import assemble
from course.expected import Expected, Session, arguments, device_of, lacks_gpu
from course.kernel_text import faults
from course.markers import ROOT, CourseError, unwritten
from course.options import Options
from course.report import HEAD, finish, refuse_unwritable, row_of
from course.scratch import scratch_folder
from course.starter_trees import module_of
from course.tasks import Task, expression
from course.verdict import Verdict, judge, result_of
from course.workplace import Ending, Workplace


def grade_task(place: Workplace, task: Task, expected: Expected) -> Verdict:
    """Run the tests of one task, confined, and return what became of it.

    Args:
        place: With the tree.
        task: What to grade.
        expected: Of the course.
    """
    if lacks_gpu(place, task, expected):
        return result_of(task, f"needs a GPU: {expected.no_gpu}", status="blocked")
    return _judged(task, _run(place, task, expected.seeds[task.id]), expected)


class _Run(NamedTuple):
    """What the process of a submission has reported, and what the text of each function lacks."""

    records: list[Any]
    end: Ending
    lacking: dict[str, str]
    seconds: float


def _run(place: Workplace, task: Task, seed: int) -> _Run:
    """Run the tests and the probes of one task, confined."""
    operators = place.tree / "minitorch" / "operators.py"
    theirs, lacking = operators.read_bytes(), faults(place.tree, task.id)
    if task.own_tests:  # they are judged by whether they tell right code from wrong, the course's
        shutil.copyfile(ROOT / "minitorch" / "operators.py", operators)
    job = {
        "trusted": False, "tree": str(place.tree), "seeds": {task.id: seed},
        "memory_mb": task.memory_mb, "seconds": task.seconds,
        "arguments": arguments(place.tree, [*task.tests], expression(task, place.gpu)),
    }  # fmt: skip
    begin = time.perf_counter()
    records, end = place.run(job, task.runs_emulated(place.gpu), task.seconds)
    operators.write_bytes(theirs)
    return _Run(records, end, lacking, round(time.perf_counter() - begin, 2))


def _judged(task: Task, run: _Run, expected: Expected) -> Verdict:
    tests, values = expected.tests[task.id], expected.values[task.id]
    try:
        result = judge(task, tests, values, run.lacking, run.records, run.end)
    except (AttributeError, KeyError, TypeError, ValueError):
        text = "the process has written a report that makes no sense"
        result = result_of(task, text, tests=len(tests), refused=[*run.end.refused])
    result.seconds = run.seconds
    return result


def _grade_all(
    places: list[Workplace], tasks: list[Task], session: Session
) -> Generator[Verdict, None, None]:
    """Yield the result of each task, in order; each is graded in a place that is free.

    What the course expects is computed meanwhile, of tasks without kernels first.
    """
    free: SimpleQueue[Workplace] = SimpleQueue()
    for place in places:
        free.put(place)

    kinds, stubs = {task.id: device_of(task, places[0]) for task in tasks}, dict[str, list[str]]()
    if not places[0].gpu:
        with suppress(CourseError):  # a marker has no partner; the tests say which
            stubs = unwritten(places[0].tree)
    ahead, pool = ThreadPoolExecutor(1), ThreadPoolExecutor(len(places))
    expected = {
        kind: ahead.submit(
            session.expected, [task for task in tasks if kinds[task.id] == kind], places[0].gpu
        )
        for kind in sorted({kind for task, kind in kinds.items() if task not in stubs})
    }

    def in_free_place(task: Task) -> Verdict:
        if task.id in stubs:  # marked without tests: nothing of it could pass
            first, *others = dict.fromkeys(stubs[task.id])
            return result_of(task, f"NotImplementedError: {first}", also=others)
        place = free.get()
        try:
            found = expected[kinds[task.id]]
            if place.gpu:  # if there is one
                return grade_task(place, task, found.result())
            return _judged(task, _run(place, task, session.seeds[task.id]), found.result())
        finally:
            free.put(place)

    try:
        yield from pool.map(in_free_place, tasks)
    except BaseException:  # an interrupt too
        session.close()
        raise
    finally:
        for each in (ahead, pool):
            each.shutdown(cancel_futures=True)


def _print(text: str) -> None:
    print(text, flush=True)


def grade(
    submission: Path,
    options: Options,
    json_file: Path | None = None,
    session: Session | None = None,
    say: Callable[[str], None] = _print,
) -> int:
    """Grade a tree, print a table and return the exit code.

    Args:
        submission: The student's tree.
        options: What to grade, and how.
        json_file: Where the result goes as JSON too.
        session: That the grading is a part of; its own when None.
        say: Prints text.

    Returns:
        0 if nothing failed, 1 if something did, 2 if everything was blocked.

    Raises:
        CourseError: If the tree cannot be graded.
    """
    if session is None:
        with scratch_folder() as folder:
            return grade(submission, options, json_file, Session(folder), say)
    submission = submission.resolve()
    if json_file is not None:
        refuse_unwritable(json_file)
    if not (submission / "minitorch").is_dir():
        raise CourseError(f"{submission} has no folder minitorch; name the student's tree")
    last = module_of(submission)
    tasks, gpu = options.tasks(submission, last), options.gpu
    results: list[Verdict] = []
    places = [
        session.place(gpu) for _ in range(1 if gpu else min(options.jobs, os.cpu_count() or 1))
    ]
    for place in places:
        assemble(submission, place.tree, last)
    say(HEAD)
    with closing(_grade_all(places, tasks, session)) as graded:
        for task, result in zip(tasks, graded, strict=True):
            open_ = [r.task for r in results if r.task in task.needs and r.status != "passed"]
            if open_ and result.status == "failed":
                result.message += f" (it builds on {', '.join(open_)}, which has not passed)"
                result.points = result.outside  # tests call what it builds on too
            results.append(result)
            say(row_of(result))
    for place in places:  # a folder may have many submissions
        shutil.rmtree(place.tree.parent, ignore_errors=True)
    if session.closed:
        raise CourseError("interrupted")
    return finish(results, json_file, say)
