"""Every part of a run of ``.ci/run`` by name: how it ended and how long it took."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from bench.kit import ROOT, Case, Figure, Measurement, Record, Run

COMMAND = ".ci/run"
#: Minutes that a run may take on two cores.
MOST = 45
_PART = re.compile(r"(passed|FAILED) +(\d+) s  (.+)")
_TIME = re.compile(r"(\d+) minutes (\d+) seconds in all")


def figures_of(output: Iterable[str]) -> Record:
    """Return the figures of a whole run: minutes, whether all passed, and a row for each part."""
    lines = [line.rstrip("\n") for line in output]
    times = [(at, found) for at, line in enumerate(lines) if (found := _TIME.fullmatch(line))]
    rows = [
        {"part": found[3], "ended": found[1], "seconds": int(found[2])}
        for line in (lines[times[-1][0] :] if times else [])
        if (found := _PART.fullmatch(line))
    ]
    if not rows:
        raise ValueError(f"this is no output of a whole run of {COMMAND}; keep all of its lines")
    minutes, seconds = map(int, times[-1][1].groups())
    took = minutes + seconds / 60
    return {
        "minutes": round(took, 1), "within_its_time": took <= MOST,
        "all_passed": all(row["ended"] != "FAILED" for row in rows), "rows": rows,
    }  # fmt: skip


def output_of_run() -> Iterator[str]:
    """Yield the lines of a run, printed as they come."""
    run = subprocess.Popen([str(ROOT / COMMAND)], stdout=subprocess.PIPE, text=True)
    for line in run.stdout or ():
        print(line, end="", flush=True)
        yield line
    run.wait()


def cases(run: Run) -> Iterator[Case]:
    yield {}, partial(parts, run)


def parts(run: Run) -> None:
    try:
        log = Path(run.log).read_text(encoding="utf-8").splitlines() if run.log else output_of_run()
        found = figures_of(log)
    except (OSError, ValueError) as error:
        sys.exit(f"{error}")
    run.rows += found.pop("rows")
    run.note(**found)


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
