"""Figures of the records in docs/results, as they stand in the sources of the pages.

    python docs/figures.py            names the pages on which one is out of date
    python docs/figures.py --write    writes them, and the table in README.md

A figure in a sentence is text with a comment behind it, which names an experiment, a device, a path and a
format: ``2.3<!-- speedup nvidia-h200 rows/length=2048/naive/forward/median .1f -->`` is the median in the
row of docs/results/nvidia-h200/speedup.json whose length is 2048.  A test compares all of them.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import readme_table

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "results"
FIGURE = re.compile(r"[^\s|]+?(?=<!-- (\S+ \S+ [^>]+) -->)")


@cache
def _record(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def look_up(record: Any, path: str) -> Any:
    """Return what a path leads to: keys, numbers of list entries, or key=value to choose an entry.

    Args:
        record: Of JSON.
        path: Steps with slashes between them; a choice may name several keys, with & between them.  A slash
            that belongs to a key is written with a backslash before it.

    Raises:
        ValueError: If a step leads nowhere; it says which, and what there is.
    """
    found = record
    for part in re.split(r"(?<!\\)/", path):
        step = part.replace("\\/", "/")
        wanted = [choice.partition("=")[::2] for choice in step.split("&")]
        try:
            if "=" in step:
                found = next(
                    entry
                    for entry in found
                    if all(str(entry.get(key)) == value for key, value in wanted)
                )
            else:
                found = found[int(step) if isinstance(found, list) else step]
        except (KeyError, IndexError, StopIteration, ValueError, TypeError, AttributeError):
            there = list(found) if isinstance(found, dict) else f"{type(found).__name__}"
            raise ValueError(f"{path!r} leads nowhere at {step!r}; there is {there}") from None
    return found


def number(text: str, results: Path = RESULTS) -> str:
    """Return the figure that a comment names.

    Raises:
        ValueError: If it is no name, device, path and format, or the path leads nowhere.
    """
    words = text.split()
    if len(words) < 4:
        raise ValueError(f"a figure is an experiment, a device, a path and a format, got {text!r}")
    name, device, *path, form = words
    return format(look_up(_record(results / device / f"{name}.json"), " ".join(path)), form)


def refreshed(page: Path) -> str:
    """Return the text of a page with today's figures."""
    text = page.read_text(encoding="utf-8")
    if page == readme_table.README:
        return readme_table.refreshed(text)
    return FIGURE.sub(lambda match: number(match[1]), text)


def stale() -> dict[Path, str]:
    """Return the pages that differ from the records, and the text that they should have."""
    pages = [readme_table.README, *sorted(DOCS.rglob("*.md"))]
    found = {page: refreshed(page) for page in pages}
    return {page: text for page, text in found.items() if text != page.read_text(encoding="utf-8")}


if __name__ == "__main__":
    for page, text in stale().items():
        print(page.relative_to(DOCS.parent))
        if "--write" in sys.argv[1:]:
            page.write_text(text, encoding="utf-8", newline="\n")
