"""How well trained language models predict a text, by the length of the context that they are given.

python project/measure.py perplexity --runs runs/gpt --text library --contexts 512 2048 8192 --stride 512
python project/measure.py chapter_break --runs runs/gpt --text library
python project/measure.py chapter_break --runs DIR --text book.txt --all --chapter "^Chapter "

A model is a run of ``train_gpt.py``, one of its checkpoints, or a folder in the format of Hugging Face;
of the text the last tenth is judged, which a run on this text does not learn, or with ``--all`` the
whole.

``perplexity``: a window slides over the text by --stride tokens, and each token is judged in the first
window that it is in, so that all but the first ones have at least context - stride tokens before them.
With a stride of the context windows do not overlap, and the mean loss by distance from their beginning
follows.

``chapter_break``: which of six continuations follows the end of a chapter?  One is the beginning of the
next chapter, the others are those of later chapters of the same document, drawn at random.  A form feed
divides documents; a chapter of a Python module is a function, a class or a method, which competes with
others at the same indentation.  A model chooses the continuation with the highest mean log-likelihood
and, as a second figure, the one whose likelihood gains most from the context, since some are likely
after any text.

Source: Sun, Thai and Iyyer (2022), ChapterBreak: a challenge dataset for long-range language models; for
the gain, Holtzman et al. (2021), Surface form competition.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from bench.kit import Case, Measurement, Record, Run, markdown
from bench.training_contestants import BACKENDS
from data.text import FORM_FEED, LIBRARY, Corpus, Tokens, read_text
from scipy.stats import binomtest
from tqdm import tqdm
from training.gpt_files import load_run
from training.gpt_tokens import encoded, text_reader

import minitorch
from minitorch.nn import softmax_loss

Losses = npt.NDArray[np.float64]
#: Logits that are in memory at a time, about.
CHUNK = 1 << 25
#: The shortest context of perplexity, and the first positions that are averaged.
LEAST = 64
#: A definition of a Python module with its decorators, or that of a method in a class.
DEFINITION = r"^(?P<indent>(?:    )?)(?:@.*\n(?P=indent))*(?:class|(?:async )?def) "
#: Continuations; characters that are read for a token; by what a model chooses.
CHOICES, LETTERS, SCORES = 6, 16, ("likelihood", "gain")
#: Standard normal quantile of a two-sided interval of 95 %.
Z_95 = 1.959964


class Subject(NamedTuple):
    """A model and the text that it is to judge."""

    name: str  # where it was read
    model: minitorch.DecoderLM  # in evaluation mode
    config: dict[str, Any]  # of the model; it says what tokens are
    ids: Tokens  # the text


def read_subject(path: str, run: Run) -> Subject:
    """Return a model and the text in its tokens; exit with one line if they cannot be read."""
    model, config = load_run(path, BACKENDS[run.device], run.attention or None)
    model.eval()
    text = read_text(run.text or None)
    try:
        ids = encoded(text, config)
    except ValueError as error:
        sys.exit(f"{path} cannot read the text: {error}")
    if not run.all:
        ids = Corpus.from_ids(text, ids, 1).held_out
    if len(ids) < 2:
        sys.exit(f"the text has {len(ids)} tokens, at least 2 are needed; take a longer one")
    return Subject(path, model, config, ids)


def contexts_of(run: Run, model: minitorch.DecoderLM, first: int, least: int = 1) -> list[int]:
    """Return the contexts to judge in ascending order, or powers of two; exit if one does not fit."""
    most = model.n_positions
    powers = [2**i for i in range(most.bit_length()) if 2**i >= first]
    contexts = sorted({*(run.contexts or [*powers, most])})
    if least > most or not least <= contexts[0] <= contexts[-1] <= most:
        asked = " ".join(map(str, contexts))
        sys.exit(
            f"--contexts must be from {least} to {most}, the context of the model, got {asked}"
        )
    return contexts


def token_losses(model: minitorch.DecoderLM, ids: Any, targets: Any, cache: Any = None) -> Losses:
    """Return the loss of each target, the token after an id, nats, (batch, seq); some rows at a time."""
    hidden = model.hidden(ids, cache)
    rows, wanted = hidden.view(hidden.size // model.n_embd, model.n_embd), np.reshape(targets, -1)
    step, found = max(CHUNK // model.n_vocab, 1), []
    for first in range(0, len(wanted), step):
        part = rows[first : first + step]
        logits = model.score(part.view(1, *part.shape)).view(part.shape[0], model.n_vocab)
        losses = softmax_loss(logits.to(np.float32), wanted[first : first + step])
        found.append(losses.to_numpy().astype(np.float64))
    return np.concatenate(found).reshape(np.shape(targets))


def by_run(judge: Any, run: Run) -> Iterator[Case]:
    for path in run.runs:
        yield {"run": path}, partial(judge, run, read_subject(path, run))


# -- perplexity --------------------------------------------------------------------------------------


def windows(count: int, context: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yield where windows over ``count`` tokens begin, and how many tokens an earlier one has judged."""
    for start in range(0, max(count - context, 0) + stride, stride):
        yield start, context - stride if start else 0


def sliding_losses(
    model: minitorch.DecoderLM, ids: Tokens, context: int, stride: int, batch: int = 1
) -> tuple[Losses, Tokens]:
    """Return the loss of each token but the first, and its position in its window."""
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


def by_position(losses: Losses, places: Tokens, context: int) -> list[Record]:
    """Return the mean loss of tokens by their positions: the first ones, and twice as many each time."""
    bounds = [0, *(LEAST << i for i in range(64) if LEAST << i < context), context]
    rows = []
    for start, stop in pairwise(bounds):
        own = losses[(places >= start) & (places < stop)]
        if own.size:
            rows.append({"from": start, "to": stop, "tokens": own.size, "loss": float(own.mean())})
    return rows


def perplexities(run: Run, subject: Subject) -> Record:
    ids = subject.ids[: run.tokens + 1 if run.tokens else None]
    contexts, rows = contexts_of(run, subject.model, LEAST), []
    for context in contexts:
        stride = min(run.stride, context)
        losses, _ = sliding_losses(subject.model, ids, context, stride, run.batch)
        loss = float(losses.mean())
        if not math.isfinite(loss):
            sys.exit(
                f"{subject.name}: the loss at a context of {context} is {loss}; train it again"
            )
        rows.append(
            {"context": context, "stride": stride, "loss": loss, "perplexity": math.exp(loss)}
        )
    alone = sliding_losses(subject.model, ids, contexts[-1], contexts[-1], run.batch)
    positions = by_position(*alone, contexts[-1])
    return {"tokens": len(ids) - 1, "by_context": rows, "by_position": positions}


def perplexity_table(record: Record) -> str:
    """Return the perplexity of each model by the context that it is given."""
    runs = [{row["context"]: row for row in run["by_context"]} for run in record["rows"]]
    lines = []
    for context in sorted({context for run in runs for context in run}):
        found = [run.get(context) for run in runs]
        stride = next(row["stride"] for row in found if row is not None)
        cells = ("" if row is None else f"{row['perplexity']:.3f}" for row in found)
        lines.append([f"{context:,}", str(stride), *cells])
    names = [f"perplexity of {run['run']}" for run in record["rows"]]
    return markdown(["context", "stride", *names], lines)


# -- chapters ----------------------------------------------------------------------------------------


class Question(NamedTuple):
    """A chapter's end."""

    prefix: Tokens  # tokens before it, as many as the longest context has
    continuations: Tokens  # (CHOICES, tokens), the true one first


def questions_of(
    subject: Subject, chapter: re.Pattern[str], prefix: int, length: int, most: int, seed: int
) -> list[Question]:
    """Return chapter ends that have enough tokens before them, and enough chapters after them."""
    rng, found = np.random.default_rng(seed), list[Question]()
    for document in text_reader(subject.config)(subject.ids.tolist()).split(FORM_FEED):
        starts: dict[str, list[int]] = {}  # by indentation
        for match in chapter.finditer(document):
            starts.setdefault(match.groupdict().get("indent") or "", []).append(match.start())
        for places in starts.values():
            before = [
                encoded(document[max(place - LETTERS * prefix, 0) : place], subject.config)[
                    -prefix:
                ]
                for place in places
            ]
            after = [
                encoded(document[place : place + LETTERS * length], subject.config)[:length]
                for place in places
            ]
            whole = [i for i, ids in enumerate(after) if len(ids) == length]
            for at, i in enumerate(whole):
                later = whole[at + 1 :]
                if len(before[i]) == prefix and len(later) >= CHOICES - 1:
                    others = rng.choice(later, CHOICES - 1, replace=False)
                    found.append(Question(before[i], np.array([after[j] for j in (i, *others)])))
    return [found[i] for i in rng.permutation(len(found))[:most]]


def scores(
    model: minitorch.DecoderLM, questions: Sequence[Question], context: int, batch: int = 1
) -> npt.NDArray[np.float64]:
    """Return the mean log-likelihoods of continuations, (questions, CHOICES); a prefix is read once."""
    length, found = questions[0].continuations.shape[1], []
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


def chapters(run: Run) -> Iterator[Case]:
    try:
        chapter = re.compile(run.chapter, re.MULTILINE)
    except re.error as error:
        sys.exit(f"--chapter must be a regular expression, got {run.chapter} ({error})")
    yield from by_run(partial(answered, chapter), run)


def answered(chapter: re.Pattern[str], run: Run, subject: Subject) -> Record:
    """Ask one model; exit with one line if the text has no question."""
    length, model = run.continuation, subject.model
    contexts = contexts_of(run, model, 2 * length, 2 * length)
    most = contexts[-1] - length
    found = questions_of(subject, chapter, most, length, run.questions, run.seed)
    if not found:
        sys.exit(
            f"no chapter of the text has {most} tokens before it and {CHOICES - 1} later ones in its "
            f"document; take shorter --contexts, another --chapter, or a longer text, such as {LIBRARY}"
        )
    alone, rows = scores(model, found, length + 1, run.batch), list[Record]()
    answers: dict[Any, Any] = {}
    for context in contexts:
        given = scores(model, found, context, run.batch)
        if not np.isfinite(given - alone).all():
            sys.exit(f"{subject.name}: a likelihood is no number; train it again")
        for score, values in zip(SCORES, (given, given - alone), strict=True):
            right = answers[score, context] = values[:, 0] > values[:, 1:].max(1)
            low, high = binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
            share = {"accuracy": float(right.mean()), "low": float(low), "high": float(high)}
            rows.append({"score": score, "context": context, **share})
    differences = {}
    for score in SCORES:
        more = answers[score, contexts[-1]].astype(np.float64) - answers[score, contexts[0]]
        mean, half = float(more.mean()), Z_95 * float(more.std()) / math.sqrt(len(more))
        differences[score] = {"mean": mean, "low": mean - half, "high": mean + half}
    return {
        "questions": len(found), "continuation": length, "chance": 1 / CHOICES, "by_context": rows,
        "longest_minus_shortest": differences,
    }  # fmt: skip


def _with_interval(row: Record, key: str, form: str) -> str:
    return f"{row[key]:{form}} ({row['low']:{form}} to {row['high']:{form}})"


def chapter_table(record: Record) -> str:
    """Return how often each model finds the next chapter, by context."""
    lines = []
    for run in record["rows"]:
        for context in sorted({row["context"] for row in run["by_context"]}):
            own = {row["score"]: row for row in run["by_context"] if row["context"] == context}
            cells = (_with_interval(own[name], "accuracy", ".1%") for name in SCORES)
            lines.append([f"{run['run']}, {context:,}", *cells])
        gained = run["longest_minus_shortest"]
        cells = (_with_interval(gained[name], "mean", "+.1%") for name in SCORES)
        lines.append([f"{run['run']}, longest minus shortest", *cells])
    return markdown(["run, context", *(f"accuracy by {name}" for name in SCORES)], lines)


COMMON = {
    "runs": ("runs/gpt",), "text": "", "all": False, "contexts": (), "attention": "", "batch": 1
}  # fmt: skip
PERPLEXITY = {"stride": 512, "tokens": 0, **COMMON}
CHAPTERS = {"chapter": DEFINITION, "continuation": 128, "questions": 1000, "seed": 0, **COMMON}
ALIKE: Record = {"choices": {"attention": ("flash", "naive")}, "paths": ("minitorch/models",)}
MEASUREMENTS = (
    Measurement(
        "perplexity", "What is the loss of trained models, by context and by position in it?",
        partial(by_run, perplexities), {"cpu": {"normal": PERPLEXITY}, "cuda": {"normal": PERPLEXITY}},
        table=perplexity_table, **ALIKE,
    ),
    Measurement(
        "chapter_break", "Which of six continuations of a chapter do trained models find likely?",
        chapters, {"cpu": {"normal": CHAPTERS}, "cuda": {"normal": CHAPTERS}}, table=chapter_table,
        **ALIKE,
    ),
)  # fmt: skip
