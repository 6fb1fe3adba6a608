"""The figures that training is held to beside PyTorch, and the tables that ``bench_training`` prints."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from training.gpt_presets import PRESETS

from bench.table_cells import cell, figure_cells, markdown

GIGABYTE = 2**30
Row = dict[str, Any]


class Figure(NamedTuple):
    """A line of the table.

    Attributes:
        kind: How it is measured, a key of KINDS.
        preset: Of the model.
        precision: Of both sides.
        context: Tokens a text; None for the preset's own.
        must: Bound.
        aim: Better still; None where there is none.
        is_most: Whether less is better.
    """

    kind: str
    preset: str
    precision: str
    context: int | None
    must: float
    aim: float | None
    is_most: bool = False


GPT2 = "gpt2-small"
#: What is measured for each preset comes before what takes long.
FIGURES = (
    Figure("speed", "toy", "bfloat16", None, 1.5, 4.0),
    Figure("speed", "char", "bfloat16", None, 0.8, 1.2),
    Figure("speed", GPT2, "bfloat16", 1024, 0.7, 1.0),
    Figure("speed", GPT2, "bfloat16", 4096, 0.7, 1.0),
    Figure("speed", GPT2, "float32", 1024, 1.0, 2.0),
    Figure("eager", "char", "bfloat16", None, 0.75, 1.1),
    Figure("eager", GPT2, "bfloat16", 1024, 0.95, 1.15),
    Figure("compiled", "char", "bfloat16", None, 1.15, 1.4),
    Figure("compiled", GPT2, "bfloat16", 1024, 1.05, 1.2),
    Figure("memory", GPT2, "bfloat16", 1024, 1.1, 0.9, True),
    Figure("memory", GPT2, "bfloat16", 4096, 1.1, 0.9, True),
    Figure("context", GPT2, "bfloat16", 8192, 0.85, 0.93),
    Figure("context", GPT2, "bfloat16", 65_536, 0.9, 1.0),
    Figure("attention", GPT2, "bfloat16", 1024, 2.0, 3.5),
    Figure("attention", GPT2, "bfloat16", 4096, 5.0, 8.0),
    *(Figure("losses", preset, "float32", None, 1e-3, None, True) for preset in PRESETS),
    *(Figure("losses", preset, "bfloat16", None, 2.0, 1.0, True) for preset in PRESETS),
)


def difference(losses: list[float], wanted: list[float]) -> float:
    """Return the largest difference of two curves, relative to the second."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))


def table(rows: list[Row]) -> str:
    """Return the figures as a Markdown table."""
    lines = ["| figure | reached | must | aim | |", "|---|---:|---:|---:|---|"]
    lines += [
        figure_cells(
            row.get("figure", f"{row['preset']} {row['precision']}: {row['kind']}"),
            row["value"], row["must"], row["aim"], row["is_most"], row["is_judged"],
        )
        for row in rows
    ]  # fmt: skip
    return "\n".join(lines)


def details(rows: list[Row]) -> str:
    """Return what the figures are made of as a Markdown table, a line each."""
    lines = []
    for row in rows:
        cells = [
            f"{name} {cell(rate['median'])} tokens/s"
            for name, rate in row.get("tokens_per_second", {}).items()
        ]
        cells += [
            f"{name} {cell(None if peak is None else peak / GIGABYTE)} GiB"
            for name, peak in row.get("peak_bytes", {}).items()
        ]
        cells += [
            f"{name} {share:.1%} of the peak"
            for name, share in row.get("utilisation", {}).items()
            if share is not None
        ]
        cells += [f"{name} {found:.1e}" for name, found in row.get("differences", {}).items()]
        cells += [
            f"{name} {curve[0]:.4f} ... {median(curve[-5:]):.4f} nats"
            for name, curve in row.get("curves", {}).items()
        ]
        cells += [row["why_not"]] if "why_not" in row else []
        where = f"{row['context']:,} x {row['batch']}"
        lines.append(
            [row["kind"], f"{row['preset']} {row['precision']}, {where}", "; ".join(cells)]
        )
    return markdown(["measured", "model, context x batch", "what"], lines)
