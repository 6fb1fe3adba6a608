"""Rows of 16-bit operands in registers: loads, and the product with a random Hadamard matrix."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import float32, uint32

from kernels.cuda.ptx.copies import global_address, ld_global_v4
from kernels.cuda.ptx.numbers import UNPACK, bits_of, float_of
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.runtime.kernel import ALL_LANES, device_function
from kernels.runtime.dtypes import BITS
from kernels.runtime.targets import cuda

#: Number of lanes that share a row, and of columns that a lane reads at a time, 32 bytes.
LANES, PIECE = 4, 16
#: Bytes of a 16-bit number.
_BYTES = BITS.itemsize
_SIGN = np.uint32(1 << 31)


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
