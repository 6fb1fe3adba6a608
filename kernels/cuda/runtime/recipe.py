"""The launches of one call, noted while it runs the first time, and repeated with other arrays.

A rung is written plainly: it allocates, picks kernels and launches.  While the first call of a kind runs, a
:class:`Recipe` notes each launch and where each address among its arguments comes from: an operand, memory
that the call took, or a constant of the kind.  To repeat the call is to take memory, to write addresses
into the packed arguments, and to launch; nothing is chosen or checked again.

What a call does beside launches must depend on its kind alone.  Where it does not, as where a number is
drawn at random, the recipe is spoilt and the kind runs in full every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

#: Of a packed argument, eight bytes.
ALL_BITS = 2**64 - 1


class Seed(int):
    """The dropout seed of a call that is noted: the one number that later calls replace."""


class Address(NamedTuple):
    """Where an address comes from.

    Attributes:
        number: Of the operand; behind all operands, of the memory that the call took.
        offset: Bytes from where that begins.
        remake: Makes of the address what a kernel is given instead: an array that holds a tensor map.
    """

    number: int
    offset: int
    remake: Callable[[int], Any] | None = None

    def of(self, starts: Sequence[int]) -> int:
        """Return the address for operands and memory that begin at ``starts``."""
        address = starts[self.number] + self.offset
        if self.remake is None:
            return address
        return int(self.remake(address).device_ctypes_pointer.value)


class Step(NamedTuple):
    """One launch.

    Attributes:
        launcher: Of the kernel.
        sizes: Grid, block and all else that the driver takes behind the kernel.
        words: The packed arguments, eight bytes each.
        addresses: The words that hold addresses of operands or of memory.
        seeds: The words that hold the seed.
        buffer: Owner of ``words``.
        kept: Constants among the arguments.
    """

    launcher: Any
    sizes: tuple[Any, ...]
    words: Any
    addresses: list[tuple[int, Address]]
    seeds: list[int]
    buffer: Any
    kept: list[Any]


class Recipe:
    """The launches of one call.

    Args:
        operands: How many there are.

    Attributes:
        steps: The launches in order.
        sizes: Bytes of each piece of memory that the call took.
        is_spoilt: The call did something that cannot be repeated.
        lock: Held while words are written and launched.
    """

    def __init__(self, operands: int):
        self.operands = operands
        self.steps: list[Step] = []
        self.sizes: list[int] = []
        self.is_spoilt = False
        self.lock = threading.Lock()
        self._maps: dict[int, tuple[Any, Address]] = {}

    def __enter__(self) -> Recipe:
        _thread.recipe = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.recipe = None
        self._maps.clear()  # what they name is no more than a name from now on

    def took(self, memory: Any, size: int) -> None:
        """Note memory that the call takes."""
        memory.place = self, self.operands + len(self.sizes)
        self.sizes.append(size)

    def mapped(self, found: Any, array: Any, remake: Callable[[int], Any]) -> None:
        """Note an array that was made of the address of another: a tensor map.

        Args:
            found: The array on the device, this object for this map alone.
            array: Whose address it was made of.
            remake: Makes it of an address.
        """
        if (address := self.source(array)) is not None:
            self._maps[id(found)] = found, address._replace(remake=remake)

    def source(self, array: Any) -> Address | None:
        """Return where the address of an array comes from; None for a constant."""
        if (known := self._maps.get(id(array))) is not None:
            return known[1]
        memory: Any = getattr(array, "gpu_data", None)
        whole = getattr(memory, "whole", memory)
        recipe, number = getattr(whole, "place", (None, 0))
        if recipe is not self:
            return None
        start, address = (int(x.device_ctypes_pointer.value or 0) for x in (whole, array))
        return Address(number, address - start)

    def launched(
        self, launcher: Any, grid: Any, block: Any, args: Iterator[tuple[int, Any]], buffer: Any
    ) -> None:
        """Note a launch.

        Args:
            launcher: Of the kernel.
            grid: Blocks.
            block: Threads.
            args: The arrays and numbers among the arguments, each with its word.
            buffer: A copy of the packed arguments.
        """
        addresses, seeds, kept = [], [], []
        for place, value in args:
            if type(value) is Seed:
                seeds.append(place)
            elif hasattr(value, "gpu_data"):
                source = self.source(value)
                if source is None:
                    kept.append(value)
                else:
                    addresses.append((place, source))
        sizes = launcher.sizes(grid, block, buffer)
        self.steps.append(Step(launcher, sizes, buffer.words, addresses, seeds, buffer, kept))

    def run(self, starts: Sequence[int], seed: int) -> None:
        """Launch with other operands, memory and seed.

        Args:
            starts: Addresses of the operands, then of memory of :attr:`sizes`.
            seed: Of dropout; a signed number of 64 bits.
        """
        with self.lock:
            for launcher, sizes, words, addresses, seeds, _, _ in self.steps:
                for place, address in addresses:
                    words[place] = address.of(starts)
                for place in seeds:
                    words[place] = seed & ALL_BITS
                launcher.start(sizes)


class _Thread(threading.local):
    """The recipe that this thread writes, or None."""

    recipe: Recipe | None = None


_thread = _Thread()


def written() -> Recipe | None:
    """Return the recipe that this thread writes, or None."""
    return _thread.recipe


def spoil() -> None:
    """Note that the call does what cannot be repeated."""
    if _thread.recipe is not None:
        _thread.recipe.is_spoilt = True
