"""What the records of a run say of a task: passed or not, why, and which other task it waits for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from course.tasks import Task
from course.workplace import MOST_WRITTEN, Ending

#: What a body that is not written yet raises.
STUB = re.compile(r"NotImplementedError: Task (\d+\.\d+): ")
#: How pytest shows a condition whose test has said already what is wrong.
RESTATED = re.compile(r"assert (False|not )|\s*\+ +(where|and) ")
Phases = dict[str, dict[str, dict[str, Any]]]


@dataclass
class Verdict:
    """What became of a task.

    Attributes:
        task: Its id.
        title: Its title.
        mark: Its pytest mark.
        status: "passed", "failed", "waiting" (for another task, which is not written yet: no
            points, and no fault of this one) or "blocked" (for a GPU: neither a pass nor a zero).
        points: Given.
        possible: Given for passing.
        message: The first that went wrong, in full; empty if nothing did.
        also: The other tests that failed, a line each.
        waits_for: The id of the task that is waited for, or empty.
        tests: How many tests decide; 0 if nothing of the task is written, and none was run.
        passed: How many of them passed.
        outside: The points by what is judged outside of the submission's process alone.
        refused: What the submission may not do and has tried.
        seconds: How long the tests took.
    """

    task: str
    title: str
    mark: str
    status: str = "failed"
    points: int = 0
    possible: int = 0
    message: str = ""
    also: list[str] = field(default_factory=list)
    waits_for: str = ""
    tests: int = 0
    passed: int = 0
    outside: int = 0
    refused: list[str] = field(default_factory=list)
    seconds: float = 0.0


def result_of(task: Task, message: str, **more: Any) -> Verdict:
    """Return a result without points."""
    return Verdict(task.id, task.title, task.mark, possible=task.points, message=message, **more)


def judge(
    task: Task, expected: list[str], values: dict[str, Any], faults: dict[str, str],
    records: list[Any], end: Ending,
) -> Verdict:  # fmt: skip
    """Judge a run.

    Args:
        task: What ran.
        expected: The tests that must have passed.
        values: Of the probes, by the course's solution.
        faults: What the text of each function lacks, or empty.
        records: Of the child, which may have forged them.
        end: How it ended.
    """
    phases: Phases = {}
    for record in records:
        if "id" in record:
            phases.setdefault(record["id"], {})[record["when"]] = record
    good = [test for test in expected if _passed(phases.get(test, {}))]
    finished = any("finished" in record for record in records)
    found = next((r["values"] for r in records if isinstance(r.get("values"), dict)), {})
    other = [name for name in values if name not in found or not same(found[name], values[name])]
    lacking = [fault for fault in faults.values() if fault]
    right = 1.0 - (len(other) + len(lacking)) / max(len(values) + len(faults), 1)
    core = [name for name in task.core if name in other or faults.get(name)]
    most = task.points // 2 if core else task.points

    def wrong(message: str, waits_for: str = "", also: Iterable[str] = ()) -> Verdict:
        honest = finished and not end.late and not end.full
        result = result_of(
            task, message, also=[*also], waits_for=waits_for, tests=len(expected),
            passed=len(good), refused=[*end.refused],
            outside=min(int(task.points * right), most) * honest,
        )  # fmt: skip
        if waits_for:
            result.status = "waiting"
        elif not message:
            result.status, result.points = "passed", task.points
        else:
            by_tests = int(task.points * len(good) / len(expected))
            result.points = min(by_tests, result.outside)
            if core and by_tests > most:
                result.message += (
                    f"\nat most half of the points: the task is about {', '.join(core)}"
                )
        return result

    running = next((r["begun"] for r in reversed(records) if "begun" in r), "")
    where = f", in {_short(running)}" if running else ""
    if finished:
        where = ", when the tests of the task had run"
    if end.late:
        return wrong(f"stopped after {task.seconds} s{where}")
    if end.full:
        return wrong(f"stopped when its files had more than {MOST_WRITTEN >> 20} MB{where}")
    for record in records:
        if "broken" in record:
            return wrong(f"a file cannot be imported. {record['message']}")
    failures = [
        (test, record)
        for test in expected
        for record in phases.get(test, {}).values()
        if record["outcome"] != "passed"
    ]
    if failures:
        stubs = [STUB.search(record["message"]) for _, record in failures]
        others = [stub[1] if stub and stub[1] != task.id else "" for stub in stubs]
        if all(others) and finished:
            first = min(others, key=lambda name: tuple(map(int, name.split("."))))
            return wrong(f"waits for task {first}, which is not written yet", first)
        first = failures.pop(others.index("") if "" in others else 0)
        message = _text(*first, task)
        if STUB.search(message):  # what was drawn says nothing
            message = message.split("\n")[0]
        also = dict.fromkeys(_brief(*other, task) for other in failures)
        return wrong(message, also=(line for line in also if line not in message))
    if not finished:
        how = f"signal {-end.code}" if end.code < 0 else f"exit code {end.code}"
        return wrong(
            f"the run ended early ({how}) after {len(good)} of {len(expected)} tests"
            f"{where or ', before the first test'}; the memory limit is {task.memory_mb} MB"
        )
    missing = [test for test in expected if test not in good]
    if missing:
        return wrong(f"{len(missing)} of {len(expected)} tests did not run: {_short(missing[0])}")
    if other:
        return wrong(
            f"the tests passed, but {len(other)} of {len(values)} calls with other arguments gave wrong "
            f"results, or none: {', '.join(other)}"
        )
    if lacking:
        return wrong(f"the tests passed, but the text is judged too: {'; '.join(lacking)}")
    return wrong("")


def same(got: Any, expected: Any) -> bool:
    """Compare results and their types, with a tolerance for rounding."""
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(got, float) and isinstance(expected, float):
        both_nan = math.isnan(got) and math.isnan(expected)
        return both_nan or math.isclose(got, expected, rel_tol=1e-5, abs_tol=1e-7)
    return type(got) is type(expected) and got == expected


def _passed(phases: dict[str, Any]) -> bool:
    outcomes = [phases.get(when, {}).get("outcome") for when in ("setup", "call", "teardown")]
    return outcomes == ["passed"] * 3


def _short(test: str) -> str:
    return test.split("::")[-1]


def _brief(test: str, record: dict[str, Any], task: Task) -> str:
    """Return what went wrong in one line; the same for each test that a missing body fails."""
    line = _text(test, record, task).split("\n")[0]
    stub = STUB.search(line)
    return line[stub.end(1) - len(stub[1]) - len("Task ") :] if stub else line


def _text(test: str, record: dict[str, Any], task: Task) -> str:
    """Return what went wrong in a test: its name and the whole error, without empty lines."""
    lines = [line.rstrip() for line in record["message"].splitlines() if line.strip()]
    lines = [line for line in lines if "@reproduce_failure" not in line]
    if lines and re.match(r"AssertionError: \S", lines[0]):  # the test says what is wrong
        lines = [line for line in lines if not RESTATED.match(line)]
    text = "\n".join(lines) or record["outcome"]
    if re.match(r"\w+(Error|Exception):\n", text):  # NumPy's assertions begin with an empty line
        text = text.replace("\n", " ", 1)
    if text.startswith(("MemoryError", "numpy._core._exceptions._ArrayMemoryError")):
        text = f"out of memory, the limit is {task.memory_mb} MB ({text})"
    return f"{_short(test)}: {text}"
