"""Arrays on the device: copies and views."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np

from kernels.cuda.runtime.memory_pool import Pool  # beyond module 5
from kernels.cuda.runtime.pooled import array_state, arrays_from, row_major  # beyond module 5
from kernels.cuda.runtime.recorder import active, refuse
from kernels.runtime.dtypes import BFLOAT16, BITS
from kernels.runtime.memory import Layout, check_dense, row_major_strides, same_layout
from kernels.runtime.targets import (
    DeviceArray,
    cuda,
    driver,
    explained,
    why_no_cuda,
)


def is_device_array(array: Any) -> bool:
    """Tell whether an array is one on the device."""
    return bool(getattr(array, "__cuda_ndarray__", False))


@cache
def pool() -> Any:
    """Return the pool of device memory, or None if numba's memory manager is used.

    Numba's manager is used if the user has chosen one (``NUMBA_CUDA_MEMORY_MANAGER``, such as RMM's),
    or if the device or the package that provides numba.cuda has no stream-ordered allocator. Without
    a device, a RuntimeError says what to do.
    """
    if (reason := why_no_cuda()) is not None:
        raise RuntimeError(reason)
    if (  # beyond module 5
        driver is not None
        and type(cuda.current_context().memory_manager).__name__ == "NumbaCUDAMemoryManager"
    ):
        found = Pool(driver, cuda.current_context)
        return found if found.prepare() else None
    return None


def array_on(memory: Any, layout: Layout, stream: Any = 0) -> Any:
    """Return numba's array on memory of the device, which it keeps."""
    shape, steps, dtype = layout
    if driver is not None and 0 not in shape:  # beyond module 5
        array = DeviceArray.__new__(DeviceArray)
        state = array_state(shape, steps, dtype)
        array.__dict__ = {**state, "gpu_data": memory, "stream": stream}
        return array
    return DeviceArray(shape, steps, dtype, stream, memory)


def empty_device(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an uninitialised, contiguous device array.

    Raises:
        MemoryError: If the device has too little memory left.
    """
    if (source := pool()) is not None:  # beyond module 5
        array, recording = _empty(shape, dtype, source), active()
        if recording is not None and array.size:
            recording.allocated(array.gpu_data, array.nbytes)
        return array
    with explained(f"allocating an array of shape {shape}"):
        return cuda.device_array(shape, dtype)


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], source: Any) -> Any:  # beyond module 5
    """Return an uninitialised, contiguous device array from the pool."""
    size, steps = row_major(tuple(shape), dtype.itemsize)
    layout = tuple(shape), steps, dtype
    return arrays_from(source, (size,), (layout,), [])[0] if size else array_on(None, layout)


def to_device(array: np.ndarray[Any, Any]) -> Any:
    """Return a contiguous copy of a NumPy array on the device.

    A small array is copied asynchronously, and may be written to at once.  Too little memory raises a
    MemoryError, and a missing device a RuntimeError that says what to do.
    """
    array = np.asarray(array, order="C")
    if array.dtype == BFLOAT16:  # whose memory NumPy does not lend to anyone
        bits = to_device(array.view(BITS))
        return device_view(bits, array.shape, row_major_strides(array.shape), dtype=BFLOAT16)
    with explained("copying an array to the device"):
        if pool() is not None:  # beyond module 5
            recording = active()
            return _uploaded(array) if recording is None else recording.uploaded(array, _uploaded)
        return cuda.to_device(array)


def _uploaded(  # beyond module 5
    array: np.ndarray[Any, Any], target: Any = None
) -> Any:
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
    """View the memory of a device array, which it keeps alive, with any shape; nothing is copied.

    The caller must ensure that the view stays inside.  Strides and the offset from the first element
    are in elements, and a stride of 0 repeats.  They must be derived from those of the array, unless
    the array is known to be row-major; otherwise use :func:`reshaped` or :func:`flattened`.  The bits
    may be read in another dtype of the same size.
    """
    size = array.dtype.itemsize
    own: np.dtype[Any] = array.dtype if dtype is None else dtype
    steps = _in_bytes(tuple(strides), size)
    memory = array.gpu_data.view(offset * size) if offset else array.gpu_data
    return array_on(memory, (tuple(shape), steps, own), array.stream)


def is_row_major(array: Any) -> bool:
    """Tell whether a device array has no gaps and its last dimension is the fastest."""
    shape = tuple(array.shape)
    return same_layout(shape, element_strides(array), row_major_strides(shape))


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """View a row-major device array in a new shape with as many elements; nothing is copied.

    The elements of another array would be read in the wrong order, and it raises a ValueError.
    """
    if not is_row_major(array) or math.prod(shape) != array.size:
        raise ValueError(
            f"a device array of shape {tuple(array.shape)} and strides {element_strides(array)}, in "
            f"elements, cannot be viewed as row-major {shape}; make a contiguous copy first"
        )
    return device_view(array, shape, row_major_strides(shape))


def flattened(array: Any) -> Any:
    """View the memory of a device array as one dimension, in the order of its strides.

    An array with gaps raises a ValueError.
    """
    check_dense(tuple(array.shape), element_strides(array))
    return device_view(array, (array.size,), (1,))


def device_pointer(array: Any) -> int:
    """Return the address of the first element of a device array."""
    if (recording := active()) is not None:  # beyond module 5
        recording.locate(array)  # other memory is kept: a kernel may get the address as a number
    return int(array.device_ctypes_pointer.value or 0)
