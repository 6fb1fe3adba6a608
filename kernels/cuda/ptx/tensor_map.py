"""Tensor maps: 128-byte descriptions of tensors for the copy engine, encoded on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.targets import tensor_maps as driver

#: dtype → the driver's name.
_DTYPES = {
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "float32": "FLOAT32",
    "uint8": "UINT8",
}


def encode_tensor_map(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: str,
) -> np.ndarray[Any, Any]:
    """Return the tensor map of an array on the device: 128 bytes, uint8, to be copied there.

    On the device it must lie at a multiple of 64 bytes.  Boxes are swizzled by rows of 128 bytes.  There
    are one to five dimensions, the fastest last, with strides in bytes, and ``box`` is the size of a copy
    along each.  The dtype is "float16", "bfloat16", "float32" or "uint8", which also stands for float8.

    Source: CUDA Driver API, cuTensorMapEncodeTiled.
    """
    if driver is None:
        raise RuntimeError(
            'tensor maps need the driver of numba-cuda on a GPU; pip install "numba-cuda[cu13]"'
        )
    words, places = driver.cuuint64_t, driver.cuuint32_t
    error, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_DTYPES[dtype]}"),
        len(shape),
        address,
        [words(length) for length in reversed(shape)],
        [words(step) for step in reversed(strides[:-1])],
        [places(length) for length in reversed(box)],
        [places(1)] * len(shape),  # every element, none left out
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error):
        raise RuntimeError(f"the driver refuses a tensor map of {shape} in boxes of {box}: {error}")
    return np.array([int(word) for word in encoded.opaque], np.uint64).view(np.uint8)
