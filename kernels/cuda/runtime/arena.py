"""Memory for functions that must have the same addresses in every call, as in a CUDA graph."""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable
from typing import Any, NamedTuple

from kernels.common.geometry import PLAIN
from kernels.cuda.runtime.memory_pool import Pool
from kernels.runtime.cuda_errors import CaptureError

#: Alignment of the pieces of an arena, bytes.
ALIGNMENT = 512
#: More bytes than any device has.
_ENDLESS = 1 << 60


class ArenaBlock(NamedTuple):
    """A piece of an arena.

    Attributes:
        address: The address in the driver's type.
        call: The call that it was allocated in.
        start: Offset of the piece in the arena.
        size: Bytes.
        block: Block of the pool in the first call; None later.
    """

    address: Any
    call: int
    start: int
    size: int
    block: Any


class _Places:
    """The free places of a stretch of bytes.

    Args:
        size: Bytes of the stretch.

    Attributes:
        extent: End of the part that has been in use.
    """

    def __init__(self, size: int):
        self._free, self.extent = [(0, size)], 0  # (start, bytes), in order; none beside another

    def reserve(self, size: int) -> int | None:
        """Return the first place for ``size`` bytes, the same in every stretch that is long enough."""
        for at, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[at : at + 1] = [(start + size, room - size)] if room > size else []
                self.extent = max(self.extent, start + size)
                return start
        return None

    def release(self, start: int, size: int) -> None:
        """Free a place again."""
        stop = start + size
        for place in [*self._free]:
            if sum(place) == start:
                self._free.remove(place)
                start = place[0]
            elif place[0] == stop:
                self._free.remove(place)
                stop = sum(place)
        insort(self._free, (start, stop - start))


class Stretch:
    """A piece of memory in which calls are computed; it is freed with its last reference.

    Args:
        source: The pool that the memory comes from.
        size: Bytes.

    Raises:
        MemoryError: If the device has too little memory left.
    """

    _block: Any = None

    def __init__(self, source: Pool, size: int):
        self._source, self.bytes = source, size
        self._block = source.allocate(size)

    @property
    def start(self) -> int:
        """The address of the first byte."""
        return int(self._block.address)

    def __del__(self) -> None:
        if self._block is not None:
            self._source.release(self._block)


class Arena:
    """Pieces of memory that all calls of one kind receive in the same order at the same addresses.

    A piece that is freed within a call is reused by later allocations of the call, because launches run in
    order. The first call of a kind allocates its pieces from the pool and determines how much memory the
    others need. The other calls use a stretch, which several kinds may share.  When a call begins, the
    whole stretch is free, even if pieces are still referenced, so the same order of allocations gives the
    same addresses.

    Args:
        source: The pool for the memory of first calls.
        address_of: Converts a number to an address in the driver's type.
    """

    def __init__(self, source: Pool, address_of: Callable[[int], Any]):
        self._source, self._address_of = source, address_of
        self._places = _Places(_ENDLESS)
        self._stretch: Stretch | None = None
        self._call, self._thread = 0, None

    def begin(self, stretch: Stretch | None = None) -> None:
        """Begin a call on this thread: everything is free.

        Args:
            stretch: The memory of its pieces; None for the first call of its kind.
        """
        self._call += 1
        self._thread = threading.get_ident()
        self._stretch = stretch
        self._places = _Places(_ENDLESS if stretch is None else stretch.bytes)

    def end(self) -> int:
        """End the call and return the bytes it needs; nothing is allocated or freed afterwards."""
        self._thread = self._stretch = None
        return max(self._places.extent, ALIGNMENT)

    def allocate(self, size: int) -> ArenaBlock:
        """Return ``size`` bytes, at least 1.

        Raises:
            MemoryError: If the device has too little memory left.
            CaptureError: If the first call did not make the same allocation.
        """
        size = PLAIN.ceil_div(size, ALIGNMENT) * ALIGNMENT
        start = self._places.reserve(size)
        if start is None:
            raise CaptureError(
                f"the function asks for {size:,} bytes on the device that a call before did not ask for; "
                "shapes must be the same in every call"
            )
        if self._stretch is None:
            block = self._source.allocate(size)
            return ArenaBlock(block.address, self._call, start, size, block)
        address = self._address_of(self._stretch.start + start)
        return ArenaBlock(address, self._call, start, size, None)

    def free(self, block: ArenaBlock) -> None:
        """Free a piece; a piece of an earlier call was freed when this call began."""
        if block.block is not None:
            self._source.free(block.block)
        if block.call == self._call and threading.get_ident() == self._thread:
            self._places.release(block.start, block.size)

    def owns(self, memory: Any) -> bool:
        """Tell whether the memory of an array is a piece of this arena."""
        return getattr(memory, "source", None) is self

    def is_current(self, memory: Any) -> bool:
        """Tell whether a piece belongs to the current call, or the last one."""
        return memory.block.call == self._call
