"""Repeat the launches of an earlier call, which a recipe has recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from kernels.cuda.runtime.arrays import DeviceArray, Foreign, Part, Pooled, array_on, pool
from kernels.cuda.runtime.recipe import Launches, Recipe, Seed, written
from kernels.cuda.runtime.recorder import active
from kernels.runtime.targets import BLOCKING, IS_SIMULATOR, current_device

#: Alignment in bytes that vector loads need.
VECTOR = 16
#: Computes results from arrays, which may be None, and a dropout seed.
Run = Callable[[Sequence[Any], int], Sequence[Any]]


class _Operand(Foreign):
    """The memory of an operand of a recorded call."""

    def __init__(self, recipe: Recipe, number: int, array: Any):
        super().__init__(address_of(array), array.gpu_data.size, array)
        self.place = recipe, number

    def view(self, start: int, stop: int | None = None) -> Any:
        """Return the bytes from ``start`` to ``stop``."""
        return Part(self, super().view(start, stop))


def address_of(array: Any) -> int:
    """Return the address of the first element of a device array; 0 for no elements."""
    return int(array.device_ctypes_pointer.value or 0)


class Repeat:
    """Repeat a call with other operands of the same layouts.

    Args:
        run: Runs the call in full.
        places: Indices of the operands that are not None.
        launches: The launches of the call.
        layouts: (shape, strides in bytes, dtype) of each result; None for a result that is not computed.

    Attributes:
        layouts: (shape, strides in bytes, dtype) of each result; None for a result that is not computed.
        scratch: Bytes of memory that a call needs for intermediate values.
        parts: (shape, strides in elements, number of the dtype) of each computed result; None if two
            results share an allocation.
    """

    def __init__(self, run: Run, places: list[int], launches: Launches, layouts: list[Any]):
        self._run, self._places, self._launches, self.layouts = run, places, launches, layouts
        computed = [layout for layout in layouts if layout is not None]
        self._flat = [_flat(*layout) for layout in computed]
        self.scratch = launches.scratch
        self.parts: list[Any] | None = None
        if launches.results == [(number, 0) for number in range(len(computed))]:
            self.parts = [
                (shape, strides, dtype.num)
                for (_, shape, strides), (_, _, dtype) in zip(self._flat, computed, strict=True)
            ]

    def __call__(self, arrays: Sequence[Any], seed: int) -> Sequence[Any]:
        """Return the results for the operands, which may be None."""
        if active() is not None:  # the launches are being recorded for a graph
            return self._run(arrays, seed)
        return self.arrays([address_of(arrays[place]) for place in self._places], seed)

    def at(self, starts: list[int], seed: int) -> list[Any]:
        """Return the memory of each computed result, for operands at these addresses."""
        source, launches = pool(), self._launches
        assert source is not None, "only calls on the pool are repeated"
        kept = [Pooled(source, source.allocate(size), size) for size in launches.sizes]
        starts = [*starts, *[memory.address for memory in kept]]
        scratch = None
        if launches.scratch:
            scratch = source.allocate(launches.scratch)
            first = int(scratch[0])
            starts += [first + start for start in launches.starts]
        try:
            launches.run(starts, seed)
        finally:
            if scratch is not None:
                source.free(scratch)  # in stream order
        return [
            kept[number].view(offset) if offset else kept[number]
            for number, offset in launches.results
        ]

    def into(self, starts: list[int], results: list[int], scratch: int, seed: int) -> None:
        """Launch with memory of the caller, where :attr:`parts` are in allocations of their own.

        Args:
            starts: Addresses of the operands.
            results: Addresses of the computed results.
            scratch: Address of :attr:`scratch` bytes, aligned to 512; any number if there are none.
            seed: Dropout seed.
        """
        parts = [scratch + start for start in self._launches.starts] if scratch else []
        self._launches.run([*starts, *results, *parts], seed)

    def arrays(self, starts: list[int], seed: int) -> list[Any]:
        """Return all results for operands at these addresses; None for those that are not computed."""
        found = iter(self.at(starts, seed))
        return [
            None if layout is None else array_on(next(found), layout) for layout in self.layouts
        ]

    def storages(
        self, starts: list[int], seed: int
    ) -> list[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
        """Return each computed result as a flat array, its shape, and its strides in elements."""
        return [
            (array_on(memory, flat), shape, strides)
            for memory, (flat, shape, strides) in zip(
                self.at(starts, seed), self._flat, strict=True
            )
        ]


def _flat(
    shape: tuple[int, ...], steps: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """Return the layout of an array as one dimension, its shape, and its strides in elements."""
    size = dtype.itemsize
    flat = (math.prod(shape),), (size,), dtype
    return flat, shape, tuple(step // size for step in steps)


def noted(run: Run, arrays: Sequence[Any], seed: int) -> tuple[Sequence[Any], Repeat | None]:
    """Run a call and record it; return its results, and a :class:`Repeat` or None if it cannot be repeated.

    Args:
        run: Runs the call in full.
        arrays: The operands.
        seed: Dropout seed.
    """
    if active() is not None or BLOCKING or pool() is None:
        return run(arrays, seed), None
    places = [place for place, array in enumerate(arrays) if array is not None]
    recipe, named = Recipe(len(places)), [*arrays]
    for number, place in enumerate(places):
        array = arrays[place]
        own = tuple(array.shape), tuple(array.strides), array.dtype
        named[place] = array_on(_Operand(recipe, number, array), own)
    with recipe:
        results = run(named, Seed(seed))
        sources = [None if x is None else recipe.source(x) for x in results]
    if any(x is not None and source is None for x, source in zip(results, sources, strict=True)):
        return results, None
    launches = recipe.finished(sources)
    if launches is None:
        return results, None
    layouts = [None if x is None else (tuple(x.shape), tuple(x.strides), x.dtype) for x in results]
    return results, Repeat(run, places, launches, layouts)


_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Kinds of calls that a function stores, at most; then all are dropped.
MOST_KINDS = 1024
#: The entries of a kind that was called once, and of a kind that cannot be repeated.
_SEEN, _PLAIN = object(), object()


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
        if IS_SIMULATOR or active() is not None or written() is not None:
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
