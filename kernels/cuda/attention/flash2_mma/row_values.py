"""L and D of the rows of a query tile, for the kernels by key columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numba import float32

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.tiles import MmaKeyLayout
from kernels.cuda.device.one_source import shift_of
from kernels.cuda.runtime.kernel import device_function


@cache
def make_row_values(layout: MmaKeyLayout) -> Callable[..., tuple[float, float]]:
    """Return ``row_values(thread, lse, delta, b, h, q_row, q_stop, top, delta_unit)``.

    The values are L, in base 2, and D of the row ``q_row + thread``.  For rows from ``q_stop`` on, L is
    infinite, so that their probabilities are 0.
    """
    threads, block_q = layout.threads, layout.block_q
    zero, inf, log2_e = np.float32(0), np.float32(math.inf), np.float32(LOG2_E)

    @device_function
    def row_values(thread, lse, delta, b, h, q_row, q_stop, top, delta_unit):
        row = q_row + thread
        inside = row < q_stop
        if threads > block_q:
            inside = inside and thread < block_q
        shift = float32(shift_of(lse[b, h, row])) * log2_e - top if inside else inf
        return shift, (delta[b, h, row] * delta_unit if inside else zero)

    return row_values


@cache
def make_put_row_values(layout: MmaKeyLayout) -> Callable[..., None]:
    """Return the function that stores L, in base 2, and D of a whole tile in shared memory.

    ``put_row_values(thread, floats, lse_at, delta_at, lse, delta, b, h, q_row, q_stop, top, delta_unit)``.
    """
    threads, block_q, row_values = layout.threads, layout.block_q, make_row_values(layout)

    @device_function
    def put_row_values(
        thread, floats, lse_at, delta_at, lse, delta, b, h, q_row, q_stop, top, delta_unit
    ):
        for r in range(thread, block_q, threads):
            shift, own_delta = row_values(r, lse, delta, b, h, q_row, q_stop, top, delta_unit)
            floats[lse_at + r], floats[delta_at + r] = shift, own_delta

    return put_row_values
