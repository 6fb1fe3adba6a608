"""Softmax of rows in three steps, naive, safe and online, compiled for the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from kernels.common.online_softmax import LOG2_E
from kernels.cpu.attention.tiles import grown, inverse_sum, shift_of
from kernels.cpu.matmul.tile_product import exp2
from kernels.reference.softmax_ladder import check_rows
from kernels.runtime.jit import FASTMATH, njit_cached

#: Elements that the online step folds at a time: they lie in the first-level cache when read again.
BLOCK = 4096
#: Elements that are compared side by side.
LANES = 64
#: Infinity in the narrowest dtype, so that it does not promote any other.
INFINITY = np.float32(np.inf)


@njit(fastmath=FASTMATH)
def _largest(x):
    """Return the largest element; a NaN may be ignored, because the sum becomes NaN anyway."""
    # Lane by lane, which vectorises: a maximum across a vector does not.
    lanes = np.full(LANES, -np.inf, x.dtype)  # (LANES,)
    whole = len(x) - len(x) % LANES
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = max(lanes[lane], x[first + lane])
    for i in range(whole, len(x)):
        lanes[i - whole] = max(lanes[i - whole], x[i])
    largest = lanes[0]
    for lane in range(LANES):
        largest = max(largest, lanes[lane])
    return largest


@njit(fastmath=FASTMATH)
def _power(y, limit):
    """Return 2^y; infinity from ``limit`` on, a case that exp2 leaves to its callers."""
    return INFINITY if y >= limit else exp2(y)


@njit(fastmath=FASTMATH)
def _sum(x, shift, limit):
    """Return the sum of e^(x - shift)."""
    log2_e, total = x.dtype.type(LOG2_E), x.dtype.type(0)
    for i in range(len(x)):
        total += _power((x[i] - shift) * log2_e, limit)
    return total


@njit(fastmath=FASTMATH)
def _write(x, out, shift, total, limit):
    """Write e^(x - shift) / total."""
    log2_e, inverse = x.dtype.type(LOG2_E), x.dtype.type(inverse_sum(total))
    for i in range(len(x)):
        out[i] = _power((x[i] - shift) * log2_e, limit) * inverse


@njit_cached(parallel=True, fastmath=FASTMATH)
def _naive(x, out, limit):
    for row in prange(len(x)):
        zero = x.dtype.type(0)
        _write(x[row], out[row], zero, _sum(x[row], zero, limit), limit)


@njit_cached(parallel=True, fastmath=FASTMATH)
def _safe(x, out, limit):
    for row in prange(len(x)):
        shift = x.dtype.type(shift_of(_largest(x[row])))
        _write(x[row], out[row], shift, _sum(x[row], shift, limit), limit)


@njit_cached(parallel=True, fastmath=FASTMATH)
def _online(x, out, limit):
    for row in prange(len(x)):
        log2_e = x.dtype.type(LOG2_E)
        largest, total = x.dtype.type(-np.inf), x.dtype.type(0)
        for start in range(0, x.shape[1], BLOCK):
            part = x[row, start : start + BLOCK]  # (BLOCK,), the last one may be short
            # m_new = max(m, x);  d = d e^(m - m_new) + e^(x - m_new)
            new_largest = max(largest, _largest(part))
            shift, rescale = grown(largest, new_largest, log2_e)
            total = total * rescale + _sum(part, shift, limit)
            largest = new_largest
        shift = x.dtype.type(shift_of(largest))
        _write(x[row], out[row], shift, total, limit)


_KERNELS = {"naive": _naive, "safe": _safe, "online": _online}


def softmax(step: str, x: Any, out: Any) -> None:
    """Write softmax of each row of x (rows, length), contiguous, to out by a step of ``READS``.

    Raises:
        ValueError: If there is no such step, or x and out differ in shape or dtype.
        TypeError: If they are neither float32 nor float64.

    Source: Milakov and Gimelshein (2018), Algorithms 1 to 3.
    """
    check_rows(step, x, out)
    if x.size:
        _KERNELS[step](x, out, x.dtype.type(np.finfo(x.dtype).maxexp))
