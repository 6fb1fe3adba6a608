"""Record the launches of a call, and repeat them with other arrays.

A rung is written plainly: it allocates memory, chooses kernels and launches them.  While the first call of
a kind runs, a :class:`Recipe` records each launch, and the origin of each address among its arguments: an
operand, memory that the call allocated, or a constant.  Repeating the call means allocating memory, writing
the addresses into the packed arguments and launching; nothing is chosen or checked again.

Everything that a call does must depend on its kind alone.  If it does not, for example because it draws a
random number, the recipe is invalid and every call of the kind runs in full.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kernels.common.geometry import PLAIN
from kernels.runtime.cuda_errors import LAUNCHED

#: Mask of the eight bytes of a packed argument.
ALL_BITS = 2**64 - 1
#: Alignment of the parts of the scratch memory, bytes.
ALIGNMENT = 512


class Seed(int):
    """The dropout seed of a recorded call, which is the one number that later calls replace."""


class Address(NamedTuple):
    """The origin of an address.

    Attributes:
        number: Index of the operand, or the number of operands plus the index of the allocation.
        offset: Bytes from the start of the operand or the allocation.
        remake: Makes the tensor map that the kernel receives instead of the address; None for an address.
    """

    number: int
    offset: int
    remake: Callable[[int], Any] | None = None


class _Noted(NamedTuple):
    """One launch of the recorded call.

    Attributes:
        launcher: The launcher of the kernel.
        grid: Number of blocks, in three dimensions.
        block: Number of threads, in three dimensions.
        addresses: The words that hold addresses, each with its origin.
        seeds: The words that hold the seed.
        buffer: The packed arguments.
        kept: Arrays among the arguments that are constants.
    """

    launcher: Any
    grid: Any
    block: Any
    addresses: list[tuple[int, Address]]
    seeds: list[int]
    buffer: Any
    kept: list[Any]


class Recipe:
    """Record the launches of one call, inside a ``with`` block.

    Args:
        operands: The number of operands.

    Attributes:
        operands: The number of operands.
        noted: The launches in order.
        sizes: Bytes of each allocation of the call.
        is_spoilt: Whether the call did something that cannot be repeated.
    """

    def __init__(self, operands: int):
        self.operands = operands
        self.noted: list[_Noted] = []
        self.sizes: list[int] = []
        self.is_spoilt = False
        self._maps: dict[int, tuple[Any, Address]] = {}

    def __enter__(self) -> Recipe:
        _thread.recipe = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.recipe = None
        self._maps.clear()  # their keys are ids of arrays that may be freed

    def took(self, memory: Any, size: int) -> None:
        """Record an allocation."""
        memory.place = self, self.operands + len(self.sizes)
        self.sizes.append(size)

    def mapped(self, found: Any, array: Any, remake: Callable[[int], Any]) -> None:
        """Record a tensor map, which depends on the address of an array.

        Args:
            found: The map on the device, as an object of its own.
            array: The array that it describes.
            remake: Makes the map for another address.
        """
        if (address := self.source(array)) is not None:
            self._maps[id(found)] = found, address._replace(remake=remake)

    def source(self, array: Any) -> Address | None:
        """Return the origin of the address of an array; None for a constant."""
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
        """Record a launch.

        Args:
            launcher: The launcher of the kernel.
            grid: Number of blocks, in three dimensions.
            block: Number of threads, in three dimensions.
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
        self.noted.append(_Noted(launcher, grid, block, addresses, seeds, buffer, kept))

    def finished(self, results: Sequence[Address | None]) -> Launches | None:
        """Return the launches to repeat, or None if the call cannot be repeated.

        Args:
            results: The origins of the results, None for those that the call does not compute.
        """
        found = [address for address in results if address is not None]
        numbers = list(dict.fromkeys(address.number for address in found))
        if self.is_spoilt or min(numbers, default=self.operands) < self.operands:
            return None
        # Each result has its own allocation; all other memory is one allocation.
        others = [
            number
            for number in range(self.operands, self.operands + len(self.sizes))
            if number not in numbers
        ]
        place = {number: self.operands + at for at, number in enumerate([*numbers, *others])}
        place.update((number, number) for number in range(self.operands))

        def size(number: int) -> int:
            return self.sizes[number - self.operands]

        starts = [0]
        for number in others:
            starts.append(starts[-1] + PLAIN.ceil_div(size(number), ALIGNMENT) * ALIGNMENT)
        steps = []
        for one in self.noted:
            own = [
                (word, address._replace(number=place[address.number]))
                for word, address in one.addresses
            ]
            steps.append(
                Step(
                    one.launcher,
                    one.launcher.function(),
                    one.launcher.sizes(one.grid, one.block, one.buffer),
                    one.buffer.words,
                    [(word, x.number, x.offset) for word, x in own if x.remake is None],
                    [(word, x, {}) for word, x in own if x.remake is not None],
                    one.seeds,
                    (one.buffer, one.kept),
                )
            )
        return Launches(
            steps,
            [size(number) for number in numbers],
            starts.pop(),
            starts,
            [(numbers.index(address.number), address.offset) for address in found],
        )


class Step(NamedTuple):
    """One launch to repeat.

    Attributes:
        launcher: The launcher of the kernel.
        function: The driver's handle of the kernel.
        sizes: The arguments of the driver's launch after the kernel: grid, block and so on.
        words: The packed arguments, eight bytes each.
        addresses: For each address its word, the number of its memory, and the offset.
        maps: For each tensor map its word, the origin of its array, and the maps made so far.
        seeds: The words that hold the seed.
        kept: The owner of the words, and arrays that are constants.
    """

    launcher: Any
    function: Any
    sizes: tuple[Any, ...]
    words: Any
    addresses: list[tuple[int, int, int]]
    maps: list[tuple[int, Address, dict[int, tuple[Any, int]]]]
    seeds: list[int]
    kept: Any


class Launches:
    """The launches of a call, to be repeated.

    Args:
        steps: The launches in order.
        sizes: Bytes of each allocation that holds results.
        scratch: Bytes of all other memory.
        starts: Offset of each other allocation in the scratch memory.
        results: For each result the index of its allocation, and the offset in bytes.

    Attributes:
        sizes: Bytes of each allocation that holds results.
        scratch: Bytes of all other memory.
        starts: Offset of each other allocation in the scratch memory.
        results: For each result the index of its allocation, and the offset in bytes.
    """

    def __init__(
        self,
        steps: list[Step],
        sizes: list[int],
        scratch: int,
        starts: list[int],
        results: list[tuple[int, int]],
    ):
        self._steps, self._lock = steps, threading.Lock()
        self.sizes, self.scratch, self.starts, self.results = sizes, scratch, starts, results

    def run(self, starts: Sequence[int], seed: int) -> None:
        """Launch with other operands, memory and seed.

        Args:
            starts: Addresses of the operands, the results' allocations and the parts of the scratch memory.
            seed: Dropout seed, a signed 64-bit number.
        """
        with self._lock:
            for launcher, function, sizes, words, addresses, maps, seeds, _ in self._steps:
                for word, number, offset in addresses:
                    words[word] = starts[number] + offset
                for word, source, known in maps:
                    address = starts[source.number] + source.offset
                    found = known.get(address) or _made(source, address, known)
                    words[word] = found[1]
                for word in seeds:
                    words[word] = seed & ALL_BITS
                (error,) = launcher.enqueue(function, *sizes)
                if error:  # success is 0
                    launcher.mend(error, sizes)
                LAUNCHED.append(launcher.name)


#: Tensor maps that are kept for one operand, at most.
_MOST_MAPS = 256


def _made(source: Address, address: int, known: dict[int, tuple[Any, int]]) -> tuple[Any, int]:
    """Make a tensor map, and return it with its address."""
    assert source.remake is not None, "only tensor maps are made anew"
    if len(known) >= _MOST_MAPS:
        known.clear()
    array = source.remake(address)
    found = known[address] = array, int(array.device_ctypes_pointer.value)
    return found


class _Thread(threading.local):
    """The recipe that this thread records, or None."""

    recipe: Recipe | None = None


_thread = _Thread()


def written() -> Recipe | None:
    """Return the recipe that this thread records, or None."""
    return _thread.recipe


@contextmanager
def unwritten() -> Iterator[None]:
    """Leave what this thread does in a ``with`` block out of the recipe that it records."""
    recipe, _thread.recipe = _thread.recipe, None
    try:
        yield
    finally:
        _thread.recipe = recipe


def spoil() -> None:
    """Mark the recorded call as one that cannot be repeated."""
    if _thread.recipe is not None:
        _thread.recipe.is_spoilt = True
