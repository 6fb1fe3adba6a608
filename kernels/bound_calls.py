"""The memory of calls: an attention call with a known key runs without being checked or planned again.

The key of a call consists of the layouts of its arrays, its options with their types, what it computes, and
its device.  The first call with a key runs in full and leaves a bound call (``launch.BoundCall``).  Later
ones only allocate results, write addresses and the dropout seed into prepared arguments, and run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_char
from os import environ
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.runtime import recorder
from kernels.cuda.runtime.repeated import VECTOR, address_of
from kernels.operand_types import DESCRIBE, read
from kernels.problem.operands import Operands
from kernels.problem.option_values import check_seed, check_slopes
from kernels.problem.options import ARRAY_ORDER, ARRAYS, Options
from kernels.problem.rungs import RUNG_VARIABLE
from kernels.runtime import targets
from kernels.runtime.known_calls import KnownCalls
from kernels.runtime.memory import Bind, start_of
from kernels.scores.mods import KEPT, with_kept_mods

#: The bound calls by key.
_calls = KnownCalls()


class CallLookup(NamedTuple):
    """The key and the arrays of an attention call, with the bound call that was found for the key."""

    key: Any  #: The key.
    arrays: Sequence[Any]  #: Its arrays, in the order of ``Operands``.
    starts: list[int]  #: Their addresses.
    seed: int  #: The option ``seed``; 0 if it is not given.
    on_host: bool  #: Whether all of them are on the host.
    call: Any  #: The bound call, or None for the first call with this key.

    def keep(self, call: Any, starts: Sequence[int]) -> None:
        """Keep the bound call of this key, which has run with arrays at these addresses."""
        call.reads_given = call.repeat is not None and starts == self.starts
        _calls.keep(self.key, call)


def arrays_of(operands: Operands) -> tuple[list[int], list[Any]]:
    """Return the addresses of a call's arrays, and the arrays."""
    named = operands._asdict().items()
    arrays = [x for name, x in named if x is not None and name != "mask_batch"]
    return [(start_of if isinstance(x, np.ndarray) else address_of)(x) for x in arrays], arrays


def find(
    operands: Sequence[Any],
    options: Options,
    *rest: Any,
    make: Any = None,
    results: Sequence[Any] = (),
) -> CallLookup | None:
    """Look up a call of q, k and v, arrays of a type in :data:`DESCRIBE`; None if it has to run in full.

    ``rest`` are other values that the call depends on, of types that tell equal values apart, or
    tuples. ``make`` builds the problem; it may have an attribute ``key`` to be looked up by.
    ``results`` are the operands of a backward pass after those of the forward pass.
    """
    given: Any = options
    seed, arrays, all_on_host = 0, operands, True
    starts: list[int] = []  # list[int]() takes ten times as long
    try:
        key = [environ.get(RUNG_VARIABLE), rest, getattr(make, "key", make)]
        if given and not ARRAYS.isdisjoint(given):
            named = {name: given[name] for name in ARRAY_ORDER if given.get(name) is not None}
            given = {name: x for name, x in given.items() if name not in ARRAYS}
            arrays = *operands, *named.values()
            key += named
        for array in (*arrays, *results) if results else arrays:
            layout, place = DESCRIBE[type(array)](array)
            if isinstance(place, np.ndarray):
                try:  # as ``start_of`` does, without a call
                    start = addressof(c_char.from_buffer(place))  # type: ignore[arg-type]
                except (BufferError, TypeError, ValueError):
                    start = place.ctypes.data
                on_host, unit = True, place.itemsize
            elif type(place) is tuple:
                start, unit, on_host = place
            else:
                start, unit, on_host = place.device_ctypes_pointer.value or 0, VECTOR, False
            key += layout, start % unit, on_host
            all_on_host &= on_host
            starts.append(start)
        if not all_on_host:
            if recorder.thread.recording is not None:  # launches are being recorded for a graph
                return None
            if targets.has_several_devices():
                key.append(targets.current_device())
        for value in rest:
            if isinstance(value, tuple):
                key += map(type, value)  # because True == 1 == 1.0
        if given:
            if not KEPT.isdisjoint(given):
                given = with_kept_mods(given, options.get("score_table"))
            if (drawn := given.get("seed")) is not None:
                given, seed = {**given, "seed": None}, check_seed(drawn)
                key.append(type(drawn))
            key += given.items()
            key += map(type, given.values())
            if (window := given.get("window_size")) is not None:
                key += map(type, window)
        call = _calls.get(own := tuple(key))
        if call is not None and call.problem.slopes and "alibi_slopes" in options:
            check_slopes(read(options["alibi_slopes"]))
        return CallLookup(own, (*arrays, *results), starts, seed, all_on_host, call)
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        return None  # an unknown type or a wrong value: the full call raises the error


class BoundLoops:
    """The loops of a call on the CPU, to run on other arrays of the same layouts.

    ``bind`` is what the rung returned, ``copies`` the index of each operand that is converted or
    copied with the function that does this, and ``written`` the arrays that the rung wrote, by name.
    ``finish`` returns the results from these; None if they are the results.
    """

    def __init__(
        self,
        bind: Bind,
        names: Sequence[str],
        copies: Sequence[tuple[int, Callable[[Any], Any]]],
        written: Mapping[str, Any],
        finish: Callable[..., Sequence[Any]] | None,
    ):
        self._run, self._copies, self._finish = bind((*names, *written)), copies, finish
        own = [*written.values()]
        self._made = [(x.shape if x.flags.c_contiguous else x.size, x.dtype) for x in own]
        is_permuted = not all(x.flags.c_contiguous for x in own)
        self._layouts = [(x.shape, x.strides) for x in own] if is_permuted else None

    def arrays(
        self, starts: Sequence[int], seed: int, arrays: Sequence[Any]
    ) -> Sequence[Any] | None:
        """Return the results for operands at these addresses; None if the call has to run in full."""
        found: list[Any] = []
        kept: list[Any] = []
        starts = [*starts]
        for place, copy in self._copies:
            kept.append(copied := copy(read(arrays[place])))
            starts[place] = start_of(copied)
        for shape, dtype in self._made:
            array: Any = np.empty(shape, dtype)
            found.append(array)
            starts.append(addressof(c_char.from_buffer(array)) if array.size else 0)
        if not self._run(starts, seed, found, lambda at: read(arrays[at])):
            return None
        if self._layouts is not None:
            layouts = zip(found, self._layouts, strict=True)
            found = [np.ndarray(shape, x.dtype, x, 0, steps) for x, (shape, steps) in layouts]
        return found if self._finish is None else self._finish(*found)
