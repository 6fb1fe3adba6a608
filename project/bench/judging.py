"""What scripts share that judge trained language models by a text: options, models, losses, records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from common.command_line import COUNT, OneLineParser, replace_unprintable
from data.text import LIBRARY, Corpus, Tokens, read_text
from training.gpt_files import load_run
from training.gpt_tokens import encoded
from training.loop_options import BACKENDS
from training.script_helpers import Panel, check_backend, draw, ends_in_one_line, make_folder

import minitorch
from bench.records import command_line, name_of, write_record
from minitorch.nn import softmax_loss

Losses = npt.NDArray[np.float64]
#: Logits that are in memory at a time, about.
CHUNK = 1 << 25


class Subject(NamedTuple):
    """A model and the text that it is to judge."""

    name: str  # where it was read
    model: minitorch.DecoderLM  # in evaluation mode
    config: dict[str, Any]  # of the model; it says what tokens are
    ids: Tokens  # the text


def label_of(row: dict[str, Any]) -> str:
    """Return the name of a run in a picture: the end of where it was read."""
    return row["run"][-32:]


def parser_of(description: str | None, out: str) -> OneLineParser:
    """Return a parser of the options that scripts which judge models share."""
    parser = OneLineParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "runs", metavar="RUN_OR_FOLDER", nargs="+",
        help="a run of train_gpt.py, one of its checkpoints, or a folder in the format of Hugging Face",
    )  # fmt: skip
    add(
        "--text", metavar="FILE",
        help=f"the text, UTF-8, or {LIBRARY}, as for train_gpt.py (default: Python's own manual); of it "
        "the last tenth, which a run on this text does not learn",
    )  # fmt: skip
    add("--all", action="store_true", help="judge the whole text, which no run should have learned")
    add(
        "--contexts", type=COUNT, nargs="+", metavar="N",
        help="tokens that the model sees at once (default: powers of two up to its context)",
    )  # fmt: skip
    add("--attention", choices=("flash", "naive"), help="(default: that of the run)")
    parser.choice("--backend", sorted(BACKENDS), "fast")
    add("--out", default=out, metavar="DIR", help="where results go (default: %(default)s)")
    return parser


def read_subject(path: str, args: argparse.Namespace) -> Subject:
    """Return a model and the text in its tokens; exit with one line if they cannot be read."""
    model, config = load_run(path, args.backend, args.attention)
    model.eval()
    text = read_text(args.text)
    try:
        ids = encoded(text, config)
    except ValueError as error:
        sys.exit(f"{path} cannot read the text: {error}")
    if not args.all:
        ids = Corpus.from_ids(text, ids, 1).held_out
    if len(ids) < 2:
        sys.exit(f"the text has {len(ids)} tokens, at least 2 are needed; take a longer one")
    return Subject(path, model, config, ids)


def contexts_of(
    args: argparse.Namespace, model: minitorch.DecoderLM, first: int, least: int = 1
) -> list[int]:
    """Return the contexts to judge, in ascending order; exit with one line if one does not fit."""
    most = model.n_positions
    if least > most:
        sys.exit(
            f"the context of the model, {most} tokens, is shorter than the least, {least} tokens"
        )
    powers = [2**i for i in range(most.bit_length()) if 2**i >= first]
    contexts = sorted({*(args.contexts or [*powers, most])})
    for context in contexts:
        if not least <= context <= most:
            sys.exit(
                f"--contexts must be from {least} to {most}, the context of the model; got {context}"
            )
    return contexts


@minitorch.no_grad()
def token_losses(
    model: minitorch.DecoderLM, ids: Any, targets: Any, cache: minitorch.KVCache | None = None
) -> Losses:
    """Return the cross entropy of each target in nats, (batch, seq); few logits are in memory at a time."""
    hidden = model.hidden(ids, cache)
    rows, wanted = hidden.view(hidden.size // model.n_embd, model.n_embd), np.reshape(targets, -1)
    step, found = max(CHUNK // model.n_vocab, 1), []
    for first in range(0, len(wanted), step):
        part = rows[first : first + step]
        logits = model.score(part.view(1, *part.shape)).view(part.shape[0], model.n_vocab)
        losses = softmax_loss(logits.to(np.float32), wanted[first : first + step])
        found.append(losses.to_numpy().astype(np.float64))
    return np.concatenate(found).reshape(np.shape(targets))


def judge_runs(
    name: str, parser: OneLineParser, argv: list[str] | None,
    judge: Callable[[Subject, argparse.Namespace], dict[str, Any]],
    panels: Callable[[list[dict[str, Any]]], tuple[Panel, ...]],
) -> None:  # fmt: skip
    """Judge each run, and write a record and a picture; exit with one line if something is wrong."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    replace_unprintable()
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    record = make_folder(args.out) / f"{name}.json"
    with ends_in_one_line("--batch or --contexts"):
        rows = [judge(read_subject(path, args), args) for path in args.runs]
    device = name_of("cuda" if args.backend == "cuda" else "cpu")
    command = command_line(f"project/{name}.py", argv, ("--out",))
    try:
        write_record(record, command, device, rows=rows)
    except OSError as error:
        sys.exit(f"--out {args.out} cannot be written ({error}); name another folder")
    print(f"record {record}")
    draw(record.with_suffix(".png"), *panels(rows))
