"""Bits of the elements of a tile in the registers of the lanes that have them: what dropout keeps.

flash2_mma draws bits together, into shared memory, behind a barrier of its block.  Warpgroups that run
apart from each other have no such barrier.  Here each lane draws its part of the bits of its warp's 16
rows, and hands on by shuffles what belongs to its neighbours, while its products are under way.

An element of a lane is (t, i), as in the accumulators of ``wgmma``: tile t of eight columns, and
i = 2 · half + e for the lower of its two rows (half) and the later of its two columns (e).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import int32, uint32

from kernels.cuda.device import device_function
from kernels.cuda.ptx.inline import U32, instruction
from kernels.cuda.ptx.philox import make_draw
from kernels.geometry import PLAIN
from kernels.philox import MASK, WORDS
from kernels.targets import cuda

#: Places of four bits in four words.
Places = tuple[int, int, int, int]
#: Bits of a word are those of so many tiles of eight columns, four elements of a lane each.
TILES = 8
EVERYONE = 0xFFFFFFFF


def bit_words(cols: int) -> int:
    """Return how many words a lane needs for its elements of 16 rows and ``cols`` columns."""
    return PLAIN.ceil_div(cols, 8 * TILES)


@device_function
def has_bit(bits, t, i):
    """Return whether a lane's words have the bit of its element (t, i)."""
    return uint32(bits[t // TILES] & uint32(1 << (4 * (t % TILES) + i))) != 0


@device_function
def kept_pair(pair, bits, t, half):
    """Return a packed pair, zeros where it is dropped: elements (t, 2 half) and (t, 2 half + 1) of a lane.

    ``bits`` are those of ``make_draw_kept(…, in_bytes=True)``: their highest bits are spread over 16.
    """
    turned = uint32(bits[t // TILES] << uint32(t % TILES))
    return uint32(pair & (spread_high(turned) if half else spread_low(turned)))


@instruction("prmt.b32 $result, $x, 0, 0x9988;", U32, is_pure=True, x=U32)
def spread_low(x):
    """Return the highest bit of byte 0 in all of the low 16 bits, that of byte 1 in the high ones."""


@instruction("prmt.b32 $result, $x, 0, 0xbbaa;", U32, is_pure=True, x=U32)
def spread_high(x):
    """Return the highest bit of byte 2 in all of the low 16 bits, that of byte 3 in the high ones."""


@device_function
def with_bit(word, bit, place):
    """Return a word with one more bit, if it is set."""
    return uint32(word | uint32(bit) << uint32(place))


@device_function
def moved(word, shift):
    """Return a word with its bits further up, as shuffles take it."""
    return int32(uint32(word) << uint32(shift))


@device_function
def some_of(bits, extras):
    """Return a word of bits, but none where dropout keeps nothing: the threshold has 33 bits then."""
    return uint32(0 if extras.threshold >> 32 else bits)


def _make_draw_word(
    word: int, tiles: int, places: Callable[[int], Places], block_step: int, row_step: int
) -> Callable[..., Any]:
    """Return ``draw_word(flat, row, block, extras)``: four words, with the bits of eight tiles.

    Args:
        word: Which of a lane's words.
        tiles: That there are; of those beyond no bit is set.
        places: Of a tile's bits in the four words, by its number.
        block_step: From tile to tile, in blocks of four columns.
        row_step: Likewise in rows.
    """

    def make_draw_one(u: int) -> Callable[..., Any]:
        draw, tile = make_draw(places(u)), word * TILES + u

        @device_function
        def draw_one(words, given):
            flat, row, block, threshold, seed, more_seed = given
            return draw(
                words[0], words[1], words[2], words[3], threshold, seed, more_seed,
                block + block_step * tile, row + row_step * tile, flat,
            )  # fmt: skip

        @device_function
        def draw_none(words, given):
            return words

        return draw_one if tile < tiles else draw_none

    draw_0, draw_1, draw_2, draw_3, draw_4, draw_5, draw_6, draw_7 = map(
        make_draw_one, range(TILES)
    )

    @device_function
    def draw_word(flat, row, block, extras):
        seed, more_seed = uint32(extras.seed & MASK), uint32((extras.seed >> 32) & MASK)
        given = flat, row, block, uint32(extras.threshold & MASK), seed, more_seed
        words = uint32(0), uint32(0), uint32(0), uint32(0)
        # Each round waits for the last one, those of other draws need not.
        words = draw_3(draw_2(draw_1(draw_0(words, given), given), given), given)
        return draw_7(draw_6(draw_5(draw_4(words, given), given), given), given)

    return draw_word


@cache
def make_draw_kept(cols: int, in_bytes: bool = False) -> Callable[..., None]:
    """Return ``draw_kept(bits, lane, flat, row, col, extras)``: set the bits of what dropout keeps.

    ``bits`` is a local array (``bit_words(cols)``,) of uint32; ``row`` the first of the warp's 16 query
    rows, ``col`` the first key column, a multiple of four; ``flat`` is as in ``scores``.

    Source of the bits: ``philox.keep``, of four neighbouring columns at a time.  Two lanes have them, for
    rows r and r + 8: the even one draws for r, the odd one for r + 8.

    Args:
        cols: Key columns of the tile, a multiple of 16.
        in_bytes: The bits of element i are those of byte i, the highest that of the first tile, as
            :func:`kept_pair` takes them; else they are as :func:`has_bit` takes them.
    """

    def places(u: int) -> Places:
        first, second = (7 - u, 15 - u) if in_bytes else (4 * u, 4 * u + 1)
        return first, second, first, second

    words, step = bit_words(cols), 16 if in_bytes else 2
    draw_first, draw_second = (_make_draw_word(n, cols // 8, places, 2, 0) for n in range(2))

    @device_function
    def exchanged(drawn, half, extras):
        # Columns 0 and 1 of the four are the even lane's.
        first, last = drawn[0] | drawn[1], drawn[2] | drawn[3]
        own, other = (last, first) if half else (first, last)
        received = cuda.shfl_xor_sync(EVERYONE, moved(other, step * half), 1)
        return some_of(moved(own, step * half) | received, extras)

    @device_function
    def draw_kept(bits, lane, flat, row, col, extras):
        half = lane & 1
        own_row, block = row + lane // 4 + 8 * half, col // WORDS + (lane & 2) // 2
        bits[0] = exchanged(draw_first(flat, own_row, block, extras), half, extras)
        if words > 1:
            bits[1] = exchanged(draw_second(flat, own_row, block, extras), half, extras)

    return draw_kept


@cache
def make_draw_kept_by_keys(cols: int) -> Callable[..., None]:
    """Return :func:`make_draw_kept`'s function for transposed tiles: rows are keys, columns queries.

    Here ``row`` is the query row of the first column, and ``col`` the first of the warp's 16 keys, a
    multiple of four.  Four neighbouring keys are those of four lanes: of their four elements (i) of a
    tile of eight columns each lane draws one, for all of them.

    Args:
        cols: Query rows, the columns of the tile; a multiple of 8.
    """

    def places(u: int) -> Places:
        return 4 * u, 4 * u, 4 * u, 4 * u

    words = bit_words(cols)
    draw_first, draw_second = (_make_draw_word(n, cols // 8, places, 0, 8) for n in range(2))

    @device_function
    def exchanged(drawn, own, extras):
        # Word j is for lane j of the four: in two steps each gets its own from all.
        b0, b1, b2, b3 = drawn
        if own & 1:
            b0, b1, b2, b3 = b1, b0, b3, b2
        if own & 2:
            b0, b1, b2, b3 = b2, b3, b0, b1
        kept = moved(b0, own)
        kept |= cuda.shfl_xor_sync(EVERYONE, moved(b1, own), 4)
        kept |= cuda.shfl_xor_sync(EVERYONE, moved(b2, own), 8)
        kept |= cuda.shfl_xor_sync(EVERYONE, moved(b3, own), 12)
        return some_of(kept, extras)

    @device_function
    def draw_kept(bits, lane, flat, row, col, extras):
        own = (lane // 4) & 3  # which of the four a lane is, and which element it draws
        own_row = row + 2 * (lane & 3) + (own & 1)
        block = (col + 4 * (lane // 16) + 8 * (own // 2)) // WORDS
        bits[0] = exchanged(draw_first(flat, own_row, block, extras), own, extras)
        if words > 1:
            bits[1] = exchanged(draw_second(flat, own_row, block, extras), own, extras)

    return draw_kept
