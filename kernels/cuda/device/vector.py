"""128-bit loads and stores, exp2 and differences, for kernels on plain CUDA cores."""

# An intrinsic's first argument is the compiler's; callers do not pass it.
# pyright: reportCallIssue=false, reportRedeclaration=false

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir

from kernels.cuda.runtime.arrays import device_pointer
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import cgutils, intrinsic, libdevice
from kernels.runtime.types import types

#: Elements that one vector access moves.
VECTOR = 4
#: Alignment, in bytes, that a vector access needs.
ALIGNMENT = 16


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


def _vector_pointer(
    context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: Any
) -> Any:
    """Return a pointer to a vector of four that begins at an element of an array, and its type."""
    view = context.make_array(array_type)(context, builder, array)
    pointer = cgutils.get_item_pointer(context, builder, array_type, view, index, wraparound=False)
    vector = ir.VectorType(context.get_data_type(element), VECTOR)
    return builder.bitcast(pointer, vector.as_pointer()), vector


def _indices(context: Any, builder: Any, values: Any, kinds: Any) -> list[Any]:
    return [
        context.cast(builder, value, kind, types.intp)
        for value, kind in zip(values, kinds, strict=True)
    ]


def vector_load(array: Any, *index: Any, element: Any = None) -> Any:
    """Return the intrinsic that loads a vector.

    ``element`` is numba's type of an element of the vector, that of the array when None.
    """
    element = element or array.dtype
    signature = types.UniTuple(element, VECTOR)(array, *index)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        positions = _indices(context, builder, args[1:], sig.args[1:])
        pointer, _ = _vector_pointer(context, builder, sig.args[0], args[0], positions, element)
        value = builder.load(pointer, align=ALIGNMENT)
        lanes = [
            builder.extract_element(value, ir.Constant(ir.IntType(32), i)) for i in range(VECTOR)
        ]
        return context.make_tuple(builder, sig.return_type, lanes)

    return signature, generate


def vector_store(array: Any, *index: Any, element: Any = None) -> Any:
    """Return the intrinsic that stores a vector, four values after the index; see :func:`vector_load`."""
    element = element or array.dtype
    signature = types.void(array, *index, *([element] * VECTOR))
    count = len(index)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        positions = _indices(context, builder, args[1 : 1 + count], sig.args[1 : 1 + count])
        pointer, vector = _vector_pointer(
            context, builder, sig.args[0], args[0], positions, element
        )
        value = ir.Constant(vector, ir.Undefined)
        for i in range(VECTOR):
            place = ir.Constant(ir.IntType(32), i)
            value = builder.insert_element(value, args[1 + count + i], place)
        builder.store(value, pointer, align=ALIGNMENT)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def load_shared(_context, a, i):
    """Return four neighbouring elements of a flat shared array: one ``ld.shared.v4``."""
    return vector_load(a, i)


@intrinsic
def store_shared(_context, a, i, w, x, y, z):
    """Write four neighbouring elements of a flat shared array: one ``st.shared.v4``."""
    return vector_store(a, i)


@intrinsic
def load_global(_context, a, b, h, i, j):
    """Return four neighbouring elements of a row of a (batch, heads, seq, dim) array."""
    return vector_load(a, b, h, i, j)


@intrinsic
def load_row(_context, a, i, j):
    """Return four neighbouring elements of a row of a matrix."""
    return vector_load(a, i, j)


@intrinsic
def store_row(_context, a, i, j, w, x, y, z):
    """Write four neighbouring elements of a row of a matrix."""
    return vector_store(a, i, j)


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

# The compiler finds out by itself in which memory an array lies.
load_flat, store_flat = load_shared, store_shared
