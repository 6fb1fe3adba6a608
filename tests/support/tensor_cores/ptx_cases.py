"""What a case of the tensor-core instructions is: a tiny kernel, its data, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, uint8, uint32

from kernels.cuda.ptx.emulated.numbers import pack, pack_e4m3
from kernels.cuda.ptx.tensor_map import encode_tensor_map
from kernels.cuda.runtime.arrays import device_pointer, to_device, to_host
from kernels.cuda.runtime.kernel import Kernel

WORDS, FLOATS, BYTES = uint32[:, ::1], float32[:, ::1], uint8[::1]
WARP, GROUP = 32, 128
HOPPER = (9, 0, "a")
#: Where tiles of bulk copies and descriptors may begin.
ALIGNMENT = 1024

Generator = np.random.Generator


class Map(NamedTuple):
    """A tensor map of an input, which a kernel takes before its output."""

    source: int
    box: tuple[int, ...]
    dtype: str
    swizzle: int


class Case(NamedTuple):
    """One kernel.

    Attributes:
        name: Of the instruction.
        source: Takes the inputs, tensor maps, and the output.
        signature: Its types.
        cc: The lowest compute capability that has the instruction.
        text: Of the instruction in PTX.
        make: Inputs, the output as it is before, the expected one, and by how much it may be off.
        threads: Of the block.
        shared_bytes: Dynamic shared memory.
        maps: Tensor maps.
    """

    name: str
    source: Callable[..., None]
    signature: Any
    cc: tuple[Any, ...]
    text: str
    make: Callable[[Generator], tuple[list[Any], Any, Any, Any]]
    threads: int = WARP
    shared_bytes: int = 0
    maps: tuple[Map, ...] = ()

    @property
    def kernel(self) -> Kernel:
        """What is launched."""
        return Kernel(self.source, self.signature, self.threads, self.shared_bytes)


def run(case: Case, rng: Generator) -> float:
    """Run a case on the GPU; return the largest error as a share of what is allowed; 0 is equal bits."""
    inputs, before, expected, allowed = case.make(rng)
    arrays = [to_device(array) for array in inputs]
    for i, box, dtype, swizzle in case.maps:
        array = inputs[i]
        arrays.append(to_device(encode_tensor_map(
            device_pointer(arrays[i]), array.shape, array.strides, box, dtype, swizzle
        )))  # fmt: skip
    out = to_device(before)
    case.kernel[1, case.threads](*arrays, out)
    return worst_error(to_host(out), expected, allowed)


def worst_error(found: Any, expected: Any, allowed: Any) -> float:
    """Return the largest error as a share of what is allowed; words must be equal."""
    if found.dtype == np.uint32:
        return 0.0 if np.array_equal(found, expected) else np.inf
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        error = np.abs(found.astype(np.float64) - expected) / np.maximum(allowed, 1e-30)
    return float(np.nanmax(np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))))


def words(rng: Generator, *shape: int) -> Any:
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


def normals(rng: Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


def pairs(rng: Generator, dtype: str, *shape: int) -> Any:
    return pack(normals(rng, *shape), normals(rng, *shape), dtype)


def eights(rng: Generator, *shape: int) -> Any:
    return pack_e4m3(*(normals(rng, *shape) for _ in range(4)))
