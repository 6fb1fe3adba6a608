"""Pictures of block-sparse masks, as text, SVG and PNG."""

from __future__ import annotations

import os
from itertools import groupby
from typing import Any

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.common.picture import Picture
from kernels.sparsity.states import FULL, HIDDEN, PARTIAL, States

#: State → its character in a text, its colour in a picture and its name.
LOOKS = {
    HIDDEN: ("·", "#f2f2f2", "hidden"),
    FULL: ("█", "#1f4e79", "full"),
    PARTIAL: ("▒", "#8fb8de", "partial"),
}


def as_text(states: States, width: int) -> str:
    """Return one line for each row of blocks (query blocks, key blocks), with one character for each block.

    For masks of more than ``width`` blocks in either direction a character stands for a square of
    blocks, and is partial if they differ.
    """
    shrink = max(ceil_div(max(states.shape), width), 1)
    starts = [np.arange(0, count, shrink) for count in states.shape]
    least, most = np.minimum(states, PARTIAL), np.minimum(states, PARTIAL)
    for axis, start in enumerate(starts):
        if not len(start):
            return ""
        least = np.minimum.reduceat(least, start, axis=axis)
        most = np.maximum.reduceat(most, start, axis=axis)
    signs = np.array([look[0] for look in LOOKS.values()])
    return "\n".join("".join(line) for line in signs[np.where(least == most, least, PARTIAL)])


def as_svg(text: str, title: str) -> str:
    """Return a text of :func:`as_text` as a picture, with a square for each character and a title below."""
    lines = text.splitlines()
    columns, rows = max(map(len, lines), default=1), max(len(lines), 1)
    cell = 320 / max(columns, rows)
    height = rows * cell
    colours = {sign: colour for sign, colour, _ in LOOKS.values()}
    p = Picture(640, round(height) + 50, title)
    for row, line in enumerate(lines):
        column = 0
        for sign, run in groupby(line):
            count = len([*run])
            p.area(10 + column * cell, 10 + row * cell, count * cell, cell, colours[sign])
            column += count
    for i, (_, colour, name) in enumerate(LOOKS.values()):
        p.box(350, 10 + 30 * i, 20, 20, fill=colour)
        p.text(380, 25 + 30 * i, name, 13, "start")
    p.text(10, height + 35, title, 12, "start")
    return p.svg()


def save_png(
    path: str | os.PathLike[str], states: States, seq: tuple[int, int], title: str
) -> None:
    """Write a picture with a panel for each head of (heads, query blocks, key blocks).

    ``seq`` are the numbers of rows and columns, for the axes.

    Raises:
        ImportError: Without matplotlib.
    """
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "a picture of a block mask needs matplotlib, which is not installed; "
            "pip install 'minitorch-flash[plot]' or pip install matplotlib, or print(mask.picture())"
        ) from error
    across = min(len(states), 4)
    down = ceil_div(len(states), across)
    figure = Figure(figsize=(4.0 * across, 4.0 * down + 0.8), layout="constrained")
    panels: Any = figure.subplots(down, across, squeeze=False).ravel()
    colours = [look[1] for look in LOOKS.values()]
    for head, panel in enumerate(panels):
        if head >= len(states):
            panel.set_axis_off()
            continue
        panel.imshow(
            np.minimum(states[head], PARTIAL),
            cmap=ListedColormap(colours),
            vmin=HIDDEN,
            vmax=PARTIAL,
            extent=(0, max(seq[1], 1), max(seq[0], 1), 0),
            interpolation="nearest",
        )
        panel.set(xlabel="key column", ylabel="query row")
        if len(states) > 1:
            panel.set_title(f"head {head}")
    figure.suptitle(title)
    handles = [
        Patch(facecolor=colour, edgecolor="grey", label=name) for _, colour, name in LOOKS.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, format="png", dpi=120)
