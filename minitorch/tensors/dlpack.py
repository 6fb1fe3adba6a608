"""Create a tensor on the memory of an array of any library."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cuda.backend import element_strides, flattened, row_major_copy
from kernels.interop.libraries import as_array
from kernels.runtime.memory import is_dense

from ..cuda_ops import CudaBackend
from ..fast_ops import FastBackend
from ..tensor import Tensor
from ..tensor_data import TensorData, is_device_storage, strides_from_shape
from .factories import from_numpy, leaf


def from_dlpack(x: Any, requires_grad: bool = False) -> Tensor:
    """Return a tensor that shares the memory of an array of any library, with its dtype and strides.

    Nothing is copied, unless the array has gaps or repeats elements.  A write to one of the two is visible
    in the other, and the memory lives as long as either.  On a device, the legacy default stream, where
    kernels run, waits for work that the owner has started on another stream.

    Args:
        x: An array that supports DLPack or ``__cuda_array_interface__``, as those of PyTorch, CuPy, numba
            and NumPy do, of float16, bfloat16, float32, float64, integers or booleans.
        requires_grad: Whether the tensor requires a gradient.  Gradients do not flow back to the owner of
            the array.

    Returns:
        A tensor of the fast backend if the array is on the host, of the CUDA backend if it is on the
        current device.

    Raises:
        TypeError: If ``x`` supports neither protocol, or has a dtype or memory that tensors do not support.
        ValueError: If ``x`` is on a device other than the current one, or is a PyTorch tensor that requires
            a gradient; pass ``x.detach()``.
        RuntimeError: If kernels cannot run on the device; the message says what to do.
    """
    array = as_array(x)
    if isinstance(array, np.ndarray):
        return from_numpy(array, FastBackend, requires_grad)
    if not is_device_storage(array):
        raise TypeError(
            f"from_dlpack takes an array with DLPack or __cuda_array_interface__, got "
            f"{type(x).__name__}; use minitorch.tensor for numbers and lists"
        )
    shape, strides = tuple(array.shape), element_strides(array)
    if not is_dense(shape, strides):
        array, strides = row_major_copy(array), strides_from_shape(shape)
    # No index steps along a dimension of size 1, whose stride an owner may leave at any number.
    strides = tuple(1 if size == 1 else step for size, step in zip(shape, strides, strict=True))
    return leaf(TensorData(flattened(array), shape, strides), CudaBackend, requires_grad)
