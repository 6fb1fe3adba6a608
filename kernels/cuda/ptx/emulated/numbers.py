"""The conversions of ``numbers`` on NumPy arrays, with the same bits.

A 16-bit or 8-bit number is represented by its bits, uint16 or uint8, and the name of a dtype.  A pair is
uint32, with the first number in its low half.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kernels.runtime.dtypes import HALF_DTYPES, NAMES

Array = np.ndarray[Any, Any]

E4M3 = "float8_e4m3"
_STORED = {NAMES[dtype]: dtype for dtype in HALF_DTYPES}
_STORED[E4M3] = np.dtype(ml_dtypes.float8_e4m3fn)
#: The greatest number of float8 e4m3, which has no infinity.
_MOST_E4M3 = np.float32(448)
#: The smallest float32 that is not subnormal.
_TINY = np.finfo(np.float32).tiny


def _bits(values: Any) -> Array:
    return np.asarray(values, np.float32).view(np.uint32)


def _bits_of(stored: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"uint{8 * stored.itemsize}")


def to_bits(values: Any, dtype: str) -> Array:
    """Return the bits of numbers rounded to "float16", "bfloat16" or "float8_e4m3", to nearest even.

    NaN stays NaN with unspecified bits.  In e4m3, larger numbers become 448.
    """
    values, stored = np.asarray(values, np.float32), _STORED[dtype]
    if dtype == E4M3:
        values = np.clip(values, -_MOST_E4M3, _MOST_E4M3)
    with np.errstate(over="ignore"):
        return values.astype(stored).view(_bits_of(stored))


def from_bits(bits: Any, dtype: str) -> Array:
    """Return the float32 that bits of "float16", "bfloat16" or "float8_e4m3" represent, exactly."""
    stored = _STORED[dtype]
    return np.asarray(bits, _bits_of(stored)).view(stored).astype(np.float32)


def round_to(values: Any, dtype: str) -> Array:
    """Return numbers rounded to "float16", "bfloat16" or "tf32", as float32."""
    if dtype == "tf32":
        return round_tf32(values).view(np.float32)
    return from_bits(to_bits(values, dtype), dtype)


def pack(low: Any, high: Any, dtype: str) -> Array:
    """Return pairs, as ``pack_f16`` and ``pack_bf16`` do."""
    pairs = np.empty((*np.shape(low), 2), np.float32)
    pairs[..., 0], pairs[..., 1] = low, high
    return to_bits(pairs, dtype).view(np.uint32)[..., 0]


def pack_e4m3(w: Any, x: Any, y: Any, z: Any) -> Array:
    """Return four numbers of 8 bits, as ``pack_e4m3`` of ``numbers`` does."""
    return to_bits(np.stack([w, x, y, z], -1), E4M3).view(np.uint32)[..., 0]


def halves(pairs: Any) -> Array:
    """Return the bits of the two numbers of each pair, along a new last axis."""
    return np.asarray(pairs, np.uint32)[..., None].view(np.uint16)


def unpack(pairs: Any, dtype: str) -> Array:
    """Return the two numbers of each pair, along a new last axis, as ``unpack_f16`` does."""
    return from_bits(halves(pairs), dtype)


def round_tf32(values: Any) -> Array:
    """Return numbers rounded as ``round_tf32`` does, as float32 bits of which the last 13 are zero."""
    bits = _bits(values)
    is_number = (bits & 0x7F800000) != 0x7F800000
    return np.where(is_number, (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)


def read_tf32(bits: Any) -> Array:
    """Return the bits that tensor cores read as TF32, the upper 19 of 32."""
    return (np.asarray(bits, np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def tanh(values: Any) -> Array:
    """Return the hyperbolic tangent with a relative error of at most 2**-11, like the GPU's."""
    return round_to(np.tanh(np.asarray(values, np.float32)), "tf32")


def fma(x: Any, y: Any, z: Any) -> Array:
    """Return x · y + z of float32 numbers; it is rounded twice, which rarely differs from rounding once."""
    x, y, z = (np.asarray(each, np.float64) for each in (x, y, z))
    with np.errstate(over="ignore", invalid="ignore"):
        return (x * y + z).astype(np.float32)


def lg2(values: Any) -> Array:
    """Return the base-2 logarithm, with subnormal numbers as zero; the GPU's is within 2**-22."""
    values = np.asarray(values, np.float32)
    values = np.where(np.abs(values) < _TINY, np.float32(0), values)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log2(values.astype(np.float64)).astype(np.float32)


def ex2(values: Any) -> Array:
    """Return 2**x as float32, with subnormal numbers as zero; the GPU's is within two units."""
    values = np.asarray(values, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        result = np.exp2(values, dtype=np.float64).astype(np.float32)
    return np.where(result < _TINY, np.float32(0), result)
