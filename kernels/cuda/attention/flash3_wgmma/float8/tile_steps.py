"""Steps of the float8 forward kernel on a tile: S = Q Kᵀ, softmax, P rounded, P V."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import float32

from kernels.cuda.device.one_source import shift_of
from kernels.cuda.ptx.numbers import ex2, pack_e4m3
from kernels.cuda.ptx.wgmma import KINDS, make_wgmma
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import cuda

ALL_LANES = 0xFFFFFFFF
E4M3 = "float8_e4m3"
#: Depth of one product, and keys of a left operand in registers.
DEPTH = KINDS[E4M3][1]
#: Probabilities are multiplied by this power of two, so that those near the maximum use the upper end of
#: e4m3's range, and those down to 2⁻¹² of it are not subnormal.  With a maximum that grows by
#: ``MOST_PATIENCE`` powers before rows are scaled anew, none is larger than 2⁸.
OFFSET, MOST_PATIENCE = 6, 2


@cache
def make_issue_score_products(cols: int, depth: int) -> Callable[..., None]:
    """Return ``issue_score_products(s, q_desc, k_desc)``: S = Q_i K_jᵀ, a group of products.

    Args:
        cols: Keys of a tile.
        depth: Columns of q and k, a multiple of 32 up to 128.
    """
    multiply, steps = make_wgmma(cols, E4M3), depth // DEPTH

    @device_function
    def issue_score_products(s, q_desc, k_desc):
        for t in range(steps):  # a step is 32 bytes
            multiply(s, q_desc + 2 * t, k_desc + 2 * t, t > 0)

    return issue_score_products


@cache
def make_accumulate(cols: int, depth: int) -> Callable[..., None]:
    """Return ``accumulate(acc, p, right, has_sums)``: acc += P V, P in registers, V by columns.

    Args:
        cols: Columns of V.
        depth: Keys of a tile, 128 at most.
    """
    multiply, steps = make_wgmma(cols, E4M3, a_in_registers=True), depth // DEPTH

    @device_function
    def accumulate(acc, p, right, has_sums):
        for t in range(steps):
            multiply(acc, p[t], right + 2 * t, has_sums + t > 0)

    return accumulate


@cache
def make_pack(depth: int) -> Callable[..., None]:
    """Return ``pack(p, s)``: accumulators as the left operand of the next product.

    Its keys change places as those of V, see ``quantise``.
    """
    steps = depth // DEPTH

    @device_function
    def pack(p, s):
        for t in range(steps):
            for half in range(2):
                u = 4 * t + 2 * half
                p[t, 2 * half] = pack_e4m3(s[u, 0], s[u, 1], s[u + 1, 0], s[u + 1, 1])
                p[t, 2 * half + 1] = pack_e4m3(s[u, 2], s[u, 3], s[u + 1, 2], s[u + 1, 3])

    return pack


@cache
def make_softmax_step(cols: int, patience: int) -> Callable[..., Any]:
    """Return ``softmax_step(s, factor, max_0, max_1, sum_0, sum_1)``: scores to probabilities, in place.

    Like that of the 16-bit kernel, but the factor, which makes scores base 2, is the tile's own: maxima
    are of scores times the factor.  Probabilities and sums are 2^OFFSET times as large.

    Args:
        cols: Columns of the tile.
        patience: See ``ForwardLayout``; at most :data:`MOST_PATIENCE`.
    """
    tiles, one, least = cols // 8, np.float32(1), np.float32(patience)
    offset = np.float32(OFFSET)

    @device_function
    def softmax_step(s, factor, max_0, max_1, sum_0, sum_1):
        top_0, top_1 = max(s[0, 0], s[0, 1]), max(s[0, 2], s[0, 3])
        for t in range(1, tiles):
            top_0 = max(top_0, max(s[t, 0], s[t, 1]))
            top_1 = max(top_1, max(s[t, 2], s[t, 3]))
        for step in range(2):  # the four lanes of a row
            top_0 = max(top_0, cuda.shfl_xor_sync(ALL_LANES, top_0, 1 << step))
            top_1 = max(top_1, cuda.shfl_xor_sync(ALL_LANES, top_1, 1 << step))
        top_0, top_1 = max(max_0, top_0 * factor), max(max_1, top_1 * factor)
        grows = top_0 - max_0 > least or top_1 - max_1 > least
        is_scaled = cuda.ballot_sync(ALL_LANES, grows) != 0
        rescale_0 = rescale_1 = one
        if is_scaled:
            rescale_0 = ex2(max_0 - float32(shift_of(top_0)))
            rescale_1 = ex2(max_1 - float32(shift_of(top_1)))
            max_0, max_1 = top_0, top_1
            sum_0, sum_1 = sum_0 * rescale_0, sum_1 * rescale_1
        shift_0 = float32(shift_of(max_0)) - offset
        shift_1 = float32(shift_of(max_1)) - offset
        for t in range(tiles):
            s[t, 0] = ex2(s[t, 0] * factor - shift_0)
            s[t, 1] = ex2(s[t, 1] * factor - shift_0)
            s[t, 2] = ex2(s[t, 2] * factor - shift_1)
            s[t, 3] = ex2(s[t, 3] * factor - shift_1)
            sum_0 += s[t, 0] + s[t, 1]
            sum_1 += s[t, 2] + s[t, 3]
        return max_0, max_1, sum_0, sum_1, is_scaled, rescale_0, rescale_1

    return softmax_step
