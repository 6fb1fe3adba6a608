"""Scores and their gradients in the fragments of a warp, between the products of the kernels.

The elements of a lane in each 16 x 8 tile are ``ROW_OF`` and ``COL_OF`` away from its first one.  In a tile
without masked elements, a kernel without other options tests nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from kernels.common.online_softmax import LOG2_E
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
from kernels.cuda.ptx.copies import ld_shared_v2
from kernels.cuda.ptx.fragments import lane_col, lane_row
from kernels.cuda.ptx.numbers import ex2, mul_rn
from kernels.cuda.runtime.kernel import WORD, device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.scores.program import PLAIN, Features


@cache
def make_fragment_scores(
    layout: MmaLayout, features: Features, tile_bits: TileBits, is_folded: bool
) -> Callable[..., None]:
    """Return the function that replaces the products of a warp by scores.

    The function is ``to_scores(s, factor, whole, bits, lane, warp_row, place, extras)``.  The tile begins
    at ``place``, a ``TilePlace``, and the warp's rows at ``warp_row``.

    Args:
        layout: Layout of the block.
        features: Options of the kernel.
        tile_bits: The tile bits of the kernel.
        is_folded: Whether only masked products are replaced, because the exponent includes the factor.
    """
    row_tiles, col_tiles = layout.row_tiles, layout.block_k // COLS
    score_of, listed = make_tile_scores(features, FLOAT32).score, tile_bits.listed
    rows_of, cols_of = ROW_OF, COL_OF

    @device_function
    def to_scores(s, factor, whole, bits, lane, warp_row, place, extras):
        if not (is_folded and whole):
            own = moved(place, warp_row + lane_row(lane), lane_col(lane))
            edge = edge_of(own, extras)
            for m in range(row_tiles):
                for n in range(col_tiles):
                    for i in range(4):
                        r, c = m * ROWS + rows_of[i], n * COLS + cols_of[i]
                        at = m * col_tiles + n
                        value = s[at, i] if is_folded else mul_rn(s[at, i], factor)
                        in_row, in_col = warp_row + lane_row(lane) + r, lane_col(lane) + c
                        is_listed = listed(bits, in_row, in_col)
                        element = TileElement(r, c, whole, is_listed, edge, own)
                        s[at, i] = score_of(value, element, extras)

    return to_scores


@cache
def make_gradients_by_rows(
    layout: MmaLayout, features: Features, tile_bits: TileBits
) -> Callable[..., None]:
    """Return the function that replaces the products in ``s`` by P, and those in ``dp`` by dS.

    The function is ``to_gradients(s, dp, floats, large_at, shift, delta, factor, dp_unit, whole, bits,
    lane, warp_row, place, extras)``.  ``shift`` and ``delta`` are those of the lane's rows, and ``place``
    is as for scores.  ``floats[large_at]`` is the ``large_lse`` of the lane's first row, see
    ``large_rows``; in kernels without options, it has been subtracted from the products.
    """
    row_tiles, col_tiles = layout.row_tiles, layout.block_k // COLS
    scores = make_tile_scores(features, FLOAT32, exp2=ex2)
    gradient_of, listed, kept = scores.gradient, tile_bits.listed, tile_bits.kept
    is_plain, rows_of, cols_of = features.of_elements == PLAIN, ROW_OF, COL_OF
    log2_e, zero = np.float32(LOG2_E), np.float32(0)

    @device_function
    def to_gradients(
        s, dp, floats, large_at, shift, delta, factor, dp_unit, whole, bits, lane, warp_row, place,
        extras,
    ):  # fmt: skip
        # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
        unit = factor if is_plain else log2_e
        if is_plain and whole:
            for m in range(row_tiles):
                for n in range(col_tiles):
                    at = m * col_tiles + n
                    for i in range(4):
                        p = ex2(s[at, i] * unit - shift[2 * m + i // 2])
                        s[at, i] = p
                        dp[at, i] = p * (dp[at, i] * dp_unit - delta[2 * m + i // 2])
        else:
            own = moved(place, warp_row + lane_row(lane), lane_col(lane))
            edge = edge_of(own, extras)
            for m in range(row_tiles):
                for n in range(col_tiles):
                    at = m * col_tiles + n
                    for i in range(4):
                        r, c = m * ROWS + rows_of[i], n * COLS + cols_of[i]
                        in_row, in_col = warp_row + lane_row(lane) + r, lane_col(lane) + c
                        keep = kept(bits, in_row, in_col, extras)
                        product = s[at, i] if is_plain else mul_rn(s[at, i], factor)
                        top = zero if is_plain else floats[large_at + m * ROWS + 8 * (i // 2)]
                        row = RowTerms(unit, top, shift[2 * m + i // 2], delta[2 * m + i // 2])
                        element = TileElement(r, c, whole, listed(bits, in_row, in_col), edge, own)
                        s[at, i], dp[at, i] = gradient_of(
                            product, dp[at, i] * dp_unit, row, keep, element, extras
                        )

    return to_gradients


@cache
def make_gradients_by_keys(
    layout: MmaKeyLayout, features: Features, tile_bits: TileBits
) -> Callable[..., None]:
    """Return the function that replaces the products in ``s`` by (P ∘ Z)ᵀ, and those in ``dp`` by dSᵀ.

    The function is ``to_gradients(s, dp, large_row, shift_row, delta_row, edge, step, factor, dp_unit,
    whole, bits, lane, warp_key, own, extras)``.  The three rows are the addresses of ``large_lse``, shift
    and D of the lane's first row, as by rows, and ``step`` is the first row in the registers.  ``own`` is
    the ``TilePlace`` of the lane's first element, and ``edge`` its ``edge_of``.
    """
    transposed = layout.transposed
    key_tiles, col_tiles = transposed.row_tiles, layout.step_q // COLS
    scores = make_tile_scores(features, FLOAT32, by_keys=True, exp2=ex2)
    gradient_of, listed, kept = scores.gradient, tile_bits.listed, tile_bits.kept
    is_plain, rows_of, cols_of = features.of_elements == PLAIN, ROW_OF, COL_OF
    log2_e, zero = np.float32(LOG2_E), np.float32(0)

    @device_function
    def to_gradients(
        s, dp, large_row, shift_row, delta_row, edge, step, factor, dp_unit, whole, bits, lane,
        warp_key, own, extras,
    ):  # fmt: skip
        # 11: P = exp(S - L_i)     14: dS = P ∘ (dP ∘ Z - D_i), Z the dropout
        unit = factor if is_plain else log2_e
        if is_plain and whole:
            for n in range(col_tiles):
                low, high = ld_shared_v2(shift_row + WORD * (step + n * COLS))
                low_delta, high_delta = ld_shared_v2(delta_row + WORD * (step + n * COLS))
                for m in range(key_tiles):
                    at = m * col_tiles + n
                    for i in range(0, 4, 2):
                        p, next_p = ex2(s[at, i] * unit - low), ex2(s[at, i + 1] * unit - high)
                        s[at, i], s[at, i + 1] = p, next_p
                        dp[at, i] = p * (dp[at, i] * dp_unit - low_delta)
                        dp[at, i + 1] = next_p * (dp[at, i + 1] * dp_unit - high_delta)
        else:
            for n in range(col_tiles):
                low, high = ld_shared_v2(shift_row + WORD * (step + n * COLS))
                low_delta, high_delta = ld_shared_v2(delta_row + WORD * (step + n * COLS))
                low_lse = high_lse = zero
                if not is_plain:
                    low_lse, high_lse = ld_shared_v2(large_row + WORD * (step + n * COLS))
                for m in range(key_tiles):
                    at = m * col_tiles + n
                    for i in range(4):
                        r, c = step + n * COLS + cols_of[i], m * ROWS + rows_of[i]
                        in_row, in_col = lane_col(lane) + r, warp_key + lane_row(lane) + c
                        keep = kept(bits, in_row, in_col, extras)
                        product = s[at, i] if is_plain else mul_rn(s[at, i], factor)
                        row = (
                            RowTerms(unit, high_lse, high, high_delta)
                            if i % 2
                            else RowTerms(unit, low_lse, low, low_delta)
                        )
                        element = TileElement(r, c, whole, listed(bits, in_row, in_col), edge, own)
                        p, dp[at, i] = gradient_of(
                            product, dp[at, i] * dp_unit, row, keep, element, extras
                        )
                        s[at, i] = p * keep

    return to_gradients
