"""Masks packed in the order of the lanes' elements, for Hopper's rung.

A lane's elements of a tile are scattered over two rows, two columns at a time.  Reading them from the mask
itself takes an address and a load for each.  From a packed mask, a lane reads two words of bits for 64
elements of a boolean mask, or eight times 16 bytes of a 16-bit floating mask, and neighbouring lanes read
neighbouring words.  A mask that all heads share is packed once for all of them.  Each distinct tile of a
block mask is packed once for all calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.common.geometry import PLAIN, same
from kernels.cuda.attention.flash3_wgmma.dropout_bits import (
    TILES,
    bit_words,
    with_bit,
)
from kernels.cuda.device.one_source import batch_and_head, ceil_div
from kernels.cuda.device.warpgroups import WARPGROUP
from kernels.cuda.ptx.copies import global_address, ld_global_v4, st_global_v4
from kernels.cuda.ptx.numbers import UNPACK
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import WARP, WORD, Kernel, array_type, device_function
from kernels.runtime.dtypes import BITS
from kernels.runtime.targets import cuda
from kernels.runtime.types import int64, types, uint32, uint64, void
from kernels.scores.program import Features

#: Rows of a warp, and threads of a block that packs.
ROWS, THREADS = 16, 256
#: The word in which all bits are set.
ALL = 0xFFFFFFFF
#: Numba's type of the words.
WORDS = types.Array(uint32, 1, "C")
#: Columns of a floating mask for which a lane has four words of pairs, 16 bytes: two tiles of eight.
STEP = 16
QUAD = 4


def has_words(features: Features) -> bool:
    """Tell whether a kernel reads packed words instead of the mask; not for a float32 mask."""
    return features.mask not in ("", "float")


def words_type(features: Features) -> Any:
    """Return numba's type of the argument for the words of a mask; the argument is 0 without a mask."""
    return WORDS if has_words(features) else int64


def _words_of(cols: int, has_pairs: bool) -> tuple[int, int]:
    """Return the number of loads of a lane per tile, and the words per load."""
    return (cols // STEP, QUAD) if has_pairs else (1, bit_words(cols))


def _make_counts(compile_: Any, ceil_div: Any, cols: int, by_keys: bool) -> Callable[..., Any]:
    """Return ``counts(mask)``: the distinct heads, groups of rows and tiles of columns of a mask.

    An axis that repeats counts as one.  The function and ``ceil_div`` are compiled for the host and for
    kernels.
    """
    rows_axis, cols_axis = (3, 2) if by_keys else (2, 3)

    @compile_
    def counts(mask):
        heads = 1 if mask.strides[1] == 0 else mask.shape[1]
        groups = 1 if mask.strides[rows_axis] == 0 else ceil_div(mask.shape[rows_axis], ROWS)
        tiles = 1 if mask.strides[cols_axis] == 0 else ceil_div(mask.shape[cols_axis], cols)
        return heads, groups, tiles

    return counts


@cache
def make_words_place(
    cols: int, by_keys: bool = False, has_pairs: bool = False
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``line_place(lane, b, h, row, extras)`` and ``tile_place(col, extras)``.

    The number of a lane's first word is their sum.  ``row`` is the first of the warp's 16 rows, ``col`` the
    tile's first column.  By keys, tiles are transposed; with ``has_pairs``, the mask is floating, of 16
    bits.
    """
    steps, count = _words_of(cols, has_pairs)
    size = steps * count * WARP
    counts = _make_counts(device_function, ceil_div, cols, by_keys)

    @device_function
    def line_place(lane, b, h, row, extras):
        heads, groups, tiles = counts(extras.mask)
        line = extras.mask_batch[b] * heads + (0 if heads == 1 else h)
        # Rows beyond the end read those of the last group, and are not written.
        line = line * groups + min(row // ROWS, groups - 1)
        return line * tiles * size + lane * count

    @device_function
    def tile_place(col, extras):
        _, _, tiles = counts(extras.mask)
        return min(col // cols, tiles - 1) * size

    return line_place, tile_place


@cache
def make_bring_pairs(cols: int) -> Callable[..., None]:
    """Return ``bring_pairs(words, mask_words, place)``: load a lane's words of a 16-bit floating mask.

    They are stored in ``words`` behind the bits; ``place`` is the number of the first word.
    """
    first, steps = bit_words(cols), cols // STEP

    @device_function
    def bring_pairs(words, mask_words, place):
        for step in range(steps):
            quad = cuda.local.array(QUAD, uint32)  # (QUAD,)
            ld_global_v4(quad, global_address(mask_words) + WORD * (place + step * (QUAD * WARP)))
            for n in range(QUAD):
                words[first + QUAD * step + n] = quad[n]

    return bring_pairs


@cache
def make_pair_at(kind: str, cols: int) -> Callable[..., Any]:
    """Return ``pair_at(place, extras)``: the element of a 16-bit floating mask.

    ``place`` is a record with the lane's ``words`` and the element's number in it, ``t`` and ``i``.
    """
    unpack: Any = UNPACK[kind]
    first = bit_words(cols)

    @device_function
    def pair_at(place, extras):
        low, high = unpack(place.words[first + 2 * place.t + place.i // 2])
        return high if place.i % 2 else low

    return pair_at


@cache
def make_pattern_word(rows: int, cols: int) -> Callable[..., Any]:
    """Return ``pattern_word(n, pattern, extras)``: a lane's word ``n`` of a partial tile of a block mask.

    ``pattern`` is the number of the tile in ``extras.tile_patterns``, which is not 0.  The tile of the
    block has ``rows`` rows, 16 for each warp that multiplies.
    """
    words = bit_words(cols)
    size = rows // ROWS * WARP * words

    @device_function
    def pattern_word(n, pattern, extras):
        thread = cuda.threadIdx.x - WARPGROUP  # the first warpgroup copies
        # Unsigned: a signed index may be negative, to count from the end, and each would be tested.
        place = uint64(pattern - 1) * uint64(size) + uint64(thread * words + n)
        return extras.pattern_words[place]

    return pattern_word


def pack_patterns(shown: Any) -> Any:
    """Return the words of the lanes for patterns of tiles, as :func:`make_pattern_word` reads them.

    ``shown`` is (patterns, rows, columns) bool, where rows are those of the warps; multiples of 16 and 8.
    The words are (patterns, rows / 16, lanes, words) uint32.
    """
    count, rows, cols = shown.shape
    words = bit_words(cols)
    padded = np.zeros((count, rows, 8 * TILES * words), bool)
    padded[:, :, :cols] = shown
    # An element of a lane is (8 n + u, i): i = 2 · half + e, see ``dropout_bits``.
    apart = padded.reshape(count, rows // ROWS, 2, WARP // 4, words, TILES, 4, 2)
    lanes = apart.transpose(0, 1, 3, 6, 4, 5, 2, 7)  # (…, lane / 4, lane % 4, n, u, half, e)
    bits = lanes.reshape(count, rows // ROWS, WARP, words, 4 * TILES)
    return np.packbits(bits, axis=-1, bitorder="little").view("<u4")[..., 0]


def pack_patterns_by_keys(shown: Any) -> Any:
    """Return the result of :func:`pack_patterns` for kernels in which the rows of the warps are keys."""
    return pack_patterns(shown.swapaxes(1, 2))


def _make_read_words(by_keys: bool, has_pairs: bool, cols: int) -> Callable[..., None]:
    """Return ``read_words(words, mask, b, h, row, col, part)``: a lane's words of a part of a tile.

    ``row`` and ``col`` are the lane's first element in the tile.  Elements beyond the end are not read,
    unless one tile is shared by all.
    """

    @device_function
    def element(mask, b, h, row, col):
        if by_keys:
            row, col = col, row
        return mask[b, h, min(row, mask.shape[2] - 1), min(col, mask.shape[3] - 1)]

    @device_function
    def read_bits(words, mask, b, h, row, col, part):
        word = uint32(0)
        for u in range(TILES):
            for i in range(4):
                c = 8 * (part * TILES + u) + i % 2
                if c < cols:
                    shown = element(mask, b, h, row + 8 * (i // 2), col + c)
                    word = with_bit(word, shown, 4 * u + i)
        words[0] = word

    @device_function
    def read_pairs(words, mask, b, h, row, col, part):
        for n in range(QUAD):
            i_row, i_col = row + 8 * (n % 2), col + part * STEP + 8 * (n // 2)
            low = uint32(element(mask, b, h, i_row, i_col))
            high = uint32(element(mask, b, h, i_row, i_col + 1))
            words[n] = uint32(low | high << uint32(16))

    return read_pairs if has_pairs else read_bits


@cache
def pack_kernel(cols: int, by_keys: bool, has_pairs: bool) -> Kernel:
    """Return the kernel that packs a boolean or a 16-bit floating mask for tiles of ``cols`` columns."""
    parts = cols // STEP if has_pairs else bit_words(cols)
    read_words = _make_read_words(by_keys, has_pairs, cols)

    def pack_mask(mask, heads, groups, tiles, packed):
        """Fill packed.

        Computes: of a boolean mask words of 32 elements of a lane: bit 4 u + i is that of element
            (8 n + u, i); of a floating one four words: of two tiles of eight columns the pairs of the
            lane's upper and lower row
        Grid: (ceil(groups * tiles * parts * 32 / threads), batches * heads)
        Block: (threads,)
        One thread does: one word, or four
        Registers: these words
        Global traffic: reads the mask once; writes packed once
        """
        thread = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        lane, number = uint32(thread % WARP), uint32(thread // WARP)
        part, number = uint32(number % parts), uint32(number // parts)
        tile, group = int64(number % uint32(tiles)), int64(number // uint32(tiles))
        b, h = batch_and_head(cuda.blockIdx.y, heads)
        if group < groups:
            words = cuda.local.array(QUAD, uint32)  # (QUAD,)
            row, col = group * ROWS + int64(lane // 4), tile * cols + int64(2 * (lane % 4))
            read_words(words, mask, b, h, row, col, int64(part))
            place = (cuda.blockIdx.y * groups + group) * tiles + tile
            if has_pairs:
                place = (place * parts + int64(part)) * WARP + int64(lane)
                st_global_v4(global_address(packed) + place * (WORD * QUAD), words)
            else:
                packed[(place * WARP + int64(lane)) * parts + int64(part)] = words[0]

    mask = array_type(BITS if has_pairs else np.dtype(bool), 4)
    return Kernel(pack_mask, void(mask, int64, int64, int64, WORDS), THREADS)


def packed_mask(mask: Any, cols: int, by_keys: bool = False) -> Any:
    """Return the words of a mask in the order of :func:`make_words_place`, one vector of uint32.

    The mask is (own batches, heads, seq_q, seq_k) on the device, bool, or the uint16 bits of a floating
    mask; strides of 0 repeat.
    """
    has_pairs = mask.dtype == BITS
    heads, groups, tiles = _make_counts(same, PLAIN.ceil_div, cols, by_keys)(mask)
    steps, count = _words_of(cols, has_pairs)
    words, lines = groups * tiles * steps * count * WARP, mask.shape[0] * heads
    packed = empty_device((lines * words,), np.dtype(np.uint32))
    threads = words // QUAD if has_pairs else words
    launch = pack_kernel(cols, by_keys, has_pairs)[
        (PLAIN.ceil_div(threads, THREADS), lines), THREADS
    ]
    launch(mask, heads, groups, tiles, packed)
    return packed
