"""Run every experiment, one after the other, each in a process of its own.

    python project/experiments/all.py                    on the CPU: at most fifteen minutes on two cores
    python project/experiments/all.py --device cuda      on a GPU
    python project/experiments/all.py --quick            in small
    python project/experiments/all.py --publish          into docs/results and docs/images/experiments

What cannot be measured on the device is drawn from the files that are there.  Ctrl-C stops after the
experiment that runs, whose rows are kept; one that fails does not keep the others from running.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import harness
from bench.record_files import BadRecordError
from common.command_line import OneLineParser
from common.one_by_one import run_one_by_one
from harness import markdown


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and those that every experiment gets."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = list(harness.names())
    parser.choice("--device", ("cpu", "cuda"), "cpu", "to measure")
    parser.add_argument("--only", nargs="+", choices=known, default=known, help="(default: all)")
    size = parser.add_mutually_exclusive_group()
    for option in ("--quick", "--full"):
        size.add_argument(option, action="store_true", help="handed on")
    parser.add_argument("--publish", action="store_true", help="handed on")
    args = parser.parse_args(argv)
    handed = [f"--{name}" for name in ("quick", "full", "publish") if getattr(args, name)]
    return args, handed


def command_of(name: str, device: str, handed: list[str]) -> list[str] | None:
    """Return the command of one experiment; None where there is nothing to measure nor to draw.

    Raises:
        BadRecordError: If what would be drawn is no record of it.
    """
    script = str(Path(__file__).with_name(f"{name}.py"))
    if device in harness.load(name).EXPERIMENT.devices:
        return [sys.executable, script, "--device", device, *handed]
    if not harness.stored(name):
        return None
    return [sys.executable, script, "--redraw", *(x for x in handed if x == "--publish")]


def main(argv: list[str] | None = None) -> int:
    args, handed = parse_args(sys.argv[1:] if argv is None else argv)
    bad: list[str] = []  # what is wrong with records that were to be drawn

    def planned(name: str) -> list[str] | str:
        try:
            command = command_of(name, args.device, handed)
        except BadRecordError as error:
            bad.append(str(error))
            return bad[-1]
        return command or f"not on {args.device}, and no file of it"

    commands = {name: planned(name) for name in args.only}
    lines, code = run_one_by_one(commands)
    print(f"\n{markdown(['experiment', '', 'seconds'], lines)}")
    return code or int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
