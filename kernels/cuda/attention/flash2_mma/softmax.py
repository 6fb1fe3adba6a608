"""Online softmax in the fragments of a warp, for the forward kernel.

The four lanes that share a row have the same maximum.  Each lane sums its own columns until the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.online_softmax import LN_2, LOG2_E
from kernels.cuda.attention.flash2_mma.large_rows import apart, is_large, score_in, subtract_row
from kernels.cuda.attention.flash2_mma.tiles import COLS, ROWS, MmaLayout
from kernels.cuda.attention.options.score_functions import make_row_end
from kernels.cuda.attention.tile_bits import TileBits
from kernels.cuda.device.one_source import shift_of
from kernels.cuda.device.row_folds import make_lane_folds
from kernels.cuda.ptx.fragments import lane_col, lane_row
from kernels.cuda.ptx.numbers import ex2, mul_rn, rcp
from kernels.cuda.runtime.kernel import ALL_LANES, device_function
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32
from kernels.scores.program import Features


class SoftmaxRows(NamedTuple):
    """m of a lane's rows, and l summed over the lane's own columns, each 2 * row_tiles float32."""

    max: Any
    sum: Any


#: Maximum and sum over the four lanes that share a row of scores.
row_max_of, row_sum_of = make_lane_folds(4)


@cache
def make_scale_row(own_tiles: int) -> Callable[..., None]:
    """Return ``scale_row(acc, i, factor)``: multiply a lane's row of O."""

    @device_function
    def scale_row(acc, i, factor):
        for n in range(own_tiles):
            for u in range(2):
                acc[i // 2 * own_tiles + n, 2 * (i % 2) + u] *= factor

    return scale_row


@cache
def make_softmax_step(
    layout: MmaLayout,
    tile_bits: TileBits,
    patience: int,
    is_split: bool,
    scale_row: Callable[..., None],
) -> Callable[..., None]:
    """Return the function that replaces the scores of a warp by probabilities.

    ``softmax_step(s, acc, rows, has_large, exponent, bits, share, extras)`` updates ``SoftmaxRows``, and
    returns ``has_large``, whether a row of the warp is large.  ``exponent`` is (unit, top) of
    P = 2^(s · unit - (m · unit - top)); the largest P is 2^top.  Where keys are split, the kernel lacks
    registers to rescale O after the test for large rows.  ``scale_row(acc, i, factor)`` rescales the sums
    of a row, see :func:`make_scale_row`.
    """
    row_tiles, own_rows, col_tiles = layout.row_tiles, 2 * layout.row_tiles, layout.block_k // COLS
    kept, has_bits = tile_bits.kept, tile_bits.bytes
    is_patient, least = patience > 0, np.float32(patience)
    zero, log2_e, ln_2 = np.float32(0), np.float32(LOG2_E), np.float32(LN_2)

    @device_function
    def lower(s, row_max, unit):
        inverse = rcp(mul_rn(unit, ln_2))
        for i in range(own_rows):
            near = float32(shift_of(row_max[i]))
            if is_large(near * unit):
                largest = score_in(near, unit)
                for n in range(col_tiles):
                    subtract_row(s, i // 2 * col_tiles + n, i % 2, unit, inverse, largest)

    @device_function
    def rescale_rows(acc, factors):
        for i in range(own_rows):
            scale_row(acc, i, factors[i])

    @device_function
    def softmax_step(s, acc, rows, has_large, exponent, bits, share, extras):
        (row_max, row_sum), (unit, top) = rows, exponent
        new_max = cuda.local.array(own_rows, float32)  # (warp_rows,) / 8: m_new, like row_max
        rescale = cuda.local.array(own_rows, float32)  # (warp_rows,) / 8: e^(m - m_new)
        grows = False
        for i in range(own_rows):
            # 9: m_new = max(m, rowmax S)
            largest = row_max[i]
            for n in range(col_tiles):
                at = i // 2 * col_tiles + n
                largest = max(largest, max(s[at, 2 * (i % 2)], s[at, 2 * (i % 2) + 1]))
            new_max[i] = row_max_of(largest)
            grows = grows or (new_max[i] - row_max[i]) * unit > least
        if not is_patient or cuda.ballot_sync(ALL_LANES, grows) != 0:
            grows = False
            for i in range(own_rows):
                # 10, first half: O = diag(e^(m - m_new)) O, l = e^(m - m_new) l.  The last shift
                # is what it was then, bit for bit: what was summed weighs neither more nor less.
                near = float32(shift_of(new_max[i]))
                rescale[i] = ex2((row_max[i] * unit - top) - (near * unit - top))
                if is_large(near * unit):
                    rescale[i] = ex2(apart(row_max[i], unit, score_in(near, unit)) * log2_e)
                    grows = True
                row_max[i] = new_max[i]
                row_sum[i] *= rescale[i]
            if is_patient or is_split:
                rescale_rows(acc, rescale)
            # Only here may a row become large: other tiles test a flag.
            has_large = cuda.ballot_sync(ALL_LANES, grows) != 0
        if has_large:
            lower(s, row_max, unit)
        if not (is_patient or is_split):  # in one block with the next sums, which it is fused with
            rescale_rows(acc, rescale)
        for m in range(row_tiles):
            for half in range(2):  # the row, and that eight below
                # 9: P = exp(S - m_new), l = l + rowsum P
                i = 2 * m + half
                near, total = float32(shift_of(row_max[i])), zero
                shift = near * unit - top
                if has_large and is_large(near * unit):
                    shift = -top
                for n in range(col_tiles):
                    at = m * col_tiles + n
                    for u in range(2):
                        p = ex2(s[at, 2 * half + u] * unit - shift)
                        total += p
                        if has_bits:  # P after dropout; l sums P before it
                            in_row = share.row + lane_row(share.lane) + m * ROWS + 8 * half
                            p *= kept(bits, in_row, lane_col(share.lane) + n * COLS + u, extras)
                        s[at, 2 * half + u] = p
                row_sum[i] += total
        return has_large

    return softmax_step


@cache
def make_finish_rows(
    layout: MmaLayout, features: Features, is_wide: bool, scale_row: Callable[..., None]
) -> Callable[..., None]:
    """Return the function that divides O by l, with ``scale_row``, and writes L.

    ``finish_rows(acc, rows, exponent, out_unit, results, span, share, extras)``, for the ``HeadRows`` of
    the tile; ``out_unit`` multiplies out.  ``results`` are lse and lse_rest, written by the block of the
    first columns.
    """
    own_rows, one, ln_2 = 2 * layout.row_tiles, np.float32(1), np.float32(LN_2)
    end_row = make_row_end(features, FLOAT32, near=not is_wide)

    @device_function
    def finish_rows(acc, rows, exponent, out_unit, results, span, share, extras):
        (row_max, row_sum), (unit, top), (lse, lse_rest) = rows, exponent, results
        b, h, first, stop = span
        for i in range(own_rows):
            # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
            total = row_sum_of(row_sum[i])
            near, weight = float32(shift_of(row_max[i])), one
            shift = (near * unit - top) * ln_2
            if is_large(near * unit):  # m is S of a key, rounded as any other S
                shift, weight = score_in(near, unit), ex2(-top)
            inverse, row_lse, row_rest = end_row(total * weight, shift, b, h, extras)
            scale_row(acc, i, inverse * (weight * out_unit))
            row = first + share.row + lane_row(share.lane) + i // 2 * ROWS + 8 * (i % 2)
            if share.lane % 4 == 0 and row < stop and share.chunk == 0:
                lse[b, h, row], lse_rest[b, h, row] = row_lse, row_rest

    return finish_rows
