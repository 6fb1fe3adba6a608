"""What the course expects of tasks: its tests, and the values of probes by its own solutions."""

from __future__ import annotations

import secrets
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from course.markers import ROOT, CourseError
from course.starter_trees import write_tree
from course.tasks import TASKS, Task
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


def drawn_seeds() -> dict[str, int]:
    """Return a secret seed for the probes of each task."""
    return {task.id: secrets.randbits(62) for task in TASKS}


def expected_tests(
    place: Workplace, tasks: list[Task], seeds: dict[str, int] | None = None
) -> Expected:
    """Return what the course has for some tasks.

    A solved tree of their module is asked, which needs only the packages that a student has.

    Args:
        place: An empty one.
        tasks: The tasks.
        seeds: Of their probes; new ones when None.

    Raises:
        CourseError: If the course's own tests cannot be read.
    """
    write_tree(max(task.module for task in tasks), place.solved, lambda region: None)
    seeds = seeds or drawn_seeds()
    expected = Expected({}, None, seeds, {})
    for device, emulated in sorted({device_of(task, place) for task in tasks}):
        own = [task for task in tasks if device_of(task, place) == (device, emulated)]
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
        if missing and not lacks_gpu(place, task, expected):
            raise CourseError(
                f"the course's own solution of task {task.id} gives no value of "
                f"{', '.join(missing)}; run its tests"
            )
    return expected


def lacks_gpu(place: Workplace, task: Task, expected: Expected) -> bool:
    """Tell whether a task needs a GPU, and there is none."""
    return task.emulated and not task.runs_emulated(place.gpu) and expected.no_gpu is not None


def device_of(task: Task, place: Workplace) -> tuple[bool, bool]:
    """Tell whether a task has kernels, and whether they run on the emulated GPU."""
    return task.emulated, task.runs_emulated(place.gpu)


def _collected(
    place: Workplace, files: set[str], seeds: dict[str, int], emulated: bool
) -> list[dict[str, Any]]:
    """Return the course's tests in some files with their marks, and then the values of probes."""
    job = {
        "trusted": True, "tree": str(place.solved), "seeds": seeds,
        "arguments": arguments(place.solved, sorted(files), ""),
    }  # fmt: skip
    records, end = place.run(job, emulated, 180.0)
    if not records or records[0]["code"] != 0:
        if text := missing():
            raise CourseError(text)
        raise CourseError(
            f"the course's own tests cannot be collected (exit code {end.code}); run 'python "
            f"-m pytest --collect-only {' '.join(sorted(files))}' in {ROOT} and see why"
        )
    return records


def missing() -> str:
    """Return which packages of the grader are missing, and the command that installs them."""
    names = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if not names:
        return ""
    return (
        f"the grader needs {' and '.join(names)}, which {sys.executable} lacks; in {ROOT} run\n"
        f'  {sys.executable} -m pip install -e ".[course]"'
    )


def arguments(tree: Path, files: list[str], chosen: str) -> list[str]:
    """Return pytest's arguments; what the tree's own settings say of them does not count."""
    settings = ["--rootdir", str(tree), "-c", str(tree / "pyproject.toml"), "-o", "addopts="]
    select = ["-m", chosen] if chosen else []
    return [*settings, "-p", "no:cacheprovider", "--tb=line", "--strict-markers", *select, *files]


@dataclass
class Session:
    """Gradings in one folder, one after the other or at the same time.

    What the course expects of some tasks is computed once, with one secret seed for each task.

    Attributes:
        folder: For all files of the gradings.
        closed: Whether it was interrupted; a grading then ends without a result.
        seeds: Task → the secret seed of its probes.
    """

    folder: Path
    closed: bool = False
    seeds: dict[str, int] = field(default_factory=drawn_seeds)
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
                self._expected[key] = expected_tests(self.place(gpu), tasks, self.seeds)
            return self._expected[key]

    def close(self) -> None:
        """End what runs, and start nothing more."""
        self.closed = True
        for place in [*self._places]:
            place.close()
