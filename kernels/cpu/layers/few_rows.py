"""Products of a few rows and a large matrix on the CPU: every core reads a part of the matrix.

Such a product takes as long as its weights take to arrive from memory, and one core cannot request
them as fast as memory delivers them.  BLAS packs the weights first, which costs more than the product.
"""

from __future__ import annotations

from numba import njit, prange

from kernels.runtime.jit import FASTMATH, njit_cached

#: Maximum number of rows without BLAS: each weight is used too rarely to be packed.
FEW_ROWS = 4
#: Ranges of the depth whose sums are added up at the end; fixed, so that no sum depends on the number of
#: threads.
PARTS = 8


@njit(fastmath=FASTMATH)
def multiply_part(rows, weights, part, out):
    """Write the product of rows and one range of the depth, below ``PARTS``, reading its weights once."""
    depth = len(weights)
    size = (depth + PARTS - 1) // PARTS
    start, stop = min(part * size, depth), min((part + 1) * size, depth)
    fours = start + (stop - start) // 4 * 4
    out[:] = 0
    for k in range(start, fours, 4):  # four rows of the weights for each pass over a row of out
        a, b, c, d = weights[k], weights[k + 1], weights[k + 2], weights[k + 3]  # (out_size,)
        for row in range(len(rows)):
            x, y = rows[row], out[row]  # (in_size,), (out_size,)
            for i in range(len(y)):
                y[i] += x[k] * a[i] + x[k + 1] * b[i] + x[k + 2] * c[i] + x[k + 3] * d[i]
    for k in range(fours, stop):
        last = weights[k]  # (out_size,)
        for row in range(len(rows)):
            x, y = rows[row], out[row]  # (in_size,), (out_size,)
            for i in range(len(y)):
                y[i] += x[k] * last[i]


@njit(fastmath=FASTMATH)
def add_parts(parts, out):
    """Write the sum of the (PARTS, rows, out_size) parts to ``out``, in their order."""
    out[:] = parts[0]
    for part in range(1, PARTS):
        for row in range(len(out)):
            x, y = parts[part, row], out[row]  # (out_size,)
            for i in range(len(y)):
                y[i] += x[i]


@njit_cached(parallel=True, fastmath=FASTMATH)
def multiply_by_parts(rows, weights, parts, out):
    """Multiply (rows, in_size) by contiguous (in_size, out_size) on all threads.

    ``parts`` is (PARTS, rows, out_size) and ``out`` (rows, out_size); both are written.
    """
    for part in prange(PARTS):
        multiply_part(rows, weights, part, parts[part])
    add_parts(parts, out)


@njit_cached(parallel=True, fastmath=FASTMATH)
def multiply_three(rows, first, second, third, parts, out):
    """Multiply the same rows by three contiguous matrices (in_size, out_size), waking the threads once.

    ``parts`` is (3, PARTS, rows, out_size) and ``out`` (3, rows, out_size); both are written.
    """
    for item in prange(3 * PARTS):
        part = item % PARTS
        if item < PARTS:
            multiply_part(rows, first, part, parts[0, part])
        elif item < 2 * PARTS:
            multiply_part(rows, second, part, parts[1, part])
        else:
            multiply_part(rows, third, part, parts[2, part])
    for i in range(3):
        add_parts(parts[i], out[i])
