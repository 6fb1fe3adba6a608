"""Tensor maps: 128-byte descriptions of tensors for the copy engine, encoded on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cuda.ptx.swizzle import CHUNK, MODES
from kernels.runtime.targets import driver

#: Maximum size of a box along one dimension.
MAX_BOX = 256
#: dtype → the driver's name, and bytes of an element.
_DTYPES = {
    "float16": ("FLOAT16", 2),
    "bfloat16": ("BFLOAT16", 2),
    "float32": ("FLOAT32", 4),
    "uint8": ("UINT8", 1),
}


def check_tensor_map(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: str,
    swizzle: int,
) -> None:
    """Check that the copy engine can read boxes of a tensor; see :func:`encode_tensor_map`.

    Raises:
        ValueError: If it cannot; the message names the reason.
    """
    if dtype not in _DTYPES:
        raise ValueError(
            f"the dtype of a tensor map must be one of {', '.join(_DTYPES)}, got {dtype!r}"
        )
    if not 1 <= len(shape) <= 5 or not len(shape) == len(strides) == len(box):
        raise ValueError(
            "a tensor map has 1 to 5 dimensions, with a stride and a box for each; got "
            f"shape {shape}, strides {strides}, box {box}"
        )
    size = _DTYPES[dtype][1]
    if strides[-1] != size or address % CHUNK or any(step % CHUNK for step in strides[:-1]):
        raise ValueError(
            f"a tensor map needs rows that begin at multiples of {CHUNK} bytes, and neighbours side by "
            f"side; got address {address}, strides {strides} of {dtype}; copy the array"
        )
    if any(not 1 <= places <= MAX_BOX for places in box) or box[-1] * size % CHUNK:
        raise ValueError(
            f"a box has 1 to {MAX_BOX} places along each dimension and rows of a multiple of {CHUNK} "
            f"bytes, got {box} of {dtype}"
        )
    if swizzle not in MODES or (swizzle and box[-1] * size > swizzle):
        raise ValueError(
            f"a swizzle is one of {MODES} bytes and a row of the box no longer than it, got {swizzle} "
            f"for {box} of {dtype}"
        )


def encode_tensor_map(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: str,
    swizzle: int = 128,
) -> np.ndarray[Any, Any]:
    """Return the tensor map of an array on the device: 128 bytes, uint8, to be copied there.

    On the device it must lie at a multiple of 64 bytes.

    Args:
        address: Address of the first element.
        shape: One to five dimensions, the fastest last, as NumPy's.
        strides: Strides in bytes.
        box: Size of a copy along each dimension.
        dtype: "float16", "bfloat16", "float32" or "uint8", which also stands for float8.
        swizzle: Bytes of a row of the box in shared memory: 32, 64, 128, or 0 for no swizzle.

    Raises:
        ValueError: If the copy engine cannot read such boxes.
        RuntimeError: If there is no driver, or the driver reports an error.

    Source: CUDA Driver API, cuTensorMapEncodeTiled.
    """
    check_tensor_map(address, shape, strides, box, dtype, swizzle)
    if driver is None:
        raise RuntimeError(
            'tensor maps need the driver of numba-cuda on a GPU; pip install "numba-cuda[cu13]"'
        )
    kinds, modes = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    words, places = driver.cuuint64_t, driver.cuuint32_t
    error, encoded = driver.cuTensorMapEncodeTiled(
        getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{_DTYPES[dtype][0]}"),
        len(shape),
        address,
        [words(length) for length in reversed(shape)],
        [words(step) for step in reversed(strides[:-1])],
        [places(length) for length in reversed(box)],
        [places(1)] * len(shape),  # every element, none left out
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(modes, f"CU_TENSOR_MAP_SWIZZLE_{f'{swizzle}B' if swizzle else 'NONE'}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error):
        raise RuntimeError(f"the driver refuses a tensor map of {shape} in boxes of {box}: {error}")
    return np.array([int(word) for word in encoded.opaque], np.uint64).view(np.uint8)
