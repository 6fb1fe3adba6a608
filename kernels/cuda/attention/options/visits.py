"""The tiles of a block of threads: its own tile, and the tiles of the other side that it visits.

Causal, window, block-sparse and packed calls run the same loop over different tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd  # beyond module 5
from typing import Any, NamedTuple

from kernels.common.geometry import PLAIN, same
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.attention.options.tile_scores import TilePlace, moved
from kernels.cuda.device.one_source import (
    batch_and_head,
    ceil_div,
    first_full_tile,
    first_tile,
    full_tiles_stop,
    is_full_tile,
    numbers_of_mods,
    tiles_stop,
)
from kernels.cuda.runtime.kernel import device_function
from kernels.problem.cached_keys import PAGE_UNIT  # beyond module 5
from kernels.runtime.types import int32, int64, uint32, uint64
from kernels.scores.program import Features


class HeadRows(NamedTuple):
    """Rows of head ``h`` in batch ``b`` of an array, from ``first`` up to, but excluding, ``stop``."""

    b: Any
    h: Any
    first: Any
    stop: Any


@device_function
def rows_from(rows, count):
    """Return a ``HeadRows`` without its first rows."""
    return HeadRows(rows.b, rows.h, rows.first + count, rows.stop)


class BlockItem(NamedTuple):
    """The work of a thread block: the flat index of (batch, head), a tile, and the rows of q and k.

    ``start`` is a ``TilePlace``, with 0 on the other side; ``q`` and ``k`` are the :class:`HeadRows` of the
    sequences.
    """

    flat: Any
    start: Any
    q: Any
    k: Any


class Visit(NamedTuple):
    """A block's current entry of the tile list, the end of the block's entries, and the block's bounds.

    ``bounds`` are the first tile that is not fully masked and one past the last, and the same for the tiles
    that the bounds do not mask, which only blocks of query rows know in advance.
    """

    entry: Any
    stop: Any
    bounds: Any


class VisitedTile(NamedTuple):
    """The tile of scores that a block works on.

    Attributes:
        place: The ``TilePlace`` of its first element.
        whole: Whether bounds and lists mask nothing in it.
        bits: The bytes of ``tile_bits``.
    """

    place: Any
    whole: Any
    bits: Any


class TileLoop(NamedTuple):
    """The functions of a block's loop over the tiles that it visits; ``make_tile_loop`` returns them.

    Attributes:
        item_of: ``(x, y, q, k, extras)``: the :class:`BlockItem` of block (x, y) of the grid.
        bounds_of: ``(item, extras)``: the bounds of :class:`Visit`.
        begin: ``(item, bounds, extras)``: the first :class:`Visit`.
        advance: ``(visit, steps, extras)``: the visit ``steps`` entries later, or the next one within the
            bounds.
        tile_at: ``(item, visit, bits, extras)``: the :class:`VisitedTile`.
        place: ``(x, y, rows, cols, extras)``: the tile of block (x, y) of the grid, where q has ``rows``
            and k has ``cols``: the flat index of (batch, head), the first place of the tile relative to
            its sequence, the first row of the sequence in q, its rows, its first column in k, and its
            columns.
        entries: ``(flat, start, size, first, stop, extras)``: the first and one past the last entry that
            the tile at ``start`` visits, if the lists are for ``size`` places and the tiles from
            ``first`` up to ``stop`` are within the bounds.
        tile_of: ``(entry, extras)``: the number of the visited tile.
        unit: The number of keys that lie together in memory, a divisor of block_k.
        keys_at: ``(item, col, extras)``: the :class:`HeadRows` of k from a column on, of ``unit`` keys.
    """

    item_of: Callable[..., BlockItem]
    bounds_of: Callable[..., Any]
    begin: Callable[..., Visit]
    advance: Callable[..., Visit]
    tile_at: Callable[..., VisitedTile]
    place: Callable[..., Any]
    entries: Callable[..., Any]
    tile_of: Callable[..., Any]
    unit: int
    keys_at: Callable[..., HeadRows]


def _make_entries(features: Features, block: int, by_keys: bool) -> tuple[Callable[..., Any], ...]:
    """Return ``place``, ``entries`` and ``tile_of`` of :class:`TileLoop`, for tiles of ``block`` places."""
    is_packed, has_list = features.packed, features.block_mask
    is_cached = features.cache is not None

    @device_function
    def place(x, y, rows, cols, extras):
        if is_packed:  # the columns of sequences.Tile
            tile, tiles = uint64(x), extras.tiles
            flat, start = y + int(tiles[tile, 0]) * extras.heads, tiles[tile, 5]
            return flat, start, tiles[tile, 1], tiles[tile, 2], tiles[tile, 3], tiles[tile, 4]
        # The longest tile starts first: under a causal mask the last one of rows, the first one of keys.
        number = x if by_keys else ceil_div(rows, block) - 1 - x
        if is_cached:  # beyond module 5
            # The rows of q are the last ones of a sequence.
            cached = extras.tiles
            length = int64(cached.lengths[batch_and_head(y, extras.heads)[0]] + cached.added)
            before = length - rows
            return y, before + number * block, -before, length, 0, length
        return y, number * block, 0, rows, 0, cols

    @device_function
    def entries(flat, start, size, first, stop, extras):
        if not has_list:
            return first, stop
        # TASK 5.9: The line of (head, tile) in tile_ptr: where its entries begin and end.
        head = flat % extras.states.shape[0]
        line = uint64(head * ceil_div(size, block) + start // block)
        return int64(extras.tile_ptr[line]), int64(extras.tile_ptr[line + uint64(1)])
        # END TASK 5.9

    @device_function
    def tile_of(entry, extras):
        if not has_list:
            return entry
        # TASK 5.9: The number of the tile of an entry, from tile_ids.
        return int64(extras.tile_ids[uint64(entry)])
        # END TASK 5.9

    return place, entries, tile_of


@cache
def make_tile_loop(
    features: Features, block_q: int, block_k: int, by_keys: bool = False
) -> TileLoop:
    """Return the functions for blocks of query rows, which visit tiles of keys, or for blocks of keys."""
    place, entries, tile_of = _make_entries(features, block_k if by_keys else block_q, by_keys)
    has_list, is_cached = features.block_mask, features.cache is not None
    is_paged = features.is_paged
    # With a list the loop keeps its bounds too, for which registers are short.
    number = int32 if has_list else device_function(same)

    @device_function
    def item_of(x, y, q, k, extras):
        b, h = batch_and_head(y, q.shape[1])
        flat, first, first_q, seq_q, first_k, seq_k = place(x, y, q.shape[2], k.shape[2], extras)
        batch, head = numbers_of_mods(flat, extras)
        row, col = (0, first) if by_keys else (first, 0)
        start = TilePlace(b, h, batch, head, row, col, seq_q, seq_k)
        q_rows = HeadRows(b, h, first_q, first_q + seq_q)
        if is_cached:  # beyond module 5
            # Adjacent query heads share a key head.
            h, _ = batch_and_head(h, q.shape[1] // k.shape[1])
        return BlockItem(flat, start, q_rows, HeadRows(b, h, first_k, first_k + seq_k))

    @device_function
    def bounds_by_rows(item, extras):
        row, seq_q, seq_k = item.start.row, item.start.seq_q, item.start.seq_k
        row_stop = min(row + block_q, seq_q)
        return (
            number(first_tile(row, block_k, seq_k, extras.lower)),
            number(tiles_stop(row_stop, block_k, seq_k, extras.upper)),
            number(first_full_tile(row_stop, block_k, extras.lower)),
            number(full_tiles_stop(row, block_k, seq_k, extras.upper)),
        )

    @device_function
    def bounds_by_keys(item, extras):
        col, seq_q, seq_k = item.start.col, item.start.seq_q, item.start.seq_k
        return (
            number(first_tile(col, block_q, seq_q, -extras.upper)),
            number(tiles_stop(min(col + block_k, seq_k), block_q, seq_q, -extras.lower)),
        )

    @device_function
    def advance(visit, steps, extras):
        entry, stop, bounds = visit
        entry = number(entry + steps)
        if has_list:
            while entry < stop and not bounds[0] <= tile_of(entry, extras) < bounds[1]:
                entry = number(entry + 1)
        return Visit(entry, stop, bounds)

    @device_function
    def begin(item, bounds, extras):
        _, _, _, _, row, col, seq_q, seq_k = item.start
        start, size = (col, seq_k) if by_keys else (row, seq_q)
        entry, stop = entries(item.flat, start, size, bounds[0], bounds[1], extras)
        return advance(Visit(number(entry), number(stop), bounds), 0, extras)

    @device_function
    def tile_by_rows(item, visit, bits, extras):
        tile = tile_of(visit.entry, extras)
        whole = visit.bounds[2] <= tile < visit.bounds[3]
        if has_list:
            whole = whole and bool(extras.tile_full[uint64(visit.entry)])
        return VisitedTile(moved(item.start, 0, tile * block_k), whole, bits)

    @device_function
    def tile_by_keys(item, visit, bits, extras):
        row = tile_of(visit.entry, extras) * block_q
        _, _, _, _, _, col, seq_q, seq_k = item.start
        lower, upper = extras.lower, extras.upper
        whole = is_full_tile(row, block_q, seq_q, col, block_k, seq_k, lower, upper)
        if has_list:
            whole = whole and bool(extras.tile_full[uint64(visit.entry)])
        return VisitedTile(moved(item.start, row, 0), whole, bits)

    @device_function
    def keys_at(item, col, extras):
        if is_paged:  # beyond module 5
            (b, h, _, stop), (_, _, table, page) = item.k, extras.tiles
            place, row = uint32(uint32(col) // uint32(page)), int64(uint32(col) % uint32(page))
            # Entries beyond the length may be anything.
            number = int64(table[b, uint64(place)]) if col < stop else int64(0)
            return HeadRows(number, h, row, row + stop - col)
        return rows_from(item.k, col)

    bounds_of, tile_at = (
        (bounds_by_keys, tile_by_keys) if by_keys else (bounds_by_rows, tile_by_rows)
    )
    unit = block_k
    if is_paged:  # beyond module 5
        unit = gcd(PAGE_UNIT, block_k)
    places = place, entries, tile_of, unit, keys_at
    return TileLoop(item_of, bounds_of, begin, advance, tile_at, *places)


def make_load_units(
    loop: TileLoop, make_load: Callable[[int], Callable[..., None]], first: int, stop: int
) -> Callable[..., None]:
    """Return ``load(thread, k, v, item, col, memory, stage, extras)``: load the tile of keys at a column.

    ``make_load(n)`` returns ``(thread, k, v, rows, memory, stage)``, which loads the unit of ``HeadRows``
    that begins ``n`` rows after the first one of the tile, for ``first <= n < stop``.
    """
    if stop - first > loop.unit:  # halves, so that inlining copies each unit once
        middle = first + (stop - first) // loop.unit // 2 * loop.unit
        before, after = (
            make_load_units(loop, make_load, *ends) for ends in ((first, middle), (middle, stop))
        )

        @device_function
        def both(thread, k, v, item, col, memory, stage, extras):
            before(thread, k, v, item, col, memory, stage, extras)
            after(thread, k, v, item, col, memory, stage, extras)

        return both
    load_unit, keys_at = make_load(first), loop.keys_at

    @device_function
    def load(thread, k, v, item, col, memory, stage, extras):
        load_unit(thread, k, v, keys_at(item, col + first, extras), memory, stage)

    return load


def tiles_of(seq: int, block: int, extras: Extras) -> int:
    """Return the number of tiles of ``block`` places of a head, or of all packed sequences."""
    tiles = getattr(extras.tiles, "shape", None)
    return PLAIN.ceil_div(seq, block) if tiles is None else tiles[0]


def grid_of(array: Any, seq: int, block: int, extras: Extras) -> tuple[int, int]:
    """Return the grid: the number of tiles of ``seq`` places or of packed sequences, and batch · heads."""
    return tiles_of(seq, block, extras), array.shape[0] * array.shape[1]
