"""Memory of a CUDA device, by numba's own arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.dtypes import BFLOAT16, BITS, rounded
from kernels.runtime.targets import cuda, why_no_cuda

from .memory import Ints, PlainHost


class PlainDevice(PlainHost):
    """Numba's arrays on the device."""

    def why_not(self) -> str | None:
        """Return why there is no such device, or None if there is one."""
        return why_no_cuda()

    def empty(self, shape: Ints, dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised array."""
        return cuda.device_array(shape, dtype)

    def filled(self, size: int, value: float, dtype: np.dtype[Any]) -> Any:
        """Return a flat storage of equal elements."""
        return self.bring(np.full(size, value, dtype))

    def view(self, storage: Any, shape: Ints, strides: Ints) -> Any:
        """Return the elements of a flat storage as an array: a view of a row-major one, else a copy."""
        array = super().view(self.to_host(storage), shape, strides)
        if array.flags.c_contiguous:
            return storage.reshape(shape)
        return self.bring(np.ascontiguousarray(array))

    def bring(self, array: Any) -> Any:
        """Return a copy of a NumPy array on the device, and an array on the device unchanged."""
        if not isinstance(array, np.ndarray):
            return array
        if array.dtype == BFLOAT16:  # which numba does not know
            return cuda.to_device(array.view(BITS)).view(BFLOAT16)
        return cuda.to_device(array)

    def to_host(self, array: Any) -> Any:
        """Return a copy on the host, once the kernels launched before have run."""
        return array.copy_to_host()

    def convert_into(self, source: Any, out: Any) -> None:
        """Write a flat array to another one of any floating dtype."""
        out.copy_to_device(self.convert(source, out.dtype))

    def read(self, storage: Any, position: int) -> Any:
        """Return an element."""
        return self.to_host(storage[position : position + 1])[0]

    def write(self, storage: Any, position: int, value: Any) -> None:
        """Write an element."""
        number = self.bring(rounded(np.full(1, value), storage.dtype))
        storage[position : position + 1].copy_to_device(number)

    def launched(self, kernel: Any) -> Any:
        """Return a kernel of ``cuda.jit`` in the form in which it is launched: ``[grid, block](…)``."""
        return kernel
