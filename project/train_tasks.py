"""Train a small transformer on tasks whose best possible loss is known, and compare.

python project/train_tasks.py                      copy, reverse, sort and addition, one after the other
python project/train_tasks.py --task sort
python project/train_tasks.py --task addition --length 3 --steps 5000

A line of a task is what the model reads, "=", and the answer, such as "31415=11345" for sort.  Addition
writes its sum with the ones first, "27+85=211", as one adds by hand: so each digit depends on digits that
stand before it.  What the model reads is drawn evenly, so of its n digits it cannot know anything: log 10
nats each.  The answer follows from them: 0 nats.  So n log 10, spread over the tokens of a line, is the
lowest loss that any model can reach; lines are drawn anew for each step, and nothing can be learnt by
heart.

With the default options each task ends within 0.005 nats of its optimum, with at least 99 % of 500 answers
exactly right; all four take some two minutes on two cores, addition the longest: its loss stays near
1.45 for hundreds of steps, then falls within a hundred or two.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common.command_line import COUNT, POSITIVE, script_parser
from training.script_helpers import (
    Progress,
    check_backend,
    check_loss,
    curves,
    draw,
    ends_in_one_line,
    learning_rate,
    make_folder,
)

import minitorch
from minitorch.models.config import ATTENTIONS

Tokens = npt.NDArray[np.int64]

CHARACTERS = "0123456789+="
PLUS, EQUALS = CHARACTERS.index("+"), CHARACTERS.index("=")
BACKENDS = {
    "cuda": minitorch.CudaBackend,
    "fast": minitorch.FastBackend,
    "simple": minitorch.SimpleBackend,
}
#: Steps between two readings of the loss.
READ_EVERY = 10


def sums(digits: Tokens) -> Tokens:
    """Return the sum of each row's two halves as digits, ones first."""
    half = digits.shape[1] // 2
    powers = 10 ** np.arange(half - 1, -1, -1)
    total = digits[:, :half] @ powers + digits[:, half:] @ powers  # (count,)
    return total[:, None] // 10 ** np.arange(half + 1) % 10


@dataclass(frozen=True)
class ToyTask:
    """What is read, and what shall be answered."""

    name: str  # on the command line
    answer: Callable[[Tokens], Tokens]  # from digits (count, n) to the answer's tokens, (count, m)
    numbers: int = 1  # how many numbers the digits make; a plus stands between two
    length: int = 8  # digits of a number, where the user does not say
    steps: int = 400  # optimiser steps, where the user does not say

    def lines(self, rng: np.random.Generator, count: int, length: int) -> Tokens:
        """Draw lines."""
        digits = rng.integers(0, 10, (count, self.numbers * length))
        parts = [digits[:, :length]]
        for start in range(length, digits.shape[1], length):
            parts += [np.full((count, 1), PLUS), digits[:, start : start + length]]
        parts += [np.full((count, 1), EQUALS), self.answer(digits)]
        return np.concatenate(parts, axis=1)

    def prompt_length(self, length: int) -> int:
        """Return the tokens of a line up to and with "="."""
        return self.numbers * (length + 1)

    def best_loss(self, length: int) -> float:
        """Return the lowest loss that is possible, in nats per predicted token.

        The first token is given, not predicted, so one of the random digits is not counted.
        """
        tokens = self.lines(np.random.default_rng(0), 1, length).shape[1]
        return (self.numbers * length - 1) * math.log(10.0) / (tokens - 1)


TASKS = {
    task.name: task
    for task in (
        ToyTask("copy", lambda digits: digits),
        ToyTask("reverse", lambda digits: digits[:, ::-1]),
        ToyTask("sort", lambda digits: np.sort(digits, axis=1)),
        ToyTask("addition", sums, numbers=2, length=2, steps=1200),
    )
}


def decode(tokens: Any) -> str:
    """Return a line's tokens as text."""
    return "".join(CHARACTERS[token] for token in tokens)


def exact_matches(model: minitorch.DecoderLM, lines: Tokens, prompt: int) -> npt.NDArray[np.bool_]:
    """Tell of each line whether the model, asked for its likeliest answer, gives the right one.

    Token by token, the answer is right if and only if each token is the likeliest one after the *right*
    tokens before it; so one pass over the right lines shows what as many passes as tokens would.
    """
    logits = model(lines[:, :-1]).to_numpy()  # (count, tokens - 1, characters)
    return (logits.argmax(2) == lines[:, 1:])[:, prompt - 1 :].all(1)


def build(task: ToyTask, args: argparse.Namespace) -> minitorch.DecoderLM:
    """Return a model with fresh weights, in float32."""
    tokens = task.lines(np.random.default_rng(0), 1, args.length).shape[1]
    return minitorch.DecoderLM(
        n_vocab=len(CHARACTERS),
        n_embd=args.width,
        n_head=args.heads,
        n_positions=tokens - 1,
        p_dropout=0.0,
        n_layer=args.layers,
        middle_dim=4 * args.width,
        attention=args.attention,
        backend=BACKENDS[args.backend],
        dtype=np.float32,
    )


def train(
    task: ToyTask, model: minitorch.DecoderLM, rng: np.random.Generator, args: argparse.Namespace
) -> tuple[Progress, list[float]]:
    """Train on fresh lines; return how far it came and the loss of each step."""
    optimizer = minitorch.Adam(model.parameters(), args.lr, beta2=0.99)
    best = task.best_loss(args.length)
    losses: list[float] = []
    unread: list[minitorch.Tensor] = []
    with Progress(args.steps, "step") as progress:
        for step in range(args.steps):
            optimizer.lr = learning_rate(step / args.steps, args.lr)
            lines = task.lines(rng, args.batch, args.length)
            optimizer.zero_grad()
            loss = model.loss(lines[:, :-1], lines[:, 1:])
            loss.backward()
            optimizer.step()
            unread.append(loss.detach())  # to read it means to wait for the device
            if step % READ_EVERY == READ_EVERY - 1 or step == args.steps - 1:
                for t in unread:
                    losses.append(check_loss(t.item(), f"the loss at step {len(losses)}", args.lr))
                unread.clear()
                recent = float(np.mean(losses[-READ_EVERY:]))
                progress.update(
                    step + 1, f"loss {recent:.4f}  optimum {best:.4f}  {progress.speed}"
                )
    return progress, losses


def run_task(task: ToyTask, args: argparse.Namespace, out: Path) -> None:
    """Train on one task, print and draw the result."""
    minitorch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    model, best = build(task, args), task.best_loss(args.length)
    weights = sum(p.value.size for p in model.parameters())
    example = decode(task.lines(np.random.default_rng(args.seed + 1), 1, args.length)[0])
    print(f"\n{task.name}: {example}   {weights:,} weights, {args.attention} attention")
    progress, losses = train(task, model, rng, args)
    model.eval()
    lines = task.lines(rng, args.judge, args.length)
    loss = model.loss(lines[:, :-1], lines[:, 1:]).item()
    right = exact_matches(model, lines, task.prompt_length(args.length))
    print(
        f"{task.name}: loss {loss:.4f}, optimum {best:.4f}, difference {loss - best:.4f} nats per token; "
        f"{right.mean():.1%} of {len(lines)} answers exactly right; {progress.seconds:.1f} s"
    )
    for line in lines[~right][:3]:
        prompt = line[: task.prompt_length(args.length)].tolist()
        given = decode(model.generate(prompt, len(line) - len(prompt), temperature=0))
        print(f"  wrong: {given}, right: {decode(line)}")
    steps = range(1, len(losses) + 1)
    draw(out / f"{task.name}.png",
         curves("step", "loss, nats per token", (task.name, steps, losses), optimum=best))  # fmt: skip
    progress.end()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "runs/tasks")
    parser.choice("--task", [*TASKS, "all"], "all")
    add = parser.add_argument
    add("--length", type=COUNT, metavar="N",
        help="digits of each number that is read (default: 8; for addition 2)")  # fmt: skip
    add(
        "--steps", type=COUNT, metavar="N", help="optimiser steps (default: 400; for addition 1200)"
    )
    parser.option("--batch", COUNT, 64, "lines a step")
    parser.option("--width", COUNT, 64, "width of the model")
    parser.option("--heads", COUNT, 4, "attention heads")
    parser.option("--layers", COUNT, 2, "transformer layers")
    parser.option("--lr", POSITIVE, 3e-3, "highest learning rate")
    parser.option("--judge", COUNT, 500, "lines to judge by")
    parser.choice("--attention", ATTENTIONS, "flash")
    parser.choice("--backend", BACKENDS, "fast")
    args = parser.parse_args(argv)
    if args.length is not None and args.length > 17:
        parser.error("argument --length: must be 17 at most, so that a sum is a 64-bit number")
    return args


def run(args: argparse.Namespace) -> None:
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    out = make_folder(args.out)
    tasks = list(TASKS.values()) if args.task == "all" else [TASKS[args.task]]
    for task in tasks:
        chosen = {"length": args.length or task.length, "steps": args.steps or task.steps}
        try:
            run_task(task, argparse.Namespace(**{**vars(args), **chosen}), out)
        except ValueError as error:  # of a width that the heads do not divide, for example
            sys.exit(str(error))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with ends_in_one_line("--batch, --width or --layers"):
        run(args)


if __name__ == "__main__":
    main()
