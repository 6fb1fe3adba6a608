"""Launch compiled kernels through the driver: a training step has hundreds of launches.

Numba's own launch creates an object for each argument every time.  Here one call packs the numbers into a
buffer, in the order and the sizes that numba's kernels expect: an array is its (unused) owner and parent,
its size, the bytes of an element, its address, its shape and its strides in bytes; a tuple is its elements.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import chain
from threading import Lock
from typing import Any

import numpy as np
from numba import types

from kernels.cuda.runtime.recipe import ALL_BITS, spoil, written
from kernels.cuda.runtime.recorder import Launch, Renewed, active
from kernels.runtime.cuda_errors import LAUNCHED, explain_code
from kernels.runtime.targets import cuda, current_device, driver

#: Format of a number in its slot of eight bytes, by type.
SLOTS = {
    types.boolean: "?7x",
    types.int8: "b7x",
    types.uint8: "B7x",
    types.int16: "h6x",
    types.uint16: "H6x",
    types.int32: "i4x",
    types.uint32: "I4x",
    types.int64: "q",
    types.uint64: "Q",
    types.float32: "f4x",
    types.float64: "d",
}


def _layout(kind: Any) -> str:
    """Return the format of an argument of a type in the buffer."""
    if isinstance(kind, types.Array):
        return "q" * (5 + 2 * kind.ndim)
    if isinstance(kind, types.BaseTuple):
        return "".join(map(_layout, kind.types))  # type: ignore[attr-defined]
    return SLOTS[kind]


def _number(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: (value,)


def _tuple(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    if not any(isinstance(element, types.Array) for element in kind.types):
        return lambda value: value
    unpackers = [_unpack(element) for element in kind.types]
    return lambda value: tuple(
        chain.from_iterable(unpack(x) for unpack, x in zip(unpackers, value, strict=True))
    )


def _array(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return the function that checks the type of an array and returns its numbers."""
    expected = np.dtype(str(kind.dtype)), kind.ndim

    def numbers(array: Any) -> tuple[Any, ...]:
        known = vars(array).get("_numbers")
        if known is None:
            address = array.device_ctypes_pointer.value or 0
            sizes = (0, 0, array.size, array.dtype.itemsize, address, *array.shape, *array.strides)
            known = array._numbers = (array.dtype, array.ndim), sizes
        if known[0] != expected:
            raise TypeError(
                f"the kernel takes {expected[0]} of {expected[1]} dimensions, got {known[0][0]} of "
                f"{known[0][1]}; convert the array"
            )
        return known[1]

    return numbers


def _unpack(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return the function that returns the numbers of an argument of a type."""
    if isinstance(kind, types.Array):
        return _array(kind)
    return _tuple(kind) if isinstance(kind, types.BaseTuple) else _number(kind)


#: Index of the address among the numbers of an array.
_ADDRESS = 4
#: Bytes of a slot.
_WORD_BYTES = 8
#: Placeholder for an argument of a prepared launch that each call supplies.
LATER: Any = type("_Later", (), {"__repr__": lambda self: "LATER"})()


def _arrays_and_numbers(
    kinds: tuple[Any, ...], args: Any, place: int = 0
) -> Iterator[tuple[int, Any]]:
    """Yield the arrays and numbers among arguments with their slots (of an array: of its address)."""
    for kind, arg in zip(kinds, args, strict=True):
        if isinstance(kind, types.BaseTuple):
            yield from _arrays_and_numbers(kind.types, arg, place)  # type: ignore[attr-defined]
        else:
            yield place + (_ADDRESS if isinstance(kind, types.Array) else 0), arg
        place += struct.calcsize(f"={_layout(kind)}") // _WORD_BYTES


def filled(rest: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a launch, with the last of the given ones in place of each :data:`LATER`."""
    count = sum(
        part is LATER for arg in rest for part in (arg if isinstance(arg, tuple) else (arg,))
    )
    values = iter(given[len(given) - count :])

    def fill(arg: Any) -> Any:
        if isinstance(arg, tuple):
            parts = [next(values) if part is LATER else part for part in arg]
            return arg._make(parts) if hasattr(arg, "_make") else tuple(parts)  # type: ignore[attr-defined]
        return next(values) if arg is LATER else arg

    return (*given[: len(given) - count], *map(fill, rest))


class Buffer:
    """The numbers of a launch, and an array of pointers to them, as the driver expects.

    Attributes:
        slots: Eight bytes for each number.
        words: The same bytes as whole numbers.
        address: Address of the array of pointers.
        lock: A lock that is held until the launch returns, when the driver has read the numbers, so that no
            other thread overwrites them.
    """

    def __init__(self, size: int):
        self.slots: Any = np.zeros(size, np.uint8)
        self.words = memoryview(self.slots).cast("Q")
        base = self.slots.ctypes.data
        self._pointers = np.arange(base, base + size, 8, dtype=np.uint64)
        self.address = int(self._pointers.ctypes.data)
        self.lock = Lock()

    def copy(self) -> Buffer:
        """Return another buffer with the same numbers."""
        other = Buffer(len(self.slots))
        other.slots[:] = self.slots
        return other


class Launcher:
    """A compiled kernel that is launched on the legacy default stream.

    Args:
        compiled: The kernel that ``cuda.jit`` compiled for a signature.
        signature: Types of its arguments.
        shared_bytes: Dynamic shared memory of a block.
        name: Name for error messages.
        prepare: A function that is called before the first launch on each device.

    Attributes:
        shared_bytes: As given.
        name: As given.
        enqueue: The driver's function that launches.
    """

    def __init__(
        self,
        compiled: Any,
        signature: Any,
        shared_bytes: int,
        name: str,
        prepare: Callable[[], None] = lambda: None,
    ):
        (overload,) = compiled.overloads.values()
        self._library = overload._codelibrary
        self._functions: dict[int, Any] = {}
        self.shared_bytes = shared_bytes
        self.name = name
        self._prepare = prepare
        self._unpackers = [_unpack(kind) for kind in signature.args]
        self._kinds = tuple(signature.args)
        self._packer = struct.Struct("=" + "".join(map(_layout, self._kinds)))
        self._buffer = Buffer(self._packer.size)
        self.enqueue = driver.cuLaunchKernel
        self._stream = driver.CUstream(0)
        self._success = driver.CUresult.CUDA_SUCCESS

    def launch(self, grid: tuple[int, int, int], block: tuple[int, int, int], *args: Any) -> None:
        """Launch on a grid of blocks.

        Raises:
            TypeError: If the dtype or the number of dimensions of an array does not match the kernel.
            RuntimeError: If the driver fails, or a kernel has failed before.
        """
        numbers = self._numbers(args)
        with self._buffer.lock:
            self._packer.pack_into(self._buffer.slots, 0, *numbers)
            self._start(self.sizes(grid, block, self._buffer))
            if (recipe := written()) is not None:
                found = _arrays_and_numbers(self._kinds, args)
                recipe.launched(self, grid, block, found, self._buffer.copy())
            if (recording := active()) is not None:
                words = self._buffer.slots.view(np.uint64).copy()
                recording.launched(Launch(self, grid, block, words, self._renewed(args)), args)

    def prepared(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], *rest: Any
    ) -> Callable[..., None]:
        """Return a function that repeats a launch with different arrays and the same other arguments.

        The shapes, strides and dtypes of the arrays are those of the first call; later calls only read
        addresses.

        Args:
            grid: Blocks.
            block: Threads.
            rest: The arguments after the arrays.  For each :data:`LATER` among them, also within a tuple, a
                call passes an array or a whole number after its other arrays, in this order.
        """
        buffer, places = Buffer(self._packer.size), list[int]()
        words, lock = buffer.words, buffer.lock
        sizes = self.sizes(grid, block, buffer)

        def pack(given: tuple[Any, ...]) -> None:
            args = filled(rest, given)
            self._packer.pack_into(buffer.slots, 0, *self._numbers(args))
            pattern = (LATER,) * (len(args) - len(rest)) + rest
            found = _arrays_and_numbers(self._kinds, pattern)
            places.extend(place for place, arg in found if arg is LATER)

        def run(*given: Any) -> None:
            spoil()  # no recipe knows these arguments
            with lock:
                if not places:
                    pack(given)
                for place, x in zip(places, given, strict=True):
                    words[place] = (
                        x & ALL_BITS if type(x) is int else x.device_ctypes_pointer.value or 0
                    )
                self._start(sizes)
                LAUNCHED.append(self.name)
                if (recording := active()) is not None:
                    numbers = buffer.slots.view(np.uint64).copy()
                    recording.launched(Launch(self, grid, block, numbers), (given, rest))

        return run

    def packer(self, first: int) -> Callable[..., None]:
        """Return a function that writes an argument that is a tuple of numbers.

        Args:
            first: Its first slot.

        Returns:
            A function of the slots of all arguments and of the numbers of the tuple.
        """
        kind = next(kind for place, kind in self._places() if place == first)
        own, offset = struct.Struct(f"={_layout(kind)}"), first * _WORD_BYTES
        return lambda slots, *numbers: own.pack_into(slots, offset, *numbers)

    def shown(self, slot: int, word: int) -> str:
        """Describe a slot for an error message: its argument, and the number.

        Args:
            slot: Index of the slot.
            word: The number in it.
        """
        number, (place, kind) = [
            (i, at) for i, at in enumerate(self._places(), start=1) if at[0] <= slot
        ][-1]
        parts = kind.types if isinstance(kind, types.BaseTuple) else (kind,)  # type: ignore[attr-defined]
        if all(part in SLOTS for part in parts):
            (value,) = struct.unpack(f"={SLOTS[parts[slot - place]]}", word.to_bytes(8, "little"))
            return f"{value} as argument {number}"
        what = "an array at" if isinstance(kind, types.Array) else "a tuple with"
        return f"{what} {word:#x} as argument {number}"

    def _places(self) -> Iterator[tuple[int, Any]]:
        """Yield the first slot and the type of each argument."""
        place = 0
        for kind in self._kinds:
            yield place, kind
            place += struct.calcsize(f"={_layout(kind)}") // _WORD_BYTES

    def _renewed(self, args: tuple[Any, ...]) -> tuple[tuple[int, Renewed], ...]:
        return tuple(
            (place, arg)
            for (place, _), arg in zip(self._places(), args, strict=True)
            if isinstance(arg, Renewed)
        )

    def _numbers(self, args: tuple[Any, ...]) -> chain[Any]:
        return chain.from_iterable(
            unpack(arg) for unpack, arg in zip(self._unpackers, args, strict=True)
        )

    def sizes(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], buffer: Buffer
    ) -> tuple[Any, ...]:
        """Return the driver's arguments after the kernel."""
        return (*grid, *block, self.shared_bytes, self._stream, buffer.address, 0)

    def _start(self, sizes: tuple[Any, ...]) -> None:
        """Launch with the numbers of the buffer, whose lock the caller holds."""
        (error,) = self.enqueue(self.function(), *sizes)
        if error != self._success:
            self.mend(error, sizes)

    def mend(self, error: Any, sizes: tuple[Any, ...]) -> None:
        """Launch again if the thread had no context; otherwise raise the error."""
        if error.name == "CUDA_ERROR_INVALID_CONTEXT":
            cuda.current_context()  # made current on this thread
            (error,) = self.enqueue(self.function(), *sizes)
        if error != self._success:
            raise explain_code(error.name, f"the kernel {self.name}")

    def function(self) -> Any:
        """Return the driver's handle of the kernel on the current device."""
        number = current_device()
        if number not in self._functions:
            cuda.current_context()
            self._prepare()
            handle = self._library.get_cufunc().handle
            self._functions[number] = driver.CUfunction(int(handle))
        return self._functions[number]


def three(size: Any) -> tuple[int, int, int]:
    """Return a grid or a block as three numbers."""
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    return (*sizes, 1, 1, 1)[:3]  # type: ignore[return-value]
