"""Draw the diagrams of the guides: ``python docs/draw_diagrams.py`` writes ``docs/diagrams/*.svg``.

A test compares what this draws with what is committed.
"""

from __future__ import annotations

from pathlib import Path

import attention_diagrams
import course_diagrams
import hardware_diagrams
import ring_diagram
import speed_diagram
from kernel_diagrams import mma_fragments, ping_pong, swizzle

from kernels.common.picture import AMBER, BLUE, GREEN, INK, PALE, RED, Picture

FOLDER = Path(__file__).resolve().parent / "diagrams"


def module_tree() -> Picture:
    """Draw a module with two children and the names of its parameters."""
    p = Picture(560, 210, "A module tree: names are paths")
    p.box(220, 15, 120, 36, "Network", BLUE)
    for x, name in ((60, "layer1"), (300, "layer2")):
        p.box(x + 50, 85, 120, 36, f"{name}: Linear", BLUE)
        p.arrow(280, 51, x + 110, 84)
        for dx, parameter in ((0, "weights"), (120, "bias")):
            p.box(x + dx, 150, 108, 30, parameter, GREEN)
            p.arrow(x + 110, 121, x + dx + 54, 149)
    p.text(115, 200, "layer1.weights", 12)
    p.text(475, 200, "layer2.bias", 12)
    return p


def graph() -> Picture:
    """Draw f = (x + y) · y with values forward and derivatives backward."""
    p = Picture(620, 230, "f = (x + y) · y: values forward, derivatives backward")
    p.box(20, 30, 90, 40, "x = 2", GREEN)
    p.box(20, 150, 90, 40, "y = 3", GREEN)
    p.box(230, 50, 120, 40, "a = x + y = 5", BLUE)
    p.box(460, 90, 130, 40, "f = a · y = 15", BLUE)
    p.arrow(110, 50, 229, 65)
    p.arrow(110, 160, 229, 82)
    p.arrow(350, 72, 459, 100)
    p.arrow(110, 172, 459, 120)
    p.text(525, 150, "df/df = 1", 12)
    p.text(400, 62, "∂f/∂a = y = 3", 12)
    p.text(165, 42, "3 · 1 = 3", 12)
    p.text(150, 118, "3 · 1 = 3", 12)
    p.text(320, 165, "∂f/∂y (direct) = a = 5", 12)
    p.text(20, 88, "∂f/∂x = 3", 12, "start")
    p.text(20, 210, "∂f/∂y = 3 + 5 = 8: two uses, two shares, one sum", 12, "start")
    return p


def strides() -> Picture:
    """Draw one storage under two shapes."""
    p = Picture(600, 200, "One storage, two views of it")
    p.text(20, 28, "storage", anchor="start")
    p.grid(100, 10, 1, 6, 36, lambda r, c: "abcdef"[c], lambda r, c: AMBER)
    p.text(20, 90, "shape (2, 3)", 13, "start")
    p.text(20, 108, "strides (3, 1)", 13, "start")
    p.grid(130, 70, 2, 3, 36, lambda r, c: "abcdef"[3 * r + c], lambda r, c: BLUE)
    p.text(330, 90, "permute(1, 0):", 13, "start")
    p.text(330, 108, "shape (3, 2)", 13, "start")
    p.text(330, 126, "strides (1, 3)", 13, "start")
    p.grid(450, 70, 3, 2, 36, lambda r, c: "abcdef"[r + 3 * c], lambda r, c: GREEN)
    p.text(185, 170, "position = 3 i + j", 13)
    return p


def broadcasting() -> Picture:
    """Draw how shapes align at the right."""
    p = Picture(560, 190, "Shapes align at the right; a size of 1 stands for any size")
    rows = (("a", ("", "3", "1")), ("b", ("2", "1", "4")), ("a + b", ("2", "3", "4")))
    for i, (name, sizes) in enumerate(rows):
        p.text(70, 42 + i * 52, name)
        for j, size in enumerate(sizes):
            fill = PALE if not size else (AMBER if size == "1" else (GREEN if i == 2 else BLUE))
            p.box(120 + j * 60, 18 + i * 52, 52, 38, size, fill)
    p.text(330, 42, "padded with 1 on the left", 13, "start")
    p.text(330, 94, "amber: read again and again,", 13, "start")
    p.text(330, 112, "its gradient is a sum", 13, "start")
    return p


def matmul_tiles() -> Picture:
    """Draw the tiles of a matrix product."""
    p = Picture(560, 300, "A tile of C is a sum of products of tiles")
    cell = 34
    p.grid(20, 150, 4, 4, cell, fill=lambda r, c: BLUE if r == 1 else "white")
    p.grid(190, 5, 4, 4, cell, fill=lambda r, c: GREEN if c == 2 else "white")
    p.grid(190, 150, 4, 4, cell, fill=lambda r, c: AMBER if (r, c) == (1, 2) else "white")
    p.text(88, 140, "A")
    p.text(345, 20, "B", anchor="start")
    p.text(345, 165, "C", anchor="start")
    p.text(345, 205, "One block owns one tile of C.", 13, "start")
    p.text(345, 225, "It walks along a row of A's tiles", 13, "start")
    p.text(345, 245, "and down a column of B's: four", 13, "start")
    p.text(345, 265, "steps, two tiles in shared", 13, "start")
    p.text(345, 285, "memory at a time.", 13, "start")
    return p


def convolution() -> Picture:
    """Draw one output of a convolution in one dimension, and its reverse."""
    p = Picture(600, 230, "Convolution anchored left; the gradient of the input is anchored right")
    p.text(15, 42, "input", 13, "start")
    p.grid(90, 20, 1, 6, 36, lambda r, c: f"x{c}", lambda r, c: BLUE if 2 <= c <= 4 else "white")
    p.text(15, 102, "weight", 13, "start")
    p.grid(162, 80, 1, 3, 36, lambda r, c: f"w{c}", lambda r, c: GREEN)
    p.text(15, 162, "output", 13, "start")
    p.grid(90, 140, 1, 6, 36, lambda r, c: f"y{c}", lambda r, c: AMBER if c == 2 else "white")
    for c in range(3):
        p.arrow(180 + 36 * c, 57, 180 + 36 * c, 79)
    p.arrow(180, 117, 180, 139)
    p.text(330, 45, "y2 = w0 x2 + w1 x3 + w2 x4", 13, "start")
    p.text(330, 75, "x4 is in y4, y3 and y2, so", 13, "start")
    p.text(330, 95, "dx4 = w0 dy4 + w1 dy3 + w2 dy2:", 13, "start")
    p.text(330, 115, "the kernel runs the other way.", 13, "start")
    p.text(90, 205, "y4 would read x6, which lies outside and counts as 0.", 13, "start")
    return p


def online_softmax() -> Picture:
    """Draw three tiles of one row of scores and the state after each."""
    p = Picture(640, 190, "One row of scores in three tiles: the state after each")
    scores = (("1", "2"), ("4", "0"), ("3", "3"))
    states = (
        "m = 2,  l = e^-1 + 1",
        "m = 4,  l = l e^(2-4) + 1 + e^-4",
        "m = 4,  l = l e^0 + 2 e^-1",
    )
    for t, (pair, state) in enumerate(zip(scores, states, strict=True)):
        x = 20 + t * 210
        p.grid(x + 50, 20, 1, 2, 40, lambda r, c, pair=pair: pair[c], lambda r, c: BLUE)
        p.arrow(x + 90, 62, x + 90, 92)
        p.box(x, 95, 195, 40, "", AMBER)
        p.text(x + 97, 120, state, 12)
        if t < 2:
            p.arrow(x + 195, 115, x + 209, 115)
    p.text(
        320,
        170,
        "A new maximum rescales what was summed under the old one; nothing is read twice.",
        13,
    )
    return p


def loop_order() -> Picture:
    """Draw the order in which FlashAttention and FlashAttention-2 visit the tiles of S."""
    p = Picture(
        640, 285, "The order of the tiles: columns in FlashAttention, rows in FlashAttention-2"
    )
    for x, name, first in ((60, "FlashAttention", True), (380, "FlashAttention-2", False)):
        p.text(x + 80, 22, name)
        p.grid(
            x, 60, 4, 4, 40,
            lambda r, c, first=first: str(4 * c + r + 1) if first else str(c + 1),
            lambda r, c, first=first: (BLUE if c == 0 else "white") if first else
            (BLUE, GREEN, AMBER, RED)[r],
        )  # fmt: skip
        p.text(x + 80, 52, "K, V tiles", 12)
        p.text(x - 8, 145, "Q", 12, "end")
    p.text(140, 245, "one block walks all 16 tiles;", 13)
    p.text(140, 265, "O, l, m travel for each of them", 13)
    p.text(460, 245, "four blocks at once, a row each;", 13)
    p.text(460, 265, "O, l, m stay in registers", 13)
    return p


def mask_tiles() -> Picture:
    """Draw which tiles of a causal mask are skipped, tested element by element, or full."""
    p = Picture(680, 250, "A causal mask over 12 rows in tiles of 3")
    colour = lambda r, c: PALE if c > r else (AMBER if c // 3 == r // 3 else GREEN)  # noqa: E731
    p.grid(20, 15, 12, 12, 18, fill=colour)
    for i in range(5):
        p.path([(20 + 54 * i, 15), (20 + 54 * i, 231)], INK, 3)
        p.path([(20, 15 + 54 * i), (236, 15 + 54 * i)], INK, 3)
    for y, fill, words in (
        (40, GREEN, "full: no test of an element"),
        (90, AMBER, "partial: each element is tested (its grey ones are −∞)"),
        (140, PALE, "skipped: neither loaded nor computed"),
    ):
        p.box(265, y, 26, 26, "", fill)
        p.text(300, y + 18, words, 12, "start")
    p.text(265, 205, "16 tiles: 6 full, 4 partial, 6 skipped", 13, "start")
    return p


def attention_graph() -> Picture:
    """Draw attention forward and the gradients that go back."""
    p = Picture(740, 190, "Attention forward, and its gradients backward")
    names = (("Q, K", GREEN), ("S = τ Q Kᵀ", BLUE), ("P = softmax S", BLUE), ("O = P V", BLUE))
    backs = ("dQ = τ dS K,  dK = τ dSᵀ Q", "dS = P ∘ (dP − D)", "dP = dO Vᵀ", "dO")
    for i, (name, fill) in enumerate(names):
        p.box(45 + 175 * i, 30, 130, 40, name, fill)
        p.text(110 + 175 * i, 120, backs[i], 12)
        if i:
            p.arrow(175 * i, 50, 44 + 175 * i, 50)
            p.arrow(50 + 175 * i, 85, 175 * i - 5, 85, dashed=True)
    p.text(
        370,
        165,
        "V enters at the last step: dV = Pᵀ dO.   D = rowsum(dO ∘ O), one number a row.",
        13,
    )
    return p


def traffic() -> Picture:
    """Draw elements moved by the three forward rungs of the worked example of the guide."""
    n, d, b_r, b_c = 1024, 64, 64, 64
    counts = (
        ("standard", 4 * n * d + 4 * n * n),
        ("FlashAttention", 2 * n * d + -(-n // b_c) * (3 * n * d + 4 * n) + n * d + 2 * n),
        ("FlashAttention-2", 2 * n * d + n + -(-n // b_r) * 2 * n * d),
    )
    p = Picture(640, 175, "Elements moved forward for N = 1024, d = 64, tiles of 64 x 64, one head")
    largest = max(count for _, count in counts)
    for i, (name, count) in enumerate(counts):
        p.text(150, 38 + 45 * i, name, 13, "end")
        p.box(160, 20 + 45 * i, 340 * count / largest, 28, "", (RED, AMBER, GREEN)[i])
        p.text(168 + 340 * count / largest, 39 + 45 * i, f"{count:,}", 13, "start")
    p.text(
        320,
        163,
        "N = 1024, d = 64, tiles 64 × 64, one head: elements to and from global memory",
        12,
    )
    return p


PICTURES = {
    "module-tree": module_tree,
    "graph": graph,
    "strides": strides,
    "broadcasting": broadcasting,
    "matmul-tiles": matmul_tiles,
    "convolution": convolution,
    "online-softmax": online_softmax,
    "loop-order": loop_order,
    "mask-tiles": mask_tiles,
    "attention-graph": attention_graph,
    "traffic": traffic,
    "mma-fragments": mma_fragments,
    "swizzle": swizzle,
    "ping-pong": ping_pong,
    **course_diagrams.PICTURES,
    **hardware_diagrams.PICTURES,
    **attention_diagrams.PICTURES,
    **ring_diagram.PICTURES,
    **speed_diagram.PICTURES,
}


def drawn() -> dict[str, str]:
    """Return the text of each file, by its name."""
    animations = {name: draw() for name, draw in attention_diagrams.ANIMATIONS.items()}
    return {name: draw().svg() for name, draw in PICTURES.items()} | animations


def main() -> None:
    """Write every picture."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in drawn().items():
        (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
