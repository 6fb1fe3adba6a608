"""Measure the perplexity of language models on a text: by context, and by the position in the context.

python project/perplexity.py runs/gpt                                 the held-out part of the manual
python project/perplexity.py runs/gpt --text library --contexts 512 2048 8192 --stride 512
python project/perplexity.py runs/short runs/long --text library      two runs in one picture
python project/perplexity.py DIR --text file.txt --all                a folder of Hugging Face

By context: a window slides over the text by --stride tokens, and each token is judged in the first window
that it is in, so that all but the first ones have at least context - stride tokens before them.  A model
that uses its context has a lower loss with a longer one.  With a stride of the context, windows do not
overlap, and the tokens at the beginning of each are guessed.  By position: the mean loss of the tokens at
some distance from the beginning of such windows.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from bench.judging import (
    Losses,
    Subject,
    contexts_of,
    judge_runs,
    label_of,
    parser_of,
    token_losses,
)
from common.command_line import COUNT
from data.text import Tokens
from tqdm import tqdm
from training.script_helpers import Panel, curves

import minitorch

#: The shortest context, and the first positions that are averaged.
LEAST = 64


def windows(count: int, context: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yield windows over ``count`` tokens, so that each token is judged once."""
    for start in range(0, max(count - context, 0) + stride, stride):
        yield start, context - stride if start else 0


def sliding_losses(
    model: minitorch.DecoderLM, ids: Tokens, context: int, stride: int, batch: int = 1
) -> tuple[Losses, Tokens]:
    """Return the loss of each token but the first, and its position in its window, (len(ids) - 1,) each."""
    count = len(ids) - 1
    losses, places = np.full(count, math.nan), np.zeros(count, np.int64)
    padded = np.concatenate([ids, np.zeros(context, np.int64)])  # no token sees those after it
    found = [*windows(count, context, stride)]
    for first in tqdm(range(0, len(found), batch), desc=f"context {context}", leave=False, delay=1):
        part = found[first : first + batch]
        rows = np.array([padded[start : start + context + 1] for start, _ in part])
        each = token_losses(model, rows[:, :-1], rows[:, 1:])
        for (start, before), own in zip(part, each, strict=True):
            stop = min(start + context, count)
            losses[start + before : stop] = own[before : stop - start]
            places[start + before : stop] = np.arange(before, stop - start)
    return losses, places


def by_position(losses: Losses, places: Tokens, context: int) -> list[dict[str, Any]]:
    """Return the mean loss of tokens by their positions: the first ones, and twice as many each time."""
    bounds = [0, *(LEAST << i for i in range(64) if LEAST << i < context), context]
    rows = []
    for start, stop in pairwise(bounds):
        own = losses[(places >= start) & (places < stop)]
        if own.size:
            rows.append({"from": start, "to": stop, "tokens": own.size, "loss": float(own.mean())})
    return rows


def judged(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one model and print what is found; exit with one line if a loss is no number."""
    ids = subject.ids[: None if args.tokens is None else args.tokens + 1]
    contexts = contexts_of(args, subject.model, LEAST)
    print(f"{subject.name}: {len(ids) - 1:,} tokens")
    rows = []
    for context in contexts:
        stride = min(args.stride, context)
        losses, _ = sliding_losses(subject.model, ids, context, stride, args.batch)
        loss = float(losses.mean())
        if not math.isfinite(loss):
            sys.exit(
                f"{subject.name}: the loss at a context of {context} is {loss}; train it again"
            )
        rows.append(
            {"context": context, "stride": stride, "loss": loss, "perplexity": math.exp(loss)}
        )
        print(
            f"context {context:7,}  stride {stride:6,}  loss {loss:.4f}  perplexity {math.exp(loss):.3f}"
        )
    longest = contexts[-1]
    positions = by_position(
        *sliding_losses(subject.model, ids, longest, longest, args.batch), longest
    )
    for row in positions:
        print(f"positions {row['from']:7,} to {row['to']:7,}  loss {row['loss']:.4f}")
    return {
        "run": subject.name,
        "tokens": len(ids) - 1,
        "by_context": rows,
        "by_position": positions,
    }


def panels(rows: list[dict[str, Any]]) -> tuple[Panel, ...]:
    """Return the picture of the record."""

    def lines(key: str, x: str) -> list[tuple[str, list[float], list[float]]]:
        return [
            (label_of(one), [row[x] for row in one[key]], [row["loss"] for row in one[key]])
            for one in rows
        ]

    loss = "loss, nats per token"
    return (
        curves("context", loss, *lines("by_context", "context"), log_x=True),
        curves("position in the context, up to", loss, *lines("by_position", "to"), log_x=True),
    )


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "runs/perplexity")
    parser.option("--stride", COUNT, 512, "tokens from window to window, the context at most")
    parser.option("--tokens", COUNT, None, "judge only so many tokens of the text")
    parser.option("--batch", COUNT, 1, "windows at a time")
    judge_runs("perplexity", parser, argv, judged, panels)


if __name__ == "__main__":
    main()
