"""FlashAttention-2 backward by key columns: dK and dV, and by choice dQ by atomics."""

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
    device_function,
    first_query_tile,
    is_visible,
    scalar_type,
    shift_of,
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
from kernels.online_softmax import LN_2, LOG2_E
from kernels.targets import cuda


def dkdv_tiles(layout: Layout, head_width: int, value_width: int) -> SharedTiles:
    """Return where the tiles of the dk and dv kernel lie; P, dS and its transpose share a place."""
    block_q, block_k = layout.block_q, layout.block_k
    return SharedTiles(
        k=block_k * layout.row_stride(head_width),
        v=block_k * layout.row_stride(value_width),
        q=block_q * layout.row_stride(head_width),
        dout=block_q * layout.row_stride(value_width),
        p=max(block_k * (block_q + VECTOR), block_q * (block_k + VECTOR)),
        lse=block_q,
        delta=block_q,
    )


@device_function
def add_atomically(target, index, value):
    """Add to an element that other blocks add to: the ``put`` of a tile of dq."""
    cuda.atomic.add(target, index, value)


@cache
def dkdv_kernel(
    layout: Layout,
    head_width: int,
    value_width: int,
    dtype: np.dtype[Any],
    vectors: bool,
    atomics: bool,
) -> Kernel:
    """Return the kernel that fills dk and dv, and with ``atomics`` adds to dq.

    The other arguments are those of ``flash2.forward_kernel``.
    """
    real, exp2 = scalar_type(dtype), EXP2[dtype]
    block_q, block_k = layout.block_q, layout.block_k
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    own_keys, own_rows = block_k // rows_of_threads, block_q // lanes
    k_width, v_width = layout.columns(head_width), layout.columns(value_width)
    # A kernel without atomics never reads these; registers need a positive size.
    dq_rows = max(block_q // rows_of_threads, 1) if atomics else 1
    fragment_rows = max(own_keys, dq_rows)
    p_stride, ds_stride = block_q + VECTOR, block_k + VECTOR
    tiles = dkdv_tiles(layout, head_width, value_width)
    k_tile, v_tile, q_tile, dout_tile = tiles["k"], tiles["v"], tiles["q"], tiles["dout"]
    p_tile, lse_tile, delta_tile = tiles["p"], tiles["lse"], tiles["delta"]
    load_k = make_load_tile(layout, block_k, head_width, real, vectors)
    load_v = make_load_tile(layout, block_k, value_width, real, vectors)
    load_q = make_load_tile(layout, block_q, head_width, real, vectors)
    load_dout = make_load_tile(layout, block_q, value_width, real, vectors)
    multiply_kq = make_multiply(layout, block_k, block_q, head_width, real)
    multiply_v_dout = make_multiply(layout, block_k, block_q, value_width, real)
    accumulate_dk = make_accumulate(layout, block_k, block_q, head_width)
    accumulate_dv = make_accumulate(layout, block_k, block_q, value_width)
    accumulate_dq = make_accumulate(layout, block_q, block_k, head_width)
    store_dk = make_store_tile(layout, block_k, head_width, assign)
    store_dv = make_store_tile(layout, block_k, value_width, assign)
    add_dq = make_store_tile(layout, block_q, head_width, add_atomically)
    zero, one, minus_inf = dtype.type(0), dtype.type(1), dtype.type(-math.inf)
    log2_e, ln_2 = dtype.type(LOG2_E), dtype.type(LN_2)

    def flash2_dkdv(dout, q, k, v, lse, delta, dq, dk, dv, scale, diagonal):
        """Fill one key tile of dk and dv; with atomics, add what it gives to dq, which holds zeros before.

        Computes   dk and dv for one tile of keys of one (batch, head), and its part of dq.
        Source     FlashAttention-2, Algorithm 2, lines 5-18; without atomics all but line 15.
        Grid       (num_k_tiles, batch * heads)        one block per key tile
        Block      (lanes * rows_of_threads,)
        One thread does: own_keys x own_rows of Sᵀ, dPᵀ and dSᵀ, and own_keys rows of dK and dV.
        Shared     k_tile, v_tile, q_tile, dout_tile, first P and then dS transposed (block_k, block_q),
                   lse and delta (block_q,); rows padded by one vector
        Registers  dk_acc (own_keys, k_width), dv_acc (own_keys, v_width), s and dp (own_keys, own_rows),
                   with atomics dq_acc (dq_rows, k_width)
        Global     reads k and v once, q, dout, lse and delta once per key tile; writes dk and dv once;
                   with atomics adds to dq once per key tile.
        Needs      128-bit loads, for which the simulator has a plain form.
        """
        heads, seq_q, seq_k = q.shape[1], q.shape[2], k.shape[2]
        b, h = cuda.blockIdx.y // heads, cuda.blockIdx.y % heads
        # 5: for 1 <= j <= T_c.  Under a causal mask the first tile is the longest: it starts first.
        col = cuda.blockIdx.x * block_k
        tx, ty = cuda.threadIdx.x % lanes, cuda.threadIdx.x // lanes
        shared = cuda.shared.array(0, real)
        dk_acc = cuda.local.array((own_keys, k_width), real)
        dv_acc = cuda.local.array((own_keys, v_width), real)
        s = cuda.local.array((own_keys, own_rows), real)
        dp = cuda.local.array((own_keys, own_rows), real)
        dq_acc = cuda.local.array((dq_rows, k_width), real)
        fragment = cuda.local.array((fragment_rows, VECTOR), real)
        # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
        load_k(cuda.threadIdx.x, k, b, h, col, seq_k, real(scale) * log2_e, shared, k_tile)
        load_v(cuda.threadIdx.x, v, b, h, col, seq_k, one, shared, v_tile)
        for i in range(own_keys):
            for c in range(k_width):
                dk_acc[i, c] = zero
            for c in range(v_width):
                dv_acc[i, c] = zero
        num_q_tiles = ceil_div(seq_q, block_q)
        # 8: for 1 <= i <= T_r, but only those that see a column of the tile
        for t in range(first_query_tile(col, block_q, num_q_tiles, diagonal), num_q_tiles):
            row = t * block_q
            cuda.syncthreads()  # every thread is done with the last query tile
            # 9: load Q_i, dO_i, L_i, D_i
            load_q(cuda.threadIdx.x, q, b, h, row, seq_q, one, shared, q_tile)
            load_dout(cuda.threadIdx.x, dout, b, h, row, seq_q, one, shared, dout_tile)
            for r in range(cuda.threadIdx.x, block_q, lanes * rows_of_threads):
                inside = row + r < seq_q
                shared[lse_tile + r] = (
                    real(shift_of(lse[b, h, row + r])) * log2_e if inside else zero
                )
                shared[delta_tile + r] = delta[b, h, row + r] if inside else zero
            cuda.syncthreads()  # the tiles are whole
            # 10: Sᵀ = K_j Q_iᵀ     13: dPᵀ = V_j dO_iᵀ
            multiply_kq(tx, ty, s, fragment, shared, k_tile, q_tile)
            multiply_v_dout(tx, ty, dp, fragment, shared, v_tile, dout_tile)
            # 11: P = exp(S - L_i)     14: dS = P ∘ (dP - D_i)
            partial = (
                row + block_q > seq_q
                or col + block_k > seq_k
                or not is_visible(row, col + block_k - 1, diagonal)
            )
            for i in range(own_keys):
                key = ty + i * rows_of_threads
                for c in range(own_rows):
                    r = tx + c * lanes
                    score = s[i, c]
                    # A row or a key beyond the end has zeros for operands, and lse 0: without the test its
                    # probability would be 1.
                    if partial and (
                        row + r >= seq_q
                        or col + key >= seq_k
                        or not is_visible(row + r, col + key, diagonal)
                    ):
                        score = minus_inf
                    p = exp2(score - shared[lse_tile + r])
                    shared[p_tile + key * p_stride + r] = p
                    dp[i, c] = p * (dp[i, c] - shared[delta_tile + r])
            cuda.syncthreads()  # P is whole
            # 12: dV_j += Pᵀ dO_i
            accumulate_dv(tx, ty, dv_acc, fragment, shared, p_tile, dout_tile)
            cuda.syncthreads()  # every thread is done with P: dS takes its place
            for i in range(own_keys):
                for c in range(own_rows):
                    place = (ty + i * rows_of_threads) * p_stride + tx + c * lanes
                    shared[p_tile + place] = dp[i, c]
            cuda.syncthreads()  # dS is whole
            # 16: dK_j += dSᵀ Q_i
            accumulate_dk(tx, ty, dk_acc, fragment, shared, p_tile, q_tile)
            if atomics:
                cuda.syncthreads()  # every thread is done with dSᵀ: dS takes its place
                for i in range(own_keys):
                    for c in range(own_rows):
                        place = (tx + c * lanes) * ds_stride + ty + i * rows_of_threads
                        shared[p_tile + place] = dp[i, c] * ln_2
                for i in range(dq_rows):
                    for c in range(k_width):
                        dq_acc[i, c] = zero
                cuda.syncthreads()  # dS is whole
                # 15: dQ_i += dS K_j, where K_j is scaled by τ log2 e already and dS by ln 2
                accumulate_dq(tx, ty, dq_acc, fragment, shared, p_tile, k_tile)
                add_dq(tx, ty, dq_acc, dq, b, h, row, seq_q)
        # 18: write dK_j, dV_j
        tau = real(scale)
        for i in range(own_keys):
            for c in range(k_width):
                dk_acc[i, c] *= tau
        store_dk(tx, ty, dk_acc, dk, b, h, col, seq_k)
        store_dv(tx, ty, dv_acc, dv, b, h, col, seq_k)

    read, rows = array_type(dtype, 4), array_type(dtype, 3)
    signature = void(read, read, read, read, rows, rows, read, read, read, float64, int64)
    shared_bytes = dtype.itemsize * tiles.elements
    return Kernel(flash2_dkdv, signature, layout.threads, shared_bytes, layout.resident)
