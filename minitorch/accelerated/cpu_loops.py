"""Loops on the CPU in place of the course's: functions that vectorise, large operations, products by BLAS.

Loops over operands of one layout are those of the course (``fast_ops``), around functions that vectorise;
small tensors run on the calling thread.  Two kinds of large operations have separate loops.  The first are
folds: the course adds one number after the other, which can neither be vectorised nor cut in parts, and is
less precise.  The second are rows to which a number or a row is broadcast: the course's loop learns their
strides only at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from operator import methodcaller
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numba import get_num_threads, prange
from numba.extending import register_jitable

from kernels.cpu.backend import blas, indexing, memory_pool, take, vector_math
from kernels.runtime.jit import serial
from kernels.runtime.memory import join_dims, joined, row_major_strides

from .. import operators
from ..backends.compiled_loops import callable_, compiled, is_ours
from ..fast_ops import FastOps, tensor_map, tensor_reduce, tensor_zip
from ..tensor_data import Ints, Storage, TensorData, strides_from_shape
from .bound_loops import Allocate, BoundOps, Loop, Run, with_layouts

#: Number of elements from which a separate loop for an operation pays off.
LARGE = 1 << 15
#: Number of elements from which a loop that vectorises pays off for a fold.
FOLDED_FROM = 1 << 12
#: Functions that may be folded in any order, as these loops do.
FOLDS = (operators.add, operators.mul, operators.max)

# Sizes of parts are fixed, so that a result does not depend on how many threads there are.  A thread takes
# the next part when it is done with its last: to wake one takes a while, in which the others go on.
#: Number of elements of a row that are folded side by side, each onto the one so many places before it.
#: They fill several vectors, so that an addition need not wait for the previous one.
LANES = 64
#: Number of neighbouring elements that are folded to one in this way, and of such blocks per work item.
BLOCK, BLOCKS = 1024, 64
#: Shortest row that is folded in this way; shorter rows use the loop of the course.
SHORTEST_ROW = 64
#: Number of elements of a broadcast row that one work item computes.
CHUNK = 8192
#: Rows and columns that one work item folds to one row; it stays in the first-level cache meanwhile.
ROWS, COLUMNS = 128, 2048


@cache
def vectorised(fn: Callable[..., float]) -> Callable[..., float]:
    """Return a function whose loop vectorises: one of ``operators`` with ``vector_math`` for ``math``."""
    if not is_ours(fn) or "math" not in fn.__code__.co_names:
        return fn
    names = {**fn.__globals__, "math": vector_math}
    name = f"{fn.__name__}_vectorised"
    return FunctionType(fn.__code__, names, name, fn.__defaults__, fn.__closure__)


# -- broadcast operands ------------------------------------------------------------------------


def row_layout(out: TensorData, a: TensorData, b: TensorData) -> Ints | None:
    """Return how the loop below sees an operation that broadcasts, or None if it does not take it.

    Returns:
        Columns of (rows, columns), and the steps of a and b from row to row and along a row, where they
        are neighbours or one number: 1 or 0.
    """
    layouts = (t for data in (out, a, b) for t in (data.shape, data.strides))
    shape, *steps = joined(*layouts)
    if len(shape) > 2:
        return None
    _, columns = (1, *shape)[-2:]
    (_, out_step), (a_row, a_step), (b_row, b_step) = ((0, *step)[-2:] for step in steps)
    if out_step != 1 or (a_step, b_step) not in ((0, 1), (1, 0), (1, 1)):
        return None
    return columns, a_row, a_step, b_row, b_step


@cache
def row_zip(fn: Callable[[float, float], float]) -> Any:
    """Return the compiled loop of a function of two tensors of which one or both are broadcast.

    Returns:
        A dispatcher of the storages of out, (rows, columns), a and b, and of the numbers that
        :func:`row_layout` returns.
    """
    fn = callable_(vectorised(fn))

    def _row_zip(out, a, b, columns, a_row, a_step, b_row, b_step):
        chunks = (columns + CHUNK - 1) // CHUNK
        for item in prange(len(out) // columns * chunks):
            row, first = item // chunks, item % chunks * CHUNK
            size = min(CHUNK, columns - first)
            target = out[row * columns + first : row * columns + first + size]
            i, j = row * a_row + first * a_step, row * b_row + first * b_step
            # A slice of one element is a number; what is left of a loop then vectorises.
            left = a[i : i + 1 + (size - 1) * a_step]
            right = b[j : j + 1 + (size - 1) * b_step]
            if a_step == 0:
                for n in range(size):
                    target[n] = fn(left[0], right[n])
            elif b_step == 0:
                for n in range(size):
                    target[n] = fn(left[n], right[0])
            else:
                for n in range(size):
                    target[n] = fn(left[n], right[n])

    return compiled(_row_zip, fn)


# -- large folds -------------------------------------------------------------------------------


class FoldLayout(NamedTuple):
    """A fold of (outer, length, inner) elements to (outer, inner), steps in elements.

    Either ``inner`` is 1 and the elements that are folded are neighbours, or the inner ones are.
    """

    outer: int
    outer_step: int
    length: int
    length_step: int
    inner: int


@lru_cache(maxsize=4096)
def fold_layout(shape: Ints, strides: Ints, dim: int) -> FoldLayout | None:
    """Return how the loops below see a fold, or None if they do not take it."""
    length, step = shape[dim], strides[dim]
    kept = (*shape[:dim], *shape[dim + 1 :])
    sizes, _, steps = join_dims(
        kept, row_major_strides(kept), (*strides[:dim], *strides[dim + 1 :])
    )
    if length == 0 or len(sizes) > 2:
        return None
    (outer, inner), (outer_step, inner_step) = (1, *sizes)[-2:], (0, *steps)[-2:]
    if inner_step == 1 and inner > 1:
        return FoldLayout(outer, outer_step, length, step, inner)
    if step == 1 and len(sizes) == 1 and length >= SHORTEST_ROW:
        return FoldLayout(inner, inner_step, length, 1, 1)
    return None


@register_jitable
def fold_halves(fn, values, count, size):
    """Fold ``count`` neighbours of ``size`` values each into the first of them.

    The second half is folded onto the first until one is left: no sum has more terms than it must, and
    each step is a loop that vectorises.
    """
    while count > 1:
        half = (count + 1) // 2
        left, right = values[: (count - half) * size], values[half * size : count * size]
        for i in range(len(left)):
            left[i] = fn(left[i], right[i])
        count = half


@cache
def row_fold(fn: Callable[[float, float], float]) -> Any:
    """Return the compiled loop that folds rows whose elements are neighbours.

    Returns:
        A dispatcher of the storages of out, (rows,), and a, the step from row to row, their length, what
        a fold starts from in the dtype of out, a zero (1,) that counts items, and the number of threads.
    """
    fn = callable_(vectorised(fn))

    def _row_fold(out, a, step, length, start, counter, threads):
        blocks = (length + BLOCK - 1) // BLOCK  # of a row
        folded = np.empty(
            len(out) * blocks, np.float64
        )  # (rows, blocks); float64 costs nothing here
        count = len(folded)
        for _ in prange(threads):
            lanes = np.empty(LANES, out.dtype)
            item = take(counter)
            while item * BLOCKS < count:
                for block in range(item * BLOCKS, min(item * BLOCKS + BLOCKS, count)):
                    first = block % blocks * BLOCK
                    place = block // blocks * step + first
                    end = place + min(BLOCK, length - first)
                    r0 = a[place : min(place + LANES, end)]
                    width = len(r0)
                    for i in range(width):
                        lanes[i] = r0[i]
                    place += LANES
                    while place + LANES <= end:
                        r0 = a[place : place + LANES]
                        for i in range(LANES):
                            lanes[i] = fn(lanes[i], r0[i])
                        place += LANES
                    r0 = a[min(place, end) : end]
                    for i in range(len(r0)):
                        lanes[i] = fn(lanes[i], r0[i])
                    fold_halves(fn, lanes, width, 1)
                    folded[block] = lanes[0]
                item = take(counter)
        for row in range(len(out)):
            values = folded[row * blocks : row * blocks + blocks]
            fold_halves(fn, values, blocks, 1)
            out[row] = fn(start, values[0])

    return compiled(_row_fold, fn)


@cache
def column_fold(fn: Callable[[float, float], float]) -> Any:
    """Return the compiled loop that folds over rows: each column of theirs for itself.

    Returns:
        A dispatcher of the storages of out, (outer, inner), and a, the numbers of a ``FoldLayout``, and
        what a fold starts from and is counted by, as :func:`row_fold`.
    """
    fn = callable_(vectorised(fn))

    def _column_fold(
        out, a, outer, outer_step, length, length_step, inner, start, counter, threads
    ):
        parts, chunks = (length + ROWS - 1) // ROWS, (inner + COLUMNS - 1) // COLUMNS
        size = outer * inner
        folded = out if parts == 1 else np.empty(parts * size, out.dtype)  # (parts, outer, inner)
        for _ in prange(threads):
            item = take(counter)
            while item < parts * outer * chunks:
                column = item % chunks * COLUMNS
                line = item // chunks  # of (parts, outer)
                part, width = line // outer, min(COLUMNS, inner - column)
                total = folded[line * inner + column : line * inner + column + width]
                place = line % outer * outer_step + part * ROWS * length_step + column
                r0 = a[place : place + width]
                for i in range(width):
                    total[i] = r0[i]
                left = min(ROWS, length - part * ROWS) - 1
                # Four at a time: a sum has fewer terms, and the total is read and written less.
                while left >= 4:
                    r0 = a[place + length_step : place + length_step + width]
                    r1 = a[place + 2 * length_step : place + 2 * length_step + width]
                    r2 = a[place + 3 * length_step : place + 3 * length_step + width]
                    place += 4 * length_step
                    r3 = a[place : place + width]
                    for i in range(width):
                        total[i] = fn(total[i], fn(fn(r0[i], r1[i]), fn(r2[i], r3[i])))
                    left -= 4
                while left > 0:
                    place += length_step
                    r0 = a[place : place + width]
                    for i in range(width):
                        total[i] = fn(total[i], r0[i])
                    left -= 1
                item = take(counter)
        fold_halves(fn, folded, parts, size)
        for i in range(size):
            out[i] = fn(start, folded[i])

    return compiled(_column_fold, fn)


def bind_fold(
    fn: Callable[[float, float], float], start: float, dtype: np.dtype[Any], layout: FoldLayout,
    alone: bool,
) -> Callable[[Storage, Storage], None]:  # fmt: skip
    """Return the fold of one dimension: a function of the storages of a contiguous output and of the input.

    Args:
        fn: One of :data:`FOLDS`.
        start: What the fold starts from.
        dtype: Of the output.
        layout: Of the fold.
        alone: On the calling thread.
    """
    loop = row_fold(fn) if layout.inner == 1 else column_fold(fn)
    numbers = (layout.outer_step, layout.length) if layout.inner == 1 else (*layout,)
    first, run = dtype.type(start), serial(loop) if alone else loop

    def fold(out: Storage, a: Storage) -> None:
        threads = 1 if alone else get_num_threads()
        run(out, a, *numbers, first, np.zeros(1, np.int64), threads)

    return fold


# -- the class ----------------------------------------------------------------------------------


class FasterOps(BoundOps, FastOps):
    """The loops of the course where they are fast, others for large operands, and products by BLAS."""

    indexing = indexing
    target = "cpu"

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
        loop = tensor_map(vectorised(fn))
        return Loop(lambda out, a: with_layouts(_by_size(loop, out), out, a))

    @classmethod
    def zip_loop(cls, fn: Callable[[float, float], float]) -> Callable[..., None]:
        """Return the loop of a function of two tensors; large broadcast ones use :func:`row_zip`."""
        loop = tensor_zip(vectorised(fn))

        def bind(out: TensorData, a: TensorData, b: TensorData) -> Run:
            broadcasts = out.size >= LARGE and not a.shape == b.shape == out.shape
            layout = row_layout(out, a, b) if broadcasts else None
            if layout is None:
                return with_layouts(_by_size(loop, out), out, a, b)
            return lambda o, x, y: row_zip(fn)(o, x, y, *layout)

        return Loop(bind)

    @classmethod
    def fold_loop(cls, fn: Callable[[float, float], float], start: float) -> Loop:
        """Return the loop that writes the fold of one dimension; large tensors use :func:`bind_fold`."""
        loop = tensor_reduce(vectorised(fn))

        def bind(out: TensorData, a: TensorData, dim: int) -> Run:
            # The order of other functions may matter.
            is_large = fn in FOLDS and a.size >= FOLDED_FROM
            layout = fold_layout(a.shape, a.strides, dim) if is_large else None
            if layout is not None:
                return bind_fold(fn, start, out.dtype, layout, alone=a.size < LARGE)
            run = with_layouts(_by_size(loop, a), out, a, options=(dim,))

            def fold(o: Storage, x: Storage) -> None:
                o.fill(start)
                run(o, x)

            return fold

        return Loop(bind)

    @classmethod
    def bind_product(cls, out: TensorData, a: TensorData, b: TensorData) -> Run | None:
        """Return a product by BLAS for operands of these layouts, or None if BLAS cannot read them."""
        if a.is_half or not (a.dtype == b.dtype == out.dtype and _for_blas(a) and _for_blas(b)):
            return None
        of_out, of_a, of_b = (_viewed(t) for t in (out, a, b))
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


def _viewed(t: TensorData) -> Callable[[Storage], Storage]:
    """Return a function that views a storage with a tensor's layout as an array of its shape."""
    shape, dtype = t.shape, t.dtype
    if t.strides == strides_from_shape(shape):
        return methodcaller("reshape", shape)
    steps = tuple(stride * dtype.itemsize for stride in t.strides)
    return lambda storage: np.ndarray(shape, dtype, storage, 0, steps)


def _for_blas(t: TensorData) -> bool:
    """Tell whether each matrix of a tensor has contiguous rows or contiguous columns."""
    (rows, cols), (row_step, col_step) = t.shape[-2:], t.strides[-2:]
    return (col_step == 1 and row_step >= cols) or (row_step == 1 and col_step >= rows)
