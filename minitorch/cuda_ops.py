"""The CUDA backend, which launches the kernels; storages stay on the device between launches.

Nothing here compiles or touches the driver before the first launch, so the file imports without a GPU.  The
kernels keep the published launch protocol: arguments as in ``tensor_ops``, and the number of output
elements, ``out_size``, after ``out_strides``.  Shapes and strides are arrays or tuples; the backend passes
tuples, so that a launch copies nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.runtime.targets import COURSE_THREADS, cuda
from kernels.runtime.types import int64

from .backends.compiled_kernels import (
    THREADS_PER_BLOCK,
    broadcast_index,
    callable_,
    index_to_position,
    jit,
    kernel_of,
    to_index,
)
from .backends.compiled_kernels import device_jit as device_jit
from .backends.cuda_practice import jit_mm_practice as jit_mm_practice  # until module 3
from .backends.cuda_practice import jit_sum_practice as jit_sum_practice  # until module 3
from .backends.cuda_practice import mm_practice as mm_practice  # until module 3
from .backends.cuda_practice import sum_practice as sum_practice  # until module 3
from .backends.device_memory import PlainDevice
from .backends.memory import memories
from .tensor_data import MAX_DIMS, Storage, TensorData
from .tensor_ops import TensorBackend, TensorOps

#: Number of threads per block of the reduction, at most.
REDUCE_THREADS = COURSE_THREADS.reduce
#: Number of threads per block of map and zip.
MAP_THREADS = COURSE_THREADS.map
#: Largest third size of a grid.
MOST_BLOCKS = 65535
#: Maximum number of threads per block, for which the reduce kernel allocates shared memory.
MAX_THREADS = 1024


@cache
def tensor_map(fn: Callable[[float], float]) -> Any:
    """Return the kernel of an element-wise function of one tensor, broadcast to the output.

    Args:
        fn: A plain function or a device function.

    Returns:
        A kernel of ``(out, out_shape, out_strides, out_size, in_storage, in_shape, in_strides)``.
    """
    fn = callable_(fn)

    def _map(out, out_shape, out_strides, out_size, in_storage, in_shape, in_strides):
        """Apply ``fn`` to each element.

        Computes: out[i] = fn(in[i broadcast])
        Source: minitorch, task 3.3
        Grid: ceil(out_size / threads)
        Block: any number of threads
        One thread does: one element
        Shared: none
        Registers: two indices, which fall into local memory where shapes are arrays
        Global traffic: one read and one write an element, and the shapes and strides
        Needs: no more than MAX_DIMS dimensions; any device
        """
        # TASK 3.3: One thread, one element: cuda.grid(1), guarded by out_size; indices in cuda.local.array.
        i = cuda.grid(1)
        if i < out_size:
            out_index = cuda.local.array(MAX_DIMS, int64)  # (MAX_DIMS,)
            in_index = cuda.local.array(MAX_DIMS, int64)  # (MAX_DIMS,)
            to_index(i, out_shape, out_index)
            broadcast_index(out_index, out_shape, in_shape, in_index)
            value = fn(in_storage[index_to_position(in_index, in_strides)])
            out[index_to_position(out_index, out_strides)] = value
        # END TASK 3.3

    return kernel_of(_map, fn)


@cache
def tensor_zip(fn: Callable[[float, float], float]) -> Any:
    """Return the kernel of an element-wise function of two tensors that broadcast.

    Args:
        fn: A plain function or a device function.

    Returns:
        A kernel of the storage, shape and strides of out, out_size, and those of a and b.
    """
    fn = callable_(fn)

    def _zip(
        out, out_shape, out_strides, out_size,
        a_storage, a_shape, a_strides, b_storage, b_shape, b_strides,
    ):  # fmt: skip
        """Apply ``fn`` to each pair of elements.

        Computes: out[i] = fn(a[i broadcast], b[i broadcast])
        Source: minitorch, task 3.3
        Grid: ceil(out_size / threads)
        Block: any number of threads
        One thread does: one element
        Shared: none
        Registers: two indices, which fall into local memory where shapes are arrays
        Global traffic: two reads and one write an element, and the shapes and strides
        Needs: no more than MAX_DIMS dimensions; any device
        """
        # TASK 3.3: As _map, with two inputs.
        i = cuda.grid(1)
        if i < out_size:
            out_index = cuda.local.array(MAX_DIMS, int64)  # (MAX_DIMS,)
            in_index = cuda.local.array(MAX_DIMS, int64)  # (MAX_DIMS,)
            to_index(i, out_shape, out_index)
            broadcast_index(out_index, out_shape, a_shape, in_index)
            a = a_storage[index_to_position(in_index, a_strides)]
            broadcast_index(out_index, out_shape, b_shape, in_index)
            b = b_storage[index_to_position(in_index, b_strides)]
            out[index_to_position(out_index, out_strides)] = fn(a, b)
        # END TASK 3.3

    return kernel_of(_zip, fn)


@cache
def tensor_reduce(fn: Callable[[float, float], float]) -> Any:
    """Return the kernel that folds one dimension, beginning with a start value.

    Args:
        fn: A plain function or a device function, associative and commutative.

    Returns:
        A kernel of the storage, shape and strides of out, out_size, those of a, the dimension and
        the start value; the contents of out are overwritten.  If out has c entries along the
        dimension instead of one, the dimension is divided into runs of the length of a block, and
        each entry gets the fold of every c-th run.
    """
    fn = callable_(fn)

    def _reduce(
        out, out_shape, out_strides, out_size,
        a_storage, a_shape, a_strides, reduce_dim, start,
    ):  # fmt: skip
        """Fold one dimension.

        Computes: out[i] = fn(start, a[i, 0], a[i, 1], …)
        Source: minitorch, task 3.3
        Grid: out_size
        Block: up to MAX_THREADS threads; any number, no power of two is needed
        One thread does: its elements in steps of a block, then its part of a tree
        Shared: MAX_THREADS partial folds in the dtype of out
        Registers: one fold; one index in local memory, as reduce_dim is known at run time only
        Global traffic: each element read once, one write for each element of out
        Needs: no more than MAX_DIMS dimensions; any device
        """
        # TASK 3.3: A block folds one element of out in shared memory: a tree, with a barrier each round.
        partial = cuda.shared.array(MAX_THREADS, out.dtype)  # (threads,)
        index = cuda.local.array(MAX_DIMS, int64)  # (MAX_DIMS,)
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
            out[out_position] = fn(start, partial[0]) if active > 0 else start
        # END TASK 3.3

    return kernel_of(_reduce, fn)


def _tensor_matrix_multiply(
    out, out_shape, out_strides, out_size,
    a_storage, a_shape, a_strides, b_storage, b_shape, b_strides,
):  # fmt: skip
    """Multiply (batch, n, k) by (batch, k, m) into (batch, n, m), with any strides.

    An operand may have fewer matrices; they are broadcast.

    Computes: out[z, i, j] = sum over k of a[z, i, k] * b[z, k, j]
    Source: minitorch, task 3.4
    Grid: (ceil(n / 32), ceil(m / 32), batch, or fewer along z)
    Block: (32, 32); x runs along a row, so that neighbouring threads read neighbouring addresses
    One thread does: one element of out for every gridDim.z-th matrix
    Shared: a tile of a and one of b in the dtype of out
    Registers: one sum
    Global traffic: a is read ceil(m / 32) times and b ceil(n / 32) times, each element once
        for a tile of out; each element of out is written once
    Needs: any device
    """
    # TASK 3.4: Walk along k in tiles: load, barrier, multiply, barrier; write once at the end.
    a_tile = cuda.shared.array((THREADS_PER_BLOCK, THREADS_PER_BLOCK), out.dtype)  # (32, 32)
    b_tile = cuda.shared.array((THREADS_PER_BLOCK, THREADS_PER_BLOCK), out.dtype)  # (32, 32)
    tile_row, tile_col = cuda.threadIdx.y, cuda.threadIdx.x
    row = cuda.blockIdx.x * THREADS_PER_BLOCK + tile_row
    col = cuda.blockIdx.y * THREADS_PER_BLOCK + tile_col
    rows, cols, depth = out_shape[1], out_shape[2], a_shape[2]
    zero = out.dtype.type(0)

    for matrix in range(cuda.blockIdx.z, out_shape[0], cuda.gridDim.z):
        a_start = (matrix % a_shape[0]) * a_strides[0] + row * a_strides[1]
        b_start = (matrix % b_shape[0]) * b_strides[0] + col * b_strides[2]
        total = zero
        for start in range(0, depth, THREADS_PER_BLOCK):
            # Outside the matrices the tiles hold zeros, which add nothing.
            a_tile[tile_row, tile_col] = zero
            b_tile[tile_row, tile_col] = zero
            a_col, b_row = start + tile_col, start + tile_row
            if row < rows and a_col < depth:
                a_tile[tile_row, tile_col] = a_storage[a_start + a_col * a_strides[2]]
            if col < cols and b_row < depth:
                b_tile[tile_row, tile_col] = b_storage[b_start + b_row * b_strides[1]]
            cuda.syncthreads()  # both tiles are complete before any thread reads them
            for k in range(THREADS_PER_BLOCK):
                total += a_tile[tile_row, k] * b_tile[k, tile_col]
            cuda.syncthreads()  # all have read the tiles before the next ones replace them
        if row < rows and col < cols:
            position = matrix * out_strides[0] + row * out_strides[1] + col * out_strides[2]
            out[position] = total
    # END TASK 3.4


tensor_matrix_multiply = jit(_tensor_matrix_multiply)


class CudaOps(TensorOps):
    """Operations as CUDA kernels."""

    cuda = is_compiled = True
    target = "cuda"
    make_map = staticmethod(tensor_map)
    make_zip = staticmethod(tensor_zip)
    make_reduce = staticmethod(tensor_reduce)

    @staticmethod
    def allocate(size: int, dtype: np.dtype[Any]) -> Storage:
        """Return an uninitialised flat storage on the device."""
        return memories.device.empty((size,), dtype)

    @staticmethod
    def filled(size: int, value: float, dtype: np.dtype[Any]) -> Storage:
        """Return a flat storage of equal elements on the device."""
        return memories.device.filled(size, value, dtype)

    @classmethod
    def map_loop(cls, fn: Callable[[float], float]) -> Callable[..., None]:
        """Return the loop of an element-wise function of one tensor."""
        return lambda out, a: _launch(tensor_map(fn), out, a)

    @classmethod
    def zip_loop(cls, fn: Callable[[float, float], float]) -> Callable[..., None]:
        """Return the loop of an element-wise function of two tensors."""
        return lambda out, a, b: _launch(tensor_zip(fn), out, a, b)

    @classmethod
    def fold_loop(cls, fn: Callable[[float, float], float], start: float) -> Callable[..., None]:
        """Return the loop that writes the fold of one dimension; ``fn`` must be commutative too."""

        def fold(out: TensorData, a: TensorData, dim: int) -> None:
            threads = min(max(a.shape[dim], 1), REDUCE_THREADS)
            if out.size:  # a grid without blocks cannot be launched
                memories.device.launched(tensor_reduce(fn))[out.size, threads](
                    *_tuples(out), out.size, *_tuples(a), dim, start
                )

        return fold

    @staticmethod
    def matmul_loop(out: TensorData, a: TensorData, b: TensorData) -> None:
        """Multiply (batch, n, k) by (batch, k, m) into (batch, n, m)."""
        if out.size:
            batch, rows, cols = out.shape
            side = THREADS_PER_BLOCK
            grid = -(-rows // side), -(-cols // side), min(batch, MOST_BLOCKS)
            memories.device.launched(tensor_matrix_multiply)[grid, (side, side)](
                *_tuples(out), out.size, *_tuples(a), *_tuples(b)
            )


def _tuples(t: TensorData) -> tuple[Any, ...]:
    """Return storage, shape and strides as the kernels take them, with at least one dimension."""
    return t._storage, t.shape or (1,), t.strides or (1,)


def _launch(kernel: Any, out: TensorData, *inputs: TensorData) -> None:
    """Launch an element-wise kernel, one thread for each element of ``out``."""
    args = [arg for t in inputs for arg in _tuples(t)]
    if out.size:  # a grid without blocks cannot be launched
        blocks = -(-out.size // MAP_THREADS)
        memories.device.launched(kernel)[blocks, MAP_THREADS](*_tuples(out), out.size, *args)


memories.device = PlainDevice()
CudaBackend = TensorBackend(CudaOps)
