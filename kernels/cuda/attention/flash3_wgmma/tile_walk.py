"""The tiles that Hopper's kernels visit: producer and consumers must visit the same ones.

Causal, window, block-sparse and packed calls run the same loop over different tiles; see ``visits``.  The
entries of a list within the bounds are contiguous, because the tiles of a line are in ascending order.
Their number is known in advance, so that a consumer can issue the next product before it waits for the last
one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from numba import int32, uint64

from kernels.cuda.attention.options.visits import make_visits
from kernels.cuda.runtime.kernel import device_function
from kernels.scores.program import Features


class Walk(NamedTuple):
    """The functions that :func:`make_walk` returns; all numbers are int32.

    Attributes:
        place: ``(number, y, rows, cols, extras)``: for a tile of (batch, head) y, where q has ``rows`` and
            k has ``cols``: the flat index of (batch, head), the first place of the tile relative to its
            sequence, the first row of the sequence in q, its rows, its first column in k, its columns.
        entries: ``(flat, start, size, first, stop, extras)``: the first and one past the last visited
            entry, if the tiles from ``first`` up to ``stop`` are within the bounds.
        tile_of: ``(entry, extras)``: the number of the visited tile.
        pattern_of: ``(entry, extras)``: the number of the tile's words in the block mask; 0 if the block
            mask masks nothing in it.
    """

    place: Callable[..., Any]
    entries: Callable[..., Any]
    tile_of: Callable[..., Any]
    pattern_of: Callable[..., Any]


@cache
def make_walk(features: Features, block: int, by_keys: bool = False) -> Walk:
    """Return the functions for tiles of ``block`` query rows, or of keys.

    Args:
        features: Options of the kernel.
        block: Rows or columns of a tile on the kernel's own side.
        by_keys: Whether the kernel's own side is the keys.
    """
    visits = make_visits(features, block, by_keys)
    packed, listed, listed_tile = visits.place, visits.entries, visits.tile_of

    has_patterns = features.has_patterns

    @device_function
    def pattern_of(entry, extras):
        return int32(extras.tile_patterns[uint64(entry)]) if has_patterns else int32(0)

    @device_function
    def place(number, y, rows, cols, extras):
        return y, int32(number * block), int32(0), rows, int32(0), cols

    @device_function
    def packed_place(number, y, rows, cols, extras):
        flat, start, first_q, rows, first_k, cols = packed(number, y, rows, cols, extras)
        return int32(flat), int32(start), int32(first_q), int32(rows), int32(first_k), int32(cols)

    @device_function
    def tile_of(entry, extras):
        return int32(listed_tile(entry, extras))

    @device_function
    def first_from(begin, end, tile, extras):
        """Return the first entry whose tile is not before ``tile``."""
        while begin < end:
            middle = int32((begin + end) // 2)
            if tile_of(middle, extras) < tile:
                begin = int32(middle + 1)
            else:
                end = middle
        return begin

    @device_function
    def all_entries(flat, start, size, first, stop, extras):
        return first, stop

    @device_function
    def listed_entries(flat, start, size, first, stop, extras):
        begin, end = listed(flat, start, size, first, stop, extras)
        begin, end = int32(begin), int32(end)
        if first > 0:
            begin = first_from(begin, end, first, extras)
        if begin < end and tile_of(int32(end - 1), extras) >= stop:
            end = first_from(begin, end, stop, extras)
        return begin, end

    return Walk(
        packed_place if features.packed else place,
        listed_entries if features.block_mask else all_entries,
        tile_of,
        pattern_of,
    )
