"""C = A·B and C += A·B on tiles in cache, with a block of C in registers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from kernels.cpu.matmul.vector_registers import (
    BLOCK_ROWS,
    VECTOR_BYTES,
    add_outer,
    load_block,
    store_block,
    zero_block,
)
from kernels.cpu.runtime import plain_python
from kernels.cpu.runtime.function_pointers import address_of, call
from kernels.cpu.runtime.vector_math import exp2 as exp2
from kernels.cpu.runtime.vector_math import tanh as tanh
from kernels.runtime.jit import FASTMATH, JIT_DISABLED, njit_cached


def _make_columns(vectors):
    """Return the step of :func:`product` for a number of vectors of columns."""

    @njit(fastmath=FASTMATH)
    def columns(c, a, b, add, start, stop):
        for col in range(start, stop, vectors * (VECTOR_BYTES // c.itemsize)):
            for row in range(0, c.shape[0], BLOCK_ROWS):
                block = (
                    load_block(c, row, col, BLOCK_ROWS, vectors)
                    if add
                    else zero_block(c, BLOCK_ROWS, vectors)
                )
                for i in range(a.shape[1]):
                    block = add_outer(block, a, row, b, col, i)
                store_block(block, c, row, col)

    return columns


_pairs, _singles = _make_columns(2), _make_columns(1)


@njit_cached(fastmath=FASTMATH)
def product(c, a, b, add):
    """Add A·B to C, or write it there; ``add`` is 1 or 0.

    The blocks of C are computed in registers, one after the other.  Blocks that need the same columns
    of B are consecutive, so that B is read from the first-level cache.  C is (m, n) and B (k, n),
    rows contiguous, where n is a multiple of ``LANES``.  A is (m, k) with any strides: it is read
    element by element, so a transpose costs nothing.
    """
    pair = 2 * (VECTOR_BYTES // c.itemsize)
    stop = b.shape[1] // pair * pair
    _pairs(c, a, b, add != 0, 0, stop)
    _singles(c, a, b, add != 0, stop, b.shape[1])


@njit(fastmath=FASTMATH)
def set_product(address, c, a, b):
    """Write A·B to C by the function at an address; see :func:`product`."""
    call(address, (c, a, b, np.int64(0)))


@njit(fastmath=FASTMATH)
def add_product(address, c, a, b):
    """Add A·B to C by the function at an address; see :func:`product`."""
    call(address, (c, a, b, np.int64(1)))


@cache
def product_address(dtype: np.dtype[Any]) -> int:
    """Return the address of :func:`product` for one dtype: compiled once, for all kernels."""
    scalar = from_dtype(dtype)
    rows = types.Array(scalar, 2, "C")
    function = plain_python.product if JIT_DISABLED else product
    return address_of(function, types.void(rows, types.Array(scalar, 2, "A"), rows, types.int64))
