"""What options make of an element in Hopper's two backward kernels, in registers of the lane that has it.

A lane's elements of a tile are (t, i), as in ``dropout_bits``.  What lists, masks and mods let be seen,
and what dropout keeps, are bits of words.  Of an element there is needed P ∘ Z, Z the dropout, for dV, and
P · slope for dS, slope being the derivative of what bends the score: the one is packed and the other takes
the place of the score, so that options take no more registers than bits.

What dropout multiplies by is left to the end: Z is 0 or 1 here, D comes divided by it, and gradients are
multiplied by it when they are written.  Where nothing bends scores, P itself tells what is dropped: as X it
has a minus sign there, and 2 P ∘ (dP ∘ Z - D) is X ∘ dP + |X| ∘ (dP - 2 D), without a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, uint32

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash3_wgmma.dropout_bits import (
    TILES,
    bit_words,
    has_bit,
    make_kept,
    make_kept_by_keys,
    with_bit,
)
from kernels.cuda.attention.flash3_wgmma.packed_mask import (
    ALL,
    STEP,
    all_seen,
    make_block_bits,
    make_words_place,
)
from kernels.cuda.attention.flash3_wgmma.score_terms import (
    difference_of,
    has_mods,
    numbers_of,
    pairs_of,
    seen_words,
)
from kernels.cuda.attention.options.mods import FIRST_PLACE, mask_function, score_function
from kernels.cuda.attention.options.score_functions import Features, mask_at
from kernels.cuda.ptx.numbers import PACK, PACK_POSITIVE, UNPACK, ex2, tanh
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.dtypes import FLOAT32


class Elements(NamedTuple):
    """The functions of :func:`make_elements`, and what a kernel must know beside them.

    Attributes:
        factor: ``(extras)``: what products are multiplied by, beside scale, for ``weigh``.
        words: Of bits of a lane's elements, and behind them of a floating mask of 16 bits.
        has_seen: There are words that ``set_visible`` sets.
        draw: ``(kept, lane, flat, row, col, extras)``: set the bits of what dropout keeps, of the warp's 16
            rows or keys.
        see: ``(seen, mask_words, lane, whole, flat, own, b, h, row, col, seq_q, seq_k, extras)``: set those
            of what is seen; (row, col) is the lane's first element, ``whole`` tells that the block mask
            hides none.  And load the words of a floating mask of 16 bits.
        steepness: ``(b, h, extras)``: ALiBi's slope of a head.
        own: ``(flat, extras)``: batch and head as mods get them, the same for all tiles of a line.
        weigh: ``(product, shift, seen, t, i, own, b, h, row, col, distance, steepness, seq_q, seq_k,
            extras)``: P and P · slope; ``distance`` is what ``distance_of`` says of row and col.
        drop: ``(p, bent, kept, t, i)``: of P and P · slope what ``pack`` makes P ∘ Z of, and what stays.
        slope: ``(bent, dp, delta, kept, t, i)``: dS = P ∘ (dP ∘ Z - D) of what stayed, ``delta`` being
            D times :func:`delta_factor`.
        pack: By dtype, what packs two numbers that ``drop`` returned.
        scale: ``(extras)``: what is left to multiply P ∘ Z by.
        slope_scale: ``(extras)``: what is left to multiply dS by, :func:`slope_factor`.
    """

    factor: Callable[..., Any]
    words: int
    has_seen: bool
    draw: Callable[..., None]
    set_visible: Callable[..., None]
    steepness: Callable[..., Any]
    own: Callable[..., Any]
    weigh: Callable[..., Any]
    drop: Callable[..., Any]
    slope: Callable[..., Any]
    pack: dict[str, Any]
    scale: Callable[..., Any]
    slope_scale: Callable[..., Any]


def is_marked(features: Features) -> bool:
    """Tell whether the signs of probabilities say what dropout drops."""
    return features.dropout and not features.bends


def delta_factor(features: Features, keep_scale: float) -> float:
    """Return what kernels by tiles want D multiplied by; ``keep_scale`` is what dropout multiplies by."""
    return (2.0 if is_marked(features) else 1.0) / keep_scale


def slope_factor(features: Features, keep_scale: float) -> float:
    """Return what their dS are to be multiplied by."""
    return keep_scale * (0.5 if is_marked(features) else 1.0)


@cache
def make_elements(features: Features, cols: int, by_keys: bool) -> Elements:
    """Return the functions of a lane's elements of a tile.

    Args:
        features: Of the kernel.
        cols: Of the tile: query rows if ``by_keys``, else keys.
        by_keys: Rows of the tile are keys.
    """
    zero, half, one = np.float32(0), np.float32(0.5), np.float32(1)
    minus_inf, log2_e, bends = np.float32(-math.inf), np.float32(LOG2_E), features.bends
    bend, within = _make_bend(features), _make_within(features)
    has_pairs, has_mod = features.mask in UNPACK, features.score_mod is not None
    pairs: Any = pairs_of(features, cols)
    add_pair: Any = pairs and pairs[1]
    log2_factor = one if bends else log2_e
    has_bits = features.mask == "bool" or features.block_mask or features.mask_mod is not None

    @device_function
    def place_of(t, i):
        """Return where an element is from the lane's first one: rows and columns of scores."""
        along, across = 8 * t + i % 2, 8 * (i // 2)
        return (along, across) if by_keys else (across, along)

    @device_function
    def weigh(
        product, shift, seen, t, i, own, b, h, row, col, distance, steepness, seq_q, seq_k, extras
    ):
        if bends:
            r, c = place_of(t, i)
            # Loads that are in the arrays need no branch.
            at_row, at_col = within(row, r, seq_q), within(col, c, seq_k)
            far = distance + float32(r - c)
            score, slope = bend(product, at_row, at_col, far, steepness, own, b, h, extras)
            if has_pairs:
                score = add_pair(score, seen, t, i)
            p = ex2(score * log2_e - shift)
            bent = p * slope
            if has_mod:  # the derivative of a masked score may be infinite or NaN
                bent = zero if score == minus_inf else bent
        else:
            p = ex2(product - shift)
            bent = p
        if has_bits:
            is_seen = has_bit(seen, t, i)
            return (p if is_seen else zero), (bent if is_seen else zero)
        return p, bent

    @device_function
    def over_cap(extras):
        return one / extras.softcap

    @device_function
    def constant_factor(extras):
        return log2_factor

    @device_function
    def steepness(b, h, extras):
        return extras.slopes[b, h, 0, 0]

    @device_function
    def not_steep(b, h, extras):
        return zero

    found = make_kept_by_keys(cols) if by_keys else make_kept(cols)
    is_kept, signed = found.has, found.signed

    @device_function
    def mark(p, bent, kept, t, i):
        marked = signed(p, kept, t, i)
        return marked, marked

    @device_function
    def marked_slope(p, dp, delta, kept, t, i):
        return p * dp + abs(p) * (dp - delta)

    @device_function
    def drop(p, bent, kept, t, i):
        return (p if is_kept(kept, t, i) else zero), bent

    @device_function
    def slope_of_dropped(bent, dp, delta, kept, t, i):
        return bent * ((dp if is_kept(kept, t, i) else zero) - delta)

    @device_function
    def never_dropped(p, bent, kept, t, i):
        return p, bent

    @device_function
    def plain_slope(bent, dp, delta, kept, t, i):
        return bent * (dp - delta)

    @device_function
    def keep_scale(extras):
        return extras.keep_scale

    @device_function
    def half_scale(extras):
        return extras.keep_scale * half

    @device_function
    def no_scale(extras):
        return one

    @device_function
    def nothing(kept, lane, flat, row, col, extras):
        pass

    draw, own_drop, slope, pack = nothing, never_dropped, plain_slope, PACK
    scale = slope_scale = no_scale
    if features.dropout:
        draw, own_drop, slope = found.draw, drop, slope_of_dropped
        scale = slope_scale = keep_scale
    if is_marked(features):
        own_drop, slope, pack, slope_scale = mark, marked_slope, PACK_POSITIVE, half_scale
    return Elements(
        over_cap if features.softcap else constant_factor, seen_words(features, cols),
        has_bits or has_pairs, draw, _make_set_visible(features, cols, by_keys, place_of),
        steepness if features.slopes else not_steep, numbers_of(features), weigh,
        own_drop, slope, pack, scale, slope_scale,
    )  # fmt: skip


def _make_within(features: Features) -> Callable[..., Any]:
    """Return ``within(first, step, count)``: a place a step from a lane's first one, in the array."""
    is_modified = has_mods(features)

    @device_function
    def within(first, step, count):
        if is_modified:  # which says to the compiler how large it is
            first = first & FIRST_PLACE
        return int32(min(int32(first + step), int32(count - 1)))

    return within


def _make_bend(features: Features) -> Callable[..., Any]:
    """Return what a score becomes, and the derivative of that by the score.

    ``bend(x, row, col, distance, steepness, own, b, h, extras)``, natural logarithms; with a softcap ``x``
    comes divided by it.  The instruction for tanh is exact to 11 bits, a score then as that of PyTorch's
    operations in 16 bits is; the forward pass has a better one, for lse is float32.
    """
    one = np.float32(1)
    score_mod = score_function(features.score_mod or _same, FLOAT32, float32)
    derivative = score_function(features.derivative or _one, FLOAT32, float32)
    has_softcap, has_mod = features.softcap, features.score_mod is not None
    has_slopes, has_bias = features.slopes, features.mask == "float"
    difference = difference_of(features)

    @device_function
    def biased(x, row, col, b, h, extras):
        return x + mask_at(b, h, row, col, extras)

    @device_function
    def not_biased(x, row, col, b, h, extras):
        return x

    add_bias = biased if has_bias else not_biased

    @device_function
    def bend(x, row, col, distance, steepness, own, b, h, extras):
        slope = one
        if has_softcap:
            bent = tanh(x)
            x, slope = extras.softcap * bent, one - bent * bent
        if has_mod:
            apart = difference(distance, extras)
            slope = float32(slope * derivative(x, own[0], own[1], row, col, apart))
            x = float32(score_mod(x, own[0], own[1], row, col, apart))
        if has_slopes:
            x = x - steepness * abs(distance)
        return add_bias(x, row, col, b, h, extras), slope

    return bend


def _same(score, batch, head, row, col):
    return score


def _one(score, batch, head, row, col):
    return 1.0


def _make_set_visible(
    features: Features, cols: int, by_keys: bool, place_of: Any
) -> Callable[..., None]:
    words = bit_words(cols)
    mask_mod: Any = features.mask_mod and mask_function(features.mask_mod, FLOAT32)
    pairs: Any = pairs_of(features, cols)
    has_pairs, load_words, steps = pairs is not None, pairs and pairs[0], cols // STEP
    line_place, tile_place = make_words_place(cols, by_keys, has_pairs)
    has_blocks, has_mod = features.block_mask, features.mask_mod is not None
    has_bits, within = features.mask == "bool" or has_blocks or has_mod, _make_within(features)
    block_bits = make_block_bits(cols, by_keys) if has_blocks else all_seen

    @device_function
    def own_place(lane, b, h, row, col, extras):
        across, along = lane // 4, 2 * (lane % 4)
        first = (col - across, row - along) if by_keys else (row - across, col - along)
        return line_place(lane, b, h, first[0], extras) + tile_place(first[1], extras)

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
    def word_of(n, mask_words, given):
        lane, whole, flat, own, b, h, row, col, seq_q, seq_k, extras = given
        word = uint32(word_at(mask_words, place_of_words(lane, b, h, row, col, extras) + n))
        if has_mod:
            found = uint32(0)
            for u in range(min(TILES, cols // 8 - n * TILES)):
                for i in range(4):
                    r, c = place_of(n * TILES + u, i)
                    at_row, at_col = within(row, r, seq_q), within(col, c, seq_k)
                    is_seen = mask_mod(own[0], own[1], at_row, at_col)
                    found = with_bit(found, is_seen, 4 * u + i)
            word = uint32(word & found)
        if has_blocks and not whole:
            word = uint32(word & block_bits(n, lane, flat, row, col, seq_q, seq_k, extras))
        return word

    @device_function
    def set_visible(seen, mask_words, lane, whole, flat, own, b, h, row, col, seq_q, seq_k, extras):
        given = lane, whole, flat, own, b, h, row, col, seq_q, seq_k, extras
        # One by one: a loop that is not unrolled would put them into local memory.
        if has_bits:
            seen[0] = word_of(0, mask_words, given)
        if has_bits and words > 1:
            seen[1] = word_of(1, mask_words, given)
        if has_pairs:
            place = own_place(lane, b, h, row, col, extras)
            for step in range(steps):
                load_words(seen, mask_words, place, step)

    return set_visible
