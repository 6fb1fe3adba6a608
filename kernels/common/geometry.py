"""Tile arithmetic: the number and bounds of tiles, and the key tiles that a query tile visits.

:func:`make_geometry` builds the functions for one compiler: the identity for plain Python, ``njit`` for the
CPU, and ``cuda.jit(device=True, inline="always")`` for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Geometry(NamedTuple):
    """Functions that find the tiles within the bounds of a mask; ``make_geometry`` returns them.

    All functions take ints, and all but two return ints.  The functions that find visited tiles use the
    neutral terms line and place.  Usually lines are query rows and places are key columns, and the places
    ``i + lower`` to ``i + upper`` are visible to line ``i``.  To find the query tiles that visit a key
    tile, the roles are swapped and the bounds are ``-upper`` and ``-lower``.
    """

    ceil_div: Callable[[int, int], int]
    first_tile: Callable[[int, int, int, int], int]
    tiles_stop: Callable[[int, int, int, int], int]
    first_full_tile: Callable[[int, int, int], int]
    full_tiles_stop: Callable[[int, int, int, int], int]
    is_tile_seen: Callable[[int, int, int, int, int, int], bool]
    is_full_tile: Callable[[int, int, int, int, int, int, int, int], bool]


def make_geometry(compile_: Callable[[Any], Any]) -> Geometry:
    """Return the tile arithmetic for one compiler, which turns a plain function into one of its own."""

    @compile_
    def ceil_div(total, size):
        return (total + size - 1) // size

    @compile_
    def first_tile(start, block, total, lower):
        """Return the first tile, of ``block`` places of ``total``, that lines from ``start`` on visit."""
        place = max(start + lower, 0)
        return (place if place < total else total + block - 1) // block

    @compile_
    def tiles_stop(stop, block, total, upper):
        """Return one past the last tile that lines up to ``stop - 1`` visit; 0 if all places are masked."""
        last = min(stop - 1 + upper, total - 1)
        return last // block + 1 if last >= 0 else 0

    @compile_
    def first_full_tile(stop, block, lower):
        """Return the first tile whose beginning is visible to every line up to ``stop - 1``."""
        return (max(stop - 1 + lower, 0) + block - 1) // block

    @compile_
    def full_tiles_stop(start, block, total, upper):
        """Return one past the last whole tile whose end is visible to every line from ``start`` on."""
        return max(min(start + upper + 1, total), 0) // block

    @compile_
    def is_tile_seen(start, stop, place, block, lower, upper):
        """Tell whether any of the tile at ``place`` is visible to lines ``start`` to ``stop - 1``."""
        return start < stop and start + lower < place + block and place <= stop - 1 + upper

    @compile_
    def is_full_tile(row, block_q, seq_q, col, block_k, seq_k, lower, upper):
        """Tell whether a tile lies within the sequences, and none of its scores is masked."""
        return (
            row + block_q <= seq_q
            and col + block_k <= seq_k
            and row + block_q - 1 + lower <= col
            and col + block_k - 1 <= row + upper
        )

    return Geometry(
        ceil_div,
        first_tile,
        tiles_stop,
        first_full_tile,
        full_tiles_stop,
        is_tile_seen,
        is_full_tile,
    )


def same(function: Any) -> Any:
    """Return ``function`` itself: the compiler for plain Python."""
    return function


#: The functions of :func:`make_geometry` for plain Python.
PLAIN = make_geometry(same)
ceil_div = PLAIN.ceil_div
