"""Add up partial sums of matrices in order, so that the result is equal from run to run."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.device import half
from kernels.cuda.runtime.kernel import Kernel, scalar_type
from kernels.cuda.runtime.sizes import SIZES
from kernels.runtime.dtypes import acc_dtype
from kernels.runtime.targets import cuda
from kernels.runtime.types import int64, types, void

Ints = tuple[int, ...]


@cache
def sum_parts_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that adds up the parts of matrices, and rounds the sums to a dtype."""
    own, (stored, _, narrow, _) = acc_dtype(dtype), half.form(dtype)
    zero = own.type(0)

    def sum_parts(partial, out, out_steps, shape):
        """Add parts in order.

        Computes: out[i, j] = Σ_part partial[part, i, j] for each batch and head
        Grid: (rows, ceil(columns / threads), batch * heads); no thread divides to find its element
        Block: any number of threads
        One thread does: one element of out
        Registers: one sum
        Global traffic: each element of partial read once, each of out written once
        """
        heads, rows, cols, parts = shape
        matrix, number, row = rows * cols, cuda.blockIdx.z, cuda.blockIdx.x
        col = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        at = number // heads * out_steps[0] + number % heads * out_steps[1]
        at += row * out_steps[2] + col
        first = number * parts * matrix + row * cols + col
        if col < cols:
            total = zero
            for part in range(parts):
                total += partial[first + part * matrix]
            out[at] = narrow(total)

    partial, four = types.Array(scalar_type(own), 1, "C"), types.UniTuple(int64, 4)
    return Kernel(
        sum_parts, void(partial, types.Array(scalar_type(stored), 1, "C"), four, four)
    )  # fmt: skip


def sum_parts(partial: Any, out: Any, out_steps: Ints, shape: Ints, parts: int) -> None:
    """Fill a stack of matrices with the sums of their parts.

    ``partial`` is (batch, heads, parts, rows, cols), flat, of the dtype of sums, and ``shape`` (batch,
    heads, rows, cols).  The strides of out are in elements; the last is 1.
    """
    batch, heads, rows, cols = shape
    grid = rows, ceil_div(cols, SIZES.flat_threads), batch * heads
    sum_parts_kernel(out.dtype)[grid, SIZES.flat_threads](
        partial, half.as_bits(out), out_steps, (heads, rows, cols, parts)
    )
