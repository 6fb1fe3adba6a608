"""What CI runs passes within its time: every part by name, how it ended and how long it took.

python project/reliability/ci.py                  run .ci/run, some 40 minutes on two cores
python project/reliability/ci.py --log FILE       a run whose output was kept
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT)]
from bench import measuring  # noqa: E402
from common.command_line import OneLineParser  # noqa: E402

ROOT = PROJECT.parent
RECORD = ROOT / "docs" / "results" / "reliability" / "ci.json"
COMMAND = ".ci/run"
#: Minutes that a run may take on two cores.
MOST = 45
_PART = re.compile(r"(passed|FAILED) +(\d+) s  (.+)")
_TIME = re.compile(r"(\d+) minutes (\d+) seconds in all")


def figures_of(output: Iterable[str]) -> dict[str, Any]:
    """Return the figures of a run: minutes, whether all passed, and a row for each part.

    Args:
        output: Lines of a whole run.

    Raises:
        ValueError: If the run has no end, or no parts.
    """
    lines = [line.rstrip("\n") for line in output]
    times = [at for at, line in enumerate(lines) if _TIME.fullmatch(line)]
    rows = [
        {"part": found[3], "ended": found[1], "seconds": int(found[2])}
        for line in (lines[times[-1] :] if times else [])
        if (found := _PART.fullmatch(line))
    ]
    if not rows:
        raise ValueError(f"this is no output of a whole run of {COMMAND}; keep all of its lines")
    minutes, seconds = map(int, _TIME.fullmatch(lines[times[-1]]).groups())  # type: ignore[union-attr]
    took = minutes + seconds / 60
    return {
        "minutes": round(took, 1),
        "within_its_time": took <= MOST,
        "all_passed": all(row["ended"] != "FAILED" for row in rows),
        "rows": rows,
    }


def _run() -> Iterable[str]:
    """Yield the lines of a run, printed as they come."""
    run = subprocess.Popen([str(ROOT / COMMAND)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    for line in run.stdout:
        print(line, end="", flush=True)
        yield line
    run.wait()


def main(argv: list[str] | None = None) -> int:
    """Run, or read, and write the record; return 0 if all parts passed in time."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log", metavar="FILE", help="the output of a run that has been made")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        if args.log is None:
            found = figures_of(_run())
        else:
            found = figures_of(Path(args.log).read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError) as error:
        sys.exit(f"{error}")
    measuring.write_record(RECORD, COMMAND, measuring.processor(), **found)
    return int(not (found["all_passed"] and found["within_its_time"]))


if __name__ == "__main__":
    raise SystemExit(main())
