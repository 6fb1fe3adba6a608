"""What the compile-only tests share: generations of GPUs, and a kernel's PTX, compiled once."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from kernels.cuda.device import Kernel
from kernels.targets import compile_ptx, ptx_resources, why_no_ptx, why_no_ptx_resources

needs_nvvm = pytest.mark.skipif(why_no_ptx() is not None, reason=why_no_ptx() or "")
needs_ptxas = pytest.mark.skipif(
    why_no_ptx_resources() is not None, reason=why_no_ptx_resources() or ""
)

GENERATIONS = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0)]
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def _name(x: Any) -> str:
    return "cc{}{}".format(*x) if isinstance(x, tuple) else str(x)


#: Every generation in float32, and float64 once.
on_every_generation = pytest.mark.parametrize(
    ("dtype", "cc"), [(FLOAT32, cc) for cc in GENERATIONS] + [(FLOAT64, (8, 0))], ids=_name
)

#: 32-bit registers of a multiprocessor, on each of the generations.
REGISTERS = 65536


@cache
def ptx_of(kernel: Kernel, cc: tuple[int, int]) -> str:
    """Return what the kernel compiles to under its launch bounds; each factory makes it once."""
    return compile_ptx(kernel.source, kernel.signature, cc, kernel.launch_bounds)


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
