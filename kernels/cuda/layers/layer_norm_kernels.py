"""Layer norm on CUDA, alone or of residual + dropout(x): each tensor is read once and written once.

A row belongs to one warp, or to one block if it is long, and lies in registers; see
``row_registers``.  Storage
is of 16 bits, float32 or float64; sums are float32 for the first two.  All arrays are contiguous and flat.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.device.half import form
from kernels.cuda.device.row_folds import make_row_folds
from kernels.cuda.layers.row_registers import RowTile, make_row_access
from kernels.cuda.layers.softmax import vector_type
from kernels.cuda.runtime.kernel import Kernel, scalar_type
from kernels.cuda.runtime.sizes import SIZES
from kernels.runtime.dtypes import acc_dtype
from kernels.runtime.targets import cuda
from kernels.runtime.types import int64, types, void

#: Columns and lanes of a block that adds up parts.
SUM_COLS, SUM_LANES = SIZES.part_columns, SIZES.part_lanes


class NormNumbers(NamedTuple):
    """The numbers that the layer-norm kernels receive as arguments."""

    n: Any  # Length of a row
    inverse_n: Any  # 1 / n
    share: Any  # 1; 0 for an RMS norm, whose mean and shift are 0
    eps: Any  # Added to the variance
    seed: Any  # Seed of the dropout
    threshold: Any  # The least random word of an element that dropout keeps
    scale: Any  # Factor of kept elements


def _numbers_type(real: Any) -> Any:
    return types.NamedTuple((int64, real, real, real, int64, int64, real), NormNumbers)


class NormForm(NamedTuple):
    """The compile-time parameters of the layer-norm kernels."""

    tile: RowTile  # The distribution of a row over registers
    dtype: np.dtype[Any]  # Dtype of the rows
    weights: np.dtype[Any]  # Dtype of gamma and beta
    adds: bool = False  # Whether the input is residual + x, which is written too
    drops: bool = False  # Whether dropout is applied to x first


@cache
def norm_kernel(own_form: NormForm) -> Kernel:
    """Return the kernel of the forward pass."""
    tile, dtype, weights, adds, drops = own_form
    block, count, sums = tile.block, tile.elements, acc_dtype(dtype)
    real, zero, one = scalar_type(sums), sums.type(0), sums.type(1)
    slots, rows_of_block, (_, row_sum) = block.slots, block.rows, make_row_folds(block)
    rows, factors = make_row_access(tile, dtype), make_row_access(tile, weights)
    column, load, store, load_weights = rows.column, rows.load, rows.store, factors.load
    round_own, drop = rows.round, rows.drop

    def layer_norm(x, residual, affine, hidden, out, moments, numbers):
        """Normalise each row to mean 0 and variance 1, then scale and shift it.

        Computes: h = residual + dropout(x), or x; out = γ (h - μ) r + β with μ = mean(h),
            r = 1 / sqrt(var(h) + ε); with share 0 instead of 1, μ and β are 0: an RMS norm
        Source: Ba, Kiros and Hinton, Layer Normalization (2016), equation 4; Zhang and Sennrich, Root Mean
            Square Layer Normalization (2019), equation 4; Srivastava et al., Dropout (2014)
        Grid: ceil(rows / block.rows)
        Block: (block.threads, block.rows)
        One thread does: its pieces of one row
        Shared: one element a warp, where a row has several
        Registers: the thread's elements of the row, and of one operand beside it
        Global traffic: x and residual read once; h, out, μ and r written once
        Needs: warp shuffles
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        own, other = cuda.local.array(count, real), cuda.local.array(count, real)  # (count,)
        (gamma, beta), (mean, rstd), n, share = affine, moments, numbers.n, numbers.share
        row, thread = cuda.blockIdx.x * rows_of_block + cuda.threadIdx.y, cuda.threadIdx.x
        stop, start = (n if row < mean.shape[0] else 0), int64(row) * n
        load(own, x, start, thread, stop)
        if drops:
            drop(own, start, thread, stop, numbers)
        if adds:
            load(other, residual, start, thread, stop)
            for k in range(count):
                own[k] += other[k]
            store(hidden, start, own, thread, stop)
            round_own(own)  # the backward pass reads what is stored
        # μ = Σ h / n
        total = zero
        for k in range(count):
            total += own[k]
        center = row_sum(partial, total) * numbers.inverse_n * share
        # r = 1 / sqrt(Σ (h - μ)² / n + ε).  Not from Σ h²: where μ is large, that cancels.
        squares = zero
        for k in range(count):
            own[k] -= center
            squares += own[k] * own[k] if column(k, thread) < stop else zero
        inverse = one / math.sqrt(row_sum(partial, squares) * numbers.inverse_n + numbers.eps)
        load_weights(other, gamma, 0, thread, stop)
        for k in range(count):
            own[k] *= inverse * other[k]
        load_weights(other, beta, 0, thread, stop)
        for k in range(count):
            own[k] += other[k] * share
        store(out, start, own, thread, stop)
        if thread == 0 and stop > 0:
            mean[row] = center
            rstd[row] = inverse

    stored, given = (vector_type(form(each).stored) for each in (dtype, weights))
    moments, extra = types.UniTuple(vector_type(sums), 2), stored if adds else int64
    given = types.UniTuple(given, 2)
    signature = void(stored, extra, given, extra, stored, moments, _numbers_type(real))
    return Kernel(layer_norm, signature, block.threads * rows_of_block)


@cache
def norm_backward_kernel(own_form: NormForm) -> Kernel:
    """Return the kernel of the gradients of the rows, which also begins the sums for the weights."""
    tile, dtype, weights, adds, drops = own_form
    block, count, sums = tile.block, tile.elements, acc_dtype(dtype)
    real, zero = scalar_type(sums), sums.type(0)
    slots, rows_of_block, (_, row_sum) = block.slots, block.rows, make_row_folds(block)
    rows, factors = make_row_access(tile, dtype), make_row_access(tile, weights)
    load, store, drop, load_weights = rows.load, rows.store, rows.drop, factors.load
    store_sums = make_row_access(tile, sums).store

    def layer_norm_backward(dout, dhidden, hidden, gamma, moments, results, parts, numbers):
        """Compute the gradients through layer norm, and through the sum and the dropout before it.

        Computes: dh = r (g - mean(g) - ĥ mean(g ∘ ĥ)) + dhidden with g = γ dout, ĥ = (h - μ) r;
            without mean(g) for an RMS norm, whose share is 0 instead of 1; dresidual = dh,
            dx = dropout(dh); parts[i] = Σ dout ∘ ĥ and behind it Σ dout over the rows of
            one line of threads
        Grid: as many blocks as give the parts
        Block: (block.threads, block.rows)
        One thread does: its pieces of every so many-th row
        Shared: one element a warp, where a row has several
        Registers: the thread's elements of dout and h, and of two sums
        Global traffic: dout, dhidden and h read once; dx and dresidual written once; a part of the sums
            for each line of threads
        Needs: warp shuffles
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        grad, own = cuda.local.array(count, real), cuda.local.array(count, real)  # (count,)
        other = cuda.local.array(count, real)  # (count,)
        dgamma, dbeta = cuda.local.array(count, real), cuda.local.array(count, real)  # (count,)
        for k in range(count):
            dgamma[k], dbeta[k] = zero, zero
        (mean, rstd), (dx, dresidual), n, inverse_n = moments, results, numbers.n, numbers.inverse_n
        thread, lines = cuda.threadIdx.x, cuda.gridDim.x * rows_of_block
        line, height = cuda.blockIdx.x * rows_of_block + cuda.threadIdx.y, mean.shape[0]
        for turn in range((height + lines - 1) // lines):  # all threads, for they fold together
            row = turn * lines + line
            stop, start = (n if row < height else 0), int64(row) * n
            center, inverse = zero, zero
            if stop > 0:
                center, inverse = mean[row], rstd[row]
            load(grad, dout, start, thread, stop)
            load(own, hidden, start, thread, stop)
            load_weights(other, gamma, 0, thread, stop)
            sum_g, sum_gx = zero, zero
            for k in range(count):
                own[k] = (own[k] - center) * inverse
                dgamma[k] += grad[k] * own[k]
                dbeta[k] += grad[k]
                grad[k] *= other[k]
                sum_g += grad[k]
                sum_gx += grad[k] * own[k]
            mean_g = row_sum(partial, sum_g) * inverse_n * numbers.share
            mean_gx = row_sum(partial, sum_gx) * inverse_n
            for k in range(count):
                grad[k] = (grad[k] - mean_g - own[k] * mean_gx) * inverse
            if adds:
                load(other, dhidden, start, thread, stop)
                for k in range(count):
                    grad[k] += other[k]
                store(dresidual, start, grad, thread, stop)
            if drops:
                drop(grad, start, thread, stop, numbers)
            if drops or not adds:
                store(dx, start, grad, thread, stop)
        store_sums(parts, int64(line) * 2 * n, dgamma, thread, n)
        store_sums(parts, (int64(line) * 2 + 1) * n, dbeta, thread, n)

    stored, vector = vector_type(form(dtype).stored), vector_type(sums)
    extra = stored if adds else int64
    signature = void(
        stored, extra, stored, vector_type(form(weights).stored), types.UniTuple(vector, 2),
        types.Tuple((stored, extra)), vector, _numbers_type(real),
    )  # fmt: skip
    return Kernel(layer_norm_backward, signature, block.threads * rows_of_block)


@cache
def norm_sums_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that finishes the sums of gamma's and beta's gradients, for their dtype."""
    sums, narrow = acc_dtype(dtype), form(dtype).narrow
    real, zero = scalar_type(sums), sums.type(0)

    def norm_sums(parts, dgamma, dbeta, count):
        """Add up the parts in a fixed order.

        Computes: dgamma = Σ parts[i, :n] and dbeta = Σ parts[i, n:] over the parts i
        Grid: ceil(2 n / SUM_COLS)
        Block: (SUM_COLS, SUM_LANES)
        One thread does: every SUM_LANES-th part of one column
        Shared: one sum a thread
        Registers: one sum
        Global traffic: parts read once; dgamma and dbeta written once
        """
        shared = cuda.shared.array((SUM_LANES, SUM_COLS), real)  # (SUM_LANES, SUM_COLS)
        x, lane, n = cuda.threadIdx.x, cuda.threadIdx.y, dgamma.shape[0]
        col = cuda.blockIdx.x * SUM_COLS + x
        total = zero
        if col < 2 * n:
            for i in range(lane, count, SUM_LANES):
                total += parts[int64(i) * 2 * n + col]
        shared[lane, x] = total
        cuda.syncthreads()  # every lane's sum is there before the first lane adds them
        if lane == 0 and col < 2 * n:
            for i in range(1, SUM_LANES):
                total += shared[i, x]
            if col < n:
                dgamma[col] = narrow(total)
            else:
                dbeta[col - n] = narrow(total)

    given = vector_type(form(dtype).stored)
    signature = void(vector_type(sums), given, given, int64)
    return Kernel(norm_sums, signature, SUM_COLS * SUM_LANES)
