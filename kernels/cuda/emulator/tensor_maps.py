"""The driver's function that encodes a tensor map, and what the copy engine reads from one."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from .device import Array

#: Bytes that addresses and strides must be multiples of; width of the swizzle.
ALIGNMENT, SWIZZLE = 16, 128


class TensorMap(NamedTuple):
    """An emulated tensor map: the tensor, the box (fastest dimension last) and the swizzle."""

    tensor: Array
    box: tuple[int, ...]
    swizzle: int


class _Enumeration:
    """An enumeration of the driver; a member is the end of its name."""

    def __getattr__(self, name: str) -> str:
        if not name.startswith("CU_"):
            raise AttributeError(name)
        return name.rpartition("_")[2]


cuuint32_t = cuuint64_t = int
CUtensorMapDataType = CUtensorMapInterleave = CUtensorMapSwizzle = _Enumeration()
CUtensorMapL2promotion = CUtensorMapFloatOOBfill = _Enumeration()
#: The driver's names → the dtypes of the arrays that a kernel sees.
_STORED = {"FLOAT16": np.uint16, "BFLOAT16": np.uint16, "FLOAT32": np.float32, "UINT8": np.uint8}
_MOST_DIMS, _MOST_LINES = 5, 256


def cuTensorMapEncodeTiled(
    dtype: str, dims: int, address: int, sizes: list[int], strides: list[int], box: list[int],
    steps: list[int], interleave: str, swizzle: str, *_: str,
) -> tuple[int, Any]:  # fmt: skip
    """Return 0 and 16 words that :func:`decoded` reads, or an error; the arguments are the driver's."""
    is_misplaced = any(number % ALIGNMENT for number in (address, *strides))
    if is_misplaced or dims > _MOST_DIMS or max(box) > _MOST_LINES or swizzle != f"{SWIZZLE}B":
        return 1, None
    words = [address, dims << 8 | [*_STORED].index(dtype), *sizes, *strides, *box]
    return 0, SimpleNamespace(opaque=[*words, *[0] * (16 - len(words))])


@lru_cache(maxsize=256)
def decoded(content: bytes) -> TensorMap:
    """Return what the bytes of a tensor map say."""
    address, kind, *words = np.frombuffer(content, np.int64).tolist()
    dims, stored = kind >> 8, np.dtype([*_STORED.values()][kind & 0xFF])
    ends = dims, 2 * dims - 1, 3 * dims - 1
    sizes, strides, box = (
        words[first:stop][::-1] for first, stop in zip((0, *ends), ends, strict=False)
    )
    strides.append(stored.itemsize)
    last = sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    memory: Any = (ctypes.c_uint8 * (last + stored.itemsize)).from_address(address)
    return TensorMap(np.ndarray(sizes, stored, memory, 0, strides), tuple(box), SWIZZLE)
