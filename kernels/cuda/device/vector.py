"""What vectors of 128 bits need, exp2 and differences, for kernels on plain CUDA cores."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kernels.cuda.ptx.llvm import ALIGNMENT, VECTOR
from kernels.cuda.runtime.arrays import device_pointer
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import libdevice


def are_vectors(*arrays: Any) -> bool:
    """Tell whether the rows of (batch, heads, seq, dim) arrays can be read in whole vectors."""
    for array in arrays:  # no generator: this is asked of every array of a launch
        if device_pointer(array) % ALIGNMENT:
            return False
        if not _lies_in_vectors(tuple(array.shape), tuple(array.strides), array.dtype.itemsize):
            return False
    return True


@lru_cache(maxsize=1024)
def _lies_in_vectors(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    return (
        shape[-1] % max(VECTOR, ALIGNMENT // itemsize) == 0  # of 16 bits eight fill a vector
        and strides[-1] == itemsize
        and all(
            n == 1 or step % ALIGNMENT == 0 for n, step in zip(shape, strides[:-1], strict=False)
        )
    )


@device_function
def _minus(x, y):
    return libdevice.dadd_rn(x, -y)


#: 2**x for a dtype; in float32 one instruction, ``ex2.approx``.
EXP2 = {
    np.dtype(np.float32): libdevice.exp2f,
    np.dtype(np.float64): libdevice.exp2,
}
#: x - y for a dtype.  A product x is rounded before, as it is where its maximum is sought: the compiler
#: would subtract y from the exact product, and the difference of equal numbers would not be 0.
MINUS = {np.dtype(np.float32): libdevice.fsub_rn, np.dtype(np.float64): _minus}
