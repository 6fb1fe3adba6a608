"""Stand-ins for tasks of the Long-Range Arena whose official files cannot be had, made offline.

They have the shape of the official tasks and not their content: bytes of the Python distribution's own
sources and manual for Text and Retrieval, scikit-learn's handwritten digits for Image.  A figure of a
stand-in cannot be compared with a published one, and every table names it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from data.official_files import as_tokens, chosen
from data.sequence_sets import PARTS, Examples
from data.text import library_folder

#: Packages of the standard library whose sources make the two classes of the Text stand-in.
TOPICS = (
    ("email", "html", "http", "json", "urllib", "xml"),
    ("asyncio", "concurrent", "multiprocessing"),
)
#: Shares of the documents that each part has; no document is in two parts.
SHARES = {"train": 0.8, "valid": 0.1, "test": 0.1}
#: Examples of each part of a stand-in made of bytes.
COUNTS = {"train": 8000, "valid": 1000, "test": 1000}
#: Bytes that a document has at least.
SHORTEST = 600


def _sources(folders: Sequence[str]) -> list[bytes]:
    """Return the source files of packages, in a fixed order, and those of modules for ``.``."""
    files, library = [], library_folder()
    for name in folders:
        found = (library / name).rglob("*.py") if name != "." else library.glob("*.py")
        files += sorted(found)
    return [text for file in files if len(text := file.read_bytes()) >= SHORTEST]


def _manual() -> list[bytes]:
    """Return the topics of Python's manual."""
    from pydoc_data.topics import topics

    texts = (topics[name].encode() for name in sorted(topics))
    return [text for text in texts if len(text) >= SHORTEST]


def divided(documents: Sequence[bytes], seed: int) -> dict[str, list[bytes]]:
    """Divide documents among the parts."""
    order = np.random.default_rng(seed).permutation(len(documents))
    bounds = np.cumsum([round(SHARES[part] * len(documents)) for part in PARTS[:-1]])
    return {
        part: [documents[i] for i in rows]
        for part, rows in zip(PARTS, np.split(order, bounds), strict=True)
    }


def _window(random: np.random.Generator, text: bytes, length: int) -> bytes:
    """Return a window of a text, which is shorter where the text is."""
    start = int(random.integers(max(len(text) - length, 0) + 1))
    return text[start : start + length]


def text(length: int, counts: Mapping[str, int], seed: int = 0) -> dict[str, Examples]:
    """Make the stand-in for Text: which of two topics is a window of a source file about?

    Class 0 is network protocols and data formats, class 1 concurrency; see ``TOPICS``.

    Args:
        length: Bytes of a window.
        counts: Examples of each part.
        seed: Of everything that is random.
    """
    classes = [divided(_sources(folders), seed) for folders in TOPICS]
    made = {}
    for number, part in enumerate(PARTS):
        random = np.random.default_rng([seed, number])
        y = random.integers(2, size=counts[part])
        windows = []
        for label in y:
            documents = classes[label][part]
            window = _window(random, documents[random.integers(len(documents))], length)
            windows.append(as_tokens(window, length))
        made[part] = Examples(np.array(windows), y)
    return made


def retrieval(length: int, counts: Mapping[str, int], seed: int = 0) -> dict[str, Examples]:
    """Make the stand-in for Retrieval: are two passages of one document (class 1) or of two (class 0)?

    Documents are the modules of the standard library and the topics of the manual.  The passages of one
    document do not overlap: one is from its first half, one from its second.  So are those of two.

    Args:
        length: Bytes of a passage at most.
        counts: Examples of each part.
        seed: Of everything that is random.

    Returns:
        Parts with X (count, 2, length).
    """
    documents = divided(_sources((".", *sum(TOPICS, ()))) + _manual(), seed)
    made = {}
    for number, part in enumerate(PARTS):
        random, own = np.random.default_rng([seed, number]), documents[part]
        y = random.integers(2, size=counts[part])
        pairs = []
        for label in y:
            first = second = int(random.integers(len(own)))
            if not label:
                second = (first + int(random.integers(1, len(own)))) % len(own)
            halves = own[first][: len(own[first]) // 2], own[second][len(own[second]) // 2 :]
            pairs.append([as_tokens(_window(random, half, length), length) for half in halves])
        made[part] = Examples(np.array(pairs), y)
    return made


def image(counts: Mapping[str, int] | None, seed: int = 0) -> dict[str, Examples]:
    """Make the stand-in for Image: scikit-learn's 1,797 handwritten digits at 32 x 32 pixels.

    Args:
        counts: Most examples of each part.
        seed: Of the division into parts.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit(
            "the stand-in for Image needs scikit-learn, which is missing: pip install -e "
            '".[digits]", or pass the folder of CIFAR-10\'s binary version with --data'
        )
    digits: dict[str, np.ndarray] = load_digits()  # type: ignore[assignment]
    large = digits["images"].repeat(4, 1).repeat(4, 2)  # (count, 32, 32), from 0 to 16
    X = np.round(large.reshape(len(large), -1) * (255 / 16)).astype(np.uint8)  # (count, 1024)
    y = digits["target"].astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(y))
    bounds = np.cumsum([round(SHARES[part] * len(y)) for part in PARTS[:-1]])
    rows = dict(zip(PARTS, np.split(order, bounds), strict=True))
    return chosen({part: Examples(X[i], y[i]) for part, i in rows.items()}, counts, seed)
