"""Bits of the elements of a tile in shared memory, for dropout, lists and mods.

Philox draws eight adjacent columns at a time, which belong to several threads, and locating a block of a
pattern takes divisions.  The threads of a block share this work, write eight or four columns per byte, and
read the bytes after the barrier that the tiles need anyway.  This also keeps user functions out of the
loops over a thread's registers, which the compiler unrolls only if the loops are short.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.philox import COLUMNS, HALF, HALF_MASK
from kernels.cuda.attention.options.score_functions import (
    block_at,
    make_first_bit,
    make_score_functions,
    place_of,
)
from kernels.cuda.attention.register_tiles import RegisterLayout
from kernels.cuda.device.one_source import PHILOX
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.types import uint32, uint64
from kernels.scores.program import Features
from kernels.sparsity.block_mask import FULL, PARTIAL

attention_words = PHILOX.attention_words
#: Number of columns whose visibility bits share a byte, and the bits of four visible columns.
FOUR, ALL = 4, 15


class TileBits(NamedTuple):
    """Functions that keep the option bits of a tile in shared memory; ``make_tile_bits`` returns them.

    Functions of absent options do nothing.

    Attributes:
        bytes: Bytes of shared memory.
        draw: ``(thread, tile, extras)``: fill the bytes of a ``visits.VisitedTile``.
        kept: ``(bits, r, c, extras)``: the dropout factor of an element of the tile.
        listed: ``(bits, r, c)``: whether it is visible in the block mask and mask_mod.
    """

    bytes: int
    draw: Callable[..., None]
    kept: Callable[..., Any]
    listed: Callable[..., Any]


@cache
def make_tile_bits(
    features: Features, layout: RegisterLayout, dtype: np.dtype[Any], offset: int
) -> TileBits:
    """Return the functions for the tiles of a layout, whose bytes begin at an offset in shared memory."""
    drops, has_lists = features.dropout, features.has_lists
    count_kept, draw_kept, kept = _make_kept(features, layout, dtype, offset)
    count_listed, draw_listed, listed = _make_listed(features, layout, dtype, offset + count_kept)

    @device_function
    def draw(thread, tile, extras):
        if drops:
            draw_kept(thread, tile, extras)
        if has_lists:
            draw_listed(thread, tile, extras)

    return TileBits(count_kept + count_listed, draw, kept, listed)


def _make_kept(
    features: Features, layout: RegisterLayout, dtype: np.dtype[Any], offset: int
) -> Any:
    """Return the number of bytes of dropout, and ``draw`` and ``kept`` for it."""
    drops, moved, threads = features.dropout, features.moved, layout.threads
    zero, one, first_bit = dtype.type(0), dtype.type(1), make_first_bit(moved)
    # A tile may begin in the middle of a counter's columns, if it is no multiple of them wide.
    together = math.gcd(layout.block_k, COLUMNS)
    draws = layout.block_k // together
    count = layout.block_q * draws * drops

    @device_function
    def pair_kept(word, threshold):
        return ((word & HALF_MASK) >= threshold) | (((word >> HALF) >= threshold) << 1)

    @device_function
    def counter_kept(flat, row, block, extras):
        threshold = uint32(extras.threshold)
        w0, w1, w2, w3 = attention_words(extras.seed, flat, row, block)
        return (
            pair_kept(w0, threshold)
            | (pair_kept(w1, threshold) << 2)
            | (pair_kept(w2, threshold) << 4)
            | (pair_kept(w3, threshold) << 6)
        )

    @device_function
    def draw(thread, tile, extras):
        bits, (flat, row, col) = tile.bits, first_bit(tile.place, extras)
        for n in range(thread, count, threads):
            own_row, first = row + n // draws, col + n % draws * together
            byte = counter_kept(flat, own_row, first // COLUMNS, extras)
            if moved:  # the columns may be those of two counters
                byte |= counter_kept(flat, own_row, first // COLUMNS + 1, extras) << COLUMNS
                byte &= (1 << COLUMNS + first % COLUMNS) - 1
            bits[offset + n] = byte >> first % COLUMNS

    @device_function
    def kept(bits, r, c, extras):
        if not drops:
            return one
        byte = bits[offset + r * draws + c // together]
        return extras.keep_scale if (byte >> (c % together)) & 1 else zero

    return count, draw, kept


def _make_listed(
    features: Features, layout: RegisterLayout, dtype: np.dtype[Any], offset: int
) -> Any:
    """Return the number of bytes of lists and ``mask_mod``, and ``draw`` and ``listed`` for them."""
    has_blocks, has_mod = features.block_mask, features.mask_mod is not None
    groups, threads, has_lists = layout.block_k // FOUR, layout.threads, features.has_lists
    count = layout.block_q * groups * has_lists
    in_mod = make_score_functions(Features(mask_mod=features.mask_mod), dtype).program.is_shown

    @device_function
    def four_in_blocks(place, extras):
        # Four neighbouring columns are in one block.
        state, r, c = block_at(place, extras)
        four = ALL if state == FULL else 0
        if state >= PARTIAL:
            for u in range(FOUR):
                if extras.patterns[uint64(state - PARTIAL), uint64(r), uint64(c + u)]:
                    four |= 1 << u
        return four

    @device_function
    def four_in_mod(place, extras):
        four = 0
        for u in range(FOUR):
            if in_mod(place_of(place, place.row, place.col + u), extras):
                four |= 1 << u
        return four

    @device_function
    def draw(thread, tile, extras):
        place, whole, bits = tile
        last_row, last_col = place.seq_q - 1, (place.seq_k - 1) // FOUR * FOUR
        for n in range(thread, count, threads):
            # Within the patterns; what is beyond the end is hidden by the bounds.
            row = min(place.row + n // groups, last_row)
            at = place_of(place, row, min(place.col + n % groups * FOUR, last_col))
            four = four_in_blocks(at, extras) if has_blocks and not whole else ALL
            if has_mod:
                four &= four_in_mod(at, extras)
            bits[offset + n] = four

    @device_function
    def listed(bits, r, c):
        if not has_lists:
            return True
        byte = bits[offset + r * groups + c // FOUR]
        return bool((byte >> (c % FOUR)) & 1)

    return count, draw, listed
