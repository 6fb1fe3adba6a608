"""Gather, scatter-add, stable sort, inverse and cumulative sum on the CPU, equal bit for bit on every run.

Arrays are contiguous, not of 16 bits but for gather.  Rows of the first dimension run in parallel,
and sums within a row have a fixed order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from kernels.runtime.dtypes import BITS, is_half
from kernels.runtime.jit import by_size

Array = np.ndarray[Any, Any]


@by_size()
def _gather(out, x, index, missing):
    for row in prange(len(out)):
        # Not index[row if … else 0]: the row of a prange is unsigned, and a choice of both is a float.
        picks = index[row] if len(index) > 1 else index[0]
        for j in range(len(picks)):
            target = out[row, j]
            if picks[j] < 0:
                target[:] = missing
                continue
            source = x[row, picks[j]]
            for i in range(len(target)):
                target[i] = source[i]


@by_size()
def _scatter_add(source, index, out):
    for row in prange(len(out)):
        targets = index[row] if len(index) > 1 else index[0]
        for j in range(len(targets)):
            added, target = source[row, j], out[row, targets[j]]
            for i in range(len(target)):
                target[i] += added[i]


@by_size()
def _cumsum(x, out, exclusive, reverse):
    for row in prange(len(out)):
        n, inner = x.shape[1], x.shape[2]
        for step in range(n):
            k = n - 1 - step if reverse else step
            before = k + 1 if reverse else k - 1
            for i in range(inner):
                # The sum up to the element before: its result, and itself if the result lacks it.
                total = out[row, before, i] if step > 0 else x.dtype.type(0)
                if exclusive:
                    out[row, k, i] = total + x[row, before, i] if step > 0 else total
                else:
                    out[row, k, i] = total + x[row, k, i]


def gather(x: Array, index: Array, missing: int = 0) -> Array:
    """Pick elements along the middle dimension of x (outer, n, inner): (outer, m, inner).

    The index is (outer, m), or (1, m) for every row: int64 below n, checked by the caller. A negative
    index gives ``missing``, which must be 0 for 16-bit arrays.
    """
    out = np.empty((len(x), index.shape[1], x.shape[2]), x.dtype)
    # Numba does not know 16 bits; they are only moved.
    to, source = (a.view(BITS) if is_half(a.dtype) else a for a in (out, x))
    _gather(to, source, index, source.dtype.type(missing))
    return out


def scatter_add(source: Array, index: Array, n: int) -> Array:
    """Add (outer, m, inner) elements up at the places given by an index: (outer, n, inner), 0 elsewhere.

    The index is (outer, m), or (1, m) for every row: int64 from 0 to n - 1, checked by the caller.
    """
    out = np.zeros((len(source), n, source.shape[2]), source.dtype)
    _scatter_add(source, index, out)
    return out


def sort(x: Array) -> tuple[Array, Array]:
    """Sort each row of (rows, n) in ascending order; equal elements keep their order, NaN comes last.

    Returns the rows, and the place that each element came from, (rows, n) int64.
    """
    order = np.argsort(x, axis=1, kind="stable")
    return np.take_along_axis(x, order, 1), order


def invert(order: Array) -> Array:
    """Return the inverse of each row, a permutation: (rows, n) int64."""
    out = np.empty_like(order)
    np.put_along_axis(out, order, np.arange(order.shape[1])[None], 1)
    return out


def cumsum(x: Array, exclusive: bool, reverse: bool) -> Array:
    """Add up along the middle dimension of (outer, n, inner); ``reverse`` adds up from the end.

    An ``exclusive`` sum leaves out the element itself.
    """
    out = np.empty(x.shape, x.dtype)
    _cumsum(x, out, exclusive, reverse)
    return out
