"""What the measurements found, read from docs/results when the site is built.

The directive ``{experiment} NAME`` inserts the figure and, for each device, the table and where it was
made; with ``:figure:`` it inserts the figure alone, with ``:table: nvidia-h200`` the table of one device.
The role ``{result}`` inserts one number: its text is an experiment, a device, a path and a format.
``speedup nvidia-h200 rows/length=2048/naive/forward/median .1f`` looks into
docs/results/nvidia-h200/speedup.json for the row whose length is 2048, and so on; a path may have spaces,
and ``peer=CUDNN&case=dense`` chooses by both.
A device without a file gives "(not measured yet)"; a path that leads nowhere is an error.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import record_tables
from bench import harness, plots, records
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxRole

MISSING = "(not measured yet)"


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


def number(text: str, results: Path | None = None) -> str:
    """Return the number that the text of a role asks for.

    Raises:
        ValueError: If it is no name, device, path and format, or the path leads nowhere.
    """
    words = text.split()
    if len(words) < 4:
        raise ValueError(f"a result is an experiment, a device, a path and a format, got {text!r}")
    name, device, *path, form = words
    file = (results or records.RESULTS) / device / f"{name}.json"
    if not file.exists():
        return MISSING
    return format(look_up(_record(file), " ".join(path)), form)


class ResultRole(SphinxRole):
    """One number from a record."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the number as text, or an error."""
        try:
            shown = number(self.text)
        except (ValueError, TypeError) as error:
            message = self.inliner.reporter.error(str(error), line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]
        name, device, *_ = self.text.split()
        self.env.note_dependency(str(records.RESULTS / device / f"{name}.json"))
        return [nodes.Text(shown)], []


def as_markdown(name: str, figure: bool = True, devices: list[str] | None = None) -> str:
    """Return the figure of an experiment, and its tables.

    Args:
        name: Of the experiment.
        figure: Whether the figure is wanted.
        devices: Folders whose tables are wanted; all when None.
    """
    experiment = harness.load(name)
    found = [result for result in plots.stored(name) if devices is None or result.folder in devices]
    lines = []
    if figure and (plots.IMAGES / f"{name}.svg").exists():
        lines += [
            f"```{{figure}} /images/experiments/{name}.svg", f":alt: {experiment.caption}", "",
            experiment.caption, "```", "",
        ]  # fmt: skip
    for result in found:
        origin = record_tables.conditions(result.record, f"{result.folder}/{name}.json")
        lines += [origin, "", experiment.shown(result.record), ""]
    how = f"`python project/measure.py {name}`"
    return "\n".join(lines or [f"Not measured yet: {how} does it."])


class ExperimentDirective(record_tables.Measured):
    """Insert what an experiment measured."""

    option_spec = {"figure": directives.flag, "table": directives.unchanged}  # noqa: RUF012  # as docutils has it

    def text(self) -> str:
        """Return the figure, and the tables."""
        name, device, alone = self.arguments[0], self.options.get("table"), "figure" in self.options
        devices = [] if alone else None if device is None else [device]
        return as_markdown(name, figure=alone or device is None, devices=devices)


def setup(app: Any) -> dict[str, Any]:
    """Register the directive and the role."""
    app.add_directive("experiment", ExperimentDirective)
    app.add_role("result", ResultRole())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
