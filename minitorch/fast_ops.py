"""The fast backend: parallel loops compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import prange
from numba.extending import register_jitable

from .backends.compiled_loops import callable_, compiled, parallel_loop
from .tensor_data import (
    MAX_DIMS,
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

    is_compiled = True
    make_map = staticmethod(tensor_map)
    make_zip = staticmethod(tensor_zip)
    make_reduce = staticmethod(tensor_reduce)

    @classmethod  # beyond module 5
    def served(cls) -> dict[str, Callable[..., Any]]:  # beyond module 5
        """Return the functions that make or are the loops of this class, by the name of the operation."""
        return {**super().served(), "matrix_multiply": _tensor_matrix_multiply}

    @staticmethod
    def matmul_loop(out: TensorData, a: TensorData, b: TensorData) -> None:
        """Multiply (batch, n, k) by (batch, k, m) into (batch, n, m)."""
        tensor_matrix_multiply(*out.tuple(), *a.tuple(), *b.tuple())


FastBackend = TensorBackend(FastOps)
