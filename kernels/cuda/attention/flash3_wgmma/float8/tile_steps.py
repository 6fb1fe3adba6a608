"""Steps of the float8 forward kernel on a tile: softmax, and P rounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import float32

from kernels.cuda.attention.flash3_wgmma.forward.tile_steps import (
    ZERO,
    has_large_row,
    make_exponentials,
    make_lane_maxima,
    row_maxima,
)
from kernels.cuda.device.one_source import shift_of
from kernels.cuda.ptx.numbers import ex2, mul_rn, pack_e4m3, sub_rn
from kernels.cuda.runtime.kernel import ALL_LANES, device_function
from kernels.runtime.targets import cuda

E4M3 = "float8_e4m3"
#: Probabilities are multiplied by 2**OFFSET, so that those near the maximum use the upper end of e4m3's
#: range, and those down to 2⁻¹² of it are not subnormal.  A maximum may grow by ``MOST_PATIENCE`` powers of
#: two before rows are rescaled, so that no probability exceeds 2⁸.
OFFSET, MOST_PATIENCE = 6, 2


@cache
def make_new_maxima(cols: int, patience: int) -> Callable[..., Any]:
    """Return ``new_maxima(s, factor, max_0, max_1, sum_0, sum_1)``.

    It returns the new maxima and the earlier sums of a lane's two rows, whether the accumulators must be
    rescaled, and by which factors.  The factor converts scores to base 2.  Unlike in the 16-bit kernel, it
    differs between tiles, and so maxima are those of scores times the factor.
    """
    lane_maxima, one, least = make_lane_maxima(cols), np.float32(1), np.float32(patience)
    minus_inf = np.float32(-math.inf)

    @device_function
    def new_maxima(s, factor, max_0, max_1, sum_0, sum_1):
        top_0, top_1 = lane_maxima(s, minus_inf, minus_inf)
        top_0, top_1 = max(max_0, top_0 * factor), max(max_1, top_1 * factor)
        # Whether a row grows is whether a lane of it does.
        grows = top_0 - max_0 > least or top_1 - max_1 > least
        is_scaled = cuda.ballot_sync(ALL_LANES, grows) != 0
        rescale_0 = rescale_1 = one
        if is_scaled:
            top_0, top_1 = row_maxima(top_0, top_1)
            rescale_0 = ex2(max_0 - float32(shift_of(top_0)))
            rescale_1 = ex2(max_1 - float32(shift_of(top_1)))
            max_0, max_1 = top_0, top_1
            sum_0, sum_1 = sum_0 * rescale_0, sum_1 * rescale_1
        return max_0, max_1, sum_0, sum_1, is_scaled, rescale_0, rescale_1

    return new_maxima


@cache
def make_probabilities(cols: int) -> Callable[..., Any]:
    """Return ``probabilities(p, s, factor, max_0, max_1, sum_0, sum_1)``: P, rounded, and the new sums.

    P is the left operand of the next product; its keys are permuted like those of V, see ``quantise``.
    Probabilities and sums are 2^OFFSET times as large.  The probabilities of one product are rounded while
    the exponentials of the next are computed.
    """
    pairs, exponentials, one = cols // 16, make_exponentials(16), np.float32(1)
    offset = np.float32(OFFSET)

    @device_function
    def lower(s, factor, top_0, top_1):
        for t in range(2 * pairs):
            for i in range(4):
                s[t, i] = sub_rn(mul_rn(s[t, i], factor), top_1 if i // 2 else top_0)

    @device_function
    def probabilities(p, s, factor, max_0, max_1, sum_0, sum_1):
        shift_0, shift_1 = float32(shift_of(max_0)), float32(shift_of(max_1))
        if has_large_row(shift_0, shift_1):  # a product less a rounded product would be wrong
            lower(s, factor, shift_0, shift_1)
            factor, shift_0, shift_1 = one, ZERO, ZERO
        shift_0, shift_1 = shift_0 - offset, shift_1 - offset
        for n in range(pairs):  # of squares: half the depth of a product
            u, t, half = 2 * n, n // 2, n % 2
            sum_0, sum_1 = exponentials(s, u, factor, shift_0, shift_1, sum_0, sum_1)
            p[t, 2 * half] = pack_e4m3(s[u, 0], s[u, 1], s[u + 1, 0], s[u + 1, 1])
            p[t, 2 * half + 1] = pack_e4m3(s[u, 2], s[u, 3], s[u + 1, 2], s[u + 1, 3])
        return sum_0, sum_1

    return probabilities
