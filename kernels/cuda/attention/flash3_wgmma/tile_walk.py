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

from kernels.cuda.attention.flash3_wgmma.layout import PADDING, item_of
from kernels.cuda.attention.options.visits import TileLoop, make_tile_loop
from kernels.cuda.device.one_source import first_full_tile, first_tile, full_tiles_stop, tiles_stop
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.types import int32, uint64
from kernels.scores.program import Features


class WorkItem(NamedTuple):
    """A query tile or a key tile, and the range of tiles that it visits; all numbers are int32."""

    #: First visited entry, a tile or an index in the block mask's list; -1 if there are no more items.
    first: Any
    stop: Any  # One past the last visited entry; also -1 then
    full: Any  # By rows, the first tile that is fully within the bounds
    full_stop: Any  # One past the last of these tiles
    line: Any  # Index of (batch, head)
    b: Any  # Batch index
    h: Any  # Head index
    flat: Any  # Flat index of (batch, head), as in ``Extras``
    place: Any  # First row or first key of the item's tile, counted from the start of its sequence
    first_q: Any  # First row of the sequence in q
    rows: Any  # Rows of the sequence
    first_k: Any  # First row of the sequence in k
    cols: Any  # Keys of the sequence


class Walk(NamedTuple):
    """Functions that find the work items and tiles of flash3_wgmma; ``make_walk`` returns them.

    All numbers are int32.
    """

    #: ``(number, y, rows, cols, extras)``: for a tile of (batch, head) y, where q has ``rows`` and k has
    #: ``cols``: the flat index of (batch, head), the first place of the tile relative to its sequence, the
    #: first row of the sequence in q, its rows, its first column in k, its columns.
    place: Callable[..., Any]
    item: Callable[..., WorkItem]  # ``(number, work)``: the :class:`WorkItem` of a number
    tile_of: Callable[..., Any]  # ``(entry, extras)``: the number of the visited tile
    #: ``(entry, extras)``: the number of the tile's words in the block mask; 0 if the block mask masks
    #: nothing in it.
    pattern_of: Callable[..., Any]


@cache
def make_row_base(is_packed: bool) -> Callable[..., Any]:
    """Return ``row_base(flat, y, first_q, extras)``: the offset of a sequence's rows in shifts and delta.

    Both are laid out tile by tile, so that no tile has rows of two sequences.
    """

    @device_function
    def row_base(flat, y, first_q, extras):
        if not is_packed:
            return int32(0)
        return int32((first_q // PADDING + (flat - y) // extras.heads) * PADDING)

    return row_base


@cache
def make_walk(features: Features, block_q: int, block_k: int = 0, by_keys: bool = False) -> Walk:
    """Return the functions of a kernel.

    Only ``place`` can do without ``block_k``.
    """
    block = block_k if by_keys else block_q
    loop = make_tile_loop(features, block_q, block_k, by_keys)
    packed, tile_of, entries = loop.place, _make_tile_of(loop), _make_entries(features, loop)
    is_packed, has_patterns = features.packed, features.has_patterns

    @device_function
    def pattern_of(entry, extras):
        return int32(extras.tile_patterns[uint64(entry)]) if has_patterns else int32(0)

    @device_function
    def place(number, y, rows, cols, extras):
        if not is_packed:
            return y, int32(number * block), int32(0), rows, int32(0), cols
        flat, start, first_q, rows, first_k, cols = packed(number, y, rows, cols, extras)
        return int32(flat), int32(start), int32(first_q), int32(rows), int32(first_k), int32(cols)

    @device_function
    def item(number, work):
        extras, shape = work.extras, work.shape
        i, line = item_of(number, work.schedule)
        if by_keys:  # under a causal mask, the first key tiles are visible to the most rows
            i = int32(work.schedule.tiles - 1 - i)
        flat, start, first_q, rows, first_k, cols = place(i, line, shape.rows, shape.cols, extras)
        full, full_stop = int32(0), int32(0)
        if by_keys:
            own, first = cols, int32(first_tile(start, block_q, rows, -extras.upper))
            stop = int32(tiles_stop(min(start + block_k, cols), block_q, rows, -extras.lower))
        else:
            own, row_stop = rows, min(start + block_q, rows)
            first = int32(first_tile(start, block_k, cols, extras.lower))
            stop = int32(tiles_stop(row_stop, block_k, cols, extras.upper))
            full = int32(first_full_tile(row_stop, block_k, extras.lower))
            full_stop = int32(full_tiles_stop(start, block_k, cols, extras.upper))
        first, stop = entries(flat, start, own, first, stop, extras)
        return WorkItem(
            first, stop, full, full_stop, line, int32(line // shape.heads), int32(line % shape.heads),
            flat, start, first_q, rows, first_k, cols,
        )  # fmt: skip

    return Walk(place, item, tile_of, pattern_of)


def _make_tile_of(loop: TileLoop) -> Callable[..., Any]:
    """Return ``Walk.tile_of``."""
    listed_tile = loop.tile_of

    @device_function
    def tile_of(entry, extras):
        return int32(listed_tile(entry, extras))

    return tile_of


def _make_entries(features: Features, loop: TileLoop) -> Callable[..., Any]:
    """Return ``entries(flat, start, size, first, stop, extras)``: the first and one past the last visited.

    The tiles from ``first`` up to ``stop`` are within the bounds.
    """
    listed, tile_of, is_listed = loop.entries, _make_tile_of(loop), features.block_mask

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
    def entries(flat, start, size, first, stop, extras):
        if not is_listed:
            return first, stop
        begin, end = listed(flat, start, size, first, stop, extras)
        begin, end = int32(begin), int32(end)
        if first > 0:
            begin = first_from(begin, end, first, extras)
        if begin < end and tile_of(int32(end - 1), extras) >= stop:
            end = first_from(begin, end, stop, extras)
        return begin, end

    return entries
