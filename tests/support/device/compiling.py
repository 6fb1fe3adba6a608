"""What the compile-only tests share: generations of GPUs, and a kernel's PTX, compiled once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernels.cuda.runtime.kernel import Kernel
from kernels.cuda.runtime.resources import (
    compile_ptx,
    launched_resources,
    ptx_resources,
    why_no_ptx,
    why_no_ptx_resources,
)
from kernels.runtime.jit import fingerprint
from kernels.runtime.targets import cuda

needs_nvvm = pytest.mark.skipif(why_no_ptx() is not None, reason=why_no_ptx() or "")
needs_ptxas = pytest.mark.skipif(
    why_no_ptx_resources() is not None, reason=why_no_ptx_resources() or ""
)

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
#: A kernel's LLVM code is the same for every generation; instructions that one lacks are found by ptxas.
OLDEST, NEWEST = (7, 5), (9, 0)
GENERATION = {FLOAT32: OLDEST, FLOAT64: NEWEST}
in_both_dtypes = pytest.mark.parametrize("dtype", GENERATION, ids=str)

#: 32-bit registers of a multiprocessor, on each of the generations.
REGISTERS = 65536


_compiler: Any = sys.modules[cuda.compile.__module__] if getattr(cuda, "compile", None) else None
_from_python: Callable[..., Any] | None = getattr(_compiler, "_compile_pyfunc_with_fixup", None)
#: What a kernel is made of → its LLVM code, of the last ones; and, by generation, its PTX or resources.
#: Calls make their kernels anew, and share many.
_LLVM: dict[Any, Any] = {}
_COMPILED: dict[Any, Any] = {}
KEPT = 48


def _shared(function: Any, signature: Any, launch_bounds: Any, **options: Any) -> Any:
    """Stand for the way from Python to LLVM's code, four fifths of the time, which generations share.

    NVVM and ptxas, which differ from generation to generation, run for each.
    """
    assert _from_python is not None
    asked = {name: value for name, value in options.items() if name not in ("cc", "lto")}
    key = fingerprint(function), str(signature), launch_bounds, str(sorted(asked.items(), key=repr))
    if key not in _LLVM:
        # Which generation is asked for does not show in LLVM's code, only in what NVVM makes of it.
        _LLVM[key] = _from_python(
            function, signature, launch_bounds=launch_bounds, cc=(8, 0), **asked
        )
        if len(_LLVM) > KEPT:
            del _LLVM[next(iter(_LLVM))]
    return _LLVM[key]


if _from_python is not None:
    _compiler._compile_pyfunc_with_fixup = _shared


def _made(make: Callable[..., Any], kernel: Kernel, cc: tuple[Any, ...]) -> Any:
    """Return what a function makes of a kernel under its launch bounds, made once."""
    asked = kernel.source, kernel.signature, cc, kernel.launch_bounds
    key = make, fingerprint(kernel.source), str(kernel.signature), *asked[2:]
    if key not in _COMPILED:
        _COMPILED[key] = make(*asked)
    return _COMPILED[key]


def ptx_of(kernel: Kernel, cc: tuple[Any, ...]) -> str:
    """Return what the kernel compiles to."""
    return _made(compile_ptx, kernel, cc)


def assert_in_registers(
    kernel: Kernel, cc: tuple[Any, ...], spilled: int = 0, local: int | None = None, most: int = 0
) -> str:
    """Assert that a kernel's numbers stay in registers and that no product waits; return its PTX.

    Args:
        kernel: Any.
        cc: Compute capability.
        spilled: Bytes a thread that may be spilled.
        local: Bytes of local memory beyond the spilled ones; None when its PTX has no local array.
        most: Registers of a thread; when 0 as many as let a multiprocessor hold the kernel's blocks.
    """
    ptx, found = ptx_of(kernel, cc), _made(launched_resources, kernel, cc)
    assert not found.warnings, found.warnings  # such as that products wait for each other
    assert found.spilled <= spilled
    if local is None:
        assert not re.search(r"\b(ld|st)\.local", ptx)
    else:
        assert found.local <= found.spilled + local
    held = most or REGISTERS // (kernel.threads * (kernel.resident or 1))
    assert found.registers <= held
    return ptx


def assert_is_kernel(ptx: str, cc: tuple[int, int]) -> None:
    """Assert that one kernel was compiled for one generation."""
    assert ".visible .entry" in ptx
    assert f".target sm_{cc[0]}{cc[1]}" in ptx


def assert_no_float64(ptx: str, operations: str = "fma|mul|add|sub|div|cvt") -> None:
    """Assert that a kernel of float32 does none of some operations in float64."""
    found = re.search(rf"\b({operations})\S*\.f64", ptx)
    assert not found, f"float32 computes in float64: {found}"


def assert_fits(kernel: Kernel, threads: int, cc: tuple[int, int], most_spilled: int = 0) -> None:
    """Assert that a multiprocessor holds as many blocks as the kernel says, and that little spills.

    Args:
        kernel: Any.
        threads: Of a block.
        cc: Compute capability.
        most_spilled: Bytes a thread that may go to local memory.
    """
    registers, spilled = ptx_resources(ptx_of(kernel, cc), cc)
    # Registers are handed out to a warp in groups of eight a thread.
    held = -(-registers // 8) * 8 * threads * kernel.resident
    assert held <= REGISTERS, f"{registers} registers x {threads} threads x {kernel.resident}"
    assert spilled <= most_spilled, f"{spilled} bytes spilled, {registers} registers"
