"""The CUDA backend as the published course has it: the baseline that reports on it compare with.

Every operation is a map, a zip or a reduction of the course, which walks through shapes and strides that
are copied to the device at each launch and back; softmax is composed of such operations; the matrix
product is the course's, a thread for each element.  Storages stay on the device, as they do there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernels.common.geometry import ceil_div
from minitorch.backends.operations import Operations
from minitorch.cuda_ops import (
    THREADS_PER_BLOCK,
    CudaOps,
    tensor_map,
    tensor_matrix_multiply,
    tensor_reduce,
    tensor_zip,
)
from minitorch.tensor_data import TensorData
from minitorch.tensor_ops import TensorBackend

#: Threads of a block of the reduction.
REDUCE_THREADS = 1024


def _parts(t: TensorData) -> tuple[object, object, object]:
    """Return what a launch is given: numba copies the two host arrays to the device and back."""
    return t._storage, np.array(t.shape), np.array(t.strides)


class PublishedOps(CudaOps):
    """Operations as the published course launches them."""

    @classmethod
    def map_loop(cls, fn: Callable[[float], float]) -> Callable[..., None]:
        """Return the loop of an element-wise function of one tensor."""

        def loop(out: TensorData, a: TensorData) -> None:
            blocks = ceil_div(out.size, THREADS_PER_BLOCK)
            tensor_map(fn)[blocks, THREADS_PER_BLOCK](*_parts(out), out.size, *_parts(a))

        return loop

    @classmethod
    def zip_loop(cls, fn: Callable[[float, float], float]) -> Callable[..., None]:
        """Return the loop of an element-wise function of two tensors."""

        def loop(out: TensorData, a: TensorData, b: TensorData) -> None:
            blocks = ceil_div(out.size, THREADS_PER_BLOCK)
            launch = tensor_zip(fn)[blocks, THREADS_PER_BLOCK]
            launch(*_parts(out), out.size, *_parts(a), *_parts(b))

        return loop

    @classmethod
    def fold_loop(cls, fn: Callable[[float, float], float], start: float) -> Callable[..., None]:
        """Return the loop that writes the fold of one dimension."""

        def loop(out: TensorData, a: TensorData, dim: int) -> None:
            launch = tensor_reduce(fn)[out.size, REDUCE_THREADS]
            launch(*_parts(out), out.size, *_parts(a), dim, start)

        return loop

    @staticmethod
    def matmul_loop(out: TensorData, a: TensorData, b: TensorData) -> None:
        """Multiply (batch, n, k) by (batch, k, m) into (batch, n, m)."""
        batch, rows, cols = out.shape
        side = THREADS_PER_BLOCK
        grid = (ceil_div(rows, side), ceil_div(cols, side), batch)
        launch = tensor_matrix_multiply[grid, (side, side, 1)]
        launch(*_parts(out), out.size, *_parts(a), *_parts(b))


PublishedOps.table = Operations(PublishedOps)  # without fused layers
PublishedBackend = TensorBackend(PublishedOps)
