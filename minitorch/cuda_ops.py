"""The CUDA backend: what launches the kernels; storages stay on the device between launches.

Shapes and strides go to the kernels as tuples and not as arrays.  Nothing is copied for them at a
launch, and because a kernel is compiled for each length of the tuples, its indices are registers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels import launch
from kernels.geometry import ceil_div
from kernels.targets import IS_SIMULATOR, cuda

from .cuda_kernels import (
    MAX_THREADS,
    THREADS_PER_BLOCK,
    _mm_practice,
    _sum_practice,
    _tensor_matrix_multiply,
    device_jit,
    jit,
    jit_mm_practice,
    jit_sum_practice,
    matmul_kernel,
    reduce_kernel,
    tensor_map,
    tensor_matrix_multiply,
    tensor_reduce,
    tensor_zip,
)
from .tensor_data import Ints, Storage, TensorData
from .tensor_ops import Loop, TensorBackend, TensorOps

if TYPE_CHECKING:
    from .tensor import Tensor

# The published course finds the kernels here too.
__all__ = [
    "THREADS_PER_BLOCK",
    "CudaBackend",
    "CudaOps",
    "_mm_practice",
    "_sum_practice",
    "_tensor_matrix_multiply",
    "device_jit",
    "jit",
    "jit_mm_practice",
    "jit_sum_practice",
    "mm_practice",
    "sum_practice",
    "tensor_map",
    "tensor_matrix_multiply",
    "tensor_reduce",
    "tensor_zip",
]

#: Block of map and zip: several warps, so that some compute while others wait for memory.
MAP_THREADS = 256
#: Largest grid along z, where the batch of a matrix product goes; the hardware's limit.
MAX_GRID_Z = 65535
# In the simulator each thread of a block is a Python thread, and a barrier waits for all of them.
#: Largest block of ``CudaOps.reduce_loop``.
REDUCE_THREADS = 32 if IS_SIMULATOR else MAX_THREADS
#: Threads that keep a large GPU busy; with enough blocks, small ones have fewer barriers to wait at.
BUSY_THREADS = 1 << 17
#: Tile of ``CudaOps.matmul_loop``.
MATMUL_TILE = 8 if IS_SIMULATOR else THREADS_PER_BLOCK


@lru_cache(maxsize=4096)
def _joined(shape: Ints, *strides: Ints) -> list[Ints]:
    """Join dimensions that every operand steps through evenly: fewer divisions for each element.

    Args:
        shape: The shape of the output.
        strides: Of the output, then of each input; 0 where an input is broadcast.

    Returns:
        Shape and strides of the same elements, the dimensions in the output's order in memory.
        Operands that lie alike become vectors.
    """
    joined: list[Ints] = []  # (size, stride of each operand), the slowest dimension first
    dims = [dim for dim in zip(shape, *strides, strict=True) if dim[0] != 1]
    for size, *steps in sorted(dims, key=lambda dim: -dim[1]):
        slower = joined[-1] if joined else ()
        if slower and all(
            size * step == above for step, above in zip(steps, slower[1:], strict=True)
        ):
            joined[-1] = (slower[0] * size, *steps)
        else:
            joined.append((size, *steps))
    # A single element has no dimension left.
    return list(zip(*joined or [(1,) + (0,) * len(strides)], strict=True))


def _run_elementwise(kernel: Any, out: TensorData, *inputs: TensorData) -> None:
    """Launch a map or zip kernel, one thread for each element of ``out``."""
    if out.size == 0:  # a grid without blocks cannot be launched
        return
    strides = [
        (0,) * (out.dims - t.dims)
        + tuple(0 if size == 1 else step for size, step in zip(t.shape, t.strides, strict=True))
        for t in (out, *inputs)
    ]
    shape, out_strides, *in_strides = _joined(out.shape, *strides)
    threads = _threads(out.size, MAP_THREADS)
    args: list[Any] = [out._storage, shape, out_strides, out.size]
    for t, steps in zip(inputs, in_strides, strict=True):
        args += [t._storage, shape, steps]  # a stride of 0 does the broadcasting
    kernel[ceil_div(out.size, threads), threads](*args)


def _threads(count: int, limit: int) -> int:
    """Return a block size for ``count`` items, ``limit`` at most: a power of two."""
    return 1 << (max(min(count, limit), 1) - 1).bit_length()


class CudaOps(TensorOps):
    """Operations as CUDA kernels."""

    cuda = True
    attention = launch.CUDA

    @staticmethod
    def allocate(size: int, dtype: np.dtype[Any]) -> Storage:
        """Return an uninitialised flat storage on the device."""
        return cuda.device_array(size, dtype)

    @staticmethod
    def filled(size: int, value: float, dtype: np.dtype[Any]) -> Storage:
        """Return a flat storage of equal elements on the device."""
        return cuda.to_device(np.full(size, value, dtype))

    @staticmethod
    def map_loop(fn: Callable[[float], float]) -> Loop:
        """Return the loop of an element-wise function of one tensor."""
        return lambda out, a: _run_elementwise(tensor_map(fn), out, a)

    @staticmethod
    def zip_loop(fn: Callable[[float, float], float]) -> Loop:
        """Return the loop of an element-wise function of two tensors."""
        return lambda out, a, b: _run_elementwise(tensor_zip(fn), out, a, b)

    @staticmethod
    def reduce_loop(fn: Callable[[float, float], float]) -> Loop:
        """Return the loop that folds one dimension; ``fn`` must be commutative too."""

        def loop(out: TensorData, a: TensorData, dim: int) -> None:
            if out.size == 0:
                return
            # The folded dimension comes last; the others may join.
            length, step = a.shape[dim], a.strides[dim]
            kept = [x[:dim] + x[dim + 1 :] for x in (out.shape, out.strides, a.strides)]
            shape, out_strides, a_strides = _joined(*kept)
            share = max(BUSY_THREADS // out.size, 64)
            threads = min(_threads(length, share), REDUCE_THREADS)
            reduce_kernel(fn, onto_out=True)[out.size, threads](
                out._storage, (*shape, 1), (*out_strides, 0), out.size,
                a._storage, (*shape, length), (*a_strides, step), len(shape), 0.0,
            )  # fmt: skip

        return loop

    @staticmethod
    def matmul_loop(out: TensorData, a: TensorData, b: TensorData) -> None:
        """Multiply (batch, n, k) by (batch, k, m) into (batch, n, m)."""
        if out.size == 0:
            return
        batch, rows, cols = out.shape
        tile = MATMUL_TILE
        grid = (ceil_div(rows, tile), ceil_div(cols, tile), min(batch, MAX_GRID_Z))
        matmul_kernel(tile)[grid, (tile, tile, 1)](
            out._storage, out.shape, out.strides, out.size,
            a._storage, a.shape, a.strides, b._storage, b.shape, b.strides,
        )  # fmt: skip


CudaBackend = TensorBackend(CudaOps)


def sum_practice(a: Tensor) -> TensorData:
    """Sum each run of 32 elements of a vector.

    Args:
        a: (size,), on the CUDA backend.

    Returns:
        (ceil(size / 32),), but two or more, as published; what no run fills is zero.
    """
    (size,) = a.shape
    sums = max(ceil_div(size, THREADS_PER_BLOCK), 2)
    out = TensorData(CudaOps.filled(sums, 0.0, a.dtype), (sums,))
    blocks = size // THREADS_PER_BLOCK + 1
    jit_sum_practice[blocks, THREADS_PER_BLOCK](out._storage, a._tensor._storage, size)
    return out


def mm_practice(a: Tensor, b: Tensor) -> TensorData:
    """Multiply two square matrices of 32 rows at most in one block.

    Args:
        a: (size, size), on the CUDA backend.
        b: (size, size), likewise.

    Returns:
        (size, size).
    """
    size, _ = a.shape
    assert a.shape == b.shape == (size, size) and size <= THREADS_PER_BLOCK, (
        f"mm_practice multiplies two square matrices of {THREADS_PER_BLOCK} rows at most, got "
        f"shapes {a.shape} and {b.shape}; use a @ b"
    )
    out = TensorData(CudaOps.allocate(size * size, a.dtype), (size, size))
    storages = (t.contiguous()._tensor._storage for t in (a, b))
    jit_mm_practice[1, (size, size)](out._storage, *storages, size)
    return out
