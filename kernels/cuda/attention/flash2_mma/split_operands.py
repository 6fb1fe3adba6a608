"""Split the float32 operands of a call into float16 terms for tensor cores; see ``float32_terms``.

Two kernels go over all operands: one finds the largest number of each head, the other scales and splits.
Attention reads every key and value once for each tile of queries; they are split once.  The forward kernel
reads each query row once, and splits it itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int64, types, uint32, void

from kernels.common.geometry import PLAIN
from kernels.cuda.attention.delta import lanes_of
from kernels.cuda.attention.flash2_mma.float32_terms import NUMBERS, Numbers, make_split
from kernels.cuda.attention.flash2_mma.tiles import HALF, PIECE, ROWS, MmaLayout
from kernels.cuda.device.one_source import ceil_div
from kernels.cuda.device.row_folds import warp_max
from kernels.cuda.device.vector import are_vectors
from kernels.cuda.ptx.copies import (
    global_address,
    ld_global_v4,
    red_max,
    st_global_v4,
    st_shared_v4,
)
from kernels.cuda.ptx.numbers import PACK, bits_of, float_of
from kernels.cuda.ptx.swizzle import CHUNK, make_tile_place
from kernels.cuda.runtime.arrays import device_view, element_strides, empty_device
from kernels.cuda.runtime.kernel import ALL_LANES, WARP, WORD, Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda

THREADS = 256
#: Pieces that a lane of the forward kernel loads at a time, at most.
BATCH = 4
#: Maximum number of blocks that share a head: one for each lane of a warp.
PARTS = 32
#: Minimum number of pieces per thread.
LEAST_PIECES = 4
#: Exponents with their bias: a scaled number is below 2**15, and no scale or unit is subnormal.
_SCALED, _LEAST = 268, 15


class Split(NamedTuple):
    """An operand of tensor cores.

    Attributes:
        bits: (batch, heads, terms * seq, width) uint16: term t of row r at t * seq + r, zeros beyond the
            operand's own columns; strides of 0 where the operand has them.
        unit: What a number of a head is to be multiplied by, (batch, heads) float32.
        norm: The largest norm of a head's rows, without that, (batch, heads) float32.
    """

    bits: Any
    unit: Any
    norm: Any


_ZERO, _INF = np.float32(0), np.float32(np.inf)


@device_function
def _load(x, at, words, source, is_vector, b, h, row, piece):
    """Load eight float32 of a row to x[at:], zeros beyond its end; by vectors where a row is whole ones."""
    first, dim = piece * PIECE, source.shape[3]
    if is_vector:
        address = global_address(source) + b * source.strides[0] + h * source.strides[1]
        address += row * source.strides[2] + first * WORD
        for half in range(2):
            for i in range(4):
                words[i] = 0
            if first + 4 * half < dim:
                ld_global_v4(words, address + CHUNK * half)
            for i in range(4):
                x[at + 4 * half + i] = float_of(words[i])
    else:
        for i in range(PIECE):
            x[at + i] = source[b, h, row, first + i] if first + i < dim else _ZERO


@device_function
def _largest_of_piece(x, at, most):
    """Return the largest size of a number of a piece that is finite, or ``most`` if that is larger."""
    for i in range(PIECE):
        size = abs(x[at + i])
        most = max(most, size if size < _INF else _ZERO)
    return most


@device_function
def _scale_and_unit(most):
    """Return the power of two that scales a largest number, and its inverse, the unit."""
    exponent = max(bits_of(most) >> uint32(23), uint32(_LEAST))
    scale = float_of(uint32(uint32(_SCALED) - exponent) << uint32(23))
    return scale, float_of(uint32(exponent - uint32(_LEAST - 1)) << uint32(23))


@cache
def _make_split_piece(numbers: Numbers) -> Callable[..., None]:
    """Return ``split_piece(x, at, words, low_words)``: the pairs of x[at:], and those of a second term."""
    terms, split_pair, pack = numbers.terms, make_split(numbers.dtype), PACK[numbers.dtype]

    @device_function
    def split_piece(x, at, words, low_words):
        for i in range(4):
            if terms == 2:
                words[i], low_words[i] = split_pair(x[at + 2 * i], x[at + 2 * i + 1])
            else:
                words[i] = pack(x[at + 2 * i], x[at + 2 * i + 1])

    return split_piece


@cache
def make_split_rows(layout: MmaLayout, width: int, dtype: str, vectors: bool) -> Callable[..., Any]:
    """Return ``split_rows(q, b, h, first_q, row, seq_q, seq_k, extras, tile, lane, warp_row)``.

    Each warp splits its own rows of the query tile at ``row`` into the tile in shared memory, which has the
    layout that ``copy_tile`` gives terms, and returns the unit of these rows.  The sequence begins at
    ``first_q``.  Rows whose keys are all out of bounds become zeros and do not affect the scale.

    Args:
        layout: Layout of the block.
        width: Columns of the tile, as many as q has or more, a multiple of 16.
        dtype: See ``float32_terms.NUMBERS``.
        vectors: Rows of q are whole vectors.
    """
    terms, split_piece = NUMBERS[dtype].terms, _make_split_piece(NUMBERS[dtype])
    place, chunks = make_tile_place(device_function, HALF * width), width // PIECE
    loads, term = layout.row_tiles * ROWS * chunks // WARP, HALF * layout.block_q * width
    batch = math.gcd(loads, BATCH)
    numbers = batch * PIECE

    @device_function
    def load(x, words, q, b, h, first_q, row, start, stop, lane, i):
        # All loads of a batch are on their way before the first number is needed.
        for k in range(batch):
            n = lane + (i + k) * WARP
            own = row + n // chunks
            if start <= own < stop:
                _load(x, k * PIECE, words, q, vectors, b, h, first_q + own, n % chunks)
            else:
                for j in range(PIECE):
                    x[k * PIECE + j] = _ZERO

    @device_function
    def split_rows(q, b, h, first_q, row, seq_q, seq_k, extras, tile, lane, warp_row):
        # (batch * PIECE,), and (4,), pairs
        x, words = cuda.local.array(numbers, float32), cuda.local.array(4, uint32)
        low_words = cuda.local.array(4, uint32)  # (4,)
        start, stop = -extras.upper, min(seq_k - extras.lower, seq_q)
        most = _ZERO
        for i in range(0, loads, batch):
            load(x, words, q, b, h, first_q, row + warp_row, start, stop, lane, i)
            for k in range(batch):
                most = _largest_of_piece(x, k * PIECE, most)
        scale, unit = _scale_and_unit(warp_max(most))
        for i in range(0, loads, batch):  # from the cache
            load(x, words, q, b, h, first_q, row + warp_row, start, stop, lane, i)
            for k in range(batch):
                n = lane + (i + k) * WARP
                to = tile + place(warp_row + n // chunks, n % chunks)
                for j in range(PIECE):
                    x[k * PIECE + j] *= scale
                split_piece(x, k * PIECE, words, low_words)
                st_shared_v4(to, words)
                if terms == 2:
                    st_shared_v4(to + term, low_words)
        return unit

    return split_rows


@cache
def measure_kernel(count: int, lanes: int) -> Kernel:
    """Return the kernel that finds the largest number of each head.

    Args:
        count: Operands.
        lanes: Number of lanes that share a row; a power of two, up to 32.
    """
    zero = _ZERO

    def measure_heads(sources, vectors, starts, stops, largest, norms):
        """Fill largest; set norms to zero.  ``vectors`` has a bit for each operand.

        Computes: largest[operand, head, part] = max |x| of what is finite in a part of the head's
            rows from start to stop
        Source: none
        Grid: (operands * parts, batch * heads)
        Block: (threads,)
        One thread does: every lanes-th piece of some rows
        Shared: one number a warp
        Registers: one piece
        Global traffic: reads each operand once; writes a number for each part of a head
        Needs: warp shuffles
        """
        parts = cuda.gridDim.x // count
        which, part, line = cuda.blockIdx.x // parts, cuda.blockIdx.x % parts, cuda.blockIdx.y
        thread = cuda.threadIdx.x
        source, is_vector = sources[which], (vectors >> which) & 1
        heads, dim = source.shape[1], source.shape[3]
        shared = cuda.shared.array(WARP, float32)  # (32,), a number a warp
        x, words = cuda.local.array(PIECE, float32), cuda.local.array(4, uint32)  # (PIECE,), (4,)
        most = zero
        if line < source.shape[0] * heads:
            b, h = line // heads, line % heads
            start, end = starts[which], stops[which]
            rows = ceil_div(max(end - start, 0), parts)
            stop = min(start + (part + 1) * rows, end)
            for row in range(start + part * rows + thread // lanes, stop, THREADS // lanes):
                for piece in range(thread % lanes, ceil_div(dim, PIECE), lanes):
                    _load(x, 0, words, source, is_vector, b, h, row, piece)
                    most = _largest_of_piece(x, 0, most)
        most = warp_max(most)
        if thread % WARP == 0:
            shared[thread // WARP] = most
        cuda.syncthreads()  # every warp's number is there
        if thread == 0:
            for i in range(THREADS // WARP):
                most = max(most, shared[i])
            largest[which, line, part] = most
            if part == 0:
                norms[which, line] = zero

    sources, rows = types.UniTuple(array_type(FLOAT32, 4), count), types.UniTuple(int64, count)
    written = array_type(FLOAT32, 3), array_type(FLOAT32, 2)
    return Kernel(measure_heads, void(sources, int64, rows, rows, *written), THREADS)


@cache
def split_kernel(count: int, split: int, lanes: int, numbers: Numbers) -> Kernel:
    """Return the kernel that scales and splits; its arguments are those of :func:`measure_kernel`.

    Args:
        count: Operands.
        split: How many of them are split, the first; of the others only the units are wanted.
        lanes: Number of lanes that share a row.
        numbers: The terms.
    """
    steps, terms = lanes.bit_length() - 1, numbers.terms
    split_piece = _make_split_piece(numbers)
    zero, inf = _ZERO, _INF

    def split_heads(sources, vectors, starts, stops, targets, largest, units, norms):
        """Fill targets and units, and write the norms of rows to norms, which are zeros before.

        Computes: x · scale as one or two float16, the scale of a head a power of two
        Source: see ``float32_terms``
        Grid: (operands * parts, batch * heads)
        Block: (threads,)
        One thread does: every lanes-th piece of some rows
        Shared: none
        Registers: one piece and its terms
        Global traffic: reads each operand and its largest numbers once; writes the terms and a unit
            a head
        Needs: compute capability 8.0
        """
        parts = cuda.gridDim.x // count
        which, part, line = cuda.blockIdx.x // parts, cuda.blockIdx.x % parts, cuda.blockIdx.y
        thread = cuda.threadIdx.x
        lane = thread % WARP
        source, is_vector = sources[which], (vectors >> which) & 1
        heads, seq = source.shape[1], source.shape[2]
        most = warp_max(largest[which, line, lane] if lane < parts else zero)
        scale, unit = _scale_and_unit(most)
        if part == 0 and thread == 0:
            units[which, line] = unit
        if which < split:
            target = targets[which]
            # (PIECE,), and (4,), pairs
            x, words = cuda.local.array(PIECE, float32), cuda.local.array(4, uint32)
            low_words = cuda.local.array(4, uint32)  # (4,)
            is_here = line < source.shape[0] * heads
            b, h = line // heads, line % heads
            rows = ceil_div(seq, parts)
            stop = min((part + 1) * rows, seq)
            largest_square = zero
            start, end = starts[which], stops[which]
            # All lanes of a warp go round together.
            for first in range(part * rows, stop, THREADS // lanes):
                row, square = first + thread // lanes, zero
                # Rows out of bounds are not measured: scaled they would overflow.
                row_scale = scale if start <= row < end else zero
                if is_here and row < stop:
                    address = global_address(target) + b * target.strides[0] + h * target.strides[1]
                    for piece in range(thread % lanes, target.shape[3] // PIECE, lanes):
                        _load(x, 0, words, source, is_vector, b, h, row, piece)
                        for i in range(PIECE):
                            x[i] *= row_scale
                            if abs(x[i]) < inf:
                                square += x[i] * x[i]
                        place = address + piece * CHUNK
                        split_piece(x, 0, words, low_words)
                        st_global_v4(place + row * target.strides[2], words)
                        if terms == 2:
                            st_global_v4(place + (seq + row) * target.strides[2], low_words)
                for step in range(steps):
                    square += cuda.shfl_xor_sync(ALL_LANES, square, 1 << step)
                largest_square = max(largest_square, square)
            largest_square = warp_max(largest_square)
            if lane == 0 and is_here:
                address = global_address(norms) + which * norms.strides[0]
                red_max(address + line * norms.strides[1], float32(largest_square**0.5))

    sources, rows = types.UniTuple(array_type(FLOAT32, 4), count), types.UniTuple(int64, count)
    targets = types.UniTuple(array_type(BITS, 4), split)
    heads, parts = array_type(FLOAT32, 2), array_type(FLOAT32, 3)
    signature = void(sources, int64, rows, rows, targets, parts, heads, heads)
    return Kernel(split_heads, signature, THREADS)


def split_operands(
    arrays: tuple[Any, ...],
    widths: tuple[int, ...],
    numbers: Numbers,
    rows: tuple[tuple[int, int], ...] = (),
) -> list[Split]:
    """Split operands of a call.

    Args:
        arrays: (batch, heads, seq, dim) float32 on the device; what strides of 0 repeat is split once.
        widths: Columns of the results, a multiple of 16 that is dim or more; arrays without one come last
            and get only their units.
        numbers: The terms.
        rows: The first row of each array that is within the bounds of the other side, and the one after
            the last; all of them when empty.  The others become zeros, and do not count for the scale.

    Returns:
        The results, in the order of the arrays.
    """
    own = [_unrepeated(array) for array in arrays]
    count, split = len(own), len(widths)
    targets = tuple(
        empty_device((*array.shape[:2], numbers.terms * array.shape[2], width), BITS)
        for array, width in zip(own, widths, strict=False)
    )
    lines = max(array.shape[0] * array.shape[1] for array in own)
    lanes = lanes_of(max(widths))
    starts, stops = zip(*(rows or [(0, array.shape[2]) for array in own]), strict=True)
    least = LEAST_PIECES * THREADS // lanes
    parts = min(PLAIN.ceil_div(max(array.shape[2] for array in own), least), PARTS)
    largest = empty_device((count, lines, parts), FLOAT32)
    units, norms = (empty_device((count, lines), FLOAT32) for _ in range(2))
    vectors = sum(are_vectors(array) << i for i, array in enumerate(own))
    grid, sources = (count * parts, lines), tuple(own)
    measure = measure_kernel(count, lanes)
    measure[grid, THREADS](sources, vectors, starts, stops, largest, norms)
    kernel = split_kernel(count, split, lanes, numbers)
    kernel[grid, THREADS](sources, vectors, starts, stops, targets, largest, units, norms)
    results = []
    for i, (array, one) in enumerate(zip(arrays, own, strict=True)):
        batch, heads = array.shape[:2]
        steps = (one.shape[1] if one.shape[0] > 1 else 0), int(one.shape[1] > 1)
        unit, norm = (device_view(x, (batch, heads), steps, i * lines) for x in (units, norms))
        bits = _repeated(targets[i], batch, heads) if i < split else None
        results.append(Split(bits, unit, norm))
    return results


def _unrepeated(array: Any) -> Any:
    """Return an array with one entry for those that a stride of 0 repeats."""
    batch, heads, *rest = array.shape
    steps = element_strides(array)
    own = 1 if steps[0] == 0 else batch, 1 if steps[1] == 0 else heads
    return array if own == (batch, heads) else device_view(array, (*own, *rest), steps)


def _repeated(array: Any, batch: int, heads: int) -> Any:
    """Return the reverse of :func:`_unrepeated`."""
    own_batch, own_heads, *rest = array.shape
    if (own_batch, own_heads) == (batch, heads):
        return array
    b, h, *steps = element_strides(array)
    steps = (b if own_batch > 1 else 0), (h if own_heads > 1 else 0), *steps
    return device_view(array, (batch, heads, *rest), steps)
