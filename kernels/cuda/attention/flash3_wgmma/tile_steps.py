"""Steps of Hopper's forward kernels on a tile: mask bits, options, softmax, dropout.

A lane's elements are (t, i), as in ``dropout_bits``.  A tile without masked elements is whole.  Whole and
partial tiles have separate functions for options, so that the frequent whole ones test nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.common.online_softmax import LARGE, LOG2_E
from kernels.cuda.attention.flash3_wgmma.dropout_bits import bit_words, make_kept, offset_of
from kernels.cuda.attention.flash3_wgmma.packed_mask import (
    has_words,
    make_bring_pairs,
    make_pattern_word,
    make_words_place,
)
from kernels.cuda.attention.flash3_wgmma.score_terms import (
    distance_of,
    edge_at,
    element_of,
    scaled_by,
    score_target,
)
from kernels.cuda.attention.flash3_wgmma.tiles import lowered
from kernels.cuda.attention.options.tile_scores import is_inside_columns
from kernels.cuda.device.branchless import tanh
from kernels.cuda.device.one_source import shift_of
from kernels.cuda.ptx.emitted import unrolled
from kernels.cuda.ptx.numbers import UNPACK, ex2, mul_rn, rcp, sub_rn
from kernels.cuda.ptx.wgmma import make_wgmma_wait_group
from kernels.cuda.runtime.kernel import ALL_LANES, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, uint32
from kernels.scores.program import PLAIN, Features, make_score_program

MOST, LOG2_OF_E, ZERO = np.float32(LARGE), np.float32(LOG2_E), np.float32(0)


@cache
def make_fetch(
    features: Features, rows: int, cols: int
) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return the functions that locate a lane's words for an item and fetch its words for a tile.

    ``first_place(place, extras)`` returns the place of the mask's words for the warp's 16 rows.
    ``fetch(seen, kept, words_at, pattern, place, work)`` reads the words for a tile from there, and those
    of the block mask if ``pattern``, see :func:`make_pattern_word`, is not 0; it also draws the dropout
    bits.  ``place`` is a ``score_terms.LanePlace`` of the warp's first element.
    """
    words, bring_pairs = bit_words(cols), make_bring_pairs(cols)
    has_kept, has_patterns = features.dropout, features.has_patterns
    pattern_word, has_mask = make_pattern_word(rows, cols), has_words(features)
    has_bits, has_pairs = features.mask == "bool", features.mask in UNPACK
    line_place, tile_place = make_words_place(cols, has_pairs=has_pairs)
    draw_kept = make_kept(cols).draw

    @device_function
    def first_place(place, extras):
        if has_mask:
            return line_place(place.lane, place.line.b, place.line.h, place.row, extras)
        return 0

    @device_function
    def fetch(seen, kept, words_at, pattern, place, work):
        col, extras = place.col, work.extras
        if has_bits:
            words_at += tile_place(col, extras)
            for n in range(words):
                seen[n] = work.mask_words[words_at + n]
        if has_patterns and pattern != 0:
            for n in range(words):
                word = pattern_word(n, pattern, extras)
                seen[n] = uint32(seen[n] & word) if has_bits else word
        if has_pairs:
            words_at += tile_place(col, extras)
            bring_pairs(seen, work.mask_words, words_at)
        if has_kept:
            draw_kept(kept, place.lane, place.line.flat, place.row, col, extras)

    return first_place, fetch


@cache
def make_apply_options(features: Features, cols: int) -> Callable[..., None]:
    """Return ``apply_options(whole, s, seen, place, scale, extras)`` for tiles of ``cols`` columns.

    It replaces the products in ``s`` by scores, minus infinity where masked.  If options modify scores,
    these are natural logarithms; otherwise they are still products, whose order a positive scale does not
    change.  ``place`` is a ``score_terms.LanePlace``.  ``seen`` holds the lane's bits of a boolean mask
    and, for partial tiles, of a block mask, and behind them the words of a 16-bit floating mask.
    """
    of_all = features._replace(dropout=False).of_elements != PLAIN
    apply_whole, apply_edge = (_make_apply(features, cols, is_edge) for is_edge in (False, True))

    @device_function
    def apply_options(whole, s, seen, place, scale, extras):
        if not whole:
            apply_edge(s, seen, place, scale, extras)
        elif of_all:
            apply_whole(s, seen, place, scale, extras)

    return apply_options


def _make_apply(features: Features, cols: int, is_edge: bool) -> Callable[..., None]:
    """Return ``apply(s, seen, place, scale, extras)`` for whole or for partial tiles."""
    minus_inf, modifies_scores = np.float32(-math.inf), features.modifies_scores
    has_blocks = is_edge and features.has_patterns
    # The words of a block mask hide what is out of bounds, too.
    has_bounds = is_edge and not has_blocks
    target = score_target(features, cols, tanh, order=0)
    modified, is_shown, _ = make_score_program(features._replace(block_mask=has_blocks), target)
    element, offset = element_of(features, has_columns=not is_edge), offset_of(False)
    distance_from, has_softcap = distance_of(features), features.softcap
    scaled = scaled_by(features)

    def apply_to(s, seen, t, given):
        place, distance, edge, factor, extras = given
        for i in range(4):
            at, x = element(place, distance, seen, t, i), s[t, i]
            if modifies_scores:
                x, _, _ = modified(scaled(x, factor), at, extras)
            x = x if is_shown(at, extras) else minus_inf
            if has_bounds:
                r, c = offset(t, i)
                x = x if is_inside_columns(edge, r, c) else minus_inf
            s[t, i] = x

    apply_to_all = unrolled(cols // 8, apply_to)

    @device_function
    def apply(s, seen, place, scale, extras):
        factor = float32(scale)
        if has_softcap:
            factor = factor / extras.softcap
        distance, edge = distance_from(place, extras), edge_at(place, extras)
        apply_to_all(s, seen, (place, distance, edge, factor, extras))

    return apply


@cache
def make_lane_maxima(cols: int) -> Callable[..., Any]:
    """Return ``lane_maxima(s, top_0, top_1)``: the maxima of a lane's two rows and the tops."""
    tiles = cols // 8

    @device_function
    def lane_maxima(s, top_0, top_1):
        for t in range(tiles):
            top_0 = max(top_0, max(s[t, 0], s[t, 1]))
            top_1 = max(top_1, max(s[t, 2], s[t, 3]))
        return top_0, top_1

    return lane_maxima


@device_function
def row_maxima(top_0, top_1):
    """Return the maxima over the four lanes that share a row, for a lane's two rows."""
    for step in range(2):
        top_0 = max(top_0, cuda.shfl_xor_sync(ALL_LANES, top_0, 1 << step))
        top_1 = max(top_1, cuda.shfl_xor_sync(ALL_LANES, top_1, 1 << step))
    return top_0, top_1


@cache
def make_exponentials(cols: int) -> Callable[..., Any]:
    """Return ``exponentials(s, begin, factor, shift_0, shift_1, sum_0, sum_1)``: the new sums.

    It replaces each score by 2**(score · factor - shift), with the shift of its row, in ``cols`` columns
    from the square ``begin`` on.
    """
    tiles = cols // 8

    @device_function
    def exponentials(s, begin, factor, shift_0, shift_1, sum_0, sum_1):
        for t in range(tiles):
            u = begin + t
            s[u, 0] = ex2(s[u, 0] * factor - shift_0)
            s[u, 1] = ex2(s[u, 1] * factor - shift_0)
            s[u, 2] = ex2(s[u, 2] * factor - shift_1)
            s[u, 3] = ex2(s[u, 3] * factor - shift_1)
            sum_0 += s[u, 0] + s[u, 1]
            sum_1 += s[u, 2] + s[u, 3]
        return sum_0, sum_1

    return exponentials


@device_function
def has_large_row(shift_0, shift_1):
    """Tell whether the shift of one of a warp's rows is too large to subtract it from a product."""
    return cuda.any_sync(ALL_LANES, max(abs(shift_0), abs(shift_1)) > MOST)


@device_function
def rescale_rows(acc, factor_0, factor_1):
    """Multiply a lane's two rows of accumulators by their factors."""
    for t in range(acc.shape[0]):
        acc[t, 0] *= factor_0
        acc[t, 1] *= factor_0
        acc[t, 2] *= factor_1
        acc[t, 3] *= factor_1


@cache
def make_rescale(cols: int, patience: int, waits_first: bool = False) -> Callable[..., Any]:
    """Return ``rescale(s, acc, scale, factor, maxima, shifts, sums, has_large)``: rescale rows that grow.

    Scores times ``scale`` are natural logarithms, and times ``factor`` in base 2.  Maxima, shifts, which
    are subtracted in base 2, and sums are those of a lane's two rows; a lane sums its own columns.  It
    returns the new ones, and whether a row of the warp is large: the tops of such rows are subtracted from
    their scores.  With patience, see ``ForwardLayout``, the rows of a warp are rescaled together; with
    ``waits_first``, the last P V is waited for before the maxima, and else only where O is rescaled.

    The exponentials follow: these and their packing, without a branch between them, keep several units
    busy.
    """
    lane_maxima, is_patient, least = make_lane_maxima(cols), patience > 0, np.float32(patience)
    tiles, wait_for_all = cols // 8, make_wgmma_wait_group(0)

    @device_function
    def tops_of(s, factor, maxima, has_large):
        tops = lane_maxima(s, maxima[0], maxima[1])
        if not is_patient:
            return tops, True
        # A row maximum has grown if it has in one of its lanes.  A warp with a large row rescales with
        # every tile: others need no test of their own.
        grows = (tops[0] - maxima[0]) * factor > least or (tops[1] - maxima[1]) * factor > least
        return tops, cuda.ballot_sync(ALL_LANES, has_large or grows) != 0

    @device_function
    def lower(s, scale, tops):
        inverse = rcp(scale)
        for t in range(tiles):
            for i in range(4):
                low = lowered(s[t, i], scale, tops[i // 2]) * inverse
                s[t, i] = low if tops[i // 2] != ZERO else s[t, i]

    @device_function
    def apart(old, scale, top, shift, rescale):
        natural = mul_rn(float32(shift_of(top)), scale)
        if abs(shift) > MOST:
            return natural, ZERO, ex2(sub_rn(mul_rn(old, scale), natural) * LOG2_OF_E)
        return ZERO, shift, rescale

    @device_function
    def rescale_to(tops, s, acc, scale, factor, maxima, sums):
        (max_0, max_1), (top_0, top_1) = maxima, row_maxima(tops[0], tops[1])
        # Rounded products: that of a maximum that has not grown, less itself, must be 0 with every tile.
        shift_0 = mul_rn(float32(shift_of(top_0)), factor)
        shift_1 = mul_rn(float32(shift_of(top_1)), factor)
        rescale_0 = ex2(mul_rn(max_0, factor) - shift_0)
        rescale_1 = ex2(mul_rn(max_1, factor) - shift_1)
        has_large = has_large_row(shift_0, shift_1)
        if has_large:
            near_0, shift_0, rescale_0 = apart(max_0, scale, top_0, shift_0, rescale_0)
            near_1, shift_1, rescale_1 = apart(max_1, scale, top_1, shift_1, rescale_1)
            lower(s, scale, (near_0, near_1))
        rescale_rows(acc, rescale_0, rescale_1)
        sums = sums[0] * rescale_0, sums[1] * rescale_1
        return (top_0, top_1), (shift_0, shift_1), sums, has_large

    @device_function
    def rescale(s, acc, scale, factor, maxima, shifts, sums, has_large):
        tops, is_scaled = tops_of(s, factor, maxima, has_large)
        if waits_first:
            wait_for_all()
        if is_scaled:
            wait_for_all()  # the last P V is done: O is ours
            maxima, shifts, sums, has_large = rescale_to(tops, s, acc, scale, factor, maxima, sums)
        return maxima, shifts, sums, has_large

    return rescale


@cache
def make_drop(features: Features, cols: int) -> Callable[..., None]:
    """Return ``drop(p, kept)``: zero the packed probabilities that dropout drops."""
    steps, pair, drops = cols // 16, make_kept(cols).pair, features.dropout

    @device_function
    def drop(p, kept):
        if drops:
            for t in range(steps):
                for e in range(4):
                    p[t, e] = pair(p[t, e], kept, 2 * t + e // 2, e % 2)

    return drop
