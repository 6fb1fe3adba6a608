"""Linear layers on the CPU, with bias and GELU fused while a block of the product is in cache.

Composed of a product, a sum and GELU, each operation would read and write all rows again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.layers.few_rows import FEW_ROWS, PARTS, multiply_by_parts
from kernels.cpu.layers.gelu import gelu_constants, gelu_gradient, gelu_value
from kernels.cpu.matmul import blas
from kernels.runtime.jit import FASTMATH, by_size, njit_cached

Array = np.ndarray[Any, Any]

#: Multiply-adds from which the threads share a product of a few rows.
SHARED_FROM = 1 << 19


@njit_cached(fastmath=FASTMATH)
def finish(before, bias, out, has_gelu):
    """Add a bias (out_size,), or (0,) for none, to rows of the product; write their GELU to ``out``."""
    constants = gelu_constants(before.dtype.type)
    for row in range(len(before)):
        x, y = before[row], out[row]  # (out_size,)
        if len(bias):
            for i in range(len(x)):
                x[i] += bias[i]
        if has_gelu:
            for i in range(len(x)):
                y[i] = gelu_value(x[i], constants)


@by_size(fastmath=FASTMATH)
def _by_blocks(rows, weights, bias, before, out, has_gelu, blocks):
    size = (len(rows) + blocks - 1) // blocks
    for block in prange(blocks):
        start, stop = block * size, min((block + 1) * size, len(rows))
        if start < stop:
            np.dot(rows[start:stop], weights, before[start:stop])
            finish(before[start:stop], bias, out[start:stop], has_gelu)


@njit_cached(fastmath=FASTMATH)
def multiply_few(rows, weights, bias, before, out, has_gelu):
    """Compute ``linear`` for a few rows, reading the weights in order once for each row.

    The bias is (out_size,), or (0,) for none; ``before`` (rows, out_size) is written, and ``out`` too
    if ``has_gelu``. It may be ``before``.
    """
    depth, pairs = weights.shape[0], weights.shape[0] // 2 * 2
    for row in range(len(rows)):
        x, y = rows[row], before[row]  # (in_size,), (out_size,)
        y[:] = 0
        for k in range(0, pairs, 2):  # two rows of the weights for each pass over y
            first, second = weights[k], weights[k + 1]  # (out_size,)
            for i in range(len(y)):
                y[i] += x[k] * first[i] + x[k + 1] * second[i]
        if pairs < depth:
            last = weights[pairs]  # (out_size,)
            for i in range(len(y)):
                y[i] += x[pairs] * last[i]
    finish(before, bias, out, has_gelu)


@by_size(fastmath=FASTMATH)
def _backward_by_blocks(grad, weights_t, before, through, dx, dbias_parts):
    constants = gelu_constants(grad.dtype.type)
    blocks = len(dbias_parts)
    size = (len(grad) + blocks - 1) // blocks
    for block in prange(blocks):
        start, stop = block * size, min((block + 1) * size, len(grad))
        dbias = dbias_parts[block]  # (out_size,)
        dbias[:] = 0
        for row in range(start, stop):
            g = through[row]  # (out_size,)
            if len(before):
                x, outer = before[row], grad[row]  # (out_size,)
                for i in range(len(g)):
                    g[i] = gelu_gradient(outer[i], x[i], constants)
            for i in range(len(g)):
                dbias[i] += g[i]
        if start < stop:
            np.dot(through[start:stop], weights_t, dx[start:stop])


def linear(
    rows: Array, weights: Array, bias: Array | None, has_gelu: bool
) -> tuple[Array, Array | None]:
    """Return rows @ weights + bias, optionally followed by GELU in its tanh form, and the input of GELU.

    Rows (n, in_size), weights (in_size, out_size), and the bias (out_size,) or None are contiguous,
    of one dtype, float32 or float64.  The result is (n, out_size), and so the input of GELU, which
    the gradient needs, or None.
    """
    out = np.empty((len(rows), weights.shape[1]), rows.dtype)
    before = np.empty_like(out) if has_gelu else out
    bias = np.empty(0, rows.dtype) if bias is None else bias
    multiply_adds = out.size * weights.shape[0]
    if len(rows) <= FEW_ROWS and multiply_adds < SHARED_FROM:
        multiply_few(rows, weights, bias, before, out, has_gelu)
    elif len(rows) <= FEW_ROWS:
        multiply_by_parts(rows, weights, np.empty((PARTS, *out.shape), out.dtype), before)
        if has_gelu or len(bias):
            finish(before, bias, out, has_gelu)
    else:
        blocks = blas.row_blocks(len(rows), multiply_adds)
        run = _by_blocks.parallel if blocks > 1 else _by_blocks.serial
        with blas.one_thread_each():
            run(rows, weights, bias, before, out, has_gelu, blocks)
    return out, before if has_gelu else None


def linear_backward(
    grad: Array, rows: Array, weights: Array, before: Array | None
) -> tuple[Array, Array, Array]:
    """Return the gradients of rows, weights and bias from that of the result, all contiguous.

    They are grad @ weightsᵀ, rowsᵀ @ grad, and the sum of grad over rows. If :func:`linear` returned
    an input of GELU, ``before``, grad is first taken through GELU.
    """
    dx, dweights = np.empty_like(rows), np.empty_like(weights)
    through = grad if before is None else np.empty_like(grad)
    blocks = blas.row_blocks(len(rows), grad.size * weights.shape[0])
    dbias = np.empty((blocks, grad.shape[1]), grad.dtype)
    before = np.empty((0, grad.shape[1]), grad.dtype) if before is None else before
    run = _backward_by_blocks.parallel if blocks > 1 else _backward_by_blocks.serial
    with blas.one_thread_each():
        run(grad, weights.T, before, through, dx, dbias)
    blas.matmul(rows.T, through, dweights)
    return dx, dweights, dbias.sum(axis=0)
