"""Memory in the form of numba's arrays: that of the pool, and that of other libraries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_void_p
from functools import lru_cache
from heapq import heappush
from types import SimpleNamespace
from typing import Any

import numpy as np

from kernels.runtime.dtypes import BFLOAT16
from kernels.runtime.memory import Layout, row_major_strides
from kernels.runtime.targets import DeviceArray, cuda, driver

MemoryPointer: Any = getattr(cuda, "MemoryPointer", object)


class Pooled(MemoryPointer):
    """Memory of the pool for numba's arrays; it is freed with the last of them."""

    source: Any = None  #: The pool.
    block: Any = None  #: Its block.
    device_ctypes_pointer: Any = None  #: The address, which numba would compute at each launch.

    def __del__(self) -> None:
        source, block = self.source, self.block
        if source.is_cached:  # as its ``free`` does, without a call
            heappush(source.cached[block.size, block.device], block)
        else:
            source.free(block)

    def view(self, start: int, stop: int | None = None) -> Any:
        """Return the bytes from ``start`` to ``stop``, which keep the whole alive."""
        return Part(self, MemoryPointer.view(self, start, stop))


class Part(MemoryPointer):
    """A part of the pool's memory, for numba's views."""

    def __init__(self, whole: Any, part: Any):
        super().__init__(None, part.device_pointer, part.size)
        self.whole = whole

    def view(self, start: int, stop: int | None = None) -> Any:
        """Return the bytes from ``start`` to ``stop`` of this part."""
        return Part(self.whole, super().view(start, stop))


class Foreign(MemoryPointer):
    """Memory of another library, or of an operand of a recorded call, which its owner keeps alive."""

    device_ctypes_pointer: Any = None  # as of Pooled
    view = Pooled.view

    def __init__(self, address: int, size: int, owner: Any):
        super().__init__(None, driver.CUdeviceptr(address), size, owner=owner)
        self.device_ctypes_pointer = c_void_p(address)


@lru_cache(maxsize=4096)
def array_state(shape: tuple[int, ...], steps: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return the attributes that numba's arrays of one shape, strides and dtype share.

    Its constructor computes them for each array, which takes longer than a launch.
    """
    array = DeviceArray(shape, steps, dtype, gpu_data=_ANY_MEMORY)
    if dtype != BFLOAT16:  # which numba does not know: kernels get its bits
        array._numba_type_  # noqa: B018 - kept from now on; each launch asks for it
    return vars(array)


_ANY_MEMORY = SimpleNamespace(_cuda_memsize_=0)


def arrays_from(
    source: Any, sizes: Sequence[int], layouts: Sequence[Layout], starts: list[int]
) -> list[Any]:
    """Return uninitialised arrays of the pool, and append their addresses to ``starts``.

    ``sizes`` are the bytes of each array, at least 1, and ``layouts`` the layout of each.  Errors are
    those of ``Pool.allocate``.
    """
    made = []
    for block, size, layout in zip(source.allocate(*sizes), sizes, layouts, strict=True):
        memory = Pooled(None, block.address, size)  # numba reads no context of a pointer
        memory.source, memory.block, memory.device_ctypes_pointer = source, block, block.pointer
        array = DeviceArray.__new__(DeviceArray)
        array.__dict__ = {**array_state(*layout), "gpu_data": memory, "stream": 0}
        made.append(array)
        starts.append(block.start)
    return made


@lru_cache(maxsize=4096)
def row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of a contiguous array, and its strides in bytes."""
    return math.prod(shape) * itemsize, tuple(s * itemsize for s in row_major_strides(shape))
