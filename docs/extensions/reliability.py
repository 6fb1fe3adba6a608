"""What the long tests of reliability found, read from docs/results/reliability when the site is built.

The directive ``{reliability} NAME`` inserts the figures of the last run of ``project/reliability/NAME.py``,
or of another command that it names::

    ```{reliability} ends
    :command: make ends
    ```

Where no run is on record it says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from bench.record_files import ORIGIN
from bench.table_cells import cell, markdown
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

#: Rows of a record that are shown; of longer ones only the file is named.
MOST_ROWS = 24
#: Packages whose versions within a record are shown.
VERSIONS = ("python", "numpy", "numba", "numba-cuda")


def file_of(name: str, folder: Path | None = None) -> Path:
    """Return where the record of a script lies."""
    return (folder or harness.RESULTS / "reliability") / f"{name}.json"


def read(path: Path) -> dict[str, Any]:
    """Return a record.

    Raises:
        ValueError: If the file is none; it says why.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    for key, kind in ORIGIN.items():
        found = record.get(key) if isinstance(record, dict) else None
        if not isinstance(found, kind):
            raise ValueError(f"{path} is no record: {key} is {found!r}, expected {kind.__name__}")
    return record


def _is_figure(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _figures(record: dict[str, Any], before: str = "") -> Iterator[list[str]]:
    """Yield the name and the text of each plain figure, those of an inner record after its name."""
    for key, value in record.items():
        name = before + key.replace("_", " ")
        if _is_figure(value):
            yield [name, _shown(value)]
        elif isinstance(value, dict):
            inner = value if key != "versions" else {k: value[k] for k in VERSIONS if k in value}
            yield from _figures(inner, f"{name}, ")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else cell(value)


def _rows_table(rows: list[Any]) -> list[str]:
    """Return the rows of a record as a table, if it is short and all have the same plain figures."""
    if not rows or len(rows) > MOST_ROWS or not all(isinstance(row, dict) for row in rows):
        return []
    keys = [key for key, value in rows[0].items() if _is_figure(value)]
    if not keys or not all(_is_figure(row.get(key)) for row in rows for key in keys):
        return []
    lines = [[_shown(row[key]) for key in keys] for row in rows]
    return ["", markdown([key.replace("_", " ") for key in keys], lines)]


def as_markdown(name: str, command: str = "", folder: Path | None = None) -> str:
    """Return the figures of the last run as Markdown.

    Args:
        name: Of the record.
        command: That makes it; that of the script of the same name where there is none.
        folder: Of the records; docs/results/reliability when None.

    Raises:
        ValueError: If the file is no record.
    """
    path, how = file_of(name, folder), command or f"python project/reliability/{name}.py"
    if not path.exists():
        return f"*No run is on record;* `{how}` *makes one.*"
    record = read(path)
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    figures = _figures({key: value for key, value in record.items() if key not in ORIGIN})
    lines = [
        f"Last run: {record['date']}, {record['device']}, {record['cores']} cores, `{record['command']}` "
        f"([record](/results/reliability/{name}.json); {versions}).",
        "", markdown(["figure", "value"], figures),
    ]  # fmt: skip
    rows = record.get("rows")
    return "\n".join([*lines, *(_rows_table(rows) if isinstance(rows, list) else [])])


class ReliabilityDirective(SphinxDirective):
    """Insert what the last run of a long test found."""

    required_arguments = 1
    option_spec = {"command": directives.unchanged}  # noqa: RUF012  # as docutils has it

    def run(self) -> list[nodes.Node]:
        """Return the parsed page part."""
        name = self.arguments[0]
        try:
            text = as_markdown(name, self.options.get("command", ""))
        except ValueError as error:
            raise self.error(str(error)) from None
        self.env.note_dependency(str(file_of(name)))
        box = nodes.container(classes=["measured"])
        self.state.nested_parse(StringList(text.splitlines(), name), 0, box)
        return [box]


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("reliability", ReliabilityDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
