"""Matrix products by NumPy's BLAS, in parallel on threads that sleep when they have nothing to do.

BLAS libraries keep threads of their own, which go on spinning after a product; on a machine with two
cores they then take turns with numba's threads, and a training step becomes several times slower.
Here BLAS runs on one thread, and blocks of rows are spread over a pool of Python threads: NumPy lets
go of the interpreter lock while it multiplies.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np
from threadpoolctl import ThreadpoolController

#: Fewer multiply-adds than this are not worth waking a thread for (about 50 microseconds).
PARALLEL_FROM = 2_000_000


@cache
def _blas() -> Any:
    return ThreadpoolController().select(user_api="blas")


@cache
def _pool(workers: int, _process: int) -> ThreadPoolExecutor:
    # Keyed by the process: a pool does not survive a fork.
    return ThreadPoolExecutor(workers, thread_name_prefix="minitorch-blas")


def matmul(a: Any, b: Any, out: Any) -> None:
    """Multiply (…, n, k) by (…, k, m) into (…, n, m); batch dimensions broadcast.

    Args:
        a: Each matrix with contiguous rows or contiguous columns, or BLAS is not used.
        b: Likewise.
        out: Written; rows contiguous.
    """
    threads = numba.get_num_threads()
    with _blas().limit(limits=1):
        if threads == 1 or out.size * a.shape[-1] < PARALLEL_FROM:
            np.matmul(a, b, out=out)
            return
        pool = _pool(threads - 1, os.getpid())
        first, *others = _blocks(a, b, out, threads)
        waiting = [pool.submit(np.matmul, x, y, out=z) for x, y, z in others]
        np.matmul(first[0], first[1], out=first[2])
        for future in waiting:
            future.result()


def _blocks(a: Any, b: Any, out: Any, count: int) -> list[tuple[Any, Any, Any]]:
    """Cut a product into ``count`` products: along the first batch dimension, rows, or columns."""
    a, b = (x if x.ndim == out.ndim else x[(None,) * (out.ndim - x.ndim)] for x in (a, b))
    if out.ndim > 2 and out.shape[0] >= count:
        axis, a_axis, b_axis = 0, 0, 0
    elif out.shape[-2] >= out.shape[-1]:
        axis, a_axis, b_axis = out.ndim - 2, out.ndim - 2, None
    else:
        axis, a_axis, b_axis = out.ndim - 1, None, out.ndim - 1
    edges = [out.shape[axis] * i // count for i in range(count + 1)]
    return [
        (_cut(a, a_axis, start, stop), _cut(b, b_axis, start, stop), _cut(out, axis, start, stop))
        for start, stop in pairwise(edges)
    ]


def _cut(x: Any, axis: int | None, start: int, stop: int) -> Any:
    """Return a range of one axis; all of it if there is none, or if it is broadcast."""
    if axis is None or (axis == 0 and x.ndim > 2 and x.shape[0] == 1):
        return x
    return x[(slice(None),) * axis + (slice(start, stop),)]
