"""Tensors on the CUDA backend, and their comparison with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

import minitorch
from minitorch import CudaBackend, Tensor, TensorData
from minitorch.tensor_data import is_device_storage

from .tolerances import assert_close_arrays

DTYPES = [np.float32, np.float64]


def draw(shape: tuple[int, ...], dtype: Any = np.float64, seed: int = 0) -> Any:
    """Draw an array of numbers from 0.5 to 2, where every operator is defined and smooth."""
    return np.random.default_rng(seed).uniform(0.5, 2.0, shape).astype(dtype)


def on_cuda(array: Any) -> Tensor:
    """Put an array on the CUDA backend, in the layout that it has."""
    return minitorch.from_numpy(array, backend=CudaBackend)


def permuted(array: Any) -> Any:
    """Return an array of the same shape and values whose dimensions lie in reverse in memory."""
    return np.asfortranarray(array)


def assert_equal(result: Tensor | TensorData, expected: Any, what: str = "result") -> None:
    """Assert that a result is on the device and close to what NumPy computed."""
    data = result._tensor if isinstance(result, Tensor) else result
    assert is_device_storage(data._storage), f"{what} left the device"
    assert_close_arrays(data.to_array(), expected, data.dtype, what)
