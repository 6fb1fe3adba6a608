"""Tables and figures from the records in docs/results, put into the pages when the site is built.

On a page, each is a paragraph that any viewer of Markdown shows as a link to the record or as a picture:

- ``[Table: NAME](results/DEVICE/RECORD.json)`` is a table of ``record_tables.TABLES``, or that of an
  experiment on one device;
- ``[Check: NAME](results/reliability/NAME.json)`` is the last run of a long check;
- ``![Figure: NAME](images/experiments/NAME.svg)`` is the figure of an experiment with its caption, and
  ``![Experiment: NAME](…)`` is followed by its tables, one for each device.

An unknown name is an error.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

import long_checks
import record_tables
from bench import harness, plots, records
from sphinx.errors import ExtensionError

MARK = re.compile(r"^!?\[(Table|Check|Figure|Experiment): ([\w-]+)\]\((\S+)\)$", re.MULTILINE)


def experiment(name: str, figure: bool = True, device: str | None = None) -> str:
    """Return the figure of an experiment, and its tables.

    Args:
        name: Of the experiment.
        figure: Whether the figure is wanted.
        device: Folder whose table is wanted; an empty string is none, and None all of them.
    """
    measured = harness.load(name)
    lines = []
    if figure:
        lines += [
            f"```{{figure}} /images/experiments/{name}.svg", f":alt: {measured.caption}", "",
            measured.caption, "```", "",
        ]  # fmt: skip
    for result in plots.stored(name):
        if device in (None, result.folder):
            origin = record_tables.conditions(result.record, f"{result.folder}/{name}.json")
            lines += [origin, "", measured.shown(result.record), ""]
    return "\n".join(lines)


def shown(kind: str, name: str, target: str) -> str:
    """Return the Markdown of a mark.

    Raises:
        ValueError: If there is no such table, experiment or record.
    """
    device, record = PurePosixPath(target).parts[-2:]
    if kind == "Check":
        return long_checks.as_markdown(name)
    if kind == "Table" and name in ("summary", *record_tables.TABLES):
        return record_tables.as_markdown(name, f"{device}/{record}")
    if kind == "Table":
        return experiment(name, figure=False, device=device)
    return experiment(name, device="" if kind == "Figure" else None)


def _put(app: Any, page: str, content: list[str]) -> None:
    """Replace the marks of a page."""

    def text(match: re.Match[str]) -> str:
        try:
            return f"::::{{container}} measured\n\n{shown(*match.groups())}\n\n::::\n"
        except (ValueError, OSError) as error:
            raise ExtensionError(f"{page}: {match[0]}: {error}") from None

    content[0], count = MARK.subn(text, content[0])
    if count:
        app.env.dependencies[page] |= {str(path) for path in records.RESULTS.glob("*/*.json")}


def setup(app: Any) -> dict[str, Any]:
    """Replace the marks of each page before it is parsed."""
    app.connect("source-read", _put)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
