"""``python -m minitorch doctor``: report what is wrong with this environment and how to fix it."""

from __future__ import annotations

import argparse
import sys

from minitorch.doctor import command as doctor


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m minitorch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor.add_options(commands.add_parser("doctor", help=doctor.ABOUT, description=doctor.ABOUT))
    return doctor.run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
