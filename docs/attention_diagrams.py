"""The diagrams of module 5 with numbers: one row in three tiles, one tile of the backward pass."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from kernels.common.picture import AMBER, BLUE, GREEN, PALE, RED, Picture
from kernels.reference.lines import (
    Rows,
    add_tile,
    delta_of,
    finished,
    product_gradients,
    softmax_gradient,
)

#: The row of the guide: six scores, and the row of V of each.
SCORES = np.array([[1.0, 2.0, 4.0, 0.0, 3.0, 3.0]])
VALUES = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
TILE = 2


def row_states(has_rescale: bool = True) -> list[Rows]:
    """Return the state of the row after each of its tiles, with the rescale or without it."""
    rows, states = Rows(np.full(1, -np.inf), np.zeros(1), np.zeros((1, 2))), []
    for col in range(0, SCORES.shape[1], TILE):
        s, v = SCORES[:, col : col + TILE], VALUES[col : col + TILE]
        if has_rescale:
            rows = add_tile(rows, s, 1.0, v)
        else:
            row_max = np.maximum(rows.row_max, s.max(axis=1))
            p = np.exp(s - row_max[:, None])
            rows = Rows(row_max, rows.row_sum + p.sum(axis=1), rows.acc + p @ v)
        states.append(rows)
    return states


def animated(frames: Sequence[Picture], seconds: float) -> str:
    """Return the text of a file that shows pictures of one size in turn, again and again.

    If a reader has turned off animations, only the last picture is shown.

    Args:
        frames: The pictures; the title is the first one's.
        seconds: How long each stays.
    """
    head, first = frames[0].parts[:4], len(frames[0].parts[:4])
    count, total = len(frames), seconds * len(frames)
    style = (
        f"<style>.frame{{visibility:hidden;animation:frame {total:g}s step-end infinite}}"
        f"@keyframes frame{{0%{{visibility:visible}}{100 / count:.4g}%{{visibility:hidden}}}}"
        "@media(prefers-reduced-motion){.frame{animation:none}.frame:last-of-type{visibility:visible}}"
        "</style>"
    )
    groups = [
        f'<g class="frame" style="animation-delay:{seconds * i:g}s">'
        + "\n".join(f.parts[first:])
        + "</g>"
        for i, f in enumerate(frames)
    ]
    return "\n".join([*head, style, *groups, "</svg>"]) + "\n"


def _pair(values: Any) -> str:
    return "\u2003".join(f"{value:.3f}" for value in values)


def softmax_row() -> str:
    """Draw the row tile by tile: what each tile does to maximum, sum and accumulator."""
    states, frames = row_states(), []
    for shown in range(1, len(states) + 2):
        p = Picture(480, 300, "One row of six scores in three tiles: maximum, sum, accumulator")
        tile = min(shown, len(states)) - 1
        p.text(15, 32, "scores", 13, "start")
        p.text(15, 68, "rows of V", 13, "start")
        for c in range(SCORES.shape[1]):
            is_now = shown <= len(states) and c // TILE == tile
            x, fill = 100 + 58 * c + 12 * (c // TILE), AMBER if is_now else BLUE
            p.box(x, 12, 54, 30, f"{SCORES[0, c]:g}", fill)
            p.box(x, 48, 54, 30, f"{VALUES[c, 0]:g}\u2003{VALUES[c, 1]:g}", fill)
        for x, name in (
            (35, "m"),
            (100, "rescale"),
            (205, "P of the tile"),
            (310, "l"),
            (410, "accumulator"),
        ):
            p.text(x, 108, name, 13)
        before = -np.inf
        for i, rows in enumerate(states[:shown]):
            y, row_max = 118 + 34 * i, rows.row_max[0]
            probs = np.exp(SCORES[0, TILE * i : TILE * i + TILE] - row_max)
            p.area(10, y, 460, 30, AMBER if shown <= len(states) and i == tile else PALE)
            for x, text in (
                (35, f"{row_max:g}"),
                (100, f"e^({before:g} − {row_max:g}) = {np.exp(before - row_max):.3f}" if i else "0"),
                (205, _pair(probs)), (310, f"{rows.row_sum[0]:.3f}"), (410, _pair(rows.acc[0])),
            ):  # fmt: skip
                p.text(x, y + 20, text, 12)
            before = row_max
        if shown > len(states):
            for y, name, fill, rescaled in (
                (228, "O = accumulator / l", GREEN, True),
                (264, "rescale left out", RED, False),
            ):
                last = row_states(rescaled)[-1]
                p.area(10, y, 460, 30, fill)
                p.text(20, y + 20, name, 12, "start")
                p.text(310, y + 20, f"l = {last.row_sum[0]:.3f}", 12)
                p.text(410, y + 20, _pair(finished(last)[0][0]), 12)
        frames.append(p)
    return animated(frames, 3.0)


#: One tile of the backward pass in the guide: 4 rows, 4 keys, 2 columns.
Q = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]])
K = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [0.0, 0.0]])
V = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]])
DOUT = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 2.0]])
SCALE = 0.5


def _numbers(p: Picture, x: float, y: float, values: Any, title: str, fill: str) -> None:
    """Draw a matrix with its numbers, cells of 36 by 24."""
    p.text(x + 18 * values.shape[1], y - 7, title, 12)
    for (r, c), value in np.ndenumerate(values):
        p.box(x + 36 * c, y + 24 * r, 36, 24, "", fill)
        text = f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")
        p.text(x + 36 * c + 18, y + 24 * r + 16, text, 11)


def backward_tile() -> Picture:
    """Draw every matrix of one tile of the backward pass."""
    s = SCALE * Q @ K.T
    p_tile = np.exp(s - s.max(axis=1, keepdims=True))
    p_tile /= p_tile.sum(axis=1, keepdims=True)
    dp, delta = DOUT @ V.T, delta_of(DOUT, p_tile @ V, None)
    ds = softmax_gradient(p_tile, dp, delta)
    dq, dk, dv = product_gradients(p_tile, ds, Q, K, DOUT, SCALE)
    p = Picture(480, 290, "One 4 by 4 tile of the backward pass, with every number")
    for i, (values, title) in enumerate(
        ((s, "S = τ Q Kᵀ"), (p_tile, "P = e^(S − L)"), (dp, "dP = dO Vᵀ"))
    ):
        _numbers(p, 10 + 157 * i, 28, values, title, BLUE if i < 2 else GREEN)
    _numbers(p, 10, 172, delta[:, None], "D", GREEN)
    _numbers(p, 66, 172, ds, "dS = P ∘ (dP − D)", AMBER)
    for i, (values, title) in enumerate(((dq, "τ dS K"), (dk, "τ dSᵀ Q"), (dv, "Pᵀ dO"))):
        _numbers(p, 228 + 85 * i, 172, values, title, RED)
    p.text(64 + 200, 284, "added to dQ", 12)
    p.text(64 + 285, 284, "added to dK", 12)
    p.text(64 + 370, 284, "added to dV", 12)
    return p


def recorded_tiles() -> str:
    """Draw one query tile of the kernel flash2 after each of its three key tiles, as the app records it."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "project"))
    from app_pages.recording import RunSettings, record
    from app_pages.tile_view import Story
    from app_pages.tile_words import sentence

    story, frames = Story(record(RunSettings("flash2", 12, 4, 4, 4, seed=3))[0]), []
    for number in story.last_steps():
        view = story.tiles(number)
        if view is None or view.visit[0] != 2:
            continue
        p = Picture(
            480,
            330,
            "One query tile of flash2 after each of its key tiles, recorded from the kernel",
        )
        j = view.visit[1]
        for tile in range(3):
            fill = AMBER if tile == j else GREEN if tile < j else PALE
            p.box(165 + 58 * tile, 10, 52, 28, f"K{tile}, V{tile}", fill)
        p.text(155, 29, "query tile 2, key tiles", 13, "end")
        columns: list[Any] = [view.row_max, view.row_sum, view.rescale]
        _numbers(p, 10, 75, view.scores, f"S = τ Q2 K{j}ᵀ", BLUE)
        _numbers(p, 175, 75, view.probs, "P = e^(S − m)", BLUE)
        _numbers(p, 340, 75, np.stack(columns, axis=1), "m, l, rescale", AMBER)
        _numbers(p, 10, 215, view.acc, "O, rescaled", AMBER)
        p.text(165, 266, "+ P V of this tile: comes next", 13, "start")
        for line, text in enumerate(wrap(sentence(story, number), 52)[:3]):
            p.text(165, 206 + 17 * line, text, 12, "start")
        frames.append(p)
    return animated(frames, 4.0)


def tiled_attention() -> Picture:
    """Draw what one block of FlashAttention-2 holds while it walks along the keys."""
    p = Picture(480, 275, "One query tile walks along the key tiles; its state stays on the chip")
    for t in range(4):
        fill = AMBER if t == 1 else "white"
        p.box(150 + 58 * t, 15, 50, 30, f"K{t}", fill)
        p.box(150 + 58 * t, 50, 50, 30, f"V{t}", fill)
        p.box(
            150 + 58 * t,
            150,
            50,
            50,
            "S" if t == 1 else "",
            AMBER if t == 1 else GREEN if t < 1 else PALE,
        )
    p.text(15, 52, "global memory", 12, "start")
    p.box(15, 150, 60, 50, "Q tile", BLUE)
    p.text(112, 180, "· Kᵀ =", 13)
    p.arrow(233, 82, 233, 148)
    p.text(241, 118, "loaded to shared memory", 12, "start")
    p.box(400, 150, 65, 50, "m, l, O", BLUE)
    p.text(
        15,
        228,
        "Blue stays in registers for the whole walk. Green: added to the state and",
        12,
        "start",
    )
    p.text(
        15,
        246,
        "dropped. Amber: the tile in hand. Grey: to come. O is divided by l and written",
        12,
        "start",
    )
    p.text(15, 264, "once, after the last tile.", 12, "start")
    return p


def pipeline() -> Picture:
    """Draw copies and products that take turns, and the same work with two buffers."""
    p = Picture(
        480, 240, "A pipeline of two buffers copies the next tile while this one is multiplied"
    )
    p.text(15, 24, "one buffer", 13, "start")
    p.text(15, 130, "two buffers", 13, "start")
    for y, step in ((35, 2), (140, 1)):
        p.text(15, y + 21, "copy", 12, "start")
        p.text(15, y + 61, "multiply", 12, "start")
        for tile in range(4 if step == 1 else 3):
            x = 85 + 64 * step * tile
            fill = (BLUE, GREEN)[tile % 2] if step == 1 else BLUE
            p.box(x, y, 60, 32, f"tile {tile}", fill)
            p.box(x + 64, y + 40, 60, 32, f"tile {tile}", fill)
    p.text(
        15,
        235,
        "Colours are buffers: tile 2 may be copied to blue once tile 0 is multiplied.",
        12,
        "start",
    )
    return p


def dropout_counter() -> Picture:
    """Draw the bits of dropout as a function of place, for two orders of the tiles."""
    p = Picture(
        480, 235, "The bit of a place depends on seed, row and column: tiles in any order agree"
    )
    rng = np.random.default_rng(4)
    kept = rng.random((6, 6)) > 0.3
    for x, size, name in ((20, 3, "tiles of 3 × 3"), (260, 2, "tiles of 2 × 2")):
        p.text(x + 84, 20, name, 13)
        p.grid(x, 30, 6, 6, 28, lambda r, c: "1" if kept[r, c] else "0",
               lambda r, c: GREEN if kept[r, c] else PALE)  # fmt: skip
        for line in range(0, 7, size):
            p.path([(x + 28 * line, 30), (x + 28 * line, 198)], "#222", 3)
            p.path([(x, 30 + 28 * line), (x + 168, 30 + 28 * line)], "#222", 3)
    p.text(
        20, 225, "bit = f(seed, row, column): forward and backward draw the same mask.", 13, "start"
    )
    return p


PICTURES = {
    "backward-tile": backward_tile,
    "tiled-attention": tiled_attention,
    "pipeline": pipeline,
    "dropout-counter": dropout_counter,
}
ANIMATIONS = {"softmax-row": softmax_row, "recorded-tiles": recorded_tiles}
