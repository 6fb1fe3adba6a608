"""The CUDA backend: what launches the kernels; storages stay on the device between launches."""

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
#: Tile of ``CudaOps.matmul_loop``.
MATMUL_TILE = 8 if IS_SIMULATOR else THREADS_PER_BLOCK


@lru_cache(maxsize=4096)
def _on_device(values: Ints) -> Any:
    """Return a shape or strides as a device array, copied once and not at every launch."""
    # A 0-dimensional tensor is read as one element in one dimension.
    return cuda.to_device(np.array(values or (1,), dtype=np.int64))


def _operand(t: TensorData) -> tuple[Any, Any, Any]:
    """Return the three arguments that a kernel takes for a tensor, all on the device."""
    return t._storage, _on_device(t.shape), _on_device(t.strides)


def _operands(*tensors: TensorData) -> list[tuple[Any, Any, Any]]:
    """Return :func:`_operand` of each; as vectors if they lie alike, which makes indices short."""
    out = tensors[0]
    if all(t.shape == out.shape and t.strides == out.strides for t in tensors):
        return [(t._storage, _on_device((t.size,)), _on_device((1,))) for t in tensors]
    return [_operand(t) for t in tensors]


def _threads(count: int, limit: int) -> int:
    """Return a block size for ``count`` items: a power of two, ``limit`` at most."""
    return min(1 << max(count - 1, 0).bit_length(), limit)


class CudaOps(TensorOps):
    """Operations as CUDA kernels."""

    cuda = True
    attention = launch.Target("cuda", rungs=())

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

        def loop(out: TensorData, a: TensorData) -> None:
            if out.size == 0:  # a grid without blocks cannot be launched
                return
            threads = _threads(out.size, MAP_THREADS)
            out_args, a_args = _operands(out, a)
            tensor_map(fn)[ceil_div(out.size, threads), threads](*out_args, out.size, *a_args)

        return loop

    @staticmethod
    def zip_loop(fn: Callable[[float, float], float]) -> Loop:
        """Return the loop of an element-wise function of two tensors."""

        def loop(out: TensorData, a: TensorData, b: TensorData) -> None:
            if out.size == 0:
                return
            threads = _threads(out.size, MAP_THREADS)
            out_args, a_args, b_args = _operands(out, a, b)
            tensor_zip(fn)[ceil_div(out.size, threads), threads](
                *out_args, out.size, *a_args, *b_args
            )

        return loop

    @staticmethod
    def reduce_loop(fn: Callable[[float, float], float]) -> Loop:
        """Return the loop that folds one dimension; ``fn`` must be commutative too."""

        def loop(out: TensorData, a: TensorData, dim: int) -> None:
            if out.size == 0:
                return
            threads = _threads(a.shape[dim], REDUCE_THREADS)
            reduce_kernel(fn, onto_out=True)[out.size, threads](
                *_operand(out), out.size, *_operand(a), dim, 0.0
            )

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
            *_operand(out), out.size, *_operand(a), *_operand(b)
        )


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
