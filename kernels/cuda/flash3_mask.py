"""Masks as Hopper's rung reads them: one bit an element, in the order in which lanes have them.

A lane's elements of a tile are scattered over two rows, two columns at a time; read from the mask itself
each takes an address and a byte.  Packed beforehand, a lane reads two words for 64 elements; and a mask
that all heads share, which is packed once for all of them, is read once and not once for each head.  Of a
block mask the bits are made tile by tile, sixteen rows and columns at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import int32, int64, types, uint32, uint64, void

from kernels.block_states import FULL, PARTIAL, SIDE
from kernels.cuda.arrays import empty_device
from kernels.cuda.device import Kernel, array_type, ceil_div, device_function
from kernels.cuda.flash3_scores import TILES, bit_words, with_bit
from kernels.geometry import PLAIN
from kernels.targets import cuda

#: Lanes of a warp; rows of which it has the elements; threads of a block that packs.
WARP, ROWS, THREADS = 32, 16, 256
#: Bits of all elements, and of the eight that a lane has of ``SIDE`` rows and columns.
ALL, EIGHT = 0xFFFFFFFF, 0xFF
#: Numba's type of the words.
WORDS = types.Array(uint32, 1, "C")


def _sizes(mask: Any, cols: int, by_keys: bool) -> tuple[int, int, int]:
    """Return how many heads of a mask differ, and its groups of rows and tiles of columns."""
    heads = 1 if mask.strides[1] == 0 else mask.shape[1]
    seq = mask.shape[3:1:-1] if by_keys else mask.shape[2:]
    return heads, PLAIN.ceil_div(seq[0], ROWS), PLAIN.ceil_div(seq[1], cols)


@cache
def make_words_place(cols: int, by_keys: bool = False) -> Callable[..., Any]:
    """Return ``words_place(lane, b, h, row, col, extras)``: the number of a lane's first word.

    ``row`` is the first of the warp's 16 rows, ``col`` the tile's first column.

    Args:
        cols: Columns of a tile, up to 128.
        by_keys: Tiles are transposed: rows are keys, columns query rows.
    """
    words = bit_words(cols)
    rows_axis, cols_axis = (3, 2) if by_keys else (2, 3)

    @device_function
    def words_place(lane, b, h, row, col, extras):
        mask = extras.mask
        groups = ceil_div(mask.shape[rows_axis], ROWS)
        tiles = ceil_div(mask.shape[cols_axis], cols)
        heads = 1 if mask.strides[1] == 0 else mask.shape[1]
        line = extras.mask_batch[b] * heads + (0 if heads == 1 else h)
        # Rows beyond the end read those of the last group, and are not written.
        line = line * groups + min(row // ROWS, groups - 1)
        return ((line * tiles + col // cols) * WARP + lane) * words

    return words_place


@device_function
def all_seen(n, lane, flat, row, col, seq_q, seq_k, extras):
    """Return a word of which no block mask hides anything."""
    return uint32(ALL)


@cache
def make_block_bits(cols: int, by_keys: bool = False) -> Callable[..., Any]:
    """Return ``block_bits(n, lane, flat, row, col, seq_q, seq_k, extras)``: what a block mask leaves.

    They are those of a lane's word ``n``, and (row, col) is the lane's first element of the tile.

    Args:
        cols: As for :func:`make_words_place`.
        by_keys: Likewise.
    """
    tiles = cols // 8

    @device_function
    def place_of(u, i):
        along, across = 8 * u + i % 2, 8 * (i // 2)
        return (along, across) if by_keys else (across, along)

    @device_function
    def block_bits(n, lane, flat, row, col, seq_q, seq_k, extras):
        across, along = lane // 4, 2 * (lane % 4)
        down, right = (along, across) if by_keys else (across, along)
        first_row, first_col = place_of(n * TILES, 0)
        last_row, last_col = int32((seq_q - 1) // SIDE * SIDE), int32((seq_k - 1) // SIDE * SIDE)
        # The first of as many rows and columns, within the arrays: what is beyond nobody asks for.
        at_row = min(int32(row - down + first_row), last_row)
        at_col = min(int32(col - right + first_col), last_col)
        rows, cols_of = uint32(extras.patterns.shape[1]), uint32(extras.patterns.shape[2])
        i, r = uint32(uint32(at_row) // rows), uint32(uint32(at_row) % rows)
        j, c = uint32(uint32(at_col) // cols_of), uint32(uint32(at_col) % cols_of)
        line, found = uint64(flat % extras.heads % extras.states.shape[0]), uint32(0)
        for u in range(0, min(TILES, tiles - n * TILES), 2):
            # They are all in one block: its state is looked up once.
            state = extras.states[line, uint64(i), uint64(j)]
            bits = uint32(EIGHT if state == FULL else 0)
            if state >= PARTIAL:
                for v in range(2):
                    for e in range(4):
                        own_r, own_c = place_of(v, e)
                        kept = extras.patterns[
                            int64(state - PARTIAL),
                            int64(r + down + own_r),
                            int64(c + right + own_c),
                        ]
                        bits = with_bit(bits, kept, 4 * v + e)
            found = uint32(found | bits << uint32(4 * u))
            # The next ones may be in the next block; no division is needed for that.
            if by_keys and at_row < last_row:
                at_row, r = int32(at_row + SIDE), uint32(r + SIDE)
                if r == rows:
                    i, r = uint32(i + 1), uint32(0)
            if not by_keys and at_col < last_col:
                at_col, c = int32(at_col + SIDE), uint32(c + SIDE)
                if c == cols_of:
                    j, c = uint32(j + 1), uint32(0)
        return found

    return block_bits


@cache
def pack_kernel(cols: int, by_keys: bool) -> Kernel:
    """Return the kernel that packs a mask for tiles of ``cols`` columns."""
    words = bit_words(cols)

    def pack_mask(mask, heads, groups, tiles, packed):
        """Fill packed.

        Computes   a word of 32 elements of a lane: bit 4 u + i is that of element (8 n + u, i)
        Source     none
        Grid       (ceil(groups * tiles * words * 32 / threads), batches * heads)
        Block      (threads,)
        One thread does: one word
        Shared     none
        Registers  one word
        Global     reads the mask once; writes packed once.
        Needs      nothing
        """
        thread = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        lane, place = thread % WARP, thread // WARP
        n, tile, group = place % words, place // words % tiles, place // words // tiles
        b, h = cuda.blockIdx.y // heads, cuda.blockIdx.y % heads
        row, col = group * ROWS + lane // 4, tile * cols + 2 * (lane % 4)
        seq_q, seq_k = mask.shape[2], mask.shape[3]
        if group < groups:
            word = uint32(0)
            for u in range(TILES):
                for i in range(4):
                    c = 8 * (n * TILES + u) + i % 2
                    i_row, i_col = row + 8 * (i // 2), col + c
                    if by_keys:
                        i_row, i_col = i_col, i_row
                    if c < cols and i_row < seq_q and i_col < seq_k:
                        word = with_bit(word, mask[b, h, i_row, i_col], 4 * u + i)
            line = cuda.blockIdx.y * groups + group
            packed[((line * tiles + tile) * WARP + lane) * words + n] = word

    mask = array_type(np.dtype(bool), 4)
    return Kernel(pack_mask, void(mask, int64, int64, int64, WORDS), THREADS)


def packed_mask(mask: Any, cols: int, by_keys: bool = False) -> Any:
    """Return the bits of a mask as :func:`make_words_place` finds them, one vector of uint32.

    Args:
        mask: (own batches, heads, seq_q, seq_k) bool on the device; strides of 0 repeat.
        cols: Columns of a kernel's tiles, up to 128.
        by_keys: Its tiles are transposed.
    """
    heads, groups, tiles = _sizes(mask, cols, by_keys)
    words = groups * tiles * bit_words(cols) * WARP
    lines = mask.shape[0] * heads
    packed = empty_device((lines * words,), np.dtype(np.uint32))
    launch = pack_kernel(cols, by_keys)[(PLAIN.ceil_div(words, THREADS), lines), THREADS]
    launch(mask, heads, groups, tiles, packed)
    return packed
