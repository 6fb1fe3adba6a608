"""The parts of a launch that Hopper's forward and backward rungs share: tensor maps, kept launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any

from kernels.cuda.attention.flash3_wgmma.layout import Widths
from kernels.cuda.attention.register_tiles import widths_in
from kernels.cuda.device.half import as_bits
from kernels.cuda.device.memory import row_major_copy
from kernels.cuda.device.per_device import device_map
from kernels.cuda.device.vector import are_vectors
from kernels.cuda.device.warpgroups import LINE, PANEL
from kernels.cuda.runtime.arrays import device_pointer
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.dtypes import NAMES, is_half
from kernels.runtime.targets import current_device

#: Of the L2 cache: what keys and values of the heads in work may take.
CACHE_BYTES = 24 << 20

#: Launches of calls with options that are kept, each kernel's.
KEPT_LAUNCHES = 64


def tensor_map(array: Any, rows: int, dtype: str) -> tuple[Any, int, int]:
    """Return the tensor map of an array, and whether its heads and its batches differ.

    Args:
        array: (batch, heads, seq, dim) on the device; a stride of 0 repeats.
        rows: Of a tile.
        dtype: "float16" or "bfloat16".

    Returns:
        The tensor map on the device, 1 or 0 for the heads, 1 or 0 for the batches.
    """
    where = device_pointer(array), array.shape, array.strides
    return _tensor_map(current_device(), *where, rows, dtype)


@lru_cache(maxsize=4096)
def _tensor_map(
    device: int,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    rows: int,
    dtype: str,
) -> tuple[Any, int, int]:
    sizes, steps = list(shape), list(strides)
    for axis in (0, 1):
        if steps[axis] == 0 or sizes[axis] == 1:
            # One head that all share; the engine asks for a stride all the same.
            sizes[axis], steps[axis] = 1, LINE
    if shape[2] == 1:  # whatever its stride is
        steps[2] = LINE
    found = device_map(address, tuple(sizes), tuple(steps), (1, 1, rows, PANEL), dtype)
    return found, int(sizes[1] > 1), int(sizes[0] > 1)


def readable(*arrays: Any) -> tuple[Any, ...]:
    """Return arrays as the copy engine can read them: where they lie, or copied once."""
    if are_vectors(*arrays):
        return arrays
    return tuple(array if are_vectors(array) else row_major_copy(array) for array in arrays)


def widths_of(problem: Problem) -> Widths:
    """Return the widths that kernels for a problem are compiled for, forward and backward."""
    return Widths(*widths_in(problem, 16))


def with_mask_bits(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """Return a call with a floating mask of 16 bits as its bits, and of which dtype it is as ``mask``."""
    if problem.mask == "float" and is_half(operands.mask.dtype):
        bits = as_bits(operands.mask)
        return _of_mask(problem, NAMES[operands.mask.dtype]), operands.having(mask=bits)
    return problem, operands


@lru_cache(maxsize=1024)
def _of_mask(problem: Problem, dtype: str) -> Problem:
    return replace(problem, mask=dtype)


def memory_layouts(*arrays: Any) -> tuple[Any, ...]:
    """Return the shapes and strides of arrays; numbers among them are left out."""
    return tuple((x.shape, x.strides) for x in arrays if type(x) is not int)


def kept_launches(prepare: Callable[..., Any]) -> Any:
    """Return a function of a problem, and of what else there is, that prepares its launch once.

    Where options bring arrays of their own along, these are kept too, and so not as many.
    """
    plain, others = lru_cache(maxsize=1024)(prepare), lru_cache(maxsize=KEPT_LAUNCHES)(prepare)

    @wraps(prepare)
    def find(problem: Problem, *rest: Any) -> Any:
        return (plain if problem.is_plain else others)(problem, *rest)

    def clear() -> None:
        plain.cache_clear()
        others.cache_clear()

    launch_of: Any = find
    launch_of.cache_clear = clear
    return launch_of
