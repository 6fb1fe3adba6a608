"""Gather, scatter-add, stable sort, inverse and cumulative sum on CUDA, the same bits on every run.

No kernel adds with atomics: one thread writes each element of a result.  Arrays are contiguous, of float32,
float64 or int64; gather takes 16 bits, too.  The functions of ``kernels.cpu.layers.indexing``
have the same names and arguments.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from kernels.cuda.device.half import as_bits, form
from kernels.cuda.layers.softmax import matrix_type
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import Kernel, device_function, scalar_type
from kernels.cuda.runtime.sizes import SIZES, launch_each
from kernels.runtime.targets import cuda
from kernels.runtime.types import int64, void

INT64 = np.dtype(np.int64)
#: Elements of a row that one block sorts in shared memory, a power of two.
SORT_TILE = SIZES.sort_tile


def _cube(dtype: np.dtype[Any]) -> Any:
    return scalar_type(dtype)[:, :, ::1]


@cache
def gather_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the gather kernel for one dtype, including 16-bit ones, which it only moves."""
    dtype = form(dtype).stored

    def gather(x, index, out, missing):
        """Pick elements along the middle dimension.

        Computes: out[o, j, i] = x[o, index[o, j], i], or ``missing`` where the index is negative; an
            index of one row serves every o
        One thread does: one element of out
        Global traffic: one read, one write and one index an element
        Needs: indices below x.shape[1]
        """
        i, picks, inner = cuda.grid(1), out.shape[1], out.shape[2]
        if i < out.shape[0] * picks * inner:
            pick, col = i // inner, i % inner
            row, pick = pick // picks, pick % picks
            index_row = row if index.shape[0] > 1 else 0
            found = index[index_row, pick]
            out[row, pick, col] = x[row, found, col] if found >= 0 else missing

    signature = void(_cube(dtype), matrix_type(INT64), _cube(dtype), scalar_type(dtype))
    return Kernel(gather, signature)


@cache
def scatter_add_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the scatter-add kernel for one dtype."""
    zero = dtype.type(0)

    def scatter_add(source, targets, order, out):
        """Add up, for each element of the result, what is sent to it, in the order of the source.

        Computes: out[o, t, i] = Σ source[o, order[o, j], i] over the j with targets[o, j] = t
        One thread does: one element of out: it finds the first j by bisection and adds from there
        Registers: one sum
        Global traffic: source read once, out written once; log2(count) targets read an element of out
        Needs: targets in ascending order, and for each its place in the source, ascending among equals
        """
        i, rows, inner = cuda.grid(1), out.shape[1], out.shape[2]
        if i < out.shape[0] * rows * inner:
            target, col = i // inner, i % inner
            row, target = target // rows, target % rows
            index_row = row if targets.shape[0] > 1 else 0
            count = targets.shape[1]
            low, high = 0, count
            while low < high:
                middle = (low + high) // 2
                if targets[index_row, middle] < target:
                    low = middle + 1
                else:
                    high = middle
            total = zero
            while low < count and targets[index_row, low] == target:
                total += source[row, order[index_row, low], col]
                low += 1
            out[row, target, col] = total

    index = matrix_type(INT64)
    return Kernel(scatter_add, void(_cube(dtype), index, index, _cube(dtype)))


def gather(x: Any, index: Any, missing: int = 0) -> Any:
    """Pick elements along the middle dimension."""
    out = empty_device((x.shape[0], index.shape[1], x.shape[2]), x.dtype)
    bits = as_bits(x)
    launch_each(
        gather_kernel(x.dtype), out.size, bits, index, as_bits(out), bits.dtype.type(missing)
    )
    return out


def scatter_add(source: Any, index: Any, n: int) -> Any:
    """Add elements up at the places given by an index."""
    out = empty_device((source.shape[0], n, source.shape[2]), source.dtype)
    if out.size:
        launch_each(scatter_add_kernel(source.dtype), out.size, source, *sort(index), out)
    return out


@cache
def _make_before(dtype: np.dtype[Any]) -> Any:
    """Return ``before(a, i, b, j, n)``: whether element i (value a) comes before element j (value b)."""

    @device_function
    def before(a, i, b, j, n):
        # Positions beyond the row come last; NaN last of the row; equal elements as they stood.
        if i >= n or j >= n:
            return i < j
        if a < b or (b != b and a == a):
            return True
        if b < a or (a != a and b == b):
            return False
        return i < j

    return before


@cache
def sort_fill_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that prepares rows for sorting, for one dtype."""

    def sort_fill(x, keys, order):
        """Copy rows to a width that is a power of two, each element with its place.

        Computes: keys[r, i] = x[r, i], order[r, i] = i; beyond the row the key is of no meaning
        One thread does: one element
        Global traffic: one read and two writes an element
        Needs: rows of one element or more
        """
        i, width = cuda.grid(1), keys.shape[1]
        if i < keys.shape[0] * width:
            row, col = i // width, i % width
            keys[row, col] = x[row, min(col, x.shape[1] - 1)]
            order[row, col] = col

    return Kernel(sort_fill, void(matrix_type(dtype), matrix_type(dtype), matrix_type(INT64)))


@cache
def sort_tile_kernel(dtype: np.dtype[Any], tile: int) -> Kernel:
    """Return the kernel of the bitonic stages within a tile, for one dtype and a power of two."""
    real, before = scalar_type(dtype), _make_before(dtype)

    def sort_tile(keys, order, first, last, n):
        """Merge runs of ``first`` elements, then of twice as many, up to ``last``; within tiles.

        Computes: the stages of a bitonic sort whose distances are below the tile
        Source: Batcher, Sorting networks and their applications (1968)
        Grid: keys.size / tile
        Block: tile / 2
        One thread does: one pair at each distance
        Shared: a tile of keys and one of places
        Global traffic: each key and place read and written once
        Needs: rows whose width is a multiple of the tile
        """
        own_keys = cuda.shared.array(tile, real)  # (tile,)
        own_order = cuda.shared.array(tile, int64)  # (tile,)
        thread, width = cuda.threadIdx.x, keys.shape[1]
        tiles = width // tile
        row, start = cuda.blockIdx.x // tiles, (cuda.blockIdx.x % tiles) * tile
        for i in range(thread, tile, tile // 2):
            own_keys[i] = keys[row, start + i]
            own_order[i] = order[row, start + i]
        cuda.syncthreads()  # the tile is loaded before another thread compares it
        size = first
        while size <= last:
            distance = min(size, tile) // 2
            while distance > 0:
                low = 2 * distance * (thread // distance) + thread % distance
                high = low + distance
                a, i, b, j = own_keys[low], own_order[low], own_keys[high], own_order[high]
                # Every other run descends, so that two of them are one bitonic sequence.
                ascends = (start + low) & size == 0
                if before(b, j, a, i, n) == ascends:
                    own_keys[low], own_order[low] = b, j
                    own_keys[high], own_order[high] = a, i
                cuda.syncthreads()  # this distance is complete before the next one reads it
                distance //= 2
            size *= 2
        for i in range(thread, tile, tile // 2):
            keys[row, start + i] = own_keys[i]
            order[row, start + i] = own_order[i]

    signature = void(matrix_type(dtype), matrix_type(INT64), int64, int64, int64)
    return Kernel(sort_tile, signature, tile // 2)


@cache
def sort_pass_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of one bitonic distance through global memory, for one dtype."""
    before = _make_before(dtype)

    def sort_pass(keys, order, size, distance, n):
        """Compare and exchange all pairs at one distance.

        Computes: one distance of the bitonic merge of runs of ``size`` elements
        Source: Batcher, Sorting networks and their applications (1968)
        One thread does: one pair
        Registers: the pair
        Global traffic: each key and place read once, and written if it moves
        Needs: rows whose width is a multiple of twice the distance
        """
        t, half = cuda.grid(1), keys.shape[1] // 2
        if t < keys.shape[0] * half:
            row, pair = t // half, t % half
            low = 2 * distance * (pair // distance) + pair % distance
            high = low + distance
            a, i, b, j = keys[row, low], order[row, low], keys[row, high], order[row, high]
            if before(b, j, a, i, n) == (low & size == 0):
                keys[row, low], order[row, low] = b, j
                keys[row, high], order[row, high] = a, i

    return Kernel(sort_pass, void(matrix_type(dtype), matrix_type(INT64), int64, int64, int64))


@cache
def sort_crop_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that takes sorted rows from their wider copy, for one dtype."""

    def sort_crop(keys, order, values, places):
        """Copy the first elements of each row.

        Computes: values[r, i] = keys[r, i], places[r, i] = order[r, i]
        One thread does: one element
        Global traffic: two reads and two writes an element
        """
        i, n = cuda.grid(1), values.shape[1]
        if i < values.shape[0] * n:
            values[i // n, i % n] = keys[i // n, i % n]
            places[i // n, i % n] = order[i // n, i % n]

    own, index = matrix_type(dtype), matrix_type(INT64)
    return Kernel(sort_crop, void(own, index, own, index))


def sort(x: Any) -> tuple[Any, Any]:
    """Sort each row in ascending order; equal elements keep their order, NaN comes last."""
    rows, n = x.shape
    width = max(2, 1 << (n - 1).bit_length() if n else 0)
    keys, order = empty_device((rows, width), x.dtype), empty_device((rows, width), INT64)
    if x.size:
        launch_each(sort_fill_kernel(x.dtype), keys.size, x, keys, order)
        _sort_filled(keys, order, n)
    if n == width:
        return keys, order
    values, places = empty_device((rows, n), x.dtype), empty_device((rows, n), INT64)
    launch_each(sort_crop_kernel(x.dtype), values.size, keys, order, values, places)
    return values, places


def _sort_filled(keys: Any, order: Any, n: int) -> None:
    """Sort rows whose width is a power of two, each key with its place."""
    width = keys.shape[1]
    tile = min(SORT_TILE, width)
    in_tile = sort_tile_kernel(keys.dtype, tile)[keys.size // tile, tile // 2]
    in_tile(keys, order, 2, tile, n)
    size = 2 * tile
    while size <= width:
        distance = size // 2
        while distance >= tile:
            launch_each(
                sort_pass_kernel(keys.dtype), keys.size // 2, keys, order, size, distance, n
            )
            distance //= 2
        in_tile(keys, order, size, size, n)
        size *= 2


@cache
def invert_kernel() -> Kernel:
    """Return the kernel of inverse permutations."""

    def invert(order, out):
        """Compute the place of each element of a permutation.

        Computes: out[r, order[r, i]] = i
        One thread does: one element
        Global traffic: one read and one write an element
        Needs: rows that are permutations: no two threads write one element
        """
        i, n = cuda.grid(1), order.shape[1]
        if i < order.shape[0] * n:
            out[i // n, order[i // n, i % n]] = i % n

    return Kernel(invert, void(matrix_type(INT64), matrix_type(INT64)))


def invert(order: Any) -> Any:
    """Return the inverse of each row, a permutation: (rows, n) int64."""
    out = empty_device(tuple(order.shape), INT64)
    launch_each(invert_kernel(), out.size, order, out)
    return out


@cache
def cumsum_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of cumulative sums for one dtype."""
    zero = dtype.type(0)

    def cumsum(x, out, exclusive, reverse):
        """Add up along the middle dimension, in order.

        Computes: out[o, j, i] = Σ x[o, k, i] over k <= j; k < j if exclusive; k >= j or k > j in reverse
        One thread does: one column, from its first element to its last
        Registers: one sum
        Global traffic: one read and one write an element
        """
        i, n, inner = cuda.grid(1), out.shape[1], out.shape[2]
        if i < out.shape[0] * inner:
            row, col = i // inner, i % inner
            total = zero
            for step in range(n):
                k = n - 1 - step if reverse else step
                value = x[row, k, col]
                out[row, k, col] = total if exclusive else total + value
                total += value

    return Kernel(cumsum, void(_cube(dtype), _cube(dtype), int64, int64))


def cumsum(x: Any, exclusive: bool, reverse: bool) -> Any:
    """Add up along the middle dimension."""
    out = empty_device(tuple(x.shape), x.dtype)
    launch_each(
        cumsum_kernel(x.dtype), x.shape[0] * x.shape[2], x, out, int(exclusive), int(reverse)
    )
    return out
