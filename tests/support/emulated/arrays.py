"""What stands for a device's arrays where the emulated GPU is the device: NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.dtypes import BITS, is_half

from .instructions import GARBAGE


def empty(shape: Any, dtype: Any) -> Any:
    """Return an array of garbage."""
    array = np.empty(shape, dtype)
    array.view(np.uint8)[...] = GARBAGE
    return array


def as_bits(array: Any) -> Any:
    """Return numbers of 16 bits as the integers that kernels take."""
    return array.view(BITS) if is_half(array.dtype) else array


def longer(array: Any, rows: int = 40) -> Any:
    """Return a copy of (…, seq, dim) in longer memory, in which further rows are NaN."""
    *lead, seq, dim = array.shape
    whole = np.full((*lead, seq + rows, dim), np.nan, array.dtype)
    whole[..., :seq, :] = array
    return whole[..., :seq, :]
