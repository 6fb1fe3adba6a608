"""The score program of Hopper's forward and backward kernels: how their lanes have elements and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, int64

from kernels.cuda.attention.flash3_wgmma.dropout_bits import bit_words, has_bit
from kernels.cuda.attention.flash3_wgmma.packed_mask import QUAD, STEP, make_pair_at
from kernels.cuda.attention.options.mods import (
    FIRST_PLACE,
    mask_function,
    numbers_of_mods,
    score_function,
)
from kernels.cuda.attention.options.score_functions import mask_at
from kernels.cuda.attention.options.tile_scores import make_tile_scores
from kernels.cuda.ptx.numbers import UNPACK
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.scores.program import PLAIN, Features, ScoreTarget

_edge_of = make_tile_scores(PLAIN, FLOAT32).edge


class Line(NamedTuple):
    """What a lane's elements of all tiles of a work item have in common.

    Attributes:
        flat: Number of (batch, head), as in ``Extras``.
        b: See ``kernels.scores.program.Place``.
        h: Likewise.
        batch: Likewise; 0 without a user's function.
        head: Likewise.
        slope: ALiBi's slope of the head, or 0.
        rows: Query rows of the sequence.
        cols: Keys of it.
    """

    flat: Any
    b: Any
    h: Any
    batch: Any
    head: Any
    slope: Any
    rows: Any
    cols: Any


class LanePlace(NamedTuple):
    """A lane's first element of a tile.

    Attributes:
        lane: Its number in the warp.
        row: Query row of the element, from the start of its sequence.
        col: Key column, likewise.
        line: Of the work item.
    """

    lane: Any
    row: Any
    col: Any
    line: Line


class ElementPlace(NamedTuple):
    """One element of a lane, what ``kernels.scores.program.Place`` has and more.

    Attributes:
        b: See ``Place``.
        h: Likewise.
        batch: Likewise.
        head: Likewise.
        row: Likewise, at most the last one.
        col: Likewise.
        distance: Of row and col before that, see :func:`distance_of`.
        slope: ALiBi's slope of the head.
        words: The lane's words of masks: bits, and behind them pairs of a floating mask of 16 bits.
        t: Eight columns of the lane's tile.
        i: Which element of them.
    """

    b: Any
    h: Any
    batch: Any
    head: Any
    row: Any
    col: Any
    distance: Any
    slope: Any
    words: Any
    t: Any
    i: Any


def _has_mods(features: Features) -> bool:
    """Tell whether a user's functions get the places of elements."""
    return features.score_mod is not None or features.mask_mod is not None


def line_of(features: Features) -> Callable[..., Any]:
    """Return ``line(flat, b, h, rows, cols, extras)``, which makes a :class:`Line`."""
    has_mods, has_slopes = _has_mods(features), features.slopes

    @device_function
    def line(flat, b, h, rows, cols, extras):
        batch, head = numbers_of_mods(flat, extras) if has_mods else (int64(0), int64(0))
        slope = extras.slopes[b, h, 0, 0] if has_slopes else float32(0)
        return Line(flat, b, h, batch, head, slope, rows, cols)

    return line


@device_function
def edge_at(place, extras):
    """Return ``TileScores.edge`` of a lane's first element."""
    return _edge_of(place.row, place.col, place.line.rows, place.line.cols, extras)


def distance_of(features: Features) -> Callable[..., Any]:
    """Return ``distance(place, extras)``: row + diagonal - col where there is ALiBi, else row - col."""
    has_slopes = features.slopes

    @device_function
    def distance(place, extras):
        if has_slopes:
            return float32(place.row + extras.diagonal - place.col)
        return float32(int32(place.row - place.col))

    return distance


def offset_of(by_keys: bool) -> Callable[..., Any]:
    """Return ``offset(t, i)``: rows and columns of an element from the lane's first one."""

    @device_function
    def offset(t, i):
        along, across = 8 * t + i % 2, 8 * (i // 2)
        return (along, across) if by_keys else (across, along)

    return offset


def element_of(
    features: Features, by_keys: bool = False, has_columns: bool = False
) -> Callable[..., Any]:
    """Return ``element(place, distance, words, t, i)``, which makes an :class:`ElementPlace`.

    Args:
        features: Of the kernel.
        by_keys: Rows of the tile are keys.
        has_columns: No column of the tile is beyond the last one.
    """
    has_mods, offset = _has_mods(features), offset_of(by_keys)

    @device_function
    def element(place, distance, words, t, i):
        row, col, line = place.row, place.col, place.line
        r, c = offset(t, i)
        if has_mods:  # which tells the compiler how large they are
            row, col = int32(row & FIRST_PLACE), int32(col & FIRST_PLACE)
        # Within the arrays, so that loads need no branch.
        row, col = int32(min(int32(row + r), int32(line.rows - 1))), int32(col + c)
        if not has_columns:
            col = int32(min(col, int32(line.cols - 1)))
        return ElementPlace(
            line.b, line.h, line.batch, line.head, row, col, distance + float32(r - c), line.slope,
            words, t, i,
        )  # fmt: skip

    return element


def score_target(features: Features, cols: int, tanh: Any, derives: bool) -> ScoreTarget:
    """Return the target of which a place is an :class:`ElementPlace` and a call its ``Extras``.

    Scores come divided by the softcap.

    Args:
        features: Of the kernel.
        cols: Of its tiles.
        tanh: Of a float32.
        derives: See :class:`ScoreTarget`.
    """
    has_slopes, kind = features.slopes, features.mask

    def by_score(function: Callable[..., Any]) -> Any:
        own = score_function(function, FLOAT32, float32)

        @device_function
        def score_mod(score, place, extras):
            apart = place.distance - float32(extras.diagonal) if has_slopes else place.distance
            return float32(own(score, place.batch, place.head, place.row, place.col, apart))

        return score_mod

    def by_place(function: Callable[..., Any]) -> Any:
        own = mask_function(function, FLOAT32)

        @device_function
        def mask_mod(place, extras):
            return bool(own(place.batch, place.head, place.row, place.col))

        return mask_mod

    @device_function
    def slope(place, extras):
        return place.slope

    @device_function
    def distance(place, extras):
        return abs(place.distance)

    @device_function
    def is_shown(place, extras):
        return has_bit(place.words, place.t, place.i)

    return ScoreTarget(
        compile=device_function,
        one=np.float32(1),
        tanh=tanh,
        score_function=by_score,
        mask_function=by_place,
        slope=slope,
        distance=distance,
        bias=make_pair_at(kind, cols) if kind in UNPACK else mask_at,
        in_mask=is_shown,
        in_blocks=is_shown,
        scores_over_cap=True,
        derives=derives,
    )


def seen_words(features: Features, cols: int) -> int:
    """Return how many words a lane has in ``seen``."""
    has_pairs = features.mask in UNPACK
    return bit_words(cols) + (QUAD * (cols // STEP) if has_pairs else 0)
