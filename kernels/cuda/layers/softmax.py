"""Softmax of rows on CUDA, as a fused layer.

A row belongs to one warp, or to one block if it is long; see ``block``.  All arrays are contiguous.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.device.row_folds import RowBlock, make_row_folds
from kernels.cuda.device.vector import EXP2
from kernels.cuda.runtime.kernel import Kernel, scalar_type
from kernels.runtime.targets import cuda
from kernels.runtime.types import void


def vector_type(dtype: np.dtype[Any]) -> Any:
    """Return numba's type of a contiguous array of one dimension."""
    return scalar_type(dtype)[::1]


def matrix_type(dtype: np.dtype[Any]) -> Any:
    """Return numba's type of a contiguous array of two dimensions."""
    return scalar_type(dtype)[:, ::1]


@cache
def softmax_kernel(block: RowBlock, dtype: np.dtype[Any]) -> Kernel:
    """Return the softmax kernel for one shape of block and dtype."""
    real, slots, rows, threads = scalar_type(dtype), block.slots, block.rows, block.threads
    exp2, (row_max, row_sum), log2_e = EXP2[dtype], make_row_folds(block), dtype.type(LOG2_E)
    zero, one, minus_inf = dtype.type(0), dtype.type(1), dtype.type(-math.inf)

    def softmax(x, out):
        """Apply softmax to each row.

        Computes: out = softmax(x); a row of minus infinity becomes a row of zeros
        Source: FlashAttention, section 2.2
        Grid: ceil(rows / block.rows)
        Block: (block.threads, block.rows)
        One thread does: every block.threads-th element of one row
        Shared: one element a warp, where a row has several
        Registers: the row's maximum and sum
        Global traffic: x read three times, twice of it from the cache; out written once
        Needs: warp shuffles
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        row, thread = cuda.blockIdx.x * rows + cuda.threadIdx.y, cuda.threadIdx.x
        stop = x.shape[1] if row < x.shape[0] else 0
        # m = rowmax(S)
        largest = minus_inf
        for i in range(thread, stop, threads):
            largest = max(largest, x[row, i])
        largest = row_max(partial, largest)
        # -inf - (-inf) would be NaN, -inf - 0 is not.
        shift = largest if largest > minus_inf else zero
        # l = rowsum(e^(S - m))
        total = zero
        for i in range(thread, stop, threads):
            total += exp2((x[row, i] - shift) * log2_e)
        total = row_sum(partial, total)
        # P = diag(l)^-1 e^(S - m).  Computed again: it costs less than to write and read it.
        inverse = one / total if total != zero else zero  # NaN stays NaN
        for i in range(thread, stop, threads):
            out[row, i] = exp2((x[row, i] - shift) * log2_e) * inverse

    matrix = matrix_type(dtype)
    return Kernel(softmax, void(matrix, matrix), threads * rows)


@cache
def softmax_backward_kernel(block: RowBlock, dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of softmax's gradient for one shape of block and dtype."""
    real, slots, rows, threads = scalar_type(dtype), block.slots, block.rows, block.threads
    zero, (_, row_sum) = dtype.type(0), make_row_folds(block)

    def softmax_backward(dout, out, dx):
        """Compute the gradient of softmax's input from its output.

        Computes: dx = out ∘ (dout - rowsum(dout ∘ out))
        Source: FlashAttention, appendix B.2
        Grid: ceil(rows / block.rows)
        Block: (block.threads, block.rows)
        One thread does: every block.threads-th element of one row
        Shared: one element a warp, where a row has several
        Registers: the row's sum
        Global traffic: dout and out read twice, once of it from the cache; dx written once
        Needs: warp shuffles
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        row, thread = cuda.blockIdx.x * rows + cuda.threadIdx.y, cuda.threadIdx.x
        stop = out.shape[1] if row < out.shape[0] else 0
        inner = zero
        for i in range(thread, stop, threads):
            inner += dout[row, i] * out[row, i]
        inner = row_sum(partial, inner)
        for i in range(thread, stop, threads):
            dx[row, i] = out[row, i] * (dout[row, i] - inner)

    matrix = matrix_type(dtype)
    return Kernel(softmax_backward, void(matrix, matrix, matrix), threads * rows)
