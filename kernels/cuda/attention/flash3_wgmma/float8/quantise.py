"""Round q, k and v to float8 e4m3 in memory, with a power of two for each head or block of rows.

The forward kernel reads the results by tensor copies and multiplies them directly.  Both products of
attention read their right operand along the depth, and 8-bit instructions cannot transpose.  V is
therefore written transposed, (value_dim, seq_k).  Its keys are permuted within groups of 16, so that the
rounded accumulators of S = Q Kᵀ are the left operand of P V without leaving their lane: a lane has the
columns 2c, 2c + 1, 8 + 2c and 9 + 2c of such a group, while the operand needs four neighbours from 4c on.

``kernels.reference.float8`` defines the numbers in NumPy.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import PLAIN
from kernels.cuda.attention.flash3_wgmma.layout import Widths
from kernels.cuda.device.half import as_bits
from kernels.cuda.device.head_maximum import (
    head_address,
    head_words,
    lag_of,
    largest_of,
    make_head_max,
    make_note_max,
)
from kernels.cuda.device.memory import device_constant
from kernels.cuda.device.one_source import batch_and_head, ceil_div
from kernels.cuda.device.row_folds import RowBlock, make_row_folds
from kernels.cuda.ptx.copies import global_address, ld_global_v4, st_global, st_global_v4
from kernels.cuda.ptx.numbers import UNPACK, bits_of, float_of, pack_e4m3
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import (
    ALL_LANES,
    WARP,
    WORD,
    Kernel,
    array_type,
    device_function,
)
from kernels.problem.float8 import BLOCK, SIGNS, Float8
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.targets import cuda, current_device
from kernels.runtime.types import float32, int64, types, uint8, uint32, void

#: Number of lanes that share a row, and of columns that a lane reads at a time, 32 bytes.
LANES, PIECE = 4, 16
#: Bytes of a 16-bit number.
_BYTES = BITS.itemsize
_SIGN = np.uint32(1 << 31)
#: Threads of a block, which handles all rows of a block of rows at once.
THREADS = BLOCK * LANES
#: Number of keys of V that are permuted among each other, and number of keys per word.
GROUP, WORD_KEYS = 16, 4
_OWN_VALUES = WORD_KEYS * PIECE
_BYTE = np.dtype(np.uint8)
_ZERO = np.float32(0)


@cache
def make_load_piece(dtype: str) -> Any:
    """Return ``load_piece(x, start, words, source, b, h, row, column)``: 16 numbers to x from start on.

    Numbers outside the array are zeros.
    """
    unpack = UNPACK[dtype]

    @device_function
    def load_piece(x, start, words, source, b, h, row, column):
        address = global_address(source) + b * source.strides[0] + h * source.strides[1]
        address += row * source.strides[2] + column * _BYTES
        for half in range(2):
            for i in range(4):
                words[i] = 0
            if row < source.shape[2] and column + 8 * half < source.shape[3]:
                ld_global_v4(words, address + CHUNK * half)
            for i in range(4):
                at = start + 8 * half + 2 * i
                x[at], x[at + 1] = unpack(words[i])

    return load_piece


@cache
def _make_butterflies(count: int, step: int) -> Any:
    """Return ``butterflies(x)``: sums and differences of the elements ``step`` apart of ``count``."""

    @device_function
    def butterflies(x):
        for n in range(count // 2):
            low = n // step * (2 * step) + n % step
            above, below = x[low], x[low + step]
            x[low], x[low + step] = above + below, above - below

    return butterflies


def _then(first: Any, second: Any) -> Any:
    @device_function
    def both(x):
        first(x)
        second(x)

    return both


@cache
def make_turn(width: int) -> Any:
    """Return ``turn(x, signs, lane)``: multiply a row by random signs and an unnormalised Hadamard matrix.

    A lane has the columns 16 (lane + 4 i) + e of the row, at 16 i + e of x.  ``width`` is a power of two
    from 64 on.
    """
    count = width // LANES
    steps = [1 << n for n in range(count.bit_length() - 1)]
    within = _make_butterflies(count, steps[0])
    for step in steps[1:]:
        within = _then(within, _make_butterflies(count, step))

    @device_function
    def turn(x, signs, lane):
        for i in range(count // PIECE):
            own = uint32(signs[lane + LANES * i])
            for e in range(PIECE):
                sign = uint32(own << uint32(31 - e)) & _SIGN
                x[PIECE * i + e] = float_of(bits_of(x[PIECE * i + e]) ^ sign)
        within(x)
        for step in range(2):
            sign = float32(-1 if lane >> step & 1 else 1)
            for n in range(count):
                x[n] = sign * x[n] + cuda.shfl_xor_sync(ALL_LANES, x[n], 1 << step)

    return turn


@cache
def make_load_row(width: int, dtype: str, has_hadamard: bool) -> Any:
    """Return ``load_row(x, words, source, b, h, row, lane, signs)``: load a lane's columns of a row."""
    load_piece, turn = make_load_piece(dtype), make_turn(width)
    pieces = width // LANES // PIECE

    @device_function
    def load_row(x, words, source, b, h, row, lane, signs):
        for i in range(pieces):
            load_piece(x, PIECE * i, words, source, b, h, row, PIECE * (lane + LANES * i))
        if has_hadamard:
            turn(x, signs, lane)

    return load_row


@device_function
def unit_exponent(most):
    """Return the biased exponent of the least power of two p with ``most`` <= 448 p.

    448 is 1.75 · 2⁸, so a fraction above 0.75 adds one to the exponent.
    """
    exponent = uint32(bits_of(most) + uint32(0x1FFFFF)) >> uint32(23)
    return uint32(min(max(exponent, uint32(9)), uint32(254)) - uint32(8))


@device_function
def power_of_two(exponent):
    """Return the power of two with a biased exponent."""
    return float_of(uint32(exponent << uint32(23)))


@device_function
def scaled(x, inverse):
    """Return x · inverse, or NaN for an infinite x, which rounding would turn into 448."""
    return x * inverse + (x - x)


@cache
def rows_kernel(width: int, dtype: str, has_hadamard: bool, has_blocks: bool) -> Kernel:
    """Return the kernel that measures q and k and rounds them by rows.

    Rows are padded to ``width``, and multiplied by a Hadamard matrix first if ``has_hadamard``.  Each block
    of rows has a unit if ``has_blocks``, else each head.
    """
    load_row, own = make_load_row(width, dtype, has_hadamard), width // LANES
    (block_max, _), note_max = make_row_folds(RowBlock(THREADS, 1)), make_note_max(THREADS)
    head_max, warps = make_head_max(THREADS), THREADS // WARP

    def float8_rows(sources, targets, lines, heads, signs, words_of_heads, units, lag):
        """Fill targets and units.

        Computes: targets = x / unit in e4m3, the unit of a head or a block of rows a power of two
        Source: FlashAttention-3, section 3.3: block quantization, incoherent processing
        Grid: (operands * blocks of rows, batch * heads + lag), see ``head_maximum``; a lag of 0 where
            blocks of rows have units of their own
        Block: (threads,), four lanes a row
        One thread does: a fourth of a row
        Shared: two numbers a warp
        Registers: x (width / 4,)
        Global traffic: reads each operand once, or twice, the second time mostly from L2; writes half
            as much
        Needs: cc 8.9: conversion to e4m3; rows of whole vectors
        """
        thread, line = cuda.threadIdx.x, cuda.blockIdx.y
        parts = cuda.gridDim.x // 2
        which, part = batch_and_head(cuda.blockIdx.x, parts)
        x, words = cuda.local.array(own, float32), cuda.local.array(4, uint32)  # (own,), (4,)
        source, target = sources[which], targets[which]
        row, lane = part * BLOCK + thread // LANES, thread % LANES
        if part * BLOCK >= source.shape[2]:
            return
        # The same for all threads, as below.
        if not has_blocks:
            if line < lines[which]:
                b, h = batch_and_head(line, heads[which])
                load_row(x, words, source, b, h, row, lane, signs)
                head = head_address(words_of_heads, which, line)
                note_max(largest_of(x, 0, own, _ZERO), head + WORD * part)
            line -= lag
        if 0 <= line < lines[which]:
            b, h = batch_and_head(line, heads[which])
            load_row(x, words, source, b, h, row, lane, signs)
            if has_blocks:
                most = block_max(cuda.shared.array(warps, float32), largest_of(x, 0, own, _ZERO))
            else:
                head = head_address(words_of_heads, which, line)
                most = head_max(head, ceil_div(source.shape[2], BLOCK))
            exponent = unit_exponent(most)
            inverse = power_of_two(uint32(uint32(254) - exponent))
            if thread == 0 and (has_blocks or part == 0):
                units[which][0, line, part] = power_of_two(exponent)
            if row < source.shape[2]:
                address = global_address(target) + b * target.strides[0] + h * target.strides[1]
                address += row * target.strides[2] + PIECE * lane
                for i in range(own // PIECE):
                    for j in range(4):
                        at = PIECE * i + 4 * j
                        words[j] = pack_e4m3(
                            scaled(x[at], inverse), scaled(x[at + 1], inverse),
                            scaled(x[at + 2], inverse), scaled(x[at + 3], inverse),
                        )  # fmt: skip
                    st_global_v4(address + LANES * PIECE * i, words)

    sources, numbers = types.UniTuple(array_type(BITS, 4), 2), types.UniTuple(int64, 2)
    targets = types.UniTuple(types.Array(uint8, 4, "A"), 2)
    signs, three = types.Array(uint32, 1, "C"), array_type(FLOAT32, 3)
    units = types.UniTuple(three, 2)
    signature = void(sources, targets, numbers, numbers, signs, three, units, int64)
    return Kernel(float8_rows, signature, THREADS, resident=2)


@cache
def values_kernel(width: int, dtype: str) -> Kernel:
    """Return the kernel that measures values, rounds them and writes them transposed.

    Rows are padded to ``width``, a multiple of 16.
    """
    load_piece, threads = make_load_piece(dtype), 2 * width
    note_max, head_max = make_note_max(threads), make_head_max(threads)

    @device_function
    def load(x, words, source, b, h, first, place, column):
        for e in range(WORD_KEYS):
            row = first + 8 * (e // 2) + 2 * place + e % 2
            load_piece(x, PIECE * e, words, source, b, h, row, column)

    def float8_values(source, target, heads, words_of_heads, units, lag):
        """Fill target and units.

        Computes: target[b, h, column, 16 g + 4 c + e] = v[b, h, 16 g + 8 (e // 2) + 2 c + e % 2, column]
            / unit in e4m3, zeros beyond the last key
        Source: none; see the module
        Grid: (blocks of 128 keys, batch * heads + lag), see ``head_maximum``
        Block: (2 * width,): a warp has 16 columns
        One thread does: 4 keys by 16 columns
        Shared: two numbers a warp
        Registers: x (64,), four keys of 16 columns
        Global traffic: reads v twice, the second time mostly from L2; writes half as much
        Needs: cc 8.9: conversion to e4m3; rows of whole vectors
        """
        thread, line, part = cuda.threadIdx.x, cuda.blockIdx.y, cuda.blockIdx.x
        place, column = thread % LANES, thread // WARP * PIECE
        first = part * BLOCK + GROUP * (thread % WARP // LANES)
        x = cuda.local.array(_OWN_VALUES, float32)  # (4 keys, 16 columns)
        words = cuda.local.array(4, uint32)  # (4,)
        if line < units.shape[1]:
            (b, h), head = batch_and_head(line, heads), head_address(words_of_heads, 2, line)
            load(x, words, source, b, h, first, place, column)
            note_max(largest_of(x, 0, _OWN_VALUES, _ZERO), head + WORD * part)
        line -= lag
        if line >= 0:
            (b, h), head = batch_and_head(line, heads), head_address(words_of_heads, 2, line)
            load(x, words, source, b, h, first, place, column)
            exponent = unit_exponent(head_max(head, cuda.gridDim.x))
            inverse = power_of_two(uint32(uint32(254) - exponent))
            if thread == 0 and part == 0:
                units[0, line, 0] = power_of_two(exponent)
            address = global_address(target) + b * target.strides[0] + h * target.strides[1]
            address += column * target.strides[2] + first + WORD_KEYS * place
            for j in range(PIECE):
                word = pack_e4m3(
                    scaled(x[j], inverse), scaled(x[PIECE + j], inverse),
                    scaled(x[2 * PIECE + j], inverse), scaled(x[3 * PIECE + j], inverse),
                )  # fmt: skip
                st_global(address + j * target.strides[2], word)

    target, three = types.Array(uint8, 4, "A"), array_type(FLOAT32, 3)
    signature = void(array_type(BITS, 4), target, int64, three, three, int64)
    return Kernel(float8_values, signature, threads, resident=768 // threads)


class Float8Units(NamedTuple):
    """The powers of two that undo the scaling of q, k and v in float8 (e4m3).

    They are float32 arrays (1, batches · heads, blocks), without batches and heads that repeat by a stride
    of 0.  The number of blocks is 1 if each head has one factor.
    """

    q: Any
    k: Any
    v: Any  # One per head


def quantise(
    arrays: tuple[Any, ...], widths: Widths, dtype: str, how: Float8
) -> tuple[tuple[Any, Any, Any], Float8Units]:
    """Return q, k and v in float8, as bytes, and their units; repeated entries are rounded once.

    Arrays are q (batch, heads, seq_q, head_dim), k and v, with rows of whole vectors.  The results are (own
    batches, own heads, seq, width), that of v (…, width, padded seq).
    """
    head, value = widths
    signs = device_constant(SIGNS.tobytes(), SIGNS.shape, SIGNS.dtype, current_device())
    q, k, v = (as_bits(array) for array in arrays)
    leads = [_own_lead(array) for array in (q, k, v)]
    lines, heads = ((*(math.prod(x) for x in leads),), (*(x[1] for x in leads),))
    q_blocks, k_blocks = (PLAIN.ceil_div(array.shape[2], BLOCK) for array in (q, k))
    of_rows = slice(0, 2)
    numbers = tuple(
        empty_device((*lead, array.shape[2], head), _BYTE)
        for lead, array in zip(leads[of_rows], (q, k), strict=True)
    )
    units = tuple(
        empty_device((1, own, blocks if how.has_blocks else 1), FLOAT32)
        for own, blocks in zip(lines[of_rows], (q_blocks, k_blocks), strict=True)
    )
    blocks = max(q_blocks, k_blocks)
    words = head_words(len(lines), max(lines), blocks)
    lag = 0 if how.has_blocks else lag_of(2 * blocks)
    grid = 2 * blocks, max(lines[of_rows]) + lag
    rows_kernel(head, dtype, how.has_hadamard, how.has_blocks)[grid, THREADS](
        (q, k), numbers, lines[of_rows], heads[of_rows], signs, words, units, lag
    )
    transposed = empty_device((*leads[2], value, k_blocks * BLOCK), _BYTE)
    unit = empty_device((1, lines[2], 1), FLOAT32)
    lag = lag_of(k_blocks)
    values_kernel(value, dtype)[(k_blocks, lines[2] + lag), 2 * value](
        v, transposed, heads[2], words, unit, lag
    )
    return (*numbers, transposed), Float8Units(units[0], units[1], unit)


def _own_lead(array: Any) -> tuple[int, int]:
    """Return the batches and heads of an array, 1 where a stride of 0 repeats them."""
    batch, head = (
        1 if step == 0 else size
        for size, step in zip(array.shape[:2], array.strides[:2], strict=True)
    )
    return batch, head
