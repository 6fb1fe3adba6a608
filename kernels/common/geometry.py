"""Tiles: how many, where each begins and ends, and which key tiles a query tile visits.

Every function is made by :func:`make_geometry`, which is handed the compiler: the identity for plain
Python, ``njit`` for the CPU, ``cuda.jit(device=True, inline="always")`` for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Geometry(NamedTuple):
    """The functions that :func:`make_geometry` returns; all take ints and, but the last two, return them.

    The five about visits speak of lines of which line ``i`` sees the places from ``i + lower`` to
    ``i + upper``: rows that see columns.  Columns are seen by the rows of the opposite bounds, so for
    the query tiles that see a key tile they are called with ``-upper`` and ``-lower``.
    """

    ceil_div: Callable[[int, int], int]
    first_tile: Callable[[int, int, int, int], int]
    tiles_stop: Callable[[int, int, int, int], int]
    first_full_tile: Callable[[int, int, int], int]
    full_tiles_stop: Callable[[int, int, int, int], int]
    is_tile_seen: Callable[[int, int, int, int, int, int], bool]
    is_full_tile: Callable[[int, int, int, int, int, int, int, int], bool]


def make_geometry(compile_: Callable[[Any], Any]) -> Geometry:
    """Return the tile arithmetic for one compiler.

    Args:
        compile_: Turns a plain function into one that the caller's compiler can call.
    """

    @compile_
    def ceil_div(total, size):
        return (total + size - 1) // size

    @compile_
    def first_tile(start, block, total, lower):
        """The first tile, of ``block`` places of ``total``, that lines from ``start`` on visit."""
        place = max(start + lower, 0)
        return (place if place < total else total + block - 1) // block

    @compile_
    def tiles_stop(stop, block, total, upper):
        """One past the last tile that lines up to ``stop - 1`` visit; 0 if they see no place."""
        last = min(stop - 1 + upper, total - 1)
        return last // block + 1 if last >= 0 else 0

    @compile_
    def first_full_tile(stop, block, lower):
        """The first tile of which every line up to ``stop - 1`` sees the beginning."""
        return (max(stop - 1 + lower, 0) + block - 1) // block

    @compile_
    def full_tiles_stop(start, block, total, upper):
        """One past the last whole tile of which every line from ``start`` on sees the end."""
        return max(min(start + upper + 1, total), 0) // block

    @compile_
    def is_tile_seen(start, stop, place, block, lower, upper):
        """Whether lines from ``start`` to ``stop - 1`` see any of the tile that begins at ``place``."""
        return start < stop and start + lower < place + block and place <= stop - 1 + upper

    @compile_
    def is_full_tile(row, block_q, seq_q, col, block_k, seq_k, lower, upper):
        """Whether a tile ends within the sequences, and each of its rows sees all of its columns."""
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
    """Return ``function`` itself: the compiler of plain Python."""
    return function


#: The same functions for plain Python.
PLAIN = make_geometry(same)
ceil_div = PLAIN.ceil_div
