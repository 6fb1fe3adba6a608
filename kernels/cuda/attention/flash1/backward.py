"""The gradient of FlashAttention (2022) on CUDA as printed: probabilities recomputed, no atomics.

The comments give the line numbers and letters of appendix B, Algorithm 4; the forward line
stands above each gradient line.  One block walks over all tiles of its head, so that it
may add to dQ in global memory: nobody else does.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import void

from kernels.cuda.attention.flash1.work_items import HIDDEN, grid_and_extras, part_of
from kernels.cuda.attention.options.score_functions import (
    PLAIN,
    Features,
    extras_type,
    features_of,
    make_score_functions,
)
from kernels.cuda.attention.options.visits import make_visits
from kernels.cuda.device.one_source import ceil_div, first_tile, shift_of, tiles_stop
from kernels.cuda.runtime.kernel import Kernel, array_type, scalar_type
from kernels.cuda.runtime.sizes import SIZES
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.targets import cuda


def backward_elements(tile: tuple[int, int], head_dim: int, value_dim: int) -> int:
    """Return how many elements of shared memory the backward kernel takes."""
    block_q, block_k = tile
    keys = block_k * (head_dim + 1 + value_dim + 1 + head_dim + value_dim)
    queries = block_q * (head_dim + 1 + 2 * (value_dim + 1))
    return keys + queries + 2 * block_q * (block_k + 1) + block_q


@cache
def backward_kernel(
    block_q: int, block_k: int, head_dim: int, value_dim: int, threads: int,
    dtype: np.dtype[Any], features: Features = PLAIN, has_dlse: bool = False,
) -> Kernel:  # fmt: skip
    """Return the backward kernel for one tile size, pair of dims, dtype and set of options."""
    real, zero = scalar_type(dtype), dtype.type(0)
    # One column more: threads that walk down a column then meet in different banks.
    key_pitch, value_pitch, score_pitch = head_dim + 1, value_dim + 1, block_k + 1
    visits, part = make_visits(features, block_k, by_keys=True), part_of(features)
    place, entries = visits.place, visits.entries
    tile_of, is_within = visits.tile_of, visits.is_within
    functions = make_score_functions(features, dtype)
    score_and_slope, is_seen, kept = functions.score_and_slope, functions.is_seen, functions.kept
    hidden = dtype.type(HIDDEN)

    def flash1_backward(dout, q, k, v, out, lse, dlse, dq, dk, dv, scale, extras):
        """Collect dK and dV of one key tile after the other on chip, and add to dQ on the way.

        Computes: dQ, dK, dV for one (batch, head)
        Source: FlashAttention, appendix B, Algorithm 4; the tiles that it skips, Algorithm 5
        Grid: batch · heads, and that for each packed sequence
        Block: threads, any number
        One thread does: every threads-th element of P and dS, of dQ, and of dK and dV; D of every
            threads-th row
        Shared: K_j, V_j, dK_j, dV_j, Q_i, O_i, dO_i, P, dS, and D_i
        Registers: two sums
        Global traffic: reads and writes dQ, and reads Q, O, dO and L, once for each key tile; reads
            K and V once, and a mask once; writes dK and dV once
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
        items, heads = q.shape[0] * q.shape[1], q.shape[1]
        item, sequence = cuda.blockIdx.x % items, cuda.blockIdx.x // items
        b, h = item // heads, item % heads
        flat, _, first_q, seq_q, first_k, seq_k = place(
            sequence, item, q.shape[2], k.shape[2], extras
        )
        q, out, dout = (
            part(q, first_q, seq_q), part(out, first_q, seq_q), part(dout, first_q, seq_q),
        )  # fmt: skip
        dq, lse, dlse = (
            part(dq, first_q, seq_q), part(lse, first_q, seq_q), part(dlse, first_q, seq_q),
        )  # fmt: skip
        k, v = part(k, first_k, seq_k), part(v, first_k, seq_k)
        dk, dv = part(dk, first_k, seq_k), part(dv, first_k, seq_k)
        num_k_tiles = ceil_div(seq_k, block_k)

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
            # Algorithm 5, 8: if M_ij is not 0, which the list of j's entries says
            first = first_tile(col, block_q, seq_q, -extras.upper)
            stop = tiles_stop(col + cols, block_q, seq_q, -extras.lower)
            begin, end = entries(flat, col, seq_k, first, stop, extras)
            for entry in range(begin, end):
                i = int(tile_of(entry, extras))
                if not is_within(i, first, stop):
                    continue
                row = i * block_q
                rows = min(block_q, seq_q - row)
                cuda.syncthreads()  # all have used Q, O, dO, P, dS and D of the last tile
                # 10: load Q_i, O_i, dO_i; L_i and dQ_i go to a register of the thread that uses them
                for e in range(thread, rows * head_dim, threads):
                    r, d = e // head_dim, e % head_dim
                    q_tile[r, d] = q[b, h, row + r, d]
                for e in range(thread, rows * value_dim, threads):
                    r, d = e // value_dim, e % value_dim
                    o_tile[r, d] = out[b, h, row + r, d]
                    do_tile[r, d] = dout[b, h, row + r, d]
                cuda.syncthreads()  # the tiles of i and j are complete before any thread reads them
                # 19: D_i = rowsum(dO_i ∘ O_i), which waits for nothing; less the gradient of L_i
                # TASK 5.5: Line 19: dO_i · O_i of each row, less dlse if there is one; barrier.
                for r in range(thread, rows, threads):
                    total = zero
                    for d in range(value_dim):
                        total += do_tile[r, d] * o_tile[r, d]
                    delta[r] = total - dlse[b, h, row + r] if has_dlse else total
                cuda.syncthreads()  # D_i is known before any thread subtracts it
                # END TASK 5.5
                for e in range(thread, block_q * block_k, threads):
                    r, c = e // block_k, e % block_k
                    if r < rows and c < cols:
                        # What is hidden stays out of all sums: its key may be NaN.
                        p[r, c] = hidden
                        if is_seen(flat, b, h, row + r, col + c, extras):
                            # TASK 5.5: Lines 11 to 20: P from L and not from a stored P; then dP and dS.
                            # 11: S = τ Q_i K_jᵀ
                            score = zero
                            for d in range(head_dim):
                                score += q_tile[r, d] * k_tile[c, d]
                            # 12: MASK(S), and before it what the other options make of a score
                            score, slope = score_and_slope(
                                scale * score, flat, b, h, row + r, col + c, extras
                            )
                            # 13: P = diag(l)^-1 exp(S - m) = exp(S - L)
                            prob = real(math.exp(score - real(shift_of(lse[b, h, row + r]))))
                            # 14: Z     15: P ∘ Z
                            z = kept(flat, row + r, col + c, extras)
                            p[r, c] = prob * z
                            # O = (P ∘ Z) V
                            # 17: dP = dO_i V_jᵀ
                            dp = zero
                            for d in range(value_dim):
                                dp += do_tile[r, d] * v_tile[c, d]
                            # P = softmax(S)
                            # 18: dP = dP ∘ Z     20: dS = P ∘ (dP - D_i)
                            ds[r, c] = prob * (dp * z - delta[r]) * slope
                            # END TASK 5.5
                cuda.syncthreads()  # P and dS are complete before rows and columns of them are read
                # TASK 5.5: Lines 16, 21, 22: one thread an element, so += needs no atomics.
                # O = (P ∘ Z) V
                # 16: dV_j += (P ∘ Z)ᵀ dO_i
                for e in range(thread, cols * value_dim, threads):
                    c, d = e // value_dim, e % value_dim
                    total = zero
                    for r in range(rows):
                        if p[r, c] != hidden:
                            total += p[r, c] * do_tile[r, d]
                    dv_acc[c, d] += total
                # S = τ Q Kᵀ
                # 21: write dQ_i += τ dS K_j
                for e in range(thread, rows * head_dim, threads):
                    r, d = e // head_dim, e % head_dim
                    total = zero
                    for c in range(cols):
                        if p[r, c] != hidden:
                            total += ds[r, c] * k_tile[c, d]
                    dq[b, h, row + r, d] += scale * total
                # S = τ Q Kᵀ
                # 22: dK_j += τ dSᵀ Q_i
                for e in range(thread, cols * head_dim, threads):
                    c, d = e // head_dim, e % head_dim
                    total = zero
                    for r in range(rows):
                        if p[r, c] != hidden:
                            total += ds[r, c] * q_tile[r, d]
                    dk_acc[c, d] += scale * total
                # END TASK 5.5
            # 24: write dK_j, dV_j; a thread writes what it has added up itself
            for e in range(thread, cols * head_dim, threads):
                c, d = e // head_dim, e % head_dim
                dk[b, h, col + c, d] = dk_acc[c, d]
            for e in range(thread, cols * value_dim, threads):
                c, d = e // value_dim, e % value_dim
                dv[b, h, col + c, d] = dv_acc[c, d]
            cuda.syncthreads()  # all have read K_j and V_j before the next tiles replace them

    four, three = array_type(dtype, 4), array_type(dtype, 3)
    extras = extras_type(features, dtype)
    signature = void(four, four, four, four, four, three, three, four, four, four, real, extras)
    return Kernel(flash1_backward, signature, threads)


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv.

    Args:
        problem: The checked call.
        tile: (block_q, block_k).
        operands: Those of ``flash1.forward``, its results, dout and dlse or None, and dq, dk and dv to
            be written.
    """
    o, has_dlse = operands, operands.dlse is not None
    dims, threads = (problem.head_dim, problem.value_dim), SIZES.flash1_threads
    kernel = backward_kernel(*tile, *dims, threads, problem.dtype, features_of(problem), has_dlse)
    blocks, extras = grid_and_extras(problem, operands, tile)
    kernel[blocks, threads](
        o.dout, o.q, o.k, o.v, o.out, o.lse, o.dlse if has_dlse else o.lse, o.dq, o.dk, o.dv,
        problem.scale, extras,
    )  # fmt: skip
