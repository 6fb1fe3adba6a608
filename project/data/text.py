"""Text for the language models: the manual that ships with Python, or a file of the user's."""

from __future__ import annotations

import hashlib
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

#: Part of the text that is never trained on: its end.
HELD_OUT = 0.1


#: The name of the standard library as a text, and what divides the documents of a text.
LIBRARY, FORM_FEED = "library", "\f"
#: Folders of the standard library without prose or programs of its own: tests, tables, the manual.
NOT_READ = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip

#: What a writing begins with, where the text has these characters.
PROMPT = "The "


def manual_text() -> str:
    """Return the topics of Python's own manual, some 400,000 characters of English, without repeats.

    Many topics quote whole sections of each other.  Left in, a twelfth of the held-out windows would
    stand word for word in the training text, and the held-out loss would be too good.
    """
    from pydoc_data.topics import topics

    return without_repeats("\n\n".join(topics[name] for name in sorted(topics)))


def without_repeats(text: str) -> str:
    """Return a text with each paragraph where it first appears only, whatever its line breaks."""
    first: dict[str, str] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        first.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(first.values())


def library_folder() -> Path:
    """Return the folder of the standard library's sources; exit with one line if they are missing."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not (folder / "json" / "decoder.py").is_file():
        sys.exit(
            f"{folder}: the sources of this Python's standard library are missing; install them, or pass "
            "data of your own"
        )
    return folder


def library_text() -> str:
    """Return the modules of the standard library, some 8 million characters, a form feed between two.

    They come in a random order, always the same one, so that those at the end are like the others.
    """
    folder = library_folder()
    texts = [
        path.read_text(encoding="utf-8", errors="replace").replace(FORM_FEED, "")
        for path in sorted(folder.rglob("*.py"))
        if NOT_READ.isdisjoint(path.relative_to(folder).parts)
    ]
    order = np.random.default_rng(0).permutation(len(texts))
    return FORM_FEED.join(texts[i] for i in order)


def read_text(path: str | None) -> str:
    """Return a text: of a file, of the standard library, or of the manual; exit with one line if it fails.

    Args:
        path: Of a file in UTF-8; :data:`LIBRARY` for the standard library, None for the manual.
    """
    if path is None:
        return manual_text()
    if path == LIBRARY:
        return library_text()
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        sys.exit(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); convert it first")
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}; pass the path of a text file, or none for the manual")


def read_texts(folder: Path, why_none: str) -> dict[str, str]:
    """Return the .txt files of a folder by their names; exit with one line if there is none, or it fails.

    Args:
        folder: The folder.
        why_none: What is said if it has no such file.
    """
    texts, file = {}, folder
    try:
        for file in sorted(folder.glob("*.txt")):
            texts[file.name] = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--data {file}: cannot be read as UTF-8 text ({error})")
    return texts or sys.exit(why_none)


@dataclass(frozen=True)
class Corpus:
    """A text as tokens.

    Attributes:
        characters: The vocabulary; a character's id is its place in it.  Empty where tokens are not
            characters.
        train: Ids to learn from.
        held_out: Ids to judge by.
        prompt: What a writing begins with, unless the user says otherwise.
    """

    characters: str
    train: Tokens
    held_out: Tokens
    prompt: str

    @classmethod
    def from_text(cls, text: str, context: int, characters: str | None = None) -> Corpus:
        """Split a text; exit with one line if it is too short for the context.

        Args:
            text: All of it.
            context: Of the model.
            characters: The vocabulary; those of the text, in order, when None.
        """
        characters = "".join(sorted(set(text))) if characters is None else characters
        return cls.from_ids(text, encode(text, characters), context, characters)

    @classmethod
    def from_ids(cls, text: str, ids: Tokens, context: int, characters: str = "") -> Corpus:
        """Split the tokens of a text; exit with one line if they are too few for the context.

        Args:
            text: All of it.
            ids: Its tokens.
            context: Of the model.
            characters: The vocabulary, where tokens are characters.
        """
        cut = int(len(ids) * (1.0 - HELD_OUT))
        if len(ids) - cut < context + 1 or cut < context + 1:
            unit = "characters" if characters else "tokens"
            sys.exit(
                f"the text has {len(ids)} {unit}; training with a context of {context} needs "
                f"at least {int((context + 2) / HELD_OUT)}: take a longer text or a shorter context"
            )
        prompt = PROMPT if set(PROMPT) <= set(text) else text[: len(PROMPT)]
        return cls(characters, ids[:cut], ids[cut:], prompt)

    @property
    def digest(self) -> str:
        """What tells this text from any other."""
        digest = hashlib.sha256(self.characters.encode("utf-8", "surrogatepass"))
        for ids in (self.train, self.held_out):
            digest.update(ids.astype("<i8").tobytes())
        return digest.hexdigest()

    def batch(
        self, rng: np.random.Generator, batch_size: int, context: int
    ) -> tuple[Tokens, Tokens]:
        """Draw windows of the training text.

        Returns:
            Inputs and targets, (batch_size, context) each; a target is the character that follows.
        """
        starts = rng.integers(0, len(self.train) - context, batch_size)
        windows = self.train[starts[:, None] + np.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def held_out_windows(self, context: int) -> tuple[Tokens, Tokens]:
        """Cut the held-out text into windows that do not overlap: inputs and targets.

        Their order is fixed, and the first so many are always spread evenly over the held-out text.
        """
        count = (len(self.held_out) - 1) // context
        # The multiples of the golden ratio, modulo 1, that lie below a bound have nearly equal gaps.
        order = np.argsort(np.arange(count) * ((5.0**0.5 - 1.0) / 2.0) % 1.0)
        starts = order * context
        windows = self.held_out[starts[:, None] + np.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]


def encode(text: str, characters: str) -> Tokens:
    """Return the id of each character.

    Raises:
        ValueError: If one is not in the vocabulary.
    """
    ids = {character: i for i, character in enumerate(characters)}
    unknown = sorted(set(text) - ids.keys())
    if unknown:
        raise ValueError(
            f"the model has never seen {unknown[:5]}; its characters are {characters!r}"
        )
    return np.array([ids[character] for character in text], dtype=np.int64)


def decode(ids: list[int], characters: str) -> str:
    """Return the text of a list of ids."""
    return "".join(characters[i] for i in ids)
