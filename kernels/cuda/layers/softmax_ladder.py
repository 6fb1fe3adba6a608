"""Softmax of rows in three steps, naive, safe and online, as kernels that differ only in their passes.

Each row has its own block, and each pass reads it from global memory once.  If all rows that are processed
at a time fit into the cache, later passes cost little.  Otherwise the number of passes determines the time,
and the online step takes three quarters of the time of the safe one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.device.one_source import inverse_sum, shift_of
from kernels.cuda.device.row_folds import RowBlock, make_row_folds
from kernels.cuda.device.vector import EXP2, VECTOR, are_vectors
from kernels.cuda.ptx.llvm import load_row, store_row
from kernels.cuda.runtime.kernel import Kernel, device_function, scalar_type
from kernels.cuda.runtime.sizes import SIZES
from kernels.reference.softmax_ladder import check_rows
from kernels.runtime.targets import cuda
from kernels.runtime.types import void

#: Number of threads per multiprocessor for which the kernels leave registers.
RESIDENT_THREADS = 1024


class LadderBlock(NamedTuple):
    """The shape of a thread block of the softmax ladder; each block processes one row."""

    threads: int  # Threads that share the row
    #: Number of vectors of four elements that a thread loads before it uses the first, so that bandwidth,
    #: not latency, determines the time.
    ahead: int

    @property
    def resident(self) -> int:
        """Blocks that should fit on a multiprocessor at a time."""
        return max(1, min(32, RESIDENT_THREADS // self.threads))


def ladder_block(length: int, itemsize: int) -> LadderBlock:
    """Return the block for rows of one length: the fewest threads that read it in one round."""
    threads, ahead = SIZES.row_threads_least, SIZES.ladder_bytes // (VECTOR * itemsize)
    while threads < SIZES.row_threads_most and threads * ahead * VECTOR < length:
        threads *= 2
    return LadderBlock(threads, ahead)


def _make_read(block: LadderBlock, whole: bool, dtype: np.dtype[Any]) -> Callable[..., None]:
    """Return ``read(x, row, first, values)``, which reads the elements that the thread folds next.

    Those beyond the row are minus infinity, which changes no fold.
    """
    minus_inf, ahead, step = dtype.type(-math.inf), block.ahead, block.threads * VECTOR

    @device_function
    def read(x, row, first, values):
        for u in range(ahead):
            i = first + u * step
            if whole:
                w = p = y = z = minus_inf
                if i < x.shape[1]:
                    w, p, y, z = load_row(x, row, i)
                values[u * VECTOR], values[u * VECTOR + 1] = w, p
                values[u * VECTOR + 2], values[u * VECTOR + 3] = y, z
            else:
                for j in range(VECTOR):
                    values[u * VECTOR + j] = x[row, i + j] if i + j < x.shape[1] else minus_inf

    return read


def _make_statistics(
    step: str, block: LadderBlock, dtype: np.dtype[Any], read: Callable[..., None]
) -> Callable[..., Any]:
    """Return ``statistics(x, row, thread, values, partial)`` of a step, which all threads must call.

    It returns what to subtract from the elements of the row, and the sum of their exponentials; ``values``
    is a local array of the thread.
    """
    exp2, (row_max, row_sum) = EXP2[dtype], make_row_folds(RowBlock(block.threads, 1))
    real, zero, minus_inf = scalar_type(dtype), dtype.type(0), dtype.type(-math.inf)
    log2_e, count = dtype.type(LOG2_E), block.ahead * VECTOR
    stride = block.threads * count

    @device_function
    def maximum(x, row, thread, values, partial):
        """Return m, the largest element of the row."""
        largest = minus_inf
        for first in range(thread * VECTOR, x.shape[1], stride):
            read(x, row, first, values)
            for i in range(count):
                largest = max(largest, values[i])
        return row_max(partial, largest)

    @device_function
    def sum_beside(x, row, thread, values, partial, shift):
        """Return the sum of e^(x - shift)."""
        total = zero
        for first in range(thread * VECTOR, x.shape[1], stride):
            read(x, row, first, values)
            for i in range(count):
                total += exp2((values[i] - shift) * log2_e)
        return row_sum(partial, total)

    @device_function
    def naive(x, row, thread, values, partial):
        return zero, sum_beside(x, row, thread, values, partial, zero)

    @device_function
    def safe(x, row, thread, values, partial):
        shift = real(shift_of(maximum(x, row, thread, values, partial)))
        return shift, sum_beside(x, row, thread, values, partial, shift)

    @device_function
    def online(x, row, thread, values, partial):
        # m = -inf, d = 0
        largest, total = minus_inf, zero
        for first in range(thread * VECTOR, x.shape[1], stride):
            read(x, row, first, values)
            # m_new = max(m, x)
            larger = largest
            for i in range(count):
                larger = max(larger, values[i])
            # d = d e^(m - m_new) + e^(x - m_new), for as many x as are there
            shift = real(shift_of(larger))
            total *= exp2((largest - shift) * log2_e)
            for i in range(count):
                total += exp2((values[i] - shift) * log2_e)
            largest = larger
        # The sums of the threads, each beside its own maximum, become one.
        row_shift = real(shift_of(row_max(partial, largest)))
        total *= exp2((largest - row_shift) * log2_e)
        return row_shift, row_sum(partial, total)

    return {"naive": naive, "safe": safe, "online": online}[step]


def _make_write(
    block: LadderBlock, whole: bool, dtype: np.dtype[Any], read: Callable[..., None]
) -> Callable[..., None]:
    """Return ``write(x, out, row, thread, values, shift, total)``: out = e^(x - shift) / total."""
    exp2, real, log2_e = EXP2[dtype], scalar_type(dtype), dtype.type(LOG2_E)
    ahead, count, step = block.ahead, block.ahead * VECTOR, block.threads * VECTOR
    stride = step * ahead

    @device_function
    def write(x, out, row, thread, values, shift, total):
        inverse = real(inverse_sum(total))
        for first in range(thread * VECTOR, x.shape[1], stride):
            read(x, row, first, values)
            for i in range(count):
                values[i] = exp2((values[i] - shift) * log2_e) * inverse
            for u in range(ahead):
                i, at = first + u * step, u * VECTOR
                if whole and i < x.shape[1]:
                    store_row(
                        out, row, i, values[at], values[at + 1], values[at + 2], values[at + 3]
                    )
                elif not whole:
                    for j in range(VECTOR):
                        if i + j < x.shape[1]:
                            out[row, i + j] = values[at + j]

    return write


@cache
def ladder_kernel(step: str, block: LadderBlock, whole: bool, dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of one step for one shape of block and dtype.

    ``step`` is one of ``READS``; ``whole`` tells whether rows are made of whole, aligned vectors.
    """
    real, count, slots = scalar_type(dtype), block.ahead * VECTOR, RowBlock(block.threads, 1).slots
    read = _make_read(block, whole, dtype)
    statistics = _make_statistics(step, block, dtype, read)
    write = _make_write(block, whole, dtype, read)

    def ladder_softmax(x, out):
        """Apply softmax to each row, in as many passes as the step takes.

        Computes: naive: out = e^x / Σ e^x, no numbers where a sum overflows; safe: out = e^(x - m) /
            Σ e^(x - m), m = max(x); online: the same with the maximum and the sum in one pass, where the
            sum so far shrinks as the maximum grows
        Source: Milakov and Gimelshein (2018), Algorithms 1, 2 and 3, and section 3.1
        Grid: rows
        Block: block.threads
        One thread does: every block.threads-th vector of one row
        Shared: one element a warp
        Registers: block.ahead vectors of four elements, the maximum and the sum
        Global traffic: x read twice, by the safe step three times; out written once
        Needs: warp shuffles and 128-bit loads
        """
        partial = cuda.shared.array(slots, real)  # (slots,)
        values = cuda.local.array(count, real)  # (count,)
        row, thread = cuda.blockIdx.x, cuda.threadIdx.x
        shift, total = statistics(x, row, thread, values, partial)
        write(x, out, row, thread, values, shift, total)

    matrix = real[:, ::1]
    return Kernel(ladder_softmax, void(matrix, matrix), block.threads, resident=block.resident)


def softmax(step: str, x: Any, out: Any, block: LadderBlock | None = None) -> None:
    """Write softmax of each row of x to out.

    Args:
        step: One of :data:`kernels.reference.softmax_ladder.READS`.
        x: (rows, length) on the device, contiguous, float32 or float64.
        out: (rows, length) of the same dtype.
        block: Shape of the block; that of :func:`ladder_block` when None.

    Raises:
        ValueError: If there is no such step, or x and out differ in shape or dtype.
        TypeError: If they are neither float32 nor float64.
    """
    check_rows(step, x, out)
    rows, length = x.shape
    if rows and length:
        block = block or ladder_block(length, x.dtype.itemsize)
        kernel = ladder_kernel(step, block, are_vectors(x, out), np.dtype(x.dtype))
        kernel[rows, block.threads](x, out)
