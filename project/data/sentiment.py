"""Sentences with a sentiment: made by a rule whose optimum is known, or read from a file of the user's.

The rule.  A sentence has two clauses, such as "the plot was quite dull".  Its sentiment is positive or
negative, each in half of the sentences.

- Plain, in half of the sentences: both clauses have an adjective of the sentence's sentiment.
- Negated, in the other half: so has one clause; the other has "not" and an adjective of the opposite
  sentiment: "the plot was not dull and the music was lovely".

Everything else is drawn without regard to the sentiment.  Last, the label of one sentence in twenty is
turned over.  So the best accuracy is 95 %, at a loss of 0.199 nats.  A negated sentence has one "not", one
good word and one bad word whatever its sentiment: all that tells is which of them "not" stands by.  No
bag of words, linear or not, can do better than 72.5 %, the mean of 95 % and of a guess.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

#: Share of labels that are turned over.
NOISE = 0.05
BEST_ACCURACY = 1.0 - NOISE
BEST_LOSS = -(NOISE * math.log(NOISE) + (1.0 - NOISE) * math.log(1.0 - NOISE))
BEST_OF_A_BAG = 0.5 * BEST_ACCURACY + 0.5 * 0.5

GOOD = ("lovely", "brilliant", "funny", "moving", "charming", "clever", "fresh", "honest", "superb")
BAD = ("dull", "clumsy", "boring", "awful", "stale", "silly", "hollow", "weak", "tedious", "lazy")
NOUNS = ("plot", "music", "acting", "script", "ending", "camera", "cast", "dialogue", "pace")
DEGREES = ("", "", "very ", "quite ")
NEGATED_DEGREES = ("", "very ", "at all ", "in any way ")
JOINTS = ("and", "but", "while", ",", "; still ,")
ENDINGS = ("", "", ", i think", ", said my friend", "on the whole")


def make_sentence() -> tuple[str, int]:
    """Draw a sentence and its label, 1 for positive, with Python's ``random``."""
    positive = random.random() < 0.5
    negated = random.choice((0, 1)) if random.random() < 0.5 else None
    clauses = []
    for i, noun in enumerate(random.sample(NOUNS, 2)):
        words = GOOD if positive != (i == negated) else BAD
        degree = random.choice(NEGATED_DEGREES if i == negated else DEGREES)
        adjective = f"{degree}{random.choice(words)}"
        clauses.append(f"the {noun} was {'not ' if i == negated else ''}{adjective}")
    sentence = f"{clauses[0]} {random.choice(JOINTS)} {clauses[1]} {random.choice(ENDINGS)}"
    return " ".join(sentence.split()), int(positive != (random.random() < NOISE))


@dataclass(frozen=True)
class Sentences:
    """Sentences as numbers.

    Attributes:
        X: (count, length) ids of words; 0 stands for an unknown word, and for none at the end.
        y: (count,) labels, 0 or 1.
        texts: The sentences.
    """

    X: npt.NDArray[np.int64]
    y: npt.NDArray[np.int64]
    texts: list[str]


def vocabulary(sentences: Sequence[str]) -> dict[str, int]:
    """Number the words of some sentences, from 1 on."""
    words = sorted({word for sentence in sentences for word in sentence.split()})
    return {word: i for i, word in enumerate(words, 1)}


def encode(pairs: Sequence[tuple[str, int]], words: dict[str, int], length: int) -> Sentences:
    """Return sentences as numbers, each cut or filled up to one length.

    Args:
        pairs: Sentences and labels.
        words: The vocabulary.
        length: Words of a row.
    """
    X = np.zeros((len(pairs), length), np.int64)
    for row, (sentence, _) in zip(X, pairs, strict=True):
        ids = [words.get(word, 0) for word in sentence.split()[:length]]
        row[: len(ids)] = ids
    labels = np.array([label for _, label in pairs], np.int64)
    return Sentences(X, labels, [sentence for sentence, _ in pairs])


def read_sentences(path: str) -> list[tuple[str, int]]:
    """Read lines of a sentence, a tab and a label, 0 or 1; exit with one line if it fails.

    A first line "sentence<TAB>label", as in the files of SST-2, is skipped.
    """
    pairs = []
    for place, line in enumerate(_text(path, "--data").splitlines(), 1):
        sentence, tab, label = line.rpartition("\t")
        if not line.strip() or (place == 1 and label.strip() == "label"):
            continue
        if not tab or label.strip() not in ("0", "1") or not sentence.strip():
            sys.exit(
                f"--data {path}: line {place} must be a sentence, a tab and 0 or 1; it is {line!r:.60}"
            )
        pairs.append((sentence.lower().strip(), int(label)))
    return pairs


def read_vectors(path: str, words: dict[str, int]) -> npt.NDArray[np.float32]:
    """Read vectors of words, in lines of a word and numbers as GloVe's; exit with one line if it fails.

    Args:
        path: Of the file.
        words: The vocabulary; other words are left out.

    Returns:
        (1 + words, dimension); zeros for a word that the file lacks.
    """
    vectors: dict[int, list[float]] = {}
    for place, line in enumerate(_text(path, "--embeddings").splitlines(), 1):
        word, *numbers = line.rstrip().split(" ")
        if word not in words:
            continue
        try:
            vectors[words[word]] = [float(x) for x in numbers]
        except ValueError as error:
            sys.exit(f"--embeddings {path}: line {place} must be a word and numbers ({error})")
    lengths = {len(vector) for vector in vectors.values()}
    if len(lengths) != 1 or 0 in lengths:
        found = f"vectors of lengths {sorted(lengths)}" if lengths else "no word of the sentences"
        sys.exit(f"--embeddings {path}: expected vectors of one length, found {found}")
    table = np.zeros((len(words) + 1, lengths.pop()), np.float32)
    for i, vector in vectors.items():
        table[i] = vector
    return table


def _text(path: str, option: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        sys.exit(f"{option} {path}: not UTF-8 text ({error.reason} at byte {error.start})")
    except OSError as error:
        sys.exit(f"{option} {path}: {error.strerror}; pass the path of a text file")
