"""Compile the kernels of the course, and the functions that they call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from kernels.runtime.targets import cuda

from .. import tensor_data

#: Threads per block of ``jit_sum_practice``, and maximum side of the square blocks of the matmul kernels.
THREADS_PER_BLOCK = 32


def device_jit(fn: Callable[..., Any], **options: Any) -> Any:
    """Compile a device function, which is inlined into its callers."""
    return cuda.jit(device=True, inline="always", **options)(fn)


def jit(fn: Callable[..., None], **options: Any) -> Any:
    """Compile a kernel, at its first launch with each combination of argument types."""
    return cuda.jit(**options)(fn)


# A plain function called from a kernel is unknown to the CUDA compiler; these are the index helpers
# that the kernels of the course call.
to_index = device_jit(tensor_data.to_index)
index_to_position = device_jit(tensor_data.index_to_position)
broadcast_index = device_jit(tensor_data.broadcast_index)


@cache
def callable_(fn: Callable[..., float]) -> Any:
    """Let a kernel call a plain function; a function compiled for the device is returned unchanged."""
    return device_jit(fn) if isinstance(fn, FunctionType) else fn


def kernel_of(kernel: Callable[..., None], fn: Callable[..., Any]) -> Any:
    """Compile a kernel around ``fn``, under a name of its own for the profiler."""
    kernel.__qualname__ = f"{kernel.__name__.strip('_')}_{getattr(fn, '__name__', 'fn')}"
    return jit(kernel)
