"""The memory of the kernels in place of the plain one: a pool, layouts of any kind, captured steps.

Attention needs it, so that a starter tree has it from module 5 on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cuda.backend import (
    Adopted,
    DeviceMemory,
    as_bits,
    computed,
    empty_device,
    fill,
    indexing,  # beyond module 5
    refuse,
    to_host,
)
from kernels.runtime.dtypes import BITS, is_half, rounded
from kernels.runtime.memory import Memory
from kernels.runtime.targets import explained

from ..cuda_ops import CudaBackend, CudaOps
from ..fast_ops import FastBackend
from ..tensor_ops import SimpleBackend
from .memory import memories


class PooledDevice(DeviceMemory):
    """Arrays of the kernels on the device, with the methods of ``PlainDevice``."""

    empty: Any = staticmethod(empty_device)
    to_host, launched = staticmethod(to_host), staticmethod(Adopted)

    def filled(self, size: int, value: float, dtype: np.dtype[Any]) -> Any:
        """Return a flat storage of equal elements."""
        storage = empty_device((size,), dtype)
        fill(storage, value)
        return storage

    def read(self, storage: Any, position: int) -> Any:
        """Return an element."""
        with explained("reading an element"):
            element = as_bits(storage)[position]
            return element.view(storage.dtype) if is_half(storage.dtype) else element

    def write(self, storage: Any, position: int, value: Any) -> None:
        """Write an element."""
        with explained("writing an element"):
            if is_half(storage.dtype):
                value = rounded(np.array(value, np.float64), storage.dtype).view(BITS)[()]
            as_bits(storage)[position] = value


memories.host, memories.device = Memory(), PooledDevice()
memories.computed, memories.refuse = computed, refuse
CudaOps.indexing = indexing  # beyond module 5
for _backend in (SimpleBackend, FastBackend, CudaBackend):
    _backend.lift()
