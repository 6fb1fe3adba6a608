"""Which tiles the bounds leave to a block, and L and D of the rows of a tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numba import float32

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.flash2_mma.tiles import MmaKeyLayout, MmaLayout
from kernels.cuda.device.one_source import (
    first_full_tile,
    first_tile,
    full_tiles_stop,
    is_full_tile,
    shift_of,
    tiles_stop,
)
from kernels.cuda.runtime.kernel import device_function


@cache
def make_row_bounds(layout: MmaLayout) -> Callable[..., tuple[int, int, int, int]]:
    """Return ``bounds(row, seq_q, seq_k, extras)``, for the query tile at ``row``.

    They are the first key tile with a key that a row sees and the one after the last, then the same for the
    tiles of which the bounds hide nothing.
    """
    block_q, block_k = layout.block_q, layout.block_k

    @device_function
    def bounds(row, seq_q, seq_k, extras):
        row_stop = min(row + block_q, seq_q)
        return (
            first_tile(row, block_k, seq_k, extras.lower),
            tiles_stop(row_stop, block_k, seq_k, extras.upper),
            first_full_tile(row_stop, block_k, extras.lower),
            full_tiles_stop(row, block_k, seq_k, extras.upper),
        )

    return bounds


@cache
def make_key_bounds(
    layout: MmaKeyLayout,
) -> tuple[Callable[..., tuple[int, int]], Callable[..., bool]]:
    """Return what the bounds leave to a tile of keys: ``bounds`` and ``is_inside``.

    ``bounds(col, seq_q, seq_k, extras)``: the first query tile with a row that sees a key of the tile at
    ``col``, and the one after the last.

    ``is_inside(row, col, seq_q, seq_k, extras)``: the bounds hide none of a tile's elements.
    """
    block_q, block_k = layout.block_q, layout.block_k

    @device_function
    def bounds(col, seq_q, seq_k, extras):
        return (
            first_tile(col, block_q, seq_q, -extras.upper),
            tiles_stop(min(col + block_k, seq_k), block_q, seq_q, -extras.lower),
        )

    @device_function
    def is_inside(row, col, seq_q, seq_k, extras):
        return is_full_tile(row, block_q, seq_q, col, block_k, seq_k, extras.lower, extras.upper)

    return bounds, is_inside


@cache
def make_row_values(layout: MmaKeyLayout) -> Callable[..., tuple[float, float]]:
    """Return ``row_values(thread, lse, delta, b, h, q_row, q_stop, top, delta_unit)``.

    They are L, base 2, and D of the row ``q_row + thread``; from ``q_stop`` on rows have L infinite, and
    so no probabilities.
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
    """Return the function that puts L, base 2, and D of a whole tile into shared memory.

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
