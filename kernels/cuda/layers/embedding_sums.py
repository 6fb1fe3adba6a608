"""The gradient of a lookup in a small table: each block adds up a part of the lookups in shared memory.

One thread per element of the table, as for a large table, would leave the device idle: half of the lookups
may be for one row, such as padding or a dark pixel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.device.half import as_bits, form
from kernels.cuda.device.partial_sums import sum_parts
from kernels.cuda.layers.softmax import matrix_type
from kernels.cuda.runtime.arrays import empty_device, reshaped
from kernels.cuda.runtime.kernel import Kernel, scalar_type
from kernels.cuda.runtime.sizes import SIZES
from kernels.runtime.dtypes import acc_dtype
from kernels.runtime.targets import cuda
from kernels.runtime.types import int64, void

#: Threads of a block, and columns of the table that it adds up.
COLUMNS = SIZES.lookup_columns
#: Bytes of the table in shared memory.
TABLE_BYTES = SIZES.lookup_bytes
#: Minimum number of lookups per part, maximum number of parts, and number of lookups read ahead.
LEAST_LOOKUPS, MOST_PARTS, AHEAD = SIZES.lookups


def _most_rows(dtype: np.dtype[Any]) -> int:
    return TABLE_BYTES // (COLUMNS * acc_dtype(dtype).itemsize)


def fits(num_rows: int, count: int, dtype: np.dtype[Any]) -> bool:
    """Tell whether a table is small enough, and has several lookups for each of its rows."""
    return num_rows <= min(_most_rows(dtype), count // 4)


@cache
def embedding_sums_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that adds up parts of the lookups, for one dtype, including 16-bit ones."""
    own, (stored, widen, _, _) = acc_dtype(dtype), form(dtype)
    real, zero, shape = scalar_type(own), own.type(0), (_most_rows(dtype), COLUMNS)

    def embedding_sums(dout, ids, partial, rows, chunk):
        """Add up, for each row of the table, the gradients of a part of its lookups, in their order.

        Each thread has its own column, so that no two threads add to the same element, without a barrier.

        Computes: partial[p rows + r] = Σ dout[i] over the i of part p with ids[i] = r
        Grid: (parts, ceil(dim / 32))
        Block: (32,)
        One thread does: one column of the table
        Shared: the table's columns, (384, 32) float32 or (192, 32) float64
        Registers: the lookups that are read ahead
        Global traffic: dout read once, ids once for each 32 columns; partial written once
        Needs: ids inside the table
        """
        table = cuda.shared.array(shape, real)  # (rows, 32)
        lane, part = cuda.threadIdx.x, cuda.blockIdx.x
        count, dim = dout.shape
        col = cuda.blockIdx.y * COLUMNS + lane
        if col < dim:
            for row in range(rows):
                table[row, lane] = zero
            first = part * chunk
            last = min(first + chunk, count)
            whole = first + (last - first) // AHEAD * AHEAD
            targets, values = cuda.local.array(AHEAD, int64), cuda.local.array(AHEAD, real)
            for start in range(first, whole, AHEAD):
                for i in range(AHEAD):  # all are on their way before the first is added
                    targets[i] = ids[start + i]
                    values[i] = widen(dout[start + i, col])
                for i in range(AHEAD):
                    table[targets[i], lane] += values[i]
            for i in range(whole, last):
                table[ids[i], lane] += widen(dout[i, col])
            for row in range(rows):
                partial[part * rows + row, col] = table[row, lane]

    signature = void(matrix_type(stored), int64[::1], matrix_type(own), int64, int64)
    return Kernel(embedding_sums, signature)


def add_up(dout: Any, placed: Any, dtable: Any) -> None:
    """Fill the gradient of a table; the parts, and so the rounding, depend only on the sizes.

    ``dout`` is (count, dim), ``placed`` (count,) int64 on the device, and ``dtable`` (rows, dim).
    """
    (count, dim), rows = dout.shape, dtable.shape[0]
    chunk = max(LEAST_LOOKUPS, ceil_div(count, MOST_PARTS))
    parts = ceil_div(count, chunk)
    partial = empty_device((parts * rows, dim), acc_dtype(dout.dtype))
    grid = parts, ceil_div(dim, COLUMNS)
    embedding_sums_kernel(dout.dtype)[grid, COLUMNS](as_bits(dout), placed, partial, rows, chunk)
    matrix = rows * dim
    flat = reshaped(partial, (parts * matrix,))
    sum_parts(flat, reshaped(dtable, (matrix,)), (matrix, matrix, dim, 1), (1, 1, rows, dim), parts)
