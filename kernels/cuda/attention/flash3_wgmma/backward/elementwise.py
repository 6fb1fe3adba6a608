"""The steps between the products of Hopper's backward kernels: P = exp(S - L), dS = P ∘ (dP ∘ Z - D).

A lane replaces its elements of a tile.  That is all for calls without options, and for whole tiles of calls
whose only option is a list of tiles; for other options, see ``backward.score_options``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

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
    make_pack,
)
from kernels.cuda.ptx.copies import ld_shared_v2
from kernels.cuda.ptx.emitted import unrolled
from kernels.cuda.ptx.numbers import ex2, rcp
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.kernel import ALL_LANES, WORD, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int32
from kernels.scores.program import PLAIN, Features


class Passes(NamedTuple):
    """The functions of a kernel for the elements of a tile.

    In a kernel by keys, D is in shared memory, and ``numbers`` is the address of the lane's first one; so
    are shifts and tops, see ``layout.shift_place``.  In a kernel by rows, ``numbers`` is the pair of the
    lane's two rows, and ``shifts`` the pair of their shifts and that of their tops.

    ``place`` is a ``score_terms.LanePlace``.
    """

    #: ``(shifts)``: whether ``lower`` must precede ``weigh``, in a warp whose lanes look at two rows each,
    #: by keys those from row 2 · lane on.
    has_large_row: Callable[..., bool]
    #: ``(s, shifts, scale)``: subtracts the tops of large rows from the products in ``s``.
    lower: Callable[..., None]
    #: ``((s, p), (kept, seen), shifts, factor, whole, pattern, place, work)``: replaces the products in
    #: ``s`` by P · slope, and by keys fills ``p`` with the pairs P ∘ Z.  ``seen`` holds the bits of the
    #: tile.  ``whole`` means that the bounds mask nothing in it, and a ``pattern`` of 0 that the block mask
    #: masks nothing.
    weigh: Callable[..., None]
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


def _make_lower(features: Features, cols: int, by_keys: bool) -> tuple[Any, Any]:
    """Return ``Passes.has_large_row`` and ``Passes.lower``."""
    tiles, modifies_scores = cols // 8, features.modifies_scores
    parts, (_, _, tops_of, second) = tiles // 8 if by_keys else 1, _make_row_numbers(by_keys)

    @device_function
    def has_large_row(shifts):
        if modifies_scores:  # ``weigh`` subtracts the top of each row
            return False
        is_large = False
        for n in range(parts):
            low, high = tops_of(shifts, 8 * n)
            is_large = is_large or low != ZERO or high != ZERO
        return cuda.any_sync(ALL_LANES, is_large)

    @device_function
    def lower(s, shifts, scale):
        inverse = rcp(scale)
        for t in range(tiles):
            low, high = tops_of(shifts, t)
            for i in range(4):
                top = high if second(i) else low
                without = lowered(s[t, i], scale, inverse, top)
                s[t, i] = without if top != ZERO else s[t, i]

    return has_large_row, lower


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
    weigh_one, drop, slope_one = elements.weigh, elements.drop, elements.slope
    element, lane_offset = element_of(features, by_keys), lane_offset_of(by_keys)
    draw, fetch_pairs = elements.draw, elements.fetch_pairs
    is_plain, distance_from = not makes_elements(features), distance_of(features)
    has_lists_alone = not is_plain and features.of_elements == PLAIN
    modifies_scores = features.modifies_scores
    pair_of, shifts_of, tops_of, second = _make_row_numbers(by_keys)
    has_large_row, lower = _make_lower(features, cols, by_keys)

    @device_function
    def weigh_plainly(s, shifts, factor):
        for t in range(tiles):
            low, high = shifts_of(shifts, t)
            for i in range(4):
                s[t, i] = ex2(s[t, i] * factor - (high if second(i) else low))

    def weigh_pairs(s, bits, t, given):
        p, kept, shifts, factor, place, distance, extras = given
        low, high = shifts_of(shifts, t)
        low_top, high_top = tops_of(shifts, t) if modifies_scores else (ZERO, ZERO)
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
    def weigh_each(tile, bits, shifts, factor, place, work):
        (s, p), (kept, seen), (lane, row, col, line) = tile, bits, place
        distance, (down, right) = distance_from(place, work.extras), lane_offset(lane)
        draw(kept, lane, line.flat, int32(row - down), int32(col - right), work.extras)
        fetch_pairs(seen, work.mask_words, place, work.extras)
        weigh_all(s, seen, (p, kept, shifts, factor, place, distance, work.extras))

    @device_function
    def weigh(tile, bits, shifts, factor, whole, pattern, place, work):
        s, p = tile
        if is_plain or (has_lists_alone and whole and pattern == 0):
            weigh_plainly(s, shifts, factor)
            if not is_plain and packs:
                pack_tile(p, s)
        else:
            weigh_each(tile, bits, shifts, factor, place, work)
        if by_keys and not whole:
            edge = edge_at(place, work.extras)
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

    return Passes(has_large_row, lower, weigh, slope)
