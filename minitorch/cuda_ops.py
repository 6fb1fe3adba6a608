"""The CUDA backend: map, zip, reduce and the matrix product as kernels on the GPU.

Nothing here compiles or touches the driver before the first launch, so the file imports without a
GPU.  The raw kernels keep the published launch protocol: arguments as in ``tensor_ops``, and the
number of output elements, ``out_size``, after ``out_strides``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import int64

from kernels import launch
from kernels.geometry import ceil_div
from kernels.targets import IS_SIMULATOR, cuda

from . import tensor_data
from .tensor_data import MAX_DIMS, Ints, Storage, TensorData
from .tensor_ops import Loop, TensorBackend, TensorOps

if TYPE_CHECKING:
    from .tensor import Tensor

#: Of the practice kernels, and the side of a published matmul block; a warp.
THREADS_PER_BLOCK = 32
#: Block of map and zip: several warps, so that some compute while others wait for memory.
MAP_THREADS = 256
#: Largest block of reduce, and the block of its published launch.
REDUCE_THREADS = 1024
#: Largest grid along z, where the batch of a matrix product goes; the hardware's limit.
MAX_GRID_Z = 65535
#: Tile of ``CudaOps.matmul_loop``.  The simulator starts a Python thread for each of tile² threads.
MATMUL_TILE = 8 if IS_SIMULATOR else THREADS_PER_BLOCK


def device_jit(fn: Callable[..., Any], **options: Any) -> Any:
    """Compile a function that kernels call; inlined, which needs no GPU at compile time."""
    return cuda.jit(device=True, inline="always", **options)(fn)


def jit(fn: Callable[..., None], **options: Any) -> Any:
    """Compile a kernel, at its first launch with each combination of argument types."""
    return cuda.jit(**options)(fn)


# A plain function called from a kernel is unknown to the CUDA compiler; these are the index helpers
# that the kernels below call.
to_index = device_jit(tensor_data.to_index)
index_to_position = device_jit(tensor_data.index_to_position)
broadcast_index = device_jit(tensor_data.broadcast_index)


@cache
def _callable(fn: Callable[..., float]) -> Any:
    """Let a kernel call a plain function; what is compiled for the device it can call already."""
    return device_jit(fn) if isinstance(fn, FunctionType) else fn


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


@cache
def tensor_map(fn: Callable[[float], float]) -> Any:
    """Return the kernel of an element-wise function of one tensor, broadcast to the output.

    Args:
        fn: A plain function or a device function.

    Returns:
        A kernel of ``(out, out_shape, out_strides, out_size, in_storage, in_shape, in_strides)``.
    """
    fn = _callable(fn)

    def _map(out, out_shape, out_strides, out_size, in_storage, in_shape, in_strides):
        """Apply ``fn`` to each element.

        Computes: out[i] = fn(in[i broadcast])
        Grid: ceil(out_size / threads)
        Block: any number of threads
        One thread does: one element
        Shared: none
        Registers: two indices, in local memory because their length is known at run time only
        Global traffic: one read and one write an element, and the shapes and strides
        """
        i = cuda.grid(1)
        if i < out_size:
            out_index = cuda.local.array(MAX_DIMS, int64)
            in_index = cuda.local.array(MAX_DIMS, int64)
            to_index(i, out_shape, out_index)
            broadcast_index(out_index, out_shape, in_shape, in_index)
            value = fn(in_storage[index_to_position(in_index, in_strides)])
            out[index_to_position(out_index, out_strides)] = value

    return jit(_map)


@cache
def tensor_zip(fn: Callable[[float, float], float]) -> Any:
    """Return the kernel of an element-wise function of two tensors that broadcast.

    Args:
        fn: A plain function or a device function.

    Returns:
        A kernel of the storage, shape and strides of out, out_size, and those of a and b.
    """
    fn = _callable(fn)

    def _zip(
        out, out_shape, out_strides, out_size,
        a_storage, a_shape, a_strides, b_storage, b_shape, b_strides,
    ):  # fmt: skip
        """Apply ``fn`` to each pair of elements.

        Computes: out[i] = fn(a[i broadcast], b[i broadcast])
        Grid: ceil(out_size / threads)
        Block: any number of threads
        One thread does: one element
        Shared: none
        Registers: two indices, in local memory because their length is known at run time only
        Global traffic: two reads and one write an element, and the shapes and strides
        """
        i = cuda.grid(1)
        if i < out_size:
            out_index = cuda.local.array(MAX_DIMS, int64)
            in_index = cuda.local.array(MAX_DIMS, int64)
            to_index(i, out_shape, out_index)
            broadcast_index(out_index, out_shape, a_shape, in_index)
            a = a_storage[index_to_position(in_index, a_strides)]
            broadcast_index(out_index, out_shape, b_shape, in_index)
            b = b_storage[index_to_position(in_index, b_strides)]
            out[index_to_position(out_index, out_strides)] = fn(a, b)

    return jit(_zip)


@cache
def tensor_reduce(fn: Callable[[float, float], float]) -> Any:
    """Return the kernel that folds one dimension, beginning with a start value.

    Args:
        fn: A plain function or a device function, associative and commutative.

    Returns:
        A kernel of the storage, shape and strides of out, out_size, those of a, the dimension and
        the start value; what out holds is overwritten.  Where out has c entries along the
        dimension and not one, each gets the fold of every c-th run of elements as long as a block.
    """
    return _reduce_kernel(fn, onto_out=False)


@cache
def _reduce_kernel(fn: Callable[[float, float], float], onto_out: bool) -> Any:
    """Return the kernel of :func:`tensor_reduce`; ``onto_out`` starts from what out holds."""
    fn = _callable(fn)

    def _reduce(
        out, out_shape, out_strides, out_size,
        a_storage, a_shape, a_strides, reduce_dim, start,
    ):  # fmt: skip
        """Fold one dimension.

        Computes: out[i] = fn(start, a[i, 0], a[i, 1], …)
        Grid: out_size
        Block: up to REDUCE_THREADS threads; any number, no power of two is needed
        One thread does: its elements in steps of a block, then its part of a tree
        Shared: REDUCE_THREADS partial folds in the dtype of out
        Registers: one fold; one index in local memory
        Global traffic: each element read once, one write for each element of out
        """
        partial = cuda.shared.array(REDUCE_THREADS, out.dtype)  # (threads,)
        index = cuda.local.array(MAX_DIMS, int64)
        thread = cuda.threadIdx.x
        threads = cuda.blockDim.x

        to_index(cuda.blockIdx.x, out_shape, index)
        out_position = index_to_position(index, out_strides)
        chunk = index[reduce_dim]  # 0 unless out has more entries than one along the dimension
        stride = out_shape[reduce_dim] * threads
        length = a_shape[reduce_dim]
        step = a_strides[reduce_dim]
        index[reduce_dim] = 0
        row = index_to_position(index, a_strides)

        first = chunk * threads
        active = max(min(length - first, threads), 0)  # threads with an element of their own
        if thread < active:
            total = a_storage[row + (first + thread) * step]
            for k in range(first + thread + stride, length, stride):
                total = fn(total, a_storage[row + k * step])
            partial[thread] = total
        cuda.syncthreads()  # every fold is stored before another thread reads it

        # Fold the upper half onto the lower; an odd one in the middle waits for the next round.
        folds = active
        while folds > 1:
            half = (folds + 1) // 2
            if thread < folds - half:
                partial[thread] = fn(partial[thread], partial[thread + half])
            cuda.syncthreads()  # this round is complete before the next one reads it
            folds = half

        if thread == 0 and cuda.blockIdx.x < out_size:
            origin = out[out_position] if onto_out else start
            out[out_position] = fn(origin, partial[0]) if active > 0 else origin

    return jit(_reduce)


@cache
def _matmul_source(tile: int) -> Callable[..., None]:
    """Return the matrix product for one tile size, not yet compiled."""

    def _tensor_matrix_multiply(
        out, out_shape, out_strides, out_size,
        a_storage, a_shape, a_strides, b_storage, b_shape, b_strides,
    ):  # fmt: skip
        """Multiply (batch or 1, n, k) by (batch or 1, k, m) into (batch, n, m), any strides.

        Computes: out[z, i, j] = sum over k of a[z, i, k] * b[z, k, j]
        Grid: (ceil(n / tile), ceil(m / tile), batch, or fewer along z)
        Block: (tile, tile); x runs along a row, so that neighbours read neighbours
        One thread does: one element of out for every gridDim.z-th matrix
        Shared: a tile of a and one of b in the dtype of out
        Registers: one sum
        Global traffic: a is read ceil(m / tile) times and b ceil(n / tile) times, each element once
            for a tile of out; each element of out is written once
        """
        a_tile = cuda.shared.array((tile, tile), out.dtype)  # (tile, tile)
        b_tile = cuda.shared.array((tile, tile), out.dtype)  # (tile, tile)
        tile_row, tile_col = cuda.threadIdx.y, cuda.threadIdx.x
        row = cuda.blockIdx.x * tile + tile_row
        col = cuda.blockIdx.y * tile + tile_col
        rows, cols, depth = out_shape[1], out_shape[2], a_shape[2]
        a_batch = a_strides[0] if a_shape[0] > 1 else 0
        b_batch = b_strides[0] if b_shape[0] > 1 else 0
        zero = out.dtype.type(0)

        for matrix in range(cuda.blockIdx.z, out_shape[0], cuda.gridDim.z):
            a_row = matrix * a_batch + row * a_strides[1]
            b_col = matrix * b_batch + col * b_strides[2]
            total = zero
            for start in range(0, depth, tile):
                # Outside the matrices the tiles hold zeros, which add nothing.
                a_tile[tile_row, tile_col] = zero
                b_tile[tile_row, tile_col] = zero
                if row < rows and start + tile_col < depth:
                    a_tile[tile_row, tile_col] = a_storage[a_row + (start + tile_col) * a_strides[2]]
                if col < cols and start + tile_row < depth:
                    b_tile[tile_row, tile_col] = b_storage[b_col + (start + tile_row) * b_strides[1]]
                cuda.syncthreads()  # both tiles are complete before any thread reads them
                for k in range(tile):
                    total += a_tile[tile_row, k] * b_tile[k, tile_col]
                cuda.syncthreads()  # every thread has read the tiles before the next ones replace them
            if row < rows and col < cols:
                position = matrix * out_strides[0] + row * out_strides[1] + col * out_strides[2]
                out[position] = total

    return _tensor_matrix_multiply


@cache
def _matmul_kernel(tile: int) -> Any:
    return jit(_matmul_source(tile))


_tensor_matrix_multiply = _matmul_source(THREADS_PER_BLOCK)
tensor_matrix_multiply = _matmul_kernel(THREADS_PER_BLOCK)


# ---------------------------------------------------------------------------------------------
# Practice: the two ideas above, shared memory and tiles, each alone
# ---------------------------------------------------------------------------------------------


def _sum_practice(out: Storage, a: Storage, size: int) -> None:
    """Sum each run of THREADS_PER_BLOCK elements.

    Computes: out[block] = sum of a[block * 32 : block * 32 + 32]
    Grid: any number of blocks that covers size
    Block: THREADS_PER_BLOCK
    One thread does: one element, then its part of a tree
    Shared: THREADS_PER_BLOCK elements
    Registers: none
    Global traffic: each element read once, one write a block

    Args:
        out: (blocks or fewer,); a block without elements writes nothing.
        a: (size,).
        size: Number of elements.
    """
    partial = cuda.shared.array(THREADS_PER_BLOCK, out.dtype)  # (THREADS_PER_BLOCK,)
    thread = cuda.threadIdx.x
    i = cuda.grid(1)
    partial[thread] = a[i] if i < size else 0.0
    cuda.syncthreads()  # every element is stored before a neighbour reads it
    half = THREADS_PER_BLOCK // 2
    while half > 0:
        if thread < half:
            partial[thread] += partial[thread + half]
        cuda.syncthreads()  # this round is complete before the next one reads it
        half //= 2
    if thread == 0 and i < size:
        out[cuda.blockIdx.x] = partial[0]


jit_sum_practice = jit(_sum_practice)


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


def _mm_practice(out: Storage, a: Storage, b: Storage, size: int) -> None:
    """Multiply two square matrices that fit in one block.

    Computes: out = a @ b
    Grid: 1
    Block: (size, size) or more, THREADS_PER_BLOCK² at most
    One thread does: one element of out
    Shared: a and b
    Registers: one sum
    Global traffic: each element of a and b read once, each of out written once

    Args:
        out: (size * size,), row-major; likewise a and b.
        a: Likewise.
        b: Likewise.
        size: 1 to THREADS_PER_BLOCK.
    """
    a_shared = cuda.shared.array((THREADS_PER_BLOCK, THREADS_PER_BLOCK), out.dtype)  # (size, size)
    b_shared = cuda.shared.array((THREADS_PER_BLOCK, THREADS_PER_BLOCK), out.dtype)  # (size, size)
    row, col = cuda.threadIdx.y, cuda.threadIdx.x
    if row < size and col < size:
        a_shared[row, col] = a[row * size + col]
        b_shared[row, col] = b[row * size + col]
    cuda.syncthreads()  # both matrices are complete before any thread reads a row or a column
    if row < size and col < size:
        total = out.dtype.type(0)
        for k in range(size):
            total += a_shared[row, k] * b_shared[k, col]
        out[row * size + col] = total


jit_mm_practice = jit(_mm_practice)


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


# ---------------------------------------------------------------------------------------------
# The backend
# ---------------------------------------------------------------------------------------------


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
    """Operations as CUDA kernels; storages stay on the device between them."""

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
            _reduce_kernel(fn, onto_out=True)[out.size, threads](
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
        _matmul_kernel(tile)[grid, (tile, tile, 1)](
            *_operand(out), out.size, *_operand(a), *_operand(b)
        )


CudaBackend = TensorBackend(CudaOps)
