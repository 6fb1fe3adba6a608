"""The command line of the scripts: errors of one line, and numbers that are checked as they are read."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the list of all options before it."""

    def __init__(self, **options: Any):
        raw = argparse.RawDescriptionHelpFormatter  # a docstring keeps its lines
        super().__init__(**{"formatter_class": raw, **options})

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")

    def option(self, name: str, kind: Callable[[str], Any], default: Any, what: str = "") -> None:
        """Add an option with a value."""
        text = f"{what} (default: %(default)s)".strip()
        self.add_argument(
            name, type=kind, default=default, help=text, metavar=METAVARS.get(kind, "X")
        )

    def choice(self, name: str, choices: Iterable[str], default: str, what: str = "") -> None:
        """Add an option whose value is one of some words, in capitals or not."""
        text = f"{what} (default: %(default)s)".strip()
        self.add_argument(name, choices=[*choices], type=str.lower, default=default, help=text)


def number(
    kind: Callable[[str], float], fits: Callable[[float], bool], wanted: str
) -> Callable[[str], Any]:
    """Return a reader of numbers of one kind that refuses what does not fit."""

    def read(text: str) -> float:
        try:
            value = kind(text)
            if math.isfinite(value) and fits(value):
                return value
        except (ValueError, OverflowError):
            pass
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")

    return read


COUNT = number(int, lambda x: x >= 1, "a whole number, 1 or more")
FROM_ZERO = number(int, lambda x: x >= 0, "a whole number, 0 or more")
NUMBER = number(float, lambda x: True, "a number")
POSITIVE = number(float, lambda x: x > 0, "a number above 0")
NOT_NEGATIVE = number(float, lambda x: x >= 0, "a number, 0 or more")
PROBABILITY = number(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
SHARE = number(float, lambda x: 0 < x <= 1, "a number above 0, at most 1")
#: What --help calls a value of each kind, else X.
METAVARS = {COUNT: "N", FROM_ZERO: "N", PROBABILITY: "P", SHARE: "P"}


def script_parser(description: str | None, out: str) -> OneLineParser:
    """Return a parser with the options that every training script has."""
    parser = OneLineParser(description=description)
    parser.option("--seed", FROM_ZERO, 0, "of everything that is random")
    parser.add_argument(
        "--out", default=out, metavar="DIR", help="where results go (default: %(default)s)"
    )
    return parser


def replace_unprintable() -> None:  # beyond module 5
    """Show "?" for characters that a terminal's encoding lacks; a notebook's output has all of them."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
