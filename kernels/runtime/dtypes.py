"""The floating dtypes of operands, what they are computed in, and how numbers get from one to another."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

FLOAT16 = np.dtype(np.float16)
#: The upper half of a float32, sign, 8 bits of exponent, 7 of fraction; NumPy knows it by ``ml_dtypes``.
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

#: Numbers of 16 bits are stored; computed with, and added up, they are in float32.
HALF_DTYPES = (FLOAT16, BFLOAT16)
#: What loops and kernels without tensor cores compute in.
COMPUTE_DTYPES = (FLOAT32, FLOAT64)
#: What operands may be.
FLOAT_DTYPES = (*HALF_DTYPES, *COMPUTE_DTYPES)
#: Of each its name; asking NumPy for one takes longer than all else that is looked up here.
NAMES = {dtype: dtype.name for dtype in FLOAT_DTYPES}
#: How storage of 16 bits looks to a kernel that moves or converts it.
BITS = np.dtype(np.uint16)


def is_half(dtype: np.dtype[Any]) -> bool:
    """Tell whether a dtype is float16 or bfloat16."""
    return dtype.itemsize == 2 and dtype in HALF_DTYPES


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Tell whether a dtype is floating; NumPy's own ``kind`` of bfloat16 is not "f"."""
    return dtype.kind == "f" or dtype == BFLOAT16


def lowest(dtype: np.dtype[Any]) -> float:
    """Return the least finite number of a floating dtype."""
    return float(ml_dtypes.finfo(dtype).min)


def acc_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of an accumulator: float32 for numbers of 16 bits, else the dtype itself."""
    return FLOAT32 if is_half(dtype) else dtype


def rounded(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a copy of an array in another dtype, each number rounded once, to nearest even.

    Args:
        array: Any shape and strides; a copy keeps the order of the dimensions in memory.
        dtype: What it shall be; a number beyond its range becomes infinite.
    """
    if dtype == BFLOAT16 and array.dtype == FLOAT64:
        array = _rounded_to_odd(array)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return array.astype(dtype)


def _rounded_to_odd(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return float64 as float32 of which bfloat16 has the same nearest number.

    ``ml_dtypes`` goes by way of the nearest float32, and what lies just beside the middle between two
    bfloat16 falls on it.  A number that float32 does not have becomes the one of its two neighbours
    there whose last bit is 1; the middle has a last bit of 0.

    Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008, theorem 1.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = np.asarray(array.astype(FLOAT32))
    inexact = (near.astype(FLOAT64) != array) & ~np.isnan(array)
    beyond = np.abs(near.astype(FLOAT64)) > np.abs(array)
    bits = near.view(np.uint32)
    bits -= beyond & inexact  # away from zero it went too far
    bits |= inexact
    return near
