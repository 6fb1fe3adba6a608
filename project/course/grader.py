"""Grades a tree: the tests of each task, in a process of their own, from the course and not the student.

The tree that is graded is made of the course's files, the files of the student that have tasks in them
and any that the student has added. Points are given for each test of the course that has run and passed,
but no more than for what is judged outside of the submission's process: the values that it computes from
drawn arguments, see ``probing``, and the text of its kernels, see ``kernel_text``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from course.assembly import assemble
from course.kernel_text import faults
from course.markers import ROOT, CourseError
from course.options import Options
from course.report import HEAD, finish, refuse_unwritable, row_of
from course.scratch import scratch_folder
from course.starter_trees import module_of, write_tree
from course.tasks import Task, expression
from course.verdict import Verdict, judge, result_of
from course.workplace import Workplace


class Expected(NamedTuple):
    """What the course has.

    Attributes:
        tests: Task → the tests that decide.
        no_gpu: Why there is no GPU, or None.
        seeds: Task → the secret seed of its probes.
        values: Task → what the course's solution computes from it.
    """

    tests: dict[str, list[str]]
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
    expected = Expected({}, None, seeds, {})
    for device, emulated in sorted({_how(task, place) for task in tasks}):
        own = [task for task in tasks if _how(task, place) == (device, emulated)]
        files = {file for task in own for file in task.tests}
        own_seeds = {task.id: seeds[task.id] for task in own}
        (found, *values) = _collected(place, files, own_seeds, emulated)
        expected = expected._replace(no_gpu=expected.no_gpu or found["no_gpu"])
        expected.values.update((record["task"], record["values"]) for record in values)
        marks = {test: set(its) for test, its in found["tests"].items()}
        keep = {"emulated"} if emulated else set()
        drop = {"cuda"} if emulated or not device else set()
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
    for task in tasks:
        if not expected.tests[task.id]:
            raise CourseError(f"the course has no test with mark {task.mark}")
        values = expected.values.get(task.id) or {"any call": None}
        missing = [name for name, value in values.items() if value is None]
        if missing and not _lacks_gpu(place, task, expected):
            raise CourseError(
                f"the course's own solution of task {task.id} gives no value of "
                f"{', '.join(missing)}; run its tests"
            )
    return expected


def _lacks_gpu(place: Workplace, task: Task, expected: Expected) -> bool:
    return task.emulated and not task.runs_emulated(place.gpu) and expected.no_gpu is not None


def _how(task: Task, place: Workplace) -> tuple[bool, bool]:
    return task.emulated, task.runs_emulated(place.gpu)


def _collected(
    place: Workplace, files: set[str], seeds: dict[str, int], emulated: bool
) -> list[dict[str, Any]]:
    """Return the course's tests in some files with their marks, and then the values of probes."""
    arguments = _arguments(place.solved, sorted(files), "")
    job = {"trusted": True, "tree": str(place.solved), "arguments": arguments, "seeds": seeds}
    records, end = place.run(job, emulated, 180.0)
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


def grade_task(place: Workplace, task: Task, expected: Expected) -> Verdict:
    """Run the tests of one task, confined, and return what became of it.

    Args:
        place: With the tree.
        task: What to grade.
        expected: Of the course.
    """
    if _lacks_gpu(place, task, expected):
        return result_of(task, f"needs a GPU: {expected.no_gpu}", status="blocked")
    operators = place.tree / "minitorch" / "operators.py"
    theirs, lacking = operators.read_bytes(), faults(place.tree, task.id)
    if task.own_tests:  # they are judged by whether they tell right code from wrong, the course's
        shutil.copyfile(ROOT / "minitorch" / "operators.py", operators)
    job = {
        "trusted": False, "tree": str(place.tree), "seeds": {task.id: expected.seeds[task.id]},
        "memory_mb": task.memory_mb, "seconds": task.seconds,
        "arguments": _arguments(place.tree, [*task.tests], expression(task, place.gpu)),
    }  # fmt: skip
    begin = time.perf_counter()
    records, end = place.run(job, task.runs_emulated(place.gpu), task.seconds)
    operators.write_bytes(theirs)
    tests, values = expected.tests[task.id], expected.values[task.id]
    try:
        result = judge(task, tests, values, lacking, records, end)
    except (AttributeError, KeyError, TypeError, ValueError):
        text = "the process has written a report that makes no sense"
        result = result_of(task, text, tests=len(tests), refused=[*end.refused])
    result.seconds = round(time.perf_counter() - begin, 2)
    return result


def _grade_all(
    places: list[Workplace], tasks: list[Task], expected: Expected
) -> Generator[Verdict, None, None]:
    """Yield the result of each task, in order; each is graded in a place that is free."""
    free: SimpleQueue[Workplace] = SimpleQueue()
    for place in places:
        free.put(place)

    def in_free_place(task: Task) -> Verdict:
        place = free.get()
        try:
            return grade_task(place, task, expected)
        finally:
            free.put(place)

    pool = ThreadPoolExecutor(len(places))
    try:
        yield from pool.map(in_free_place, tasks)
    finally:  # after an interrupt too
        pool.shutdown(wait=False, cancel_futures=True)
        for place in places:
            place.close()
        pool.shutdown()


@dataclass
class Session:
    """Gradings in one folder, one after the other or at the same time.

    What the course expects of some tasks is computed once, with one secret seed for each task.

    Attributes:
        folder: For all files of the gradings.
        closed: Whether it was interrupted; a grading then ends without a result.
    """

    folder: Path
    closed: bool = False
    _expected: dict[tuple[str, ...], Expected] = field(default_factory=dict)
    _places: list[Workplace] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def place(self, gpu: bool) -> Workplace:
        """Return an empty place."""
        with self._lock:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            self._places.append(place := Workplace(folder, gpu))
            place.closed = self.closed
            return place

    def expected(self, tasks: list[Task], gpu: bool) -> Expected:
        """Return what the course has for some tasks."""
        with self._lock:
            key = tuple(task.id for task in tasks)
            if key not in self._expected:
                self._expected[key] = expected_tests(self.place(gpu), tasks)
            return self._expected[key]

    def close(self) -> None:
        """End what runs, and start nothing more."""
        self.closed = True
        for place in self._places:
            place.close()


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
    expected = session.expected(tasks, gpu)
    say(HEAD)
    with closing(_grade_all(places, tasks, expected)) as graded:
        for task, result in zip(tasks, graded, strict=True):
            open_ = [r.task for r in results if r.task in task.needs and r.status != "passed"]
            if open_ and result.status == "failed":
                result.message += f" (it builds on {', '.join(open_)}, which has not passed)"
                result.points = result.outside  # tests call what it builds on too
            results.append(result)
            say(row_of(result))
    if session.closed:
        raise CourseError("interrupted")
    return finish(results, json_file, say)
