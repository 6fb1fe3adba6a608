"""The tiles of a block of threads: its own tile, and the tiles of the other side that it visits.

Causal, window, block-sparse and packed calls run the same loop over different tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from numba import int64, uint64

from kernels.common.geometry import PLAIN
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.device.one_source import (
    ceil_div,
    first_full_tile,
    first_tile,
    full_tiles_stop,
    is_full_tile,
    tiles_stop,
)
from kernels.cuda.runtime.kernel import device_function
from kernels.scores.program import Features


class Visits(NamedTuple):
    """The functions that :func:`make_visits` returns.

    Attributes:
        place: ``(x, y, rows, cols, extras)``: the tile of block (x, y) of the grid, where q has ``rows``
            and k has ``cols``: the flat index of (batch, head), the first place of the tile relative to
            its sequence, the first row of the sequence in q, its rows, its first column in k, and its
            columns.
        entries: ``(flat, start, size, first, stop, extras)``: the first and one past the last entry that
            the tile at ``start`` visits, if the lists are for ``size`` places and the tiles from
            ``first`` up to ``stop`` are within the bounds.
        tile_of: ``(entry, extras)``: the number of the visited tile.
        is_whole: ``(entry, extras)``: whether the block mask masks none of its elements.
        is_within: ``(tile, first, stop)``: whether the tile of an entry is within the bounds.
    """

    place: Callable[..., Any]
    entries: Callable[..., Any]
    tile_of: Callable[..., Any]
    is_whole: Callable[..., Any]
    is_within: Callable[..., Any]


@cache
def make_visits(features: Features, block: int, by_keys: bool = False) -> Visits:
    """Return the functions for tiles of ``block`` query rows, or of keys.

    Args:
        features: Options of the kernel.
        block: Rows or columns of a tile on the kernel's own side.
        by_keys: Whether the kernel's own side is the keys.
    """
    is_packed, has_list = features.packed, features.block_mask

    @device_function
    def place(x, y, rows, cols, extras):
        if is_packed:  # the columns of sequences.Tile
            tile, tiles = uint64(x), extras.tiles
            flat, start = y + int(tiles[tile, 0]) * extras.heads, tiles[tile, 5]
            return flat, start, tiles[tile, 1], tiles[tile, 2], tiles[tile, 3], tiles[tile, 4]
        # The longest tile starts first: under a causal mask the last one of rows, the first one of keys.
        number = x if by_keys else ceil_div(rows, block) - 1 - x
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

    @device_function
    def is_whole(entry, extras):
        return bool(extras.tile_full[uint64(entry)]) if has_list else True

    @device_function
    def is_within(tile, first, stop):
        return first <= tile < stop if has_list else True

    return Visits(place, entries, tile_of, is_whole, is_within)


@cache  # beyond module 5
def make_next_entry(visits: Visits) -> Callable[..., Any]:  # beyond module 5
    """Return ``next_entry(entry, entries_stop, first, stop, extras)``: the next entry within the bounds."""
    tile_of, is_within = visits.tile_of, visits.is_within

    @device_function
    def next_entry(entry, entries_stop, first, stop, extras):
        while entry < entries_stop and not is_within(tile_of(entry, extras), first, stop):
            entry += 1
        return entry

    return next_entry


@cache
def make_row_bounds(block_q: int, block_k: int) -> Callable[..., tuple[int, int, int, int]]:
    """Return ``bounds(row, seq_q, seq_k, extras)``, for the query tile at ``row``.

    It returns the first key tile with a visible key and one past the last, then the same for the key tiles
    in which the bounds mask nothing.
    """

    @device_function
    def bounds(row, seq_q, seq_k, extras):
        row_stop = min(row + block_q, seq_q)
        return (
            first_tile(row, block_k, seq_k, extras.lower),
            tiles_stop(row_stop, block_k, seq_k, extras.upper),
            first_full_tile(row_stop, block_k, extras.lower),
            full_tiles_stop(row, block_k, seq_k, extras.upper),
        )

    return bounds


@cache
def make_key_bounds(
    block_q: int, block_k: int
) -> tuple[Callable[..., tuple[int, int]], Callable[..., bool]]:
    """Return two functions of the bounds for tiles of keys: ``bounds`` and ``is_inside``.

    ``bounds(col, seq_q, seq_k, extras)``: the first query tile to which a key of the tile at ``col`` is
    visible, and one past the last.

    ``is_inside(row, col, seq_q, seq_k, extras)``: whether the bounds mask none of a tile's elements.
    """

    @device_function
    def bounds(col, seq_q, seq_k, extras):
        return (
            first_tile(col, block_q, seq_q, -extras.upper),
            tiles_stop(min(col + block_k, seq_k), block_q, seq_q, -extras.lower),
        )

    @device_function
    def is_inside(row, col, seq_q, seq_k, extras):
        return is_full_tile(row, block_q, seq_q, col, block_k, seq_k, extras.lower, extras.upper)

    return bounds, is_inside


def tiles_of(seq: int, block: int, extras: Extras) -> int:
    """Return the number of tiles of ``block`` places of a head, or of all packed sequences."""
    return PLAIN.ceil_div(seq, block) if isinstance(extras.tiles, int) else extras.tiles.shape[0]


def grid_of(array: Any, seq: int, block: int, extras: Extras) -> tuple[int, int]:
    """Return the grid: the number of tiles of ``seq`` places or of packed sequences, and batch · heads.

    Args:
        array: (batch, heads, …).
        seq: Query rows, or keys.
        block: Rows or columns of a tile.
        extras: Options of the kernel.
    """
    return tiles_of(seq, block, extras), array.shape[0] * array.shape[1]
