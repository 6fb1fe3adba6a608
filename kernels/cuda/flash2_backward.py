"""FlashAttention-2 backward on CUDA cores: dQ by query rows, dK and dV by key columns, no atomics.

Two kernels recompute P from lse.  Each owns what it adds up, so nothing is added by two blocks and the
result is the same bit for bit on every run; the price is seven products where atomics would need five.
"""

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
    first_query_tile,
    full_key_tiles,
    is_visible,
    scalar_type,
    shift_of,
    visited_key_tiles,
)
from kernels.cuda.flash2 import backward_shared_elements
from kernels.cuda.register_tiles import (
    Layout,
    make_accumulate,
    make_load_tile,
    make_multiply,
    make_store_tile,
    pick_layout,
)
from kernels.cuda.vector import EXP2, VECTOR, are_vectors
from kernels.geometry import PLAIN
from kernels.online_softmax import LOG2_E
from kernels.problem import Problem
from kernels.targets import cuda, empty_device


@cache
def dq_kernel(
    layout: Layout, head_dim: int, value_dim: int, dtype: np.dtype[Any], vectors: bool
) -> Kernel:
    """Return the kernel that fills delta and dq; arguments as for ``flash2.forward_kernel``."""
    real, exp2 = scalar_type(dtype), EXP2[dtype]
    block_q, block_k = layout.block_q, layout.block_k
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    own_rows, own_cols = block_q // rows_of_threads, block_k // lanes
    own_width = layout.columns(head_dim)
    ds_stride = block_k + VECTOR
    dout_offset = block_q * layout.row_stride(head_dim)
    k_offset = dout_offset + block_q * layout.row_stride(value_dim)
    v_offset = k_offset + block_k * layout.row_stride(head_dim)
    ds_offset = v_offset + block_k * layout.row_stride(value_dim)
    load_q = make_load_tile(layout, block_q, head_dim, real, vectors)
    load_dout = make_load_tile(layout, block_q, value_dim, real, vectors)
    load_k = make_load_tile(layout, block_k, head_dim, real, vectors)
    load_v = make_load_tile(layout, block_k, value_dim, real, vectors)
    multiply_qk = make_multiply(layout, block_q, block_k, head_dim, real)
    multiply_dout_v = make_multiply(layout, block_q, block_k, value_dim, real)
    accumulate = make_accumulate(layout, block_q, block_k, head_dim)
    store_dq = make_store_tile(layout, block_q, head_dim)
    zero, one, minus_inf = dtype.type(0), dtype.type(1), dtype.type(-math.inf)
    log2_e = dtype.type(LOG2_E)

    def flash2_dq(dout, q, k, v, out, lse, delta, dq, scale, diagonal):
        """Fill one query tile of delta and dq.

        Computes   delta and dq for one tile of query rows of one (batch, head).
        Source     FlashAttention-2, Algorithm 2, lines 4, 10, 11, 13, 14 and 15, by rows.
        Grid       (num_q_tiles, batch * heads)        one block per query tile, the longest first
        Block      (lanes * rows_of_threads,)
        One thread does: own_rows x own_cols of S, dP and dS, and own_rows x own_width of dQ.
        Shared     q_tile, dout_tile, k_tile, v_tile, ds (block_q, block_k); rows padded by one vector
        Registers  acc (own_rows, own_width), s and dp (own_rows, own_cols), shift, own_delta (own_rows,)
        Global     reads q, dout, out and lse once, k and v once per query tile; writes delta and dq once.
        Needs      warp shuffles and 128-bit loads, for which the simulator has plain forms.
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
        load_q(cuda.threadIdx.x, q, b, h, row, seq_q, real(scale) * log2_e, shared, 0)
        load_dout(cuda.threadIdx.x, dout, b, h, row, seq_q, one, shared, dout_offset)
        # 4: D = rowsum(dO ∘ O): each thread of a row sums its own columns, they meet where dS will be
        for i in range(own_rows):
            r = ty + i * rows_of_threads
            total = zero
            shift[i] = zero
            if row + r < seq_q:
                for c in range(tx, value_dim, lanes):
                    total += dout[b, h, row + r, c] * out[b, h, row + r, c]
                shift[i] = real(shift_of(lse[b, h, row + r])) * log2_e
            shared[ds_offset + r * ds_stride + tx] = total
        cuda.syncthreads()  # every part is written
        for i in range(own_rows):
            r = ty + i * rows_of_threads
            own_delta[i] = zero
            for c in range(lanes):
                own_delta[i] += shared[ds_offset + r * ds_stride + c]
            if tx == 0 and row + r < seq_q:
                delta[b, h, row + r] = own_delta[i]
            for c in range(own_width):
                acc[i, c] = zero
        row_stop = min(row + block_q, seq_q)
        visited = visited_key_tiles(row_stop, seq_k, block_k, ceil_div(seq_k, block_k), diagonal)
        full = full_key_tiles(row, seq_k, block_k, diagonal)
        for j in range(visited):
            col = j * block_k
            cuda.syncthreads()  # every thread is done with the last key tile
            load_k(cuda.threadIdx.x, k, b, h, col, seq_k, one, shared, k_offset)
            load_v(cuda.threadIdx.x, v, b, h, col, seq_k, one, shared, v_offset)
            cuda.syncthreads()  # the tiles are whole
            # 10: S = Q_i K_jᵀ     13: dP = dO_i V_jᵀ
            multiply_qk(tx, ty, s, fragment, shared, 0, k_offset)
            multiply_dout_v(tx, ty, dp, fragment, shared, dout_offset, v_offset)
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
                    shared[ds_offset + r * ds_stride + tx + c * lanes] = ds
            cuda.syncthreads()  # dS is whole
            # 15: dQ_i += dS K_j
            accumulate(tx, ty, acc, fragment, shared, ds_offset, k_offset)
        tau = real(scale)
        for i in range(own_rows):
            for c in range(own_width):
                acc[i, c] *= tau
        store_dq(tx, ty, acc, dq, b, h, row, seq_q)

    read, rows = array_type(dtype, 4), array_type(dtype, 3)
    signature = void(read, read, read, read, read, rows, rows, read, float64, int64)
    shared_bytes = dtype.itemsize * backward_shared_elements(layout, head_dim, value_dim)
    return Kernel(flash2_dq, signature, layout.threads, shared_bytes)


@cache
def dkdv_kernel(
    layout: Layout, head_dim: int, value_dim: int, dtype: np.dtype[Any], vectors: bool
) -> Kernel:
    """Return the kernel that fills dk and dv; arguments as for ``flash2.forward_kernel``."""
    real, exp2 = scalar_type(dtype), EXP2[dtype]
    block_q, block_k = layout.block_q, layout.block_k
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    own_keys, own_rows = block_k // rows_of_threads, block_q // lanes
    k_width, v_width = layout.columns(head_dim), layout.columns(value_dim)
    p_stride = block_q + VECTOR
    v_offset = block_k * layout.row_stride(head_dim)
    q_offset = v_offset + block_k * layout.row_stride(value_dim)
    dout_offset = q_offset + block_q * layout.row_stride(head_dim)
    p_offset = dout_offset + block_q * layout.row_stride(value_dim)
    lse_offset = p_offset + block_k * p_stride
    delta_offset = lse_offset + block_q
    load_k = make_load_tile(layout, block_k, head_dim, real, vectors)
    load_v = make_load_tile(layout, block_k, value_dim, real, vectors)
    load_q = make_load_tile(layout, block_q, head_dim, real, vectors)
    load_dout = make_load_tile(layout, block_q, value_dim, real, vectors)
    multiply_kq = make_multiply(layout, block_k, block_q, head_dim, real)
    multiply_v_dout = make_multiply(layout, block_k, block_q, value_dim, real)
    accumulate_dk = make_accumulate(layout, block_k, block_q, head_dim)
    accumulate_dv = make_accumulate(layout, block_k, block_q, value_dim)
    store_dk = make_store_tile(layout, block_k, head_dim)
    store_dv = make_store_tile(layout, block_k, value_dim)
    zero, one, minus_inf = dtype.type(0), dtype.type(1), dtype.type(-math.inf)
    log2_e = dtype.type(LOG2_E)

    def flash2_dkdv(dout, q, k, v, lse, delta, dk, dv, scale, diagonal):
        """Fill one key tile of dk and dv.

        Computes   dk and dv for one tile of keys of one (batch, head).
        Source     FlashAttention-2, Algorithm 2, lines 5-18 without 15.
        Grid       (num_k_tiles, batch * heads)        one block per key tile
        Block      (lanes * rows_of_threads,)
        One thread does: own_keys x own_rows of Sᵀ, dPᵀ and dSᵀ, and own_keys rows of dK and dV.
        Shared     k_tile, v_tile, q_tile, dout_tile, first P and then dS transposed (block_k, block_q),
                   lse and delta (block_q,); rows padded by one vector
        Registers  dk_acc (own_keys, k_width), dv_acc (own_keys, v_width), s and dp (own_keys, own_rows)
        Global     reads k and v once, q, dout, lse and delta once per key tile; writes dk and dv once.
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
        fragment = cuda.local.array((own_keys, VECTOR), real)
        # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
        load_k(cuda.threadIdx.x, k, b, h, col, seq_k, real(scale) * log2_e, shared, 0)
        load_v(cuda.threadIdx.x, v, b, h, col, seq_k, one, shared, v_offset)
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
            load_q(cuda.threadIdx.x, q, b, h, row, seq_q, one, shared, q_offset)
            load_dout(cuda.threadIdx.x, dout, b, h, row, seq_q, one, shared, dout_offset)
            for r in range(cuda.threadIdx.x, block_q, lanes * rows_of_threads):
                inside = row + r < seq_q
                shared[lse_offset + r] = (
                    real(shift_of(lse[b, h, row + r])) * log2_e if inside else zero
                )
                shared[delta_offset + r] = delta[b, h, row + r] if inside else zero
            cuda.syncthreads()  # the tiles are whole
            # 10: Sᵀ = K_j Q_iᵀ     13: dPᵀ = V_j dO_iᵀ
            multiply_kq(tx, ty, s, fragment, shared, 0, q_offset)
            multiply_v_dout(tx, ty, dp, fragment, shared, v_offset, dout_offset)
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
                    p = exp2(score - shared[lse_offset + r])
                    shared[p_offset + key * p_stride + r] = p
                    dp[i, c] = p * (dp[i, c] - shared[delta_offset + r])
            cuda.syncthreads()  # P is whole
            # 12: dV_j += Pᵀ dO_i
            accumulate_dv(tx, ty, dv_acc, fragment, shared, p_offset, dout_offset)
            cuda.syncthreads()  # every thread is done with P: dS takes its place
            for i in range(own_keys):
                for c in range(own_rows):
                    place = (ty + i * rows_of_threads) * p_stride + tx + c * lanes
                    shared[p_offset + place] = dp[i, c]
            cuda.syncthreads()  # dS is whole
            # 16: dK_j += dSᵀ Q_i
            accumulate_dk(tx, ty, dk_acc, fragment, shared, p_offset, q_offset)
        # 18: write dK_j, dV_j
        tau = real(scale)
        for i in range(own_keys):
            for c in range(k_width):
                dk_acc[i, c] *= tau
        store_dk(tx, ty, dk_acc, dk, b, h, col, seq_k)
        store_dv(tx, ty, dv_acc, dv, b, h, col, seq_k)

    read, rows = array_type(dtype, 4), array_type(dtype, 3)
    signature = void(read, read, read, read, rows, rows, read, read, float64, int64)
    shared_bytes = dtype.itemsize * backward_shared_elements(layout, head_dim, value_dim)
    return Kernel(flash2_dkdv, signature, layout.threads, shared_bytes)


def _own_layout(problem: Problem) -> Layout:
    return pick_layout("dq", problem, None)


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the dq kernel."""
    layout = _own_layout(problem)
    return layout.block_q, layout.block_k


def backward(
    problem: Problem,
    tile: tuple[int, int],
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
) -> None:
    """Fill dq, dk and dv; takes memory for delta.  Arguments as in the forward pass."""
    batch, heads, seq_q, _ = q.shape
    delta = empty_device((batch, heads, seq_q), problem.dtype)
    kind = (problem.head_dim, problem.value_dim, problem.dtype, are_vectors(dout, q, k, v))
    sizes = problem.scale, problem.diagonal
    rows = pick_layout("dq", problem, tile)
    grid = (PLAIN.ceil_div(seq_q, rows.block_q), batch * heads)
    launch = dq_kernel(rows, *kind)[grid, rows.threads]
    launch(dout, q, k, v, out, lse, delta, dq, *sizes)
    # dK and dV have a layout of their own, unless the caller asked for a tile.
    columns = pick_layout("dkdv", problem, None if rows == _own_layout(problem) else tile)
    grid = (PLAIN.ceil_div(problem.seq_k, columns.block_k), batch * heads)
    launch = dkdv_kernel(columns, *kind)[grid, columns.threads]
    launch(dout, q, k, v, lse, delta, dk, dv, *sizes)
