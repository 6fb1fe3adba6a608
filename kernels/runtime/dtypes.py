"""The floating dtypes of operands, their accumulators, and conversions between them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

FLOAT16 = np.dtype(np.float16)
#: bfloat16 is the upper half of a float32 (sign, 8 bits of exponent, 7 of fraction), from ``ml_dtypes``.
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

#: The 16-bit storage dtypes, whose numbers are converted to float32 and accumulated in it.
HALF_DTYPES = (FLOAT16, BFLOAT16)
#: The dtypes in which loops and kernels without tensor cores compute.
COMPUTE_DTYPES = (FLOAT32, FLOAT64)
#: The dtypes of operands.
FLOAT_DTYPES = (*HALF_DTYPES, *COMPUTE_DTYPES)
#: The name of each of these dtypes, stored here because NumPy is slow to return it.
NAMES = {dtype: dtype.name for dtype in FLOAT_DTYPES}
#: The integer dtype with which kernels move or convert 16-bit numbers.
BITS = np.dtype(np.uint16)


def is_half(dtype: np.dtype[Any]) -> bool:
    """Tell whether a dtype is float16 or bfloat16."""
    return dtype.itemsize == 2 and dtype in HALF_DTYPES


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Tell whether a dtype is floating, including bfloat16, whose ``kind`` in NumPy is not "f"."""
    return dtype.kind == "f" or dtype == BFLOAT16


def lowest(dtype: np.dtype[Any]) -> float:
    """Return the lowest (most negative) finite number of a floating dtype."""
    return float(ml_dtypes.finfo(dtype).min)


def acc_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of an accumulator: float32 for fp16 and bf16, else the dtype itself."""
    return FLOAT32 if is_half(dtype) else dtype


def rounded(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a copy of an array in another dtype, with each number rounded once, to nearest even.

    The copy keeps the order of the dimensions in memory; a number beyond the range becomes infinite.
    """
    if dtype == BFLOAT16 and array.dtype == FLOAT64:
        array = _rounded_to_odd(array)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return array.astype(dtype)


def _rounded_to_odd(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Round float64 to float32 in such a way that rounding that to bfloat16 is exact.

    ``ml_dtypes`` rounds to the nearest float32 first, which moves a number close to the midpoint of two
    bfloat16 onto the midpoint.  Here, an inexact number becomes the neighbouring float32 whose last bit is
    1 (round to odd); the last bit of a midpoint is 0.

    Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008, theorem 1.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = np.asarray(array.astype(FLOAT32))
    inexact = (near.astype(FLOAT64) != array) & ~np.isnan(array)
    beyond = np.abs(near.astype(FLOAT64)) > np.abs(array)
    bits = near.view(np.uint32)
    bits -= beyond & inexact  # it was rounded away from zero
    bits |= inexact
    return near
