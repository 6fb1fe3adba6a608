"""Every part of a run of ``.ci/run`` by name: how it ended and how long it took."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from bench.kit import ROOT, Figure, Measurement, Record, Run

COMMAND = ".ci/run"
#: Minutes that a run may take on two cores.
MOST = 25
_PART = re.compile(r"^(passed|FAILED) +(\d+) s  (.+)$", re.MULTILINE)
_TIME = re.compile(r"^(\d+) minutes (\d+) seconds in all$", re.MULTILINE)


def cases(run: Run) -> Record:
    if run.log:
        output = Path(run.log).read_text(encoding="utf-8")
    else:
        shown = f"'{ROOT / COMMAND}' | tee /dev/stderr"
        output = subprocess.run(shown, shell=True, stdout=subprocess.PIPE, text=True).stdout
    *_, total = [None, *_TIME.finditer(output)]
    parts = _PART.findall(output, total.end()) if total else []
    if total is None or not parts:
        sys.exit(f"this is no output of a whole run of {COMMAND}; keep all of its lines")
    took = int(total[1]) + int(total[2]) / 60
    run.rows += [{"part": part, "ended": how, "seconds": int(s)} for how, s, part in parts]
    passed = all(how != "FAILED" for how, *_ in parts)
    return {"minutes": round(took, 1), "within_its_time": took <= MOST, "all_passed": passed}


def figures(record: Record) -> list[Figure]:
    failed = sum(row["ended"] == "FAILED" for row in record["rows"])
    return [
        Figure("failed parts", failed, 0, is_most=True),
        Figure("minutes", record["minutes"], MOST, is_most=True),
    ]


MEASUREMENT = Measurement(
    "ci", "Do all parts of CI pass, within its time? (--log FILE: of a run that has been made)", cases,
    {"cpu": {"normal": {"log": ""}}}, figures=figures, minutes={"cpu": 40}, folder="reliability",
)  # fmt: skip
