"""The steps between the products of Hopper's backward kernels: P = exp(S - L), dS = P ∘ (dP ∘ Z - D).

A lane replaces its elements of a tile.  That is all for calls without options, and for whole tiles of calls
whose only option is a list of tiles; for other options, see ``backward.score_options``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash3_wgmma.backward.layout import makes_elements
from kernels.cuda.attention.flash3_wgmma.backward.score_options import make_elements
from kernels.cuda.attention.flash3_wgmma.dropout_bits import lane_offset_of
from kernels.cuda.attention.flash3_wgmma.layout import KernelForm
from kernels.cuda.attention.flash3_wgmma.score_terms import (
    LanePlace,
    distance_of,
    edge_at,
    element_of,
)
from kernels.cuda.attention.flash3_wgmma.tile_walk import make_walk
from kernels.cuda.attention.flash3_wgmma.tiles import (
    ZERO,
    lowered,
    make_hide,
    make_hide_pairs,
    make_issue,
    make_pack,
)
from kernels.cuda.ptx.copies import ld_shared_v2
from kernels.cuda.ptx.emitted import unrolled
from kernels.cuda.ptx.numbers import UNPACK, ex2
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.kernel import ALL_LANES, WORD, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int32
from kernels.scores.program import PLAIN

LOG2_OF_E = np.float32(LOG2_E)


class Passes(NamedTuple):
    """The elementwise functions that a flash3_wgmma backward kernel applies to a tile.

    In a kernel by keys, D is in shared memory, and ``numbers`` is the address of the lane's first one; so
    are shifts and tops, see ``layout.shift_place``.  In a kernel by rows, ``numbers`` is the pair of the
    lane's two rows, and ``shifts`` the pair of their shifts and that of their tops.

    ``place`` is a ``score_terms.LanePlace``.
    """

    #: ``(shifts)``: the largest magnitude of a top among two rows of a lane, by keys those from row
    #: 2 · lane on.
    largest_top: Callable[..., Any]
    #: ``(s, shifts, scale)``: replaces products by scores less the tops of their rows, before ``weigh`` and
    #: where a row is large; only if options do not modify scores.
    lower: Callable[..., None]
    #: ``((s, p), (kept, seen), shifts, factor, whole, pattern, place, work)``: replaces the products in
    #: ``s`` by P · slope, and by keys fills ``p`` with the pairs P ∘ Z.  ``seen`` holds the bits of the
    #: tile.  ``whole`` means that the bounds mask nothing in it, and a ``pattern`` of 0 that the block mask
    #: masks nothing.
    weigh: Callable[..., None]
    weigh_apart: Callable[..., None]  # The same where a row is large, if options modify scores
    #: ``(s, p, whole, place, extras)``: hides the elements of a tile by keys that the bounds mask.
    hide: Callable[..., None]
    #: ``(s, dp, kept, numbers, whole, place, extras)``: replaces dP in ``dp`` by dS.
    slope: Callable[..., None]


def _make_row_numbers(by_keys: bool) -> tuple[Any, Any, Any, Any]:
    """Return ``pair(numbers, t)``, ``shifts(shifts, t)``, ``tops(shifts, t)`` and ``second(i)``.

    The first three return the numbers of the two rows of tile t; the last tells which of the two belongs to
    element i.
    """

    @device_function
    def pair_of(numbers, t):
        if by_keys:
            return ld_shared_v2(numbers + 8 * WORD * t)
        return numbers

    @device_function
    def shifts_of(shifts, t):
        if by_keys:
            return pair_of(shifts, t + t // 8 * 8)
        return shifts[0]

    @device_function
    def tops_of(shifts, t):
        if by_keys:
            return pair_of(shifts + ROWS * WORD, t + t // 8 * 8)
        return shifts[1]

    @device_function
    def second(i):
        return i % 2 if by_keys else i // 2

    return pair_of, shifts_of, tops_of, second


def _make_lower(cols: int, by_keys: bool) -> tuple[Any, Any]:
    """Return ``Passes.largest_top`` and ``Passes.lower``."""
    tiles = cols // 8
    parts, (_, _, tops_of, second) = tiles // 8 if by_keys else 1, _make_row_numbers(by_keys)

    @device_function
    def largest_top(shifts):
        largest = ZERO
        for n in range(parts):
            low, high = tops_of(shifts, 8 * n)
            largest = max(largest, max(abs(low), abs(high)))
        return largest

    @device_function
    def lower(s, shifts, scale):
        for t in range(tiles):
            low, high = tops_of(shifts, t)
            for i in range(4):
                s[t, i] = lowered(s[t, i], scale, high if second(i) else low)

    return largest_top, lower


@device_function
def has_large_row(largest_top):
    """Tell whether a warp has a large row, from ``Passes.largest_top`` of its lanes."""
    return cuda.any_sync(ALL_LANES, largest_top > ZERO)


@cache
def make_fetch_bits(form: KernelForm) -> Callable[..., None]:
    """Return ``fetch(seen, entry, own_place, own, line, work)``: read the bits of a visited tile.

    ``own_place`` is the lane's first row, or its first key in a kernel by keys.
    """
    by_keys, (_, block) = form.by_keys, form.sides
    walk = make_walk(form.features, form.layout.block_q, form.layout.block_k, by_keys)
    tile_of, pattern_of, fetch_bits = walk.tile_of, walk.pattern_of, make_elements(form).fetch_bits

    @device_function
    def fetch(seen, entry, own_place, own, line, work):
        row, col = own_place, int32(tile_of(entry, work.extras) * block + 2 * (own.lane % 4))
        if by_keys:
            row, col = col, row
        place, pattern = LanePlace(own.lane, row, col, line), pattern_of(entry, work.extras)
        fetch_bits(seen, work.mask_words, pattern, place, work.extras)

    return fetch


@cache
def make_passes(form: KernelForm) -> Passes:
    """Return the functions for the tiles of a kernel."""
    features, by_keys, (_, cols) = form.features, form.by_keys, form.sides
    packs = by_keys and form.parts.dv
    tiles = cols // 8
    hide, hide_pairs = make_hide(cols, by_keys), make_hide_pairs(cols)
    pack_tile, elements = make_pack(form.dtype, cols), make_elements(form)
    pack = elements.pack[form.dtype]
    drop, slope_one, has_tops = elements.drop, elements.slope, features.modifies_scores
    element, lane_offset = element_of(features, by_keys), lane_offset_of(by_keys)
    draw = elements.draw
    is_plain, distance_from = not makes_elements(features), distance_of(features)
    has_lists_alone = not is_plain and features.of_elements == PLAIN
    pair_of, shifts_of, tops_of, second = _make_row_numbers(by_keys)
    largest_top, lower = _make_lower(cols, by_keys)

    @device_function
    def weigh_plainly(s, shifts, factor):
        for t in range(tiles):
            low, high = shifts_of(shifts, t)
            for i in range(4):
                s[t, i] = ex2(s[t, i] * factor - (high if second(i) else low))

    def make_weigh(weigh_one: Any) -> Any:
        def weigh_pairs(s, bits, t, given):
            p, kept, shifts, factor, place, distance, extras = given
            low, high = shifts_of(shifts, t)
            low_top, high_top = tops_of(shifts, t) if has_tops else (ZERO, ZERO)
            w = cuda.local.array(4, float32)  # (4,)
            for i in range(4):
                at = element(place, distance, bits, t, i)
                shift, top = (high, high_top) if second(i) else (low, low_top)
                weight, p_slope = weigh_one(s[t, i], factor, shift, top, at, extras)
                w[i], s[t, i] = drop(weight, p_slope, kept, t, i)
            if packs:
                p[t // 2, 2 * (t % 2)] = pack(w[0], w[1])
                p[t // 2, 2 * (t % 2) + 1] = pack(w[2], w[3])

        weigh_all = unrolled(tiles, weigh_pairs)

        @device_function
        def weigh(tile, bits, shifts, factor, whole, pattern, place, work):
            (s, p), (kept, seen), (lane, row, col, line) = tile, bits, place
            if is_plain or (has_lists_alone and whole and pattern == 0):
                weigh_plainly(s, shifts, factor)
                if not is_plain and packs:
                    pack_tile(p, s)
            else:
                distance, (down, right) = distance_from(place, work.extras), lane_offset(lane)
                draw(kept, lane, line.flat, int32(row - down), int32(col - right), work.extras)
                weigh_all(s, seen, (p, kept, shifts, factor, place, distance, work.extras))

        return weigh

    @device_function
    def hide_weights(s, p, whole, place, extras):
        if by_keys and not whole:
            edge = edge_at(place, extras)
            hide(s, edge)
            if not is_plain and packs:
                hide_pairs(p, edge)
        if is_plain and packs:
            pack_tile(p, s)

    @device_function
    def slope(s, dp, kept, numbers, whole, place, extras):
        for t in range(tiles):
            low, high = pair_of(numbers, t)
            for i in range(4):
                own = high if second(i) else low
                if is_plain:
                    dp[t, i] = s[t, i] * (dp[t, i] - own)
                else:
                    dp[t, i] = slope_one(s[t, i], dp[t, i], own, kept, t, i)
        if not whole:
            edge = edge_at(place, extras)
            hide(dp, edge)

    weigh, weigh_apart = make_weigh(elements.weigh), make_weigh(elements.weigh_apart)
    return Passes(largest_top, lower, weigh, weigh_apart, hide_weights, slope)


@device_function
def _issue_nothing(dp, left, right):
    pass


@cache
def make_weigh(form: KernelForm, multiply: Any) -> Callable[..., None]:
    """Return ``weigh(tile, bits, (is_large, shifts), factor, (whole, pattern), place, work, product)``.

    It weighs and hides the elements of a tile, see :class:`Passes`, while ``multiply`` computes dP of the
    arguments ``product``, if it is not None.  The product is issued on both sides of the test for large
    rows, because before a branch it would be waited for too early; but before the loads of a mask, for
    which a branch waits.
    """
    features, passes = form.features, make_passes(form)
    has_tops, has_pairs = features.modifies_scores, features.mask in UNPACK
    fetch_pairs, hide = make_elements(form).fetch_pairs, passes.hide
    near, apart = passes.weigh, passes.weigh_apart
    issue = _issue_nothing if multiply is None else make_issue(multiply)

    @device_function
    def weigh(tile, bits, rows, factor, marks, place, work, product):
        (is_large, shifts), (whole, pattern), (dp, left, right) = rows, marks, product
        if has_pairs:
            issue(dp, left, right)
        fetch_pairs(bits[1], work.mask_words, place, work.extras)
        if has_tops and is_large:
            if not has_pairs:
                issue(dp, left, right)
            apart(tile, bits, shifts, factor, whole, pattern, place, work)
        else:
            if not has_pairs:
                issue(dp, left, right)
            near(tile, bits, shifts, factor, whole, pattern, place, work)
        hide(tile[0], tile[1], whole, place, work.extras)

    return weigh
