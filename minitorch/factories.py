"""Make tensors: from numbers, from arrays, from a random generator."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import operators
from .fast_ops import FastBackend
from .tensor import Tensor
from .tensor_data import TensorData, UserShape, get_default_dtype
from .tensor_ops import SimpleBackend, TensorBackend


def manual_seed(seed: int) -> None:
    """Seed every generator that the library draws from: Python's and NumPy's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _shape(shape: UserShape | int) -> tuple[int, ...]:
    """Return a shape as a tuple; a single number is a shape of one dimension."""
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if not all(isinstance(size, (int, np.integer)) and size >= 0 for size in sizes):
        raise ValueError(f"a shape is a tuple of whole numbers, none below 0; got {shape!r}")
    return tuple(int(size) for size in sizes)


def _make(array: npt.NDArray[Any], backend: TensorBackend, requires_grad: bool) -> Tensor:
    """Return a tensor around a contiguous array."""
    data = TensorData(array.reshape(-1), tuple(array.shape))
    if backend.cuda:
        data.to_cuda_()
    result = Tensor(data, backend=backend)
    result.requires_grad_(requires_grad)
    return result


def full(
    shape: UserShape,
    value: float,
    backend: TensorBackend = SimpleBackend,
    requires_grad: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return a tensor of equal elements.

    Args:
        shape: Sizes.
        value: Of each element.
        backend: What computes on the tensor.
        requires_grad: Whether it is a leaf of the graph.
        dtype: The default dtype when None.
    """
    return _make(
        np.full(_shape(shape), value, dtype or get_default_dtype()), backend, requires_grad
    )


def zeros(
    shape: UserShape,
    backend: TensorBackend = SimpleBackend,
    requires_grad: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return a tensor of zeros; arguments as in :func:`full`."""
    return full(shape, 0.0, backend, requires_grad, dtype)


def ones(
    shape: UserShape,
    backend: TensorBackend = SimpleBackend,
    requires_grad: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return a tensor of ones; arguments as in :func:`full`."""
    return full(shape, 1.0, backend, requires_grad, dtype)


def rand(
    shape: UserShape,
    backend: TensorBackend = SimpleBackend,
    requires_grad: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return a tensor drawn uniformly from [0, 1), with Python's ``random``.

    Other arguments as in :func:`full`.
    """
    shape = _shape(shape)
    values = [random.random() for _ in range(int(operators.prod(shape)))]
    array = np.array(values, dtype or get_default_dtype()).reshape(shape)
    return _make(array, backend, requires_grad)


def randn(
    shape: UserShape,
    backend: TensorBackend = SimpleBackend,
    requires_grad: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return a tensor drawn from the standard normal distribution, with ``numpy.random``.

    Other arguments as in :func:`full`.
    """
    array = np.random.standard_normal(_shape(shape)).astype(dtype or get_default_dtype())
    return _make(array, backend, requires_grad)


def tensor(
    ls: Any,
    backend: TensorBackend = SimpleBackend,
    requires_grad: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return a tensor of the given numbers.

    Args:
        ls: A number (shape ()), or nested lists or tuples, or an array (copied).
        backend: What computes on the tensor.
        requires_grad: Whether it is a leaf of the graph.
        dtype: The default dtype when None.

    Raises:
        ValueError: If the lists are ragged or hold something that is no number.
    """
    try:
        array = np.array(ls)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"tensor needs a number or nested lists of numbers of equal lengths ({error})"
        ) from None
    if array.dtype.kind not in "fiub":
        raise ValueError(f"tensor needs numbers, got {array.dtype} in {ls!r}")
    array = np.array(array, dtype or get_default_dtype(), order="C")
    return _make(array, backend, requires_grad)


def _tensor(
    ls: Sequence[float],
    shape: UserShape,
    backend: TensorBackend = SimpleBackend,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor of a flat list of numbers and a shape."""
    result = Tensor.make(ls, tuple(shape), backend=backend)
    result.requires_grad_(requires_grad)
    if backend.cuda:
        result._type_(backend)
    return result


def from_numpy(
    array: Any, backend: TensorBackend = FastBackend, requires_grad: bool = False
) -> Tensor:
    """Return a tensor on an array's dtype and, where the layout allows, its memory.

    Args:
        array: A NumPy array, or anything that ``numpy.asarray`` takes.  It is shared if it is some
            permutation of a contiguous array, and copied otherwise.
        backend: What computes on the tensor.
        requires_grad: Whether it is a leaf of the graph.

    Raises:
        TypeError: If the array does not hold numbers.
    """
    array = np.asarray(array)
    if not (array.dtype.isnative and array.flags.aligned):
        array = array.astype(array.dtype.newbyteorder("="))
    # From the slowest to the fastest dimension; a permuted array is contiguous in that order.
    order = sorted(range(array.ndim), key=lambda dim: -array.strides[dim])
    permuted = array.transpose(order)
    if not permuted.flags.c_contiguous:
        return _make(np.ascontiguousarray(array), backend, requires_grad)
    result = _make(permuted, backend, False)
    back = sorted(range(array.ndim), key=lambda dim: order[dim])
    result = Tensor(result._tensor.permute(*back), backend=backend)
    result.requires_grad_(requires_grad)
    return result


def tensor_from_numpy(
    array: Any, backend: TensorBackend = SimpleBackend, requires_grad: bool = False
) -> Tensor:
    """Return a tensor of a copy of an array, in the default dtype."""
    copy = np.array(array, get_default_dtype(), order="C")
    return _make(copy, backend, requires_grad)


def zeros_tensor_from_numpy(shape: UserShape, backend: TensorBackend = SimpleBackend) -> Tensor:
    """Return zeros; the published name beside :func:`zeros`."""
    return zeros(shape, backend)


def ones_tensor_from_numpy(shape: UserShape, backend: TensorBackend = SimpleBackend) -> Tensor:
    """Return ones; the published name beside :func:`ones`."""
    return ones(shape, backend)
