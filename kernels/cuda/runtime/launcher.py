"""Launch a compiled kernel by the driver itself: a training step is hundreds of launches.

Numba's own launch makes an object of each number that a kernel takes, every time.  Here the numbers are
packed into one buffer by one call, in the order and the sizes in which numba's kernels take them: an array
is its (unused) owner and parent, its size, the bytes of an element, its address, its shape and its strides
in bytes; a tuple is its elements.
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

#: How a number lies in its slot of eight bytes.
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
    """Return how an argument of a type lies in the buffer."""
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
    """Return the function that gives the numbers of an array, once it is one of the right kind."""
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
    """Return the function that gives the numbers of an argument of a type."""
    if isinstance(kind, types.Array):
        return _array(kind)
    return _tuple(kind) if isinstance(kind, types.BaseTuple) else _number(kind)


#: Where the address of an array stands among its numbers.
_ADDRESS = 4
#: Bytes of a slot.
_WORD_BYTES = 8
#: Stands for an argument of a prepared launch that each call gives anew.
LATER: Any = type("_Later", (), {"__repr__": lambda self: "LATER"})()


def _arrays_and_numbers(
    kinds: tuple[Any, ...], args: Any, place: int = 0
) -> Iterator[tuple[int, Any]]:
    """Yield the arrays and numbers among arguments with the slot of each: of an array, of its address."""
    for kind, arg in zip(kinds, args, strict=True):
        if isinstance(kind, types.BaseTuple):
            yield from _arrays_and_numbers(kind.types, arg, place)  # type: ignore[attr-defined]
        else:
            yield place + (_ADDRESS if isinstance(kind, types.Array) else 0), arg
        place += struct.calcsize(f"={_layout(kind)}") // _WORD_BYTES


def filled(rest: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a launch: those given, the last ones in the place of each :data:`LATER`."""
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
    """The numbers of a launch, and an array of pointers to each, which is what the driver takes.

    Attributes:
        slots: Eight bytes for each number.
        words: The same bytes as whole numbers.
        address: Of the array of pointers.
        lock: The driver has read the numbers when the launch returns; until then no other thread may write
            its own.
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
    """One compiled kernel, to be launched on the legacy default stream.

    Args:
        compiled: What ``cuda.jit`` returned for a signature.
        signature: Of its arguments.
        shared_bytes: Dynamic shared memory of a block.
        name: For the error text.
        prepare: Called before its first launch on each device.

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
        """Launch on so many blocks of so many threads.

        Raises:
            TypeError: If an array has another dtype or number of dimensions than the kernel takes.
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
        """Return a function that launches again and again with other arrays and the same other arguments.

        Of the arrays of its first call the shapes, strides and dtypes are kept, and of later ones only the
        addresses are asked for.

        Args:
            grid: Blocks.
            block: Threads.
            rest: The arguments behind the arrays.  For each :data:`LATER` among them, in a tuple too, a
                call gives an array or a whole number, behind its other arrays and in this order.
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
        """Return what writes one argument that is a tuple of numbers.

        Args:
            first: Its first slot.

        Returns:
            A function of the slots of all arguments and of its numbers.
        """
        kind = next(kind for place, kind in self._places() if place == first)
        own, offset = struct.Struct(f"={_layout(kind)}"), first * _WORD_BYTES
        return lambda slots, *numbers: own.pack_into(slots, offset, *numbers)

    def shown(self, slot: int, word: int) -> str:
        """Return what lies in a slot for an error text: which argument it is of, and the number.

        Args:
            slot: Of eight bytes.
            word: What they hold.
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
        """Return what the driver asks for behind the kernel."""
        return (*grid, *block, self.shared_bytes, self._stream, buffer.address, 0)

    def _start(self, sizes: tuple[Any, ...]) -> None:
        """Launch with the numbers of a buffer, whose lock the caller holds."""
        (error,) = self.enqueue(self.function(), *sizes)
        if error != self._success:
            self.mend(error, sizes)

    def mend(self, error: Any, sizes: tuple[Any, ...]) -> None:
        """Launch again where the thread had no context; else raise what went wrong."""
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
