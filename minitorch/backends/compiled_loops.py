"""Compile the loops of the fast backend, and keep their machine code on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from numba.extending import register_jitable

from kernels.runtime.jit import njit_cached

from .. import operators


def callable_(fn: Callable[..., float]) -> Callable[..., float]:
    """Let compiled code call a plain function; a dispatcher is returned unchanged."""
    return register_jitable(fn) if isinstance(fn, FunctionType) else fn


#: The modules with the functions that a cache on disk can recognise.
OURS = {operators.__name__, f"{__package__}.more_operators"}


def is_ours(fn: Callable[..., float]) -> bool:
    """Tell whether a cache on disk can recognise a function."""
    return isinstance(fn, FunctionType) and fn.__module__ in OURS


def compiled(kernel: Callable[..., None], fn: Callable[..., float]) -> Any:
    """Compile a loop around ``fn``; keep it on disk if ``fn`` is one of ours."""
    if is_ours(fn):
        # A name of its own for each loop: for the cache file, the debugger and the profiler.
        kernel.__qualname__ = f"{kernel.__name__.strip('_')}_{fn.__name__}"
    return parallel_loop(kernel, cache=is_ours(fn))


def parallel_loop(kernel: Callable[..., None], cache: bool = True) -> Any:
    """Compile a loop that runs in parallel, with diagnostics also when its code comes from disk.

    Args:
        kernel: The loop.
        cache: As for ``njit_cached``.

    Returns:
        A numba dispatcher; see ``njit_cached``.
    """
    loop = njit_cached(kernel, cache=cache, parallel=True)
    loop.parallel_diagnostics = partial(_diagnose, loop)
    return loop


def _diagnose(loop: Any, signature: Any = None, level: int = 1) -> None:
    """Print what numba parallelised; the arguments are those of numba's ``parallel_diagnostics``.

    Numba's cache on disk keeps no diagnostics, so code that was loaded from it is compiled again.
    """
    signatures = loop.signatures if signature is None else [signature]
    if any(loop.overloads[each].metadata is None for each in signatures):
        loop = njit_cached(loop.py_func, cache=False, parallel=True)
        for each in signatures:
            loop.compile(each)
    for each in signatures:
        loop.dispatcher.parallel_diagnostics(each, level)
