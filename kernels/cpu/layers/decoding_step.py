"""A decoding step through one transformer layer on the CPU, in a single kernel or in five.

A step is so small that starting some twenty kernels would take longer than their computation.  The single
kernel has no tiles, threads or options.  Large weights take most of a step's time to arrive from memory,
and five kernels then read them on all threads.  The layers' own kernels handle everything else.

Computes   x + attention(norm(x)), and of that y + feed-forward(norm(y)); the new keys and values.
Source     the pre-norm layer of ``minitorch.models.transformer_layers``, operation by operation.
Thread     one thread does all work, or each a range of the depth of a product, or heads of attention.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from kernels.common.online_softmax import LOG2_E
from kernels.cpu.attention.row_products import KEYS, add_values, scores_of_row
from kernels.cpu.attention.tiles import inverse_sum, shift_of
from kernels.cpu.layers.few_rows import FEW_ROWS, PARTS, multiply_three
from kernels.cpu.layers.fused import layer_norm, norm_row
from kernels.cpu.layers.linear import linear, multiply_few
from kernels.cpu.matmul.tile_product import exp2
from kernels.runtime.jit import FASTMATH, by_size, njit_cached

Array = np.ndarray[Any, Any]

#: Multiply-adds of a step from which waking other threads is faster, and of attention alone.
PARALLEL_FROM, PARALLEL_ATTENTION_FROM = 1 << 20, 1 << 18


class LayerWeights(NamedTuple):
    """The parameters of a transformer layer, contiguous and of one dtype; a missing bias has shape (0,)."""

    norm_1: tuple[Array, Array]  #: Scale and shift, (width,) each.
    q: tuple[Array, Array]  #: Weights (width, width) and bias of the query projection.
    k: tuple[Array, Array]  #: Weights (width, width) and bias of the key projection.
    v: tuple[Array, Array]  #: Weights (width, width) and bias of the value projection.
    out: tuple[Array, Array]  #: Weights (width, width) and bias of the output projection.
    norm_2: tuple[Array, Array]  #: Scale and shift, (width,) each.
    widen: tuple[Array, Array]  #: Weights (width, middle) and bias, before GELU.
    narrow: tuple[Array, Array]  #: Weights (middle, width) and bias, after it.


class Pages(NamedTuple):
    """A paged cache; position ``p`` of text ``b`` is in page ``table[b, p // page_size]``."""

    keys: Array  #: (pages, heads, page_size, head_dim); the elements of a row are adjacent.
    values: Array  #: Like ``keys``.
    table: Array  #: (batch, most pages) int32.
    before: Array  #: Number of positions of each text before the step, (batch,) int32.


@njit(fastmath=FASTMATH)
def append(k, v, cache):
    """Write new keys and values, (batch, count, heads, head_dim), to the next positions of the cache."""
    size = cache.keys.shape[2]
    for b in range(len(k)):
        for i in range(k.shape[1]):
            position = cache.before[b] + i
            page, row = cache.table[b, position // size], position % size
            cache.keys[page, :, row] = k[b, i]
            cache.values[page, :, row] = v[b, i]


@njit(fastmath=FASTMATH)
def attend_head(q, cache, factor, b, h, out):
    """Attend causally with head ``h`` of text ``b``; q and ``out`` are (batch, count, heads, head_dim).

    The cache holds the new positions, too; the factor of the scores is log2(e) / sqrt(head_dim).
    """
    count, dim, size = q.shape[1], q.shape[3], cache.keys.shape[2]
    before = cache.before[b]
    scores = np.empty((1, before + count + KEYS), q.dtype)
    probs = np.empty((1, before + count), q.dtype)
    row = np.empty((1, dim), q.dtype)
    for i in range(count):
        seen = before + i + 1
        s, p = scores[0], probs[0]  # (length,)
        # S = q · K, in base 2; P = exp(S - max S); O = P · V / sum P
        for d in range(dim):
            row[0, d] = q[b, i, h, d] * factor
        for start in range(0, seen, size):
            page, stop = cache.table[b, start // size], min(size, seen - start)
            scores_of_row(row, 0, cache.keys[page, h, :stop], scores, start)
        largest = s[0]
        for c in range(seen):
            largest = max(largest, s[c])
        shift, total = q.dtype.type(shift_of(largest)), q.dtype.type(0)
        for c in range(seen):
            p[c] = exp2(s[c] - shift)
            total += p[c]
        acc = out[b, i, h]  # (head_dim,)
        acc[:] = 0
        for start in range(0, seen, size):
            page, stop = cache.table[b, start // size], min(size, seen - start)
            add_values(probs, 0, start, cache.values[page, h, :stop], out[b, i, h : h + 1])
        inverse = q.dtype.type(inverse_sum(total))
        for d in range(dim):
            acc[d] *= inverse


@by_size(fastmath=FASTMATH)
def _attend(q, k, v, cache, factor, out):
    append(k, v, cache)
    heads = q.shape[2]
    for item in prange(len(q) * heads):
        attend_head(q, cache, factor, item // heads, item % heads, out)


@njit(fastmath=FASTMATH)
def norm(x, weights, eps, out):
    """Write the layer norm of (rows, width) to ``out``; weights are scale and shift."""
    for row in range(len(x)):
        norm_row(x[row], weights[0], weights[1], eps, x.dtype.type(1), out[row])


@njit(fastmath=FASTMATH)
def multiply(x, weights, out):
    """Write a linear layer of (rows, in_size) to ``out`` (rows, out_size); weights and bias."""
    multiply_few(x, weights[0], weights[1], out, out, False)


@njit_cached(fastmath=FASTMATH)
def _layer_step(x, w, cache, eps, factor, out):
    batch, (_, heads, _, dim) = len(cache.before), cache.keys.shape
    split = batch, len(x) // batch, heads, dim
    normed, joined, added = np.empty_like(x), np.empty_like(x), np.empty_like(x)  # (rows, width)
    q, k, v = np.empty_like(x), np.empty_like(x), np.empty_like(x)  # (rows, width)
    norm(x, w.norm_1, eps, normed)
    multiply(normed, w.q, q)
    multiply(normed, w.k, k)
    multiply(normed, w.v, v)
    append(k.reshape(split), v.reshape(split), cache)
    for b in range(batch):
        for h in range(heads):
            attend_head(q.reshape(split), cache, factor, b, h, joined.reshape(split))
    multiply(joined, w.out, added)
    y = x + added  # (rows, width)
    norm(y, w.norm_2, eps, normed)
    middle = np.empty((len(x), w.widen[0].shape[1]), x.dtype)  # (rows, middle)
    multiply_few(normed, w.widen[0], w.widen[1], middle, middle, True)
    multiply(middle, w.narrow, added)
    out[:] = y + added


def layer_step(x: Array, weights: LayerWeights, cache: Pages, length: int, eps: float) -> Array:
    """Return the output of a layer for the newest positions, and append their keys and values to the cache.

    x is (batch, count, width), contiguous, float32 or float64 like all arrays.  ``length`` is the
    largest number of positions of a text, and ``eps`` is added to the variance by the layer norms.
    """
    rows = x.reshape(-1, x.shape[-1])  # (batch · count, width)
    real = x.dtype.type
    factor = real(LOG2_E / math.sqrt(cache.keys.shape[-1]))
    sizes = len(rows), length, rows.shape[1], weights.widen[0].shape[1]
    if multiply_adds(*sizes) < PARALLEL_FROM:
        out = np.empty_like(rows)
        _layer_step(rows, weights, cache, real(eps), factor, out)
    else:
        out = _shared_step(rows, weights, cache, length, eps, factor)
    return out.reshape(x.shape)


def _shared_step(
    x: Array, w: LayerWeights, cache: Pages, length: int, eps: float, factor: Any
) -> Array:
    """Compute ``_layer_step`` for (rows, width), in kernels that all threads share."""
    batch, (_, heads, _, dim) = len(cache.before), cache.keys.shape
    split = batch, len(x) // batch, heads, dim
    normed, *_ = layer_norm(x, *w.norm_1, eps)
    projected = np.empty((3, *x.shape), x.dtype)  # (3, rows, width)
    parts = np.empty((3, PARTS, *x.shape), x.dtype)
    multiply_three(normed, w.q[0], w.k[0], w.v[0], parts, projected)
    for out, (_, bias) in zip(projected, (w.q, w.k, w.v), strict=True):
        if len(bias):
            out += bias
    joined = np.empty_like(x)
    work = 2 * x.size * length
    run = _attend.parallel if work >= PARALLEL_ATTENTION_FROM else _attend.serial
    run(*projected.reshape(3, *split), cache, factor, joined.reshape(split))
    y = x + linear(joined, *w.out, False)[0]  # (rows, width)
    normed, *_ = layer_norm(y, *w.norm_2, eps)
    middle, _ = linear(normed, *w.widen, True)  # (rows, middle)
    return y + linear(middle, *w.narrow, False)[0]


def multiply_adds(positions: int, length: int, width: int, middle: int) -> int:
    """Return the multiply-adds of a step of ``positions`` in all texts, which attend to ``length``.

    ``middle`` is the width of the feed-forward network.
    """
    return positions * width * (4 * width + 2 * middle + 2 * length)


def pays(positions: int, length: int, width: int, middle: int) -> bool:
    """Tell whether these kernels are the fastest for a step; arguments as of :func:`multiply_adds`."""
    return positions <= FEW_ROWS or multiply_adds(positions, length, width, middle) < PARALLEL_FROM
