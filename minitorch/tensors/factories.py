"""Create tensors from numbers, arrays or a random generator."""

from __future__ import annotations

import math
import os  # beyond module 5
import random
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import as_host_array, as_plain, shown, whole
from kernels.runtime.dtypes import BFLOAT16, is_floating, rounded

from ..backends.elements import (
    as_element,
    check_memory,  # beyond module 5
    checked_shape,
    dtype_or_default,
    get_default_dtype,  # beyond module 5
)
from ..fast_ops import FastBackend
from ..tensor import Tensor
from ..tensor_data import (
    Storage,
    TensorData,
    UserShape,
)
from ..tensor_ops import SimpleBackend, TensorBackend, TensorOps

# Whether results of tensor and rand are leaves where a call does not say; see compat.  # beyond module 5
_leaves_by_default = os.environ.get("MINITORCH_PUBLISHED", "0") not in ("", "0")  # beyond module 5


def set_leaves_by_default(on: bool) -> bool:  # beyond module 5
    """Set whether results of :func:`tensor` and :func:`rand` require a gradient by default.

    Returns the old setting.

    Args:
        on: True, as in the published minitorch course (minitorch.github.io), or False.
    """
    global _leaves_by_default
    before, _leaves_by_default = _leaves_by_default, on
    return before


def manual_seed(seed: int) -> None:
    """Seed every generator that the library draws from: Python's and NumPy's.

    Raises:
        TypeError: If the seed is not a whole number.
    """
    seed = whole("seed", seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _checked_backend(backend: Any) -> TensorBackend:
    """Return a backend.

    Raises:
        TypeError: If it is not a backend; often it is the next size of a shape that is not a tuple.
    """
    if not isinstance(backend, TensorBackend):
        raise TypeError(
            f"backend must be a backend such as minitorch.FastBackend, got {shown(backend)}; pass the "
            "shape as one tuple and the dtype by keyword: zeros((2, 3), dtype='float32')"
        )
    return backend


def leaf(data: TensorData, backend: TensorBackend, requires_grad: bool | None) -> Tensor:
    """Return a tensor of some data on a backend, where the data moves if it is elsewhere."""
    if _checked_backend(backend).cuda:  # beyond module 2
        data.to_cuda_()
    result = Tensor(data, backend=backend)
    if requires_grad is None:  # beyond module 5
        requires_grad = _leaves_by_default and is_floating(data.dtype)
    result.requires_grad_(False if requires_grad is None else requires_grad)
    return result


def _make(array: npt.NDArray[Any], backend: TensorBackend, requires_grad: bool | None) -> Tensor:
    """Return a tensor around a contiguous array."""
    return leaf(TensorData(array.reshape(-1), tuple(array.shape)), backend, requires_grad)


def _in_dtype(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array of our own in a dtype; floating numbers are rounded once."""
    both = is_floating(array.dtype) and is_floating(dtype)
    return rounded(array, dtype) if both else array.astype(dtype)


Storages = Callable[[type[TensorOps], int, np.dtype[Any]], Storage]


def _of_shape(storage: Storages, by_default: bool | None = False):
    """Make a factory of a function that returns a flat storage, its length and dtype given.

    Args:
        storage: The function.
        by_default: The factory's default for ``requires_grad``.
    """

    @wraps(storage, ("__module__", "__name__", "__qualname__", "__doc__"))
    def make(
        shape: UserShape,
        backend: TensorBackend = SimpleBackend,
        requires_grad: bool | None = by_default,
        dtype: npt.DTypeLike | None = None,
    ) -> Tensor:
        sizes, kind = checked_shape(shape), dtype_or_default(dtype)
        size, ops = math.prod(sizes), _checked_backend(backend).loops
        check_memory(sizes, kind)  # beyond module 5
        elements = storage(ops, size, kind)
        return leaf(TensorData(elements, sizes), backend, requires_grad)

    del make.__wrapped__  # its arguments are those above, and help shows them
    return make


def full(
    shape: UserShape,
    value: float,
    backend: TensorBackend = SimpleBackend,
    requires_grad: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return a tensor of equal elements.

    Args:
        shape: Sizes of the dimensions.
        value: Value of each element.
        backend: The backend that computes on the tensor.
        requires_grad: Whether the tensor requires a gradient.
        dtype: A dtype or its name, such as "float32" or "bfloat16"; the default dtype when None.

    Raises:
        TypeError: If the value is not a number, the backend not a backend, or the dtype not supported.
        ValueError: If the shape is not valid, or the value does not fit the dtype.
        MemoryError: If the tensor would take more memory than any machine has.
    """
    value = as_element(value, dtype_or_default(dtype))
    make = _of_shape(lambda ops, size, dtype: ops.filled(size, value, dtype))
    return make(shape, backend, requires_grad, dtype)


@_of_shape
def zeros(ops: type[TensorOps], size: int, dtype: np.dtype[Any]) -> Storage:
    """Return a tensor of zeros; the arguments are those of :func:`full`."""
    return ops.filled(size, 0.0, dtype)


@_of_shape
def ones(ops: type[TensorOps], size: int, dtype: np.dtype[Any]) -> Storage:
    """Return a tensor of ones; the arguments are those of :func:`full`."""
    return ops.filled(size, 1.0, dtype)


@partial(_of_shape, by_default=None)
def rand(ops: type[TensorOps], size: int, dtype: np.dtype[Any]) -> Storage:
    """Return a tensor drawn uniformly from [0, 1), with Python's ``random``.

    ``requires_grad`` is that of :func:`tensor`; the other arguments are those of :func:`full`.
    """
    numbers = (random.random() for _ in range(size))
    return _in_dtype(np.fromiter(numbers, np.float64, size), dtype)  # memory first, then numbers


@_of_shape  # beyond module 3
def randn(  # beyond module 3
    ops: type[TensorOps], size: int, dtype: np.dtype[Any]
) -> Storage:
    """Return a tensor drawn from the standard normal distribution, with ``numpy.random``.

    The other arguments are those of :func:`full`.
    """
    return _in_dtype(np.random.standard_normal(size), dtype)


def tensor(
    ls: Any,
    backend: TensorBackend = SimpleBackend,
    requires_grad: bool | None = None,
    dtype: npt.DTypeLike | None = None,
) -> Tensor:
    """Return a tensor of the given numbers.

    Args:
        ls: A number (shape ()), nested lists or tuples, or an array, which is copied.
        backend: The backend that computes on the tensor.
        requires_grad: Whether the tensor requires a gradient.  None means False, or True for a floating
            dtype after :class:`minitorch.compat.published`.
        dtype: A dtype or its name; the default dtype when None.

    Raises:
        ValueError: If the lists are ragged or hold something other than numbers.
    """
    array = _in_dtype(_numbers("tensor", ls), dtype_or_default(dtype))
    return _make(np.ascontiguousarray(array).reshape(array.shape), backend, requires_grad)


def _numbers(function: str, numbers: Any) -> npt.NDArray[Any]:
    """Return numbers, lists of them or an array as an array of our own.

    Raises:
        ValueError: If the lists are ragged or hold something other than numbers.
    """
    readable = numbers if isinstance(numbers, Tensor) else _readable(function, numbers)
    try:
        array = np.array(readable)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{function} needs a number or nested lists of numbers of equal lengths, got "
            f"{shown(numbers)} ({error})"
        ) from None
    if array.dtype.kind not in "fiub" and array.dtype != BFLOAT16:
        raise ValueError(
            f"{function} needs numbers, got {array.dtype} in {shown(numbers)}; remove everything else, or "
            "convert it with float()"
        )
    return array


def _readable(function: str, array: Any) -> Any:
    """Check that NumPy can read an array, and return it.

    Raises:
        TypeError: For a masked array, whose masked elements would become visible, or one on a device.
    """
    if isinstance(array, np.ndarray):
        return as_plain(array)
    if hasattr(array, "__cuda_array_interface__"):  # beyond module 5
        raise TypeError(
            f"{function} takes arrays on the host, but this {type(array).__name__} is on a CUDA device; "
            "use minitorch.from_dlpack, which copies nothing, or copy it to the host first"
        )
    if hasattr(array, "__dlpack__") and not hasattr(array, "__array__"):  # beyond module 5
        raise TypeError(
            f"{function} takes arrays that NumPy can read, but this {type(array).__name__} supports "
            "DLPack alone; use minitorch.from_dlpack"
        )
    return array


def _tensor(
    ls: Sequence[float],
    shape: UserShape,
    backend: TensorBackend = SimpleBackend,
    requires_grad: bool | None = None,
) -> Tensor:
    """Return a tensor of a flat list of numbers and a shape."""
    return leaf(TensorData(ls, tuple(shape)), backend, requires_grad)


def from_numpy(
    array: Any, backend: TensorBackend = FastBackend, requires_grad: bool = False
) -> Tensor:
    """Return a tensor with an array's dtype that shares its memory where the layout allows.

    Args:
        array: A NumPy array, or anything that ``numpy.asarray`` takes.  Its memory is shared if its
            dimensions are a permutation of those of a contiguous array, and copied otherwise.
        backend: The backend that computes on the tensor.
        requires_grad: Whether the tensor requires a gradient.

    Raises:
        TypeError: If the array does not hold numbers, is a masked array, or is on a device.
        ValueError: If nested lists have unequal lengths.
    """
    array = as_host_array("array", _readable("from_numpy", array))
    if not array.flags.aligned:
        array = array.copy()
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


def tensor_from_numpy(  # beyond module 5
    array: Any, backend: TensorBackend = SimpleBackend, requires_grad: bool = False
) -> Tensor:
    """Copy an array into a tensor of the default dtype; raises the same errors as :func:`tensor`."""
    numbers = _numbers("tensor_from_numpy", array)
    copy = _in_dtype(numbers, get_default_dtype())
    return _make(np.ascontiguousarray(copy).reshape(copy.shape), backend, requires_grad)


def zeros_tensor_from_numpy(  # beyond module 5
    shape: UserShape, backend: TensorBackend = SimpleBackend
) -> Tensor:
    """Return a tensor of zeros; the published course's name for :func:`zeros`."""
    return zeros(shape, backend)


def ones_tensor_from_numpy(  # beyond module 5
    shape: UserShape, backend: TensorBackend = SimpleBackend
) -> Tensor:
    """Return a tensor of ones; the published course's name for :func:`ones`."""
    return ones(shape, backend)
