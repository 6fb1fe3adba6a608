"""Calls that repeat the launches of an earlier call of their kind, which a recipe has noted."""

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

#: Bytes that vector loads want an operand to begin at a multiple of.
VECTOR = 16
#: Computes results of arrays, None among them, and of a dropout seed.
Run = Callable[[Sequence[Any], int], Sequence[Any]]


class _Operand(Foreign):
    """Memory of an operand of a call whose launches are noted."""

    def __init__(self, recipe: Recipe, number: int, array: Any):
        super().__init__(address_of(array), array.gpu_data.size, array)
        self.place = recipe, number

    def view(self, start: int, stop: int | None = None) -> Any:
        """Return a part, from one byte to another."""
        return Part(self, super().view(start, stop))


def address_of(array: Any) -> int:
    """Return the address of the first element of a device array; 0 for no elements."""
    return int(array.device_ctypes_pointer.value or 0)


class Repeat:
    """Repeats a call with other operands that lie as those of the first.

    Args:
        run: Computes the call in full.
        places: Those of the operands that are no None.
        launches: Of the call.
        layouts: (shape, strides in bytes, dtype) of each result, None for those that it has not.

    Attributes:
        layouts: As given.
    """

    def __init__(self, run: Run, places: list[int], launches: Launches, layouts: list[Any]):
        self._run, self._places, self._launches, self.layouts = run, places, launches, layouts
        self._flat = [_flat(*layout) for layout in layouts if layout is not None]

    def __call__(self, arrays: Sequence[Any], seed: int) -> Sequence[Any]:
        """Return the results for arrays, None among them."""
        if active() is not None:  # the launches are noted for a graph
            return self._run(arrays, seed)
        return self.arrays([address_of(arrays[place]) for place in self._places], seed)

    def at(self, starts: list[int], seed: int) -> list[Any]:
        """Return the memory of each result that there is, for operands at these addresses."""
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

    def arrays(self, starts: list[int], seed: int) -> list[Any]:
        """Return all results for operands at these addresses, None for those that there are not."""
        found = iter(self.at(starts, seed))
        return [
            None if layout is None else array_on(next(found), layout) for layout in self.layouts
        ]

    def storages(
        self, starts: list[int], seed: int
    ) -> list[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
        """Return the results that there are: a flat array, its shape, and its strides in elements."""
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
    """Run a call, and return its results and what repeats it, or None if nothing can.

    Args:
        run: Computes the call in full.
        arrays: Its operands.
        seed: Of dropout.
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
#: Kinds of calls that a function remembers; beyond them it begins again.
MOST_KINDS = 1024
#: Of a kind that has come once, and of one that cannot be repeated.
_SEEN, _PLAIN = object(), object()


def repeats(function: _Function) -> _Function:
    """Let later calls of a function repeat the launches of an earlier one.

    The second call of a kind is noted: a kind that comes once costs a look-up.

    Args:
        function: Takes device arrays, None and values that can be hashed, in which there are no arrays;
            returns an array, a tuple of arrays and None, or None.  What it launches depends on the layouts
            of the arrays and on the other arguments alone.
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
        places = [place for place, arg in enumerate(args) if type(arg) is DeviceArray]
        results: list[Any] = []

        def in_full(arrays: Sequence[Any], seed: int) -> Sequence[Any]:
            given = [*args]
            for place, array in zip(places, arrays, strict=True):
                given[place] = array
            results.append(function(*given))
            return _as_list(results[-1])

        _, repeat = noted(in_full, [args[place] for place in places], 0)
        (result,) = results
        kinds[own] = _PLAIN if repeat is None else (repeat, _maker(result))
        return result

    run.cache_clear = kinds.clear  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def _as_list(result: Any) -> list[Any]:
    """Return the arrays of a result, None among them."""
    if result is None:
        return []
    return [*result] if isinstance(result, tuple) else [result]


def _maker(result: Any) -> Callable[[list[Any]], Any]:
    """Return what makes a result like this one of its arrays."""
    if result is None:
        return lambda arrays: None
    if not isinstance(result, tuple):
        return lambda arrays: arrays[0]
    return getattr(result, "_make", tuple)
