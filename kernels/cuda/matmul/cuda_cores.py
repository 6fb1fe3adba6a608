"""The matrix product on CUDA cores, with tiles in shared memory and registers.

One kernel serves the tensors' ``@`` and the naive rung of attention.  It reads operands of any strides in
place, such as transposed and broadcast ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common import geometry
from kernels.cuda.device.memory import sum_kernel
from kernels.cuda.device.one_source import ceil_div
from kernels.cuda.device.vector import VECTOR
from kernels.cuda.ptx.llvm import load_shared
from kernels.cuda.runtime.arrays import device_view, empty_device, reshaped
from kernels.cuda.runtime.kernel import Kernel, device_function, scalar_type
from kernels.cuda.runtime.sizes import SIZES, ProductTile, launch_each
from kernels.runtime.targets import cuda
from kernels.runtime.types import int64, types, uint64, void

#: Maximum number of threads per block, on any device.
MAX_THREADS = 1024
#: Steps along the depth between two tests for its end; a tile's depth is a multiple.
UNROLL = 4

Ints = tuple[int, ...]


def shared_elements(tile: ProductTile) -> int:
    """Return the elements of shared memory of a block: two tiles of each operand."""
    return 2 * tile.depth * (tile.rows + tile.cols + 2 * VECTOR)


class Elements(NamedTuple):
    """The elements that a thread copies from each tile of an operand; they lie along one dimension."""

    along: Any  # Whether they are in different lines, at one depth; else in one line
    deep: Any  # Depth of the first one in the tile
    left: Any  # Lines of the operand from its line on
    apart: Any  # Distance of two neighbours in lines or depth
    jump: Any  # Their distance in the operand
    hop: Any  # Their distance in shared memory
    place: Any  # Place of the first one in a stage of shared memory


@cache
def _make_copy(lines: int, depth: int, threads: int, dtype: np.dtype[Any]) -> tuple[Any, Any, Any]:
    """Return ``share``, ``fetch`` and ``place``, by which a block copies (lines, depth) of an operand.

    The lines of the left operand are its rows, and those of the right operand its columns.  In shared
    memory they are stored side by side, (depth, lines + VECTOR), so that the threads multiply one row of it
    at a time. Between ``fetch`` and ``place`` the elements are in registers, so that global memory is read
    while the previous tile is multiplied.
    """
    # The zero is made here: zeros of float32 and float64 are equal, and a cache would take one for both.
    zero, stride, loads = dtype.type(0), lines + VECTOR, lines * depth // threads

    @device_function
    def share(thread, at, line_step, depth_step, left, offset):
        """Return a thread's :class:`Elements` of tiles from ``at`` on, and the position of the first.

        Neighbouring threads read along the contiguous dimension of the operand.
        """
        along = depth_step < line_step
        if along:
            line, deep, apart = thread // depth, thread % depth, threads // depth
            jump, hop = apart * line_step, apart
        else:
            line, deep, apart = thread % lines, thread // lines, threads // lines
            jump, hop = apart * depth_step, apart * stride
        first = offset + deep * stride + line
        own = Elements(along, deep, left - line, apart, jump, hop, first)
        return own, at + line * line_step + deep * depth_step

    @device_function
    def fetch(source, at, own, depth_left, values):
        """Read the thread's elements into registers, with zeros beyond the operand and its depth."""
        deep = depth_left - own.deep
        room = (own.left if deep > 0 else 0) if own.along else (deep if own.left > 0 else 0)
        for n in range(loads):
            value = zero
            if n * own.apart < room:
                value = source[uint64(at + n * own.jump)]
            values[n] = value

    @device_function
    def place(values, shared, stage, own):
        """Write the elements to shared memory."""
        for n in range(loads):
            shared[uint64(stage + own.place + n * own.hop)] = values[n]

    return share, fetch, place


@cache
def _make_multiply(tile: ProductTile) -> Callable[..., None]:
    """Return ``multiply(tx, ty, acc, left, right, shared, a, b)``: acc += A·B for two shared tiles.

    ``acc`` is the thread's (own_rows, own_cols) registers, ``left`` and ``right`` are scratch for a
    column and a row.  A thread owns groups of four neighbouring rows and columns, so that four loads
    suffice for 64 multiply-adds.
    """
    block_rows, block_cols, depth, own_rows, own_cols, _ = tile
    a_stride, b_stride = block_rows + VECTOR, block_cols + VECTOR
    lanes, rows_of_threads = block_cols // own_cols, block_rows // own_rows

    @device_function
    def load(values, shared, first, apart, count):
        for i in range(0, count, VECTOR):
            values[i], values[i + 1], values[i + 2], values[i + 3] = load_shared(
                shared, first + i * apart
            )

    @device_function
    def step(acc, left, right, shared, a, b):
        load(left, shared, a, rows_of_threads, own_rows)
        load(right, shared, b, lanes, own_cols)
        for i in range(own_rows):
            for j in range(own_cols):
                acc[i, j] += left[i] * right[j]

    @device_function
    def multiply(tx, ty, acc, left, right, shared, a, b):
        a, b = a + ty * VECTOR, b + tx * VECTOR
        for _ in range(0, depth, UNROLL):
            # One after another, not a loop: the compiler takes it for too long to unroll.
            step(acc, left, right, shared, a, b)
            step(acc, left, right, shared, a + a_stride, b + b_stride)
            step(acc, left, right, shared, a + 2 * a_stride, b + 2 * b_stride)
            step(acc, left, right, shared, a + 3 * a_stride, b + 3 * b_stride)
            a += UNROLL * a_stride
            b += UNROLL * b_stride

    return multiply


@cache
def _make_store(tile: ProductTile) -> Callable[..., None]:
    """Return ``store(out, start, steps, acc, first, sizes, factor)``: write a thread's sums to a matrix."""
    block_rows, block_cols, _, own_rows, own_cols, _ = tile
    row_step, col_step = block_rows // own_rows * VECTOR, block_cols // own_cols * VECTOR

    @device_function
    def store(out, start, steps, acc, first, sizes, factor):
        for i in range(own_rows):
            row = first[0] + i // VECTOR * row_step + i % VECTOR
            for j in range(own_cols):
                col = first[1] + j // VECTOR * col_step + j % VECTOR
                if row < sizes[0] and col < sizes[1]:
                    out[uint64(start + row * steps[2] + col * steps[3])] = factor * acc[i, j]

    return store


@cache
def product_kernel(tile: ProductTile, dtype: np.dtype[Any], is_guarded: bool = False) -> Kernel:
    """Return the batched matrix product for one tile and dtype.

    A guarded kernel does nothing unless a number on the device equals the ticket.
    """
    real, zero = scalar_type(dtype), dtype.type(0)
    block_rows, block_cols, depth, own_rows, own_cols, _ = tile
    lanes, threads = block_cols // own_cols, tile.threads
    share_a, fetch_a, place_a = _make_copy(block_rows, depth, threads, dtype)
    share_b, fetch_b, place_b = _make_copy(block_cols, depth, threads, dtype)
    a_loads, b_loads = block_rows * depth // threads, block_cols * depth // threads
    a_stride, b_stride = block_rows + VECTOR, block_cols + VECTOR
    multiply, store = _make_multiply(tile), _make_store(tile)
    b_offset = depth * a_stride
    stage_size = b_offset + depth * b_stride

    def product(out, a, b, steps, shape, factor, guard, ticket):
        """Multiply (batch, heads, rows, depth) by (batch, heads, depth, cols), any strides.

        Computes: out[i, j] = factor · Σ_k a[i, k] b[k, j] for each batch and head; k runs over one part
            of the depth, and the parts lie one after another where heads do; guarded, nothing unless
            guard[0] is the ticket
        Source: FlashAttention, Algorithm 0, lines 1 and 3
        Grid: (batch · heads · ceil(rows / block_rows) · ceil(cols / block_cols), parts)
        Block: block_rows / own_rows · block_cols / own_cols
        One thread does: own_rows x own_cols elements of out, in groups of four by four
        Shared: two tiles of a and two of b: one is multiplied while the next arrives
        Registers: own_rows x own_cols sums, a column and a row of factors, the next elements of a and b
        Global traffic: reads a ceil(cols / block_cols) times, b ceil(rows / block_rows) times, both
            in the order in which they lie; writes out once
        Needs: what ProductTile says of its sizes
        """
        shared = cuda.shared.array(0, real)  # (2, depth, block_rows + 4 and block_cols + 4)
        acc = cuda.local.array((own_rows, own_cols), real)  # (own_rows, own_cols)
        left = cuda.local.array(own_rows, real)  # (own_rows,)
        right = cuda.local.array(own_cols, real)  # (own_cols,)
        next_a = cuda.local.array(a_loads, real)  # (a_loads,)
        next_b = cuda.local.array(b_loads, real)  # (b_loads,)
        thread = cuda.threadIdx.x
        tx, ty = thread % lanes, thread // lanes

        out_steps, a_steps, b_steps = steps[:4], steps[4:8], steps[8:]
        heads, rows, cols, total_depth, part = shape
        col_tiles = ceil_div(cols, block_cols)
        tiles = ceil_div(rows, block_rows) * col_tiles
        batch, head = cuda.blockIdx.x // tiles // heads, cuda.blockIdx.x // tiles % heads
        first_row = cuda.blockIdx.x % tiles // col_tiles * block_rows
        first_col = cuda.blockIdx.x % col_tiles * block_cols
        first = cuda.blockIdx.y * part
        stop = min(first + part, total_depth)
        if is_guarded and guard[0] != ticket:
            rows, cols, first, stop = 0, 0, 0, 0

        a_at = batch * a_steps[0] + head * a_steps[1] + first_row * a_steps[2] + first * a_steps[3]
        b_at = batch * b_steps[0] + head * b_steps[1] + first_col * b_steps[3] + first * b_steps[2]
        own_a, a_at = share_a(thread, a_at, a_steps[2], a_steps[3], rows - first_row, 0)
        own_b, b_at = share_b(thread, b_at, b_steps[3], b_steps[2], cols - first_col, b_offset)
        for i in range(own_rows):
            for j in range(own_cols):
                acc[i, j] = zero

        stage = 0
        for start in range(first - depth, stop, depth):
            # The next tile is on its way while this one is multiplied; before the first there is none.
            fetch_a(a, a_at, own_a, stop - start - depth, next_a)
            fetch_b(b, b_at, own_b, stop - start - depth, next_b)
            a_at += depth * a_steps[3]
            b_at += depth * b_steps[2]
            if start >= first:
                multiply(tx, ty, acc, left, right, shared, stage, stage + b_offset)
                stage = stage_size - stage
            place_a(next_a, shared, stage, own_a)
            place_b(next_b, shared, stage, own_b)
            cuda.syncthreads()  # the tile is complete before it is read, and the other one was read

        start = batch * out_steps[0] + (cuda.blockIdx.y * heads + head) * out_steps[1]
        place = first_row + ty * VECTOR, first_col + tx * VECTOR
        store(out, start, out_steps, acc, place, (rows, cols), factor)

    flat, guard = types.Array(real, 1, "C"), types.Array(int64, 1, "C") if is_guarded else int64
    steps, shape = types.UniTuple(int64, 12), types.UniTuple(int64, 5)
    signature = void(flat, flat, flat, steps, shape, real, guard, int64)
    shared_bytes = dtype.itemsize * shared_elements(tile)
    return Kernel(product, signature, threads, shared_bytes, tile.resident)


@lru_cache(maxsize=4096)
def pick_tile(matrices: int, rows: int, cols: int, depth: int, itemsize: int) -> ProductTile:
    """Return the largest tile of the table that keeps the device busy, or the smallest one."""
    tiles, most_parts = SIZES.product_tiles[itemsize], max(depth // SIZES.product_depth, 1)
    enough = (
        tile
        for tile in tiles
        if _blocks(matrices, rows, cols, tile) * most_parts >= SIZES.product_blocks
    )
    return next(enough, tiles[-1])


def _blocks(matrices: int, rows: int, cols: int, tile: ProductTile) -> int:
    return matrices * geometry.ceil_div(rows, tile.rows) * geometry.ceil_div(cols, tile.cols)


def _is_contiguous(shape: Ints, steps: Ints) -> bool:
    _, heads, rows, cols = shape
    dims = zip(shape, steps, (heads * rows * cols, rows * cols, cols, 1), strict=True)
    return all(size == 1 or step == expected for size, step, expected in dims)


def _parts(blocks: int, depth: int) -> int:
    """Return the number of blocks that share a sum."""
    return min(2 * SIZES.product_blocks // blocks, depth // SIZES.product_depth)


def multiply(
    out: Any, out_steps: Ints, a: Any, a_steps: Ints, b: Any, b_steps: Ints,
    shape: Ints, *, factor: float = 1.0, tile: ProductTile | None = None,
    only_if: tuple[Any, int] | None = None,
) -> None:  # fmt: skip
    """Fill out with factor · a @ b for each batch and head.

    If the output is too small to keep the device busy, as for gradients of weights, the sum is divided
    among blocks, and the parts are added in a fixed order.

    Args:
        out: The result, flat, on the device, float32 or float64 like a and b.
        out_steps: Strides of out in batch, heads, rows and columns, in elements.
        a: Left operand, flat.
        a_steps: Strides of a in batch, heads, rows and depth; 0 repeats.
        b: Right operand, flat.
        b_steps: Strides of b in batch, heads, depth and columns.
        shape: (batch, heads, rows, cols, depth).
        factor: Factor of the product.
        tile: Tile for the whole output; picked by its size when None.
        only_if: One integer on the device and its required value; for any other value, nothing is written.
    """
    batch, heads, rows, cols, depth = shape
    if 0 in shape[:4]:
        return
    tile = tile or pick_tile(batch * heads, rows, cols, depth, out.dtype.itemsize)
    blocks, matrix = _blocks(batch * heads, rows, cols, tile), rows * cols
    kernel = product_kernel(tile, out.dtype, only_if is not None)
    parts = 1 if only_if is not None else _parts(blocks, depth)
    guard = only_if or (0, 0)
    if parts < 2 or not _is_contiguous(shape[:4], out_steps):
        steps = (*out_steps, *a_steps, *b_steps)
        kernel[blocks, tile.threads](out, a, b, steps, (*shape[1:], depth), factor, *guard)
        return
    part = geometry.ceil_div(depth, parts)
    parts = geometry.ceil_div(depth, part)  # rounding may leave none for the last
    inner = heads * matrix
    partial = empty_device((batch * parts * inner,), out.dtype)
    steps = (parts * inner, matrix, cols, 1, *a_steps, *b_steps)
    kernel[(blocks, parts), tile.threads](partial, a, b, steps, (*shape[1:], part), factor, *guard)
    sums = device_view(out, (batch, inner), (inner, 1))  # contiguous, as was asked above
    partial = reshaped(partial, (batch, parts, inner))
    launch_each(sum_kernel(out.dtype), batch * inner, partial, sums)
