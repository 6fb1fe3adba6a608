"""Swizzled layouts of tiles in shared memory, which avoid bank conflicts among eight rows.

Shared memory delivers 128 bytes at a time from 32 banks, that is, eight pieces of 16 bytes whose addresses
differ modulo 128.  ``ldmatrix`` reads eight rows of one 16-byte column.  If rows are a multiple of 128
bytes apart, these reads would happen one after the other.  The pieces of a row are therefore permuted by an
exclusive or with bits of the row's number, which costs no memory and is its own inverse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Bytes of a piece, the maximum that one lane reads or writes at a time.
CHUNK = 16


def swizzled(offset: Any, width: int) -> Any:
    """Return the hardware's place of a byte offset, or of an array of offsets, in rows of ``width`` bytes.

    Bulk copies and ``wgmma`` use this map, which is its own inverse, for tiles that begin at a multiple of
    1,024 bytes.  A width of 0 is no swizzle.

    Source: PTX ISA, "Swizzling modes" of tensor copies.
    """
    return offset ^ (((offset >> 7) & max(width // CHUNK - 1, 0)) << 4)


def make_tile_place(compile_: Callable[[Any], Any], width: int) -> Callable[..., Any]:
    """Return ``place(row, chunk)``: the byte offset of a piece of a row in a tile of whole rows.

    There are no bank conflicts for any width.  Pieces are permuted in groups, whose size is the largest
    power of two, up to eight, that divides the number of pieces in a row; the distance of the rows avoids
    the remaining conflicts.  For rows of 32, 64 and 128 bytes it is the hardware's map.  ``width`` is the
    number of bytes of a row, a multiple of 16.
    """
    chunks = width // CHUNK
    group = min(8, chunks & -chunks)
    shift, mask = 3 - (group.bit_length() - 1), group - 1

    @compile_
    def place(row, chunk):
        return row * width + ((chunk ^ ((row >> shift) & mask)) << 4)

    return place
