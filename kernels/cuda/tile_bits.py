"""Bits of the elements of one tile, in shared memory: what dropout keeps, and what lists and mods let see.

Philox gives four neighbouring columns at a time, which belong to four threads, and a block of a pattern is
found by divisions: whoever comes first does it, four columns in a byte, and all read the bytes after the
barrier that the tiles need anyway.  It also keeps a user's function out of the loops over a thread's
registers, which the compiler unrolls only as long as they are short.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import uint64

from kernels.block_mask import FULL, PARTIAL
from kernels.cuda.device import PHILOX, device_function
from kernels.cuda.register_tiles import Layout
from kernels.cuda.scores import Features, block_at, make_score_functions
from kernels.philox import WORDS

attention_words = PHILOX.attention_words
#: The bits of four columns that are all seen.
ALL = 15


class TileBits(NamedTuple):
    """The functions that :func:`make_tile_bits` returns; those of absent options do nothing.

    Attributes:
        bytes: Of shared memory.
        draw: ``(thread, bits, whole, flat, row, col, seq_q, seq_k, extras)``: fill the bytes of the tile
            at (row, col); what bounds and lists hide nothing of is ``whole``.
        kept: ``(bits, r, c, extras)``: what dropout multiplies an element of the tile by.
        listed: ``(bits, r, c)``: whether block mask and mask_mod let it be seen.
    """

    bytes: int
    draw: Callable[..., None]
    kept: Callable[..., Any]
    listed: Callable[..., Any]


@cache
def make_tile_bits(
    features: Features, layout: Layout, dtype: np.dtype[Any], offset: int
) -> TileBits:
    """Return the functions for a tile (block_q, block_k).

    Args:
        features: Of the kernel.
        layout: Who draws.
        dtype: Of the probabilities.
        offset: Of the bytes in shared memory.
    """
    zero, one = dtype.type(0), dtype.type(1)
    groups, threads = layout.block_k // WORDS, layout.threads
    count = layout.block_q * groups
    is_listed = features.block_mask or features.mask_mod is not None
    listed_offset = offset + count if features.dropout else offset
    in_mod = make_score_functions(features, dtype).in_mod

    @device_function
    def nothing(thread, bits, whole, flat, row, col, seq_q, seq_k, extras):
        pass

    @device_function
    def draw_kept(thread, bits, whole, flat, row, col, seq_q, seq_k, extras):
        threshold = extras.threshold
        for n in range(thread, count, threads):
            w0, w1, w2, w3 = attention_words(
                extras.seed, flat, row + n // groups, col // WORDS + n % groups
            )
            low = (w0 >= threshold) | ((w1 >= threshold) << 1)
            high = (w2 >= threshold) | ((w3 >= threshold) << 1)
            bits[offset + n] = low | (high << 2)

    @device_function
    def all_four(whole, flat, row, col, extras):
        return ALL

    @device_function
    def in_blocks(whole, flat, row, col, extras):
        if whole:
            return ALL
        # Four neighbouring columns are in one block.
        state, r, c = block_at(flat, row, col, extras)
        four = ALL if state == FULL else 0
        if state >= PARTIAL:
            for u in range(WORDS):
                if extras.patterns[uint64(state - PARTIAL), uint64(r), uint64(c + u)]:
                    four |= 1 << u
        return four

    @device_function
    def in_mods(whole, flat, row, col, extras):
        four = 0
        for u in range(WORDS):
            if in_mod(flat, 0, 0, row, col + u, extras):
                four |= 1 << u
        return four

    first = in_blocks if features.block_mask else all_four
    second = in_mods if features.mask_mod is not None else all_four

    @device_function
    def draw_listed(thread, bits, whole, flat, row, col, seq_q, seq_k, extras):
        last_row, last_col = seq_q - 1, (seq_k - 1) // WORDS * WORDS
        for n in range(thread, count, threads):
            # Within the patterns; what is beyond the end is hidden by the bounds.
            i, j = min(row + n // groups, last_row), min(col + n % groups * WORDS, last_col)
            bits[listed_offset + n] = first(whole, flat, i, j, extras) & second(
                whole, flat, i, j, extras
            )

    draw_first = draw_kept if features.dropout else nothing
    draw_second = draw_listed if is_listed else nothing

    @device_function
    def draw(thread, bits, whole, flat, row, col, seq_q, seq_k, extras):
        draw_first(thread, bits, whole, flat, row, col, seq_q, seq_k, extras)
        draw_second(thread, bits, whole, flat, row, col, seq_q, seq_k, extras)

    @device_function
    def all_kept(bits, r, c, extras):
        return one

    @device_function
    def kept(bits, r, c, extras):
        byte = bits[offset + r * groups + c // WORDS]
        return extras.keep_scale if (byte >> (c % WORDS)) & 1 else zero

    @device_function
    def all_listed(bits, r, c):
        return True

    @device_function
    def listed(bits, r, c):
        byte = bits[listed_offset + r * groups + c // WORDS]
        return bool((byte >> (c % WORDS)) & 1)

    return TileBits(
        count * (features.dropout + is_listed),
        draw,
        kept if features.dropout else all_kept,
        listed if is_listed else all_listed,
    )
