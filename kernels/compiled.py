"""Compile a Python function for the CPU with numba, once per machine and not once per process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

# A thread that waits must sleep and not spin: on two cores it would take the place of one that works.
# The OpenMP library reads this when numba starts its threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numba
import numpy as np
from numba import types
from numba.core.dispatcher import Dispatcher

#: Floating-point freedoms that let LLVM vectorise a sum and contract a multiply-add.  Infinities and
#: NaNs keep their meaning: a masked score *is* minus infinity.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


def _code_parts(code: CodeType) -> list[object]:
    parts: list[object] = [code.co_code, code.co_names, code.co_varnames, code.co_freevars]
    for const in code.co_consts:
        parts.extend(_code_parts(const) if isinstance(const, CodeType) else [repr(const)])
    return parts


def fingerprint(function: Callable[..., Any]) -> str:
    """Return a hash of a function's code and of everything of ours that it calls.

    Numba's cache looks only at the file in which a function stands.  A student who mends a helper in
    another file would go on running the old one; with this hash the kernel is compiled again.
    """
    seen: set[int] = set()
    parts: list[object] = []
    stack: list[object] = [function]
    while stack:
        item = stack.pop()
        if isinstance(item, Dispatcher):
            item = item.py_func
        if isinstance(item, FunctionType):
            module = item.__module__ or ""
            if id(item) in seen or module.split(".")[0] in ("numba", "numpy", "math"):
                continue
            seen.add(id(item))
            parts.extend(_code_parts(item.__code__))
            called = [item.__globals__[n] for n in item.__code__.co_names if n in item.__globals__]
            stack.extend(called)
            stack.extend(cell.cell_contents for cell in item.__closure__ or ())
        elif isinstance(item, (bool, int, float, str, tuple, frozenset)):
            parts.append(repr(item))
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
            cache_file._source_stamp = fingerprint(target)
        return dispatcher

    return compile_ if function is None else compile_(function)


def compile_signature(dispatcher: Any, signature: Any) -> Any:
    """Add one explicit signature; calls are then served by the signatures added, and by no other.

    Without this, numba would compile a kernel again for each combination of layouts.
    """
    dispatcher.disable_compile(False)
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    return dispatcher


def array_types(dtype: Any) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """Return numba's types, by number of dimensions, of operands and of results.

    Operands may be strided, broadcast or read-only; results are contiguous.
    """
    scalar = numba.from_dtype(np.dtype(dtype))
    return (
        lambda dims: types.Array(scalar, dims, "A", readonly=True),
        lambda dims: types.Array(scalar, dims, "C"),
    )
