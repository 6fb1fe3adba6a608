"""The directive ``{measured} FILE``: what a benchmark wrote to docs/FILE, as figures and tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bench.table_cells import colour_of
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from kernels.common.picture import INK, Picture

DOCS = Path(__file__).resolve().parents[1]
LEFT, TOP, WIDE, HIGH = 70, 20, 400, 240
QUANTITIES = (
    ("forward_ms", "Forward, ms"),
    ("backward_ms", "Backward, ms"),
    ("peak_mb", "Peak, MB"),
)

Row = dict[str, Any]


def names_of(rows: list[Row]) -> list[str]:
    """Return who was measured, in the order of the file."""
    found = dict.fromkeys(name for row in rows for name in row if name != "length")
    return list(found)


def table(rows: list[Row], quantity: str) -> list[str]:
    """Return a Markdown table of one quantity, a column for each name."""
    names = names_of(rows)
    lines = ["| length | " + " | ".join(names) + " |", "|---:" * (len(names) + 1) + "|"]
    for row in rows:
        cells = [f"{row[n][quantity]:.3g}" if quantity in row.get(n, {}) else "–" for n in names]
        cells = [f"{float(cell):,.10g}" if cell != "–" else cell for cell in cells]
        lines.append(f"| {row['length']} | " + " | ".join(cells) + " |")
    return lines


def chart(rows: list[Row], quantity: str, title: str) -> Picture:
    """Draw one quantity against the length, both logarithmic."""
    names = names_of(rows)
    values = [row[n][quantity] for row in rows for n in names if quantity in row.get(n, {})]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    first, last = (math.log2(rows[i]["length"]) for i in (0, -1))

    def place(length: float, value: float) -> tuple[float, float]:
        x = LEFT + WIDE * (math.log2(length) - first) / max(last - first, 1)
        return x, TOP + HIGH * (high - math.log10(value)) / max(high - low, 1)

    p = Picture(LEFT + WIDE + 170, TOP + HIGH + 45, f"{title} by length")
    for power in range(low, high + 1):
        y = place(rows[0]["length"], 10.0**power)[1]
        p.path([(LEFT, y), (LEFT + WIDE, y)], "#ccc", 1)
        p.text(LEFT - 8, y + 4, f"{10.0**power:g}", 12, "end")
    for row in rows:
        p.text(place(row["length"], 10.0**low)[0], TOP + HIGH + 18, str(row["length"]), 11)
    p.path([(LEFT, TOP), (LEFT, TOP + HIGH), (LEFT + WIDE, TOP + HIGH)], INK, 1)
    p.text(LEFT + WIDE / 2, TOP + HIGH + 38, f"length; {title}", 13)
    for i, name in enumerate(names):
        colour = colour_of(name, names)
        own = [(r["length"], r[name][quantity]) for r in rows if quantity in r.get(name, {})]
        p.path([place(*point) for point in own], colour, 2.5)
        p.path(
            [(LEFT + WIDE + 15, TOP + 10 + 22 * i), (LEFT + WIDE + 40, TOP + 10 + 22 * i)],
            colour,
            4,
        )
        p.text(LEFT + WIDE + 48, TOP + 15 + 22 * i, name, 13, "start")
    return p


class Measured(SphinxDirective):
    """Insert what was measured on one machine: a sentence, and for each quantity a figure and a table."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the parsed page part."""
        file = DOCS / self.arguments[0]
        self.env.note_dependency(str(file))
        found = json.loads(file.read_text(encoding="utf-8"))
        mask = "a causal mask" if found["causal"] else "no mask"
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        lines = [
            f"{found['device']}, {found['date']}; batch {found['batch']}, {found['heads']} heads, "
            f"head_dim {found['head_dim']}, float32, {mask}; {versions}.",
            *([found["note"]] if "note" in found else []),
        ]
        box = nodes.container(classes=["measured"])
        self._parse(lines, box)
        for quantity, title in QUANTITIES:
            if any(
                quantity in row[name] for row in found["rows"] for name in row if name != "length"
            ):
                picture = chart(found["rows"], quantity, title)
                box += nodes.raw("", picture.svg(), format="html")
                self._parse([f"**{title}**", *table(found["rows"], quantity)], box)
        return [box]

    def _parse(self, lines: list[str], box: nodes.container) -> None:
        text = "\n\n".join(lines[:1]) + "\n\n" + "\n".join(lines[1:])
        self.state.nested_parse(StringList(text.splitlines(), self.arguments[0]), 0, box)


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
