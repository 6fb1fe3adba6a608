"""Scale the float32 operands of a call, and split them into float16 terms for tensor cores.

One kernel goes over all operands: it finds the largest number of each head, then scales and splits the head
while it is in the L2 cache.  Attention reads every key and value once for each tile of queries; they are
split once.  The forward kernel reads each query row once, and splits it itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import PLAIN
from kernels.cuda.attention.delta import lanes_of
from kernels.cuda.attention.flash2_mma.tiles import HALF, PIECE, ROWS, MmaLayout
from kernels.cuda.attention.flash2_split.products import pack, split
from kernels.cuda.device.head_maximum import (
    head_address,
    head_words,
    lag_of,
    largest_of,
    make_head_max,
    make_note_max,
)
from kernels.cuda.device.one_source import batch_and_head, ceil_div
from kernels.cuda.device.row_folds import make_lane_folds
from kernels.cuda.device.vector import are_vectors
from kernels.cuda.ptx.copies import (
    global_address,
    ld_global_v4,
    red_max,
    st_global,
    st_global_v4,
    st_shared_v4,
)
from kernels.cuda.ptx.numbers import bits_of, float_of
from kernels.cuda.ptx.swizzle import CHUNK, make_tile_place
from kernels.cuda.runtime.arrays import device_view, element_strides, empty_device
from kernels.cuda.runtime.kernel import WARP, WORD, Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, int64, types, uint32, void

THREADS = 256
#: Maximum number of pieces that a lane of the forward kernel loads at a time.
BATCH = 4
#: Number of pieces that a thread holds, and of blocks per multiprocessor.
HELD, RESIDENT = 4, 4
#: Words of a head: its largest norm, its unit, and then one word for each part.
NORM, UNIT, PARTS = range(3)
#: Biased exponents: a scaled number is below 2**15, and no scale or unit is subnormal.
_SCALED, _LEAST = 268, 15


class Split(NamedTuple):
    """A float32 operand as one or two float16 terms, for tensor cores.

    ``bits`` are (batch, heads, terms * seq, width) uint16, term t of row r at t * seq + r, with zeros
    beyond the operand's own columns, and strides of 0 where the operand has them.  For each head, (batch,
    heads) float32, there are the factor of its numbers, and the largest norm of its rows without it.
    """

    bits: Any
    unit: Any
    norm: Any


_ZERO, _INF = np.float32(0), np.float32(np.inf)


@device_function
def _load(x, at, words, source, is_vector, place, inside):
    """Load the piece (b, h, row, piece) to x[at:]; zeros beyond the end of its row, or if not inside."""
    b, h, row, piece = place
    first, dim = piece * PIECE, source.shape[3]
    if not inside:
        for i in range(PIECE):
            x[at + i] = _ZERO
    elif is_vector:
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
def _scale_and_unit(most):
    """Return the power of two that scales a largest number of ``most``, and its inverse, the unit."""
    exponent = max(bits_of(most) >> uint32(23), uint32(_LEAST))
    scale = float_of(uint32(uint32(_SCALED) - exponent) << uint32(23))
    return scale, float_of(uint32(exponent - uint32(_LEAST - 1)) << uint32(23))


@cache
def _make_split_piece(terms: int) -> Callable[..., None]:
    """Return ``split_piece(x, at, words, low_words)``: pairs of x[at:], and of a second term."""

    @device_function
    def split_piece(x, at, words, low_words):
        for i in range(4):
            if terms == 2:
                words[i], low_words[i] = split(x[at + 2 * i], x[at + 2 * i + 1])
            else:
                words[i] = pack(x[at + 2 * i], x[at + 2 * i + 1])

    return split_piece


@cache
def make_load_q(terms: int, layout: MmaLayout, width: int, vectors: bool) -> Callable[..., Any]:
    """Return ``load_q(q, scale, item, q_tile, thread, share, extras)``: split the query tile of a block.

    Each warp splits its own rows into the tile in shared memory, which has the layout of copied terms,
    multiplied by the scale of the head, as in the backward pass: both compute the same scores.  Rows whose
    keys are all out of bounds become zeros.
    """
    split_piece, chunks = _make_split_piece(terms), width // PIECE
    place = make_tile_place(device_function, HALF * width)
    loads, term = layout.row_tiles * ROWS * chunks // WARP, HALF * layout.block_q * width
    batch, one = math.gcd(loads, BATCH), np.float32(1)
    count = batch * PIECE

    @device_function
    def load_q(q, scale, item, q_tile, thread, share, extras):
        # (batch * PIECE,), and (4,), pairs
        x, words = cuda.local.array(count, float32), cuda.local.array(4, uint32)
        low_words = cuda.local.array(4, uint32)  # (4,)
        b, h, _, _, first, _, seq_q, seq_k = item.start
        factor = one / scale.q[b, h]
        start, stop = -extras.upper, min(seq_k - extras.lower, seq_q)
        for i in range(0, loads, batch):
            # All loads of a batch are on their way before the first number is needed.
            for k in range(batch):
                n = share.lane + (i + k) * WARP
                row = first + share.row + n // chunks
                piece = b, h, item.q.first + row, n % chunks
                _load(x, k * PIECE, words, q, vectors, piece, start <= row < stop)
            for k in range(batch):
                n = share.lane + (i + k) * WARP
                to = q_tile + place(share.row + n // chunks, n % chunks)
                for j in range(PIECE):
                    x[k * PIECE + j] *= factor
                split_piece(x, k * PIECE, words, low_words)
                st_shared_v4(to, words)
                if terms == 2:
                    st_shared_v4(to + term, low_words)

    return load_q


@cache
def _make_load(step_rows: int) -> Callable[..., None]:
    """Return ``load(x, words, source, is_vector, place, start, stop)``: HELD pieces ``step_rows`` apart."""

    @device_function
    def load(x, words, source, is_vector, place, start, stop):
        b, h, row, piece = place
        has_columns = piece * PIECE < source.shape[3]
        for i in range(HELD):
            own = row + i * step_rows
            inside = start <= own < stop and has_columns
            _load(x, i * PIECE, words, source, is_vector, (b, h, own, piece), inside)

    return load


@cache
def split_kernel(count: int, splits: int, lanes: int, terms: int, has_norms: bool) -> Kernel:
    """Return the kernel that measures, scales and splits ``count`` operands; see :func:`split_operands`.

    The first ``splits`` are split, the others only get their units.  ``lanes``, a power of two up to 32,
    share a row, one piece each.
    """
    (_, lane_sum), (warp_max, _) = make_lane_folds(lanes), make_lane_folds(WARP)
    threads, step_rows = THREADS, THREADS // lanes
    rows, held = HELD * step_rows, HELD * PIECE
    split_piece, load = _make_split_piece(terms), _make_load(step_rows)
    note_max, head_max = make_note_max(threads), make_head_max(threads)
    zero, inf = _ZERO, _INF
    unit_at, norm_at, parts_at = (WORD * at for at in (UNIT, NORM, PARTS))

    def split_heads(sources, vectors, starts, stops, targets, words, lag):
        """Fill targets and words, which are zeros before.  ``vectors`` has a bit for each operand.

        Computes: x · scale as one or two float16, the scale of a head a power of two for its largest
            number that is finite, among the rows from start to stop
        Source: see ``products`` and ``arithmetic``
        Grid: (operands * parts, batch * heads + lag), see ``head_maximum``
        Block: (threads,)
        One thread does: a piece of some rows
        Shared: two numbers a warp
        Registers: x (HELD * PIECE,), and the terms of a piece
        Global traffic: reads each operand twice, the second time mostly from L2; writes the terms, and
            for each head its unit and norm and a number for each part
        Needs: compute capability 8.0
        """
        thread, line = cuda.threadIdx.x, cuda.blockIdx.y
        parts = cuda.gridDim.x // count
        which, part = batch_and_head(cuda.blockIdx.x, parts)
        piece, x = thread % lanes, cuda.local.array(held, float32)  # (HELD, PIECE)
        # (4,), pairs
        pairs, low_pairs = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
        source, is_vector = sources[which], (vectors >> which) & 1
        seq, row = source.shape[2], part * rows + thread // lanes
        start, stop, own_lines = starts[which], stops[which], source.shape[0] * source.shape[1]
        if part * rows >= seq:
            return
        # The same for all threads, as below.
        if line < own_lines:
            (b, h), head = batch_and_head(line, source.shape[1]), head_address(words, which, line)
            load(x, pairs, source, is_vector, (b, h, row, piece), start, stop)
            note_max(largest_of(x, 0, held, zero), head + parts_at + WORD * part)
        line -= lag
        if 0 <= line < own_lines:
            (b, h), head = batch_and_head(line, source.shape[1]), head_address(words, which, line)
            load(x, pairs, source, is_vector, (b, h, row, piece), start, stop)
            scale, unit = _scale_and_unit(head_max(head + parts_at, ceil_div(seq, rows)))
            if part == 0 and thread == 0:
                st_global(head + unit_at, bits_of(unit))
            if which < splits:
                target = targets[which]
                address = global_address(target) + b * target.strides[0] + h * target.strides[1]
                address += piece * CHUNK
                largest_square = zero
                for i in range(HELD):
                    own, square = row + i * step_rows, zero
                    for j in range(PIECE):
                        number = x[i * PIECE + j] * scale
                        x[i * PIECE + j] = number
                        if has_norms and abs(number) < inf:
                            square += number * number
                    if own < seq and piece * PIECE < target.shape[3]:
                        split_piece(x, i * PIECE, pairs, low_pairs)
                        st_global_v4(address + own * target.strides[2], pairs)
                        if terms == 2:
                            st_global_v4(address + (seq + own) * target.strides[2], low_pairs)
                    if has_norms:
                        largest_square = max(largest_square, lane_sum(square))
                if has_norms:
                    largest_square = warp_max(largest_square)
                    if thread % WARP == 0:
                        red_max(head + norm_at, float32(largest_square**0.5))

    sources, bounds = types.UniTuple(array_type(FLOAT32, 4), count), types.UniTuple(int64, count)
    targets, words = types.UniTuple(array_type(BITS, 4), splits), array_type(FLOAT32, 3)
    signature = void(sources, int64, bounds, bounds, targets, words, int64)
    return Kernel(split_heads, signature, threads, resident=RESIDENT)


def split_operands(
    arrays: tuple[Any, ...],
    widths: tuple[int, ...],
    terms: int,
    rows: tuple[tuple[int, int], ...] = (),
    has_norms: bool = False,
) -> list[Split]:
    """Split operands of a call.

    Args:
        arrays: (batch, heads, seq, dim) float32 on the device; entries that a stride of 0 repeats are split
            once.
        widths: Columns of the results, a multiple of 16 that is at least dim; arrays without a width come
            last and only get their units.
        terms: Number of terms.
        rows: For each array, the first row that is within the bounds of the other side, and one past the
            last; all rows when empty.  Other rows become zeros and do not affect the scale.
        has_norms: Whether to compute norms; they are zeros otherwise.

    Returns:
        The results, in the order of the arrays.
    """
    own = [_unrepeated(array) for array in arrays]
    count, splits = len(own), len(widths)
    targets = tuple(
        empty_device((*array.shape[:2], terms * array.shape[2], width), BITS)
        for array, width in zip(own, widths, strict=False)
    )
    lines, seq = max(math.prod(x.shape[:2]) for x in own), max(x.shape[2] for x in own)
    lanes = lanes_of(max(widths))
    starts, stops = zip(*(rows or [(0, array.shape[2]) for array in own]), strict=True)
    parts = PLAIN.ceil_div(seq, HELD * THREADS // lanes)
    vectors = sum(are_vectors(array) << i for i, array in enumerate(own))
    step = PARTS + parts
    words = head_words(count, lines, step)
    kernel = split_kernel(count, splits, lanes, terms, has_norms)
    lag = lag_of(count * parts)
    grid = count * parts, lines + lag
    kernel[grid, THREADS](tuple(own), vectors, starts, stops, targets, words, lag)
    results = []
    for i, (array, one) in enumerate(zip(arrays, own, strict=True)):
        batch, heads = array.shape[:2]
        steps = step * one.shape[1] * (one.shape[0] > 1), step * (one.shape[1] > 1)
        unit, norm = (
            device_view(words, (batch, heads), steps, step * i * lines + at) for at in (UNIT, NORM)
        )
        bits = None
        if i < splits:  # with the strides of 0 of the operand
            b, h, *rest = element_strides(targets[i])
            steps = b * (one.shape[0] > 1), h * (one.shape[1] > 1), *rest
            bits = device_view(targets[i], (batch, heads, *targets[i].shape[2:]), steps)
        results.append(Split(bits, unit, norm))
    return results


def first_terms(one: Split, terms: int) -> Any:
    """Return the rows of the first term of an operand, which those of the second follow in memory."""
    batch, heads, rows, width = one.bits.shape
    shape = batch, heads, rows // terms, width
    return device_view(one.bits, shape, element_strides(one.bits))


def _unrepeated(array: Any) -> Any:
    """Return an array with a single entry along each dimension that a stride of 0 repeats."""
    batch, heads, *rest = array.shape
    steps = element_strides(array)
    own = 1 if steps[0] == 0 else batch, 1 if steps[1] == 0 else heads
    return array if own == (batch, heads) else device_view(array, (*own, *rest), steps)
