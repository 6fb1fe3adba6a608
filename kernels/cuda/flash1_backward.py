"""The gradient of FlashAttention (2022) on CUDA as printed: probabilities recomputed, no atomics.

The comments give the line numbers and letters of appendix B, Algorithm 4, without its dropout; the
forward line stands above each gradient line.  One block walks over all tiles of its head, so that it
may add to dQ in global memory: nobody else does.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import int64, void

from kernels.cuda.device import (
    Kernel,
    array_type,
    ceil_div,
    first_query_tile,
    is_visible,
    scalar_type,
    shift_of,
)
from kernels.cuda.sizes import SIZES
from kernels.problem import Problem
from kernels.targets import cuda


def backward_elements(tile: tuple[int, int], head_dim: int, value_dim: int) -> int:
    """Return how many elements of shared memory the backward kernel takes."""
    block_q, block_k = tile
    keys = block_k * (head_dim + 1 + value_dim + 1 + head_dim + value_dim)
    queries = block_q * (head_dim + 1 + 2 * (value_dim + 1))
    return keys + queries + 2 * block_q * (block_k + 1) + block_q


@cache
def backward_kernel(
    block_q: int, block_k: int, head_dim: int, value_dim: int, threads: int, dtype: np.dtype[Any]
) -> Kernel:
    """Return the backward kernel for one tile size, pair of dims and dtype."""
    real, zero = scalar_type(dtype), dtype.type(0)
    # One column more: threads that walk down a column then meet in different banks.
    key_pitch, value_pitch, score_pitch = head_dim + 1, value_dim + 1, block_k + 1

    def flash1_backward(dout, q, k, v, out, lse, dq, dk, dv, scale, diagonal):
        """Collect dK and dV of one key tile after the other on chip, and add to dQ on the way.

        Computes: dQ, dK, dV for one (batch, head)
        Source: FlashAttention, appendix B, Algorithm 4
        Grid: batch · heads
        Block: threads, any number
        One thread does: every threads-th element of P and dS, of dQ, and of dK and dV; D of every
            threads-th row
        Shared: K_j, V_j, dK_j, dV_j, Q_i, O_i, dO_i, P, dS, and D_i
        Registers: two sums
        Global traffic: reads and writes dQ, and reads Q, O, dO and L, once for each key tile; reads
            K and V once; writes dK and dV once
        Needs: head_dim and value_dim as compiled; ``backward_elements`` of shared memory
        """
        k_tile = cuda.shared.array((block_k, key_pitch), real)  # (block_k, head_dim)
        v_tile = cuda.shared.array((block_k, value_pitch), real)  # (block_k, value_dim)
        dk_acc = cuda.shared.array((block_k, head_dim), real)  # (block_k, head_dim)
        dv_acc = cuda.shared.array((block_k, value_dim), real)  # (block_k, value_dim)
        q_tile = cuda.shared.array((block_q, key_pitch), real)  # (block_q, head_dim)
        o_tile = cuda.shared.array((block_q, value_pitch), real)  # (block_q, value_dim)
        do_tile = cuda.shared.array((block_q, value_pitch), real)  # (block_q, value_dim)
        p = cuda.shared.array((block_q, score_pitch), real)  # (block_q, block_k)
        ds = cuda.shared.array((block_q, score_pitch), real)  # (block_q, block_k)
        delta = cuda.shared.array(block_q, real)  # (block_q,)
        thread = cuda.threadIdx.x
        heads, seq_q, seq_k = q.shape[1], q.shape[2], k.shape[2]
        b, h = cuda.blockIdx.x // heads, cuda.blockIdx.x % heads
        num_q_tiles, num_k_tiles = ceil_div(seq_q, block_q), ceil_div(seq_k, block_k)

        # 5: dQ = 0 in global memory
        for e in range(thread, seq_q * head_dim, threads):
            dq[b, h, e // head_dim, e % head_dim] = zero

        # 6: for 1 <= j <= T_c
        for j in range(num_k_tiles):
            col = j * block_k
            cols = min(block_k, seq_k - col)  # 3: the last tile may be short
            # 7: load K_j, V_j     8: dK_j = 0, dV_j = 0 on chip
            for e in range(thread, cols * head_dim, threads):
                c, d = e // head_dim, e % head_dim
                k_tile[c, d] = k[b, h, col + c, d]
                dk_acc[c, d] = zero
            for e in range(thread, cols * value_dim, threads):
                c, d = e // value_dim, e % value_dim
                v_tile[c, d] = v[b, h, col + c, d]
                dv_acc[c, d] = zero
            # 9: for 1 <= i <= T_r, but only those that see a column of the tile
            for i in range(first_query_tile(col, block_q, num_q_tiles, diagonal), num_q_tiles):
                row = i * block_q
                rows = min(block_q, seq_q - row)
                cuda.syncthreads()  # all have used Q, O, dO, P and dS of the last tile
                # 10: load Q_i, O_i, dO_i; L_i and dQ_i go to a register of the thread that uses them
                for e in range(thread, rows * head_dim, threads):
                    r, d = e // head_dim, e % head_dim
                    q_tile[r, d] = q[b, h, row + r, d]
                for e in range(thread, rows * value_dim, threads):
                    r, d = e // value_dim, e % value_dim
                    o_tile[r, d] = out[b, h, row + r, d]
                    do_tile[r, d] = dout[b, h, row + r, d]
                cuda.syncthreads()  # the tiles of i and j are complete before any thread reads them
                for e in range(thread, block_q * block_k, threads):
                    r, c = e // block_k, e % block_k
                    if r < rows and c < cols:
                        # 11: S = τ Q_i K_jᵀ
                        score = zero
                        for d in range(head_dim):
                            score += q_tile[r, d] * k_tile[c, d]
                        # 12: MASK     13: P = diag(l)^-1 exp(S - m) = exp(S - L)
                        prob = zero
                        if is_visible(row + r, col + c, diagonal):
                            shift = real(shift_of(lse[b, h, row + r]))
                            prob = real(math.exp(scale * score - shift))
                        p[r, c] = prob
                        # O = P V
                        # 17: dP = dO_i V_jᵀ
                        dp = zero
                        for d in range(value_dim):
                            dp += do_tile[r, d] * v_tile[c, d]
                        ds[r, c] = dp
                # 19: D_i = rowsum(dO_i ∘ O_i)
                for r in range(thread, rows, threads):
                    total = zero
                    for d in range(value_dim):
                        total += do_tile[r, d] * o_tile[r, d]
                    delta[r] = total
                cuda.syncthreads()  # D_i is known before any thread subtracts it
                # P = softmax(S)
                # 20: dS = P ∘ (dP - D_i)
                for e in range(thread, block_q * block_k, threads):
                    r, c = e // block_k, e % block_k
                    if r < rows and c < cols:
                        ds[r, c] = p[r, c] * (ds[r, c] - delta[r])
                cuda.syncthreads()  # P and dS are complete before rows and columns of them are read
                # O = P V
                # 16: dV_j += Pᵀ dO_i
                for e in range(thread, cols * value_dim, threads):
                    c, d = e // value_dim, e % value_dim
                    total = zero
                    for r in range(rows):
                        total += p[r, c] * do_tile[r, d]
                    dv_acc[c, d] += total
                # S = τ Q Kᵀ
                # 21: write dQ_i += τ dS K_j
                for e in range(thread, rows * head_dim, threads):
                    r, d = e // head_dim, e % head_dim
                    total = zero
                    for c in range(cols):
                        total += ds[r, c] * k_tile[c, d]
                    dq[b, h, row + r, d] += scale * total
                # S = τ Q Kᵀ
                # 22: dK_j += τ dSᵀ Q_i
                for e in range(thread, cols * head_dim, threads):
                    c, d = e // head_dim, e % head_dim
                    total = zero
                    for r in range(rows):
                        total += ds[r, c] * q_tile[r, d]
                    dk_acc[c, d] += scale * total
            # 24: write dK_j, dV_j; a thread writes what it has added up itself
            for e in range(thread, cols * head_dim, threads):
                c, d = e // head_dim, e % head_dim
                dk[b, h, col + c, d] = dk_acc[c, d]
            for e in range(thread, cols * value_dim, threads):
                c, d = e // value_dim, e % value_dim
                dv[b, h, col + c, d] = dv_acc[c, d]
            cuda.syncthreads()  # all have read K_j and V_j before the next tiles replace them

    four, three = array_type(dtype, 4), array_type(dtype, 3)
    signature = void(four, four, four, four, four, three, four, four, four, real, int64)
    return Kernel(flash1_backward, signature, threads)


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
    """Fill dq, dk and dv; arguments as in ``flash1.forward``, and dout as out."""
    batch, heads, _ = lse.shape
    dims, threads = (problem.head_dim, problem.value_dim), SIZES.flash1_threads
    kernel = backward_kernel(*tile, *dims, threads, problem.dtype)
    kernel[batch * heads, threads](
        dout, q, k, v, out, lse, dq, dk, dv, problem.scale, problem.diagonal
    )
