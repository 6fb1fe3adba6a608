"""Rows of large scores on tensor cores: steps that ordinary rows leave out.

For ordinary rows, P = 2^(s · unit - shift) is one fused multiply-add of a product s and an exponential.
It subtracts a rounded product from an exact one, so that the exponent is wrong by 2⁻²⁴ of the shift.  Where
the shift is beyond ``online_softmax.LARGE``, the row's maximum or lse is first subtracted from S, and the
shift is what remains of it.  S = s · (unit · ln 2) is the same number in all kernels, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from kernels.common.online_softmax import LARGE, LN_2, LOG2_E
from kernels.cuda.attention.flash2_mma.tiles import COLS, MmaLayout
from kernels.cuda.device.one_source import shift_of
from kernels.cuda.ptx.copies import ld_shared_v2
from kernels.cuda.ptx.numbers import mul_rn, rcp, sub_rn
from kernels.cuda.runtime.kernel import WORD, device_function
from kernels.runtime.types import float32

_LARGE, _LN_2, _LOG2_E, _ZERO = (np.float32(x) for x in (LARGE, LN_2, LOG2_E, 0))


@device_function
def is_large(shift):
    """Tell whether a row's maximum or lse, in base 2, is large."""
    return abs(shift) > _LARGE


@device_function
def score_in(product, unit):
    """Return the natural score of a product, whose factor for base 2 is ``unit``."""
    return mul_rn(product, mul_rn(unit, _LN_2))


@device_function
def apart(product, unit, top):
    """Return the natural score of a product less another score."""
    return sub_rn(score_in(product, unit), top)


@device_function
def lse_and_shift(lse, lse_rest, power):
    """Return the lse of a large row, or 0, and what remains of L, in base 2, less ``power``."""
    near = float32(shift_of(lse))
    large_lse = near if is_large(near * _LOG2_E) else _ZERO
    return large_lse, ((near - large_lse) + lse_rest) * _LOG2_E - power


@device_function
def subtract_row(s, at, half, unit, inverse, top):
    """Replace a lane's two products of one row in a 16 x 8 tile by those of the scores less ``top``."""
    for u in range(2):
        s[at, 2 * half + u] = apart(s[at, 2 * half + u], unit, top) * inverse


@cache
def make_subtract_by_rows(layout: MmaLayout) -> Callable[..., None]:
    """Return ``subtract(s, unit, floats, large_at)``: subtract the lse of large rows from products.

    ``floats[large_at]`` is the ``large_lse`` of the lane's first row.
    """
    own_rows, col_tiles = 2 * layout.row_tiles, layout.block_k // COLS

    @device_function
    def subtract(s, unit, floats, large_at):
        inverse = rcp(mul_rn(unit, _LN_2))
        for i in range(own_rows):
            top = floats[large_at + 8 * i]
            if top != _ZERO:
                for n in range(col_tiles):
                    subtract_row(s, i // 2 * col_tiles + n, i % 2, unit, inverse, top)

    return subtract


@cache
def make_subtract_by_keys(layout: MmaLayout) -> Callable[..., None]:
    """Return ``subtract(s, unit, large_row)``: subtract the lse of large rows from products of Sᵀ.

    ``large_row`` is the address of the lane's first row in the array of ``large_lse``.
    """
    key_tiles, col_tiles = layout.row_tiles, layout.block_k // COLS

    @device_function
    def subtract(s, unit, large_row):
        inverse = rcp(mul_rn(unit, _LN_2))
        for n in range(col_tiles):
            low, high = ld_shared_v2(large_row + WORD * n * COLS)
            for m in range(key_tiles):
                at = m * col_tiles + n
                for i in range(4):
                    top = high if i % 2 else low
                    if top != _ZERO:
                        s[at, i] = apart(s[at, i], unit, top) * inverse

    return subtract
