"""Tiles: how many, where each begins and ends, and which key tiles a query tile visits.

Every function is made by :func:`make_geometry`, which is handed the compiler: the identity for plain
Python, ``njit`` for the CPU, ``cuda.jit(device=True, inline="always")`` for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Geometry(NamedTuple):
    """The functions that :func:`make_geometry` returns; all take and return ints."""

    ceil_div: Callable[[int, int], int]
    tile_stop: Callable[[int, int, int], int]
    visited_key_tiles: Callable[[int, int, int, int, int], int]
    full_key_tiles: Callable[[int, int, int, int], int]
    first_query_tile: Callable[[int, int, int, int], int]
    zigzag: Callable[[int, int], int]


def make_geometry(compile_: Callable[[Any], Any]) -> Geometry:
    """Return the tile arithmetic for one compiler.

    Args:
        compile_: Turns a plain function into one that the caller's compiler can call.
    """

    @compile_
    def ceil_div(total, size):
        return (total + size - 1) // size

    @compile_
    def tile_stop(tile, block, total):
        """One past the last row (or column) of a tile; the last tile may be short."""
        return min((tile + 1) * block, total)

    @compile_
    def visited_key_tiles(row_stop, seq_k, block_k, num_k_tiles, diagonal):
        """How many leading key tiles a query tile visits: those its last row sees a column of."""
        last_col = min(row_stop - 1 + diagonal, seq_k - 1)
        if last_col < 0:
            return 0
        return min(last_col // block_k + 1, num_k_tiles)

    @compile_
    def full_key_tiles(row_start, seq_k, block_k, diagonal):
        """How many leading key tiles need no element test: whole ones that each row sees all of."""
        visible_cols = min(row_start + diagonal + 1, seq_k)
        return max(visible_cols, 0) // block_k

    @compile_
    def first_query_tile(col_start, block_q, num_q_tiles, diagonal):
        """The first query tile that visits a key tile; ``num_q_tiles`` if none does."""
        first_row = max(col_start - diagonal, 0)
        return min(first_row // block_q, num_q_tiles)

    @compile_
    def zigzag(position, count):
        """Order tiles 0, count-1, 1, count-2, …: any run of neighbours holds long and short ones."""
        half = position // 2
        return half if position % 2 == 0 else count - 1 - half

    return Geometry(
        ceil_div, tile_stop, visited_key_tiles, full_key_tiles, first_query_tile, zigzag
    )


def same(function: Any) -> Any:
    """Return ``function`` itself: the compiler of plain Python."""
    return function


#: The same functions for plain Python.
PLAIN = make_geometry(same)
ceil_div = PLAIN.ceil_div
