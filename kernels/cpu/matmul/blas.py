"""Matrix products by BLAS, on numba's threads.

BLAS libraries have their own threads, which continue to spin after a product.  On two cores they displace
numba's, and a training step becomes several times slower.  Here each of numba's threads calls BLAS for a
block of the product, and BLAS itself is limited to one thread.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numba import prange
from numba.np.linalg import ensure_blas
from threadpoolctl import ThreadpoolController

from kernels.common.geometry import PLAIN
from kernels.runtime.jit import njit_cached

#: Multiply-adds below which one thread is used.
PARALLEL_FROM = 500_000
#: The most multiply-adds for which OpenBLAS itself uses one thread: of two matrices (interface/gemm.c:
#: 65,536 times 4), and of a matrix and a vector (interface/gemv.c: 2,304 times 4).  For such products BLAS
#: need not be limited.
ONE_THREAD, ONE_THREAD_VECTOR = 1 << 18, 9216
#: Rows per block, fixed so that no sum depends on the number of threads.
BLOCK_ROWS = 256
#: Maximum number of parts of a sum over many rows, each with a result of its own.
PARTS = 4


@cache
def _libraries() -> Any:
    """Return the BLAS libraries of this process: NumPy's, and SciPy's, which numba calls."""
    ensure_blas()  # else SciPy's comes with the first product, too late to be found here
    return ThreadpoolController().select(user_api="blas").lib_controllers


def _is_for_all(library: Any) -> bool:
    """Tell whether the number of threads of a library is global, not one for each calling thread."""
    return library.internal_api == "openblas" and library.threading_layer != "openmp"


def _set(library: Any, threads: int) -> None:
    """Set the number of threads of a library."""
    # The controller itself leaves such a library to the thread that asked first, for as long as that lives.
    getattr(library, "_real_set_num_threads", library.set_num_threads)(threads)


class _Hold:
    """The count of callers that hold the globally threaded BLAS libraries, and their previous threads."""

    def __init__(self) -> None:
        self.lock, self.callers, self.before = threading.Lock(), 0, []

    def enter(self) -> None:
        """Limit these libraries to one thread, unless they are already."""
        with self.lock:
            if not self.callers:
                shared = filter(_is_for_all, _libraries())
                self.before = [(library, library.get_num_threads()) for library in shared]
                for library, _ in self.before:
                    _set(library, 1)
            self.callers += 1

    def leave(self) -> None:
        """Restore their threads when the last caller leaves."""
        with self.lock:
            self.callers -= 1
            if not self.callers:
                for library, threads in self.before:
                    _set(library, threads)


_hold = _Hold()
if hasattr(os, "register_at_fork"):
    # The other threads, which would never give the lock back, are not in a forked child.
    os.register_at_fork(after_in_child=_hold.__init__)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Limit BLAS to one thread per call within the context, which several Python threads may enter."""
    own = [(one, one.get_num_threads()) for one in _libraries() if not _is_for_all(one)]
    _hold.enter()
    try:
        for library, _ in own:
            _set(library, 1)
        yield
    finally:
        for library, threads in own:
            _set(library, threads)
        _hold.leave()


def row_blocks(rows: int, multiply_adds: int) -> int:
    """Return the number of blocks of rows of a product, each for one thread."""
    return PLAIN.ceil_div(rows, BLOCK_ROWS) if multiply_adds >= PARALLEL_FROM else 1


@njit_cached(parallel=True)
def _by_rows(a, b, out, blocks):
    """Multiply (rows, depth) by (depth, cols) or (depth,), a block of rows for each work item."""
    size = (len(a) + blocks - 1) // blocks
    for block in prange(blocks):
        start, stop = block * size, min((block + 1) * size, len(a))
        if start < stop:
            np.dot(a[start:stop], b, out[start:stop])


@njit_cached(parallel=True)
def _by_depth(a_t, b, parts):
    """Multiply a_tᵀ, (depth, rows)ᵀ, by (depth, cols): a range of the depth for each part."""
    count = len(parts)
    size = (len(b) + count - 1) // count
    for part in prange(count):
        start, stop = part * size, min((part + 1) * size, len(b))
        np.dot(a_t[start:stop].T, b[start:stop], parts[part])


@njit_cached(parallel=True)
def _by_matrices(a, b, out):
    """Multiply (count, rows, depth) by (count, depth, cols), a matrix for each work item."""
    for i in prange(len(out)):
        np.dot(a[i], b[i], out[i])


def is_for_one_thread(shape: tuple[int, ...], depth: int) -> bool:
    """Tell whether BLAS itself keeps a product of this shape on the calling thread."""
    is_vector = shape[-1] == 1 or shape[-2] == 1
    return math.prod(shape) * depth < (ONE_THREAD_VECTOR if is_vector else ONE_THREAD)


def matmul(a: Any, b: Any, out: Any) -> None:
    """Multiply (…, n, k) by (…, k, m) into contiguous (…, n, m); batch dimensions broadcast.

    BLAS is used only for matrices with contiguous rows or contiguous columns.
    """
    if is_for_one_thread(out.shape, a.shape[-1]):
        np.matmul(a, b, out=out)
        return
    multiply_adds = out.size * a.shape[-1]
    with one_thread_each():
        if multiply_adds < PARALLEL_FROM:
            np.matmul(a, b, out=out)
        elif out.ndim == 2 and len(a) == 1 and a.flags.c_contiguous and b.flags.f_contiguous:
            _by_rows(b.T, a[0], out[0], row_blocks(b.shape[1], multiply_adds))
        elif (
            out.ndim == 2
            and a.flags.c_contiguous
            and (b.flags.c_contiguous or b.flags.f_contiguous)
        ):
            _by_rows(a, b, out, row_blocks(len(a), multiply_adds))
        elif out.ndim == 2 and a.flags.f_contiguous and b.flags.c_contiguous:
            parts = np.empty(
                (min(PARTS, PLAIN.ceil_div(len(b), BLOCK_ROWS)), *out.shape), out.dtype
            )
            _by_depth(a.T, b, parts)
            parts.sum(axis=0, out=out)
        elif a.shape[:-2] == b.shape[:-2] and a.flags.c_contiguous and b.flags.c_contiguous:
            count = out.size // (out.shape[-2] * out.shape[-1])
            _by_matrices(*(x.reshape(count, *x.shape[-2:]) for x in (a, b, out)))
        else:
            np.matmul(a, b, out=out)
