"""Launch compiled kernels through the driver: a training step has hundreds of launches.

Numba's own launch creates an object for each argument every time.  Here one call packs the numbers into a
buffer, in the order and the sizes that numba's kernels expect: an array is its (unused) owner and parent,
its size, the bytes of an element, its address, its shape and its strides in bytes; a tuple is its elements.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from threading import Lock
from typing import Any

import numpy as np

from kernels.cuda.runtime.compiling import handle_of, wrong_array
from kernels.cuda.runtime.recorder import Renewed, active
from kernels.runtime.cuda_errors import explain_code
from kernels.runtime.targets import cuda, current_device, driver
from kernels.runtime.types import types

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


def _number(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: (value,)


def _tuple(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    if not any(isinstance(element, (types.Array, types.BaseTuple)) for element in kind.types):
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
            raise wrong_array(expected, known[0])
        return known[1]

    return numbers


def _unpack(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return the function that returns the numbers of an argument of a type."""
    if isinstance(kind, types.Array):
        return _array(kind)
    return _tuple(kind) if isinstance(kind, types.BaseTuple) else _number(kind)


#: Index of the address among the numbers of an array.
_ADDRESS = 4


def _formats(kind: Any) -> list[str]:
    """Return the format of each word of an argument of a type."""
    if isinstance(kind, types.Array):
        return ["q"] * (5 + 2 * kind.ndim)
    if isinstance(kind, types.BaseTuple):
        return list(chain.from_iterable(map(_formats, kind.types)))  # type: ignore[attr-defined]
    return [SLOTS[kind]]


def _parts(kinds: Sequence[Any], args: Any, word: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield the arrays and numbers among arguments with their words (of an array: of its address)."""
    for kind, arg in zip(kinds, args, strict=True):
        if isinstance(arg, tuple) and not isinstance(arg, Renewed):
            yield from _parts(kind.types, arg, word)
        else:
            yield word + (_ADDRESS if isinstance(kind, types.Array) else 0), arg
        word += len(_formats(kind))


class Buffer:
    """The numbers of a launch, and an array of pointers to them, as the driver expects."""

    def __init__(self, size: int):
        self.slots: Any = np.zeros(size, np.uint8)  #: Eight bytes for each number.
        self.words = memoryview(self.slots).cast("Q")  #: The same bytes as whole numbers.
        base = self.slots.ctypes.data
        self._pointers = np.arange(base, base + size, 8, dtype=np.uint64)
        self.address = int(self._pointers.ctypes.data)  #: Address of the array of pointers.
        #: Held until the driver has read the numbers, so that no other thread overwrites them.
        self.lock = Lock()

    def copy(self) -> Buffer:
        """Return another buffer with the same numbers."""
        other = Buffer(len(self.slots))
        other.slots[:] = self.slots
        return other


class Launcher:
    """A compiled kernel that is launched on the legacy default stream.

    ``compiled`` is what ``cuda.jit`` compiled for a signature, ``shared_bytes`` the dynamic shared
    memory of a block, and ``prepare`` is called before the first launch on each device.
    """

    def __init__(
        self,
        compiled: Any,
        signature: Any,
        shared_bytes: int,
        name: str,
        prepare: Callable[[], None] = lambda: None,
    ):
        self._compiled = compiled
        self._functions: dict[int, Any] = {}
        self.shared_bytes = shared_bytes
        self.name = name
        self._prepare = prepare
        self._unpackers = [_unpack(kind) for kind in signature.args]
        self._kinds = tuple(signature.args)
        self._formats = list(chain.from_iterable(map(_formats, self._kinds)))
        self._packer = struct.Struct("=" + "".join(self._formats))
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
            if (recording := active()) is not None:
                buffer = self._buffer.copy()
                sizes = self.sizes(grid, block, buffer)
                recording.launched(self, sizes, buffer, _parts(self._kinds, args))

    def write(self, buffer: Buffer, first: int, numbers: Sequence[Any]) -> None:
        """Write the numbers of a tuple, which begin at the word ``first``, into a buffer."""
        own = "".join(self._formats[first : first + len(numbers)])
        struct.pack_into(f"={own}", buffer.slots, first * 8, *numbers)

    def shown(self, word: int, bits: int) -> str:
        """Describe what a word holds for an error message: its number, and the argument it is part of."""
        ends = [*accumulate(len(_formats(kind)) for kind in self._kinds)]
        place = sum(end <= word for end in ends)
        (what,) = struct.unpack(f"={self._formats[word]}", bits.to_bytes(8, "little"))
        if isinstance(self._kinds[place], types.Array):
            what = f"an array at {bits:#x}"
        return f"{what} as argument {place + 1}"

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
            self._functions[number] = driver.CUfunction(handle_of(self._compiled))
        return self._functions[number]
