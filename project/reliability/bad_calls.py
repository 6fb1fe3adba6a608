"""Every wrong call of the tables in tests/bad_calls/*.py: the number of calls, and the error of each.

The tables are walked by tests/bad_calls/test_bad_calls.py in a worker of pytest-xdist, which names a call
that ends the interpreter.  A case holds if the call raises the documented type, its message has the words
that say what was given, what was expected and what to do, and no operand has changed: bits, strides,
gradients.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.kit import ROOT, Figure, Measurement, Record, Run

from reliability.junit import tests_of

TESTS = ROOT / "tests" / "bad_calls" / "test_bad_calls.py"


def cases(run: Run) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-n", "1", "-p", "no:cacheprovider", f"--junitxml={report}", str(TESTS)]
        own = {**os.environ, "PYTEST_ADDOPTS": "", "PYTHONFAULTHANDLER": "1"}
        subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, env=own)
        tests = tests_of(report)
    calls = [one for one in tests if "case" in one.properties]
    dead = [one.test for one in tests if "crashed while running" in one.text]
    failed = sorted({one.properties["case"] for one in calls if one.how == "failed"})
    found = {(one.properties["area"], one.properties["case"]) for one in calls}
    raised = Counter(one.properties.get("raised", "nothing") for one in calls)
    return {
        "cases": len(found), "calls": len(calls), "failed": len(failed), "processes_dead": len(dead),
        "by_area": dict(Counter(area for area, _ in found)), "by_type": dict(raised.most_common()),
        "which_failed": failed + dead,
    }  # fmt: skip


def figures(record: Record) -> list[Figure]:
    wrong = record["failed"] + record["processes_dead"]
    return [Figure("wrong errors", wrong, 0, is_most=True), Figure("calls", record["calls"], 1)]


MEASUREMENT = Measurement(
    "bad_calls", "Does every wrong call raise the documented error, and change nothing?", cases,
    {"cpu": {"normal": {}}}, figures=figures, minutes={"cpu": 1},
    paths=("kernels", "minitorch", "tests/bad_calls"), folder="reliability",
)  # fmt: skip
