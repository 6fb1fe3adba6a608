"""Arrays on the device: their memory, their form in numba, copies and views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_void_p
from functools import cache, lru_cache
from heapq import heappush
from types import SimpleNamespace
from typing import Any

import numpy as np

from kernels.cuda.runtime.memory_pool import Block, Pool
from kernels.cuda.runtime.recorder import active, refuse
from kernels.runtime.dtypes import BFLOAT16, BITS
from kernels.runtime.memory import check_dense, row_major_strides, same_layout
from kernels.runtime.targets import IS_SIMULATOR, cuda, driver, explained, why_no_cuda

#: Shape, strides in bytes and dtype of an array.
Layout = tuple[tuple[int, ...], tuple[int, ...], Any]
#: The type of numba's arrays on the device; the type of None in the simulator.
DeviceArray: Any = getattr(cuda.cudadrv.devicearray, "DeviceNDArray", type(None))


def is_device_array(array: Any) -> bool:
    """Tell whether an array is one of numba's on the device, or the simulator's stand-in for one."""
    return bool(getattr(array, "__cuda_ndarray__", False))


@cache
def pool() -> Pool | None:
    """Return the pool of device memory, or None if numba's memory manager is used.

    Numba's manager is used if the user has chosen one (``NUMBA_CUDA_MEMORY_MANAGER``, such as RMM's), or if
    the device or the package that provides numba.cuda has no stream-ordered allocator.

    Raises:
        RuntimeError: If there is no device; the message says what to do.
    """
    if (reason := why_no_cuda()) is not None:
        raise RuntimeError(reason)
    if IS_SIMULATOR or driver is None:
        return None
    if type(cuda.current_context().memory_manager).__name__ != "NumbaCUDAMemoryManager":
        return None
    found = Pool(driver, cuda.current_context)
    return found if found.prepare() else None


MemoryPointer: Any = getattr(cuda, "MemoryPointer", object)


class Pooled(MemoryPointer):
    """Memory of the pool or of an arena for numba's arrays; it is freed with the last of them.

    Attributes:
        source: The pool or the arena.
        block: The block of the source.
        device_ctypes_pointer: The address, which numba would compute at each launch.
    """

    source: Any = None
    block: Any = None
    device_ctypes_pointer: Any = None

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
def _array_state(shape: tuple[int, ...], steps: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return the attributes that numba's arrays of one shape, strides and dtype share.

    Its constructor computes them for each array, which takes longer than a launch.
    """
    array = DeviceArray(shape, steps, dtype, gpu_data=_ANY_MEMORY)
    if dtype != BFLOAT16:  # which numba does not know: kernels get its bits
        array._numba_type_  # noqa: B018 - kept from now on; each launch asks for it
    return vars(array)


_ANY_MEMORY = SimpleNamespace(_cuda_memsize_=0)


def array_on(memory: Any, layout: Layout, stream: Any = 0) -> Any:
    """Return numba's array on memory of the device, which it keeps."""
    shape, steps, dtype = layout
    if driver is None or 0 in shape:  # of no elements: numba gives it a null pointer
        return DeviceArray(shape, steps, dtype, stream, memory)
    array = DeviceArray.__new__(DeviceArray)
    array.__dict__ = {
        **_array_state(shape, steps, dtype), "gpu_data": memory, "stream": stream
    }  # fmt: skip
    return array


def arrays_from(
    source: Any, sizes: Sequence[int], layouts: Sequence[Layout], starts: list[int]
) -> list[Any]:
    """Return uninitialised arrays, and append their addresses to ``starts``.

    Args:
        source: The pool, or an arena.
        sizes: Bytes of each array, at least 1.
        layouts: The layout of each.
        starts: A list.

    Raises:
        MemoryError: If the device has too little memory left.
    """
    made = []
    for block, size, layout in zip(source.allocate(*sizes), sizes, layouts, strict=True):
        memory = Pooled(None, block.address, size)  # numba reads no context of a pointer
        memory.source, memory.block, start = source, block, int(block.address)
        memory.device_ctypes_pointer = c_void_p(start)
        array = DeviceArray.__new__(DeviceArray)
        array.__dict__ = {**_array_state(*layout), "gpu_data": memory, "stream": 0}
        made.append(array)
        starts.append(start)
    return made


def foreign_array(
    address: int, shape: tuple[int, ...], steps: tuple[int, ...] | None, typestr: str, owner: Any
) -> Any:
    """Return numba's array on memory of another library.

    Args:
        address: Address of the first element; 0 for no elements.
        shape: Shape of the array.
        steps: Strides in bytes; row-major if None.
        typestr: Dtype, in the form of ``numpy.dtype.str``.
        owner: The object that keeps the memory alive.
    """
    dtype, size, steps = _foreign_layout(shape, steps, typestr)
    if driver is None:
        memory = MemoryPointer(cuda.current_context(), c_void_p(address), size, owner)
    else:
        memory = Foreign(address, size, owner)
    return array_on(memory, (shape, steps, dtype))


@lru_cache(maxsize=4096)
def _foreign_layout(
    shape: tuple[int, ...], steps: tuple[int, ...] | None, typestr: str
) -> tuple[np.dtype[Any], int, tuple[int, ...]]:
    """Return the dtype, the bytes from the first element to the end, and the strides in bytes."""
    dtype = BFLOAT16 if typestr == BFLOAT16.str else np.dtype(typestr)
    if steps is None:
        return dtype, *_row_major(shape, dtype.itemsize)
    last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True) if step > 0)
    return dtype, 0 if 0 in shape else last + dtype.itemsize, steps


def empty_device(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an uninitialised, contiguous device array.

    Raises:
        MemoryError: If the device has too little memory left.
    """
    recording = active()
    source = pool() if recording is None else recording.source
    if source is None:
        with explained(f"allocating an array of shape {shape}"):
            return cuda.device_array(shape, dtype)
    array = _empty(shape, dtype, source)
    if recording is not None and array.size:
        recording.took(array.gpu_data, array.nbytes)
    return array


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], source: Any) -> Any:
    """Return an uninitialised, contiguous device array from the pool or an arena."""
    size, steps = _row_major(tuple(shape), dtype.itemsize)
    layout = tuple(shape), steps, dtype
    return arrays_from(source, (size,), (layout,), [])[0] if size else array_on(None, layout)


@lru_cache(maxsize=4096)
def _row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of a contiguous array, and its strides in bytes."""
    return math.prod(shape) * itemsize, tuple(s * itemsize for s in row_major_strides(shape))


def to_device(array: np.ndarray[Any, Any]) -> Any:
    """Return a contiguous copy of a NumPy array on the device.

    A small array is copied asynchronously, and may be written to at once.

    Raises:
        MemoryError: If the device has too little memory left.
        RuntimeError: If there is no device; the message says what to do.
    """
    array = np.asarray(array, order="C")
    if array.dtype == BFLOAT16:  # whose memory NumPy does not lend to anyone
        bits = to_device(array.view(BITS))
        return device_view(bits, array.shape, row_major_strides(array.shape), dtype=BFLOAT16)
    with explained("copying an array to the device"):
        if pool() is None:
            return cuda.to_device(array)
        if (recording := active()) is not None:
            return recording.uploaded(array, _uploaded)
        return _uploaded(array)


def _uploaded(array: np.ndarray[Any, Any], target: Any = None) -> Any:
    """Copy a contiguous array to the device, to memory of the pool if there is no target."""
    source = pool()
    assert source is not None, "to_device asks first"
    out = _empty(array.shape, array.dtype, source) if target is None else target
    if array.size:
        source.upload(device_pointer(out), array)
    return out


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """Return a copy of a device array on the host, once the kernels launched before have run.

    Raises:
        RuntimeError: If one of them failed; the message names those launched last.
        CaptureError: Within a call that is recorded for a graph.
    """
    refuse(
        "reads numbers of the device on the host",
        "return the tensor and read it outside; token ids and class indices come in as NumPy arrays",
    )
    with explained("copying an array to the host"):
        return array.copy_to_host()


def element_strides(array: Any) -> tuple[int, ...]:
    """Return the strides of an array in elements, where NumPy and numba count bytes."""
    return _in_elements(tuple(array.strides), array.dtype.itemsize)


@lru_cache(maxsize=4096)
def _in_elements(steps: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(step // itemsize for step in steps)


@lru_cache(maxsize=4096)
def _in_bytes(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(step * itemsize for step in strides)


def device_view(
    array: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int = 0,
    dtype: np.dtype[Any] | None = None,
) -> Any:
    """View the memory of a device array with a given shape and strides; nothing is copied.

    Args:
        array: A device array, whose memory the view keeps alive.
        shape: Shape with any number of dimensions; the caller must ensure that the view stays inside.
        strides: Strides in elements; 0 repeats.  They must be derived from those of the array, unless the
            array is known to be row-major; otherwise use :func:`reshaped` or :func:`flattened`.
        offset: Start of the view, in elements from the array's first.
        dtype: A dtype of the same size in which the bits are read; that of the array when None.
    """
    size = array.dtype.itemsize
    own: np.dtype[Any] = array.dtype if dtype is None else dtype
    steps = _in_bytes(tuple(strides), size)
    if IS_SIMULATOR:
        start = np.lib.stride_tricks.as_strided(array._ary, (offset + 1,), (size,))[offset:]
        return type(array)(np.lib.stride_tricks.as_strided(start, shape, steps).view(own))
    memory = array.gpu_data.view(offset * size) if offset else array.gpu_data
    return array_on(memory, (tuple(shape), steps, own), array.stream)


def is_row_major(array: Any) -> bool:
    """Tell whether a device array has no gaps and its last dimension is the fastest."""
    shape = tuple(array.shape)
    return same_layout(shape, element_strides(array), row_major_strides(shape))


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """View a row-major device array in a new shape with as many elements; nothing is copied.

    Raises:
        ValueError: If the array is not row-major, so that its elements would be read in the wrong order.
    """
    if not is_row_major(array) or math.prod(shape) != array.size:
        raise ValueError(
            f"a device array of shape {tuple(array.shape)} and strides {element_strides(array)}, in "
            f"elements, cannot be viewed as row-major {shape}; make a contiguous copy first"
        )
    return device_view(array, shape, row_major_strides(shape))


def flattened(array: Any) -> Any:
    """View the memory of a device array without gaps as one dimension, in the order of its strides.

    Raises:
        ValueError: If the array has gaps.
    """
    check_dense(tuple(array.shape), element_strides(array))
    return device_view(array, (array.size,), (1,))


def pool_device(array: Any) -> int | None:
    """Return the number of the device on which an array of the pool lies; None for other memory."""
    memory = getattr(array, "gpu_data", None)
    block = getattr(getattr(memory, "whole", memory), "block", None)
    return block.device if isinstance(block, Block) else None


def device_pointer(array: Any) -> int:
    """Return the address of the first element of a device array; 0 in the simulator."""
    if (recording := active()) is not None:
        recording.origin(array)  # a kernel may be given the address as a number
    return 0 if IS_SIMULATOR else int(array.device_ctypes_pointer.value or 0)
