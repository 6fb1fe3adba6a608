"""Ask language models which of six continuations follows the end of a chapter.

python project/chapter_break.py runs/gpt --text library                modules of the standard library
python project/chapter_break.py runs/gpt --text library --contexts 256 1024 8192
python project/chapter_break.py DIR --text book.txt --all --chapter "^Chapter "     a book

One continuation is the beginning of the next chapter, the others are those of later chapters of the same
document, drawn at random.  A form feed divides documents.  A chapter of a Python module is a function, a
class or a method; it competes with others at the same indentation.  A context is the number of tokens that
the model sees: the last ones before the chapter's end, and the continuation.  All contexts are asked the
same questions.  A model chooses the continuation with the highest mean log-likelihood; and, as a second
figure, the one whose likelihood gains most from the context, since some are likely after any text.

Source: Sun, Thai and Iyyer (2022), ChapterBreak: a challenge dataset for long-range language models; for
the gain, Holtzman et al. (2021), Surface form competition.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from bench.judging import Subject, contexts_of, judge_runs, label_of, parser_of, token_losses
from common.command_line import COUNT, FROM_ZERO
from data.text import FORM_FEED, LIBRARY, Tokens
from tqdm import tqdm
from training.gpt_tokens import encoded, text_reader
from training.intervals import Z_95, wilson_interval
from training.script_helpers import Panel

import minitorch

#: A definition of a Python module with its decorators, or that of a method in a class.
DEFINITION = r"^(?P<indent>(?:    )?)(?:@.*\n(?P=indent))*(?:class|(?:async )?def) "
CHOICES = 6
#: Characters that are read for a token.
LETTERS = 16
#: By what a model chooses.
SCORES = ("likelihood", "gain")
#: Which questions were answered right, (questions,) booleans.
Answers = npt.NDArray[np.bool_]


class Question(NamedTuple):
    """A chapter's end."""

    prefix: Tokens  # tokens before it, as many as the longest context has
    continuations: Tokens  # (CHOICES, tokens), the true one first


def questions_of(
    subject: Subject, chapter: re.Pattern[str], prefix: int, length: int, most: int, seed: int
) -> list[Question]:
    """Return chapter ends that have enough tokens before them, and enough chapters after them."""
    rng = np.random.default_rng(seed)
    found: list[Question] = []
    for document in text_reader(subject.config)(subject.ids.tolist()).split(FORM_FEED):
        starts: dict[str, list[int]] = {}  # by indentation
        for match in chapter.finditer(document):
            starts.setdefault(match.groupdict().get("indent") or "", []).append(match.start())
        for places in starts.values():
            found += _of_places(document, places, subject, prefix, length, rng)
    chosen = rng.permutation(len(found))[:most]
    return [found[i] for i in chosen]


def _of_places(
    document: str, places: list[int], subject: Subject, prefix: int, length: int,
    rng: np.random.Generator,
) -> list[Question]:  # fmt: skip
    """Return the questions of one document, given where its chapters begin."""
    before = [
        _ids(document[max(place - LETTERS * prefix, 0) : place], subject)[-prefix:]
        for place in places
    ]
    after = [_ids(document[place : place + LETTERS * length], subject)[:length] for place in places]
    whole = [i for i, ids in enumerate(after) if len(ids) == length]
    found = []
    for at, i in enumerate(whole):
        later = whole[at + 1 :]
        if len(before[i]) == prefix and len(later) >= CHOICES - 1:
            others = rng.choice(later, CHOICES - 1, replace=False)
            found.append(Question(before[i], np.array([after[j] for j in (i, *others)])))
    return found


def _ids(text: str, subject: Subject) -> Tokens:
    return encoded(text, subject.config)


def scores(
    model: minitorch.DecoderLM, questions: Sequence[Question], context: int, batch: int = 1
) -> npt.NDArray[np.float64]:
    """Return the mean log-likelihoods of continuations, (questions, CHOICES); a prefix is read once."""
    length = questions[0].continuations.shape[1]
    found = []
    for first in tqdm(range(0, len(questions), batch), f"context {context}", leave=False, delay=1):
        part = questions[first : first + batch]
        prefix = np.array([one.prefix[length - context :] for one in part])
        cache = model.make_cache(len(part), context)
        if prefix.shape[1] > 1:
            model.hidden(prefix[:, :-1], cache)
        targets = np.concatenate([one.continuations for one in part])
        last = np.repeat(prefix[:, -1:], CHOICES, axis=0)
        inputs = np.concatenate([last, targets[:, :-1]], axis=1)
        found.append(-token_losses(model, inputs, targets, cache.repeated(CHOICES)).mean(1))
    return np.concatenate(found).reshape(-1, CHOICES)


def difference(short: Answers, long: Answers) -> tuple[float, float, float]:
    """Return by how much a share grows, and its 95 % interval, from answers to the same questions."""
    differences = long.astype(np.float64) - short
    mean = float(differences.mean())
    half = Z_95 * float(differences.std()) / math.sqrt(len(differences))
    return mean, mean - half, mean + half


def judged(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Ask one model and print its accuracy; exit with one line if the text has no question."""
    length, model = args.continuation, subject.model
    contexts = contexts_of(args, model, 2 * length, 2 * length)
    most = contexts[-1] - length
    found = questions_of(subject, args.chapter, most, length, args.questions, args.seed)
    if not found:
        sys.exit(
            f"no chapter of the text has {most} tokens before it and {CHOICES - 1} later ones in its "
            f"document; take shorter --contexts, another --chapter, or a longer text, such as {LIBRARY}"
        )
    print(f"{subject.name}: {len(found)} questions; 95 % intervals in brackets")
    alone = scores(model, found, length + 1, args.batch)
    answers: dict[tuple[str, int], Answers] = {}
    rows = []
    for context in contexts:
        given = scores(model, found, context, args.batch)
        if not np.isfinite(given - alone).all():
            sys.exit(f"{subject.name}: a likelihood is no number; train it again")
        told = []
        for score, values in zip(SCORES, (given, given - alone), strict=True):
            right = answers[score, context] = values[:, 0] > values[:, 1:].max(1)
            share, (low, high) = float(right.mean()), wilson_interval(int(right.sum()), len(right))
            rows.append(
                {"score": score, "context": context, "accuracy": share, "low": low, "high": high}
            )
            told.append(f"{score} {share:6.1%} ({low:.1%} to {high:.1%})")
        print(f"context {context:7,}  {'  '.join(told)}")
    differences = {}
    for score in SCORES:
        more, low, high = difference(answers[score, contexts[0]], answers[score, contexts[-1]])
        differences[score] = {"mean": more, "low": low, "high": high}
        print(
            f"{score}, longest - shortest: {100 * more:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
        )
    return {
        "run": subject.name, "questions": len(found), "continuation": length, "chance": 1 / CHOICES,
        "by_context": rows, "longest_minus_shortest": differences,
    }  # fmt: skip


def panels(rows: list[dict[str, Any]]) -> tuple[Panel, ...]:
    """Return the picture of the record, a panel for each score."""

    def panel_of(score: str) -> Panel:
        def panel(axes: Any) -> None:
            for one in rows:
                own = [row for row in one["by_context"] if row["score"] == score]
                x, y, low, high = (
                    np.array([row[key] for row in own])
                    for key in ("context", "accuracy", "low", "high")
                )
                bars = 100 * np.array([y - low, high - y])
                label = f"{label_of(one)}, {one['questions']} questions"
                axes.errorbar(x, 100 * y, bars, fmt="o-", capsize=3, label=label)
            axes.axhline(100 / CHOICES, color="#166534", linestyle="--", label="guessing")
            axes.set(xlabel="context, tokens", ylabel="right answers, %", title=f"by {score}")
            axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
            axes.legend()

        return panel

    return tuple(map(panel_of, SCORES))


def pattern(text: str) -> re.Pattern[str]:
    """Read the beginning of a chapter, a regular expression."""
    try:
        return re.compile(text, re.MULTILINE)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"must be a regular expression, got {text} ({error})"
        ) from None


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "runs/chapter_break")
    parser.option(
        "--chapter", pattern, DEFINITION,
        "how a chapter begins, a regular expression; a group named indent tells its level",
    )  # fmt: skip
    parser.option("--continuation", COUNT, 128, "tokens of a continuation")
    parser.option("--questions", COUNT, 1000, "chapter ends at most")
    parser.option("--seed", FROM_ZERO, 0, "of the questions")
    parser.option("--batch", COUNT, 1, "questions at a time")
    judge_runs("chapter_break", parser, argv, judged, panels)


if __name__ == "__main__":
    main()
