"""Plain-Python versions of the intrinsics that kernels use, for ``NUMBA_DISABLE_JIT=1`` and a debugger.

With that variable set numba compiles nothing, and a breakpoint stops in a kernel.  An intrinsic emits
instructions and cannot run as Python; :func:`intrinsic` puts a Python function in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import extending

from kernels.runtime.jit import JIT_DISABLED

#: The functions by the number that :func:`address_of` gave them; 0 means "no function".
_functions: list[Callable[..., None] | None] = [None]


def intrinsic(plain: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return ``numba.extending.intrinsic`` as a decorator, or one that returns ``plain``.

    ``plain`` is a Python function that computes the same.
    """
    return lambda emit: plain if JIT_DISABLED else extending.intrinsic(emit)


def instead(plain: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a decorator that keeps a compiled function, or returns ``plain`` in its place."""
    return lambda compiled: plain if JIT_DISABLED else compiled


class Record:
    """A NumPy record with its fields as attributes, including ``shape``, which NumPy itself uses."""

    def __init__(self, record: Any):
        self._record = record

    def __getattr__(self, name: str) -> Any:
        value = self._record[name]
        return Record(value) if isinstance(value, np.void) else value


def address_of(function: Callable[..., None]) -> int:
    """Return a number by which :func:`call` finds a function."""
    _functions.append(function)
    return len(_functions) - 1


def call(address: int, args: tuple[Any, ...]) -> None:
    """Call the function that :func:`address_of` gave this number."""
    function = _functions[address]
    assert function is not None
    with np.errstate(all="ignore"):  # machine code does not warn either: words of dropout overflow
        function(*args)


def take(counter: Any) -> int:
    """Return the number in a one-element array and count it up."""
    counter[0] += 1
    return counter[0] - 1


def array_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
    """Return an array at an address."""
    memory = SimpleNamespace(
        __array_interface__={
            "data": (int(address), False), "shape": tuple(map(int, shape)),
            "strides": tuple(map(int, strides)), "typestr": np.dtype(dtype).str, "version": 3,
        }
    )  # fmt: skip
    return np.asarray(memory)


def contiguous(array: Any) -> Any:
    """Return the array unchanged; only the compiler needs to know that it is contiguous."""
    return array


def multiply_add(x: Any, y: Any, z: Any) -> Any:
    """Return x y + z."""
    return x * y + z


def product(c: Any, a: Any, b: Any, add: int) -> None:
    """Add A·B to C, or write it there."""
    c[:] = c + a @ b if add else a @ b
