"""What options make of an element in Hopper's two backward kernels, in registers of the lane that has it.

A lane's elements of a tile are (t, i), as in ``flash3_scores``.  What lists, masks and mods let be seen,
and what dropout keeps, are bits of words.  Of an element there is needed P ∘ Z, Z the dropout, for dV, and
P · slope for dS, slope being the derivative of what bends the score: the one is packed and the other takes
the place of the score, so that options take no more registers than bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, int64, uint32

from kernels.block_mask import FULL, PARTIAL
from kernels.cuda.device import device_callable, device_function
from kernels.cuda.flash3_mask import WORDS, make_words_place
from kernels.cuda.flash3_options import tanh
from kernels.cuda.flash3_scores import (
    TILES,
    bit_words,
    has_bit,
    make_draw_kept,
    make_draw_kept_by_keys,
    with_bit,
)
from kernels.cuda.ptx.numbers import ex2
from kernels.cuda.scores import Features, block_at, make_score_functions, mask_at
from kernels.dtypes import FLOAT32
from kernels.online_softmax import LOG2_E

#: A word of all bits.
ALL = 0xFFFFFFFF


def words_type(features: Features) -> Any:
    """Return numba's type of the argument for the words of a boolean mask, 0 where there are none."""
    return WORDS if features.mask == "bool" else int64


class Elements(NamedTuple):
    """The functions of :func:`make_elements`, and what a kernel must know beside them.

    Attributes:
        factor: What scores are multiplied by, beside scale.
        words: Of bits of a lane's elements.
        has_seen: Lists, masks or mods hide elements.
        hides: Elements may be hidden beside others that are seen.
        draw: ``(kept, lane, flat, row, col, extras)``: set the bits of what dropout keeps, of the warp's 16
            rows or keys.
        see: ``(seen, mask_words, lane, whole, flat, b, h, row, col, seq_q, seq_k, extras)``: set those of
            what is seen; (row, col) is the lane's first element, ``whole`` tells that the block mask
            hides none.
        steepness: ``(b, h, extras)``: ALiBi's slope of a head.
        weigh: ``(product, shift, seen, t, i, flat, b, h, row, col, distance, steepness, seq_q, seq_k,
            extras)``: P and P · slope; ``distance`` is row - col and the diagonal.
        drop: ``(value, kept, t, i)``: the value, or 0 if it is dropped.
        slope: ``(p, dp, delta, extras)``: dS = P ∘ (dP ∘ Z - D), dP being 0 where it is dropped.
        scale: ``(extras)``: what is left to multiply P ∘ Z by.
    """

    factor: Any
    words: int
    has_seen: bool
    hides: bool
    draw: Callable[..., None]
    see: Callable[..., None]
    steepness: Callable[..., Any]
    weigh: Callable[..., Any]
    drop: Callable[..., Any]
    slope: Callable[..., Any]
    scale: Callable[..., Any]


@cache
def make_elements(features: Features, cols: int, by_keys: bool) -> Elements:
    """Return the functions of a lane's elements of a tile.

    Args:
        features: Of the kernel.
        cols: Of the tile: query rows if ``by_keys``, else keys.
        by_keys: Rows of the tile are keys.
    """
    zero, one, minus_inf = np.float32(0), np.float32(1), np.float32(-math.inf)
    log2_e, bends = np.float32(LOG2_E), features.bends
    bend = _make_bend(features)
    has_seen = features.mask == "bool" or features.block_mask or features.mask_mod is not None

    @device_function
    def place_of(t, i):
        """Return where an element is from the lane's first one: rows and columns of scores."""
        along, across = 8 * t + i % 2, 8 * (i // 2)
        return (along, across) if by_keys else (across, along)

    @device_function
    def weigh(
        product, shift, seen, t, i, flat, b, h, row, col, distance, steepness, seq_q, seq_k, extras
    ):
        if bends:
            r, c = place_of(t, i)
            # Within the arrays, so that loads need no branch.
            at_row = int32(min(int32(row + r), int32(seq_q - 1)))
            at_col = int32(min(int32(col + c), int32(seq_k - 1)))
            far = distance + float32(r - c)
            score, slope = bend(product, at_row, at_col, far, steepness, flat, b, h, extras)
            p = ex2(score * log2_e - shift)
            # What is hidden may be anything, its derivative too.
            bent = zero if score == minus_inf else p * slope
        else:
            p = ex2(product - shift)
            bent = p
        if has_seen:
            is_seen = has_bit(seen, t, i)
            return (p if is_seen else zero), (bent if is_seen else zero)
        return p, bent

    @device_function
    def steepness(b, h, extras):
        return extras.slopes[b, h, 0, 0]

    @device_function
    def not_steep(b, h, extras):
        return zero

    @device_function
    def drop(value, kept, t, i):
        return value if has_bit(kept, t, i) else zero

    @device_function
    def never_dropped(value, kept, t, i):
        return value

    @device_function
    def slope(p, dp, delta, extras):
        return p * (dp * extras.keep_scale - delta)

    @device_function
    def plain_slope(p, dp, delta, extras):
        return p * (dp - delta)

    @device_function
    def keep_scale(extras):
        return extras.keep_scale

    @device_function
    def no_scale(extras):
        return one

    @device_function
    def nothing(kept, lane, flat, row, col, extras):
        pass

    make_draw = make_draw_kept_by_keys if by_keys else make_draw_kept
    draw, own_drop, own_slope, scale = (
        (make_draw(cols), drop, slope, keep_scale)
        if features.dropout
        else (nothing, never_dropped, plain_slope, no_scale)
    )
    return Elements(
        one if bends else log2_e, bit_words(cols), has_seen, features.hides,
        draw, _make_see(features, cols, by_keys, place_of),
        steepness if features.slopes else not_steep, weigh, own_drop, own_slope, scale,
    )  # fmt: skip


def _make_bend(features: Features) -> Callable[..., Any]:
    """Return what a score becomes, and the derivative of that by the score.

    ``bend(x, row, col, distance, steepness, flat, b, h, extras)``, natural logarithms.
    """
    one, minus_inf = np.float32(1), np.float32(-math.inf)
    score_mod = device_callable(features.score_mod or _same, FLOAT32)
    derivative = device_callable(features.derivative or _one, FLOAT32)
    has_softcap, has_mod = features.softcap, features.score_mod is not None
    has_slopes, has_bias = features.slopes, features.mask == "float"

    @device_function
    def biased(x, row, col, b, h, extras):
        bias = mask_at(b, h, row, col, extras)
        # What the mask hides may be NaN, and would stay it.
        return bias if bias == minus_inf else x + bias

    @device_function
    def not_biased(x, row, col, b, h, extras):
        return x

    add_bias = biased if has_bias else not_biased

    @device_function
    def bend(x, row, col, distance, steepness, flat, b, h, extras):
        slope = one
        if has_softcap:
            bent = tanh(x / extras.softcap)
            x, slope = extras.softcap * bent, one - bent * bent
        if has_mod:
            batch, head = int32(flat // extras.heads), int32(flat % extras.heads)
            slope = float32(slope * derivative(x, batch, head, row, col))
            x = float32(score_mod(x, batch, head, row, col))
        if has_slopes:
            x = x - steepness * abs(distance)
        return add_bias(x, row, col, b, h, extras), slope

    return bend


def _same(score, batch, head, row, col):
    return score


def _one(score, batch, head, row, col):
    return 1.0


def _make_see(features: Features, cols: int, by_keys: bool, place_of: Any) -> Callable[..., None]:
    words = bit_words(cols)
    in_mod = make_score_functions(features, FLOAT32).in_mod
    words_place = make_words_place(cols, by_keys)
    has_blocks, has_mod = features.block_mask, features.mask_mod is not None

    @device_function
    def in_blocks(whole, flat, row, col, extras):
        if whole:
            return True
        state, r, c = block_at(flat, row, col, extras)
        if state < PARTIAL:
            return state == FULL
        return bool(extras.patterns[int64(state - PARTIAL), int64(r), int64(c)])

    @device_function
    def in_all(whole, flat, row, col, extras):
        return True

    in_list = in_blocks if has_blocks else in_all

    @device_function
    def own_place(lane, b, h, row, col, extras):
        across, along = lane // 4, 2 * (lane % 4)
        first = (col - across, row - along) if by_keys else (row - across, col - along)
        return words_place(lane, b, h, first[0], first[1], extras)

    @device_function
    def no_place(lane, b, h, row, col, extras):
        return 0

    @device_function
    def mask_word(mask_words, place):
        return mask_words[place]

    @device_function
    def all_bits(mask_words, place):
        return uint32(ALL)

    is_masked = features.mask == "bool"
    place_of_words, word_at = (own_place, mask_word) if is_masked else (no_place, all_bits)

    @device_function
    def see(seen, mask_words, lane, whole, flat, b, h, row, col, seq_q, seq_k, extras):
        place = place_of_words(lane, b, h, row, col, extras)
        for n in range(words):
            word = uint32(word_at(mask_words, place + n))
            if has_mod or (has_blocks and not whole):
                found = uint32(0)
                for u in range(min(TILES, cols // 8 - n * TILES)):
                    for i in range(4):
                        r, c = place_of(n * TILES + u, i)
                        at_row = int32(min(int32(row + r), int32(seq_q - 1)))
                        at_col = int32(min(int32(col + c), int32(seq_k - 1)))
                        is_seen = in_mod(flat, b, h, at_row, at_col, extras)
                        if has_blocks and is_seen:
                            is_seen = in_list(whole, flat, at_row, at_col, extras)
                        found = with_bit(found, is_seen, 4 * u + i)
                word = uint32(word & found)
            seen[n] = word

    return see
