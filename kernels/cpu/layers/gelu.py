"""GELU on the CPU, in its tanh form, and its gradient, each in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numba.extending import register_jitable

from kernels.common.pointwise import GELU_CONSTANTS, make_gelu
from kernels.cpu.matmul.tile_product import exp2
from kernels.runtime.jit import FASTMATH, by_size

Array = np.ndarray[Any, Any]

#: Elements per work item.
CHUNK = 4096

#: Without fastmath the parallel and the serial loops, which LLVM optimises separately, agree bit for bit,
#: also in a forked child.  There is no sum to vectorise.
ONE_ORDER = FASTMATH - {"reassoc"}

gelu_value, gelu_gradient = make_gelu(njit(fastmath=ONE_ORDER), exp2)


def flat(x: Array) -> Array:
    """Return the elements of an array in one dimension, copied only if they are not contiguous."""
    return np.ascontiguousarray(x).reshape(-1)


@register_jitable
def gelu_constants(real):
    """Return GELU_CONSTANTS in the dtype of the elements."""
    zero, one, three, cubic, inner, factor = GELU_CONSTANTS
    return real(zero), real(one), real(three), real(cubic), real(inner), real(factor)


@by_size(fastmath=ONE_ORDER)
def _gelu(x, out):
    constants = gelu_constants(x.dtype.type)
    for chunk in prange((len(x) + CHUNK - 1) // CHUNK):
        start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, len(x))
        v, y = x[start:stop], out[start:stop]
        for i in range(len(v)):
            y[i] = gelu_value(v[i], constants)


@by_size(fastmath=ONE_ORDER)
def _gelu_backward(dout, x, dx):
    constants = gelu_constants(x.dtype.type)
    for chunk in prange((len(x) + CHUNK - 1) // CHUNK):
        start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, len(x))
        g, v, d = dout[start:stop], x[start:stop], dx[start:stop]
        for i in range(len(v)):
            d[i] = gelu_gradient(g[i], v[i], constants)


def gelu(x: Array) -> Array:
    """Return GELU in its tanh form, element by element."""
    out = np.empty(x.shape, x.dtype)
    _gelu(flat(x), out.reshape(-1))
    return out


def gelu_backward(dout: Array, x: Array) -> Array:
    """Return the gradient of GELU's input."""
    dx = np.empty(x.shape, x.dtype)
    _gelu_backward(flat(dout), flat(x), dx.reshape(-1))
    return dx
