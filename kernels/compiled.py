"""Compile a Python function for the CPU with numba, once per machine and not once per process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
from numba.core.types import Type

#: How the threads of numba's OpenMP runtime (GCC's; LLVM's or Intel's) wait for the next kernel.  By
#: themselves they spin for so long that they take the cores from whatever else runs: with one busy
#: process beside it a training slowed down to a third.  A user's own setting of any of them stays.
WAITING = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
if not any(name in os.environ for name in (*WAITING, "GOMP_SPINCOUNT")):
    os.environ.update(WAITING)  # before numba loads the runtime, at its first parallel kernel

#: Floating-point freedoms that let LLVM vectorise a sum and contract a multiply-add.  Infinities and
#: NaNs keep their meaning: a masked score *is* minus infinity.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

#: Elements for which a kernel of :class:`BySize` wakes no other thread: that takes 10 microseconds if they
#: wait in vain already and 200 if they sleep, and so long is what these elements take.
SERIAL_BELOW = 32768


def _code_parts(code: CodeType) -> list[object]:
    parts: list[object] = [code.co_code, code.co_names, code.co_varnames, code.co_freevars]
    for const in code.co_consts:
        parts.extend(_code_parts(const) if isinstance(const, CodeType) else [repr(const)])
    return parts


def _ours(module: str | None) -> bool:
    return (module or "").split(".")[0] not in ("numba", "numpy", "math", "builtins", "llvmlite")


def _named(function: FunctionType) -> list[object]:
    """Return what a function's code names: globals, and what it takes from a module by a dot."""
    names = function.__code__.co_names
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [item for item in found if isinstance(item, ModuleType) and _ours(item.__name__)]
    return found + [getattr(m, name) for m in modules for name in names if hasattr(m, name)]


def fingerprint(function: Callable[..., Any]) -> str:
    """Return a hash of a function's code and options, and of everything of ours that it calls.

    Numba's cache looks only at the file in which a function stands.  A student who mends a helper in
    another file would go on running the old one; with this hash the kernel is compiled again.  A
    function that numba replaces by another (``overload``) names its ``implementations``; an intrinsic
    is the function that emits its instructions.
    """
    seen: set[int] = set()
    parts: list[object] = []
    stack: list[Any] = [function]
    while stack:
        item = stack.pop()
        if hasattr(item, "targetoptions"):  # a dispatcher, of the CPU's or of CUDA's package
            # Sorted: the order of a set of words changes from process to process.
            for name, option in sorted(item.targetoptions.items()):
                parts.append((name, sorted(option) if isinstance(option, set) else repr(option)))
            item = item.py_func
        item = getattr(item, "_defn", item)  # of an intrinsic
        if isinstance(item, FunctionType):
            if id(item) in seen or not _ours(item.__module__):
                continue
            seen.add(id(item))
            parts.extend(_code_parts(item.__code__))
            stack.extend(_named(item))
            stack.extend(cell.cell_contents for cell in item.__closure__ or ())
            stack.extend(item.__defaults__ or ())
            stack.extend(getattr(item, "implementations", ()))
        elif isinstance(item, (tuple, list)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.items())
        elif isinstance(item, (bool, int, float, str, np.generic, np.dtype, Type)):
            parts.append(repr(item))
        elif _ours(type(item).__module__) and id(item) not in seen:  # what emits an instruction
            seen.add(id(item))
            stack.extend(getattr(item, "__dict__", {}).items())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def njit_cached(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile ``function`` with ``numba.njit`` and keep the machine code on disk.

    Args:
        function: A plain function, or a closure over plain functions and constants.  A closure over
            a dispatcher would get a new cache entry in each process.
        options: Passed on to ``numba.njit``.

    Returns:
        A numba dispatcher; without ``function``, a decorator.
    """

    def compile_(target: Callable[..., Any]) -> Any:
        dispatcher: Any = numba.njit(cache=True, error_model="numpy", **options)(target)
        cache_file = getattr(dispatcher._cache, "_cache_file", None)
        if cache_file is not None:  # None: no folder for a cache is writable
            cache_file._source_stamp = fingerprint(dispatcher)
        return dispatcher

    return compile_ if function is None else compile_(function)


class BySize:
    """A kernel compiled twice: its ``prange`` loops are parallel for large operands, serial for small ones.

    Args:
        function: A kernel; the size of its first argument decides.
        options: Of ``numba.njit``.
    """

    def __init__(self, function: Callable[..., Any], **options: Any):
        self._function, self._options = function, options

    @cached_property
    def parallel(self) -> Any:
        """The dispatcher for ``SERIAL_BELOW`` elements and more."""
        return njit_cached(self._function, parallel=True, **self._options)

    @cached_property
    def serial(self) -> Any:
        """The dispatcher for fewer."""
        f: Any = self._function
        twin = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
        twin.__qualname__ = f"{f.__qualname__}_serial"  # a file of its own in the cache
        return njit_cached(twin, **self._options)

    def __call__(self, *args: Any) -> None:
        """Run the one or the other."""
        (self.serial if args[0].size < SERIAL_BELOW else self.parallel)(*args)


def by_size(**options: Any) -> Callable[[Callable[..., Any]], BySize]:
    """Compile the decorated kernel as :class:`BySize` says.

    Args:
        options: Of ``numba.njit``.
    """
    return lambda function: BySize(function, **options)


def compile_signature(dispatcher: Any, signature: Any) -> Any:
    """Add one explicit signature; calls are then served by the signatures added, and by no other.

    Without this, numba would compile a kernel again for each combination of layouts.
    """
    dispatcher.disable_compile(False)
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    return dispatcher
