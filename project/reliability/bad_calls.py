"""Every wrong call of the tables in tests/bad_calls/*.py: how many there are, and what each of them raised.

    python project/reliability/bad_calls.py                  half a minute on two cores

The tables are walked by tests/bad_calls/test_bad_calls.py in a process of its own: a call that
ends the interpreter
is seen, and named.  A case holds if the call raises the documented type, its message has the words that say
what was given, what was expected and what to do, and no operand has changed: bits, strides, gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT)]
from bench import measuring  # noqa: E402
from common.command_line import OneLineParser  # noqa: E402

ROOT = PROJECT.parent
RECORD = ROOT / "docs" / "results" / "reliability" / "bad_calls.json"
TESTS = ROOT / "tests" / "bad_calls" / "test_bad_calls.py"


class Notes:
    """Notes of each case as it begins and ends, a line of JSON each; nothing is lost with the process.

    Args:
        path: Of the file.
    """

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


def walk() -> tuple[list[dict[str, Any]], str | None]:
    """Walk the tables in a child; return the notes of the cases that ended, and the one that ended it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "notes"
        command = [sys.executable, "-X", "faulthandler", str(Path(__file__).resolve())]
        done = subprocess.run([*command, "--notes", str(path)], cwd=ROOT)
        notes = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    begun = [note["begins"] for note in notes if "begins" in note]
    ended = [note for note in notes if "case" in note]
    return ended, begun[-1] if done.returncode < 0 and begun else None


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", default=str(RECORD), help="the record (default: %(default)s)")
    parser.add_argument("--notes", help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.notes:
        os.environ.pop("PYTEST_ADDOPTS", None)
        options = ["-q", "-n", "0", "-p", "no:cacheprovider", str(TESTS)]
        return int(pytest.main(options, plugins=[Notes(args.notes)]))
    notes, dead_at = walk()
    cases = {note["case"] for note in notes}
    areas = Counter(area for area, _ in {(note["area"], note["case"]) for note in notes})
    failed = sorted({note["case"] for note in notes if not note["holds"]})
    measuring.write_record(
        args.json,
        measuring.command_line("project/reliability/bad_calls.py", argv),
        measuring.name_of("cpu"),
        cases=len(cases),
        calls=len(notes),
        failed=len(failed),
        processes_dead=int(dead_at is not None),
        by_area=dict(areas),
        by_type=dict(Counter(note["raised"] or "nothing" for note in notes).most_common()),
        which_failed=failed + ([dead_at] if dead_at else []),
    )
    print(f"{len(cases)} wrong calls, {len(notes)} with backends: {len(failed)} failed"
          + (f"; {dead_at} ended the process" if dead_at else ""))  # fmt: skip
    return int(bool(failed) or dead_at is not None or not notes)


if __name__ == "__main__":
    raise SystemExit(main())
