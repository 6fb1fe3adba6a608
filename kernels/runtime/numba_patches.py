"""Every change that this project makes to numba itself, with its reason and its measured gain.

A change is made only to the versions in :data:`KNOWN`, for which it was written; other versions run as they
are.  Gains were measured with numba 0.68.1 and numba-cuda 0.30.4.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager  # beyond module 5
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace  # beyond module 4
from typing import Any

import numpy as np
from numba.core.codegen import CPUCodeLibrary

#: The versions that the changes are for: from the first up to, but excluding, the second.
KNOWN = {"numba": ((0, 61), (0, 69)), "numba-cuda": ((0, 30), (0, 31))}


@cache
def version_of(package: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def is_known(package: str) -> bool:
    """Tell whether a package is installed in a version that the changes are for."""
    first, end = KNOWN[package]
    own = version_of(package)
    return bool(own) and first <= tuple(map(int, own.split(".")[:2])) < end


def provider() -> str:
    """Return the package that provides ``numba.cuda``."""
    return "numba-cuda" if version_of("numba-cuda") else "numba"


def provide_row_stack() -> None:
    """Give NumPy 2.5 the name ``row_stack`` again, which numba-cuda reads when it is imported.

    Gain: without it, numba-cuda 0.30 cannot be imported.
    """
    if not hasattr(np, "row_stack"):
        # ruff's own fix for NPY201 turns this line into np.vstack = np.vstack, which does nothing.
        np.row_stack = np.vstack  # type: ignore[attr-defined]  # noqa: NPY201


def call_own_copies() -> None:
    """Make compiled functions for the CPU call their own copies of helpers and parallel loops.

    Numba does not define which copy is called.  The process that compiles also has the separately compiled
    helper, which LLVM may have optimised differently, and a process that loads the code from disk does not.

    Gain: without it, the first run on a machine has other last bits than later ones (in softmax and GELU).
    """
    optimize: Any = CPUCodeLibrary._optimize_final_module

    def optimize_own(library: Any) -> None:
        for function in library._final_module.functions:
            is_copy = not function.is_declaration and function.linkage.name == "linkonce_odr"
            if is_copy and not function.name.startswith("NRT_"):  # numba's own, which exist once
                function.linkage = "internal"
        optimize(library)

    if is_known("numba"):
        CPUCodeLibrary._optimize_final_module = optimize_own  # type: ignore[method-assign,assignment]


def keep_files(dispatcher: Any, index_key: Callable[..., Any], files: Callable[..., Any]) -> None:
    """Make the cache of a dispatcher, which is enabled, use other keys and files than numba's.

    Gain: numba's keys miss the functions that a kernel calls, and it runs any pickle that lies there.

    ``index_key`` returns the key of an entry for a signature and a code generator, and ``files`` what
    loads and saves entries, given numba's files and the beginning of their names.
    """
    own = dispatcher._cache
    own._index_key = index_key
    own._cache_file = files(own._cache_file, own._impl.filename_base)


def share_copies(cuda: Any) -> None:  # beyond module 4
    """Make the inliner of numba-cuda copy the variables of a function once, and not for each of its blocks.

    Each copy of a block otherwise includes all variables of the function.

    Gain: kernels compile to PTX in less time, flash2_mma 5 % and flash3_wgmma 43 %, with the same
    code.
    """
    scope: Any = None
    memo: dict[int, Any] = {}

    def deepcopy(x: Any, own: dict[int, Any] | None = None) -> Any:
        nonlocal scope, memo
        if own is not None or not isinstance(x, cuda.core.ir.Block):
            return copy.deepcopy(x, own)
        if x.scope is not scope or id(x) in memo:  # another function, or it again
            scope, memo = x.scope, {}
        return copy.deepcopy(x, memo)

    if is_known("numba-cuda") and hasattr(cuda, "core"):
        replaced = {**vars(copy), "deepcopy": deepcopy}
        cuda.core.inline_closurecall.copy = SimpleNamespace(**replaced)


def find_live_variables_in_bits(cuda: Any) -> None:  # beyond module 4
    """Make numba-cuda find live variables with whole numbers, a bit for each variable, and not with sets.

    Gain: kernels compile to PTX in less time, flash2 10 % and flash3_wgmma 10 to 20 %, with the same code.
    """

    def live_map(flow: Any, blocks: Any, uses: Any, definitions: Any) -> dict[int, set[str]]:
        bits: dict[str, int] = {}

        def number(names: Any) -> int:
            return sum(bits.setdefault(name, 1 << len(bits)) for name in names)

        def names(number: int) -> Iterator[str]:
            while number:
                last = number.bit_length() - 1
                yield every[last]
                number ^= 1 << last

        used, own = ({at: number(x) for at, x in each.items()} for each in (uses, definitions))
        reached, live, every = dict.fromkeys(blocks, 0), dict(used), list(bits)
        before: Any = None
        while before != reached:  # by definitions, along the edges
            before = dict(reached)
            for at in own:
                reached[at] |= own[at] | used[at]
                for after, _ in flow.successors(at):
                    reached[after] |= reached[at]
        while before != live:  # against them
            before = dict(live)
            for at in live:
                for source, _ in flow.predecessors(at):
                    live[source] |= live[at] & reached[source] & ~own[source]
        return {at: {*names(found)} for at, found in live.items()}

    if is_known("numba-cuda") and hasattr(cuda, "core"):
        cuda.core.analysis.compute_live_map = live_map


#: Functions of the driver by which numba copies, allocates and waits.
_NUMBAS = (  # beyond module 5
    "cuMemAlloc", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync", "cuMemsetD8", "cuMemsetD8Async", "cuCtxSynchronize",
    "cuStreamSynchronize", "cuEventSynchronize", "cuEventRecord", "cuStreamWaitEvent",
)  # fmt: skip


@contextmanager  # beyond module 5
def watching_numba(cuda: Any, refuse: Callable[[str], None]) -> Iterator[None]:  # beyond module 5
    """Call a function before numba itself launches a kernel, copies, allocates or waits.

    Launches and copies of this library are not affected, because they call the driver directly.
    ``refuse`` receives a description of what numba is about to do, and may raise an error.

    Gain: a captured step refuses work that its graph would miss.
    """
    kernels, driver = cuda.dispatcher._Kernel, cuda.cudadrv.driver.driver
    numbas = {(driver, name): f"has numba copy, allocate or wait ({name})" for name in _NUMBAS}
    numbas[kernels, "launch"] = "launches a kernel by numba (cuda.jit)"
    before = {at: getattr(*at) for at in numbas if is_known(provider())}

    def watched(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            refuse(what)
            return function(*args, **options)

        return call

    try:
        for (holder, name), function in before.items():
            setattr(holder, name, watched(function, numbas[holder, name]))
        yield
    finally:
        for (holder, name), function in before.items():
            setattr(holder, name, function)
