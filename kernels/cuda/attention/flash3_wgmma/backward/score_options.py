"""Apply options to the elements of Hopper's two backward kernels, in the registers of a lane.

A lane's elements of a tile are (t, i), as in ``dropout_bits``.  Two sets of bits tell which elements are
visible (lists, masks and mods) and which of them dropout keeps.  For each element, dV needs P ∘ Z, with Z
the dropout, and dS needs P · slope, with slope the derivative of the options that modify the score.  P ∘ Z
is packed, and P · slope takes the place of the score, so that options need registers only for their bits.

The factor of dropout is applied at the end: Z is 0 or 1 here, D is divided by the factor beforehand, and
gradients are multiplied by it when they are written.  If no option modifies scores, the sign of P marks the
dropped elements: let X be P, negative where dropped; then 2 P ∘ (dP ∘ Z - D) = X ∘ dP + |X| ∘ (dP - 2 D),
without a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash3_wgmma.dropout_bits import (
    TILES,
    bit_words,
    lane_offset_of,
    make_kept,
    make_kept_by_keys,
    with_bit,
)
from kernels.cuda.attention.flash3_wgmma.layout import KernelForm
from kernels.cuda.attention.flash3_wgmma.packed_mask import (
    ALL,
    make_bring_pairs,
    make_pattern_word,
    make_words_place,
)
from kernels.cuda.attention.flash3_wgmma.score_terms import (
    element_of,
    scaled_by,
    score_target,
    seen_words,
)
from kernels.cuda.device.branchless import tanh
from kernels.cuda.ptx.numbers import PACK, PACK_POSITIVE, UNPACK, ex2, sub_rn
from kernels.cuda.ptx.numbers import tanh as near_tanh
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.types import float32, uint32
from kernels.scores.program import Features, ScoreTarget, make_score_program


class BackwardElements(NamedTuple):
    """The functions that ``make_elements`` returns, and properties that a backward kernel needs."""

    #: ``(scale, extras)``: factor of the products, for ``weigh``; that of the forward pass.
    factor: Callable[..., Any]
    #: Number of words for the bits of a lane's elements and, behind them, for a 16-bit floating mask.
    words: int
    #: ``(kept, lane, flat, row, col, extras)``: set the bits of kept elements, for the warp's 16 rows or
    #: keys.
    draw: Callable[..., None]
    #: ``(seen, mask_words, pattern, place, extras)``: set the bits of visible elements; ``place`` is a
    #: ``score_terms.LanePlace``, ``pattern`` the number of the tile's words in the block mask.
    fetch_bits: Callable[..., None]
    #: ``(seen, mask_words, place, extras)``: load the words of a 16-bit floating mask.
    fetch_pairs: Callable[..., None]
    #: ``(product, factor, shift, top, place, extras)``: P and P · slope, ``place`` being a
    #: ``score_terms.ElementPlace``; the top is 0.
    weigh: Callable[..., Any]
    weigh_apart: Callable[..., Any]  # The same, where a top may be another number
    #: ``(p, p_slope, kept, t, i)``: from P and P · slope, the number that ``pack`` turns into P ∘ Z, and
    #: the number that stays in place of the score.
    drop: Callable[..., Any]
    #: ``(p_slope, dp, delta, kept, t, i)``: dS = P ∘ (dP ∘ Z - D) from the number that stayed; ``delta`` is
    #: D times :func:`delta_factor`.
    slope: Callable[..., Any]
    pack: dict[str, Any]  # By dtype, the function that packs two numbers that ``drop`` returned
    scale: Callable[..., Any]  # ``(extras)``: the remaining factor of P ∘ Z
    #: ``(extras)``: the remaining factor of dS, :func:`slope_factor`.
    slope_scale: Callable[..., Any]


def is_marked(features: Features) -> bool:
    """Tell whether the signs of probabilities mark the dropped elements."""
    return features.dropout and not features.modifies_scores


def delta_factor(features: Features, keep_scale: float) -> float:
    """Return the factor of D for kernels by tiles; ``keep_scale`` is the factor of kept probabilities."""
    return (2.0 if is_marked(features) else 1.0) / keep_scale


def slope_factor(features: Features, keep_scale: float) -> float:
    """Return the remaining factor of dS in these kernels."""
    return keep_scale * (0.5 if is_marked(features) else 1.0)


@cache
def make_elements(form: KernelForm) -> BackwardElements:
    """Return the functions of a lane's elements of a tile."""
    features, by_keys, (_, cols) = form.features, form.by_keys, form.sides
    zero, half, one = np.float32(0), np.float32(0.5), np.float32(1)
    minus_inf, log2_e = np.float32(-math.inf), np.float32(LOG2_E)
    modifies_scores, has_cap, has_mod = (
        features.modifies_scores,
        features.softcap,
        features.score_mod is not None,
    )
    drops, marks = features.dropout, is_marked(features)
    # The instruction for tanh is accurate to 11 bits, which makes a small score as accurate as PyTorch's
    # operations in 16 bits do.  The forward pass has a better one, since lse is float32; a large score must
    # be the same number here.
    is_small = not (features.large_cap or features._replace(softcap=False).modifies_scores)
    target = score_target(features, cols, near_tanh if is_small else tanh, order=1)
    scaled = scaled_by(features)
    # A mask_mod hides by bits, as a block mask does.
    by_bits = features._replace(block_mask=features.has_lists, mask_mod=None)
    modified, is_shown, _ = make_score_program(by_bits, target)
    draw_kept, _, is_kept, signed = (make_kept_by_keys if by_keys else make_kept)(cols)

    @device_function
    def factor(scale, extras):
        if has_cap:
            return float32(scale) / extras.softcap
        return float32(scale) if modifies_scores else float32(scale) * log2_e

    @device_function
    def draw(kept, lane, flat, row, col, extras):
        if drops:
            draw_kept(kept, lane, flat, row, col, extras)

    def make_weigh(has_tops: bool) -> Any:
        @device_function
        def weigh(product, factor, shift, top, place, extras):
            if modifies_scores:
                score, slope, _ = modified(scaled(product, factor), place, extras)
                p = ex2((sub_rn(score, top) if has_tops else score) * log2_e - shift)
                p_slope = p * slope
                if has_mod:  # the derivative of a masked score may be infinite or NaN
                    p_slope = zero if score == minus_inf else p_slope
            else:
                p = ex2(product * factor - shift)
                p_slope = p
            is_seen = is_shown(place, extras)
            return (p if is_seen else zero), (p_slope if is_seen else zero)

        return weigh

    @device_function
    def drop(p, p_slope, kept, t, i):
        if marks:
            marked = signed(p, kept, t, i)
            return marked, marked
        if drops:
            p = p if is_kept(kept, t, i) else zero
        return p, p_slope

    @device_function
    def slope(p_slope, dp, delta, kept, t, i):
        if marks:
            return p_slope * dp + abs(p_slope) * (dp - delta)
        if drops:
            dp = dp if is_kept(kept, t, i) else zero
        return p_slope * (dp - delta)

    @device_function
    def scale(extras):
        return extras.keep_scale if drops else one

    @device_function
    def slope_scale(extras):
        return scale(extras) * half if marks else scale(extras)

    fetch_bits, fetch_pairs = _make_fetch(form, target)
    return BackwardElements(
        factor, seen_words(features, cols), draw, fetch_bits, fetch_pairs, make_weigh(False),
        make_weigh(True), drop, slope, PACK_POSITIVE if marks else PACK, scale, slope_scale,
    )  # fmt: skip


def _make_fetch(
    form: KernelForm, target: ScoreTarget
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return ``BackwardElements.fetch_bits`` and ``BackwardElements.fetch_pairs``."""
    features, by_keys, (rows, cols) = form.features, form.by_keys, form.sides
    pattern_word = make_pattern_word(rows, cols)
    words, has_mask, has_pairs = bit_words(cols), features.mask == "bool", features.mask in UNPACK
    has_patterns, has_mod = features.has_patterns, features.mask_mod is not None
    has_bits = has_mask or features.has_lists
    line_place, tile_place = make_words_place(cols, by_keys, has_pairs)
    bring_pairs = make_bring_pairs(cols)
    element, lane_offset = element_of(features, by_keys), lane_offset_of(by_keys)
    in_mod = make_score_program(Features(mask_mod=features.mask_mod), target).is_shown

    @device_function
    def words_place(place, extras):
        lane, row, col, line = place
        down, right = lane_offset(lane)
        first = (col - right, row - down) if by_keys else (row - down, col - right)
        return line_place(lane, line.b, line.h, first[0], extras) + tile_place(first[1], extras)

    @device_function
    def word_of(n, seen, mask_words, pattern, place, extras):
        word = uint32(ALL)
        if has_mask:
            word = uint32(mask_words[words_place(place, extras) + n])
        if has_mod:
            found = uint32(0)
            for u in range(min(TILES, cols // 8 - n * TILES)):
                for i in range(4):
                    at = element(place, float32(0), seen, n * TILES + u, i)
                    found = with_bit(found, in_mod(at, extras), 4 * u + i)
            word = uint32(word & found)
        if has_patterns and pattern != 0:
            word = uint32(word & pattern_word(n, pattern, extras))
        return word

    @device_function
    def fetch_bits(seen, mask_words, pattern, place, extras):
        # One by one: a loop that is not unrolled would put them into local memory.
        if has_bits:
            seen[0] = word_of(0, seen, mask_words, pattern, place, extras)
        if has_bits and words > 1:
            seen[1] = word_of(1, seen, mask_words, pattern, place, extras)

    @device_function
    def fetch_pairs(seen, mask_words, place, extras):
        if has_pairs:
            bring_pairs(seen, mask_words, words_place(place, extras))

    return fetch_bits, fetch_pairs
