"""Long documents with several labels each: a folder of texts, or the sources of Python's standard library.

The labels of a source file are the modules that it imports.  The import statements are blanked, so that the
evidence is the use of the modules, which is spread over the file.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data.text import library_folder, read_texts

#: A token: a word, a number, or any other character that is not blank.
TOKEN = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|_")
#: Id of the tokens that a vocabulary lacks.
UNKNOWN = 0
#: Labels of the corpus of sources: the modules that most files import.
MODULES = 30
#: Shares of the documents that each part has.
SHARES = {"train": 0.7, "valid": 0.1, "test": 0.2}


class Documents(NamedTuple):
    """Documents with labels.

    Attributes:
        texts: The documents.
        targets: (count, labels), True for the labels of a document.
        labels: Names of the labels.
        source: Where they come from.
    """

    texts: list[str]
    targets: npt.NDArray[np.bool_]
    labels: tuple[str, ...]
    source: str


def read_folder(path: str | Path) -> Documents:
    """Read ``path/label/*.txt``; exit with one line if there is none, or a label has no document.

    Files of one name under several labels are one document that has all of them; their texts must be the
    same.

    Args:
        path: Of the folder.
    """
    folder = Path(path)
    places = sorted(x for x in folder.iterdir() if x.is_dir()) if folder.is_dir() else []
    if not places:
        sys.exit(
            f"--data {path}: there are no folders of labels; expected {path}/LABEL/*.txt, a file for each "
            "document"
        )
    texts: dict[str, str] = {}
    owners: dict[str, set[str]] = {}
    for place in places:
        none = f"{place}: the label has no documents; put .txt files into the folder, or remove it"
        for name, text in read_texts(place, none).items():
            if texts.setdefault(name, text) != text:
                first = min(owners[name])
                sys.exit(
                    f"{place / name}: the text differs from that of {folder / first / name}; documents of "
                    "one name are one document with several labels, so rename one of them"
                )
            owners.setdefault(name, set()).add(place.name)
    labels = tuple(place.name for place in places)
    targets = np.array([[label in owners[name] for label in labels] for name in texts])
    return Documents([*texts.values()], targets, labels, f"{len(texts)} documents of {folder.name}")


def without_imports(text: str) -> tuple[str, set[str]]:
    """Return a Python source whose import statements are blanked, and the modules that it imports.

    Raises:
        SyntaxError: If it is none.
    """
    lines, modules = text.split("\n"), set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.module is not None and not node.level:
                modules.add(node.module.partition(".")[0])
        else:
            continue
        for number in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[number] = ""
    return "\n".join(lines), modules


def python_library(shortest: int, folder: Path | None = None, modules: int = MODULES) -> Documents:
    """Return the sources of Python's standard library; the labels are the modules that they import.

    Args:
        shortest: Tokens that a document has at least.
        folder: Of the sources; those of this Python when None.
        modules: Number of labels.
    """
    found = []
    place = library_folder() if folder is None else folder
    for file in sorted(place.rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        try:
            text, imported = without_imports(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):  # files that test the parser
            continue
        if len(TOKEN.findall(text)) >= shortest:
            found.append((text, imported))
    counts = Counter(name for _, imported in found for name in imported)
    labels = tuple(
        name for name, _ in sorted(counts.items(), key=lambda x: (-x[1], x[0]))[:modules]
    )
    targets = np.array([[name in imported for name in labels] for _, imported in found])
    version = ".".join(map(str, sys.version_info[:2]))
    source = f"{len(found)} sources of Python {version}'s library, without import statements"
    return Documents([text for text, _ in found], targets, labels, source)


def divided(count: int, seed: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return the numbers of the documents of each part."""
    order = np.random.default_rng(seed).permutation(count)
    bounds = np.cumsum([round(SHARES[part] * count) for part in SHARES])[:-1]
    return dict(zip(SHARES, np.split(order, bounds), strict=True))


def vocabulary(texts: Sequence[str], size: int) -> dict[str, int]:
    """Return the ids of the most frequent tokens, from 1; the others have :data:`UNKNOWN`.

    Args:
        texts: Of the training documents.
        size: Ids at most, with that of the others.
    """
    counts = Counter(token for text in texts for token in TOKEN.findall(text))
    frequent = sorted(counts.items(), key=lambda x: (-x[1], x[0]))[: size - 1]
    return {token: number for number, (token, _) in enumerate(frequent, UNKNOWN + 1)}


def encoded(text: str, ids: dict[str, int], longest: int) -> npt.NDArray[np.uint16]:
    """Return the ids of the first tokens of a text, at most ``longest``; one at least."""
    found = (match.group() for match in TOKEN.finditer(text))
    tokens = [ids.get(token, UNKNOWN) for token, _ in zip(found, range(longest), strict=False)]
    return np.array(tokens or [UNKNOWN], np.uint16)
