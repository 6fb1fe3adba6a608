"""The official files of the Long-Range Arena: IMDB's folder, AAN's pairs, CIFAR-10's binary version.

Each reader exits with one line that names the files it expects if a folder is missing or holds others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.sequence_sets import PARTS, Examples

#: Share of the training examples that validates, where the publication has no such part.
HELD_OUT = 0.1
#: Of AAN: the names that the Long-Range Arena gave its files, by part.
AAN_FILES = {part: f"new_aan_pairs.{name}.tsv"
             for part, name in zip(PARTS, ("train", "eval", "test"), strict=True)}  # fmt: skip
CIFAR_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST = "test_batch.bin"
#: Bytes of an image of CIFAR-10: its class, then 1,024 of each colour.
CIFAR_RECORD = 1 + 3 * 1024
#: Weights of red, green and blue in a grey value (ITU-R BT.601).
GREY = np.array([0.299, 0.587, 0.114])

Bytes = npt.NDArray[np.uint8]


def as_tokens(text: bytes, length: int) -> Bytes:
    """Return the first bytes of a text, filled up with 0 to one length."""
    tokens = np.zeros(length, np.uint8)
    found = np.frombuffer(text[:length], np.uint8)
    tokens[: len(found)] = found
    return tokens


def some(examples: Examples, count: int | None, seed: int) -> Examples:
    """Return a random choice of examples in random order; all of them when ``count`` is None."""
    order = np.random.default_rng(seed).permutation(len(examples.y))[:count]
    return Examples(examples.X[order], examples.y[order])


def split(examples: Examples, seed: int) -> tuple[Examples, Examples]:
    """Divide examples at random into those to train on and a tenth to validate on."""
    mixed = some(examples, None, seed)
    cut = max(int(len(mixed.y) * HELD_OUT), 1)
    return Examples(mixed.X[cut:], mixed.y[cut:]), Examples(mixed.X[:cut], mixed.y[:cut])


def chosen(
    parts: Mapping[str, Examples], counts: Mapping[str, int] | None, seed: int
) -> dict[str, Examples]:
    """Return at most so many examples of each part, in random order."""
    return {part: some(parts[part], (counts or {}).get(part), seed) for part in PARTS}


def _folder(path: str | Path, expected: str) -> Path:
    place = Path(path)
    if not place.is_dir():
        sys.exit(f"{path}: there is no such folder; expected {expected}")
    return place


# -- IMDB ----------------------------------------------------------------------------------------


def imdb(
    path: str | Path, length: int, counts: Mapping[str, int] | None = None, seed: int = 0
) -> dict[str, Examples]:
    """Read the reviews of IMDB as bytes; class 1 is positive.

    Args:
        path: Of the folder aclImdb, or of the folder that holds it.
        length: Bytes of a review; the rest is cut off.
        counts: Most examples of each part; all of them when None.
        seed: Of the choice, and of the tenth of the training reviews that validates.

    Source: Maas et al., Learning word vectors for sentiment analysis (2011).
    """
    expected = (
        "the unpacked aclImdb with train/pos, train/neg, test/pos and test/neg, text files each"
    )
    folder = _folder(path, expected)
    folder = folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder
    read: dict[str, Examples] = {}
    for part in ("train", "test"):
        texts: list[Bytes] = []
        labels: list[int] = []
        for label, name in enumerate(("neg", "pos")):
            files = sorted((folder / part / name).glob("*.txt"))
            if not files:
                sys.exit(f"{folder / part / name}: no .txt files are there; expected {expected}")
            texts += [as_tokens(file.read_bytes(), length) for file in files]
            labels += [label] * len(files)
        read[part] = Examples(np.array(texts), np.array(labels, np.int64))
    train, valid = split(read["train"], seed)
    return chosen({"train": train, "valid": valid, "test": read["test"]}, counts, seed)


# -- AAN -----------------------------------------------------------------------------------------


def aan(
    path: str | Path, length: int, counts: Mapping[str, int] | None = None, seed: int = 0
) -> dict[str, Examples]:
    """Read pairs of papers of the ACL Anthology as bytes; class 1 is a pair in which one cites the other.

    Args:
        path: Of the folder with the three files.
        length: Bytes of each document; the rest is cut off.
        counts: Most examples of each part; all of them when None.
        seed: Of the choice.

    Returns:
        Parts with X (count, 2, length).

    Source: Radev et al., The ACL Anthology network corpus (2013), paired by Tay et al. (2021).
    """
    expected = f"{', '.join(AAN_FILES.values())} of the Long-Range Arena"
    folder = _folder(path, expected)
    parts = {}
    for part, name in AAN_FILES.items():
        if not (folder / name).is_file():
            sys.exit(f"{folder / name}: there is no such file; expected {expected}")
        pairs, labels = [], []
        for first, second, label in _aan_lines(folder / name):
            pairs.append([as_tokens(text, length) for text in (first, second)])
            labels.append(label)
        if not pairs:
            sys.exit(f"{folder / name}: the file is empty; expected {expected}")
        parts[part] = Examples(np.array(pairs), np.array(labels, np.int64))
    return chosen(parts, counts, seed)


def _aan_lines(path: Path) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield the two texts and the label of each line: label, two ids and two texts, with tabs between."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            try:
                label, _, _, first, second = fields
                value = float(label)
            except ValueError:
                value = -1.0
                first = second = b""
            if value not in (0.0, 1.0):
                sys.exit(
                    f"{path}: line {number} must be 0 or 1, two ids and two texts with tabs between them; "
                    f"it has {len(fields)} fields and begins with {line[:20]!r}"
                )
            yield first, second, int(value)


# -- CIFAR-10 ------------------------------------------------------------------------------------


def cifar10(
    path: str | Path, counts: Mapping[str, int] | None = None, seed: int = 0
) -> dict[str, Examples]:
    """Read the images of CIFAR-10 as 1,024 grey values each, row by row.

    Args:
        path: Of the folder cifar-10-batches-bin, or of the folder that holds it.
        counts: Most examples of each part; all of them when None.
        seed: Of the choice, and of the tenth of the training images that validates.

    Source: Krizhevsky, Learning multiple layers of features from tiny images (2009), binary version.
    """
    expected = f"CIFAR-10's binary version: {CIFAR_TRAIN[0]} to {CIFAR_TRAIN[-1]} and {CIFAR_TEST}"
    folder = _folder(path, expected)
    inner = folder / "cifar-10-batches-bin"
    folder = inner if inner.is_dir() else folder
    batches = [_cifar_batch(folder / name, expected) for name in CIFAR_TRAIN]
    joined = Examples(
        np.concatenate([batch.X for batch in batches]),
        np.concatenate([batch.y for batch in batches]),
    )
    train, valid = split(joined, seed)
    test = _cifar_batch(folder / CIFAR_TEST, expected)
    return chosen({"train": train, "valid": valid, "test": test}, counts, seed)


def _cifar_batch(path: Path, expected: str) -> Examples:
    if not path.is_file():
        sys.exit(f"{path}: there is no such file; expected {expected}")
    data = np.fromfile(path, np.uint8)
    if data.size == 0 or data.size % CIFAR_RECORD:
        sys.exit(
            f"{path}: {data.size} bytes are no whole number of images of {CIFAR_RECORD} bytes; expected "
            f"{expected}"
        )
    records = data.reshape(-1, CIFAR_RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() > 9:
        sys.exit(f"{path}: classes are 0 to 9, got {labels.max()}; expected {expected}")
    colours = records[:, 1:].reshape(-1, 3, 1024)  # (count, colours, pixels)
    grey = np.round(np.einsum("c,ncp->np", GREY, colours)).astype(np.uint8)  # (count, 1024)
    return Examples(grey, labels)
