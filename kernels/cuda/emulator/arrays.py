"""The arrays of the emulated GPU's memory, with the interface of numba's."""

from __future__ import annotations

import math
import os
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from .checked_arrays import Uninitialised, is_garbage
from .device import empty

#: Whether no one chose the emulated GPU: there is no other.  The most elements of an array then.
_IS_UNASKED = not any(map(os.environ.get, ("MINITORCH_EMULATE", "NUMBA_ENABLE_CUDASIM")))
MOST = 1 << 16


class Memory:
    """A part of the memory of the emulated GPU.

    Args:
        whole: An allocation, as bytes.
        start: Where the part begins.
        left_out: Notes of kernels that did not write every element, of the whole allocation.
    """

    def __init__(self, whole: Any, start: int = 0, left_out: list[str] | None = None):
        self.whole, self.start = whole, start
        self.left_out = [] if left_out is None else left_out

    def view(self, start: int) -> Memory:
        """Return the part that begins later."""
        return Memory(self.whole, self.start + start, self.left_out)


@cache
def _say_once() -> None:
    print(
        "minitorch: no CUDA driver found; kernels run on an emulated GPU, slowly (MINITORCH_EMULATE=1 "
        "hides this line, MINITORCH_EMULATE=0 makes it an error)",
        file=sys.stderr,
    )


def _check_unasked(shape: tuple[int, ...]) -> None:
    """Check the size of an array where no one asked for the emulated GPU, and say that it is used."""
    if math.prod(shape) > MOST:
        raise RuntimeError(
            f"an array of shape {shape} has {math.prod(shape):,} elements, and this machine has no CUDA "
            f"driver: the emulated GPU, which runs kernels in Python, takes up to {MOST:,} by itself; use "
            "the fast backend or smaller arrays, or set MINITORCH_EMULATE=1 before starting Python"
        )
    _say_once()


class DeviceArray:
    """An array in the memory of the emulated GPU.

    Args:
        shape: Its shape.
        strides: Its strides in bytes.
        dtype: Its dtype.
        stream: Ignored.
        gpu_data: Its memory; garbage when None.
    """

    __cuda_ndarray__ = True

    def __init__(
        self, shape: Any, strides: Any, dtype: Any, stream: Any = 0, gpu_data: Memory | None = None
    ):
        dtype = np.dtype(dtype)
        if gpu_data is None:
            if _IS_UNASKED:
                _check_unasked(tuple(shape))
            gpu_data = Memory(empty(max(int(np.prod(shape)) * dtype.itemsize, 1), np.uint8))
        self.gpu_data, self.shape, self.strides = gpu_data, tuple(shape), tuple(strides)
        self.dtype, self.ndim, self.size = dtype, len(self.shape), int(np.prod(shape))
        self.nbytes = self.size * dtype.itemsize
        self._ary = np.ndarray(shape, dtype, gpu_data.whole, gpu_data.start, strides)

    def _part(self, array: Any) -> DeviceArray:
        """Return a view of this array's memory."""
        if not array.size:
            return DeviceArray(array.shape, array.strides, array.dtype)
        start = array.ctypes.data - self.gpu_data.whole.ctypes.data
        memory = Memory(self.gpu_data.whole, start, self.gpu_data.left_out)
        return DeviceArray(array.shape, array.strides, array.dtype, 0, memory)

    stream = 0

    def __len__(self) -> int:
        return len(self._ary)

    @property
    def device_ctypes_pointer(self) -> Any:
        """The address of the first element, as ``value``."""
        return SimpleNamespace(value=self._ary.__array_interface__["data"][0] if self.size else 0)

    def __getitem__(self, key: Any) -> Any:
        found = self._ary[key]
        return self._part(found) if isinstance(found, np.ndarray) else found

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ary[key] = getattr(value, "_ary", value)

    setitem = __setitem__

    def copy_to_host(self, ary: Any = None, stream: Any = 0) -> Any:
        if self.gpu_data.left_out and (garbage := is_garbage(self._ary)).any():
            first = np.argwhere(garbage)[0].tolist()
            raise Uninitialised(
                f"element {first} of the copied array of shape {self.shape} has never been written, "
                f"{self.gpu_data.left_out[-1]}"
            )
        if ary is None:
            return self._ary.copy()
        ary[...] = self._ary
        return ary

    def copy_to_device(self, ary: Any, stream: Any = 0) -> None:
        source = np.asarray(getattr(ary, "_ary", ary))
        if source.shape != self.shape:
            raise ValueError(f"incompatible shapes: {source.shape} is copied to {self.shape}")
        self._ary[...] = source

    def view(self, dtype: Any) -> DeviceArray:
        return self._part(self._ary.view(dtype))

    def reshape(self, *shape: Any, order: Any = "C") -> DeviceArray:
        whole: Any = np.reshape(self._ary, shape[0] if len(shape) == 1 else shape, order=order)
        if not np.shares_memory(whole, self._ary) and self.size:
            raise NotImplementedError("reshape of an array that is not contiguous would copy it")
        return self._part(whole)

    def ravel(self, order: str = "C", stream: Any = 0) -> DeviceArray:
        return self.reshape(-1, order=order)

    def transpose(self, axes: Any = None) -> DeviceArray:
        return self._part(self._ary.transpose(axes))

    T = property(transpose)

    def bind(self, stream: Any = 0) -> DeviceArray:
        return self


def device_array(
    shape: Any, dtype: Any = np.float64, strides: Any = None, order: str = "C", stream: Any = 0
) -> DeviceArray:
    """Return an array of garbage."""
    shape, itemsize = tuple(np.atleast_1d(shape).tolist()), np.dtype(dtype).itemsize
    whole: Any = np.empty(shape, np.dtype(f"V{itemsize}"), order=order)  # type: ignore[call-overload]
    return DeviceArray(shape, strides or whole.strides, dtype)


def device_array_like(array: Any, stream: Any = 0) -> DeviceArray:
    """Return an array of garbage with the shape and dtype of another."""
    return device_array(array.shape, array.dtype)


def to_device(obj: Any, stream: Any = 0, copy: bool = True, to: Any = None) -> DeviceArray:
    """Return a copy of an array in the memory of the device."""
    if to is None:
        source = np.asarray(getattr(obj, "_ary", obj))
        order = "F" if source.flags.f_contiguous and not source.flags.c_contiguous else "C"
        to = device_array(source.shape, source.dtype, order=order)
    to.copy_to_device(obj)
    return to
