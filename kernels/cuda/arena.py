"""Memory of a function whose calls are all to lie at the same addresses: what a graph is computed in."""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable
from typing import Any, NamedTuple

from kernels.cuda.pool import Pool
from kernels.geometry import PLAIN

#: Bytes that a piece of an arena begins at a multiple of, and that are asked of the pool at a time.
ALIGNMENT, LEAST = 512, 32 << 20


class ArenaBlock(NamedTuple):
    """A piece of an arena.

    Attributes:
        address: As the driver has it.
        call: The call that it was given to.
    """

    address: Any
    call: int


class Arena:
    """Pieces of memory that each call is given anew, in the same order at the same addresses.

    A piece that is free again within a call is given to the next who asks: everything that is launched runs
    in order.  When the next call begins all of them are free, whoever still holds one; so what is asked for
    in the same order lies where it lay.

    Args:
        source: Of the memory; it goes back when the last array in the arena, and what else holds it, has
            gone.
        address_of: Makes an address as the driver has it of a number.
    """

    def __init__(self, source: Pool, address_of: Callable[[int], Any]):
        self._source, self._address_of = source, address_of
        self._chunks: list[tuple[Any, int]] = []  # blocks of the pool, and their bytes
        self._free: list[tuple[int, int]] = []  # (address, bytes), in order; none beside another
        self._sizes: dict[int, int] = {}  # of the pieces in use, by address
        self._call, self._thread = 0, None
        self.bytes = 0

    def begin(self) -> None:
        """Begin a call on this thread: everything is free."""
        self._call += 1
        self._thread = threading.get_ident()
        self._sizes = {}
        self._free = sorted((int(block[0]), size) for block, size in self._chunks)

    def end(self) -> None:
        """End the call; from now on nothing is given or taken back."""
        self._thread = None

    def allocate(self, size: int) -> ArenaBlock:
        """Return ``size`` bytes, one or more.

        Raises:
            MemoryError: If the device has not that much left.
        """
        size = PLAIN.ceil_div(size, ALIGNMENT) * ALIGNMENT
        place = min(
            (place for place in self._free if place[1] >= size), key=lambda place: place[::-1],
            default=None,
        )  # fmt: skip
        if place is None:
            place = self._grown(size)
        self._free.remove(place)
        address, room = place
        if room > size:
            insort(self._free, (address + size, room - size))
        self._sizes[address] = size
        return ArenaBlock(self._address_of(address), self._call)

    def free(self, block: ArenaBlock) -> None:
        """Take a piece back; one of an earlier call was taken back when this one began."""
        if block.call != self._call or threading.get_ident() != self._thread:
            return
        address = int(block.address)
        start, stop = address, address + self._sizes.pop(address)
        begins = {
            int(chunk[0]) for chunk, _ in self._chunks
        }  # of memory that is no part of another
        for place in [*self._free]:
            if place[0] + place[1] == start and start not in begins:
                self._free.remove(place)
                start = place[0]
            elif place[0] == stop and stop not in begins:
                self._free.remove(place)
                stop += place[1]
        insort(self._free, (start, stop - start))

    def owns(self, memory: Any) -> bool:
        """Tell whether memory of an array is a piece of this arena."""
        return getattr(memory, "source", None) is self

    def is_current(self, memory: Any) -> bool:
        """Tell whether a piece was given to the call that runs, or ran last."""
        return memory.block.call == self._call

    def _grown(self, size: int) -> tuple[int, int]:
        room = max(size, LEAST)
        chunk = self._source.allocate(room)
        self._chunks.append((chunk, room))
        self.bytes += room
        place = int(chunk[0]), room
        insort(self._free, place)
        return place

    def __del__(self) -> None:
        for chunk, _ in self._chunks:
            self._source.free(chunk)
