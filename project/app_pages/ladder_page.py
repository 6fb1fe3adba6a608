"""The committed measurements: every rung, by device, length and quantity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import streamlit as st

from app_pages.widgets import choose, own, refuse

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
    result = found[choose("device", found, "device", index)]
    titles = {title: key for key, (title, _) in QUANTITIES.items()}
    quantity = titles[choose("quantity", titles, "quantity")]
    name, more_is_better = QUANTITIES[quantity]
    values = [
        {"sequence length": str(row["length"]), "rung": rung, name: own[quantity]}
        for row in result["rows"] for rung, own in row.items()
        if rung != "length" and (own or {}).get(quantity) is not None
    ]  # fmt: skip
    lengths = list(dict.fromkeys(row["length"] for row in result["rows"]))
    length = st.select_slider("sequence length", lengths, max(lengths), key=own("length"))
    here = [row for row in values if row["sequence length"] == str(length)]
    here.sort(key=lambda row: row[name], reverse=more_is_better)
    curves, bars = st.columns(2)
    axes = {"x": {"field": "sequence length", "type": "ordinal", "sort": None}}
    axes["y"] = {"field": name, "type": "quantitative", "scale": {"type": "log"}}  # type: ignore[dict-item]
    colour = {"field": "rung", "type": "nominal"}
    curves.vega_lite_chart(values, {"mark": "line", "encoding": {**axes, "color": colour}})
    bars.bar_chart(here, x="rung", y=name, sort=False, horizontal=True)
    st.dataframe([{"": row["rung"], name: row[name]} for row in here], hide_index=True)
    causal = "causal" if result.get("causal") else "no mask"
    st.caption(
        f"{result['device']}, {result['date']}: batch {result['batch']}, {result['heads']} heads, head_dim "
        f"{result['head_dim']}, float32, {causal}. `{result['command']}` {result.get('note', '')}"
    )
