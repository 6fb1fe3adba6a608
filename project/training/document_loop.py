"""The training of a classifier of long documents: packed batches, and the micro-F1 of its labels."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from data.long_range import LraTask
from data.sequence_sets import Examples

import minitorch
from minitorch.models.document_classifier import DocumentClassifier
from training.lra_loop import Judged, Training
from training.lra_methods import BACKENDS

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DocumentTask(LraTask):
    """Documents that are cut to a context.

    The ids of a part are a list of arrays, and its targets (count, labels) of bool.

    Attributes:
        context: Tokens of a document at most.
    """

    context: int = 1

    @property
    def length(self) -> int:
        """Tokens of a document at most."""
        return self.context


def counts_of(predicted: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return right, wrong and missing labels of each document, (count, 3).

    Args:
        predicted: (count, labels), bool.
        targets: (count, labels), bool.
    """
    parts = (predicted & targets, predicted & ~targets, ~predicted & targets)
    return np.stack([part.sum(1) for part in parts], axis=1)


def micro_f1(counts: npt.NDArray[Any]) -> float:
    """Return the F1 score of all decisions together, from a result of :func:`counts_of`; 0 without any."""
    right, wrong, missing = counts.sum(0)
    return float(2 * right / max(2 * right + wrong + missing, 1))


def best_threshold(scores: Floats, targets: npt.NDArray[Any]) -> float:
    """Return the threshold with the highest micro-F1: labels whose score is at least as high are predicted.

    Args:
        scores: (count, labels).
        targets: (count, labels), bool.
    """
    order = np.argsort(-scores, axis=None, kind="stable")
    ranked, right = scores.reshape(-1)[order], np.cumsum(targets.reshape(-1)[order])
    f1 = 2 * right / (np.arange(1, len(right) + 1) + targets.sum())
    is_last = np.append(ranked[1:] != ranked[:-1], True)  # equal scores are all predicted, or none
    return float(ranked[np.argmax(np.where(is_last, f1, -1.0))])


def gain_interval(
    first: npt.NDArray[Any], second: npt.NDArray[Any], seed: int = 0, draws: int = 2000
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of micro-F1 of ``second`` minus that of ``first``.

    Args:
        first: Counts of the documents, (count, 3).
        second: Those of the same documents by another model.
        seed: Of the draws.
        draws: Number of times that documents are drawn with replacement.
    """
    rows = np.random.default_rng(seed).integers(0, len(first), (draws, len(first)))
    gains = [micro_f1(second[own]) - micro_f1(first[own]) for own in rows]
    low, high = np.quantile(gains, [0.025, 0.975])
    return float(low), float(high)


def packed(documents: Sequence[npt.NDArray[Any]]) -> tuple[npt.NDArray[np.int64], Any]:
    """Return the ids of documents one after the other, (total,), and their lengths, (count,)."""
    lengths = np.array([len(document) for document in documents])
    return np.concatenate(documents).astype(np.int64), lengths


class DocumentTraining(Training):
    """The training on documents cut to one context; see :class:`training.lra_loop.Training`.

    The accuracy of its row is micro-F1, with the threshold that is best on the validation documents.

    Attributes:
        counts: Right, wrong and missing labels of each document that was judged last.
    """

    counts: npt.NDArray[np.int64]

    def built(
        self, attention: str, backend: str, seed: int, **more: Any
    ) -> minitorch.SequenceClassifier:
        """Return the model before its training."""
        task, own = self.task, self.settings
        return DocumentClassifier(
            task.vocabulary, own.width, own.heads, task.length, task.classes, own.dropout,
            n_layer=own.layers, middle_dim=own.hidden, attention=attention, backend=BACKENDS[backend],
            precision=own.precision, **more,
        )  # fmt: skip

    def inputs(self) -> Generator[tuple[Any, ...], None, None]:
        """Return ids, targets and lengths of the batches that are left."""
        train = self.task.parts["train"]
        while True:
            rows = self.rng.integers(0, len(train.y), self.settings.batch)
            ids, lengths = packed([train.X[row] for row in rows])
            yield ids, train.y[rows], lengths

    @minitorch.no_grad()
    def scores(self, examples: Examples) -> Floats:
        """Return the logits of the labels, (count, labels), without dropout."""
        self.model.eval()
        starts = range(0, len(examples.y), self.settings.batch)
        found = [
            self.model(*packed(examples.X[start : start + self.settings.batch])).to_numpy()  # type: ignore[arg-type]
            for start in starts
        ]
        self.model.train()
        return np.concatenate(found).astype(np.float64)

    def judged(self, examples: Examples, desc: str = "validation") -> Judged:
        """Return micro-F1 and the mean binary cross entropy in nats."""
        valid = self.task.parts["valid"]
        of_valid = self.scores(valid)
        scores = of_valid if desc == "validation" else self.scores(examples)
        y = valid.y if desc == "validation" else examples.y
        self.counts = counts_of(scores >= best_threshold(of_valid, valid.y), y)
        loss = float(np.logaddexp(0.0, np.where(y, -scores, scores)).mean())
        return Judged(micro_f1(self.counts), loss)
