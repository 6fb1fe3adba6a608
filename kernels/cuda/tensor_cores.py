"""What the tensor-core rungs share: what they need of a device and of a call, and gradients of flash2.

They know operands of 16 bits.  A rung that has no backward kernels of its own takes flash2's, of operands
widened to float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernels.cuda import flash2_backward
from kernels.cuda.arrays import device_view, empty_device
from kernels.cuda.half import convert_flat
from kernels.cuda.memory import DeviceMemory
from kernels.cuda.vector import are_vectors
from kernels.dtypes import FLOAT32
from kernels.operands import Operands
from kernels.problem import Problem
from kernels.targets import IS_SIMULATOR, compute_capability

_MEMORY = DeviceMemory()


def why_no_device(needed: tuple[int, int]) -> str | None:
    """Return why the device has not the tensor cores that a kernel needs, or None.

    Args:
        needed: The least compute capability.
    """
    if IS_SIMULATOR:
        return "numba's simulator has no tensor cores"
    if (found := compute_capability()) < needed:
        least, have = (".".join(map(str, version)) for version in (needed, found))
        return f"it needs compute capability {least}, this device has {have}"
    return None


def why_not_here(tile: tuple[int, int] | None, needed: tuple[int, int]) -> str | None:
    """Return why the device cannot run a kernel of tensor cores with a tile, or None.

    Args:
        tile: What the caller asks for.
        needed: The least compute capability.
    """
    if (missing := why_no_device(needed)) is not None:
        return missing
    return None if tile is None else f"it takes its own tiles only, got {tile}"


def is_aligned(array: Any) -> bool:
    """Tell whether the rows of (batch, heads, seq, dim) are whole pieces of 16 bytes."""
    return are_vectors(array)


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv by flash2's kernels, in float32.

    Args:
        problem: The checked call, in 16 bits.
        tile: Of flash2.
        operands: As kernels take them, of 16 bits.
    """
    wide = operands.converted(_MEMORY, FLOAT32)
    results = {name: getattr(operands, name) for name in ("dq", "dk", "dv")}
    sums = {name: empty_device(tuple(array.shape), FLOAT32) for name, array in results.items()}
    flash2_backward.backward(replace(problem, dtype=FLOAT32), tile, wide.having(**sums))
    for name, array in results.items():
        size = (array.size,)
        convert_flat(device_view(sums[name], size, (1,)), device_view(array, size, (1,)))


def backward_tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the backward pass."""
    return flash2_backward.tile(replace(problem, dtype=FLOAT32))
