"""What the backward kernels on tensor cores share that go by key columns: bounds, and L and D of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numba import float32

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.tiles import MmaKeyLayout
from kernels.cuda.device.one_source import first_tile, is_full_tile, shift_of, tiles_stop
from kernels.cuda.runtime.kernel import device_function


@cache
def make_bounds(layout: MmaKeyLayout) -> tuple[Callable[..., tuple[int, ...]], Callable[..., bool]]:
    """Return what the bounds leave to a tile of keys: ``bounds`` and ``is_inside``.

    ``bounds(col, first_q, seq_q, first_k, seq_k, extras)`` are the first query tile that sees a key of the
    tile at ``col`` and the one after the last, then the first key that any row sees and the one after the
    last, and likewise the rows that see a key of the tile; these four counted from the tensors' starts.
    What is outside of them is read as zeros: zero times infinity would be NaN.

    ``is_inside(row, col, seq_q, seq_k, extras)``: the bounds hide none of a tile's elements.
    """
    block_q, block_k = layout.block_q, layout.block_k

    @device_function
    def bounds(col, first_q, seq_q, first_k, seq_k, extras):
        col_stop = min(col + block_k, seq_k)
        return (
            first_tile(col, block_q, seq_q, -extras.upper),
            tiles_stop(col_stop, block_q, seq_q, -extras.lower),
            first_k + max(extras.lower, 0),
            first_k + min(seq_q + extras.upper, seq_k),
            first_q + max(col - extras.upper, 0),
            first_q + min(col_stop - extras.lower, seq_q),
        )

    @device_function
    def is_inside(row, col, seq_q, seq_k, extras):
        return is_full_tile(row, block_q, seq_q, col, block_k, seq_k, extras.lower, extras.upper)

    return bounds, is_inside


@cache
def make_row_values(layout: MmaKeyLayout) -> Callable[..., tuple[float, float]]:
    """Return ``row_values(thread, lse, delta, b, h, q_row, q_start, q_stop, top, delta_unit)``.

    They are L, base 2, and D of the row ``q_row + thread``; a row that sees nothing has no probabilities.
    """
    threads, block_q = layout.threads, layout.block_q
    zero, inf, log2_e = np.float32(0), np.float32(math.inf), np.float32(LOG2_E)

    @device_function
    def row_values(thread, lse, delta, b, h, q_row, q_start, q_stop, top, delta_unit):
        row = q_row + thread
        inside = q_start <= row < q_stop
        if threads > block_q:
            inside = inside and thread < block_q
        shift = float32(shift_of(lse[b, h, row])) * log2_e - top if inside else inf
        return shift, (delta[b, h, row] * delta_unit if inside else zero)

    return row_values
