"""The committed measurements: every rung, by device, length and quantity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import streamlit as st

from app_pages.pictures import new_figure, show
from app_pages.widgets import choose, refuse

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
#: Key of a row → its name, and whether more is better.
QUANTITIES = {
    "forward_ms": ("forward pass, ms", False),
    "backward_ms": ("backward pass, ms", False),
    "forward_tflops": ("forward pass, TFLOP/s", True),
    "backward_tflops": ("backward pass, TFLOP/s", True),
    "peak_mb": ("peak memory, MiB", False),
}


@st.cache_data
def measurements() -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the committed results of the ladder, by folder and file, and which files are none."""
    found: dict[str, dict[str, Any]] = {}
    refused: list[str] = []
    for path in sorted(RESULTS.glob("*/bench_attention*.json")):
        name = f"{path.parent.name}: {path.stem}"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            record = None
        if isinstance(record, dict) and record.get("rows"):
            found[name] = record
        else:
            refused.append(name)
    return found, refused


def page(hide_source: bool = False) -> None:
    """Show the page."""
    found, refused = measurements()
    if refused:
        st.warning(f"no results of project/measure.py bench_attention: {', '.join(refused)}")
    if not found:
        refuse(f"no results in {RESULTS}; make some with python project/measure.py bench_attention")
        return
    widest = max(found, key=lambda name: len(found[name]["rows"][0]))
    index = list(found).index(widest)
    result = found[choose("device", found, "device", index=index)]
    quantity = choose("quantity", QUANTITIES, "quantity", names=lambda key: QUANTITIES[key][0])
    name, more_is_better = QUANTITIES[quantity]
    rows = {row["length"]: row for row in result["rows"]}
    length = st.select_slider("sequence length", list(rows), max(rows), key="length")
    rungs = list(dict.fromkeys(key for row in rows.values() for key in row if key != "length"))
    figure = new_figure(9, 3.8)
    curves, bars = figure.subplots(1, 2)
    for i, rung in enumerate(rungs):
        points = [(n, row[rung][quantity]) for n, row in rows.items() if quantity in _of(row, rung)]
        if points:
            curves.plot(*zip(*points, strict=True), "o-", color=f"C{i}", label=rung)
    curves.set(xscale="log", yscale="log", xlabel="sequence length", ylabel=name)
    curves.set_xticks(list(rows), [f"{n:,}" for n in rows], rotation=45, fontsize=8)
    curves.minorticks_off()
    curves.axvline(length, color="grey", linewidth=0.5)
    curves.legend(fontsize=8)
    row = rows[length]
    here = [(i, r, row[r][quantity]) for i, r in enumerate(rungs) if quantity in _of(row, r)]
    here.sort(key=lambda entry: entry[2], reverse=more_is_better)
    for place, (i, _, value) in enumerate(here):
        bars.barh(place, value, color=f"C{i}")
        bars.text(value, place, f" {_short(value)}", va="center", fontsize=8)
    bars.set(
        yticks=range(len(here)), yticklabels=[rung for _, rung, _ in here], xlabel=name, xmargin=0.2
    )
    bars.set_title(f"length {length}, best first")
    bars.invert_yaxis()
    show(figure)
    st.dataframe([{"": rung, name: value} for _, rung, value in here], hide_index=True)
    causal = "causal" if result.get("causal") else "no mask"
    st.caption(
        f"{result['device']}, {result['date']}: batch {result['batch']}, {result['heads']} heads, head_dim "
        f"{result['head_dim']}, {causal}. `{result['command']}` {result.get('note', '')}"
    )


def _of(row: dict[str, Any], rung: str) -> dict[str, Any]:
    """Return what was measured for a rung at one length; nothing if it was not."""
    return row.get(rung) or {}


def _short(value: float) -> str:
    """Write a number with three digits, or all of a large one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
