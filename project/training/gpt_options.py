"""The options of the training script, each checked before any work begins."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from common.command_line import (
    COUNT,
    FROM_ZERO,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    OneLineParser,
)
from data.text import LIBRARY

import minitorch
from kernels.problem.shapes import MAX_HEAD_DIM
from minitorch.backends.matmul_precision import PRECISIONS
from minitorch.models.rotary import SCALINGS, checked_scaling
from minitorch.transformer import ATTENTIONS
from training.gpt_presets import PRESETS, characters_of
from training.gpt_tokens import LEAST
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
    "text", "out", "max_seconds", "backend", "checkpoint_every", "keep", "sample", "temperature",
    "prompt", "resume", "peak", "recompute", "eager", "data_parallel", "ring",
)  # fmt: skip
#: What --init takes from its folder; and what it changes unless the command line says otherwise.
OF_FOLDER = (
    "preset", "width", "heads", "layers", "vocabulary", "tie_weights", "tokenizer", "vocab_size",
    "positions", "rotary_theta", "sinks",
)  # fmt: skip
#: What belongs to --positions rotary, whose base of the frequencies is this by default.
OF_ROTARY, THETA = ("rotary_theta", "rotary_scaling"), 10_000.0
FINE_TUNING: dict[str, Any] = {"lr": 1e-4, "clip": 1.0}


def parse_args(description: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; exit with one line and code 2 if it cannot be."""
    parser = _parser(description)
    args = parser.parse_args(argv)
    if args.load is not None and args.resume is not None:
        parser.error("--load writes and --resume trains: take one of them")
    given = given_options(argv)
    if args.preset is not None:
        vars(args).update({**PRESETS[args.preset], **given})
    if args.init is not None:
        if taken := [name for name in OF_FOLDER if name in given]:
            parser.error(
                f"--init takes the model and the tokenizer of its folder; leave out "
                f"--{taken[0].replace('_', '-')}"
            )
        if args.load is not None:
            parser.error("--load writes and --init trains: take one of them")
        vars(args).update({**FINE_TUNING, **given})
    elif args.positions == "learned" and args.resume is None and (odd := {*OF_ROTARY} & {*given}):
        parser.error(f"--{min(odd).replace('_', '-')} belongs to --positions rotary; pass both")
    if args.tokenizer == "bpe":
        if args.vocab_size < LEAST:
            parser.error(
                f"--vocab-size must be {LEAST} or more, for each byte and the end of a text; got "
                f"{args.vocab_size}"
            )
        args.vocabulary = given.get("vocabulary")  # not a preset's, which is for bytes
    elif "vocab_size" in given:
        parser.error("--vocab-size belongs to --tokenizer bpe; pass both")
    try:
        check_ranks(args)
    except ValueError as error:
        parser.error(str(error))
    if args.vocabulary is not None and args.tokenizer != "bpe":
        try:
            characters_of(args.vocabulary)
        except ValueError as error:
            parser.error(str(error))
    return args


def check_ranks(args: argparse.Namespace) -> None:
    """Check that processes can share batches and sequences.

    Raises:
        ValueError: One line.
    """
    if args.batch % args.data_parallel:
        raise ValueError(
            f"--batch must be a multiple of --data-parallel, got {args.batch} and {args.data_parallel}"
        )
    if args.ring > 1 and args.sinks:
        raise ValueError("--ring has no attention sinks; leave --sinks out, or train on one rank")
    if args.ring > 1 and args.context % (2 * args.ring):
        raise ValueError(
            f"--context must be a multiple of twice --ring, got {args.context} and {args.ring}"
        )


def given_options(argv: list[str] | None = None) -> dict[str, Any]:
    """Return the options that the command line names, without any default."""
    parser, unset = _parser(None), object()
    # A default takes no place that is taken already.
    places = argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([])), unset))
    found = vars(parser.parse_args(argv, places))
    return {name: value for name, value in found.items() if value is not unset}


def options_of_run(
    args: argparse.Namespace, given: dict[str, Any], run: dict[str, Any], source: str
) -> argparse.Namespace:
    """Return the options with which a run goes on: its own, but for those that may be given anew.

    Args:
        args: Of this command line.
        given: Those that it names.
        run: With which the run began.
        source: The checkpoint, for errors.

    Raises:
        ValueError: If the command line names one that would make it another run; one line.
    """
    for name, value in given.items():
        if name not in FREE and value != run.get(name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{source}: its run has {option} {run.get(name)} and cannot go on with {value}; leave "
                f"{option} out, or start a new run without --resume"
            )
    known = {name: value for name, value in run.items() if name in vars(args)}
    fresh = {name: given[name] for name in FREE if name in given}
    found = argparse.Namespace(**{**vars(args), **known, "load": None, **fresh})
    check_ranks(found)
    return found


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a configuration keeps of the options of a model."""
    keys = (
        "width", "heads", "layers", "context", "dropout", "attention", "tie_weights", "precision",
        "rotary_scaling", "window", "sinks",
    )  # fmt: skip
    theta = None if args.positions == "learned" else args.rotary_theta or THETA
    return {**{key: getattr(args, key) for key in keys}, "rotary_theta": theta}


def scaling(text: str) -> dict[str, Any]:
    """Read a scaling of rotary positions: its type and its numbers, divided by colons."""
    kind, *numbers = text.split(":")
    names = SCALINGS.get(kind, ())
    wanted = " or ".join(":".join([name, *SCALINGS[name]]) for name in SCALINGS if SCALINGS[name])
    if not names or len(numbers) != len(names):
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")
    try:
        found = checked_scaling(
            {"rope_type": kind, **dict(zip(names, map(float, numbers), strict=True))}
        )
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text} ({error})") from None
    assert found is not None, "it has numbers"
    return found


def _parser(description: str | None) -> OneLineParser:
    parser = OneLineParser(
        description=description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = "(default: %(default)s)"

    def add(name: str, what: str, **kwargs: Any) -> None:
        parser.add_argument(name, help=what, **kwargs)

    add(
        "--text",
        f"text to learn, UTF-8; or {LIBRARY}, the sources of Python's standard library, some 8 MB "
        "(default: Python's own manual)",
        metavar="FILE",
    )
    add("--out", f"where results go {default}", default="runs/gpt", metavar="DIR")
    add("--steps", f"optimiser steps {default}", type=COUNT, default=550, metavar="N")
    add(
        "--max-seconds",
        "anneal and stop by then, compilation not counted; the final evaluation takes at most a "
        f"quarter of it more {default}",
        type=POSITIVE,
        default=72.0,
        metavar="S",
    )
    add(
        "--preset",
        "sizes of a model, which other options change one by one: toy and char have 2 and 6 layers, "
        "gpt2-small is GPT-2 with its 124 million weights",
        choices=PRESETS,
    )
    add(
        "--batch", f"windows a step, or a part of it {default}", type=COUNT, default=16, metavar="N"
    )
    add(
        "--accumulate", f"parts of a step, whose gradients are added up {default}",
        type=COUNT, default=1, metavar="N",
    )  # fmt: skip
    add("--context", f"characters a window {default}", type=COUNT, default=128, metavar="N")
    add("--width", f"width of the model {default}", type=COUNT, default=128, metavar="N")
    add("--heads", f"attention heads {default}", type=COUNT, default=4, metavar="N")
    add("--layers", f"transformer layers {default}", type=COUNT, default=2, metavar="N")
    add(
        "--positions", f"added to the embeddings and learned, or rotary in each layer {default}",
        choices=("learned", "rotary"), default="learned",
    )  # fmt: skip
    add(
        "--rotary-theta", f"base of the frequencies of rotary positions (default: {THETA:g})",
        type=POSITIVE, metavar="X",
    )  # fmt: skip
    add(
        "--rotary-scaling",
        "frequencies for longer contexts: linear:FACTOR, or llama3:FACTOR:LOW:HIGH:ORIGINAL; with --init, "
        "a longer --context than that of a Llama, too",
        type=scaling, metavar="TYPE:X",
    )  # fmt: skip
    add(
        "--window", "tokens that a token attends to in a layer (default: all before it)",
        type=COUNT, metavar="N",
    )  # fmt: skip
    add("--sinks", "each head learns an attention sink", action="store_true")
    add(
        "--vocabulary",
        "tokens are bytes, 256 or more, or 96 for line break and printable ASCII (default: tokens are "
        "the characters of the text); with --tokenizer bpe, rows of the table of tokens (default: as many)",
        type=COUNT, metavar="N",
    )  # fmt: skip
    add(
        "--tokenizer",
        "tokens are characters or bytes, or bpe: byte pairs, which the library tokenizers learns from the "
        f"text {default}",
        choices=("characters", "bpe"), default="characters",
    )  # fmt: skip
    add(
        "--vocab-size", f"with --tokenizer bpe: tokens to learn, at most {default}",
        type=COUNT, default=1024, metavar="N",
    )  # fmt: skip
    add(
        "--init",
        "begin with the weights and the tokenizer of a folder of Hugging Face, of a GPT-2 or a Llama; the "
        f"defaults are then --lr {FINE_TUNING['lr']:g} --clip {FINE_TUNING['clip']:g}",
        metavar="DIR",
    )
    add(
        "--precision",
        "what the model stores, multiplies and sums in; bfloat16 keeps weights of float32 in the optimiser "
        f"{default}",
        choices=PRECISIONS, default="float32",
    )  # fmt: skip
    add(
        "--recompute",
        "keep only what goes into a layer, and compute the rest again: less memory, a third more time",
        action="store_true",
    )
    add(
        "--eager",
        "launch the kernels of each step one by one; on a GPU a step is captured as a CUDA graph otherwise",
        action="store_true",
    )
    add("--dropout", f"share that is dropped {default}", type=PROBABILITY, default=0.0, metavar="P")
    add("--lr", f"highest learning rate {default}", type=POSITIVE, default=5e-3, metavar="X")
    add(
        "--schedule", f"of the learning rate, after the warm-up {default}",
        choices=SCHEDULES, default="cosine",
    )  # fmt: skip
    add(
        "--warm-up", f"part of the steps over which it rises {default}",
        type=PROBABILITY, default=WARM_UP, metavar="P",
    )  # fmt: skip
    add(
        "--peak",
        "what the device could do at most, for the utilisation (default: by its data sheet, for GPUs "
        "that are known)",
        type=POSITIVE, metavar="TFLOPS",
    )  # fmt: skip
    add(
        "--clip",
        "largest norm of all gradients together (default: any)",
        type=POSITIVE,
        metavar="X",
    )
    add(
        "--attention",
        "(default: flash; with --load, what the checkpoint was trained with)",
        choices=ATTENTIONS,
    )
    add("--backend", default, choices=sorted(BACKENDS), default="fast")
    add("--tie-weights", "score tokens with the embedding table", action="store_true")
    add("--seed", f"of everything that is random {default}", type=FROM_ZERO, default=0, metavar="N")
    add(
        "--sample", f"characters to write at the end {default}",
        type=FROM_ZERO, default=400, metavar="N",
    )  # fmt: skip
    add(
        "--temperature", f"of the writing; 0 is greedy {default}",
        type=NOT_NEGATIVE, default=0.8, metavar="X",
    )  # fmt: skip
    add(
        "--prompt",
        "what the writing begins with (default: 'The ', or how the text begins if it lacks these "
        "characters)",
    )
    add(
        "--checkpoint-every",
        f"steps between two checkpoints in DIR/checkpoints; 0 writes none {default}",
        type=FROM_ZERO, default=100, metavar="N",
    )  # fmt: skip
    add("--data-parallel", f"processes that read other examples, of mpiexec {default}",
        type=COUNT, default=1, metavar="N")  # fmt: skip
    add("--ring", f"processes that share each sequence, of mpiexec {default}",
        type=COUNT, default=1, metavar="N")  # fmt: skip
    add("--keep", f"checkpoints that stay {default}", type=COUNT, default=3, metavar="N")
    add(
        "--resume",
        "go on from a checkpoint, or from the last one of a run's folder (without PATH: of --out), with "
        "the options that its run began with; of others only --text (of the same text), --out, "
        "--max-seconds, --backend, --checkpoint-every, --keep, --sample, --temperature, --prompt, --peak, "
        "--recompute, --eager, --data-parallel and --ring may be given",
        nargs="?", const="", metavar="PATH",
    )  # fmt: skip
    add(
        "--load",
        "do not train: load this checkpoint and write; of the other options only --backend, "
        "--attention, --prompt, --sample, --temperature and --seed count",
        metavar="FILE",
    )
    return parser


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


#: What a configuration must hold: what each value must be, in words and as a check.
CONFIG: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "characters": (
        "a text of characters that all differ",
        lambda x: isinstance(x, str) and len(x) == len(set(x)),
    ),
    "tokenizer": ("the JSON text of a tokenizer, or null", lambda x: isinstance(x, str | None)),
    "model": (
        "an object with arguments of DecoderLM, or null",
        lambda x: isinstance(x, dict | None),
    ),
    "prompt": ("a text", lambda x: isinstance(x, str)),
    "width": ("a whole number, 1 or more", _is_count),
    "heads": ("a whole number, 1 or more", _is_count),
    "layers": ("a whole number, 1 or more", _is_count),
    "context": ("a whole number, 1 or more", _is_count),
    "dropout": (
        "a number from 0 to below 1",
        lambda x: type(x) in (int, float) and 0 <= x < 1,
    ),
    "attention": (f"one of {ATTENTIONS}", lambda x: x in ATTENTIONS),
    "tie_weights": ("true or false", lambda x: type(x) is bool),
    "rotary_theta": (
        "a number above 0, or null for learned positions",
        lambda x: x is None or (type(x) in (int, float) and x > 0),
    ),
    "rotary_scaling": (
        "a scaling of rotary positions, or null",
        lambda x: isinstance(x, dict | None),
    ),
    "window": ("a whole number, 1 or more, or null", lambda x: x is None or _is_count(x)),
    "sinks": ("true or false", lambda x: type(x) is bool),
    "vocabulary": ("a whole number, 1 or more", _is_count),
    "precision": (f"one of {tuple(PRECISIONS)}", lambda x: x in [*PRECISIONS]),
}


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with what older ones lack, such as a token for each character, in float32."""
    characters = config.get("characters")
    own: dict[str, Any] = {
        "precision": "float32", "tokenizer": None, "model": None, "rotary_theta": None,
        "rotary_scaling": None, "window": None, "sinks": False,
    }  # fmt: skip
    if isinstance(characters, str):
        own["vocabulary"] = len(characters)
    return {**own, **config}


def check_config(config: dict[str, Any]) -> None:
    """Check the configuration of a model, from the command line or from a checkpoint, with its defaults.

    Raises:
        ValueError: If it describes no model; one line.
    """
    config = with_defaults(config)
    for key, (wanted, fits) in CONFIG.items():
        if key not in config:
            raise ValueError(f"{key} is missing from the model's configuration")
        if not fits(config[key]):
            raise ValueError(f"{key} must be {wanted}, got {config[key]!r:.40}")
    characters, vocabulary = config["characters"], config["vocabulary"]
    if not characters and config["tokenizer"] is None:
        raise ValueError(f"characters must be {CONFIG['characters'][0]}, got {characters!r}")
    if len(characters) > vocabulary:
        raise ValueError(
            f"vocabulary must have a token for each of the {len(characters)} characters, got {vocabulary}"
        )
    if config["model"] is not None:
        return
    width, heads = config["width"], config["heads"]
    if width % heads != 0:
        raise ValueError(
            f"--width must be a multiple of --heads, got {width} and {heads}: each head gets an equal "
            "share of the width"
        )
    if config["attention"] == "flash" and width // heads > MAX_HEAD_DIM:
        raise ValueError(
            f"--width {width} with --heads {heads} makes heads of {width // heads}; flash attention "
            f"takes {MAX_HEAD_DIM} at most: take more heads, or --attention naive"
        )
