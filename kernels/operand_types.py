"""The types of arrays that calls take, and how each is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.common.arguments import as_plain
from kernels.cuda.runtime.arrays import is_device_array
from kernels.interop.libraries import Torch, as_array, library_of  # beyond module 5
from kernels.rungs import CUDA
from kernels.runtime.targets import DeviceArray


def _of_array(array: Any) -> tuple[Any, Any]:
    return (array.shape, array.strides, array.dtype), array


#: For each type of array, the function that returns its layout, and a NumPy or device array at its address;
#: or the address, the unit of its alignment, and whether it is on the host.
DESCRIBE: dict[type, Callable[[Any], tuple[Any, Any]]] = {
    np.ndarray: _of_array,
    DeviceArray: _of_array,
}
#: For types that :func:`as_operand` cannot read, the function that returns NumPy's or numba's array.
READ: dict[type, Callable[[Any], Any]] = {}


def read(array: Any) -> Any:
    """Return an array of a known type as NumPy's or numba's."""
    return READ.get(type(array), as_operand)(array)


def as_operand(array: Any) -> Any:
    """Return an operand, or None, as NumPy's or numba's array; see ``arguments.as_plain``.

    A device array with a negative stride is copied: no view of it could begin at its lowest address.
    """
    if isinstance(array, np.ndarray):  # and so memory of the host that a device can read
        is_usual = type(array) is np.ndarray and array.dtype.isnative
        return array if is_usual else as_plain(array)
    if array is None:
        return None
    if not is_device_array(array):  # beyond module 5
        array = as_array(foreign := array)
        library = library_of(foreign)
        if isinstance(library, Torch):
            DESCRIBE[type(foreign)] = library.describe
    if is_device_array(array) and min(array.strides, default=0) < 0:
        return CUDA.memory.laid_as(array, array)
    return array
