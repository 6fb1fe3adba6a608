"""Every wrong call of the tables in tests/bad_calls/*.py: the number of calls, and the error of each.

The tables are walked by tests/bad_calls/test_bad_calls.py in a process of its own, so that a call that ends
the interpreter is seen and named.  A case holds if the call raises the documented type, its message has the
words that say what was given, what was expected and what to do, and no operand has changed: bits, strides,
gradients.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bench.kit import ROOT, Case, Figure, Measurement, Record, Run
from bench.processes import child_command

TESTS = ROOT / "tests" / "bad_calls" / "test_bad_calls.py"


class Notes:
    """Notes of each case as it begins and ends, a line of JSON each; nothing is lost with the process."""

    def __init__(self, path: str):
        self.file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 (to the end)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a case begins."""
        print(json.dumps({"begins": nodeid}), file=self.file)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how it ended."""
        properties = dict(report.user_properties)
        if report.when == "call" and "bad_call" in properties:
            area, case = properties["bad_call"]
            what = {"area": area, "case": case, "raised": properties.get("raised")}
            print(json.dumps({**what, "holds": report.passed}), file=self.file)


def child(file: str) -> None:
    """Walk the tables in this process."""
    os.environ.pop("PYTEST_ADDOPTS", None)
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", str(TESTS)]
    sys.exit(int(pytest.main(options, plugins=[Notes(file)])))


def walk() -> tuple[list[Record], str | None]:
    """Return the notes of the cases that ended, and the one that ended the process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "notes"
        environment = os.environ | {"PYTHONFAULTHANDLER": "1"}
        done = subprocess.run(child_command(child, str(path)), cwd=ROOT, env=environment)
        notes = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    begun = [note["begins"] for note in notes if "begins" in note]
    ended = [note for note in notes if "case" in note]
    return ended, begun[-1] if done.returncode < 0 and begun else None


def cases(run: Run) -> Iterator[Case]:
    yield {}, partial(walked, run)


def walked(run: Run) -> None:
    notes, dead_at = walk()
    failed = sorted({note["case"] for note in notes if not note["holds"]})
    areas = Counter(area for area, _ in {(note["area"], note["case"]) for note in notes})
    raised = Counter(note["raised"] or "nothing" for note in notes)
    run.note(
        cases=len({note["case"] for note in notes}), calls=len(notes), failed=len(failed),
        processes_dead=int(dead_at is not None), by_area=dict(areas), by_type=dict(raised.most_common()),
        which_failed=failed + ([dead_at] if dead_at else []),
    )  # fmt: skip


def figures(record: Record) -> list[Figure]:
    wrong = record["failed"] + record["processes_dead"]
    return [Figure("wrong errors", wrong, 0, is_most=True), Figure("calls", record["calls"], 1)]


MEASUREMENT = Measurement(
    "bad_calls", "Does every wrong call raise the documented error, and change nothing?", cases,
    {"cpu": {"normal": {}}}, figures=figures, minutes={"cpu": 1},
    paths=("kernels", "minitorch", "tests/bad_calls"),
    folder="reliability",
)  # fmt: skip
