"""L and D of the rows of a query tile, for the kernels by key columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from kernels.cuda.attention.flash2_mma.large_rows import lse_and_shift
from kernels.cuda.attention.flash2_mma.tiles import MmaKeyLayout
from kernels.cuda.runtime.kernel import device_function


@cache
def make_row_values(layout: MmaKeyLayout) -> Callable[..., tuple[float, float, float]]:
    """Return ``row_values(thread, lse, lse_rest, delta, b, h, q_row, q_stop, top, delta_unit)``.

    The values are L, see ``large_rows.lse_and_shift``, and D of the row ``q_row + thread``.  For rows from
    ``q_stop`` on, the shift is infinite, so that their probabilities are 0.
    """
    threads, block_q = layout.threads, layout.block_q
    zero, inf = np.float32(0), np.float32(math.inf)
    if threads < block_q:
        raise ValueError(f"{threads} threads cannot load L and D of {block_q} rows; use more warps")

    @device_function
    def row_values(thread, lse, lse_rest, delta, b, h, q_row, q_stop, top, delta_unit):
        row = q_row + thread
        inside = row < q_stop
        if threads > block_q:
            inside = inside and thread < block_q
        if not inside:
            return zero, inf, zero
        large_lse, shift = lse_and_shift(lse[b, h, row], lse_rest[b, h, row], top)
        return large_lse, shift, delta[b, h, row] * delta_unit

    return row_values
