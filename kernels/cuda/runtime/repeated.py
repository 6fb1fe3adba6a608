"""Repeat the launches of an earlier call with other operands.

A rung is written plainly: it allocates memory, chooses kernels and launches them.  One call of a kind is
recorded; later calls allocate memory, write addresses into the packed arguments and launch, and nothing is
chosen or checked again.  Everything that a call does must therefore depend on its kind alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from operator import itemgetter
from threading import Lock
from typing import Any, TypeVar

from kernels.cuda.runtime.arrays import array_on, pool
from kernels.cuda.runtime.pooled import Foreign, arrays_from
from kernels.cuda.runtime.recorder import Recording, Seed, recorded_by, thread
from kernels.runtime.cuda_errors import LAUNCHED
from kernels.runtime.known_calls import KnownCalls
from kernels.runtime.memory import Layout
from kernels.runtime.targets import BLOCKING, DeviceArray, current_device, driver

#: Alignment in bytes that vector loads need.
VECTOR = 16
#: Mask of the eight bytes of a packed argument.
ALL_BITS = 2**64 - 1
#: Computes results from arrays and other arguments, and a dropout seed.
Run = Callable[[Sequence[Any], int], Any]


def address_of(array: Any) -> int:
    """Return the address of the first element of a device array; 0 for no elements."""
    return array.device_ctypes_pointer.value or 0


class Repeat:
    """Repeat a recorded call of ``count`` operands with others of the same layouts.

    Each result has its own allocation; all other memory of the call is one allocation. ``results`` is
    the memory of each result in the recording, None for one that is not computed, and ``layouts`` the
    layout of the result in each of these.
    """

    def __init__(
        self,
        recording: Recording,
        count: int,
        results: Sequence[int | None],
        layouts: dict[int, Layout],
    ):
        offsets, self.scratch = recording.layout({*range(count), *layouts})
        self._offsets, self._lock, self._kept = [*offsets.values()], Lock(), recording.kept
        # Addresses are given in this order.
        at: dict[Any, int] = {
            n: index for index, n in enumerate([*range(count), *layouts, *offsets])
        }
        self._order = [None if n is None else at[n] - count for n in results]
        self._is_ordered = None not in self._order
        self._sizes, self._layouts = [recording.sizes[n] for n in layouts], [*layouts.values()]
        self._flat = [((math.prod(shape),), (x.itemsize,), x) for shape, _, x in self._layouts]
        self.parts = [
            (shape, tuple(step // dtype.itemsize for step in steps), dtype)
            for shape, steps, dtype in self._layouts
        ]
        self._steps = [
            (
                one,
                one.launcher.function(),
                [
                    (word, *places[0], x.remake, places[1:])
                    for word, x in one.addresses
                    for places in [[(at[number], offset) for number, offset in x.locations]]
                ],
            )
            for one in recording.launches
        ]

    def into(self, starts: list[int], scratch: int, seed: int) -> None:
        """Launch with memory of the caller.

        ``starts`` are addresses of the operands and of memory for :attr:`parts`; those of the
        :attr:`scratch` bytes, which begin at an address aligned to 512, are appended.  The seed
        is a signed 64-bit number.
        """
        if scratch:
            starts += map(scratch.__add__, self._offsets)
        with self._lock:
            for (launcher, sizes, buffer, _, seeds), function, addresses in self._steps:
                words = buffer.words
                for word, number, offset, remake, others in addresses:
                    start = starts[number] + offset
                    if remake is not None:
                        start = remake(start, *[starts[n] + at for n, at in others])[1]
                    words[word] = start
                for word, _ in seeds:
                    words[word] = seed & ALL_BITS
                (error,) = launcher.enqueue(function, *sizes)
                if error:  # success is 0
                    launcher.mend(error, sizes)
                LAUNCHED.append(launcher.name)

    def arrays(
        self, starts: Sequence[int], seed: int, operands: Any = None, flat: bool = False
    ) -> list[Any]:
        """Return the results for operands at these addresses; None for those that are not computed.

        With ``flat`` they are the :attr:`parts` instead, in one dimension.  Only loops on the CPU
        read the operands.
        """
        source, places = pool(), [*starts]
        layouts = self._flat if flat else self._layouts
        made = arrays_from(source, self._sizes, layouts, places)
        scratch, block = 0, None
        if self.scratch:
            (block,) = source.allocate(self.scratch)
            scratch = block.start
        try:
            self.into(places, scratch, seed)
        finally:
            if block is not None:
                source.free(block)  # in stream order
        return made if flat or self._is_ordered else self.ordered(made)

    def ordered(self, made: list[Any]) -> list[Any]:
        """Return all results, given an array for each of the :attr:`parts`."""
        return [None if index is None else made[index] for index in self._order]


def noted(run: Run, args: Sequence[Any], seed: int) -> tuple[Any, Repeat | None]:
    """Run a call and record it; return its result, and a :class:`Repeat` or None if it cannot be repeated.

    ``run`` runs the call in full; it returns an array, a tuple of arrays and None, or None.  ``args``
    are its device arrays, which later calls replace, and other arguments.
    """
    if thread.recording is not None or BLOCKING or pool() is None:
        return run(args, seed), None
    recording, named, count = Recording(), [*args], 0
    for index, array in enumerate(args):
        if type(array) is DeviceArray:
            memory, count = Foreign(address_of(array), array.gpu_data.size, array), count + 1
            recording.allocated(memory, memory.size)
            named[index] = array_on(memory, _layout(array))
    with recorded_by(recording):
        result = run(named, Seed(seed))
    layouts, numbers = dict[int, Layout](), list[int | None]()
    for array in result if isinstance(result, tuple) else (result,):
        number = None
        if array is not None:
            # Each is an allocation of the call, and no two are the same.
            number, offset = recording.locate(array) or (None, 0)
            if number is None or number < count or offset or number in layouts:
                return result, None
            layouts[number] = _layout(array)
        numbers.append(number)
    return result, None if recording.is_spoilt else Repeat(recording, count, numbers, layouts)


def _layout(array: Any) -> Layout:
    return tuple(array.shape), tuple(array.strides), array.dtype


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _first(calls: KnownCalls, kind: Any, function: Callable[..., Any], args: Any) -> Any:
    """Make the first call of a kind; keep its :class:`Repeat` or None, and what returns its results."""
    result, repeat = noted(lambda own, seed: function(*own), args, 0)
    make = getattr(result, "_make", tuple) if isinstance(result, tuple) else itemgetter(0)
    calls.keep(kind, (repeat, make))
    return result


def bound(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function of device arrays whose calls repeat the launches of an earlier one on their device.

    The function writes to them.  Its calls have arrays of the same layouts, and its launches do not
    depend on their alignment.
    """
    calls = KnownCalls()

    def launch(*arrays: Any) -> None:
        if thread.recording is not None:
            return function(*arrays)
        known = calls.get(device := current_device())
        if known is None:
            return _first(calls, device, function, arrays)
        if (repeat := known[0]) is None:
            return function(*arrays)
        starts: list[int] = []
        for x in arrays:
            starts.append(x.device_ctypes_pointer.value or 0)  # noqa: PERF401 - without a call
        repeat.arrays(starts, 0) if repeat.scratch else repeat.into(starts, 0, 0)

    return function if driver is None else launch


def repeats(function: _Function) -> _Function:
    """Decorate a function so that its calls repeat the launches of an earlier call of their kind.

    It is a function of device arrays, None, and hashable values that contain no arrays, and returns
    an array, a tuple of arrays and None, or None.  Its launches must depend only on the layouts of
    the arrays and on the other arguments.
    """
    calls = KnownCalls()

    @wraps(function)
    def run(*args: Any) -> Any:
        if thread.recording is not None:
            return function(*args)
        kind = [current_device()]
        starts: list[int] = []
        for arg in args:
            if type(arg) is DeviceArray:
                start = address_of(arg)
                starts.append(start)
                kind += arg.shape, arg.strides, arg.dtype, start % VECTOR
            else:
                kind.append(arg)
        try:
            known = calls.get(key := tuple(kind))
        except TypeError:  # arrays of another kind
            return function(*args)
        if known is None:
            return _first(calls, key, function, args)
        repeat, make = known
        return function(*args) if repeat is None else make(repeat.arrays(starts, 0))

    return function if driver is None else run  # type: ignore[return-value]
