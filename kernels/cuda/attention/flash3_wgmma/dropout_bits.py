"""Dropout bits of a tile in the registers of the lanes that own its elements.

flash2_mma draws bits into shared memory, which needs a barrier of the whole block; independent warpgroups
have none.  Here each lane draws a part of the bits of its warp's 16 rows and exchanges them with its
neighbours in two or three shuffles, while products are running.

An element of a lane is (t, i), as in the accumulators of ``wgmma``: tile t of eight columns, and
i = 2 · half + e, where half is 1 for the lower of its two rows, and e is 1 for the second of its two
columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from kernels.common.geometry import PLAIN
from kernels.common.philox import COLUMNS, MASK
from kernels.cuda.ptx.inline import U32, instruction
from kernels.cuda.ptx.numbers import bits_of, float_of
from kernels.cuda.ptx.philox import Draw, make_draw
from kernels.cuda.runtime.kernel import ALL_LANES, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32, uint32

#: Number of tiles of eight columns per word; a lane has four elements of each tile.
TILES = 8
SIGN = 0x80000000
#: Mask of the upper four bits of each byte.
UPPER = 0xF0F0F0F0


def bit_words(cols: int) -> int:
    """Return the number of words for the bits of a lane's elements of 16 rows and ``cols`` columns."""
    return PLAIN.ceil_div(cols, 8 * TILES)


def offset_of(by_keys: bool) -> Callable[..., Any]:
    """Return ``offset(t, i)``: rows and columns from a lane's first element to its element (t, i).

    By keys, tiles are transposed: their rows are keys.
    """

    @device_function
    def offset(t, i):
        along, across = 8 * t + i % 2, 8 * (i // 2)
        return (along, across) if by_keys else (across, along)

    return offset


def lane_offset_of(by_keys: bool) -> Callable[..., Any]:
    """Return ``lane_offset(lane)``: rows and columns from a warp's first element to the lane's."""

    @device_function
    def lane_offset(lane):
        across, along = lane // 4, 2 * (lane % 4)
        return (along, across) if by_keys else (across, along)

    return lane_offset


@device_function
def has_bit(bits, t, i):
    """Tell whether the bit of element (t, i) is set in a lane's words of visible elements."""
    return uint32(bits[t // TILES] & uint32(1 << (4 * (t % TILES) + i))) != 0


@device_function
def with_bit(word, bit, place):
    """Return a word with one more bit set, if ``bit`` is set."""
    return uint32(word | uint32(bit) << uint32(place))


@instruction("prmt.b32 $result, $x, 0, 0x9988;", U32, is_pure=True, x=U32)
def spread_low(x):
    """Fill the low 16 bits with the highest bit of byte 0, and the high 16 with that of byte 1."""


@instruction("prmt.b32 $result, $x, 0, 0xbbaa;", U32, is_pure=True, x=U32)
def spread_high(x):
    """Fill the low 16 bits with the highest bit of byte 2, and the high 16 with that of byte 3."""


@instruction("prmt.b32 $result, $x, $y, $selector;", U32, is_pure=True, x=U32, y=U32, selector=U32)
def permuted(x, y, selector):
    """Return four of the eight bytes of x and y, selected by the hexadecimal digits of ``selector``."""


@device_function
def other(word, distance):
    """Return the word of the lane at a distance."""
    return uint32(cuda.shfl_xor_sync(ALL_LANES, int32(word), distance))


class Kept(NamedTuple):
    """The functions for the dropout bits of a lane's elements."""

    #: ``(bits, lane, flat, row, col, extras)``: set the bits; ``bits`` is a local array
    #: (``bit_words(cols)``,) of uint32, ``flat`` as in ``scores``.
    draw: Callable[..., None]
    #: ``(pair, bits, t, half)``: the packed pair of elements (t, 2 half) and (t, 2 half + 1), with zeros
    #: for dropped elements.
    pair: Callable[..., Any]
    has: Callable[..., Any]  # ``(bits, t, i)``: whether an element is kept
    #: ``(x, bits, t, i)``: the non-negative number x, negated if the element is dropped.
    signed: Callable[..., Any]


def _make_kept(draw: Callable[..., None], place: Callable[..., Any]) -> Kept:
    """Return the functions, given the places of the bits.

    ``place(t, i)`` returns the number of an element's word, its byte in the word, and the distance of the
    bit from the highest bit of the byte.
    """

    @device_function
    def pair_of(pair, bits, t, half):
        n, byte, below = place(t, 2 * half)
        shifted = uint32(bits[n] << uint32(below))
        return uint32(pair & (spread_high(shifted) if byte >= 2 else spread_low(shifted)))

    @device_function
    def at_sign(bits, t, i):
        n, byte, below = place(t, i)
        return uint32(bits[n] << uint32(24 - 8 * byte + below))

    @device_function
    def has(bits, t, i):
        return uint32(at_sign(bits, t, i) & uint32(SIGN)) != 0

    @device_function
    def signed(x, bits, t, i):
        return float_of(uint32(bits_of(x) | (~at_sign(bits, t, i) & uint32(SIGN))))

    return Kept(draw, pair_of, has, signed)


@device_function
def threshold_and_seed(extras):
    """Return the threshold, and the seed in two words."""
    seed = extras.seed
    return uint32(extras.threshold), uint32(seed & MASK), uint32((seed >> 32) & MASK)


@cache
def make_kept(cols: int) -> Kept:
    """Return the functions for tiles whose rows are query rows.

    Here ``row`` is the first of the warp's 16, and ``col`` the first key column, a multiple of eight.

    The bits are those of ``philox.keep``, which draws eight neighbouring columns of a row at a time; these
    belong to four lanes.  Of every four tiles, each of these lanes draws one for all four, in both rows.
    The bits of a lane's even tiles form one word, and those of its odd tiles another.  ``cols`` is a
    multiple of 16, up to 128.
    """
    words = bit_words(cols)
    draw = make_draw(
        tuple(
            Draw(8 * half, 4 * n, (0, 2 * n + half), (1, 2 * n + half))
            for n in range(PLAIN.ceil_div(cols, 32))
            for half in range(2)
        )
    )

    @device_function
    def place(t, i):
        below, byte = 2 * (t // 4) + i // 2, 2 * (t // 2 % 2) + i % 2
        # Few bits fit in one word: those of odd tiles below the others.
        return (t % 2, byte, below) if words > 1 else (0, byte, below + 4 * (t % 2))

    @device_function
    def draw_kept(bits, lane, flat, row, col, extras):
        threshold, seed, more_seed = threshold_and_seed(extras)
        own = lane & 3
        # Of the elements of lanes 0 and 1 of the four, and of lanes 2 and 3: a half of a word each.
        first, last = draw(
            threshold, seed, more_seed, uint32(col // COLUMNS + own), uint32(row + lane // 4), flat
        )
        # From the lane two away come the halves for this side, and then from the neighbour what is its own.
        received = other(first if own & 2 else last, 2)
        even, odd = (received, last) if own & 2 else (first, received)
        low, high = permuted(even, odd, uint32(0x5410)), permuted(even, odd, uint32(0x7632))
        received = other(low if own & 1 else high, 1)
        even, odd = (received, high) if own & 1 else (low, received)
        if words > 1:
            bits[0], bits[1] = even, odd
        else:
            bits[0] = uint32(even | (odd >> uint32(4)))

    return _make_kept(draw_kept, place)


@cache
def make_kept_by_keys(cols: int) -> Kept:
    """Return the functions for transposed tiles: rows are keys, and columns are queries.

    Here ``row`` is the query row of the first column, and ``col`` the first of the warp's 16 keys, a
    multiple of eight.

    Eight neighbouring keys belong to eight lanes.  Of the four elements (i) of eight tiles, each lane draws
    four for all lanes: one i, in the upper or the lower four tiles.  The lanes then exchange eighths of
    their words in three steps, like the elements of a matrix that is transposed.  ``cols``, the number of
    query rows, is a multiple of 8, up to 128.
    """
    words = bit_words(cols)
    draw = make_draw(tuple(Draw(8 * n, 0, (0, n), (0, 4 + n)) for n in range(min(cols // 8, 4))))

    @device_function
    def place(t, i):
        return t // TILES, i, t % TILES

    @device_function
    def exchanged(word, lane):
        # Bits of byte c are for key c, the upper four, and key 4 + c; later those that lanes c, 4 + c drew.
        word = permuted(word, other(word, 4), uint32(0x3715 if lane & 4 else 0x6240))
        word = permuted(word, other(word, 8), uint32(0x3276 if lane & 8 else 0x5410))
        received = other(word, 16)
        if lane & 16:
            return uint32((received << uint32(4)) & uint32(UPPER) | word & uint32(~UPPER & MASK))
        return uint32(word & uint32(UPPER) | (received >> uint32(4)) & uint32(~UPPER & MASK))

    @device_function
    def draw_kept(bits, lane, flat, row, col, extras):
        threshold, seed, more_seed = threshold_and_seed(extras)
        own = lane // 4
        block = uint32(col // COLUMNS + own // 2 % 2)
        own_row = row + 2 * (lane & 3) + own % 2 + 32 * (own // 4)
        for n in range(words):
            word, _ = draw(threshold, seed, more_seed, block, uint32(own_row + 64 * n), flat)
            bits[n] = exchanged(word, lane)

    return _make_kept(draw_kept, place)
