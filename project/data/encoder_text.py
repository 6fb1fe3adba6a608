"""What an encoder learns from: paragraphs of a text with masked tokens, and texts with classes."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data.sentiment import make_sentence, read_sentences
from data.text import HELD_OUT, Tokens, read_texts
from minitorch.models.encoder_lm import IGNORED

#: Share of the tokens that are predicted; of these, the share that [MASK] replaces, and any token.
PREDICTED, MASKED, SWAPPED = 0.15, 0.8, 0.1
#: Shorter pieces of a text are left out.
SHORTEST = 8
#: Sentences that are made by a rule where there is no file, and the share of texts that are held out.
SENTENCES, HELD_OUT_TEXTS = 2500, 0.2


def mask_id(words: int) -> int:
    """Return the id of the token [MASK], which follows the ordinary tokens."""
    return words


def first_id(words: int) -> int:
    """Return the id of the token [CLS], with which every sequence begins."""
    return words + 1


def mask_tokens(
    rng: np.random.Generator, ids: Tokens, lengths: Tokens, count: int, words: int
) -> tuple[Tokens, Tokens]:
    """Choose tokens to predict, and hide them: 80 % by [MASK], 10 % by any token, 10 % not at all.

    Args:
        rng: Decides alone.
        ids: (batch, seq), which begin with [CLS].
        lengths: (batch,), the tokens of each sequence with [CLS].
        count: Number of tokens to predict; all of them if there are fewer.
        words: Number of ordinary tokens.

    Returns:
        Ids, and the original token where it is predicted and -100 elsewhere, (batch, seq) each.

    Source: Devlin et al. (2019), BERT, section 3.1.
    """
    column = np.arange(ids.shape[1])
    places = np.flatnonzero((column > 0) & (column < lengths[:, None]))
    chosen = rng.choice(places, min(count, len(places)), replace=False)
    fate = rng.random(len(chosen))
    hidden, targets = ids.reshape(-1).copy(), np.full(ids.size, IGNORED, np.int64)
    targets[chosen] = hidden[chosen]
    hidden[chosen[fate < MASKED]] = mask_id(words)
    swapped = chosen[(fate >= MASKED) & (fate < MASKED + SWAPPED)]
    hidden[swapped] = rng.integers(0, words, len(swapped))
    return hidden.reshape(ids.shape), targets.reshape(ids.shape)


def packed(
    ids: Tokens, targets: Tokens, lengths: Tokens, parts: int = 1, totals: int | None = None
) -> tuple[Tokens, Tokens, Tokens]:
    """Return a padded batch without its padding, or without most of it.

    Args:
        ids: (batch, context).
        targets: Of tokens, (batch, context), or of sequences, (batch,).
        lengths: (batch,).
        parts: Parts of a step, of which each is packed by itself.
        totals: Number of different totals that batches of this shape may have; None for any number.

    Returns:
        Ids, (parts * total,): of each part the sequences one after the other, and padding up to the
        total; targets, laid out as ids or, those of sequences, unchanged; and the lengths.
    """
    tokens = lengths.reshape(parts, -1).sum(1)
    step = 1 if totals is None else math.ceil(ids.size / parts / totals)
    total = math.ceil(tokens.max() / step) * step
    shown = np.arange(ids.shape[1]) < lengths[:, None]  # (batch, context)
    places = np.arange(total) < tokens[:, None]  # (parts, total)

    def laid_out(array: Tokens, padding: int) -> Tokens:
        found = np.full(places.shape, padding, array.dtype)
        found[places] = array[shown]
        return found.reshape(-1)

    return laid_out(ids, 0), laid_out(targets, IGNORED) if targets.ndim == 2 else targets, lengths


class Pieces(NamedTuple):
    """Sequences of tokens one after the other.

    Attributes:
        ids: All tokens.
        starts: (count,), where each sequence begins.
        lengths: (count,), its tokens.
    """

    ids: Tokens
    starts: Tokens
    lengths: Tokens

    @classmethod
    def of(cls, parts: Sequence[Tokens]) -> Pieces:
        """Join sequences."""
        lengths = np.array([len(part) for part in parts], np.int64)
        ids = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return cls(ids, np.cumsum(lengths) - lengths, lengths)

    def padded(self, rows: Any, context: int, first: int) -> tuple[Tokens, Tokens]:
        """Return some sequences as (batch, context) behind the token ``first``, and their lengths."""
        lengths = np.minimum(self.lengths[rows] + 1, context)
        out = np.zeros((len(lengths), context), np.int64)
        out[:, 0] = first
        column = np.arange(context - 1)
        shown = column < lengths[:, None] - 1
        out[:, 1:][shown] = self.ids[(self.starts[rows][:, None] + column)[shown]]
        return out, lengths

    @property
    def digest(self) -> str:
        """What tells these sequences from any others."""
        found = hashlib.sha256()
        for array in self:
            found.update(array.astype("<i8").tobytes())
        return found.hexdigest()


def pieces_of(text: str, encode: Callable[[str], Tokens], longest: int) -> Pieces:
    """Return the paragraphs of a text as tokens; longer ones are cut, short pieces are left out."""
    parts: list[Tokens] = []
    for paragraph in re.split(r"\n\s*\n", text):
        ids = encode(paragraph.strip("\n"))
        cut = (ids[start : start + longest] for start in range(0, len(ids), longest))
        parts += [part for part in cut if len(part) >= SHORTEST]
    return Pieces.of(parts)


class MaskedText:
    """The paragraphs of a text, of which a model learns to predict masked tokens.

    Args:
        text: All of it; its last part is held out.
        encode: From a text to tokens.
        words: Number of ordinary tokens.
        context: Tokens of a sequence, with [CLS].
        batch: Sequences in a part of a step.
        parts: Parts of a step.

    Attributes:
        count: Tokens to predict in each part: as many in all, so that its arrays have constant shapes.
        mean_length: Tokens of a sequence on average.
    """

    def __init__(
        self, text: str, encode: Callable[[str], Tokens], words: int, context: int, batch: int,
        parts: int = 1,
    ):  # fmt: skip
        cut = int(len(text) * (1.0 - HELD_OUT))
        texts = text[:cut], text[cut:]
        self.train, self.held_out = (pieces_of(x, encode, context - 1) for x in texts)
        if not (len(self.train.lengths) and len(self.held_out.lengths)):
            sys.exit(
                f"the text has too few paragraphs of {SHORTEST} tokens or more: some must be held out; "
                "take a longer text, or a --context above that"
            )
        self.words, self.parts = words, parts
        mean = float(self.train.lengths.mean())
        self.mean_length = mean + 1.0
        self.count = max(min(round(PREDICTED * mean * batch), batch * SHORTEST), 1)

    @property
    def digest(self) -> str:
        """What tells this text from any other."""
        return self.train.digest + self.held_out.digest

    def batch(
        self, rng: np.random.Generator, batch_size: int, context: int
    ) -> tuple[Tokens, Tokens, Tokens]:
        """Draw paragraphs and mask them: ids and targets, (batch_size, context), and lengths."""
        rows = rng.integers(0, len(self.train.lengths), batch_size)
        ids, lengths = self.train.padded(rows, context, first_id(self.words))
        parts = zip(np.split(ids, self.parts), np.split(lengths, self.parts), strict=True)
        masked = [mask_tokens(rng, *part, self.count, self.words) for part in parts]
        hidden, targets = map(np.concatenate, zip(*masked, strict=True))
        return hidden, targets, lengths

    def held_out_windows(self, context: int) -> tuple[Tokens, Tokens, Tokens]:
        """Return all held-out paragraphs, always masked alike, in an order of their own."""
        rng = np.random.default_rng(0)
        rows = rng.permutation(len(self.held_out.lengths))
        ids, lengths = self.held_out.padded(rows, context, first_id(self.words))
        masked = [  # one by one, so that each has a token to predict
            mask_tokens(
                rng,
                ids[i : i + 1],
                lengths[i : i + 1],
                max(round(PREDICTED * (n - 1)), 1),
                self.words,
            )
            for i, n in enumerate(lengths)
        ]
        hidden, targets = map(np.concatenate, zip(*masked, strict=True))
        return hidden, targets, lengths


class ClassifiedTexts:
    """Texts with classes, of which a fifth is held out.

    Args:
        texts: All of them.
        classes: (count,), the class of each.
        encode: From a text to tokens.
        words: Number of ordinary tokens.
        context: Longer texts are cut to so many tokens, with [CLS].
        seed: Decides which ones are held out.

    Attributes:
        cut: Number of texts that are longer.
        mean_length: Tokens of a text on average.
    """

    def __init__(
        self, texts: Sequence[str], classes: npt.NDArray[np.int64],
        encode: Callable[[str], Tokens], words: int, context: int, seed: int,
    ):  # fmt: skip
        parts = [encode(text) for text in texts]
        self.cut = sum(len(part) >= context for part in parts)
        self.pieces = Pieces.of([part[: context - 1] for part in parts])
        self.classes, self.words = classes, words
        order = np.random.default_rng(seed).permutation(len(parts))
        held_out = max(int(len(parts) * HELD_OUT_TEXTS), 1)
        self.held_out, self.train = order[:held_out], order[held_out:]
        self.mean_length = float(self.pieces.lengths.mean()) + 1.0

    @property
    def digest(self) -> str:
        """What tells these texts from any others."""
        return self.pieces.digest + hashlib.sha256(self.classes.tobytes()).hexdigest()

    def _rows(self, rows: Any, context: int) -> tuple[Tokens, Tokens, Tokens]:
        ids, lengths = self.pieces.padded(rows, context, first_id(self.words))
        return ids, self.classes[rows], lengths

    def batch(
        self, rng: np.random.Generator, batch_size: int, context: int
    ) -> tuple[Tokens, Tokens, Tokens]:
        """Draw texts: ids (batch_size, context), classes and lengths."""
        return self._rows(rng.choice(self.train, batch_size), context)

    def held_out_windows(self, context: int) -> tuple[Tokens, Tokens, Tokens]:
        """Return all held-out texts: ids (count, context), classes and lengths."""
        return self._rows(self.held_out, context)


def read_classified(path: str | None) -> tuple[list[str], npt.NDArray[np.int64], list[str]]:
    """Return texts, their classes and the names of the classes; exit with one line if it fails.

    Args:
        path: A folder with a folder of .txt files for each class, a file with lines of a sentence, a tab
            and 0 or 1, or None for sentences made by a rule; see :mod:`data.sentiment`.
    """
    if path is None or not Path(path).is_dir():
        pairs = (
            [make_sentence() for _ in range(SENTENCES)] if path is None else read_sentences(path)
        )
        if len({label for _, label in pairs}) < 2:
            sys.exit(f"--data {path}: its sentences have one class; at least two are needed")
        texts, labels = zip(*pairs, strict=True)
        return [*texts], np.array(labels, np.int64), ["0", "1"]
    folders = sorted(folder for folder in Path(path).iterdir() if folder.is_dir())
    if len(folders) < 2:
        sys.exit(
            f"--data {path} has {len(folders)} folders; make one for each class, with its texts as .txt "
            "files"
        )
    texts, labels = [], []
    for number, folder in enumerate(folders):
        none = f"--data {path}: the class {folder.name} has no .txt file; add some, or delete it"
        own = read_texts(folder, none).values()
        texts += own
        labels += [number] * len(own)
    return texts, np.array(labels, np.int64), [folder.name for folder in folders]
