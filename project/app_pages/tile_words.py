"""Sentences that explain a step of a recording, with its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from app_pages.tile_view import Story, TileView


def sentence(story: Story, number: int) -> str:
    """Return what has happened at a step; "" for a rung without tiles."""
    step, view = story.recording.steps[number], story.tiles(number)
    stage = story.stage(step)
    if view is None:
        return {
            "start": "The block begins a pair of tiles: its threads load them next.",
            "next keys": "All query tiles have used this key tile: the next K and V replace it.",
            "end": "The block has finished: its results are in global memory.",
        }.get(stage if story.has_tiles else "", "")
    i, j = view.visit
    rows = _span("row", view.first_row, len(view.q_tile))
    cols = _span("column", view.first_col, len(view.k_tile))
    if stage == "loaded":
        return f"{rows} of Q and {cols.lower()} of K and V are in shared memory. Their scores come next."
    if stage == "scores":
        return f"S = τ Q_{i} K_{j}ᵀ is complete. {_largest(view)}"
    if stage == "maximum":
        return f"The largest score of each row in this tile is known. {_largest(view)}"
    if stage == "probs" and view.rescale is None:  # flash1 rescales later
        return "P is e^(S - m) with the largest score m of each row in this tile."
    before = story.before(number)
    return _rescaled(view, np.full(len(view.q_tile), -np.inf) if before is None else before)


def _span(name: str, first: int, count: int) -> str:
    return (
        f"{name} {first}" if count == 1 else f"{name}s {first} to {first + count - 1}".capitalize()
    )


def _largest(view: TileView) -> str:
    scores: Any = view.scores
    top = scores.max(axis=1)
    row = int(np.argmax(top))
    if not np.isfinite(top[row]):
        return "Every score is masked."
    return f"The largest is {top[row]:.2f}, in row {view.first_row + row}."


def _rescaled(view: TileView, old: Any) -> str:
    """Return how a tile changed the running maxima of its rows, from the old ones."""
    new: Any = view.row_max
    first, has_grown = ~np.isfinite(old) & np.isfinite(new), np.isfinite(old) & (new > old)
    parts = []
    if has_grown.any():
        r = int(np.argmax(np.where(has_grown, new - np.where(np.isfinite(old), old, 0), 0)))
        parts.append(
            f"Row {view.first_row + r} found a larger maximum, {new[r]:.2f}: what has been added so far "
            f"shrinks by e^({old[r]:.2f} - {_signed(new[r])}) = {np.exp(old[r] - new[r]):.2f}."
        )
        if others := int(has_grown.sum()) - 1:
            parts.append(f"{others} more row{'s shrink' if others > 1 else ' shrinks'} too.")
    if first.any():
        r = int(np.argmax(first))
        who = "Each row sees" if first.all() else f"{int(first.sum())} of the rows see"
        parts.append(
            f"{who} scores for the first time: the maximum of row {view.first_row + r} is {new[r]:.2f}, "
            "and there is nothing to rescale."
        )
    if not parts:
        parts.append(
            "No row found a larger maximum: nothing shrinks, and the tile is added as it is."
        )
    return " ".join(parts)


def _signed(value: float) -> str:
    return f"({value:.2f})" if value < 0 else f"{value:.2f}"
