"""FlashAttention (2022) on CUDA as printed: key tiles outside, query tiles inside, a block a head.

The comments give the line numbers and letters of appendix B, Algorithm 2, which is Algorithm 1 with a
scale τ, MASK and dropout; block-sparse attention, Algorithm 5, skips tiles besides.  L = m + log l is
what the backward pass takes.

The paper leaves two things open.  M counts the four tiles of d columns that Algorithm 1 keeps on chip,
and neither the scores between them nor the three more tiles of the backward pass; :func:`paper_tiles`
therefore hands the formula a part of the shared memory.  Where values are not as wide as keys, d is
the wider of the two.

Measured on an H200 (float32, N = 4096, d = 64, 64 heads): 439 ms forward where naive takes 17.7, for there
are only as many blocks as heads; forward and backward together add 67 MiB to the operands where naive's
add 8,257.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import void

from kernels.common import geometry
from kernels.cuda.attention.flash1.backward import backward_elements
from kernels.cuda.attention.flash1.work_items import HIDDEN, grid_and_extras, part_of
from kernels.cuda.attention.options.score_functions import (
    PLAIN,
    Features,
    extras_type,
    features_of,
    make_score_functions,
)
from kernels.cuda.attention.options.visits import make_visits
from kernels.cuda.device.one_source import (
    ceil_div,
    first_tile,
    inverse_sum,
    log_sum_exp,
    shift_of,
    tiles_stop,
)
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import Kernel, array_type, scalar_type, why_too_large
from kernels.cuda.runtime.sizes import SIZES
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.targets import cuda, shared_memory_bytes

Tile = tuple[int, int]


def paper_tile(shared_elements: int, dim: int) -> Tile:
    """Return (B_r, B_c) for an on-chip memory of M elements; Algorithm 1, line 1."""
    block_k = geometry.ceil_div(shared_elements, 4 * dim)
    return min(block_k, dim), block_k


def paper_tiles(elements: int, head_dim: int, value_dim: int) -> tuple[Tile, Tile]:
    """Return the tiles of the forward and of the backward pass that fit in so many elements.

    Forward a third is left for S; backward three more tiles and two of scores must fit.
    """
    dim = max(head_dim, value_dim)
    return paper_tile(elements * 2 // 3, dim), paper_tile(elements * 2 // 5, dim)


def _own_tiles(problem: Problem) -> tuple[Tile, Tile]:
    shared_bytes = min(SIZES.flash1_bytes, shared_memory_bytes())
    return paper_tiles(shared_bytes // problem.dtype.itemsize, problem.head_dim, problem.value_dim)


def tile(problem: Problem) -> Tile:
    """Return (block_q, block_k) of the forward pass."""
    return _own_tiles(problem)[0]


def backward_tile(problem: Problem) -> Tile:
    """Return (block_q, block_k) of the backward pass."""
    return _own_tiles(problem)[1]


def forward_elements(tile: Tile, head_dim: int, value_dim: int) -> int:
    """Return how many elements of shared memory the forward kernel takes."""
    block_q, block_k = tile
    tiles = (block_q + block_k) * (head_dim + 1 + value_dim + 1)
    return tiles + block_q * (block_k + 1) + 4 * block_q


def why_not(problem: Problem, requested_tile: Tile | None) -> str | None:
    """Return why this rung cannot run a problem with a tile (None: its own), or None."""
    dims = problem.head_dim, problem.value_dim
    passes = (forward_elements, tile), (backward_elements, backward_tile)
    for elements, own_tile in passes:
        block = requested_tile or own_tile(problem)
        reason = why_too_large(block, elements(block, *dims) * problem.dtype.itemsize)
        if reason:
            return reason
    return None


@cache
def forward_kernel(
    block_q: int, block_k: int, head_dim: int, value_dim: int, threads: int,
    dtype: np.dtype[Any], features: Features = PLAIN,
) -> Kernel:  # fmt: skip
    """Return the forward kernel for one tile size, pair of dims, dtype and set of options."""
    real, zero, minus_inf = scalar_type(dtype), dtype.type(0), dtype.type(-math.inf)
    # One column more: threads that walk down a column then meet in different banks.
    key_pitch, value_pitch, score_pitch = head_dim + 1, value_dim + 1, block_k + 1
    visits, part = make_visits(features, block_k, by_keys=True), part_of(features)
    place, entries = visits.place, visits.entries
    tile_of, is_within = visits.tile_of, visits.is_within
    functions = make_score_functions(features, dtype)
    score_of, kept = functions.score_of, functions.kept
    dropout, hidden = features.dropout, dtype.type(HIDDEN)

    def flash1_forward(q, k, v, out, lse, row_sum, row_max, scale, extras):
        """Fold one key tile after the other into the output of every query row that sees it.

        Computes: O = dropout(softmax(MASK(τ Q Kᵀ))) V and L for one (batch, head)
        Source: FlashAttention, appendix B, Algorithm 2; the tiles that it skips, Algorithm 5
        Grid: batch · heads, and that for each packed sequence
        Block: threads, any number
        One thread does: every threads-th element of S and of O; the statistics of every
            threads-th row
        Shared: K_j, V_j, Q_i, O_i, S, and four numbers a query row
        Registers: one sum
        Global traffic: reads and writes O, l and m once for each key tile, reads Q likewise; reads
            K and V once, and a mask once
        Needs: head_dim and value_dim as compiled; ``forward_elements`` of shared memory
        """
        k_tile = cuda.shared.array((block_k, key_pitch), real)  # (block_k, head_dim)
        v_tile = cuda.shared.array((block_k, value_pitch), real)  # (block_k, value_dim)
        q_tile = cuda.shared.array((block_q, key_pitch), real)  # (block_q, head_dim)
        o_tile = cuda.shared.array((block_q, value_pitch), real)  # (block_q, value_dim)
        s = cuda.shared.array((block_q, score_pitch), real)  # (block_q, block_k)
        m_tile = cuda.shared.array(block_q, real)  # (block_q,), the row's maximum in this tile
        old_weight = cuda.shared.array(block_q, real)  # (block_q,)
        new_weight = cuda.shared.array(block_q, real)  # (block_q,)
        inverse = cuda.shared.array(block_q, real)  # (block_q,)
        thread = cuda.threadIdx.x
        items, heads = q.shape[0] * q.shape[1], q.shape[1]
        item, sequence = cuda.blockIdx.x % items, cuda.blockIdx.x // items
        b, h = item // heads, item % heads
        flat, _, first_q, seq_q, first_k, seq_k = place(
            sequence, item, q.shape[2], k.shape[2], extras
        )
        q, out = part(q, first_q, seq_q), part(out, first_q, seq_q)
        k, v = part(k, first_k, seq_k), part(v, first_k, seq_k)
        lse = part(lse, first_q, seq_q)
        row_sum, row_max = part(row_sum, first_q, seq_q), part(row_max, first_q, seq_q)
        num_k_tiles = ceil_div(seq_k, block_k)

        # 3: O = 0, l = 0, m = -inf in global memory
        for e in range(thread, seq_q * value_dim, threads):
            out[b, h, e // value_dim, e % value_dim] = zero
        for row in range(thread, seq_q, threads):
            row_sum[b, h, row], row_max[b, h, row] = zero, minus_inf

        # 6: for 1 <= j <= T_c
        for j in range(num_k_tiles):
            col = j * block_k
            cols = min(block_k, seq_k - col)  # 4: the last tile may be short
            # 7: load K_j, V_j
            for e in range(thread, cols * head_dim, threads):
                c, d = e // head_dim, e % head_dim
                k_tile[c, d] = k[b, h, col + c, d]
            for e in range(thread, cols * value_dim, threads):
                c, d = e // value_dim, e % value_dim
                v_tile[c, d] = v[b, h, col + c, d]
            # 8: for 1 <= i <= T_r, but only those that see a column of the tile
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
                cuda.syncthreads()  # O, l, m are written; Q, O, S of the last tile are used up
                # 9: load Q_i, O_i; l_i and m_i go to a register of the thread that has the row
                for e in range(thread, rows * head_dim, threads):
                    r, d = e // head_dim, e % head_dim
                    q_tile[r, d] = q[b, h, row + r, d]
                for e in range(thread, rows * value_dim, threads):
                    r, d = e // value_dim, e % value_dim
                    o_tile[r, d] = out[b, h, row + r, d]
                cuda.syncthreads()  # K_j, Q_i are complete before any thread multiplies them
                # TASK 5.4: Lines 10 to 13, a barrier wherever another thread reads what was written.
                for e in range(thread, block_q * block_k, threads):
                    r, c = e // block_k, e % block_k
                    if r < rows and c < cols:
                        # 10: S = τ Q_i K_jᵀ
                        total = zero
                        for d in range(head_dim):
                            total += q_tile[r, d] * k_tile[c, d]
                        # 11: MASK(S), and before it what the other options make of a score
                        s[r, c] = score_of(scale * total, flat, b, h, row + r, col + c, extras)
                cuda.syncthreads()  # S is complete before a thread reads a whole row of it
                # 12: m~ = rowmax(S)
                for r in range(thread, rows, threads):
                    largest = minus_inf
                    for c in range(cols):
                        largest = max(largest, s[r, c])
                    m_tile[r] = largest
                cuda.syncthreads()  # m~ is known before any thread subtracts it
                # 12: P~ = exp(S - m~); what is hidden stays out of all sums, its key may be NaN
                for e in range(thread, block_q * block_k, threads):
                    r, c = e // block_k, e % block_k
                    if r < rows and c < cols:
                        score = s[r, c]
                        p = real(math.exp(score - real(shift_of(m_tile[r]))))
                        s[r, c] = hidden if score == minus_inf else p
                cuda.syncthreads()  # P~ is complete before a thread adds up a row of it
                for r in range(thread, rows, threads):
                    # 12: l~ = rowsum(P~)
                    tile_sum = zero
                    for c in range(cols):
                        if s[r, c] != hidden:
                            tile_sum += s[r, c]
                    # 13: m_new = max(m, m~), l_new = e^(m - m_new) l + e^(m~ - m_new) l~
                    old_max, old_sum = row_max[b, h, row + r], row_sum[b, h, row + r]
                    new_max = max(old_max, m_tile[r])
                    shift = real(shift_of(new_max))
                    rescale = real(math.exp(old_max - shift))
                    tile_scale = real(math.exp(m_tile[r] - shift))
                    new_sum = rescale * old_sum + tile_scale * tile_sum
                    old_weight[r], new_weight[r] = rescale * old_sum, tile_scale
                    inverse[r] = real(inverse_sum(new_sum))
                    # 16: write l_i = l_new, m_i = m_new
                    row_sum[b, h, row + r], row_max[b, h, row + r] = new_sum, new_max
                cuda.syncthreads()  # l~ is added up, and the factors of each row are known
                # END TASK 5.4
                # 14: P~ = dropout(P~)
                if dropout:
                    # TASK 5.6: Line 14: times kept(…), after l~ is summed; then a barrier.
                    for e in range(thread, block_q * block_k, threads):
                        r, c = e // block_k, e % block_k
                        if r < rows and c < cols and s[r, c] != hidden:
                            s[r, c] *= kept(flat, row + r, col + c, extras)
                    cuda.syncthreads()  # all of P~ is dropped before a thread reads a row of it
                    # END TASK 5.6
                # TASK 5.4: Line 15: P~ V_j and the old O_i, weighted; what is hidden stays out.
                # 15: write O_i = diag(l_new)^-1 (diag(l) e^(m - m_new) O_i + e^(m~ - m_new) P~ V_j)
                for e in range(thread, rows * value_dim, threads):
                    r, d = e // value_dim, e % value_dim
                    total = zero
                    for c in range(cols):
                        if s[r, c] != hidden:
                            total += s[r, c] * v_tile[c, d]
                    total = old_weight[r] * o_tile[r, d] + new_weight[r] * total
                    out[b, h, row + r, d] = inverse[r] * total
                # END TASK 5.4
            cuda.syncthreads()  # all have read K_j and V_j before the next tiles replace them
        # 19: return O, and L = m + log l
        for row in range(thread, seq_q, threads):
            shift = real(shift_of(row_max[b, h, row]))
            lse[b, h, row] = log_sum_exp(shift, row_sum[b, h, row])

    four, three = array_type(dtype, 4), array_type(dtype, 3)
    extras = extras_type(features, dtype)
    signature = void(four, four, four, four, three, three, three, real, extras)
    return Kernel(flash1_forward, signature, threads)


def forward(problem: Problem, tile: Tile, operands: Operands) -> None:
    """Fill out and lse.

    Args:
        problem: The checked call.
        tile: (block_q, block_k), B_r and B_c in the paper.
        operands: On the device, q, k, v and what the options need, and out and lse to be written.
    """
    row_sum = empty_device(tuple(operands.lse.shape), problem.dtype)  # l
    row_max = empty_device(tuple(operands.lse.shape), problem.dtype)  # m
    dims, threads = (problem.head_dim, problem.value_dim), SIZES.flash1_threads
    kernel = forward_kernel(*tile, *dims, threads, problem.dtype, features_of(problem))
    blocks, extras = grid_and_extras(problem, operands, tile)
    kernel[blocks, threads](
        operands.q, operands.k, operands.v, operands.out, operands.lse, row_sum, row_max,
        problem.scale, extras,
    )  # fmt: skip
