"""Memory for functions that must have the same addresses in every call, as in a CUDA graph."""

from __future__ import annotations

import threading
from bisect import insort
from typing import Any, NamedTuple

from kernels.common.geometry import PLAIN
from kernels.cuda.runtime.memory_pool import Block, Pool
from kernels.runtime.cuda_errors import CaptureError

#: Alignment of the pieces of an arena, bytes.
ALIGNMENT = 512
#: Where a piece begins and ends, in bytes from the start of the call's memory.
Place = tuple[int, int]


class Stretch:
    """Memory of the pool in which calls are computed; the last reference gives it back to the driver."""

    block: Any = None

    def __init__(self, source: Pool, size: int):
        self._source, self.bytes = source, size
        self.block = source.allocate(size)

    def __del__(self) -> None:
        if self.block is not None:
            self._source.release(self.block)


class Piece(NamedTuple):
    """A piece of an arena: its address, its place, those in use of its call, and the memory it is in."""

    address: Any
    place: Place
    used: list[Place]
    holder: Block | Stretch


class Arena:
    """Pieces of memory that all calls of one kind receive in the same order at the same addresses.

    A piece that is freed within a call is reused by later allocations of the call, because launches run in
    order.  The first call of a kind allocates its pieces from the pool and determines how many bytes the
    others need, :attr:`extent`.  The other calls use a stretch, which several kinds may share.  When a call
    begins, the whole stretch is free, even if pieces are still referenced, so the same order of allocations
    gives the same addresses.
    """

    is_cached = False

    def __init__(self, source: Pool):
        self._source = source
        self.begin()

    def begin(self, stretch: Stretch | None = None) -> None:
        """Begin a call on this thread in a stretch of memory, None for the first call of its kind."""
        self._stretch, self._thread, self.extent = stretch, threading.get_ident(), ALIGNMENT
        self._used: list[Place] = []

    def allocate(self, size: int) -> Piece:
        """Return a piece of ``size`` bytes, at least 1, in the first place that has room for them.

        Raises:
            MemoryError: If the device has too little memory left.
            CaptureError: If the first call did not make the same allocation.
        """
        room, start, stretch = PLAIN.ceil_div(size, ALIGNMENT) * ALIGNMENT, 0, self._stretch
        for begin, end in self._used:
            if begin - start >= room:
                break
            start = end
        place = start, start + room
        if stretch is not None and place[1] > stretch.bytes:
            raise CaptureError(
                f"the function asks for {size:,} bytes on the device that a call before did not ask for; "
                "shapes must be the same in every call"
            )
        insort(self._used, place)
        self.extent = max(self.extent, place[1])
        if stretch is None:
            block = self._source.allocate(room)
            return Piece(block.address, place, self._used, block)
        address = type(stretch.block.address)(stretch.block.start + start)
        return Piece(address, place, self._used, stretch)

    def free(self, piece: Piece) -> None:
        """Free a piece; a piece of an earlier call was freed when this call began."""
        if isinstance(piece.holder, Block):
            self._source.free(piece.holder)
        if threading.get_ident() == self._thread:
            piece.used.remove(piece.place)
