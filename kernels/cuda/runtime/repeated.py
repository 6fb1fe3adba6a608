"""Repeat the launches of an earlier call with other operands.

A rung is written plainly: it allocates memory, chooses kernels and launches them.  The first call of a kind
is recorded; later calls allocate memory, write addresses into the packed arguments and launch, and nothing
is chosen or checked again.  Everything that a call does must therefore depend on its kind alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from itertools import accumulate
from threading import Lock
from typing import Any, TypeVar

from kernels.common.geometry import PLAIN
from kernels.cuda.runtime.arrays import DeviceArray, Foreign, Pooled, array_on, pool
from kernels.cuda.runtime.recorder import Origin, Recording, Seed, active
from kernels.runtime.cuda_errors import LAUNCHED
from kernels.runtime.targets import BLOCKING, IS_SIMULATOR, current_device

#: Alignment in bytes that vector loads need, and that of the parts of the scratch memory.
VECTOR, ALIGNMENT = 16, 512
#: Mask of the eight bytes of a packed argument.
ALL_BITS = 2**64 - 1
#: Tensor maps that are kept for one operand of a launch, at most.
MOST_MAPS = 256
#: Shape, strides in bytes and dtype of an array.
Layout = tuple[tuple[int, ...], tuple[int, ...], Any]
#: Computes results from arrays, which may be None, and a dropout seed.
Run = Callable[[Sequence[Any], int], Sequence[Any]]


def address_of(array: Any) -> int:
    """Return the address of the first element of a device array; 0 for no elements."""
    return int(array.device_ctypes_pointer.value or 0)


class Repeat:
    """Repeat a call with other operands of the same layouts.

    Each result has its own allocation; all other memory of the call is one allocation.

    Args:
        run: Runs the call in full.
        places: Indices of the operands that are not None.
        recording: The recorded call.
        numbers: The memory of each result in the recording; None for a result that is not computed.
        layouts: (shape, strides in bytes, dtype) of each such memory, which is one result.

    Attributes:
        scratch: Bytes of memory that a call needs for intermediate values.
        parts: (shape, strides in elements, number of the dtype) of each computed result.
    """

    def __init__(
        self,
        run: Run,
        places: list[int],
        recording: Recording,
        numbers: list[int | None],
        layouts: dict[int, Layout],
    ):
        self._run, self._places, self._lock = run, places, Lock()
        sizes, self._kept = recording.sizes, recording.kept
        self._sizes, self._layouts = [sizes[number] for number in layouts], [*layouts.values()]
        self.parts = [
            (shape, tuple(step // dtype.itemsize for step in steps), dtype.num)
            for shape, steps, dtype in self._layouts
        ]
        self._flat: list[Layout] = [
            ((math.prod(shape),), (dtype.itemsize,), dtype) for shape, _, dtype in self._layouts
        ]
        others = [n for n in range(len(places), len(sizes)) if n not in layouts]
        rooms = [PLAIN.ceil_div(sizes[n], ALIGNMENT) * ALIGNMENT for n in others]
        *self._offsets, self.scratch = accumulate(rooms, initial=0)
        # Addresses are given in this order.
        place = {n: at for at, n in enumerate([*range(len(places)), *layouts, *others])}
        self._order = [None if n is None else place[n] - len(places) for n in numbers]
        self._steps = [
            (
                one.launcher,
                one.launcher.function(),
                one.sizes,
                one.buffer.words,
                [(w, place[x.number], x.offset) for w, x in one.addresses if not x.remake],
                [(w, place[x.number], x.offset, _maps(x)) for w, x in one.addresses if x.remake],
                [word for word, _ in one.numbers],
                one.buffer,  # the owner of the words
            )
            for one in recording.launches
        ]

    def __call__(self, arrays: Sequence[Any], seed: int) -> Sequence[Any]:
        """Return the results for the operands, which may be None."""
        if active() is not None:  # the launches are being recorded for a graph
            return self._run(arrays, seed)
        return self.arrays([address_of(arrays[place]) for place in self._places], seed)

    def into(self, starts: list[int], results: list[int], scratch: int, seed: int) -> None:
        """Launch with memory of the caller.

        Args:
            starts: Addresses of the operands.
            results: Addresses of memory for :attr:`parts`.
            scratch: Address of :attr:`scratch` bytes, aligned to 512; any number if there are none.
            seed: Dropout seed, a signed 64-bit number.
        """
        starts = [*starts, *results, *[scratch + offset for offset in self._offsets]]
        with self._lock:
            for launcher, function, sizes, words, addresses, maps, seeds, _ in self._steps:
                for word, number, offset in addresses:
                    words[word] = starts[number] + offset
                for word, number, offset, made in maps:
                    words[word] = made(starts[number] + offset)[1]
                for word in seeds:
                    words[word] = seed & ALL_BITS
                (error,) = launcher.enqueue(function, *sizes)
                if error:  # success is 0
                    launcher.mend(error, sizes)
                LAUNCHED.append(launcher.name)

    def at(self, starts: list[int], seed: int) -> list[Any]:
        """Return the memory of each of the :attr:`parts`, for operands at these addresses."""
        source = pool()
        assert source is not None, "only calls on the pool are repeated"
        made = [Pooled(source, source.allocate(size), size) for size in self._sizes]
        scratch = source.allocate(self.scratch) if self.scratch else None
        try:
            self.into(starts, [x.address for x in made], scratch.start if scratch else 0, seed)
        finally:
            if scratch is not None:
                source.free(scratch)  # in stream order
        return made

    def arrays(self, starts: list[int], seed: int) -> list[Any]:
        """Return all results for operands at these addresses; None for those that are not computed."""
        return self.ordered(list(map(array_on, self.at(starts, seed), self._layouts)))

    def ordered(self, made: list[Any]) -> list[Any]:
        """Return all results, given an array for each of the :attr:`parts`."""
        return [None if place is None else made[place] for place in self._order]

    def storages(
        self, starts: list[int], seed: int
    ) -> list[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
        """Return each computed result as a flat array, its shape, and its strides in elements."""
        return [
            (array_on(memory, flat), shape, strides)
            for memory, flat, (shape, strides, _) in zip(
                self.at(starts, seed), self._flat, self.parts, strict=True
            )
        ]


def _maps(origin: Origin) -> Callable[[int], tuple[Any, int]]:
    """Return a function of an address, which returns the tensor map there and the map's own address."""
    remake: Any = origin.remake

    @lru_cache(MOST_MAPS)
    def made(address: int) -> tuple[Any, int]:
        found = remake(address)
        return found, address_of(found)

    return made


def noted(run: Run, arrays: Sequence[Any], seed: int) -> tuple[Sequence[Any], Repeat | None]:
    """Run a call and record it; return its results, and a :class:`Repeat` or None if it cannot be repeated.

    Args:
        run: Runs the call in full.
        arrays: The operands.
        seed: Dropout seed.
    """
    if active() is not None or BLOCKING or (source := pool()) is None:
        return run(arrays, seed), None
    places = [place for place, array in enumerate(arrays) if array is not None]
    recording, named = Recording(source), [*arrays]
    for place in places:
        array = arrays[place]
        memory = Foreign(address_of(array), array.gpu_data.size, array)
        recording.took(memory, memory.size)
        named[place] = array_on(memory, _layout(array))
    with recording:
        results = run(named, Seed(seed))
        origins = [None if x is None else recording.origin(x) for x in results]
    numbers, layouts = list[int | None](), dict[int, Layout]()
    for array, origin in zip(results, origins, strict=True):
        if array is not None:
            # Each is an allocation of the call, which two results may share if they are the same.
            if origin is None or origin.number < len(places) or origin.offset:
                return results, None
            if layouts.setdefault(origin.number, _layout(array)) != _layout(array):
                return results, None
        numbers.append(None if origin is None else origin.number)
    if recording.is_spoilt:
        return results, None
    return results, Repeat(run, places, recording, numbers, layouts)


def _layout(array: Any) -> Layout:
    return tuple(array.shape), tuple(array.strides), array.dtype


_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Kinds of calls that a function stores, at most; then all are dropped.
MOST_KINDS = 1024
#: The entries of a kind that was called once, and of a kind that cannot be repeated.
_SEEN, _PLAIN = object(), object()


def bound(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function whose calls repeat the launches of the first one on their device.

    Args:
        function: A function of device arrays, which it writes to.  Its calls have arrays of the same
            layouts, and its launches do not depend on their alignment.
    """
    known: dict[int, Any] = {}

    def launch(*arrays: Any) -> None:
        repeat = None if active() is not None else known.get(current_device(), _SEEN)
        if repeat is None:
            function(*arrays)
        elif repeat is _SEEN:
            _, known[current_device()] = noted(lambda own, _: function(*own) or (), arrays, 0)
        else:
            starts = [address_of(x) for x in arrays]
            repeat.at(starts, 0) if repeat.scratch else repeat.into(starts, [], 0, 0)

    return function if IS_SIMULATOR else launch


def repeats(function: _Function) -> _Function:
    """Decorate a function so that its calls repeat the launches of an earlier call of their kind.

    The second call of a kind is recorded, so a kind that is called once costs only a look-up.

    Args:
        function: A function of device arrays, None, and hashable values that contain no arrays.  It returns
            an array, a tuple of arrays and None, or None.  Its launches must depend only on the layouts of
            the arrays and on the other arguments.
    """
    kinds: dict[Any, Any] = {}

    @wraps(function)
    def run(*args: Any) -> Any:
        if IS_SIMULATOR or active() is not None:
            return function(*args)
        kind, starts = [current_device()], list[int]()
        for arg in args:
            if type(arg) is DeviceArray:
                start = address_of(arg)
                starts.append(start)
                kind += arg.shape, arg.strides, arg.dtype, start % VECTOR
            else:
                kind.append(arg)
        own = tuple(kind)
        try:
            known = kinds.get(own)
        except TypeError:  # arrays of another kind
            return function(*args)
        if type(known) is tuple:
            repeat, make = known
            return make(repeat.arrays(starts, 0))
        if known is None:
            if len(kinds) >= MOST_KINDS:
                kinds.clear()
            kinds[own] = _SEEN
        if known is not _SEEN:
            return function(*args)
        return note(own, args)

    def note(own: Any, args: tuple[Any, ...]) -> Any:
        # What is kept from this call must not hold its arrays.
        places = [place for place, arg in enumerate(args) if type(arg) is DeviceArray]
        others = [None if type(arg) is DeviceArray else arg for arg in args]
        makers: list[Callable[[list[Any]], Any]] = []

        def in_full(arrays: Sequence[Any], seed: int) -> Sequence[Any]:
            given = [*others]
            for place, array in zip(places, arrays, strict=True):
                given[place] = array
            result = function(*given)
            if not makers:
                makers.append(_maker(result))
            return _as_list(result)

        results, repeat = noted(in_full, [args[place] for place in places], 0)
        (make,) = makers
        kinds[own] = _PLAIN if repeat is None else (repeat, make)
        return make([*results])

    run.cache_clear = kinds.clear  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def _as_list(result: Any) -> list[Any]:
    """Return the arrays of a result as a list."""
    if result is None:
        return []
    return [*result] if isinstance(result, tuple) else [result]


def _maker(result: Any) -> Callable[[list[Any]], Any]:
    """Return a function that makes a result of the same form from its arrays."""
    if result is None:
        return lambda arrays: None
    if not isinstance(result, tuple):
        return lambda arrays: arrays[0]
    return getattr(result, "_make", tuple)
