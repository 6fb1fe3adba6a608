"""Textbook attention on CUDA, with scores and probabilities as matrices in global memory.

The forward pass has three launches: S = τ Q Kᵀ, softmax in place, O = P V.  The backward pass has five
products, and between them one kernel that replaces S and dP by P and dS.  The products are those of the
tensors' ``@``, tiled in shared memory, so that the baseline is slow only because of its memory traffic.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.options.score_functions import (
    extras_type,
    make_row_end,
    make_score_functions,
)
from kernels.cuda.device.one_source import numbers_of_mods, shift_of
from kernels.cuda.device.row_folds import RowBlock, make_row_folds
from kernels.cuda.device.shared_tiles import round_up
from kernels.cuda.device.vector import MINUS
from kernels.cuda.matmul import cuda_cores
from kernels.cuda.runtime.arrays import device_view, element_strides, empty_device
from kernels.cuda.runtime.kernel import Kernel, array_type, scalar_type, why_too_large
from kernels.cuda.runtime.sizes import SIZES, ProductTile
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.targets import cuda, dynamic_shared_memory_bytes
from kernels.runtime.types import void
from kernels.scores.program import PLAIN, Features, Place


@cache
def softmax_kernel(threads: int, dtype: np.dtype[Any], features: Features = PLAIN) -> Kernel:
    """Return the kernel that turns scores into probabilities, for one dtype and set of options."""
    real, zero, minus_inf = scalar_type(dtype), dtype.type(0), dtype.type(-math.inf)
    block = RowBlock(threads, rows=1)
    slots, (row_max_of, row_sum_of) = block.slots, make_row_folds(block)
    functions = make_score_functions(features, dtype)
    score_of, kept = functions.score_of, functions.kept
    end_row, minus = make_row_end(features, dtype), MINUS[dtype]

    def softmax(scores, lse, lse_rest, extras):
        """Replace each row of scores by its softmax over the visible columns, with dropout.

        Computes: P = dropout(softmax(MASK(S))) in place; L = m + log l
        Source: FlashAttention, Algorithm 0, line 2
        Grid: batch · heads · seq_q
        Block: threads, whole warps
        One thread does: every threads-th element of one row
        Shared: one element a warp
        Registers: the row's maximum and sum
        Global traffic: reads S three times and writes it twice; reads a mask twice; writes lse and its rest
            once
        Needs: warp shuffles
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        thread = cuda.threadIdx.x
        heads, seq_q, seq_k = scores.shape[1], scores.shape[2], scores.shape[3]
        row, item = cuda.blockIdx.x % seq_q, cuda.blockIdx.x // seq_q
        b, h = item // heads, item % heads
        batch, head = numbers_of_mods(item, extras)

        # MASK(S), and before it what the other options make of a score; m = rowmax(S)
        largest = minus_inf
        for col in range(thread, seq_k, threads):
            place = Place(b, h, batch, head, row, col)
            score = score_of(scores[b, h, row, col], place, extras)
            largest = max(largest, score)
        shift = real(shift_of(row_max_of(partial, largest)))
        # P = exp(S - m), l = rowsum(P)
        total = zero
        for col in range(thread, seq_k, threads):
            place = Place(b, h, batch, head, row, col)
            score = score_of(scores[b, h, row, col], place, extras)
            p = real(math.exp(minus(score, shift)))
            scores[b, h, row, col] = p
            total += p
        row_sum = row_sum_of(partial, total)
        # P = dropout(diag(l)^-1 P)     L = m + log l
        inverse, row_lse, row_rest = end_row(row_sum, shift, b, h, extras)
        for col in range(thread, seq_k, threads):
            place = Place(b, h, batch, head, row, col)
            scores[b, h, row, col] *= inverse * kept(place, extras)
        if thread == 0:
            lse[b, h, row], lse_rest[b, h, row] = row_lse, row_rest

    four, three = array_type(dtype, 4), array_type(dtype, 3)
    return Kernel(softmax, void(four, three, three, extras_type(features, dtype)))


@cache
def softmax_backward_kernel(
    threads: int, dtype: np.dtype[Any], features: Features = PLAIN, has_dlse: bool = False
) -> Kernel:
    """Return the kernel that recomputes probabilities and differentiates them, for one dtype."""
    real, zero, minus = scalar_type(dtype), dtype.type(0), MINUS[dtype]
    block = RowBlock(threads, rows=1)
    slots, (_, row_sum_of) = block.slots, make_row_folds(block)
    functions = make_score_functions(features, dtype)
    score_and_slope, kept = functions.score_and_slope, functions.kept

    def softmax_backward(dout, out, lse, lse_rest, dlse, scores, dp, extras):
        """Replace scores by probabilities with dropout, and dP by the gradient of the scores.

        Computes: P ∘ Z, P = exp(MASK(S) - L), and dS = P ∘ (dP ∘ Z - D) in place, with Z the dropout
            and D = rowsum(dO ∘ O) less the gradient of L
        Source: FlashAttention, appendix B.2 and B.4; FlashAttention-2, Algorithm 2, lines 4, 11, 14
        Grid: batch · heads · seq_q
        Block: threads, whole warps
        One thread does: every threads-th element of one row
        Shared: one element a warp
        Registers: D
        Global traffic: reads and writes S and dP once; reads a mask, O and dO once
        Needs: warp shuffles
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        thread = cuda.threadIdx.x
        heads, seq_q, seq_k = scores.shape[1], scores.shape[2], scores.shape[3]
        row, item = cuda.blockIdx.x % seq_q, cuda.blockIdx.x // seq_q
        b, h = item // heads, item % heads
        batch, head = numbers_of_mods(item, extras)

        # D = rowsum(dO ∘ O), less the gradient of L
        total = zero
        for i in range(thread, out.shape[3], threads):
            total += dout[b, h, row, i] * out[b, h, row, i]
        delta = row_sum_of(partial, total)
        if has_dlse:
            delta -= dlse[b, h, row]
        shift, rest = real(shift_of(lse[b, h, row])), lse_rest[b, h, row]
        for col in range(thread, seq_k, threads):
            # MASK(S), and before it what the other options make of a score
            place = Place(b, h, batch, head, row, col)
            score, slope = score_and_slope(scores[b, h, row, col], place, extras)
            # P = exp(S - L)
            p = real(math.exp(minus(score, shift) - rest))
            # O = (P ∘ Z) V: dP = dP ∘ Z     P = softmax(S): dS = P ∘ (dP - D)
            z = kept(place, extras)
            scores[b, h, row, col] = p * z
            dp[b, h, row, col] = p * (dp[b, h, row, col] * z - delta) * slope

    four, three = array_type(dtype, 4), array_type(dtype, 3)
    extras = extras_type(features, dtype)
    return Kernel(softmax_backward, void(four, four, *[three] * 3, four, four, extras))


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why this rung cannot run a problem with a tile, or None."""
    if problem.sequences is not None:
        return "it multiplies whole matrices and cannot separate packed sequences"
    chosen = _product_tile(tile or SIZES.product_tile)
    tiles = SIZES.product_tiles[problem.dtype.itemsize] if chosen is None else (chosen,)
    threads = max(each.threads for each in tiles)
    if threads > cuda_cores.MAX_THREADS:
        return f"tile {tile} needs {threads} threads a block, the most is {cuda_cores.MAX_THREADS}"
    needed = problem.dtype.itemsize * max(cuda_cores.shared_elements(each) for each in tiles)
    return why_too_large(tile, needed, dynamic_shared_memory_bytes())


def _product_tile(tile: tuple[int, int]) -> ProductTile | None:
    """Return the tile of the products for the caller's tile; None means that the table decides.

    Its sides are rounded up so that the threads of a block share them evenly.
    """
    if tile == SIZES.product_tile:
        return None
    return ProductTile(
        round_up(tile[0], 16), round_up(tile[1], 16), depth=4, own_rows=4, own_cols=4
    )


def product_blocks(tile: tuple[int, int] | None) -> tuple[int, int]:
    """Return the rows and columns of a block of the products, for the caller's tile or None."""
    chosen = _product_tile(tile or SIZES.product_tile)
    return SIZES.product_tile if chosen is None else (chosen.rows, chosen.cols)


def _multiply(tile: tuple[int, int], a: Any, b: Any, out: Any, factor: float) -> None:
    """Launch the product of two batches of matrices."""
    cuda_cores.multiply(
        _flat(out), element_strides(out), _flat(a), element_strides(a), _flat(b), element_strides(b),
        (*out.shape, a.shape[3]), factor=factor, tile=_product_tile(tile),
    )  # fmt: skip


def _flat(array: Any) -> Any:
    """View the memory of an array as one dimension, from its first element to its last."""
    steps = element_strides(array)
    last = sum((size - 1) * step for size, step in zip(array.shape, steps, strict=True))
    return device_view(array, (last + 1,), (1,))


def _swap(a: Any) -> Any:
    """View an array with its last two dimensions exchanged."""
    *lead, rows, cols = a.shape
    *steps, row_step, col_step = element_strides(a)
    return device_view(a, (*lead, cols, rows), (*steps, col_step, row_step))


def _empty_scores(problem: Problem, operands: Operands) -> Any:
    return empty_device((*operands.lse.shape, problem.seq_k), problem.dtype)


def forward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out, lse and lse_rest; allocates the scores, batch · heads · seq_q · seq_k elements.

    ``tile`` has the rows and columns of a block of the products, rounded up.
    """
    features, extras = problem.features, make_extras(problem, operands, *tile)
    scores = _empty_scores(problem, operands)  # (batch, heads, seq_q, seq_k)
    # 1: S = τ Q Kᵀ
    _multiply(tile, operands.q, _swap(operands.k), scores, problem.scale)
    # 2: P = softmax(S)
    softmax = softmax_kernel(SIZES.row_threads, problem.dtype, features)
    rows = math.prod(operands.lse.shape)
    softmax[rows, SIZES.row_threads](scores, operands.lse, operands.lse_rest, extras)
    # 3: O = P V
    _multiply(tile, scores, operands.v, operands.out, 1.0)


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv; allocates twice the memory of the scores.  ``tile`` as for :func:`forward`."""
    o, has_dlse = operands, operands.dlse is not None
    features, extras = problem.features, make_extras(problem, operands, *tile)
    scores, dp = _empty_scores(problem, o), _empty_scores(problem, o)
    # S = τ Q Kᵀ
    _multiply(tile, o.q, _swap(o.k), scores, problem.scale)
    # O = P V: dP = dO Vᵀ
    _multiply(tile, o.dout, _swap(o.v), dp, 1.0)
    # P = softmax(S): dS = P ∘ (dP - D)
    softmax_backward = softmax_backward_kernel(SIZES.row_threads, problem.dtype, features, has_dlse)
    softmax_backward[math.prod(o.lse.shape), SIZES.row_threads](
        o.dout, o.out, o.lse, o.lse_rest, o.dlse if has_dlse else o.lse, scores, dp, extras
    )
    probs, ds = scores, dp  # (batch, heads, seq_q, seq_k)
    # O = P V: dV = Pᵀ dO
    _multiply(tile, _swap(probs), o.dout, o.dv, 1.0)
    # S = τ Q Kᵀ: dQ = τ dS K, dK = τ dSᵀ Q
    _multiply(tile, ds, o.k, o.dq, problem.scale)
    _multiply(tile, _swap(ds), o.q, o.dk, problem.scale)
