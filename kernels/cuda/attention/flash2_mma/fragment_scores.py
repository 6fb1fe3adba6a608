"""Scores and their gradients in the fragments of a warp, between the products of the kernels.

The elements of a lane in each 16 x 8 tile are ``ROW_OF`` and ``COL_OF`` away from its first one.  In a tile
without masked elements, a kernel without other options tests nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2.tangents.scores import make_tangents_of
from kernels.cuda.attention.flash2_mma.tiles import (
    COL_OF,
    COLS,
    ROW_OF,
    ROWS,
    MmaKeyLayout,
    MmaLayout,
)
from kernels.cuda.attention.options.tile_scores import (
    RowTerms,
    TileElement,
    edge_of,
    make_tile_scores,
    moved,
)
from kernels.cuda.attention.tile_bits import TileBits
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import ld_shared_v2
from kernels.cuda.ptx.fragments import lane_col, lane_row
from kernels.cuda.ptx.numbers import ex2, mul_rn
from kernels.cuda.runtime.kernel import WORD, device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.scores.program import PLAIN, Features


class LaneRows(NamedTuple):
    """L and D of the rows of a lane; each array has 2 * row_tiles float32.

    The large parts of L are at ``floats[large_at]``.
    """

    floats: Any
    large_at: Any
    shift: Any
    delta: Any


@cache
def make_fragment_scores(
    layout: MmaLayout, features: Features, tile_bits: TileBits, is_folded: bool
) -> Callable[..., None]:
    """Return the function that replaces the products of a warp by scores.

    The function is ``to_scores(s, factor, tile, share, extras)``, for a ``VisitedTile`` and a ``WarpLane``.
    """
    score_of = make_tile_scores(features, FLOAT32, order=0).score

    @device_function
    def to_score(s, own, at, factor, element, bits, extras):
        value = s[own] if is_folded else mul_rn(s[own], factor)
        s[own] = score_of(value, element, extras)

    return _make_each(layout, tile_bits, to_score, is_folded)


@cache
def make_fragment_tangents(
    layout: MmaLayout, features: Features, tile_bits: TileBits
) -> Callable[..., None]:
    """Return ``to_tangents((s, s_tangent), factor, tile, share, extras)``: products to S and Ṡ."""
    derived = make_tile_scores(features, FLOAT32).derived

    @device_function
    def to_tangent(registers, own, at, factor, element, bits, extras):
        # S = f(X)     Ṡ = f'(X) ∘ Ẋ
        s, s_tangent = registers
        s[own], slope, _ = derived(mul_rn(s[own], factor), element, extras)
        s_tangent[own] *= factor * slope

    return _make_each(layout, tile_bits, to_tangent)


class TangentRows(NamedTuple):
    """L, D and their tangents for the rows of a lane, float32; ``large`` and ``shift`` are parts of L.

    See ``LseAndDelta``.
    """

    large: Any
    shift: Any
    delta: Any
    lse_tangent: Any
    delta_tangent: Any


@cache
def make_gradient_tangents(
    layout: MmaLayout, features: Features, tile_bits: TileBits, tiles: SharedTiles | None = None
) -> Callable[..., None]:
    """Return ``to_tangents((x, x_tangent, dp, dp_tangent, rows), factor, tile, share, extras)``.

    It replaces X by Ṗ ∘ Z, dP by dX, and ḋP by ḋX; the products are Q Kᵀ and its tangent, dO Vᵀ and dO V̇ᵀ,
    and ``rows`` the :class:`TangentRows`.  With ``tiles``, the offsets of a kernel by keys, registers are
    transposed, and ``rows`` are the shared memory and the place of the tile's first row there.
    """
    by_keys, col_tiles = tiles is not None, layout.block_k // COLS
    log2_e, one = np.float32(LOG2_E), np.float32(1)
    tangents_of, kept = make_tangents_of(features, FLOAT32, by_keys, ex2), tile_bits.kept
    offsets = (tiles[name] // WORD for name in TangentRows._fields) if tiles else range(5)
    large, shift, delta, lse_tangent, delta_tangent = offsets

    @device_function
    def row_in_registers(rows, own, in_row):
        i = 2 * (own[0] // col_tiles) + own[1] // 2
        terms = RowTerms(log2_e, rows.large[i], rows.shift[i], rows.delta[i], one)
        return terms, (rows.lse_tangent[i], rows.delta_tangent[i])

    @device_function
    def row_in_shared(rows, own, in_row):
        floats, first = rows
        at = first + in_row
        terms = RowTerms(log2_e, floats[large + at], floats[shift + at], floats[delta + at], one)
        return terms, (floats[lse_tangent + at], floats[delta_tangent + at])

    row_of = row_in_shared if by_keys else row_in_registers

    @device_function
    def to_tangent(registers, own, at, factor, element, bits, extras):
        x, x_tangent, dp, dp_tangent, rows = registers
        terms, row_tangents = row_of(rows, own, at[0])
        products = mul_rn(x[own], factor), x_tangent[own] * factor, dp[own], dp_tangent[own]
        keep = kept(bits, at[0], at[1], extras)
        found = tangents_of(products, terms, row_tangents, keep, element, extras)
        x[own], dp[own], dp_tangent[own] = found

    return _make_each(layout, tile_bits, to_tangent, by_keys=by_keys)


def _make_each(
    layout: MmaLayout,
    tile_bits: TileBits,
    replace: Callable[..., None],
    skips_whole: bool = False,
    by_keys: bool = False,
) -> Callable[..., None]:
    """Return ``each(s, factor, tile, share, extras)``: ``replace`` for each element of a lane.

    ``replace(s, own, at, factor, element, bits, extras)`` receives the element's place in the registers,
    and its row and column in the tile; rows of the registers are keys if ``by_keys``.
    """
    row_tiles, col_tiles = layout.row_tiles, layout.block_k // COLS
    listed, rows_of, cols_of = tile_bits.listed, ROW_OF, COL_OF

    @device_function
    def each(s, factor, tile, share, extras):
        place, whole, bits = tile
        if not (skips_whole and whole):
            first_row, first_col = share.row + lane_row(share.lane), lane_col(share.lane)
            if by_keys:
                first_row, first_col = first_col, first_row
            first = moved(place, first_row, first_col)
            edge = edge_of(first, extras)
            for m in range(row_tiles):
                for n in range(col_tiles):
                    for i in range(4):
                        r, c = m * ROWS + rows_of[i], n * COLS + cols_of[i]
                        if by_keys:
                            r, c = c, r
                        in_row, in_col = first_row + r, first_col + c
                        is_listed = listed(bits, in_row, in_col)
                        element = TileElement(r, c, whole, is_listed, edge, first)
                        own = m * col_tiles + n, i
                        replace(s, own, (in_row, in_col), factor, element, bits, extras)

    return each


@device_function
def _whole_gradient(product, dp, row, kept, element, extras):
    """Return P and dS of an element without options that is not masked."""
    p = ex2(product * row.unit - row.shift)
    return p, p * (dp - row.delta)


def _make_gradients(
    make_loop: Callable[[Any], Any], features: Features, by_keys: bool = False
) -> Callable[..., None]:
    """Return the loop for the options; without options, there is another one for whole tiles."""
    loop = make_loop(make_tile_scores(features, FLOAT32, by_keys=by_keys, exp2=ex2).gradient)
    if features.of_elements != PLAIN:
        return loop
    whole_loop = make_loop(_whole_gradient)

    @device_function
    def to_gradients(s, dp, rows, units, tile, share, extras):
        if tile.whole:
            whole_loop(s, dp, rows, units, tile, share, extras)
        else:
            loop(s, dp, rows, units, tile, share, extras)

    return to_gradients


@cache
def make_gradients_by_rows(
    layout: MmaLayout, features: Features, tile_bits: TileBits
) -> Callable[..., None]:
    """Return the function that replaces the products in ``s`` by P, and those in ``dp`` by dS.

    The function is ``to_gradients(s, dp, rows, units, tile, share, extras)``, for ``LaneRows``, the
    factors of s and dp and the unit of dS, a ``VisitedTile`` and a ``WarpLane``.  In kernels without
    options, scores are in base 2, and the ``large_lse`` of rows has been subtracted from the products.
    """
    row_tiles, col_tiles = layout.row_tiles, layout.block_k // COLS
    listed, kept, is_plain = tile_bits.listed, tile_bits.kept, features.of_elements == PLAIN
    rows_of, cols_of, log2_e, zero = ROW_OF, COL_OF, np.float32(LOG2_E), np.float32(0)

    def make_loop(gradient_of: Any) -> Any:
        @device_function
        def to_gradients(s, dp, rows, units, tile, share, extras):
            # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
            factor, dp_unit, ds_unit = units
            unit = factor if is_plain else log2_e
            first_row, first_col = share.row + lane_row(share.lane), lane_col(share.lane)
            first = moved(tile.place, first_row, first_col)
            edge = edge_of(first, extras)
            for m in range(row_tiles):
                for n in range(col_tiles):
                    at = m * col_tiles + n
                    for i in range(4):
                        r, c = m * ROWS + rows_of[i], n * COLS + cols_of[i]
                        keep = kept(tile.bits, first_row + r, first_col + c, extras)
                        product = s[at, i] if is_plain else mul_rn(s[at, i], factor)
                        large_at = rows.large_at + m * ROWS + 8 * (i // 2)
                        top = zero if is_plain else rows.floats[large_at]
                        own_row = 2 * m + i // 2
                        row = RowTerms(unit, top, rows.shift[own_row], rows.delta[own_row], ds_unit)
                        is_listed = listed(tile.bits, first_row + r, first_col + c)
                        element = TileElement(r, c, tile.whole, is_listed, edge, first)
                        s[at, i], dp[at, i] = gradient_of(
                            product, dp[at, i] * dp_unit, row, keep, element, extras
                        )

        return to_gradients

    return _make_gradients(make_loop, features)


@cache
def make_gradients_by_keys(
    layout: MmaKeyLayout, features: Features, tile_bits: TileBits
) -> Callable[..., None]:
    """Return the function that replaces the products in ``s`` by (P ∘ Z)ᵀ, and those in ``dp`` by dSᵀ.

    The function is the same as by rows, but the tile begins at the first element of the lane, and ``rows``
    are the address of the ``large_lse`` of the lane's first row, which those of the shift and of D follow,
    each after two stages, and the first row in the registers.
    """
    key_tiles, col_tiles = layout.transposed.row_tiles, layout.step_q // COLS
    listed, kept, is_plain = tile_bits.listed, tile_bits.kept, features.of_elements == PLAIN
    rows_of, cols_of, log2_e, zero = ROW_OF, COL_OF, np.float32(LOG2_E), np.float32(0)
    row_bytes = 2 * WORD * layout.block_q

    def make_loop(gradient_of: Any) -> Any:
        @device_function
        def to_gradients(s, dp, rows, units, tile, share, extras):
            # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
            (large_row, step), (factor, dp_unit, ds_unit) = rows, units
            unit = factor if is_plain else log2_e
            first_row, first_col = lane_col(share.lane), share.row + lane_row(share.lane)
            edge = edge_of(tile.place, extras)
            for n in range(col_tiles):
                row_at = large_row + WORD * (step + n * COLS)
                low, high = ld_shared_v2(row_at + row_bytes)
                low_delta, high_delta = ld_shared_v2(row_at + 2 * row_bytes)
                low_lse = high_lse = zero
                if not is_plain:
                    low_lse, high_lse = ld_shared_v2(row_at)
                for m in range(key_tiles):
                    at = m * col_tiles + n
                    for i in range(4):
                        r, c = step + n * COLS + cols_of[i], m * ROWS + rows_of[i]
                        keep = kept(tile.bits, first_row + r, first_col + c, extras)
                        product = s[at, i] if is_plain else mul_rn(s[at, i], factor)
                        row = (
                            RowTerms(unit, high_lse, high, high_delta, ds_unit)
                            if i % 2
                            else RowTerms(unit, low_lse, low, low_delta, ds_unit)
                        )
                        is_listed = listed(tile.bits, first_row + r, first_col + c)
                        element = TileElement(r, c, tile.whole, is_listed, edge, tile.place)
                        p, dp[at, i] = gradient_of(
                            product, dp[at, i] * dp_unit, row, keep, element, extras
                        )
                        s[at, i] = p * keep

        return to_gradients

    return _make_gradients(make_loop, features, by_keys=True)
