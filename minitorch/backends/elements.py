"""The dtypes, shapes and elements that tensors support, checked where a user passes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import NUMBERS as NUMBERS
from kernels.common.arguments import short, shown
from kernels.runtime.dtypes import FLOAT_DTYPES, is_half

#: The dtypes that tensors and all backends support, and whether each is float16 or bfloat16.
DTYPES = {dtype: is_half(dtype) for dtype in (*FLOAT_DTYPES, *map(np.dtype, "?bBhHiIlLqQ"))}

MOST_BYTES = 2**47  # of a tensor: what programs may use of 48-bit addresses  # beyond module 5
HELD = "float16, bfloat16, float32, float64, integers or booleans"


def dtype_of(dtype: Any) -> np.dtype[Any] | None:
    """Return a dtype, given it or its name, or None if it is not a dtype; NumPy takes None for float64."""
    try:
        return None if dtype is None else np.dtype(dtype)
    except (TypeError, ValueError):
        return None


def as_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return a dtype that a tensor may have.

    Args:
        dtype: A dtype or its name.

    Raises:
        TypeError: If it is not a dtype, or one that tensors do not support.
    """
    found = dtype_of(dtype)
    if found is None or found not in DTYPES:
        raise TypeError(
            f"a tensor holds {HELD}, got {found or shown(dtype)}; pass numpy.float32 or its name"
        )
    return found


_default_dtype = np.dtype(np.float64)


def set_default_dtype(dtype: npt.DTypeLike) -> None:  # beyond module 5
    """Set the dtype of tensors made from Python numbers.

    Args:
        dtype: ``float32`` or ``float64``.

    Raises:
        TypeError: For any other dtype.
    """
    global _default_dtype
    wanted = dtype_of(dtype)
    if wanted is None or wanted not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise TypeError(
            f"the default dtype must be float32 or float64, got {wanted or repr(dtype)}; pass one of them"
        )
    _default_dtype = wanted


def get_default_dtype() -> np.dtype[Any]:
    """Return the dtype of tensors made from Python numbers (float64 until changed)."""
    return _default_dtype


def dtype_or_default(dtype: Any) -> np.dtype[Any]:
    """Return a dtype that a tensor may have, given it or its name; the default dtype for None."""
    return get_default_dtype() if dtype is None else as_dtype(dtype)


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple of ints; a single number is a shape of one dimension.

    Raises:
        ValueError: If an entry is negative or not a whole number.
    """
    try:
        sizes = tuple(shape)
    except TypeError:
        sizes = (shape,)
    if isinstance(shape, (str, bytes, dict, set)) or not all(
        isinstance(size, (int, np.integer)) and 0 <= size < 2**63 for size in sizes
    ):
        raise ValueError(f"a shape is a tuple of whole numbers, none below 0; got {shown(shape)}")
    return tuple(int(size) for size in sizes)


def check_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:  # beyond module 5
    """Check that a machine can have the memory of an array.

    Raises:
        MemoryError: If it cannot.
    """
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_BYTES:
        raise MemoryError(
            f"a tensor of shape {shape} of {dtype} takes {size / 2**30:.3g} GiB, more than any "
            "machine has; take a smaller shape"
        )


def as_float(number: Any) -> float:
    """Return one of ``NUMBERS`` as a float.

    Raises:
        ValueError: If it is too large.
    """
    try:
        return float(number)
    except OverflowError:
        raise ValueError(
            f"a number combined with a tensor must fit in float64, got {short(number)}; divide it first"
        ) from None


def as_element(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a number that an element of a dtype can be.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is too large, or not a whole number for an integer dtype.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, (*NUMBERS, np.bool_)):
        raise TypeError(f"an element is a number, got {shown(value)}; convert it with float()")
    is_whole = isinstance(value, (int, np.integer, np.bool_))
    number: Any = int(value) if is_whole else float(value)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if number != number or number in (math.inf, -math.inf) or number != int(number):
            raise ValueError(f"a tensor of {dtype} holds whole numbers, got {number}; convert it")
        if not limits.min <= number <= limits.max:
            raise ValueError(
                f"{dtype} holds {limits.min} to {limits.max}, got {short(number)}; use a wider dtype"
            )
    else:
        as_float(number)
    return number


def as_storage(numbers: Any) -> npt.NDArray[Any]:
    """Return a list of numbers as an array of the default dtype."""
    try:
        array = np.array(numbers)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind not in "iufb":
        raise ValueError(
            f"a storage must be a flat list of numbers or a 1-D array, got {shown(numbers)}; pass one "
            "number for each element of the shape"
        )
    return array.astype(get_default_dtype())
