"""The target of the score program for Hopper's kernels, and the indices of a lane's elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kernels.cuda.attention.flash3_wgmma.dropout_bits import bit_words, has_bit, offset_of
from kernels.cuda.attention.flash3_wgmma.packed_mask import QUAD, STEP, make_pair_at
from kernels.cuda.attention.options.mods import FIRST_PLACE, numbers_of_mods, score_function
from kernels.cuda.attention.options.score_functions import cuda_target, mask_at
from kernels.cuda.attention.options.tile_scores import edge_from
from kernels.cuda.ptx.numbers import UNPACK, mul_rn
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.types import float32, int32, int64
from kernels.scores.program import Features, ScoreTarget


class ItemValues(NamedTuple):
    """The values that all scores of a lane share in all tiles of a work item."""

    flat: Any  # Number of (batch, head), as in ``Extras``
    b: Any  # See ``kernels.scores.program.Place``
    h: Any  # See ``kernels.scores.program.Place``
    batch: Any  # See ``kernels.scores.program.Place``; 0 without a user function
    head: Any  # See ``kernels.scores.program.Place``; 0 without a user function
    slope: Any  # ALiBi's slope of the head, or 0
    rows: Any  # Query rows of the sequence
    cols: Any  # Keys of the sequence


class LanePlace(NamedTuple):
    """The position of the first score that a lane has in a tile."""

    lane: Any  # Number of the lane in the warp
    row: Any  # Query row of the element, from the start of its sequence
    col: Any  # Key column of the element, from the start of its sequence
    line: ItemValues  # The :class:`ItemValues` of the work item


class ElementPlace(NamedTuple):
    """The position of one score of a lane: a ``kernels.scores.program.Place`` with more fields."""

    b: Any  # See ``Place``
    h: Any  # See ``Place``
    batch: Any  # See ``Place``
    head: Any  # See ``Place``
    row: Any  # See ``Place``; clipped to the arrays
    col: Any  # See ``Place``; clipped to the arrays
    distance: Any  # See :func:`distance_of`; from the row and column before clipping
    slope: Any  # ALiBi's slope of the head
    words: Any  # The lane's words of masks: bits, and behind them pairs of a 16-bit floating mask
    t: Any  # The element's number, see ``dropout_bits``
    i: Any  # The element's number, see ``dropout_bits``


def line_of(features: Features) -> Callable[..., Any]:
    """Return ``line(item, extras)``, which makes the :class:`ItemValues` of a ``tile_walk.WorkItem``."""
    has_mods, has_slopes = features.has_mods, features.slopes

    @device_function
    def line(item, extras):
        batch, head = numbers_of_mods(item.flat, extras) if has_mods else (int64(0), int64(0))
        slope = extras.slopes[item.b, item.h, 0, 0] if has_slopes else float32(0)
        return ItemValues(item.flat, item.b, item.h, batch, head, slope, item.rows, item.cols)

    return line


@device_function
def edge_at(place, extras):
    """Return ``tile_scores.edge_from`` of a lane's first element."""
    return edge_from(place.row, place.col, place.line.rows, place.line.cols, extras)


def distance_of(features: Features) -> Callable[..., Any]:
    """Return ``distance(place, extras)``: row + diagonal - col with ALiBi, else row - col."""
    has_slopes = features.slopes

    @device_function
    def distance(place, extras):
        if has_slopes:
            return float32(place.row + extras.diagonal - place.col)
        return float32(int32(place.row - place.col))

    return distance


def element_of(
    features: Features, by_keys: bool = False, has_columns: bool = False
) -> Callable[..., Any]:
    """Return ``element(place, distance, words, t, i)``, which makes an :class:`ElementPlace`.

    With ``has_columns``, all columns of the tile are within the sequence.
    """
    has_mods, offset = features.has_mods, offset_of(by_keys)

    @device_function
    def element(place, distance, words, t, i):
        row, col, line = place.row, place.col, place.line
        r, c = offset(t, i)
        if has_mods:  # tells the compiler their range
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


@device_function
def _times(product, factor):
    return product * factor


def scaled_by(features: Features) -> Callable[..., Any]:
    """Return ``scaled(product, factor)``: the score before options.

    Both passes must round scores alike.  Whether the compiler fuses the product with a user's function
    depends on what else the kernel needs, and so it must not, unless the product is exact.
    """
    return _times if features.score_mod is None or features.exact_scale else mul_rn


def score_target(features: Features, cols: int, tanh: Any, order: int) -> ScoreTarget:
    """Return the target whose places are :class:`ElementPlace` records.

    Scores are divided by the softcap beforehand.
    """
    has_slopes, kind = features.slopes, features.mask

    def by_score(function: Callable[..., Any]) -> Any:
        own = score_function(function, FLOAT32, float32)

        @device_function
        def score_mod(score, place, extras):
            apart = place.distance - float32(extras.diagonal) if has_slopes else place.distance
            numbers, batch, head = extras.score_numbers, place.batch, place.head
            return float32(own(numbers, score, batch, head, place.row, place.col, apart))

        return score_mod

    @device_function
    def slope(place, extras):
        return place.slope

    @device_function
    def distance(place, extras):
        return abs(place.distance)

    @device_function
    def is_shown(place, extras):
        return has_bit(place.words, place.t, place.i)

    target = cuda_target(FLOAT32)
    return target._replace(
        tanh=tanh,
        score_function=by_score,
        element=lambda name: slope if name == "slopes" else target.element(name),
        distance=distance,
        times=mul_rn,
        bias=make_pair_at(kind, cols) if kind in UNPACK else mask_at,
        in_mask=is_shown,
        in_blocks=is_shown,
        scores_over_cap=True,
        order=order,
    )


def seen_words(features: Features, cols: int) -> int:
    """Return the number of words of a lane in ``seen``."""
    has_pairs = features.mask in UNPACK
    return bit_words(cols) + (QUAD * (cols // STEP) if has_pairs else 0)
