"""Run every long test of reliability, one after the other, and write what docs/reliability.md shows.

    python project/reliability/all.py                        some half an hour on two cores
    python project/reliability/all.py --only leaks kills     some of them

Each writes its record to docs/results/reliability itself.  Ctrl-C stops after the script that runs; one
that fails does not keep the others from running.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "experiments")]
from bench.table_cells import markdown  # noqa: E402
from common.command_line import OneLineParser  # noqa: E402
from common.one_by_one import run_one_by_one  # noqa: E402

#: Names of the scripts in this folder, the shortest first.
SCRIPTS = ("determinism", "bad_calls", "leaks", "kills", "rank_kills", "fuzz")


def command_of(name: str, folder: Path = PROJECT / "reliability") -> list[str] | str:
    """Return the command of one script, or why there is none."""
    script = folder / f"{name}.py"
    return [sys.executable, str(script)] if script.exists() else f"there is no {script.name}"


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, help="(default: all)"
    )
    args = parser.parse_args(argv)
    lines, code = run_one_by_one({name: command_of(name) for name in args.only})
    print(f"\n{markdown(['script', '', 'seconds'], lines)}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
