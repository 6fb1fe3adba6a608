"""The options that training scripts share, and those of a run that goes on."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from common.command_line import (
    COUNT,
    FROM_ZERO,
    POSITIVE,
    PROBABILITY,
    OneLineParser,
)
from data.text import LIBRARY

import minitorch
from minitorch.backends.matmul_precision import PRECISIONS
from training.script_helpers import SCHEDULES, WARM_UP

BACKENDS = {
    "cuda": minitorch.CudaBackend,
    "fast": minitorch.FastBackend,
    "simple": minitorch.SimpleBackend,
}
EPILOG = """\
Two runs with the same options give the same losses only when all steps are done: when the clock
(--max-seconds) has to shorten the run, which the run then says, they depend on the machine's speed.
A run that was killed and resumed gives the losses of one that was not, bit for bit on the same CPU; the
clock counts the seconds of all its parts."""
#: Options that may differ from those of the run that --resume continues; the others decide what it learns.
FREE = (
    "text", "out", "max_seconds", "backend", "checkpoint_every", "keep", "resume", "peak", "eager",
)  # fmt: skip
DEFAULT = "(default: %(default)s)"


def as_option(name: str) -> str:
    """Return the name of an option as the command line has it."""
    return f"--{name.replace('_', '-')}"


def loop_parser(
    description: str | None, presets: Iterable[str], preset_help: str, free: Sequence[str] = FREE
) -> OneLineParser:
    """Return a parser with the options of a run of :class:`gpt_loop.Trainer`.

    Args:
        description: What --help shows first.
        presets: Names of sizes.
        preset_help: What they are.
        free: Options that may be given anew with --resume.
    """
    parser = OneLineParser(
        description=description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, option = parser.add_argument, parser.option
    add(
        "--text",
        help=f"text to learn, UTF-8; or {LIBRARY}, the sources of Python's standard library, some 10 MB "
        "(default: Python's own manual)",
        metavar="FILE",
    )
    add("--out", help=f"where results go {DEFAULT}", default="runs/gpt", metavar="DIR")
    option("--steps", COUNT, 550, "optimiser steps")
    add(
        "--max-seconds",
        help="anneal and stop by then, compilation not counted; the final evaluation takes at most a "
        f"quarter of it more {DEFAULT}",
        type=POSITIVE,
        default=72.0,
        metavar="S",
    )
    add("--preset", help=preset_help, choices=[*presets])
    option("--batch", COUNT, 16, "sequences a step, or a part of it")
    option("--accumulate", COUNT, 1, "parts of a step, whose gradients are added up")
    option("--context", COUNT, 128, "tokens of a sequence")
    option("--width", COUNT, 128, "width of the model")
    option("--heads", COUNT, 4, "attention heads")
    option("--layers", COUNT, 2, "transformer layers")
    option("--vocab-size", COUNT, 1024, "with --tokenizer bpe: tokens to learn, at most")
    add(
        "--precision",
        help="what the model stores, multiplies and sums in; bfloat16 keeps weights of float32 in the "
        f"optimiser {DEFAULT}",
        choices=PRECISIONS, default="float32",
    )  # fmt: skip
    add(
        "--eager",
        help="launch the kernels of each step one by one; on a GPU a step is captured as a CUDA graph "
        "otherwise",
        action="store_true",
    )
    option("--dropout", PROBABILITY, 0.0, "share that is dropped")
    option("--lr", POSITIVE, 5e-3, "highest learning rate")
    parser.choice("--schedule", SCHEDULES, "cosine", "of the learning rate, after the warm-up")
    option("--warm-up", PROBABILITY, WARM_UP, "part of the steps over which it rises")
    add(
        "--peak",
        help="what the device could do at most, for the utilisation (default: by its data sheet, for GPUs "
        "that are known)",
        type=POSITIVE, metavar="TFLOPS",
    )  # fmt: skip
    add(
        "--clip",
        help="largest norm of all gradients together (default: any)",
        type=POSITIVE,
        metavar="X",
    )
    parser.choice("--backend", sorted(BACKENDS), "fast")
    option("--seed", FROM_ZERO, 0, "of everything that is random")
    option(
        "--checkpoint-every", FROM_ZERO, 100,
        "steps between two checkpoints in DIR/checkpoints; 0 writes none",
    )  # fmt: skip
    option("--keep", COUNT, 3, "checkpoints that stay")
    names = [as_option(name) for name in free if name not in ("text", "resume")]
    add(
        "--resume",
        help="go on from a checkpoint, or from the last one of a run's folder (without PATH: of --out), "
        "with the options that its run began with; of others only --text (of the same text), "
        f"{', '.join(names[:-1])} and {names[-1]} may be given",
        nargs="?", const="", metavar="PATH",
    )  # fmt: skip
    return parser


def given_options(parser: OneLineParser, argv: list[str] | None = None) -> dict[str, Any]:
    """Return the options that the command line names, without any default."""
    unset = object()
    # A default takes no place that is taken already.
    places = argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([])), unset))
    found = vars(parser.parse_args(argv, places))
    return {name: value for name, value in found.items() if value is not unset}


def options_of_run(
    args: argparse.Namespace,
    given: dict[str, Any],
    run: dict[str, Any],
    source: str,
    free: Sequence[str] = FREE,
) -> argparse.Namespace:
    """Return the options with which a run goes on: its own, but for those that may be given anew.

    Args:
        args: Of this command line.
        given: Those that it names.
        run: With which the run began.
        source: The checkpoint, for errors.
        free: Names of those that may be given anew.

    Raises:
        ValueError: If the command line names one that would make it another run; one line.
    """
    for name, value in given.items():
        if name not in free and value != run.get(name):
            option = as_option(name)
            raise ValueError(
                f"{source}: its run has {option} {run.get(name)} and cannot go on with {value}; leave "
                f"{option} out, or start a new run without --resume"
            )
    known = {name: value for name, value in run.items() if name in vars(args)}
    fresh = {name: given[name] for name in free if name in given}
    return argparse.Namespace(**{**vars(args), **known, **fresh})
