"""How experiments write numbers and tables, and which colour is whose in all figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.records import ORIGIN, Record

#: One colour for a rung, a baseline or a peer in all figures, by the name in the rows.
COLOURS = {
    "naive": "#c0392b",
    "flash1": "#b8860b",
    "flash2": "#1b6ca8",
    "flash2 atomic": "#5dade2",
    "flash": "#1b6ca8",
    "composed": "#8e44ad",
    "published": "#7f8c8d",
    "PyTorch": "#2e8b57",
}
#: Colours of other names, none of which looks like one of those above.
OTHERS = (
    "#e67e22", "#17becf", "#d35fb7", "#34495e", "#8c564b", "#7cb518", "#f4a6a6", "#6a5acd", "#e3c000",
    "#0b5345",
)  # fmt: skip


def colour_of(name: str, names: Sequence[str]) -> str:
    """Return the colour of a curve: one for each rung in all figures, and some others for others."""
    others = [other for other in names if other not in COLOURS]
    return COLOURS.get(name) or OTHERS[others.index(name) % len(OTHERS)]


def cell(value: float | None) -> str:
    """Write a number for a table: three digits, or all of a whole one; a dash where there is none."""
    if value is None:
        return "–"
    text = f"{value:.3g}"
    return f"{float(text):,.10g}" if "e" in text or abs(value) >= 1000 else text


def timed_cell(entry: Record | None) -> str:
    """Write what ``measuring.spread`` returned: the median, and the quartiles in brackets."""
    if entry is None:
        return "–"
    return f"{cell(entry['median'])} ({cell(entry['low'])} … {cell(entry['high'])})"


def workload_text(record: Record) -> str:
    """Return the size of a call in words, from the entry ``workload`` of a record."""
    size = "{batch_heads:,} heads, {length:,} keys, head_dim {head_dim}, float32"
    return size.format(**record["workload"])


def markdown(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    table = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    table += [
        f"| {' | '.join(each if isinstance(each, str) else cell(each) for each in line)} |"
        for line in lines
    ]
    return "\n".join(table)


def columns(rows: Iterable[Record], shown: Mapping[str, str | Callable[[Record], Any]]) -> str:
    """Return a Markdown table: a title for each column, and a key of the rows or a function of a row."""
    lines = ([row[of] if isinstance(of, str) else of(row) for of in shown.values()] for row in rows)
    return markdown([*shown], lines)


def listed(record: Record) -> str:
    """Return a line for each row: its numbers and texts by their names."""

    def leaves(value: Any, name: str = "") -> Iterator[str]:
        if isinstance(value, dict):
            for key, one in value.items():
                yield from leaves(one, f"{name} {key}".strip())
        elif isinstance(value, float):
            yield f"{name} {cell(value)}"
        elif not isinstance(value, list):
            yield f"{name} {value}"

    skipped = {"experiment", "kind", "settings", "timing", "rows", *ORIGIN}
    beside = {key: value for key, value in record.items() if key not in skipped}
    return "\n".join("; ".join(leaves(row)) for row in [beside, *record.get("rows", ())] if row)
