"""Add rows to sums that lie in another order, and weigh both: how partial results are put together."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import int64, void

from kernels.common.geometry import ceil_div
from kernels.cuda.device.half import as_bits, form
from kernels.cuda.runtime.arrays import device_view
from kernels.cuda.runtime.kernel import Kernel, scalar_type
from kernels.cuda.runtime.sizes import SIZES
from kernels.runtime.dtypes import acc_dtype
from kernels.runtime.targets import cuda


@cache
def merge_kernel(dtype: np.dtype[Any], is_weighed: bool) -> Kernel:
    """Return the kernel for values of one dtype, including 16-bit ones, whose sums are float32."""
    stored, widen, *_ = form(dtype)

    def merge(total, values, before, after, first, is_new):
        """Add rows to sums.

        Computes: total[first + j, h, i] = before[h, j] total[first + j, h, i] + after[h, j] values[h, j, i]
        Source: none
        Grid: (ceil(rows · dim / threads), heads)
        Block: any number of threads
        One thread does: one element of the values
        Shared: none
        Registers: none
        Global traffic: one read of the values, one read and one write of the sums
        Needs: nothing
        """
        at, head, dim = cuda.grid(1), cuda.blockIdx.y, values.shape[2]
        if at < values.shape[1] * dim:
            row = at // dim
            i = at - row * dim
            found = widen(values[head, row, i])
            if is_weighed:
                found *= after[head, row]
            if not is_new:
                old = total[first + row, head, i]
                found += old * before[head, row] if is_weighed else old
            total[first + row, head, i] = found

    own = acc_dtype(dtype)
    sums, shares = scalar_type(own)[:, :, ::1], scalar_type(own)[:, ::1]
    signature = void(sums, scalar_type(stored)[:, :, ::1], shares, shares, int64, int64)
    return Kernel(merge, signature)


def merge_rows(
    total: Any, values: Any, shares: tuple[Any, Any] | None, first: int, is_new: bool
) -> None:
    """Add rows to sums in place.

    Args:
        total: (seq, heads, dim), of the dtype in which values are summed.
        values: (heads, rows, dim), of one element or more.
        shares: Factors of what is there and of the values, (heads, rows) each and of the dtype of the sums.
        first: Row of the sums to which the first row is added.
        is_new: Whether to write the rows, rather than to add them to what is there.
    """
    heads, rows, dim = values.shape
    grid = ceil_div(rows * dim, SIZES.flat_threads), heads
    unread = device_view(total, total.shape[1:], (total.shape[2], 1))
    before, after = shares or (unread, unread)
    kernel = merge_kernel(values.dtype, shares is not None)
    kernel[grid, SIZES.flat_threads](total, as_bits(values), before, after, first, int(is_new))
