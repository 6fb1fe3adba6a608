"""The tasks of the Long-Range Arena, each as parts of examples with what a model must know of them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import listops, official_files, pathfinder, stand_ins
from data.sequence_sets import Examples, read_or_make

TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
#: Tasks that are generated: they take no files.
GENERATED = ("listops", "pathfinder")
BYTES = 256
#: Tokens of a sequence of text as published.
TEXT_LENGTH = 4000
#: Of the tiny size: examples of each part, and tokens of a sequence.
QUICK_COUNTS = {"train": 64, "valid": 32, "test": 32}
QUICK_LENGTH = 64


@dataclass(frozen=True)
class LraTask:
    """One task.

    Attributes:
        name: One of ``TASKS``.
        source: Where its examples come from; a stand-in says that it is one.
        parts: "train", "valid" and "test".
        vocabulary: Number of tokens.
        classes: Number of classes.
        pad_id: Token that fills up short sequences; None if there is none.
        documents: Documents of an example.
        side: Of the images whose pixels are the tokens, row by row; None if they are none.
        turns: Whether an image that is turned or mirrored has the same class.
        fresh: (steps so far, examples of a batch) to the batches of all later steps, whose examples are
            drawn as they are needed, each once.  None if they are drawn from "train", which else is left
            out of ``parts``.
    """

    name: str
    source: str
    parts: Mapping[str, Examples]
    vocabulary: int
    classes: int
    pad_id: int | None = None
    documents: int = 1
    side: int | None = None
    turns: bool = False
    fresh: Callable[[int, int], Generator[Examples, None, None]] | None = None

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.parts["valid"].X.shape[-1]

    @property
    def model(self) -> dict[str, Any]:
        """What a model must know of it: arguments of :func:`training.lra_methods.build_classifier`."""
        return {
            "vocabulary": self.vocabulary, "length": self.length, "classes": self.classes,
            "pad_id": self.pad_id, "documents": self.documents, "side": self.side,
        }  # fmt: skip

    @property
    def is_stand_in(self) -> bool:
        """Whether it replaces the official files."""
        return self.source.startswith("stand-in")


def load_task(
    name: str, cache: str | Path, data: str | Path | None = None, seed: int = 0, quick: bool = False,
    examples: int | None = None, size: int = 32, length: int = TEXT_LENGTH,
) -> LraTask:  # fmt: skip
    """Return a task; exit with one line if its files are missing.

    Args:
        name: One of ``TASKS``.
        cache: Folder of the sets that are generated, each once.
        data: Folder of the official files; a stand-in is made when None.  Generated tasks take none.
        seed: Of everything that is random.
        quick: Whether to make a tiny version of the task, to see that everything runs.
        examples: Most training examples; the published number, or all of the files, when None.  A
            generated task has an eighth as many to validate and to test.
        size: Of a side of Pathfinder's images.
        length: Bytes of a text, or of each document of a pair.
    """
    if name not in TASKS:
        raise ValueError(f"a task is one of {TASKS}, got {name!r}")
    if data is not None and name in GENERATED:
        sys.exit(f"--data {data}: {name} is generated and reads no files; leave --data out")
    counts = QUICK_COUNTS if quick else None
    if examples is not None:
        counts = {"train": examples, "valid": -(-examples // 8), "test": -(-examples // 8)}
    length = QUICK_LENGTH if quick else length
    if name == "listops":
        return _listops(cache, counts, seed, quick)
    if name == "pathfinder":
        more: dict[str, Any] = {} if counts is None else {"counts": counts}
        file = _file(cache, f"pathfinder-{size}", seed, counts)
        parts = pathfinder.pathfinder(file, size, seed, **more)
        source = f"generated, {size} x {size} pixels"
        return LraTask(name, source, parts, BYTES, pathfinder.CLASSES, side=size, turns=True)
    if name == "image":
        is_own = data is None
        parts = (
            stand_ins.image(counts, seed) if is_own else official_files.cifar10(data, counts, seed)
        )
        source = "stand-in: scikit-learn's digits at 32 x 32" if is_own else "CIFAR-10, grey"
        return LraTask(name, source, parts, BYTES, 10, side=32)
    documents = 2 if name == "retrieval" else 1
    if data is not None:
        read = official_files.aan if name == "retrieval" else official_files.imdb
        source = "AAN" if name == "retrieval" else "IMDB"
        parts = read(data, length, counts, seed)
    else:
        parts = _bytes_of_python(name, cache, length, counts or stand_ins.COUNTS, seed)
        what = "sources and manual" if name == "retrieval" else "sources"
        source = f"stand-in: bytes of Python's {what}"
    return LraTask(name, source, parts, BYTES, 2, pad_id=0, documents=documents)


def _file(cache: str | Path, name: str, seed: int, counts: Mapping[str, int] | None) -> Path:
    number = "" if counts is None else f"-{counts['train']}"
    return Path(cache) / f"{name}{number}-seed-{seed}.npz"


def _listops(
    cache: str | Path, counts: Mapping[str, int] | None, seed: int, quick: bool
) -> LraTask:
    changes: dict[str, Any] = {} if counts is None else {"counts": dict(counts)}
    if quick:
        changes |= {
            "depth": 4,
            "most_arguments": 5,
            "least_length": 10,
            "most_length": QUICK_LENGTH,
        }
    file = _file(cache, "listops-quick" if quick else "listops", seed, counts)
    parts = listops.listops(file, seed, listops.ListOps(**changes))
    vocabulary = len(listops.VOCABULARY)
    return LraTask("listops", "generated", parts, vocabulary, listops.CLASSES, pad_id=0)


def _bytes_of_python(
    name: str, cache: str | Path, length: int, counts: Mapping[str, int], seed: int
) -> dict[str, Examples]:
    recipe = {
        "task": f"{name}, stand-in", "seed": seed, "length": length, "counts": dict(counts),
        "python": platform.python_version(),
    }  # fmt: skip
    make = stand_ins.retrieval if name == "retrieval" else stand_ins.text
    file = _file(cache, f"{name}-stand-in-{length}", seed, counts)
    return read_or_make(file, recipe, lambda: make(length, counts, seed))
