"""FlashAttention (2022) on CUDA as printed: key tiles outside, query tiles inside, one block for each head.

The comments give the line numbers and letters of appendix B: Algorithm 2 forward, which is Algorithm 1
with a scale τ, MASK and dropout, and Algorithm 4 backward, where the forward line stands above each
gradient line.  The backward pass reads L = m + log l in place of l and m.  One block walks over all tiles
of its head, so that it may add to O and dQ in global memory without atomics.  The rung has the options of
the paper, scale, mask and dropout, and no others.

The paper leaves two things open.  M counts the four tiles of d columns that Algorithm 1 keeps on chip, but
neither the tile of scores nor the three additional tiles of the backward pass: :func:`paper_tiles` inserts
only a part of the shared memory.  If values are not as wide as keys, d is the larger width.

Measured on an H200 (float32, N = 4096, d = 64, 64 heads): 360 ms forward, partly because there are only as
many blocks as heads; naive takes 17.1 ms.  Both passes together allocate 257 MiB in addition to the
operands, naive 8,449 MiB.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common import geometry
from kernels.cuda.attention.flash1_tiles import (
    Statistics,
    clear,
    clear_results,
    clear_tile,
    dot_columns,
    dot_row_column,
    dot_rows,
    load_tile,
    load_tiles,
    row_max_of,
    row_sum_of,
    store_tiles,
    tile_rows,
)
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.options.score_functions import extras_type, make_score_functions
from kernels.cuda.attention.options.visits import HeadRows
from kernels.cuda.attention.register_tiles import BackwardInputs
from kernels.cuda.device.one_source import (
    batch_and_head,
    ceil_div,
    first_tile,
    inverse_sum,
    log_sum_exp,
    numbers_of_mods,
    shift_of,
)
from kernels.cuda.device.vector import MINUS
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import (
    Kernel,
    array_type,
    scalar_type,
    why_too_large,
)
from kernels.cuda.runtime.sizes import SIZES
from kernels.problem.operands import Operands
from kernels.problem.options import OPTIONS, field_of
from kernels.problem.question import Problem
from kernels.runtime.targets import cuda, shared_memory_bytes
from kernels.runtime.types import types, void
from kernels.scores.program import PLAIN, Features, Place

Tile = tuple[int, int]


def paper_tile(shared_elements: int, dim: int) -> Tile:
    """Return (B_r, B_c) for an on-chip memory of M elements; Algorithm 1, line 1."""
    block_k = geometry.ceil_div(shared_elements, 4 * dim)
    return min(block_k, dim), block_k


def paper_tiles(elements: int, head_dim: int, value_dim: int) -> tuple[Tile, Tile]:
    """Return the tiles of the forward and of the backward pass for a number of on-chip elements.

    The forward pass leaves a third for S; the backward pass needs three more tiles and two of scores.
    """
    dim = max(head_dim, value_dim)
    return paper_tile(elements * 2 // 3, dim), paper_tile(elements * 2 // 5, dim)


def tile(problem: Problem, is_backward: bool = False) -> Tile:
    """Return (block_q, block_k) of the forward pass, or of the backward pass."""
    elements = min(SIZES.flash1_bytes, shared_memory_bytes()) // problem.dtype.itemsize
    return paper_tiles(elements, problem.head_dim, problem.value_dim)[is_backward]


def backward_tile(problem: Problem) -> Tile:
    """Return (block_q, block_k) of the backward pass."""
    return tile(problem, is_backward=True)


def forward_elements(tile: Tile, head_dim: int, value_dim: int) -> int:
    """Return the number of elements of shared memory of the forward kernel."""
    block_q, block_k = tile
    tiles = (block_q + block_k) * (head_dim + 1 + value_dim + 1)
    return tiles + block_q * (block_k + 1) + 4 * block_q


def backward_elements(tile: Tile, head_dim: int, value_dim: int) -> int:
    """Return the number of elements of shared memory of the backward kernel."""
    block_q, block_k = tile
    keys = block_k * (head_dim + 1 + value_dim + 1 + head_dim + value_dim)
    queries = block_q * (head_dim + 1 + 2 * (value_dim + 1))
    return keys + queries + 2 * block_q * (block_k + 1) + 3 * block_q


def why_not(problem: Problem, requested_tile: Tile | None) -> str | None:
    """Return why this rung cannot run a problem with a tile (None: its own), or None."""
    later = [name for name, option in OPTIONS.items() if not option.in_2022]
    absent = ["window_size"] if problem.lower > -problem.seq_q else []
    absent += [name for name in later if getattr(problem, field_of(name), None)]
    absent += ["packed sequences"] if problem.sequences is not None else []
    if absent:
        return (
            f"it implements the algorithm of 2022, which has no {' or '.join(absent)}; 'flash2' has"
        )
    dims = problem.head_dim, problem.value_dim
    for elements, own_tile in (forward_elements, tile), (backward_elements, backward_tile):
        block = requested_tile or own_tile(problem)
        if reason := why_too_large(block, elements(block, *dims) * problem.dtype.itemsize):
            return reason
    return None


class Saved(NamedTuple):
    """The results of the forward pass that the backward pass reads, and the gradient of L."""

    out: Any
    lse: Any
    lse_rest: Any
    dlse: Any


@cache
def forward_kernel(
    block_q: int, block_k: int, head_dim: int, value_dim: int, threads: int,
    dtype: np.dtype[Any], features: Features = PLAIN,
) -> Kernel:  # fmt: skip
    """Return the forward kernel for one tile size, pair of dims, dtype and set of options."""
    real, dims = scalar_type(dtype), (head_dim, value_dim)
    # One column more: threads that walk down a column then meet in different banks.
    key_pitch, value_pitch, score_pitch = head_dim + 1, value_dim + 1, block_k + 1
    (score_of, _, kept, _), has_dropout = make_score_functions(features, dtype), features.dropout

    def flash1_forward(q, k, v, out, statistics, scale, extras):
        """Fold one key tile after the other into the output of all query rows that attend to it.

        Computes: O = dropout(softmax(MASK(τ Q Kᵀ))) V and L for one (batch, head)
        Source: FlashAttention, appendix B, Algorithm 2
        Grid: batch · heads
        Block: threads, any number
        One thread does: every threads-th element of S and of O, every threads-th row's statistics
        Shared: K_j, V_j, Q_i, O_i, S, and four numbers a query row
        Registers: one sum
        Global traffic: reads Q, reads and writes O, l, m once a key tile; reads K, V and a mask once
        Needs: head_dim and value_dim as compiled; ``forward_elements`` of shared memory
        """
        lse, lse_rest, row_sum, row_max = statistics
        k_tile = cuda.shared.array((block_k, key_pitch), real)  # (block_k, head_dim)
        v_tile = cuda.shared.array((block_k, value_pitch), real)  # (block_k, value_dim)
        q_tile = cuda.shared.array((block_q, key_pitch), real)  # (block_q, head_dim)
        o_tile = cuda.shared.array((block_q, value_pitch), real)  # (block_q, value_dim)
        s = cuda.shared.array((block_q, score_pitch), real)  # (block_q, block_k)
        m_tile = cuda.shared.array(block_q, real)  # (block_q,), the row's maximum in this tile
        old_weight = cuda.shared.array(block_q, real)  # (block_q,)
        new_weight = cuda.shared.array(block_q, real)  # (block_q,)
        inverse = cuda.shared.array(block_q, real)  # (block_q,)
        thread, flat = cuda.threadIdx.x, cuda.blockIdx.x
        (b, h), (batch, head) = batch_and_head(flat, q.shape[1]), numbers_of_mods(flat, extras)
        seq_q, seq_k, num_q_tiles = q.shape[2], k.shape[2], ceil_div(q.shape[2], block_q)
        # 3: O = 0, l = 0, m = -inf in global memory
        clear_results(thread, threads, out, statistics, HeadRows(b, h, 0, seq_q), value_dim)
        # 6: for 1 <= j <= T_c
        for j in range(ceil_div(seq_k, block_k)):
            keys, col, cols = tile_rows(b, h, j, block_k, seq_k)
            # 7: load K_j, V_j
            load_tiles(thread, threads, (k, v), keys, dims, (k_tile, v_tile))
            # 8: for 1 <= i <= T_r, but only those that see a column of the tile
            for i in range(first_tile(col, block_q, seq_q, -extras.upper), num_q_tiles):
                queries, row, rows = tile_rows(b, h, i, block_q, seq_q)
                cuda.syncthreads()  # O, l, m are written; Q, O, S of the last tile are used up
                # 9: load Q_i, O_i; l_i and m_i go to a register of the thread that has the row
                load_tiles(thread, threads, (q, out), queries, dims, (q_tile, o_tile))
                cuda.syncthreads()  # K_j, Q_i are complete before any thread multiplies them
                # TASK 5.4: Lines 10 to 13 and 16; a barrier wherever another thread reads what was written.
                for e in range(thread, rows * block_k, threads):
                    r, c = e // block_k, e % block_k
                    if c < cols:
                        # 10: S = τ Q_i K_jᵀ     11: MASK(S)
                        score = scale * dot_rows(q_tile, r, k_tile, c, head_dim)
                        place = Place(b, h, batch, head, row + r, col + c)
                        s[r, c] = score_of(score, place, extras)
                cuda.syncthreads()  # S is complete before a thread reads a whole row of it
                # 12: m~ = rowmax(S), P~ = exp(S - m~)
                for r in range(thread, rows, threads):
                    m_tile[r] = row_max_of(s, r, cols)
                cuda.syncthreads()  # m~ is known before any thread subtracts it
                for e in range(thread, rows * block_k, threads):
                    r, c = e // block_k, e % block_k
                    if c < cols:
                        s[r, c] = real(math.exp(s[r, c] - real(shift_of(m_tile[r]))))
                cuda.syncthreads()  # P~ is complete before a thread adds up a row of it
                for r in range(thread, rows, threads):
                    # 12: l~ = rowsum(P~)     13: m_new = max(m,m~), l_new = e^(m-m_new) l + e^(m~-m_new) l~
                    old_max, old_sum = row_max[b, h, row + r], row_sum[b, h, row + r]
                    new_max = max(old_max, m_tile[r])
                    shift = real(shift_of(new_max))
                    old_weight[r] = real(math.exp(old_max - shift)) * old_sum
                    new_weight[r] = real(math.exp(m_tile[r] - shift))
                    new_sum = old_weight[r] + new_weight[r] * row_sum_of(s, r, cols)
                    inverse[r] = real(inverse_sum(new_sum))
                    # 16: write l_i = l_new, m_i = m_new
                    row_sum[b, h, row + r], row_max[b, h, row + r] = new_sum, new_max
                cuda.syncthreads()  # l~ is added up, and the factors of each row are known
                # END TASK 5.4
                # 14: P~ = dropout(P~)
                if has_dropout:
                    # TASK 5.6: Line 14: times kept(…), after l~ is summed; then a barrier.
                    for e in range(thread, rows * block_k, threads):
                        r, c = e // block_k, e % block_k
                        if c < cols:
                            s[r, c] *= kept(Place(b, h, batch, head, row + r, col + c), extras)
                    cuda.syncthreads()  # dropout is applied to all of P~ before a thread reads a row of it
                    # END TASK 5.6
                # TASK 5.4: Line 15: P~ V_j and the old O_i, weighted.
                # 15: write O_i = diag(l_new)^-1 (diag(l) e^(m - m_new) O_i + e^(m~ - m_new) P~ V_j)
                for e in range(thread, rows * value_dim, threads):
                    r, d = e // value_dim, e % value_dim
                    total = new_weight[r] * dot_row_column(s, r, v_tile, d, cols)
                    out[b, h, row + r, d] = inverse[r] * (total + old_weight[r] * o_tile[r, d])
                # END TASK 5.4
            cuda.syncthreads()  # all have read K_j and V_j before the next tiles replace them
        # 19: return O, and L = m + log l
        for row in range(thread, seq_q, threads):
            shift = real(shift_of(row_max[b, h, row]))
            lse[b, h, row], lse_rest[b, h, row] = log_sum_exp(shift, row_sum[b, h, row])

    four, three, extras = array_type(dtype, 4), array_type(dtype, 3), extras_type(features, dtype)
    statistics = types.NamedTuple([three] * 4, Statistics)
    return Kernel(flash1_forward, void(*[four] * 4, statistics, real, extras), threads)


@cache
def backward_kernel(
    block_q: int, block_k: int, head_dim: int, value_dim: int, threads: int,
    dtype: np.dtype[Any], features: Features = PLAIN, has_dlse: bool = False,
) -> Kernel:  # fmt: skip
    """Return the backward kernel for one tile size, pair of dims, dtype and set of options."""
    real, dims = scalar_type(dtype), (head_dim, value_dim)
    key_pitch, value_pitch, score_pitch = head_dim + 1, value_dim + 1, block_k + 1
    (score_of, _, kept, _), minus = make_score_functions(features, dtype), MINUS[dtype]

    def flash1_backward(inputs, saved, dq, dk, dv, scale, extras):
        """Collect dK and dV of one key tile after the other on chip, and add to dQ on the way.

        Computes: dQ, dK, dV for one (batch, head)
        Source: FlashAttention, appendix B, Algorithm 4
        Grid: batch · heads
        Block: threads, any number
        One thread does: every threads-th element of P and dS, of dQ, and of dK and dV; D of every
            threads-th row
        Shared: K_j, V_j, dK_j, dV_j, Q_i, O_i, dO_i, P, dS, lse_i, its rest and D_i
        Registers: two sums
        Global traffic: reads and writes dQ, and reads Q, O, dO and L, once for each key tile; reads
            K and V once, and a mask once; writes dK and dV once
        Needs: head_dim and value_dim as compiled; ``backward_elements`` of shared memory
        """
        (dout, q, k, v), (out, lse, lse_rest, dlse) = inputs, saved
        k_tile = cuda.shared.array((block_k, key_pitch), real)  # (block_k, head_dim)
        v_tile = cuda.shared.array((block_k, value_pitch), real)  # (block_k, value_dim)
        dk_acc = cuda.shared.array((block_k, head_dim), real)  # (block_k, head_dim)
        dv_acc = cuda.shared.array((block_k, value_dim), real)  # (block_k, value_dim)
        q_tile = cuda.shared.array((block_q, key_pitch), real)  # (block_q, head_dim)
        o_tile = cuda.shared.array((block_q, value_pitch), real)  # (block_q, value_dim)
        do_tile = cuda.shared.array((block_q, value_pitch), real)  # (block_q, value_dim)
        p = cuda.shared.array((block_q, score_pitch), real)  # (block_q, block_k)
        ds = cuda.shared.array((block_q, score_pitch), real)  # (block_q, block_k)
        shift = cuda.shared.array(block_q, real)  # (block_q,): lse
        rest = cuda.shared.array(block_q, real)  # (block_q,): its rest
        delta = cuda.shared.array(block_q, real)  # (block_q,): D
        thread, flat = cuda.threadIdx.x, cuda.blockIdx.x
        (b, h), (batch, head) = batch_and_head(flat, q.shape[1]), numbers_of_mods(flat, extras)
        seq_q, seq_k, num_q_tiles = q.shape[2], k.shape[2], ceil_div(q.shape[2], block_q)
        # 5: dQ = 0 in global memory
        clear(thread, threads, dq, HeadRows(b, h, 0, seq_q), head_dim)
        # 6: for 1 <= j <= T_c
        for j in range(ceil_div(seq_k, block_k)):
            keys, col, cols = tile_rows(b, h, j, block_k, seq_k)
            # 7: load K_j, V_j
            load_tiles(thread, threads, (k, v), keys, dims, (k_tile, v_tile))
            # 8: dK_j = 0, dV_j = 0 on chip
            clear_tile(thread, threads, dk_acc, cols, head_dim)
            clear_tile(thread, threads, dv_acc, cols, value_dim)
            # 9: for 1 <= i <= T_r, but only those that see a column of the tile
            for i in range(first_tile(col, block_q, seq_q, -extras.upper), num_q_tiles):
                queries, row, rows = tile_rows(b, h, i, block_q, seq_q)
                cuda.syncthreads()  # all have used Q, O, dO, P, dS, L and D of the last tile
                # 10: load Q_i, O_i, dO_i, L_i; dQ_i goes to a register of the thread that adds to it
                load_tiles(thread, threads, (q, out), queries, dims, (q_tile, o_tile))
                load_tile(thread, threads, dout, queries, value_dim, do_tile)
                for r in range(thread, rows, threads):
                    shift[r], rest[r] = real(shift_of(lse[b, h, row + r])), lse_rest[b, h, row + r]
                cuda.syncthreads()  # the tiles of i and j are complete before any thread reads them
                # 19: D_i = rowsum(dO_i ∘ O_i) minus the gradient of L_i; it depends on no other line
                # TASK 5.5: Line 19: dO_i · O_i of each row, less dlse if there is one; barrier.
                for r in range(thread, rows, threads):
                    total = dot_rows(do_tile, r, o_tile, r, value_dim)
                    delta[r] = total - dlse[b, h, row + r] if has_dlse else total
                cuda.syncthreads()  # D_i is known before any thread subtracts it
                # END TASK 5.5
                for e in range(thread, rows * block_k, threads):
                    r, c = e // block_k, e % block_k
                    if c < cols:
                        # TASK 5.5: Lines 11 to 20: P from L and not from a stored P; then dP and dS.
                        # 11: S = τ Q_i K_jᵀ     12: MASK(S)
                        score = scale * dot_rows(q_tile, r, k_tile, c, head_dim)
                        place = Place(b, h, batch, head, row + r, col + c)
                        score = score_of(score, place, extras)
                        # 13: P = diag(l)^-1 exp(S - m) = exp(S - L)
                        prob = real(math.exp(minus(score, shift[r]) - rest[r]))
                        # 14: Z     15: P ∘ Z
                        z = kept(place, extras)
                        p[r, c] = prob * z
                        # 17: dP = dO_i V_jᵀ, as O = (P ∘ Z) V
                        dp = dot_rows(do_tile, r, v_tile, c, value_dim)
                        # 18: dP = dP ∘ Z     20: dS = P ∘ (dP - D_i), as P = softmax(S)
                        ds[r, c] = prob * (dp * z - delta[r])
                        # END TASK 5.5
                cuda.syncthreads()  # P and dS are complete before rows and columns of them are read
                # TASK 5.5: Lines 16, 21, 22: one thread an element, so += needs no atomics.
                # 16: dV_j += (P ∘ Z)ᵀ dO_i, as O = (P ∘ Z) V
                for e in range(thread, cols * value_dim, threads):
                    c, d = e // value_dim, e % value_dim
                    dv_acc[c, d] += dot_columns(p, c, do_tile, d, rows)
                # 21: write dQ_i += τ dS K_j, as S = τ Q Kᵀ
                for e in range(thread, rows * head_dim, threads):
                    r, d = e // head_dim, e % head_dim
                    dq[b, h, row + r, d] += scale * dot_row_column(ds, r, k_tile, d, cols)
                # 22: dK_j += τ dSᵀ Q_i, as S = τ Q Kᵀ
                for e in range(thread, cols * head_dim, threads):
                    c, d = e // head_dim, e % head_dim
                    dk_acc[c, d] += scale * dot_columns(ds, c, q_tile, d, rows)
                # END TASK 5.5
            # 24: write dK_j, dV_j; each thread writes the elements that it has summed
            store_tiles(thread, threads, (dk_acc, dv_acc), (dk, dv), keys, dims)
            cuda.syncthreads()  # all have read K_j and V_j before the next tiles replace them

    four, three, extras = array_type(dtype, 4), array_type(dtype, 3), extras_type(features, dtype)
    inputs = types.NamedTuple([four] * 4, BackwardInputs)
    saved = types.NamedTuple([four, three, three, three], Saved)
    return Kernel(flash1_backward, void(inputs, saved, *[four] * 3, real, extras), threads)


def forward(problem: Problem, tile: Tile, operands: Operands) -> None:
    """Fill out, lse and lse_rest; allocates l and m.  ``tile`` is B_r and B_c of the paper."""
    o, dims, threads = operands, (problem.head_dim, problem.value_dim), SIZES.flash1_threads
    sums = [empty_device(tuple(o.lse.shape), problem.dtype) for _ in "lm"]
    kernel = forward_kernel(*tile, *dims, threads, problem.dtype, problem.features)
    extras = make_extras(problem, operands, *tile)
    launch = kernel[math.prod(o.q.shape[:2]), threads]
    launch(o.q, o.k, o.v, o.out, Statistics(o.lse, o.lse_rest, *sums), problem.scale, extras)


def backward(problem: Problem, tile: Tile, operands: Operands) -> None:
    """Fill dq, dk and dv."""
    o, dims, threads = operands, (problem.head_dim, problem.value_dim), SIZES.flash1_threads
    has_dlse, inputs = o.dlse is not None, BackwardInputs(o.dout, o.q, o.k, o.v)
    kernel = backward_kernel(*tile, *dims, threads, problem.dtype, problem.features, has_dlse)
    extras = make_extras(problem, operands, *tile)
    launch = kernel[math.prod(o.q.shape[:2]), threads]
    saved = Saved(o.out, o.lse, o.lse_rest, o.dlse if has_dlse else o.lse)
    launch(inputs, saved, o.dq, o.dk, o.dv, problem.scale, extras)
