"""What options make of a tile of scores in Hopper's forward kernel, in the registers of its lanes.

A lane's elements are (t, i), as in ``dropout_bits``.  A tile of which bounds and lists hide nothing is
whole; for whole tiles and for the others there is a function each: the many whole ones test nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, uint32

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash3_wgmma.dropout_bits import bit_words, has_bit
from kernels.cuda.attention.flash3_wgmma.packed_mask import make_block_bits
from kernels.cuda.attention.flash3_wgmma.score_terms import (
    difference_of,
    distance_of,
    has_mods,
    numbers_of,
    pairs_of,
)
from kernels.cuda.attention.options.mods import (
    FIRST_PLACE,
    mask_function,
    score_function,
)
from kernels.cuda.attention.options.score_functions import PLAIN, Features, mask_at
from kernels.cuda.attention.options.tile_scores import make_tile_scores
from kernels.cuda.device.emitted import unrolled
from kernels.cuda.ptx.numbers import UNPACK, ex2, rcp
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.dtypes import FLOAT32

#: Of the Taylor series of tanh(x) / x in x², from the last to the first.
_SERIES = tuple(np.float32(x) for x in (-17 / 315, 2 / 15, -1 / 3, 1.0))
#: Below this the series is taken: the error of what is left out is as small there as a rounding.
_SMALL, _TWICE_LOG2_E = np.float32(0.25), np.float32(2 * LOG2_E)


@device_function
def tanh(x):
    """Return the hyperbolic tangent, to some units in the last place, without a branch."""
    last, third, second, first = _SERIES
    square = x * x
    small = x * (((last * square + third) * square + second) * square + first)
    large = float32(1) - float32(2) * rcp(ex2(x * _TWICE_LOG2_E) + float32(1))
    return small if abs(x) < _SMALL else large


class Elements(NamedTuple):
    """The functions that :func:`make_elements` returns, and what a kernel must know beside them.

    Both ``whole`` and ``edge`` are ``(s, seen, lane, place, scale, extras)``: of the products in ``s`` they
    make scores, minus infinity where hidden.  ``place`` is (flat, own, b, h, row, col, seq_q, seq_k), where
    (row, col) is the lane's first element; ``seen`` are its bits of a boolean mask, of which a block mask
    may take some, and behind them words of a floating mask of 16 bits.

    Attributes:
        bends: Scores are natural logarithms; else still products, which the scale, if it is positive,
            leaves in their order.
        of_all: There is anything to do in tiles that are whole.
        own: ``(flat, extras)``: batch and head as mods get them, the same for all tiles of a line.
        whole: For tiles that are.
        edge: For the others.
    """

    bends: bool
    of_all: bool
    own: Callable[..., Any]
    whole: Callable[..., None]
    edge: Callable[..., None]


@cache
def make_elements(features: Features, cols: int) -> Elements:
    """Return the functions for tiles of ``cols`` columns."""
    of_all = features._replace(dropout=False).of_elements != PLAIN
    return Elements(
        features.bends,
        of_all,
        numbers_of(features),
        _make_apply(features, cols, False),
        _make_apply(features, cols, True),
    )


def _make_bend(features: Features) -> Callable[..., Any]:
    """Return ``bend(x, row, col, distance, own, b, h, scale, extras)``: the score of a product.

    ``own`` are batch and head as mods get them.
    """
    # Without one nothing calls it.
    score_mod: Any = features.score_mod and score_function(features.score_mod, FLOAT32, float32)
    has_softcap, has_slopes, has_bias = features.softcap, features.slopes, features.mask == "float"
    difference = difference_of(features)

    @device_function
    def cap(x, scale, extras):
        return extras.softcap * tanh(x * (float32(scale) / extras.softcap))

    @device_function
    def scaled(x, scale, extras):
        return x * float32(scale)

    @device_function
    def modified(x, row, col, distance, own, extras):
        return float32(score_mod(x, own[0], own[1], row, col, difference(distance, extras)))

    @device_function
    def alibi(x, distance, b, h, extras):
        return x - extras.slopes[b, h, 0, 0] * abs(distance)

    @device_function
    def biased(x, row, col, b, h, extras):
        return x + mask_at(b, h, row, col, extras)

    @device_function
    def not_modified(x, row, col, distance, own, extras):
        return x

    @device_function
    def not_far(x, distance, b, h, extras):
        return x

    @device_function
    def not_biased(x, row, col, b, h, extras):
        return x

    first = cap if has_softcap else scaled
    second = modified if score_mod else not_modified
    third, fourth = alibi if has_slopes else not_far, biased if has_bias else not_biased

    @device_function
    def bend(x, row, col, distance, own, b, h, scale, extras):
        x = second(first(x, scale, extras), row, col, distance, own, extras)
        return fourth(third(x, distance, b, h, extras), row, col, b, h, extras)

    @device_function
    def same(x, row, col, distance, own, b, h, scale, extras):
        return x

    return bend if features.bends else same


@cache
def _make_apply(features: Features, cols: int, is_edge: bool) -> Callable[..., None]:
    """Return one of the two functions of :class:`Elements`."""
    tiles, minus_inf = cols // 8, np.float32(-math.inf)
    bounds = make_tile_scores(PLAIN, FLOAT32)
    edge_of, bounded = bounds.edge, bounds.score
    bend, distance_from = _make_bend(features), distance_of(features)
    has_mask, has_mod = features.mask == "bool", features.mask_mod is not None
    mask_mod: Any = features.mask_mod and mask_function(features.mask_mod, FLOAT32)
    has_places = has_mods(features)
    has_blocks = is_edge and features.block_mask and not features.whole_tiles
    apply_block_bits = _make_apply_block_bits(cols, has_mask) if has_blocks else _apply_nothing
    has_seen, has_pairs = has_mask or has_blocks, features.mask in UNPACK
    pairs: Any = pairs_of(features, cols)
    add_pair: Any = pairs and pairs[1]

    def apply_to(s, seen, t, given):
        edge, distance, row, col, seq_q, seq_k, flat, own, b, h, scale, extras = given
        last_row, last_col = int32(seq_q - 1), int32(seq_k - 1)
        for i in range(4):
            r, c = 8 * (i // 2), 8 * t + i % 2
            # Within the arrays, so that loads need no branch.
            at_row = int32(min(int32(row + r), last_row))
            at_col = int32(min(int32(col + c), last_col)) if is_edge else int32(col + c)
            far = distance + float32(r - c)
            x = bend(s[t, i], at_row, at_col, far, own, b, h, scale, extras)
            if has_pairs:
                x = add_pair(x, seen, t, i)
            if has_seen:
                x = x if has_bit(seen, t, i) else minus_inf
            if has_mod:
                x = x if mask_mod(own[0], own[1], at_row, at_col) else minus_inf
            if is_edge:
                x = bounded(x, False, True, edge, flat, b, h, row, r, col, c, seq_q, seq_k, extras)
            s[t, i] = x

    apply_to_all = unrolled(tiles, apply_to)

    @device_function
    def apply(s, seen, lane, place, scale, extras):
        flat, own, b, h, row, col, seq_q, seq_k = place
        edge = edge_of(row, col, seq_q, seq_k, extras)
        distance = distance_from(row, col, extras)
        apply_block_bits(seen, lane, row, col, seq_q, seq_k, flat, extras)
        if has_places:  # which says to the compiler how large they are
            row, col = int32(row & FIRST_PLACE), int32(col & FIRST_PLACE)
        given = edge, distance, row, col, seq_q, seq_k, flat, own, b, h, scale, extras
        apply_to_all(s, seen, given)

    return apply


@device_function
def _apply_nothing(seen, lane, row, col, seq_q, seq_k, flat, extras):
    pass


@cache
def _make_apply_block_bits(cols: int, has_mask: bool) -> Callable[..., None]:
    """Return ``apply_block_bits(seen, lane, row, col, seq_q, seq_k, flat, extras)``.

    It clears a lane's bits of the elements that the block mask hides; without a boolean mask it sets them.
    """
    words, block_bits = bit_words(cols), make_block_bits(cols)

    @device_function
    def apply_block_bits(seen, lane, row, col, seq_q, seq_k, flat, extras):
        # One by one: a loop that is not unrolled would put them into local memory.
        bits = block_bits(0, lane, flat, row, col, seq_q, seq_k, extras)
        seen[0] = uint32(seen[0] & bits) if has_mask else bits
        if words > 1:
            bits = block_bits(1, lane, flat, row, col, seq_q, seq_k, extras)
            seen[1] = uint32(seen[1] & bits) if has_mask else bits

    return apply_block_bits
