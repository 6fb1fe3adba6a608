"""Attention by the textbook on CUDA: scores and probabilities lie in global memory as matrices.

Forward three launches: S = τ Q Kᵀ, softmax in place, O = P V.  Backward the same product five times, and
in between one kernel that turns S and dP into P and dS, in place.  The product is the one of the tensors'
``@``, tiled in shared memory: a baseline that is slow for its traffic alone.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import int64, void

from kernels.cuda import product
from kernels.cuda.arrays import device_view, element_strides, empty_device
from kernels.cuda.block import RowBlock, make_row_folds
from kernels.cuda.device import (
    Kernel,
    array_type,
    inverse_sum,
    is_visible,
    log_sum_exp,
    scalar_type,
    shift_of,
    why_too_large,
)
from kernels.cuda.register_tiles import round_up
from kernels.cuda.sizes import SIZES, ProductTile
from kernels.problem import Problem
from kernels.targets import cuda, dynamic_shared_memory_bytes


@cache
def softmax_kernel(threads: int, dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that turns scores into probabilities, for one dtype."""
    real, zero, minus_inf = scalar_type(dtype), dtype.type(0), dtype.type(-math.inf)
    block = RowBlock(threads, rows=1)
    slots, (row_max_of, row_sum_of) = block.slots, make_row_folds(block)

    def softmax(scores, lse, diagonal):
        """Replace each row of scores by its softmax over the columns that the row sees.

        Computes: P = softmax(S) in place; L = m + log l
        Source: FlashAttention, Algorithm 0, line 2
        Grid: batch · heads · seq_q
        Block: threads, whole warps
        One thread does: every threads-th element of one row
        Shared: one element a warp
        Registers: the row's maximum and sum
        Global traffic: reads S three times and writes it twice; writes L once
        Needs: warp shuffles, for which the simulator has a plain form
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        thread = cuda.threadIdx.x
        heads, seq_q, seq_k = scores.shape[1], scores.shape[2], scores.shape[3]
        row, item = cuda.blockIdx.x % seq_q, cuda.blockIdx.x // seq_q
        batch, head = item // heads, item % heads

        # m = rowmax(S)
        largest = minus_inf
        for col in range(thread, seq_k, threads):
            if is_visible(row, col, diagonal):
                largest = max(largest, scores[batch, head, row, col])
        shift = real(shift_of(row_max_of(partial, largest)))
        # P = exp(S - m), l = rowsum(P)
        total = zero
        for col in range(thread, seq_k, threads):
            p = zero
            if is_visible(row, col, diagonal):
                p = real(math.exp(scores[batch, head, row, col] - shift))
            scores[batch, head, row, col] = p
            total += p
        row_sum = row_sum_of(partial, total)
        # P = diag(l)^-1 P     L = m + log l
        inverse = real(inverse_sum(row_sum))
        for col in range(thread, seq_k, threads):
            scores[batch, head, row, col] *= inverse
        if thread == 0:
            lse[batch, head, row] = log_sum_exp(shift, row_sum)

    return Kernel(softmax, void(array_type(dtype, 4), array_type(dtype, 3), int64))


@cache
def softmax_backward_kernel(threads: int, dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that recomputes probabilities and differentiates them, for one dtype."""
    real, zero = scalar_type(dtype), dtype.type(0)
    block = RowBlock(threads, rows=1)
    slots, (_, row_sum_of) = block.slots, make_row_folds(block)

    def softmax_backward(dout, out, lse, scores, dp, diagonal):
        """Replace scores by probabilities, and their gradient dP by that of the scores.

        Computes: P = exp(S - L) and dS = P ∘ (dP - D) in place, D = rowsum(dO ∘ O)
        Source: FlashAttention, appendix B.2; FlashAttention-2, Algorithm 2, lines 4, 11 and 14
        Grid: batch · heads · seq_q
        Block: threads, whole warps
        One thread does: every threads-th element of one row
        Shared: one element a warp
        Registers: D
        Global traffic: reads and writes S and dP once; reads O and dO once
        Needs: warp shuffles, for which the simulator has a plain form
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        thread = cuda.threadIdx.x
        heads, seq_q, seq_k = scores.shape[1], scores.shape[2], scores.shape[3]
        row, item = cuda.blockIdx.x % seq_q, cuda.blockIdx.x // seq_q
        batch, head = item // heads, item % heads

        # D = rowsum(dO ∘ O)
        total = zero
        for i in range(thread, out.shape[3], threads):
            total += dout[batch, head, row, i] * out[batch, head, row, i]
        delta = row_sum_of(partial, total)
        shift = real(shift_of(lse[batch, head, row]))
        for col in range(thread, seq_k, threads):
            # P = exp(S - L)
            p = zero
            if is_visible(row, col, diagonal):
                p = real(math.exp(scores[batch, head, row, col] - shift))
            scores[batch, head, row, col] = p
            # dS = P ∘ (dP - D)
            dp[batch, head, row, col] = p * (dp[batch, head, row, col] - delta)

    four, three = array_type(dtype, 4), array_type(dtype, 3)
    return Kernel(softmax_backward, void(four, four, three, four, four, int64))


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why this rung cannot run with a tile, or None."""
    own = _product_tile(tile or SIZES.product_tile)
    tiles = SIZES.product_tiles[problem.dtype.itemsize] if own is None else (own,)
    threads = max(each.threads for each in tiles)
    if threads > product.MAX_THREADS:
        return f"tile {tile} needs {threads} threads a block, the most is {product.MAX_THREADS}"
    needed = problem.dtype.itemsize * max(product.shared_elements(each) for each in tiles)
    return why_too_large(tile, needed, dynamic_shared_memory_bytes())


def _product_tile(tile: tuple[int, int]) -> ProductTile | None:
    """Return the products' tile for one that a caller asks for; None leaves it to the table.

    Its sides are rounded up to what the threads of a block can share evenly.
    """
    if tile == SIZES.product_tile:
        return None
    return ProductTile(
        round_up(tile[0], 16), round_up(tile[1], 16), depth=4, own_rows=4, own_cols=4
    )


def _multiply(tile: tuple[int, int], a: Any, b: Any, out: Any, factor: float) -> None:
    """Launch the product of two batches of matrices."""
    product.multiply(
        _flat(out), element_strides(out), _flat(a), element_strides(a), _flat(b), element_strides(b),
        (*out.shape, a.shape[3]), factor, _product_tile(tile),
    )  # fmt: skip


def _flat(array: Any) -> Any:
    """View the memory of an array as one dimension, from its first element to its last."""
    steps = element_strides(array)
    last = sum((size - 1) * step for size, step in zip(array.shape, steps, strict=True))
    return device_view(array, (last + 1,), (1,))


def _swap(a: Any) -> Any:
    """View the last two dimensions exchanged."""
    *lead, rows, cols = a.shape
    *steps, row_step, col_step = element_strides(a)
    return device_view(a, (*lead, cols, rows), (*steps, col_step, row_step))


def forward(
    problem: Problem, tile: tuple[int, int], q: Any, k: Any, v: Any, out: Any, lse: Any
) -> None:
    """Fill out and lse; takes memory for the scores, batch · heads · seq_q · seq_k elements.

    Args:
        problem: The checked call.
        tile: Rows and columns of a block of the products, rounded up.
        q: (batch, heads, seq_q, head_dim), any strides, on the device as all the others.
        k: (batch, heads, seq_k, head_dim), any strides.
        v: (batch, heads, seq_k, value_dim), any strides.
        out: (batch, heads, seq_q, value_dim), written.
        lse: (batch, heads, seq_q), written.
    """
    batch, heads, seq_q = lse.shape
    scores = empty_device((batch, heads, seq_q, problem.seq_k), problem.dtype)
    # 1: S = τ Q Kᵀ
    _multiply(tile, q, _swap(k), scores, problem.scale)
    # 2: P = softmax(S)
    softmax = softmax_kernel(SIZES.row_threads, problem.dtype)
    softmax[batch * heads * seq_q, SIZES.row_threads](scores, lse, problem.diagonal)
    # 3: O = P V
    _multiply(tile, scores, v, out, 1.0)


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
    """Fill dq, dk and dv; takes twice the memory of the scores.  Arguments as in the forward pass."""
    batch, heads, seq_q = lse.shape
    scores = empty_device((batch, heads, seq_q, problem.seq_k), problem.dtype)
    dp = empty_device((batch, heads, seq_q, problem.seq_k), problem.dtype)
    # S = τ Q Kᵀ
    _multiply(tile, q, _swap(k), scores, problem.scale)
    # O = P V: dP = dO Vᵀ
    _multiply(tile, dout, _swap(v), dp, 1.0)
    # P = softmax(S): dS = P ∘ (dP - D)
    softmax_backward = softmax_backward_kernel(SIZES.row_threads, problem.dtype)
    softmax_backward[batch * heads * seq_q, SIZES.row_threads](
        dout, out, lse, scores, dp, problem.diagonal
    )
    probs, ds = scores, dp  # (batch, heads, seq_q, seq_k)
    # O = P V: dV = Pᵀ dO
    _multiply(tile, _swap(probs), dout, dv, 1.0)
    # S = τ Q Kᵀ: dQ = τ dS K, dK = τ dSᵀ Q
    _multiply(tile, ds, k, dq, problem.scale)
    _multiply(tile, _swap(ds), q, dk, problem.scale)
