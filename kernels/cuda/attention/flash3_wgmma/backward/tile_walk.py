"""The tiles that Hopper's backward kernels visit, and the places of rows of shifts and delta."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from numba import int32

from kernels.cuda.attention.flash3_wgmma.backward.layout import PADDING, key_item_of
from kernels.cuda.attention.flash3_wgmma.layout import item_of
from kernels.cuda.attention.flash3_wgmma.tile_walk import make_walk
from kernels.cuda.device.one_source import first_tile, tiles_stop
from kernels.cuda.runtime.kernel import device_function
from kernels.scores.program import Features


@cache
def make_row_base(is_packed: bool) -> Callable[..., Any]:
    """Return ``row_base(flat, y, first_q, extras)``: the offset of a sequence's rows in shifts and delta.

    Both are laid out tile by tile, so that no tile has rows of two sequences.

    Args:
        is_packed: Whether sequences are packed.
    """

    @device_function
    def packed_base(flat, y, first_q, extras):
        return int32((first_q // PADDING + (flat - y) // extras.heads) * PADDING)

    @device_function
    def no_base(flat, y, first_q, extras):
        return int32(0)

    return packed_base if is_packed else no_base


class ItemTiles(NamedTuple):
    """The tiles that an item visits; all numbers are int32.

    Attributes:
        y: Index of (batch, head).
        b: Batch index.
        h: Head index.
        flat: Flat index of (batch, head).
        place: First row or first column of the item's tile, counted from the start of its sequence.
        first_q: First row of the sequence in q.
        rows: Rows of the sequence.
        first_k: First row of the sequence in k.
        cols: Columns of the sequence.
        first: First visited entry.
        stop: One past the last visited entry.
    """

    y: Any
    b: Any
    h: Any
    flat: Any
    place: Any
    first_q: Any
    rows: Any
    first_k: Any
    cols: Any
    first: Any
    stop: Any


class ItemVisits(NamedTuple):
    """The functions with which producer and consumers visit the same tiles.

    Attributes:
        of_item: ``(item, schedule, shape, extras)``: the :class:`ItemTiles` of an item.
        tile_of: ``(entry, extras)``: the number of the visited tile.
        pattern_of: See ``tile_walk.Walk``.
    """

    of_item: Callable[..., Any]
    tile_of: Callable[..., Any]
    pattern_of: Callable[..., Any]


@cache
def make_visits_of(features: Features, block_q: int, block_k: int, by_keys: bool) -> ItemVisits:
    """Return the functions of a kernel.

    Args:
        features: Options of the kernel.
        block_q: Rows of a tile.
        block_k: Keys of a tile.
        by_keys: Whether its items are tiles of keys.
    """
    walk = make_walk(features, block_k if by_keys else block_q, by_keys)
    place_of, entries_of = walk.place, walk.entries

    @device_function
    def of_keys(item, schedule, shape, extras):
        j, y = key_item_of(item, schedule)
        flat, col, first_q, rows, first_k, cols = place_of(j, y, shape.rows, shape.cols, extras)
        first = int32(first_tile(col, block_q, rows, -extras.upper))
        stop = int32(tiles_stop(min(col + block_k, cols), block_q, rows, -extras.lower))
        first, stop = entries_of(flat, col, cols, first, stop, extras)
        b, h = int32(y // shape.heads), int32(y % shape.heads)
        return ItemTiles(y, b, h, flat, col, first_q, rows, first_k, cols, first, stop)

    @device_function
    def of_rows(item, schedule, shape, extras):
        i, y = item_of(item, schedule)
        flat, row, first_q, rows, first_k, cols = place_of(i, y, shape.rows, shape.cols, extras)
        first = int32(first_tile(row, block_k, cols, extras.lower))
        stop = int32(tiles_stop(min(row + block_q, rows), block_k, cols, extras.upper))
        first, stop = entries_of(flat, row, rows, first, stop, extras)
        b, h = int32(y // shape.heads), int32(y % shape.heads)
        return ItemTiles(y, b, h, flat, row, first_q, rows, first_k, cols, first, stop)

    return ItemVisits(of_keys if by_keys else of_rows, walk.tile_of, walk.pattern_of)
