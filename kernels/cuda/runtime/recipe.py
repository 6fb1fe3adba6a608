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

from kernels.common.geometry import PLAIN
from kernels.runtime.cuda_errors import LAUNCHED

#: Of a packed argument, eight bytes.
ALL_BITS = 2**64 - 1
#: Bytes that a piece of the scratch memory begins at a multiple of.
ALIGNMENT = 512


class Seed(int):
    """The dropout seed of a call that is noted: the one number that later calls replace."""


class Address(NamedTuple):
    """Where an address comes from.

    Attributes:
        number: Of the operand; behind all operands, of the memory that the call took.
        offset: Bytes from where that begins.
        remake: Makes of the address an array that a kernel is given instead, which holds a tensor map.
    """

    number: int
    offset: int
    remake: Callable[[int], Any] | None = None


class _Noted(NamedTuple):
    """One launch of the first call.

    Attributes:
        launcher: Of the kernel.
        grid: Blocks.
        block: Threads.
        addresses: The words that hold addresses of operands or of memory.
        seeds: The words that hold the seed.
        buffer: The packed arguments.
        kept: Constants among the arguments.
    """

    launcher: Any
    grid: Any
    block: Any
    addresses: list[tuple[int, Address]]
    seeds: list[int]
    buffer: Any
    kept: list[Any]


class Recipe:
    """Notes the launches of one call.

    Args:
        operands: The number of operands.

    Attributes:
        operands: As given.
        noted: The launches in order.
        sizes: Bytes of each piece of memory that the call took.
        is_spoilt: The call did something that cannot be repeated.
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
        self.noted.append(_Noted(launcher, grid, block, addresses, seeds, buffer, kept))

    def finished(self, results: Sequence[Address | None]) -> Launches | None:
        """Return what repeats the launches, or None if the call cannot be repeated.

        Args:
            results: Where the results of the call lie, None for those that it has not.
        """
        found = [address for address in results if address is not None]
        numbers = list(dict.fromkeys(address.number for address in found))
        if self.is_spoilt or min(numbers, default=self.operands) < self.operands:
            return None
        # Memory of results comes first, each in one piece; all other memory is one piece.
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
        launcher: Of the kernel.
        function: The driver's handle of the kernel.
        sizes: Grid, block and all else that the driver takes behind the kernel.
        words: The packed arguments, eight bytes each.
        addresses: Words that hold an address, the number of what it is in, and the offset.
        maps: Words that hold the address of a tensor map, what it is of, and the maps made so far.
        seeds: Words that hold the seed.
        kept: Owner of the words, and constants among the arguments.
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
    """Repeats the launches of a call.

    Args:
        steps: In order.
        sizes: Bytes of each piece of memory that results lie in.
        scratch: Bytes of all other memory.
        starts: Where each other piece of memory begins in the scratch memory.
        results: For each result the number of its piece, and the offset in bytes.

    Attributes:
        sizes: As given.
        scratch: As given.
        starts: As given.
        results: As given.
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
            starts: Addresses of the operands, of the results' memory, and of the other pieces.
            seed: Of dropout; a signed number of 64 bits.
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


#: Addresses of one operand that tensor maps are kept for.
_MOST_MAPS = 256


def _made(source: Address, address: int, known: dict[int, tuple[Any, int]]) -> tuple[Any, int]:
    """Return a new tensor map and its address, kept among those that are known."""
    assert source.remake is not None, "only tensor maps are made anew"
    if len(known) >= _MOST_MAPS:
        known.clear()
    array = source.remake(address)
    found = known[address] = array, int(array.device_ctypes_pointer.value)
    return found


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
