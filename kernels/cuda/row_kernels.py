"""The fused layers on CUDA that look at whole rows: softmax, cross entropy and layer norm.

A row belongs to one warp, or to one block if it is long; see ``block``.  All arrays are contiguous.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import int64, void

from kernels.cuda.block import RowBlock, make_row_folds
from kernels.cuda.device import Kernel, device_function, scalar_type
from kernels.cuda.vector import EXP2
from kernels.online_softmax import LOG2_E
from kernels.targets import cuda


def vector_type(dtype: np.dtype[Any]) -> Any:
    """Return numba's type of a contiguous array of one dimension."""
    return scalar_type(dtype)[::1]


def matrix_type(dtype: np.dtype[Any]) -> Any:
    """Return numba's type of a contiguous array of two dimensions."""
    return scalar_type(dtype)[:, ::1]


def _make_softmax_row(block: RowBlock, dtype: np.dtype[Any]) -> Any:
    """Return the function by which the threads of a row turn it into probabilities."""
    exp2, (row_max, row_sum) = EXP2[dtype], make_row_folds(block)
    zero, one, minus_inf = dtype.type(0), dtype.type(1), dtype.type(-math.inf)
    log2_e, threads = dtype.type(LOG2_E), block.threads

    @device_function
    def softmax_row(x, out, row, thread, stop, partial):
        """Write softmax(x) to out; return m and l, the sum of e^(x - m).

        A row of minus infinity becomes a row of zeros.  So does one beyond the last, where stop is 0.
        """
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
        inverse = one / total if total > zero else zero
        for i in range(thread, stop, threads):
            out[row, i] = exp2((x[row, i] - shift) * log2_e) * inverse
        return shift, total

    return softmax_row


@cache
def softmax_kernel(block: RowBlock, dtype: np.dtype[Any]) -> Kernel:
    """Return the softmax kernel for one shape of block and dtype."""
    real, slots, rows = scalar_type(dtype), block.slots, block.rows
    softmax_row = _make_softmax_row(block, dtype)

    def softmax(x, out):
        """Apply softmax to each row.

        Computes: out = softmax(x)
        Source: FlashAttention, section 2.2
        Grid: ceil(rows / block.rows)
        Block: (block.threads, block.rows)
        One thread does: every block.threads-th element of one row
        Shared: one element a warp, where a row has several
        Registers: the row's maximum and sum
        Global traffic: x read three times, twice of it from the cache; out written once
        Needs: warp shuffles, for which the simulator has a plain form
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        row = cuda.blockIdx.x * rows + cuda.threadIdx.y
        stop = x.shape[1] if row < x.shape[0] else 0
        softmax_row(x, out, row, cuda.threadIdx.x, stop, partial)

    matrix = matrix_type(dtype)
    return Kernel(softmax, void(matrix, matrix), block.threads * rows)


@cache
def softmax_backward_kernel(block: RowBlock, dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of softmax's gradient for one shape of block and dtype."""
    real, slots, rows, threads = scalar_type(dtype), block.slots, block.rows, block.threads
    zero, (_, row_sum) = dtype.type(0), make_row_folds(block)

    def softmax_backward(dout, out, dx):
        """Return through softmax, from its output.

        Computes: dx = out ∘ (dout - rowsum(dout ∘ out))
        Source: FlashAttention, appendix B.2
        Grid: ceil(rows / block.rows)
        Block: (block.threads, block.rows)
        One thread does: every block.threads-th element of one row
        Shared: one element a warp, where a row has several
        Registers: the row's sum
        Global traffic: dout and out read twice, once of it from the cache; dx written once
        Needs: warp shuffles, for which the simulator has a plain form
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


@cache
def cross_entropy_kernel(block: RowBlock, dtype: np.dtype[Any]) -> Kernel:
    """Return the cross-entropy kernel for one shape of block and dtype."""
    real, slots, rows = scalar_type(dtype), block.slots, block.rows
    softmax_row = _make_softmax_row(block, dtype)

    def cross_entropy(logits, targets, losses, probs):
        """Compute softmax and the negative log-likelihood of each row's target.

        Computes: probs = softmax(logits); losses = log Σ e^logits - logits[target]
        Source: none
        Grid: ceil(rows / block.rows)
        Block: (block.threads, block.rows)
        One thread does: every block.threads-th element of one row
        Shared: one element a warp, where a row has several
        Registers: the row's maximum and sum
        Global traffic: as softmax, and a target and a loss a row
        Needs: warp shuffles, for which the simulator has a plain form; targets inside the row
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        row = cuda.blockIdx.x * rows + cuda.threadIdx.y
        stop = logits.shape[1] if row < logits.shape[0] else 0
        shift, total = softmax_row(logits, probs, row, cuda.threadIdx.x, stop, partial)
        if cuda.threadIdx.x == 0 and stop > 0:
            # In this order: beside a large logit the logarithm would round away.
            losses[row] = (shift - logits[row, targets[row]]) + math.log(total)

    matrix, vector = matrix_type(dtype), vector_type(dtype)
    signature = void(matrix, int64[::1], vector, matrix)
    return Kernel(cross_entropy, signature, block.threads * rows)


@cache
def layer_norm_kernel(block: RowBlock, dtype: np.dtype[Any]) -> Kernel:
    """Return the layer-norm kernel for one shape of block and dtype."""
    real, slots, rows, threads = scalar_type(dtype), block.slots, block.rows, block.threads
    zero, one, (_, row_sum) = dtype.type(0), dtype.type(1), make_row_folds(block)

    def layer_norm(x, gamma, beta, out, mean, rstd, inverse_n, eps):
        """Normalise each row to mean 0 and variance 1, then scale and shift it.

        Computes: out = γ (x - μ) r + β with μ = mean(x), r = 1 / sqrt(var(x) + ε)
        Source: Ba, Kiros and Hinton, Layer Normalization (2016), equation 4
        Grid: ceil(rows / block.rows)
        Block: (block.threads, block.rows)
        One thread does: every block.threads-th element of one row
        Shared: one element a warp, where a row has several
        Registers: μ and r
        Global traffic: x read three times, twice of it from the cache; out, μ and r written once
        Needs: warp shuffles, for which the simulator has a plain form
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        row, thread = cuda.blockIdx.x * rows + cuda.threadIdx.y, cuda.threadIdx.x
        stop = x.shape[1] if row < x.shape[0] else 0
        # μ = Σ x / n
        total = zero
        for i in range(thread, stop, threads):
            total += x[row, i]
        center = row_sum(partial, total) * inverse_n
        # r = 1 / sqrt(Σ (x - μ)² / n + ε).  Not from Σ x²: where μ is large, that cancels.
        squares = zero
        for i in range(thread, stop, threads):
            squares += (x[row, i] - center) * (x[row, i] - center)
        inverse = one / math.sqrt(row_sum(partial, squares) * inverse_n + eps)
        for i in range(thread, stop, threads):
            out[row, i] = (x[row, i] - center) * inverse * gamma[i] + beta[i]
        if thread == 0 and stop > 0:
            mean[row] = center
            rstd[row] = inverse

    matrix, vector = matrix_type(dtype), vector_type(dtype)
    signature = void(matrix, vector, vector, matrix, vector, vector, real, real)
    return Kernel(layer_norm, signature, threads * rows)


@cache
def layer_norm_backward_kernel(block: RowBlock, dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of the gradient of layer norm's input for one shape of block and dtype."""
    real, slots, rows, threads = scalar_type(dtype), block.slots, block.rows, block.threads
    zero, (_, row_sum) = dtype.type(0), make_row_folds(block)

    def layer_norm_backward(dout, x, gamma, mean, rstd, dx, inverse_n):
        """Return through layer norm to its input.

        Computes: dx = r (g - mean(g) - x̂ mean(g ∘ x̂)) with g = γ dout, x̂ = (x - μ) r
        Source: none
        Grid: ceil(rows / block.rows)
        Block: (block.threads, block.rows)
        One thread does: every block.threads-th element of one row
        Shared: one element a warp, where a row has several
        Registers: the row's two sums
        Global traffic: dout and x read twice, once of it from the cache; dx written once
        Needs: warp shuffles, for which the simulator has a plain form
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        row, thread = cuda.blockIdx.x * rows + cuda.threadIdx.y, cuda.threadIdx.x
        stop = x.shape[1] if row < x.shape[0] else 0
        center = mean[row] if stop > 0 else zero
        inverse = rstd[row] if stop > 0 else zero
        sum_g, sum_gx = zero, zero
        for i in range(thread, stop, threads):
            g = dout[row, i] * gamma[i]
            sum_g += g
            sum_gx += g * ((x[row, i] - center) * inverse)
        mean_g = row_sum(partial, sum_g) * inverse_n
        mean_gx = row_sum(partial, sum_gx) * inverse_n
        for i in range(thread, stop, threads):
            x_hat = (x[row, i] - center) * inverse
            dx[row, i] = (dout[row, i] * gamma[i] - mean_g - x_hat * mean_gx) * inverse

    matrix, vector = matrix_type(dtype), vector_type(dtype)
    signature = void(matrix, matrix, vector, vector, vector, matrix, real)
    return Kernel(layer_norm_backward, signature, threads * rows)


@cache
def layer_norm_parts_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that begins the sums of layer norm's other two gradients, for one dtype."""
    real, zero = scalar_type(dtype), dtype.type(0)

    def layer_norm_parts(dout, x, mean, rstd, dgamma, dbeta, rows_of_part):
        """Sum over some rows; another kernel adds up the parts, so that the order is fixed.

        Computes: dgamma[0, part] = Σ dout ∘ x̂ and dbeta[0, part] = Σ dout over rows_of_part rows
        Source: none
        Grid: (ceil(n / threads), number of parts)
        Block: any number of threads along x, which runs along a row
        One thread does: one column of one part
        Shared: none
        Registers: two sums
        Global traffic: dout and x read once; a part of dgamma and dbeta written once
        Needs: nothing
        """
        col, part = cuda.grid(1), cuda.blockIdx.y
        if col < x.shape[1]:
            sum_gx, sum_g = zero, zero
            first = part * rows_of_part
            for row in range(first, min(first + rows_of_part, x.shape[0])):
                sum_gx += dout[row, col] * ((x[row, col] - mean[row]) * rstd[row])
                sum_g += dout[row, col]
            dgamma[0, part, col] = sum_gx
            dbeta[0, part, col] = sum_g

    matrix, vector, parts = matrix_type(dtype), vector_type(dtype), real[:, :, ::1]
    signature = void(matrix, matrix, vector, vector, parts, parts, int64)
    return Kernel(layer_norm_parts, signature)
