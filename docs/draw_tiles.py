"""Draw the tiles of FlashAttention-2 as they are visited, as docs/images/tiles.gif.

    python docs/draw_tiles.py

Each frame is one step of the tile loop on real numbers, with a causal mask, 24 rows and tiles of 4.  Scores
are computed tile by tile and never stored.  What remains is m, l and the accumulator of one query tile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.patches import Rectangle

FILE = Path(__file__).resolve().parent / "images" / "tiles.gif"
TILES, SIZE, HEAD_DIM = 6, 4, 4
INK, GREY, BLUE, AMBER, GREEN = "#222222", "#e4e4e4", "#1b6ca8", "#f0a830", "#2e8b57"
#: Lines of the loop, and which steps they belong to.
LINES = (
    ("for each query tile i  (in parallel)", ""),
    ("    for each visible key tile j", ""),
    ("        S = scale · Qᵢ Kⱼᵀ", "visit"),
    ("        m, l, Oᵢ: rescale, then add P Vⱼ", "visit"),
    ("    Oᵢ = Oᵢ / l", "end"),
)


class Frame(NamedTuple):
    """One step: a visit of key tile j by query tile i, or the end of a row of tiles."""

    i: int
    j: int
    kind: str
    row_max: float
    row_sum: float
    reads: int


def frames() -> tuple[list[Frame], Any]:
    """Run the tile loop; return its steps, and the probabilities of every visited tile."""
    rng = np.random.default_rng(3)
    n = TILES * SIZE
    q, k = rng.standard_normal((2, n, HEAD_DIM))
    scores = np.where(np.tri(n, dtype=bool), q @ k.T / np.sqrt(HEAD_DIM), -np.inf)  # (n, n)
    exp = np.exp(scores - scores.max(axis=1, keepdims=True))
    found, reads = [], 0
    for i in range(TILES):
        row_max, row_sum = -np.inf, 0.0  # of the last row of the tile
        for j in range(i + 1):
            s = scores[(i + 1) * SIZE - 1, j * SIZE : (j + 1) * SIZE]
            new_max = max(row_max, s.max())
            row_sum = row_sum * np.exp(row_max - new_max) + np.exp(s - new_max).sum()
            row_max, reads = new_max, reads + 2 * SIZE
            found.append(Frame(i, j, "visit", row_max, row_sum, reads))
        found.append(Frame(i, i, "end", row_max, row_sum, reads))
    return found, exp / exp.sum(axis=1, keepdims=True)


def draw(axes: Any, steps: list[Frame], probs: Any, number: int) -> None:
    """Draw the frame of a number; the last one stands for all that follow."""
    step = steps[min(number, len(steps) - 1)]
    axes.clear()
    axes.axis("off")

    def tile(x: float, y: float, colour: str, edge: str = INK, wide: float = 0.8) -> None:
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=edge, linewidth=wide))

    for t in range(TILES):
        tile(-1.4, t, BLUE if t == step.i else "white")
        tile(t, -1.3, AMBER if t == step.j and step.kind == "visit" else "white")
        tile(t, -2.6, AMBER if t == step.j and step.kind == "visit" else "white")
        is_done = t < step.i or (t == step.i and step.kind == "end")
        tile(6.5, t, GREEN if is_done else "#bfe0cd" if t == step.i else "white")
    shown = [(s.i, s.j) for s in steps[: number + 1] if s.kind == "visit"]
    for i in range(TILES):
        for j in range(TILES):
            if j > i:
                tile(j, i, GREY, "white")
            elif (i, j) in shown:
                part = probs[i * SIZE : (i + 1) * SIZE, j * SIZE : (j + 1) * SIZE]
                axes.imshow(
                    np.sqrt(part), extent=(j, j + 1, i + 1, i), cmap="Blues", vmin=0, vmax=1,
                    aspect="auto",
                )  # fmt: skip
                tile(j, i, "none", INK, 0.4)
            else:
                tile(j, i, "white")
    if step.kind == "visit":
        tile(step.j, step.i, "none", "#c0392b", 3.0)
    for x, y, name in ((-1.75, 3, "Q"), (-0.4, -0.8, "K"), (-0.4, -2.1, "V"), (7.8, 3, "O")):
        axes.text(x, y, name, ha="center", va="center", fontsize=13, color=INK)
    for line, (text, kind) in enumerate(LINES):
        weight = "bold" if kind == step.kind else "normal"
        axes.text(8.8, -1.9 + 0.85 * line, text, fontsize=9.8, family="monospace",
                  weight=weight, color=INK)  # fmt: skip
    facts = (
        f"i = {step.i + 1}, j = {step.j + 1}" + (", done" if step.kind == "end" else ""),
        f"last row of the tile: m = {step.row_max:5.2f}, l = {step.row_sum:5.2f}",
        f"rows of K and V read: {step.reads}",
        "scores stored: 0",
        "grey tiles are masked: never computed",
    )
    for line, text in enumerate(facts):
        axes.text(8.8, 3.2 + 0.8 * line, text, fontsize=10.5, color=INK)
    axes.set(xlim=(-2.1, 17.2), ylim=(7.1, -2.9), aspect="equal")


def main() -> None:
    """Write the animation."""
    steps, probs = frames()
    figure, axes = plt.subplots(figsize=(8.2, 4.25), dpi=90)
    figure.subplots_adjust(0, 0, 1, 1)
    hold = 4  # frames at the end
    animation = FuncAnimation(
        figure, lambda number: draw(axes, steps, probs, number), frames=len(steps) + hold
    )
    animation.save(FILE, writer=PillowWriter(fps=2))
    print(f"{FILE}: {FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
