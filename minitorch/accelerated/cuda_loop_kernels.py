"""The kernels that the CUDA backend launches itself: element-wise functions and reductions.

They compute what the kernels of the course (``course_kernels``) compute, but faster.  Each is compiled for
given dtypes and takes few arguments, because Python prepares every argument of a launch.  Positions are
unsigned: a signed index could be negative, meaning a position counted from the end, and numba would test
for that in each access.

They read and write 16-bit storage directly, as uint16, and convert it in registers, so that each element
moves once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.cuda.backend import (
    ALL_LANES,
    SIZES,
    WARP,
    FoldShape,
    Kernel,
    device_callable,
    device_function,
    form,
    scalar_type,
)
from kernels.runtime.dtypes import FLOAT32, FLOAT64, acc_dtype, is_half
from kernels.runtime.targets import cuda
from kernels.runtime.types import int64, types, uint32, uint64, void


def _storage(dtype: np.dtype[Any]) -> Any:
    """Return numba's type of a storage."""
    return types.Array(scalar_type(form(dtype).stored), 1, "C")


def _computed(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that a function of elements is computed in."""
    return np.result_type(*map(acc_dtype, dtypes))


def _written(out_dtype: np.dtype[Any], computed: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the type of a result in a register, and the function that makes it an element of out."""
    if not is_half(out_dtype):
        return scalar_type(out_dtype), form(out_dtype).narrow
    wide = np.result_type(FLOAT32, computed)
    own = form(out_dtype)
    return scalar_type(wide), own.narrow_double if wide == FLOAT64 else own.narrow


def _kernel(source: Callable[..., None], fn: Callable[..., float], *arguments: Any) -> Kernel:
    """Return a kernel around ``fn``, under a name of its own for the profiler."""
    source.__qualname__ = f"{source.__name__.strip('_')}_{getattr(fn, '__name__', 'fn')}"
    return Kernel(source, void(*arguments), SIZES.flat_threads)


# ---------------------------------------------------------------------------------------------
# Element-wise
# ---------------------------------------------------------------------------------------------


@device_function
def _divided(i, size):
    """Return i // size; 64 bits would take three times as long."""
    return int64(uint32(i) // uint32(size))


@cache
def _make_place_of(dims: int) -> Any:
    """Return ``place_of(i, rows, cols)``: plane, row and column of an element of (planes, rows, cols).

    Args:
        dims: Up to 3; of fewer than three there is one plane, and of one there is one row.
    """

    @device_function
    def in_vector(i, rows, cols):
        return 0, 0, i

    @device_function
    def in_matrix(i, rows, cols):
        row = _divided(i, cols)
        return 0, row, i - row * cols

    @device_function
    def in_planes(i, rows, cols):
        row = _divided(i, cols)
        plane = _divided(row, rows)
        return plane, row - plane * rows, i - row * cols

    return {1: in_vector, 2: in_matrix, 3: in_planes}[dims]


@cache
def map_kernel(
    fn: Callable[[float], float], dims: int, out_dtype: np.dtype[Any], a_dtype: np.dtype[Any]
) -> Kernel:
    """Return the kernel of a function of one tensor whose dimensions join to three at most.

    Args:
        fn: A plain function or a device function.
        dims: The number that they join to.
        out_dtype: Of the output.
        a_dtype: Of the input.
    """
    computed, widen = _computed(a_dtype), form(a_dtype).widen
    function, (real, narrow) = device_callable(fn, computed), _written(out_dtype, computed)
    threads, items, place_of = SIZES.flat_threads, SIZES.flat_items, _make_place_of(dims)

    def _map(out, a, rows, cols, a_plane, a_row, a_col):
        """Apply ``fn`` to each element of (planes, rows, cols).

        Computes: out[i, j, k] = fn(a[i, j, k])
        Source: none
        Grid: ceil(out.size / (threads · items))
        Block: threads
        One thread does: items elements, as far apart as there are threads; all are read before the
            first is written, so that many reads are under way at a time
        Shared: none
        Registers: items results
        Global traffic: one read and one write an element
        Needs: out contiguous, fewer than 2³² elements
        """
        values = cuda.local.array(items, real)  # (items,)
        first = cuda.blockIdx.x * (threads * items) + cuda.threadIdx.x
        last = out.size - 1
        for n in range(items):
            # Threads beyond the end read the last element again: cheaper than a branch.
            i = min(first + n * threads, last)
            plane, row, col = place_of(i, rows, cols)
            values[n] = function(widen(a[uint64(plane * a_plane + row * a_row + col * a_col)]))
        for n in range(items):
            i = first + n * threads
            if i <= last:
                out[uint64(i)] = narrow(values[n])

    return _kernel(_map, fn, _storage(out_dtype), _storage(a_dtype), *[int64] * 5)


@cache
def zip_kernel(
    fn: Callable[[float, float], float],
    dims: int,
    out_dtype: np.dtype[Any],
    a_dtype: np.dtype[Any],
    b_dtype: np.dtype[Any],
) -> Kernel:
    """Return the kernel of a function of two tensors whose dimensions join to three at most.

    Args:
        fn: A plain function or a device function.
        dims: The number that they join to.
        out_dtype: Of the output.
        a_dtype: Of the left input.
        b_dtype: Of the right input.
    """
    computed = _computed(a_dtype, b_dtype)
    widen_a, widen_b = form(a_dtype).widen, form(b_dtype).widen
    function, (real, narrow) = device_callable(fn, computed), _written(out_dtype, computed)
    threads, items, place_of = SIZES.flat_threads, SIZES.flat_items, _make_place_of(dims)

    def _zip(out, a, b, rows, cols, a_plane, a_row, a_col, b_plane, b_row, b_col):
        """Apply ``fn`` to each pair of elements of (planes, rows, cols); a step of 0 broadcasts.

        Computes: out[i, j, k] = fn(a[i, j, k], b[i, j, k])
        Source: none
        Grid: ceil(out.size / (threads · items))
        Block: threads
        One thread does: items elements, as in map
        Shared: none
        Registers: items results
        Global traffic: two reads and one write an element
        Needs: out contiguous, fewer than 2³² elements
        """
        values = cuda.local.array(items, real)  # (items,)
        first = cuda.blockIdx.x * (threads * items) + cuda.threadIdx.x
        last = out.size - 1
        for n in range(items):
            i = min(first + n * threads, last)
            plane, row, col = place_of(i, rows, cols)
            x = widen_a(a[uint64(plane * a_plane + row * a_row + col * a_col)])
            y = widen_b(b[uint64(plane * b_plane + row * b_row + col * b_col)])
            values[n] = function(x, y)
        for n in range(items):
            i = first + n * threads
            if i <= last:
                out[uint64(i)] = narrow(values[n])

    storages = (_storage(dtype) for dtype in (out_dtype, a_dtype, b_dtype))
    return _kernel(_zip, fn, *storages, *[int64] * 8)


# ---------------------------------------------------------------------------------------------
# Folds
# ---------------------------------------------------------------------------------------------


def _make_warp_fold(fn: Callable[[float, float], float]) -> Any:
    """Return the function by which the lanes of a warp fold one value each."""

    @device_function
    def warp_fold(value, lane, active):
        """Return the fold of the first ``active`` lanes to lane 0; every lane of the warp takes part."""
        distance = WARP // 2
        while distance > 0:
            other = cuda.shfl_down_sync(ALL_LANES, value, distance)
            if lane + distance < active:
                value = fn(value, other)
            distance //= 2
        return value

    return warp_fold


def _make_lanes_fold(fn: Callable[[float, float], float], shape: FoldShape) -> tuple[Any, int]:
    """Return the function by which the lanes of an output fold one value each.

    Args:
        fn: A device function.
        shape: How the threads share the work.

    Returns:
        ``lanes_fold(partial, lane, slot, value, active)``, which returns the fold of the first
        ``active`` lanes to lane 0, and the elements of the shared array ``partial`` that it needs.
    """
    lanes, outputs = shape.lanes, shape.outputs
    if shape.along and lanes >= WARP:
        warps = lanes // WARP
        warp_fold = _make_warp_fold(fn)

        @device_function
        def lanes_fold(partial, lane, slot, value, active):
            warp, lane = lane // WARP, lane % WARP
            value = warp_fold(value, lane, min(active - warp * WARP, WARP))
            if warps > 1:
                if lane == 0:
                    partial[slot * warps + warp] = value
                cuda.syncthreads()  # the fold of each warp is stored before one warp folds them
                value = partial[slot * warps + min(lane, warps - 1)]
                value = warp_fold(value, lane, (active + WARP - 1) // WARP)
            return value

        return lanes_fold, outputs * warps

    @device_function
    def lanes_fold(partial, lane, slot, value, active):
        partial[lane * outputs + slot] = value
        cuda.syncthreads()  # every value is stored before another lane folds it
        # Fold the upper half onto the lower; an odd one in the middle waits for the next round.
        folds = lanes
        while folds > 1:
            half = (folds + 1) // 2
            if lane < folds - half and lane + half < active:
                value = fn(value, partial[(lane + half) * outputs + slot])
                partial[lane * outputs + slot] = value
            cuda.syncthreads()  # this round is complete before the next one reads it
            folds = half
        return value

    return lanes_fold, outputs * lanes


@cache
def fold_kernel(
    fn: Callable[[float, float], float],
    out_dtype: np.dtype[Any],
    a_dtype: np.dtype[Any],
    shape: FoldShape,
) -> Kernel:
    """Return the kernel that folds one dimension.

    Args:
        fn: A plain function or a device function, associative and commutative.
        out_dtype: Of the output: that of the input, or of its accumulator.
        a_dtype: Of the input.
        shape: How the threads share the work.
    """
    dtype = acc_dtype(a_dtype)
    widen, narrow = form(a_dtype).widen, form(out_dtype).narrow
    function, real, zero = device_callable(fn, dtype), scalar_type(dtype), dtype.type(0)
    lanes, outputs_a_block, along = shape
    lanes_fold, partials = _make_lanes_fold(function, shape)

    def _fold(out, a, outputs, length, step, inner, outer_step, inner_step, chunk, start, is_last):
        """Fold a dimension, or each part of it.

        Computes: out[part, o] = fn(start, a[o, 0], a[o, 1], …), without start unless is_last
        Source: none
        Grid: (ceil(outputs / outputs a block), parts)
        Block: (lanes, outputs) where the folded dimension is contiguous, and otherwise (outputs,
            lanes), so that neighbouring threads read neighbouring addresses
        One thread does: every lanes-th element of one part of one output, then its part of a tree;
            the order depends on the shape alone
        Shared: one value per warp; where lanes are not neighbours, one per thread
        Registers: one fold, and the next four elements
        Global traffic: each element read once, one write for each output of each part
        Needs: outputs = (outer, inner), inner_step apart within a row, outer_step from row to row
        """
        partial = cuda.shared.array(partials, real)  # (partials,)
        lane, slot = cuda.threadIdx.x, cuda.threadIdx.y
        if not along:
            lane, slot = slot, lane
        output = cuda.blockIdx.x * outputs_a_block + slot
        first = cuda.blockIdx.y * chunk
        stop = min(first + chunk, length)
        active = min(stop - first, lanes) if output < outputs else 0

        total = zero
        if lane < active:
            at = output // inner * outer_step + output % inner * inner_step + (first + lane) * step
            jump = lanes * step
            total = widen(a[uint64(at)])
            at += jump
            k = first + lane + lanes
            while k + 3 * lanes < stop:
                w, x = widen(a[uint64(at)]), widen(a[uint64(at + jump)])
                y, z = widen(a[uint64(at + 2 * jump)]), widen(a[uint64(at + 3 * jump)])
                total = function(function(function(function(total, w), x), y), z)
                at += 4 * jump
                k += 4 * lanes
            while k < stop:
                total = function(total, widen(a[uint64(at)]))
                at += jump
                k += lanes
        total = lanes_fold(partial, lane, slot, total, active)
        if lane == 0 and output < outputs:
            if is_last:
                total = function(start, total) if active > 0 else start
            out[cuda.blockIdx.y * outputs + output] = narrow(total)

    signature = (_storage(out_dtype), _storage(a_dtype), *[int64] * 7, scalar_type(dtype), int64)
    return _kernel(_fold, fn, *signature)
