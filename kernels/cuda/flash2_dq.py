"""FlashAttention-2 backward by query rows: delta, and dQ, which a block sums in registers."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import float64, int64, void

from kernels.cuda.device import (
    Kernel,
    array_type,
    ceil_div,
    full_key_tiles,
    is_visible,
    scalar_type,
    shift_of,
    visited_key_tiles,
)
from kernels.cuda.register_tiles import (
    Layout,
    SharedTiles,
    assign,
    make_accumulate,
    make_load_tile,
    make_multiply,
    make_store_tile,
)
from kernels.cuda.vector import EXP2, VECTOR
from kernels.online_softmax import LOG2_E
from kernels.targets import cuda


def dq_tiles(layout: Layout, head_width: int, value_width: int) -> SharedTiles:
    """Return where the tiles of the dq kernel lie."""
    return SharedTiles(
        q=layout.block_q * layout.row_stride(head_width),
        dout=layout.block_q * layout.row_stride(value_width),
        k=layout.block_k * layout.row_stride(head_width),
        v=layout.block_k * layout.row_stride(value_width),
        ds=layout.block_q * (layout.block_k + VECTOR),
    )


@cache
def delta_kernel(threads: int, dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that fills delta, for one dtype."""
    zero = dtype.type(0)

    def flash2_delta(dout, out, delta):
        """Fill delta.

        Computes   D = rowsum(dO ∘ O)
        Source     FlashAttention-2, Algorithm 2, line 4.
        Grid       ceil(batch * heads * seq_q / threads)
        Block      (threads,)
        One thread does: one row
        Shared     none
        Registers  one sum
        Global     reads dout and out once, writes delta once.
        Needs      nothing
        """
        heads, seq_q = delta.shape[1], delta.shape[2]
        i = cuda.grid(1)
        if i < delta.shape[0] * heads * seq_q:
            b, h, row = i // seq_q // heads, i // seq_q % heads, i % seq_q
            total = zero
            for c in range(out.shape[3]):
                total += dout[b, h, row, c] * out[b, h, row, c]
            delta[b, h, row] = total

    read = array_type(dtype, 4)
    return Kernel(flash2_delta, void(read, read, array_type(dtype, 3)), threads)


@cache
def dq_kernel(
    layout: Layout, head_width: int, value_width: int, dtype: np.dtype[Any], vectors: bool
) -> Kernel:
    """Return the kernel that fills dq; arguments as for ``flash2.forward_kernel``."""
    real, exp2 = scalar_type(dtype), EXP2[dtype]
    block_q, block_k = layout.block_q, layout.block_k
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    own_rows, own_cols = block_q // rows_of_threads, block_k // lanes
    own_width = layout.columns(head_width)
    ds_stride = block_k + VECTOR
    tiles = dq_tiles(layout, head_width, value_width)
    q_tile, dout_tile = tiles["q"], tiles["dout"]
    k_tile, v_tile, ds_tile = tiles["k"], tiles["v"], tiles["ds"]
    load_q = make_load_tile(layout, block_q, head_width, real, vectors)
    load_dout = make_load_tile(layout, block_q, value_width, real, vectors)
    load_k = make_load_tile(layout, block_k, head_width, real, vectors)
    load_v = make_load_tile(layout, block_k, value_width, real, vectors)
    multiply_qk = make_multiply(layout, block_q, block_k, head_width, real)
    multiply_dout_v = make_multiply(layout, block_q, block_k, value_width, real)
    accumulate = make_accumulate(layout, block_q, block_k, head_width)
    store_dq = make_store_tile(layout, block_q, head_width, assign)
    zero, one, minus_inf = dtype.type(0), dtype.type(1), dtype.type(-math.inf)
    log2_e = dtype.type(LOG2_E)

    def flash2_dq(dout, q, k, v, lse, delta, dq, scale, diagonal):
        """Fill one query tile of dq.

        Computes   dq for one tile of query rows of one (batch, head).
        Source     FlashAttention-2, Algorithm 2, lines 10, 11, 13, 14 and 15, by rows.
        Grid       (num_q_tiles, batch * heads)        one block per query tile, the longest first
        Block      (lanes * rows_of_threads,)
        One thread does: own_rows x own_cols of S, dP and dS, and own_rows x own_width of dQ.
        Shared     q_tile, dout_tile, k_tile, v_tile, ds (block_q, block_k); rows padded by one vector
        Registers  acc (own_rows, own_width), s and dp (own_rows, own_cols), shift, own_delta (own_rows,)
        Global     reads q, dout, lse and delta once, k and v once per query tile; writes dq once.
        Needs      128-bit loads, for which the simulator has a plain form.
        """
        heads, seq_q, seq_k = q.shape[1], q.shape[2], k.shape[2]
        b, h = cuda.blockIdx.y // heads, cuda.blockIdx.y % heads
        row = (ceil_div(seq_q, block_q) - 1 - cuda.blockIdx.x) * block_q
        tx, ty = cuda.threadIdx.x % lanes, cuda.threadIdx.x // lanes
        shared = cuda.shared.array(0, real)  # q_tile, dout_tile, k_tile, v_tile, ds
        acc = cuda.local.array((own_rows, own_width), real)
        s = cuda.local.array((own_rows, own_cols), real)
        dp = cuda.local.array((own_rows, own_cols), real)
        fragment = cuda.local.array((own_rows, VECTOR), real)
        shift = cuda.local.array(own_rows, real)
        own_delta = cuda.local.array(own_rows, real)
        load_q(cuda.threadIdx.x, q, b, h, row, seq_q, real(scale) * log2_e, shared, q_tile)
        load_dout(cuda.threadIdx.x, dout, b, h, row, seq_q, one, shared, dout_tile)
        for i in range(own_rows):
            this_row = row + ty + i * rows_of_threads
            inside = this_row < seq_q
            shift[i] = real(shift_of(lse[b, h, this_row])) * log2_e if inside else zero
            own_delta[i] = delta[b, h, this_row] if inside else zero
            for c in range(own_width):
                acc[i, c] = zero
        row_stop = min(row + block_q, seq_q)
        visited = visited_key_tiles(row_stop, seq_k, block_k, ceil_div(seq_k, block_k), diagonal)
        full = full_key_tiles(row, seq_k, block_k, diagonal)
        for j in range(visited):
            col = j * block_k
            cuda.syncthreads()  # every thread is done with the last key tile
            load_k(cuda.threadIdx.x, k, b, h, col, seq_k, one, shared, k_tile)
            load_v(cuda.threadIdx.x, v, b, h, col, seq_k, one, shared, v_tile)
            cuda.syncthreads()  # the tiles are whole
            # 10: S = Q_i K_jᵀ     13: dP = dO_i V_jᵀ
            multiply_qk(tx, ty, s, fragment, shared, q_tile, k_tile)
            multiply_dout_v(tx, ty, dp, fragment, shared, dout_tile, v_tile)
            # 11: P = exp(S - L_i)     14: dS = P ∘ (dP - D_i)
            for i in range(own_rows):
                r = ty + i * rows_of_threads
                for c in range(own_cols):
                    score = s[i, c]
                    if j >= full:
                        this_col = col + tx + c * lanes
                        if this_col >= seq_k or not is_visible(row + r, this_col, diagonal):
                            score = minus_inf
                    ds = exp2(score - shift[i]) * (dp[i, c] - own_delta[i])
                    shared[ds_tile + r * ds_stride + tx + c * lanes] = ds
            cuda.syncthreads()  # dS is whole
            # 15: dQ_i += dS K_j
            accumulate(tx, ty, acc, fragment, shared, ds_tile, k_tile)
        tau = real(scale)
        for i in range(own_rows):
            for c in range(own_width):
                acc[i, c] *= tau
        store_dq(tx, ty, acc, dq, b, h, row, seq_q)

    read, rows = array_type(dtype, 4), array_type(dtype, 3)
    signature = void(read, read, read, read, rows, rows, read, float64, int64)
    shared_bytes = dtype.itemsize * tiles.elements
    return Kernel(flash2_dq, signature, layout.threads, shared_bytes, layout.resident)
