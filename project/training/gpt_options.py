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
    OneLineParser,
)

from kernels.problem.shapes import MAX_HEAD_DIM
from minitorch.backends.matmul_precision import PRECISIONS
from minitorch.models.config import ATTENTIONS
from minitorch.models.rotary import SCALINGS, checked_scaling
from training import loop_options
from training.gpt_presets import PRESETS, characters_of
from training.gpt_tokens import LEAST
from training.loop_options import DEFAULT, as_option, given_options, loop_parser

#: Options that may differ from those of the run that --resume continues.
FREE = (
    *loop_options.FREE, "sample", "temperature", "prompt", "recompute", "data_parallel", "ring",
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
    parser = gpt_parser(description)
    args = parser.parse_args(argv)
    if args.load is not None and args.resume is not None:
        parser.error("--load writes and --resume trains: take one of them")
    given = given_options(gpt_parser(), argv)
    if args.preset is not None:
        vars(args).update({**PRESETS[args.preset], **given})
    if args.init is not None:
        if taken := [name for name in OF_FOLDER if name in given]:
            parser.error(
                f"--init takes the model and the tokenizer of its folder; leave out "
                f"{as_option(taken[0])}"
            )
        if args.load is not None:
            parser.error("--load writes and --init trains: take one of them")
        vars(args).update({**FINE_TUNING, **given})
    elif args.positions == "learned" and args.resume is None and (odd := {*OF_ROTARY} & {*given}):
        parser.error(f"{as_option(min(odd))} belongs to --positions rotary; pass both")
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


def gpt_parser(description: str | None = None) -> OneLineParser:
    """Return the parser of the script."""
    parser = loop_parser(
        description,
        PRESETS,
        "sizes of a model, which other options change one by one: toy and char have 2 and 6 layers, "
        "gpt2-small is GPT-2 with its 124 million weights",
        FREE,
    )

    def add(name: str, what: str, **kwargs: Any) -> None:
        parser.add_argument(name, help=what, **kwargs)

    default = DEFAULT
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
    add("--sinks", "each head learns a logit of attention sinks", action="store_true")
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
        "--init",
        "begin with the weights and the tokenizer of a folder of Hugging Face, of a GPT-2 or a Llama; the "
        f"defaults are then --lr {FINE_TUNING['lr']:g} --clip {FINE_TUNING['clip']:g}",
        metavar="DIR",
    )
    add(
        "--recompute",
        "keep only what goes into a layer, and compute the rest again: less memory, a third more time",
        action="store_true",
    )
    add(
        "--attention",
        "(default: flash; with --load, what the checkpoint was trained with)",
        choices=ATTENTIONS,
    )
    add("--tie-weights", "score tokens with the embedding table", action="store_true")
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
    add("--data-parallel", f"processes that read other examples, of mpiexec {default}",
        type=COUNT, default=1, metavar="N")  # fmt: skip
    add("--ring", f"processes that share each sequence, of mpiexec {default}",
        type=COUNT, default=1, metavar="N")  # fmt: skip
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
