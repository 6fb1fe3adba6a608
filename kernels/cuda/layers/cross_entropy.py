"""Softmax cross entropy on CUDA that stores no probabilities: the backward pass computes them again.

Logits are 16-bit, float32 or float64, and contiguous; the first two are computed in float32.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.common.online_softmax import LOG2_E
from kernels.cuda.device.half import EIGHT, as_bits, form
from kernels.cuda.device.row_folds import RowBlock, make_row_folds, row_block
from kernels.cuda.device.vector import ALIGNMENT, EXP2
from kernels.cuda.layers.row_registers import RowTile, make_row_access
from kernels.cuda.layers.softmax import vector_type
from kernels.cuda.runtime.arrays import device_pointer, empty_device, reshaped
from kernels.cuda.runtime.kernel import Kernel, scalar_type
from kernels.cuda.runtime.sizes import SIZES
from kernels.runtime.dtypes import acc_dtype
from kernels.runtime.targets import cuda
from kernels.runtime.types import int64, void


@cache
def loss_kernel(tile: RowTile, dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of the losses for a tile of one piece a thread, and a dtype."""
    block, count, sums = tile.block, tile.elements, acc_dtype(dtype)
    real, zero, one, minus_inf = scalar_type(sums), sums.type(0), sums.type(1), sums.type(-math.inf)
    exp2, log2_e = EXP2[sums], sums.type(LOG2_E)
    slots, rows, (row_max, row_sum) = block.slots, block.rows, make_row_folds(block)
    column, load, *_ = make_row_access(tile, dtype)
    widen, span = form(dtype).widen, block.threads * EIGHT

    def cross_entropy(logits, targets, losses, shifts, inverses, n):
        """Compute the negative log-likelihood of each row's target.

        Computes: losses = log Σ e^logits - logits[target]; shifts = max(logits) and
            inverses = 1 / Σ e^(logits - shift), by which the backward pass knows the probabilities
        Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), Algorithm 3
        Grid: ceil(rows / block.rows)
        Block: (block.threads, block.rows)
        One thread does: every block.threads-th piece of eight elements of one row
        Shared: one element a warp, where a row has several
        Registers: a piece, and the thread's maximum and sum
        Global traffic: logits read once; a target read and three numbers written a row
        Needs: warp shuffles; targets inside the row
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        own = cuda.local.array(count, real)  # (count,)
        row, thread = cuda.blockIdx.x * rows + cuda.threadIdx.y, cuda.threadIdx.x
        stop, start = (n if row < losses.shape[0] else 0), int64(row) * n
        largest, total = minus_inf, zero
        for first in range(0, stop, span):
            left = stop - first
            load(own, logits, start + first, thread, left)
            # m_new = max(m, rowmax(x))
            new = largest
            for k in range(count):
                new = max(new, own[k]) if column(k, thread) < left else new
            # -inf - (-inf) would be NaN, -inf - 0 is not.
            shift = new if new > minus_inf else zero
            # d = d e^(m - m_new) + Σ e^(x - m_new)
            total *= exp2((largest - shift) * log2_e)
            for k in range(count):
                total += exp2((own[k] - shift) * log2_e) if column(k, thread) < left else zero
            largest = new
        shift = row_max(partial, largest)
        shift = shift if shift > minus_inf else zero
        total = row_sum(partial, total * exp2((largest - shift) * log2_e))
        if thread == 0 and stop > 0:
            shifts[row] = shift
            inverses[row] = one / total if total != zero else zero  # NaN stays NaN
            # In this order: beside a large logit the logarithm would round away.
            losses[row] = (shift - widen(logits[start + targets[row]])) + math.log(total)

    vector = vector_type(sums)
    signature = void(vector_type(form(dtype).stored), int64[::1], vector, vector, vector, int64)
    return Kernel(cross_entropy, signature, block.threads * rows)


@cache
def gradient_kernel(tile: RowTile, dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of the logits' gradient for a tile of one piece a thread, and a dtype."""
    block, count, sums = tile.block, tile.elements, acc_dtype(dtype)
    real, zero, one = scalar_type(sums), sums.type(0), sums.type(1)
    exp2, log2_e, span = EXP2[sums], sums.type(LOG2_E), block.threads * EIGHT
    column, load, store, *_ = make_row_access(tile, dtype)

    def cross_entropy_backward(dlosses, targets, logits, shifts, inverses, dlogits, n):
        """Compute the gradient of the logits; dlogits may be the memory of the logits.

        Computes: dlogits = dloss (P - one_hot(target)) with P = e^(logits - shift) inverse, for each row
        Grid: (rows, ceil(n / (8 block.threads)))
        Block: (block.threads, 1)
        One thread does: one piece of eight elements
        Registers: a piece
        Global traffic: one read and one write an element; four numbers a row
        """
        own = cuda.local.array(count, real)  # (count,)
        row, thread, first = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockIdx.y * span
        left, start = n - first, int64(row) * n + first
        dloss, shift, inverse = dlosses[row], shifts[row], inverses[row]
        target = targets[row] - first
        load(own, logits, start, thread, left)
        for k in range(count):
            col = column(k, thread)
            if col < left:
                p = exp2((own[k] - shift) * log2_e) * inverse
                own[k] = dloss * (p - (one if col == target else zero))
        store(dlogits, start, own, thread, left)

    stored, vector = vector_type(form(dtype).stored), vector_type(sums)
    signature = void(vector, int64[::1], stored, vector, vector, stored, int64)
    return Kernel(cross_entropy_backward, signature, block.threads)


def _tile(block: RowBlock, *matrices: Any) -> RowTile:
    """Return the tile of one piece a thread for contiguous matrices of one width."""
    n = tuple(matrices[0].shape)[1]
    vectors = n % EIGHT == 0 and all(device_pointer(a) % ALIGNMENT == 0 for a in matrices)
    return RowTile(block, 1, vectors)


def _flat(matrix: Any) -> Any:
    return as_bits(reshaped(matrix, (matrix.size,)))


def losses_of(logits: Any, targets: Any) -> tuple[Any, Any, Any, Any]:
    """Return the negative log-likelihood of each row's target, and the inputs of the backward pass.

    Targets, (rows,) int64 on the device, are checked by the caller.  The losses, (rows,), have the dtype of
    sums.  The backward pass takes the logits, and the shift and the inverse of each row.
    """
    rows, n = logits.shape
    found = [empty_device((rows,), acc_dtype(logits.dtype)) for _ in range(3)]
    if rows:
        block = row_block(n)
        kernel = loss_kernel(_tile(block, logits), logits.dtype)
        launch = kernel[ceil_div(rows, block.rows), (block.threads, block.rows)]
        launch(_flat(logits), targets, *found, n)
    losses, *kept = found
    return losses, logits, *kept  # type: ignore[return-value]


def logit_gradient(
    dlosses: Any, targets: Any, logits: Any, shifts: Any, inverses: Any, in_place: bool = False
) -> Any:
    """Return the gradient of the logits, in their place if they are no longer needed."""
    rows, n = logits.shape
    dlogits = logits if in_place else empty_device((rows, n), logits.dtype)
    if rows * n:
        block = RowBlock(SIZES.flat_threads, 1)
        kernel = gradient_kernel(_tile(block, logits), logits.dtype)
        grid = (rows, ceil_div(n, block.threads * EIGHT))
        kernel[grid, block.threads](
            dlosses, targets, _flat(logits), shifts, inverses, _flat(dlogits), n
        )
    return dlogits
