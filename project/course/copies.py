"""Compares submissions with one another for copied code; the report has no verdict.

Names, comments and layout do not count. Runs of tokens inside of a body between markers are compared, but
not those that the course's solution or more than half of the submissions have too.
"""

from __future__ import annotations

import itertools
import keyword
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from course.markers import ROOT, CourseError, Key, is_solved, read_bodies, sources

#: Tokens of a run, and the share of equal runs from which on a pair is listed.
LENGTH, SHARE = 12, 0.5
TOKEN = re.compile(r"#.*|\"[^\"\n]*\"|'[^'\n]*'|[^\W\d]\w*|\d[\w.]*|[^\w\s]")
#: The function that a run is in, and the tokens of the run.
Run = tuple[Key, tuple[str, ...]]


def tokens(body: list[str]) -> list[str]:
    """Return the tokens of a body without comments, with one name for all names."""
    found = [token for line in body for token in TOKEN.findall(line) if token[0] != "#"]
    return ["x" if t.isidentifier() and not keyword.iskeyword(t) else t for t in found]


def runs(tree: Path) -> set[Run]:
    """Return the runs of tokens of a tree's bodies; a body that is shorter than a run is one."""
    found: set[Run] = set()
    for file in sources(tree):
        with suppress(CourseError):  # the grader says what is wrong with the file
            for key, body in read_bodies(tree, [file]).items():
                text = tokens(body) if is_solved(body) else []
                starts = range(max(len(text) - LENGTH + 1, min(len(text), 1)))
                found |= {(key, tuple(text[i : i + LENGTH])) for i in starts}
    return found


def copies(folder: Path, names: list[str]) -> Iterator[list[str]]:
    """Yield the pairs of submissions that have most in common, as rows of a table.

    Args:
        folder: With a folder for each submission.
        names: Of these folders.

    Yields:
        The two names, the percentage of the runs of the shorter one that the other has too, and the
        functions in which these runs are.
    """
    of = {name: runs(folder / name) for name in names}
    counts = Counter(run for found in of.values() for run in found)
    common = {run for run, count in counts.items() if count > max(2, len(names) // 2)}
    common |= runs(ROOT)
    of = {name: found - common for name, found in of.items()}
    pairs = []
    for one, other in itertools.combinations(names, 2):
        shared, shorter = of[one] & of[other], min(len(of[one]), len(of[other]))
        if len(shared) >= max(LENGTH, SHARE * shorter):
            where = sorted({f"{key.task} {key.name}" for key, _ in shared})
            pairs.append((len(shared) / shorter, one, other, where))
    for share, one, other, where in sorted(pairs, key=lambda pair: (-pair[0], *pair[1:3])):
        yield [one, other, f"{share:.0%}", "; ".join(where)]
