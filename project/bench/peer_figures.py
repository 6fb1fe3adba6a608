"""The figures that the rungs of a GPU are held to beside PyTorch's, and the table of them."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Any, NamedTuple

from bench.table_cells import figure_cells
from bench.torch_attention import FLEX

Row = dict[str, Any]
DIRECTIONS = ("forward", "backward")
DTYPES = ("float16", "bfloat16", "float32")
#: Of the calls that FlexAttention computes, too.
OPTIONS = (
    "dense", "causal", "window", "documents", "butterfly", "ALiBi", "ALiBi as score_mod", "softcap",
    "boolean mask",
)  # fmt: skip


class Figure(NamedTuple):
    """A figure of the table.

    Attributes:
        name: In the table.
        group: Whose rows it is made of.
        ours: Name of our contestant.
        theirs: Names of PyTorch's; the fastest one counts.
        directions: Which.
        must: Ratio that has to be reached.
        aim: Ratio beyond.
        lengths: The least and the greatest.
    """

    name: str
    group: str
    ours: str
    theirs: tuple[str, ...]
    directions: tuple[str, ...]
    must: float
    aim: float
    lengths: tuple[int, int] = (0, 1 << 30)


SDPA = ("FLASH", "CUDNN", "EFFICIENT")
LONG, SHORT = (2048, 1 << 30), (512, 1024)
FORWARD, BACKWARD = DIRECTIONS[:1], DIRECTIONS[1:]
FIGURES = (
    Figure(
        "flash2_mma forward / PyTorch flash", "dense", "flash2_mma", ("FLASH",), FORWARD, 1.0, 1.15,
    ),
    Figure(
        "flash2_mma backward / PyTorch flash", "dense", "flash2_mma", ("FLASH",), BACKWARD, 0.9, 1.1,
    ),
    Figure(
        "flash3_wgmma forward / cuDNN, N ≥ 2,048", "dense", "flash3_wgmma", ("CUDNN",), FORWARD,
        1.0, 1.15, LONG,
    ),
    Figure(
        "flash3_wgmma forward / cuDNN, N = 512 and 1,024", "dense", "flash3_wgmma", ("CUDNN",),
        FORWARD, 0.85, 1.0, SHORT,
    ),
    Figure(
        "flash3_wgmma backward / cuDNN, N ≥ 2,048", "dense", "flash3_wgmma", ("CUDNN",), BACKWARD,
        0.9, 1.1, LONG,
    ),
    *(
        Figure(
            f"{rung} backward, deterministic / not deterministic", "dense",
            f"{rung}, deterministic", (rung,), BACKWARD, 0.7, 1.0,
        )
        for rung in ("flash2_mma", "flash3_wgmma")
    ),
    *(
        Figure(
            f"{case} {direction} / fastest PyTorch backend", "masks", case, SDPA, (direction,), 1.0, 1.3,
        )
        for case in ("boolean mask", "dropout")
        for direction in DIRECTIONS
    ),
    *(
        Figure(f"{case} {direction} / FlexAttention", "options", case, (FLEX,), (direction,), 1.0, 1.3)
        for case in OPTIONS
        for direction in DIRECTIONS
    ),
    *(
        Figure(
            f"{name} {direction} / PyTorch float32", "float32", name, ("EFFICIENT", "MATH"),
            (direction,), must, aim,
        )
        for name, must, aim in (("float32", 1.5, 3.0), ("tf32", 3.0, 5.0))
        for direction in DIRECTIONS
    ),
)  # fmt: skip
GROUPS = ("dense", "masks", "options", "float32", "accuracy", "product")


def ratio_of(row: Row, figure: Figure, direction: str) -> float | None:
    """Return the time of the fastest of theirs over ours; None where one is missing."""
    entries = row.get(direction, {})
    ours = figure.ours if figure.ours in entries else "auto"
    theirs = [name for name in figure.theirs if name in entries]
    if ours not in entries or not theirs:
        return None
    best = min(theirs, key=lambda name: entries[name]["ms"])
    return entries[ours]["times_of"][best]


def figure_of(rows: list[Row], figure: Figure) -> list[float]:
    """Return the ratios that a figure is the mean of."""
    least, most = figure.lengths
    chosen = [
        row
        for row in rows
        if row["group"] == figure.group
        and least <= row["length"] <= most
        and (figure.group not in ("masks", "options") or row["case"] == figure.ours)
    ]
    found = [ratio_of(row, figure, direction) for row in chosen for direction in figure.directions]
    return [ratio for ratio in found if ratio is not None]


def accuracy(rows: list[Row]) -> list[str]:
    """Return the lines of the table that compare errors: the worst ratio of each dtype."""
    lines = []
    for dtype in DTYPES:
        for what, must in (("error", 2.0), ("gradient_error", 3.0)):
            ratios = []
            for row in rows:
                if row["group"] != "accuracy" or row["dtype"] != dtype:
                    continue
                found = row["errors"]
                peers = [found[name][what] for name in ("MATH", "EFFICIENT") if name in found]
                ours = [
                    entry[what]
                    for name, entry in found.items()
                    if name not in ("MATH", "EFFICIENT")
                ]
                ratios += [one / max(peers) for one in ours if peers]
            if ratios:
                most = 1.0 if dtype == "float32" else must
                name = f"{dtype}, {'error' if what == 'error' else 'error of gradients'}"
                lines.append(
                    line(f"{name} / PyTorch's, worst", max(ratios), most, None, len(ratios), True)
                )
    return lines


def line(
    name: str, value: float, must: float, aim: float | None, calls: int, is_most: bool = False
) -> str:
    """Return a line of the table of figures."""
    return f"{figure_cells(name, value, must, aim, is_most)} {calls} |"


def table(rows: list[Row]) -> str:
    """Return the figures as a Markdown table."""
    lines = ["| figure | reached | must | aim | | calls |", "|---|---:|---:|---:|---|---:|"]
    for figure in FIGURES:
        if ratios := figure_of(rows, figure):
            mean = geometric_mean(ratios)
            lines.append(line(figure.name, mean, figure.must, figure.aim, len(ratios)))
    lines += accuracy(rows)
    for row in rows:
        if row["group"] == "product":
            lines.append(line(f"{row['dtype']} {row['case']} / cuBLAS", row["ratio"], 0.7, 0.9, 1))
    return "\n".join(lines)


def details(rows: list[Row]) -> str:
    """Return TFLOP/s of every contestant of every call, forward and backward, a line each."""
    lines = []
    for row in rows:
        title = f"{row['group']}: {row['case']}, {row['dtype']}"
        if "head_dim" in row:
            title += f", d {row['head_dim']}, N {row['length']}"
        cells = []
        for direction in DIRECTIONS:
            rates = (f"{name} {x['tflops']:.0f}" for name, x in row.get(direction, {}).items())
            cells.append(f"{direction} {', '.join(rates)}")
        if "errors" in row:
            cells = [
                f"{name} {x['error']:.1e} {x['gradient_error']:.1e}"
                for name, x in row["errors"].items()
            ]
        if "tflops" in row:
            cells = [f"{name} {rate:.0f}" for name, rate in row["tflops"].items()]
        cells += [f"{name}: {why}" for name, why in row.get("why_not", {}).items()]
        lines.append(f"{title}: {'; '.join(cells)}")
    return "\n".join(lines)
