"""Write rows at places read from memory: a captured step repeats launches with the same arguments."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import int64, void

from kernels.common.geometry import ceil_div
from kernels.cuda.device.half import as_bits, form
from kernels.cuda.runtime.kernel import Kernel, scalar_type
from kernels.cuda.runtime.sizes import SIZES
from kernels.runtime.targets import cuda


@cache
def put_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that writes rows at given places, for one dtype."""
    matrix = scalar_type(form(dtype).stored)[:, ::1]

    def put(x, index, out):
        """Copy rows to the places given by an index.

        Computes: out[index[0, j], i] = x[j, i]
        Grid: ceil(x.size / threads)
        Block: any number of threads
        One thread does: one element of x
        Global traffic: one read, one write and one index an element
        Needs: indices below out.shape[0], no two alike
        """
        i, inner = cuda.grid(1), x.shape[1]
        if i < x.shape[0] * inner:
            row, col = i // inner, i % inner
            out[index[0, row], col] = x[row, col]

    return Kernel(put, void(matrix, int64[:, ::1], matrix))


def put_rows(x: Any, index: Any, out: Any) -> None:
    """Copy rows to the places given by an index, in place.

    Args:
        x: (m, inner), with at least one element.
        index: (1, m) int64 below n, all different, checked by the caller.
        out: (n, inner).
    """
    blocks = ceil_div(x.shape[0] * x.shape[1], SIZES.flat_threads)
    put_kernel(x.dtype)[blocks, SIZES.flat_threads](as_bits(x), index, as_bits(out))
