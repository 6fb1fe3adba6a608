"""Attention by the textbook on CUDA: scores and probabilities lie in global memory as matrices.

Forward three launches: S = τ Q Kᵀ, softmax in place, O = P V.  Backward the same product kernel five
times, and in between one kernel that turns S and dP into P and dS, in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import int64, void

from kernels import geometry
from kernels.cuda.device import (
    Kernel,
    array_type,
    ceil_div,
    device_function,
    inverse_sum,
    is_visible,
    log_sum_exp,
    scalar_type,
    shift_of,
    why_too_large,
)
from kernels.cuda.sizes import SIZES
from kernels.problem import Problem
from kernels.targets import cuda, device_view, element_strides, empty_device

#: A block has no more, on any device.
MAX_THREADS = 1024


@cache
def product_kernel(block_rows: int, block_cols: int, dtype: np.dtype[Any]) -> Kernel:
    """Return the batched matrix product for one tile size and dtype."""
    real, zero = scalar_type(dtype), dtype.type(0)

    def product(a, b, out, factor):
        """Multiply (batch, heads, rows, depth) by (batch, heads, depth, cols), any strides.

        Computes: out[i, j] = factor · Σ_k a[i, k] b[k, j] for each batch and head
        Source: FlashAttention, Algorithm 0, lines 1 and 3
        Grid: batch · heads · ceil(rows / block_rows) · ceil(cols / block_cols)
        Block: (block_cols, block_rows); x runs along a row, so that neighbours read neighbours
        One thread does: one element of out
        Shared: (block_rows + block_cols) · block_cols elements
        Registers: one sum
        Global traffic: reads a ceil(cols / block_cols) times, b ceil(rows / block_rows) times;
            writes out once
        Needs: block_rows · block_cols <= 1024
        """
        a_tile = cuda.shared.array((block_rows, block_cols), real)  # (block_rows, block_cols)
        b_tile = cuda.shared.array((block_cols, block_cols), real)  # (block_cols, block_cols)
        tile_row, tile_col = cuda.threadIdx.y, cuda.threadIdx.x
        heads, rows, cols, depth = out.shape[1], out.shape[2], out.shape[3], a.shape[3]
        col_tiles = ceil_div(cols, block_cols)
        tiles = ceil_div(rows, block_rows) * col_tiles
        batch, head = cuda.blockIdx.x // tiles // heads, cuda.blockIdx.x // tiles % heads
        row = cuda.blockIdx.x % tiles // col_tiles * block_rows + tile_row
        col = cuda.blockIdx.x % col_tiles * block_cols + tile_col

        total = zero
        for start in range(0, depth, block_cols):
            if row < rows and start + tile_col < depth:
                a_tile[tile_row, tile_col] = a[batch, head, row, start + tile_col]
            for k in range(tile_row, block_cols, block_rows):
                if start + k < depth and col < cols:
                    b_tile[k, tile_col] = b[batch, head, start + k, col]
            cuda.syncthreads()  # both tiles are complete before any thread reads them
            if row < rows and col < cols:
                for k in range(min(block_cols, depth - start)):
                    total += a_tile[tile_row, k] * b_tile[k, tile_col]
            cuda.syncthreads()  # all have read the tiles before the next ones replace them
        if row < rows and col < cols:
            out[batch, head, row, col] = factor * total

    array = array_type(dtype, 4)
    return Kernel(product, void(array, array, array, real), block_rows * block_cols)


def _make_block_fold(combine: Callable[[Any, Any], Any]) -> Any:
    """Return the function by which a block folds one value of each thread.

    Args:
        combine: A device function of two numbers.
    """

    @device_function
    def block_fold(partial, value):
        """Return the fold to every thread.

        Args:
            partial: (threads,) in shared memory, a power of two.
            value: The thread's own.
        """
        thread = cuda.threadIdx.x
        partial[thread] = value
        cuda.syncthreads()  # every value is stored before a neighbour folds it
        half = cuda.blockDim.x // 2
        while half > 0:
            if thread < half:
                partial[thread] = combine(partial[thread], partial[thread + half])
            cuda.syncthreads()  # this round is complete before the next one reads it
            half //= 2
        result = partial[0]
        cuda.syncthreads()  # all have read the result before another fold overwrites it
        return result

    return block_fold


@device_function
def _larger(x, y):
    return max(x, y)


@device_function
def _added(x, y):
    return x + y


block_max, block_sum = _make_block_fold(_larger), _make_block_fold(_added)


@cache
def softmax_kernel(threads: int, dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that turns scores into probabilities, for one dtype."""
    real, zero, minus_inf = scalar_type(dtype), dtype.type(0), dtype.type(-math.inf)

    def softmax(scores, lse, diagonal):
        """Replace each row of scores by its softmax over the columns that the row sees.

        Computes: P = softmax(S) in place; L = m + log l
        Source: FlashAttention, Algorithm 0, line 2
        Grid: batch · heads · seq_q
        Block: threads, a power of two
        One thread does: every threads-th element of one row
        Shared: one element a thread
        Registers: the row's maximum and sum
        Global traffic: reads S three times and writes it twice; writes L once
        Needs: nothing
        """
        partial = cuda.shared.array(threads, real)  # (threads,)
        thread = cuda.threadIdx.x
        heads, seq_q, seq_k = scores.shape[1], scores.shape[2], scores.shape[3]
        row, item = cuda.blockIdx.x % seq_q, cuda.blockIdx.x // seq_q
        batch, head = item // heads, item % heads

        # m = rowmax(S)
        largest = minus_inf
        for col in range(thread, seq_k, threads):
            if is_visible(row, col, diagonal):
                largest = max(largest, scores[batch, head, row, col])
        shift = real(shift_of(block_max(partial, largest)))
        # P = exp(S - m), l = rowsum(P)
        total = zero
        for col in range(thread, seq_k, threads):
            p = zero
            if is_visible(row, col, diagonal):
                p = real(math.exp(scores[batch, head, row, col] - shift))
            scores[batch, head, row, col] = p
            total += p
        row_sum = block_sum(partial, total)
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

    def softmax_backward(dout, out, lse, scores, dp, diagonal):
        """Replace scores by probabilities, and their gradient dP by that of the scores.

        Computes: P = exp(S - L) and dS = P ∘ (dP - D) in place, D = rowsum(dO ∘ O)
        Source: FlashAttention, appendix B.2; FlashAttention-2, Algorithm 2, lines 4, 11 and 14
        Grid: batch · heads · seq_q
        Block: threads, a power of two
        One thread does: every threads-th element of one row
        Shared: one element a thread
        Registers: D
        Global traffic: reads and writes S and dP once; reads O and dO once
        Needs: nothing
        """
        partial = cuda.shared.array(threads, real)  # (threads,)
        thread = cuda.threadIdx.x
        heads, seq_q, seq_k = scores.shape[1], scores.shape[2], scores.shape[3]
        row, item = cuda.blockIdx.x % seq_q, cuda.blockIdx.x // seq_q
        batch, head = item // heads, item % heads

        # D = rowsum(dO ∘ O)
        total = zero
        for i in range(thread, out.shape[3], threads):
            total += dout[batch, head, row, i] * out[batch, head, row, i]
        delta = block_sum(partial, total)
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
    block_rows, block_cols = tile or SIZES.product_tile
    threads = block_rows * block_cols
    if threads > MAX_THREADS:
        return f"tile {tile} needs {threads} threads a block, the most is {MAX_THREADS}"
    needed = (block_rows + block_cols) * block_cols * problem.dtype.itemsize
    return why_too_large(tile, needed)


def _multiply(tile: tuple[int, int], a: Any, b: Any, out: Any, factor: float) -> None:
    """Launch the product of two batches of matrices."""
    (block_rows, block_cols), (batch, heads, rows, cols) = tile, out.shape
    row_tiles = geometry.ceil_div(rows, block_rows)
    col_tiles = geometry.ceil_div(cols, block_cols)
    kernel = product_kernel(block_rows, block_cols, out.dtype)
    kernel[batch * heads * row_tiles * col_tiles, (block_cols, block_rows)](a, b, out, factor)


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
        tile: Rows and columns of a block of the products.
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
