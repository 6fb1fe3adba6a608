"""A pool that reuses the memory of large results, because the system zeroes new pages.

Beyond some 32 MB the C library returns an array's pages when it is freed.  For the next result of that
size, the new pages then take longer than the computation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

#: Bytes from which memory is kept; the C library itself keeps what is smaller.
KEPT_FROM = 1 << 20
#: Maximum number of unused bytes that are kept.
KEPT_MOST = 256 << 20
#: Alignment of a block in bytes: a cache line, and the longest vector.
ALIGNMENT = 64

#: Unused pieces of memory by their size in bytes; the most recently freed size comes last.
_unused: dict[int, list[Piece]] = {}


class Piece(NamedTuple):
    """A piece of memory and its NumPy array interface."""

    memory: Any  #: Flat bytes.
    interface: dict[str, Any]  #: ``__array_interface__`` of the bytes that an array may use.


class Owner:
    """The owner of a piece of memory, which NumPy keeps alive while an array or a view uses it."""

    __slots__ = ("__array_interface__", "piece", "size")

    def __init__(self, piece: Piece, size: int):
        self.piece, self.size = piece, size
        self.__array_interface__ = piece.interface

    def __del__(self) -> None:
        _keep(self.piece, self.size)


def empty(size: int, dtype: np.dtype[Any]) -> Any:
    """Return an uninitialised flat array; a large one reuses the memory of an earlier one."""
    count = size * dtype.itemsize
    if count < KEPT_FROM:
        return np.empty(size, dtype)
    # No locks: a list's pop and append are one step each; what two threads disagree on is freed.
    try:
        piece = _unused[count].pop()
    except (KeyError, IndexError):
        piece = _new(count)
    return np.asarray(Owner(piece, count)).view(dtype)


def _new(size: int) -> Piece:
    memory = np.empty(size + ALIGNMENT - 1, np.uint8)
    address = memory.__array_interface__["data"][0]
    aligned = address + -address % ALIGNMENT
    return Piece(
        memory, {"data": (aligned, False), "shape": (size,), "typestr": "|u1", "version": 3}
    )


def _keep(piece: Piece, size: int) -> None:
    """Keep unused memory, and free the longest unused pieces beyond the limit."""
    pieces = _unused.pop(size, [])
    pieces.append(piece)
    _unused[size] = pieces
    excess = unused_bytes() - KEPT_MOST
    if excess <= 0:
        return
    for other in tuple(_unused):
        pieces = _unused.get(other, [])
        while excess > 0 and pieces:
            pieces.pop()
            excess -= other
        if not pieces:
            _unused.pop(other, None)


def unused_bytes() -> int:
    """Return the number of unused bytes that are kept."""
    return sum(size * len(pieces) for size, pieces in tuple(_unused.items()))


def release() -> None:
    """Give all unused memory back to the system."""
    _unused.clear()
