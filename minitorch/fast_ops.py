"""The fast backend: parallel loops compiled by numba, and matrix products by BLAS."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import prange
from numba.extending import register_jitable

from kernels.cpu.backend import blas, indexing, memory_pool
from kernels.runtime.jit import serial

from .backends.bound_loops import Allocate, Loop, Run, with_layouts
from .backends.fast_loops import (
    FOLDED_FROM,
    FOLDS,
    LARGE,
    bind_fold,
    callable_,
    compiled,
    fold_layout,
    parallel_loop,
    row_layout,
    row_zip,
)
from .tensor_data import (
    MAX_DIMS,
    Storage,
    TensorData,
    broadcast_index,
    index_to_position,
    to_index,
)
from .tensor_ops import TensorBackend, TensorOps

#: Number of neighbouring outputs that a reduction folds together, two cache lines of float32.
RUN = 32

# Compiled code may call these; plain Python still sees the plain functions.
for _helper in (to_index, broadcast_index, index_to_position):
    register_jitable(_helper)


@cache
def tensor_map(fn: Callable[[float], float]) -> Any:
    """Return the compiled loop of an element-wise function of one tensor, broadcast to the output.

    Operands of the same layout take one flat parallel loop.  Otherwise rows run in parallel, and along a
    row each operand advances by its innermost stride.

    Args:
        fn: A plain function or a numba dispatcher.

    Returns:
        A dispatcher of ``(out, out_shape, out_strides, in_storage, in_shape, in_strides)``.
    """
    fn = callable_(fn)

    def _map(out, out_shape, out_strides, in_storage, in_shape, in_strides):
        # TASK 3.1: prange over positions; where both lie alike in memory no index is needed.
        if aligned(out_shape, out_strides, in_shape, in_strides):
            for i in prange(len(out)):
                out[i] = fn(in_storage[i])
        else:
            row_shape = out_shape[:-1]
            length = out_shape[-1]
            out_step, in_step = out_strides[-1], innermost_step(in_shape, in_strides)
            for row in prange(size_of(row_shape)):
                out_index = np.zeros(MAX_DIMS, np.int64)
                in_index = np.zeros(MAX_DIMS, np.int64)
                to_index(row, row_shape, out_index)
                broadcast_index(out_index, out_shape, in_shape, in_index)
                o = index_to_position(out_index, out_strides)
                i = index_to_position(in_index, in_strides)
                for _ in range(length):
                    out[o] = fn(in_storage[i])
                    o += out_step
                    i += in_step
        # END TASK 3.1

    return compiled(_map, fn)


@cache
def tensor_zip(fn: Callable[[float, float], float]) -> Any:
    """Return the compiled loop of an element-wise function of two tensors that broadcast.

    It has the same two paths as :func:`tensor_map`.

    Returns:
        A dispatcher of the storage, shape and strides of out, a and b: nine arguments.
    """
    fn = callable_(fn)

    def _zip(out, out_shape, out_strides, a, a_shape, a_strides, b, b_shape, b_strides):
        # TASK 3.1: As _map; index buffers are made inside the prange loop, each thread its own.
        if aligned(out_shape, out_strides, a_shape, a_strides) and aligned(
            out_shape, out_strides, b_shape, b_strides
        ):
            for i in prange(len(out)):
                out[i] = fn(a[i], b[i])
        else:
            row_shape = out_shape[:-1]
            length = out_shape[-1]
            out_step = out_strides[-1]
            a_step = innermost_step(a_shape, a_strides)
            b_step = innermost_step(b_shape, b_strides)
            for row in prange(size_of(row_shape)):
                out_index = np.zeros(MAX_DIMS, np.int64)
                in_index = np.zeros(MAX_DIMS, np.int64)
                to_index(row, row_shape, out_index)
                o = index_to_position(out_index, out_strides)
                broadcast_index(out_index, out_shape, a_shape, in_index)
                i = index_to_position(in_index, a_strides)
                broadcast_index(out_index, out_shape, b_shape, in_index)
                j = index_to_position(in_index, b_strides)
                for _ in range(length):
                    out[o] = fn(a[i], b[j])
                    o += out_step
                    i += a_step
                    j += b_step
        # END TASK 3.1

    return compiled(_zip, fn)


@cache
def tensor_reduce(fn: Callable[[float, float], float]) -> Any:
    """Return the compiled loop that folds one dimension onto the values already in the output.

    Rows of the output run in parallel.  When the folded dimension is the last, the inner loop runs
    along it and writes nothing.  Otherwise a run of neighbouring outputs is folded together, so that
    memory is read in order.

    Returns:
        A dispatcher of the storage, shape and strides of out and a, and the dimension.
    """
    fn = callable_(fn)

    def _reduce(out, out_shape, out_strides, a, a_shape, a_strides, reduce_dim):
        # TASK 3.1: prange over out; the inner loop steps by a stride and calls nothing but fn.
        length, step = a_shape[reduce_dim], a_strides[reduce_dim]
        last = len(out_shape) - 1
        # Neighbouring outputs that one work item folds: 1 when they are folded themselves.
        run = min(out_shape[last], RUN)
        runs = (out_shape[last] + run - 1) // run
        out_step, a_step = out_strides[last], a_strides[last]
        rows = size_of(out_shape[:last])
        for item in prange(rows * runs):
            index = np.zeros(MAX_DIMS, np.int64)
            to_index(item // runs, out_shape[:last], index)
            index[last] = item % runs * run
            o = index_to_position(index, out_strides)
            i = index_to_position(index, a_strides)
            count = min(run, out_shape[last] - index[last])
            if count == 1:
                total = out[o]
                for _ in range(length):
                    total = fn(total, a[i])
                    i += step
                out[o] = total
            else:
                for _ in range(length):
                    for n in range(count):
                        out[o + n * out_step] = fn(out[o + n * out_step], a[i + n * a_step])
                    i += step
        # END TASK 3.1

    return compiled(_reduce, fn)


def _tensor_matrix_multiply(
    out, out_shape, out_strides, a, a_shape, a_strides, b, b_shape, b_strides
):
    """Multiply matrices with any strides: the outer loops parallel, no index buffers.

    Args:
        out: Storage of the product, (batch, n, m).
        out_shape: Shape of out, three sizes.
        out_strides: Strides of out, in elements.
        a: Storage of the left operand, (batch or 1, n, k).
        a_shape: Shape of a, three sizes.
        a_strides: Strides of a, in elements.
        b: Storage of the right operand, (batch or 1, k, m).
        b_shape: Shape of b, three sizes.
        b_strides: Strides of b, in elements.
    """
    # TASK 3.2: prange over rows of out; positions by strides; one product and sum in the inner loop.
    rows, cols, depth = out_shape[1], out_shape[2], a_shape[2]
    a_batch = a_strides[0] if a_shape[0] > 1 else 0
    b_batch = b_strides[0] if b_shape[0] > 1 else 0
    for item in prange(out_shape[0] * rows):
        n, row = item // rows, item % rows
        for col in range(cols):
            i = n * a_batch + row * a_strides[1]
            j = n * b_batch + col * b_strides[2]
            total = out.dtype.type(0)
            for _ in range(depth):
                total += a[i] * b[j]
                i += a_strides[2]
                j += b_strides[1]
            out[n * out_strides[0] + row * out_strides[1] + col * out_strides[2]] = total
    # END TASK 3.2


tensor_matrix_multiply = parallel_loop(_tensor_matrix_multiply)


@register_jitable
def size_of(shape):
    """Return the number of elements of a shape."""
    size = 1
    for dim in range(len(shape)):
        size *= shape[dim]
    return size


@register_jitable
def innermost_step(shape, strides):
    """Return the stride of an operand along the last dimension of a broadcast result."""
    if len(shape) == 0 or shape[-1] == 1:
        return 0
    return strides[-1]


@register_jitable
def aligned(shape1, strides1, shape2, strides2):
    """Tell whether two tensors have the same shape and layout, so that one flat loop serves both.

    Tensors without dimensions also count as aligned, because the row loops need a last dimension.
    """
    if len(shape1) != len(shape2):
        return len(shape1) == 0
    for dim in range(len(shape1)):
        if shape1[dim] != shape2[dim]:
            return False
        if strides1[dim] != strides2[dim] and shape1[dim] != 1:
            return False
    return True


class FastOps(TensorOps):
    """Operations as compiled parallel loops."""

    target = "cpu"
    indexing = indexing
    make_map = staticmethod(tensor_map)
    make_zip = staticmethod(tensor_zip)
    make_reduce = staticmethod(tensor_reduce)

    @staticmethod
    def allocate(size: int, dtype: np.dtype[Any]) -> Storage:
        """Return an uninitialised flat storage."""
        return memory_pool.empty(size, dtype)

    @classmethod
    def allocator(cls, size: int, dtype: np.dtype[Any]) -> Allocate:
        """Return the allocator of storages of a size and dtype; small ones come directly from NumPy."""
        is_small = size * dtype.itemsize < memory_pool.KEPT_FROM
        return np.empty if is_small else cls.allocate  # type: ignore[return-value]

    @classmethod
    def map_loop(cls, fn: Callable[[float], float]) -> Callable[..., None]:
        """Return the loop of a function of one tensor; small tensors run on the calling thread."""
        loop = tensor_map(fn)
        return Loop(lambda out, a: with_layouts(_by_size(loop, out), out, a))

    @classmethod
    def zip_loop(cls, fn: Callable[[float, float], float]) -> Callable[..., None]:
        """Return the loop of a function of two tensors; large broadcast ones use ``fast_loops``."""
        loop = tensor_zip(fn)

        def bind(out: TensorData, a: TensorData, b: TensorData) -> Run:
            broadcasts = out.size >= LARGE and not a.shape == b.shape == out.shape
            layout = row_layout(out, a, b) if broadcasts else None
            if layout is None:
                return with_layouts(_by_size(loop, out), out, a, b)
            return lambda o, x, y: row_zip(fn)(o, x, y, *layout)

        return Loop(bind)

    @classmethod
    def reduce_loop(cls, fn: Callable[[float, float], float]) -> Callable[..., None]:
        """Return the loop that folds one dimension; small tensors run on the calling thread."""
        loop = tensor_reduce(fn)
        return Loop(lambda out, a, dim: with_layouts(_by_size(loop, a), out, a, options=(dim,)))

    @classmethod
    def fold_loop(cls, fn: Callable[[float, float], float], start: float) -> Loop:
        """Return the loop that writes the fold of one dimension; large tensors use ``fast_loops``."""
        of_the_course = super().fold_loop(fn, start)
        if fn not in FOLDS:  # the order may matter
            return of_the_course

        def bind(out: TensorData, a: TensorData, dim: int) -> Run:
            layout = fold_layout(a.shape, a.strides, dim) if a.size >= FOLDED_FROM else None
            if layout is None:
                return of_the_course.bind(out, a, dim)
            return bind_fold(fn, start, out.dtype, layout, alone=a.size < LARGE)

        return Loop(bind)

    @staticmethod
    def matmul_loop(out: TensorData, a: TensorData, b: TensorData) -> None:
        """Multiply (batch, n, k) by (batch, k, m) into (batch, n, m)."""
        tensor_matrix_multiply(*out.tuple(), *a.tuple(), *b.tuple())

    @classmethod
    def bind_product(cls, out: TensorData, a: TensorData, b: TensorData) -> Run | None:
        """Return a product by BLAS for operands of these layouts, or None if BLAS cannot read them."""
        if a.is_half or not (a.dtype == b.dtype == out.dtype and _for_blas(a) and _for_blas(b)):
            return None
        of_out, of_a, of_b = (t.array_view() for t in (out, a, b))
        if blas.is_for_one_thread(out.shape, a.shape[-1]):

            def run(o: Storage, x: Storage, y: Storage) -> None:
                np.matmul(of_a(x), of_b(y), out=of_out(o))

            return run
        return lambda o, x, y: blas.matmul(of_a(x), of_b(y), of_out(o))

    @classmethod
    def matmul_into(cls, out: TensorData, a: TensorData, b: TensorData) -> None:
        """Fill ``out`` with the product, by BLAS if it can read the operands in place."""
        if (run := cls.bind_product(out, a, b)) is None:
            super().matmul_into(out, a, b)
        else:
            run(out._storage, a._storage, b._storage)


def _by_size(loop: Any, t: TensorData) -> Any:
    """Return the variant of a course loop for a size: on all threads, or on the calling thread."""
    return loop if t.size >= LARGE else serial(loop)


def _for_blas(t: TensorData) -> bool:
    """Tell whether each matrix of a tensor has contiguous rows or contiguous columns."""
    (rows, cols), (row_step, col_step) = t.shape[-2:], t.strides[-2:]
    return (col_step == 1 and row_step >= cols) or (row_step == 1 and col_step >= rows)


FastBackend = TensorBackend(FastOps)
