"""Compile Python functions for the CPU with numba, and cache them across processes."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from numba.core.types import Type
from numba.np.ufunc.parallel import threading_layer

from kernels.common.arguments import whole
from kernels.runtime.disk_cache import keep_on_disk
from kernels.runtime.numba_patches import call_own_copies

#: How the threads of numba's OpenMP runtime (GCC's; LLVM's or Intel's) wait for the next kernel.  By
#: default they spin so long that they take the cores from other work: with one busy process on the machine
#: a training slowed down to a third.  The user's own setting of any of them takes precedence.
WAITING = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
if not any(name in os.environ for name in (*WAITING, "GOMP_SPINCOUNT")):
    os.environ.update(WAITING)
    with suppress(ImportError):
        import numba.np.ufunc.omppool  # type: ignore[import-not-found]  # GCC's runtime reads it
    del os.environ["OMP_WAIT_POLICY"]  # what processes that this one starts do is not ours

#: fastmath flags that let LLVM vectorise a sum and contract a multiply-add.  Infinities and NaNs keep their
#: meaning, because a masked score is minus infinity.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

#: ``NUMBA_DISABLE_JIT=1``: numba compiles nothing, so that a debugger stops in kernels.
JIT_DISABLED = bool(numba.config.DISABLE_JIT)  # type: ignore[attr-defined]

#: The most threads that numba can start in this process.
NUM_THREADS = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]

#: Number of elements below which a kernel of :class:`BySize` uses one thread: waking the others takes 10
#: microseconds if they spin and 200 if they sleep, as long as the computation.
SERIAL_BELOW = 32768


call_own_copies()

#: Packages that are not part of the fingerprint: numba's own key has the versions of Python and numba.
_OTHERS = {*sys.stdlib_module_names, "numba", "numpy", "ml_dtypes", "llvmlite"}
#: Types whose ``repr`` tells their values apart.
_PLAIN = bool, int, float, str, type, type(None), np.generic, np.dtype


@cache
def _code(code: CodeType) -> str:
    """Describe the code of a function."""
    parts: list[object] = [code.co_code, code.co_names, code.co_varnames, code.co_freevars]
    parts += [_code(x) if isinstance(x, CodeType) else x for x in code.co_consts]
    return repr(parts)


def fingerprint(function: Any, *arguments: Type) -> str:
    """Return a hash of the code and options of a function and of all project functions that it calls.

    Numba's cache checks only the file of the function, so that a change of a helper in another file
    would have no effect; with this hash the kernel is recompiled.  A function that numba replaces
    (``overload``) names its ``implementations``; an intrinsic is hashed by the function that emits
    its instructions; an object by all its attributes, or those that it names in ``made_of``; a
    captured array by its elements. Numba's key has the names of the types of arguments, but not the
    order of the fields of named tuples, so that these types may be given too.
    """
    seen: set[int] = set()
    parts: list[object] = []
    stack: list[Any] = [function, *arguments]
    while stack:
        item = stack.pop()
        if hasattr(item, "targetoptions"):  # a dispatcher of numba or numba.cuda
            # Sorted: the order of a set of strings changes from process to process.
            for name, option in sorted(item.targetoptions.items()):
                parts.append((name, sorted(option) if isinstance(option, set) else repr(option)))
            item = item.py_func
        item = getattr(item, "_defn", item)  # an intrinsic
        kind = type(item)
        if kind is FunctionType:
            package = (item.__module__ or "").partition(".")[0]
            if id(item) in seen or package in _OTHERS:
                continue
            seen.add(id(item))
            # Machine code refers to modules by name: code cached before a move would not load.
            parts += item.__module__, _code(item.__code__)
            names = item.__code__.co_names
            for name in names:
                found = item.__globals__.get(name)
                stack.append(found)
                if (
                    isinstance(found, ModuleType)
                    and found.__name__.partition(".")[0] not in _OTHERS
                ):
                    stack += [getattr(found, other, None) for other in names]
            stack += map(attrgetter("cell_contents"), item.__closure__ or ())
            stack += item.__defaults__ or ()
            stack += getattr(item, "implementations", ())
        elif isinstance(item, (tuple, list)):
            stack += item
        elif isinstance(item, dict):
            stack += item.items()
        elif isinstance(item, np.ndarray):
            parts.append((item.dtype.str, item.shape, item.tobytes()))
        elif isinstance(item, Type):
            parts.append((repr(item), getattr(item, "fields", None)))
        elif isinstance(item, _PLAIN):
            parts.append(repr(item))
        elif kind.__module__.partition(".")[0] not in _OTHERS and id(item) not in seen:
            seen.add(id(item))  # the function that emits an instruction
            own = getattr(item, "__dict__", {})
            for name in getattr(item, "made_of", own):
                stack.append((name, own[name]))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def njit_cached(
    function: Callable[..., Any] | None = None, *, cache: bool = True, **options: Any
) -> Any:
    """Compile a function, also a closure over plain functions and constants, and keep its code on disk.

    ``cache`` is False for a closure over a dispatcher, which would get a new entry in each process.
    Returns a numba dispatcher, wrapped in :class:`Parallel` for ``parallel=True``; the function
    itself if :data:`JIT_DISABLED`; without ``function``, a decorator.
    """

    def compile_(target: Callable[..., Any]) -> Any:
        if JIT_DISABLED:
            return target
        dispatcher: Any = numba.njit(error_model="numpy", **options)(target)
        if cache:
            stamp = fingerprint(dispatcher)
            # Numba's own key has captured dispatchers by a number that differs in each process.
            keep_on_disk(dispatcher, lambda kinds, codegen: (kinds, codegen.magic_tuple(), stamp))
        return Parallel(dispatcher, cache, options) if options.get("parallel") else dispatcher

    return compile_ if function is None else compile_(function)


# -- numba's threads ---------------------------------------------------------------------------------


class _Threads:
    """The state of numba's threads."""

    def __init__(self) -> None:
        #: Whether several callers may use them at once; unknown before the first parallel kernel.
        self.shared = False
        self.lost = False  #: Whether they belong to the parent of this forked process.
        self.turn = threading.RLock()  #: The lock of the current caller, while not shared.
        self.most: int = NUM_THREADS  #: The most threads of a kernel; see :func:`set_num_threads`.

    def after_fork(self) -> None:
        """Record, in a forked child, whether its parent's threads had been started."""
        global_compiler_lock.release()
        self.turn = threading.RLock()  # a thread of the parent may hold the old lock
        self.shared = False
        with suppress(ValueError):  # not started: the child can start its own
            self.lost = bool(threading_layer())


_threads = _Threads()
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    # A child forked while another thread compiles would wait for the compiler's lock forever.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=_threads.after_fork,
    )


def set_num_threads(count: int) -> None:
    """Set the maximum number of threads that each later call on the CPU uses, from any Python thread.

    It starts at the number of cores, or at the environment variable ``NUMBA_NUM_THREADS``, which it
    may not exceed.  Calls on PyTorch's tensors also obey ``torch.set_num_threads``.  No result
    depends on the number of threads.

    Raises:
        TypeError: If ``count`` is not an integer.
        ValueError: If ``count`` is out of range.
    """
    count = whole("count", count, 1)
    if count > NUM_THREADS:
        raise ValueError(
            f"count must be at most {NUM_THREADS}, the number of threads that this process can start, got "
            f"{count}; set the environment variable NUMBA_NUM_THREADS before Python starts"
        )
    _threads.most = count


def get_num_threads() -> int:
    """Return the number of threads that a call on the CPU uses at most; see :func:`set_num_threads`."""
    return min(numba.get_num_threads(), _threads.most)


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Limit the threads of the kernels that the calling Python thread runs within the context."""
    before = numba.get_num_threads()
    numba.set_num_threads(min(count, before))
    try:
        yield
    finally:
        numba.set_num_threads(before)


class Parallel:
    """A kernel whose ``prange`` loops run on numba's threads where possible.

    Numba ends the process in two cases: when a second Python thread uses its ``workqueue`` layer at
    the same time, and when a forked child uses the OpenMP threads of its parent.  Here the second
    caller waits, and the child computes on one thread.  The attributes of the dispatcher are
    available here too.
    """

    def __init__(self, dispatcher: Any, cache: bool, options: dict[str, Any]):
        self.dispatcher = dispatcher
        self._cached, self._options = cache, options

    def __getattr__(self, name: str) -> Any:
        if name == "dispatcher":  # not set yet while a copy is being made
            raise AttributeError(name)
        return getattr(self.dispatcher, name)

    @cached_property
    def serial(self) -> Any:
        """The dispatcher of the same loops on one thread."""
        f: Any = self.dispatcher.py_func
        twin = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
        twin.__qualname__ = f"{f.__qualname__}_serial"  # a file of its own in the cache
        options = {name: value for name, value in self._options.items() if name != "parallel"}
        return njit_cached(twin, cache=self._cached, **options)

    def __call__(self, *args: Any) -> Any:
        """Run the kernel."""
        if _threads.most < NUM_THREADS and _threads.most < numba.get_num_threads():
            with at_most(_threads.most):
                return self(*args)
        if _threads.shared:
            return self.dispatcher(*args)
        if _threads.lost:
            return self.serial(*args)
        with _threads.turn:
            result = self.dispatcher(*args)
            with suppress(ValueError):  # a kernel without a prange loop has started no threads
                _threads.shared = threading_layer() != "workqueue"
        return result


def serial(loop: Any) -> Any:  # beyond module 5
    """Return a kernel of :func:`njit_cached` with its loops on the calling thread."""
    return loop if JIT_DISABLED else loop.serial


class BySize:  # beyond module 5
    """A kernel whose ``prange`` loops are parallel for large operands and serial for small ones.

    The size is that of its first argument.
    """

    def __init__(self, function: Callable[..., Any], **options: Any):
        self._function, self._options = function, options

    @cached_property
    def parallel(self) -> Any:
        """The parallel kernel, for at least ``SERIAL_BELOW`` elements."""
        return njit_cached(self._function, parallel=True, **self._options)

    @cached_property
    def serial(self) -> Any:
        """The serial dispatcher, for fewer elements."""
        return serial(self.parallel)

    def __call__(self, *args: Any) -> None:
        """Run the parallel or the serial kernel."""
        (self.serial if args[0].size < SERIAL_BELOW else self.parallel)(*args)


def by_size(**options: Any) -> Callable[[Callable[..., Any]], BySize]:  # beyond module 5
    """Compile the decorated kernel as a :class:`BySize`, with options of ``numba.njit``."""
    return lambda function: BySize(function, **options)


def compile_signature(dispatcher: Any, signature: Any) -> Any:  # beyond module 5
    """Add an explicit signature; calls may then use only the added signatures.

    Without this, numba would recompile a kernel for each combination of layouts.
    """
    with global_compiler_lock:  # else another thread could disable it between these two
        dispatcher.disable_compile(False)
        dispatcher.compile(signature)
        dispatcher.disable_compile()
    return dispatcher
