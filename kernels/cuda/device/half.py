"""Conversions between 16-bit numbers and float32 on the device.

Kernels see float16 and bfloat16 storage as uint16, because numba's own types for them would have to be
linked, and a kernel that is linked cannot be cached on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div, same
from kernels.cuda.ptx.llvm import (
    ALIGNMENT,
    VECTOR,
    load_flat,
    load_words,
    narrow_float16,
    reinterpreted,
    store_flat,
    store_words,
    widen_float16,
)  # fmt: skip
from kernels.cuda.runtime.arrays import device_pointer, device_view, element_strides
from kernels.cuda.runtime.kernel import Kernel, device_function, scalar_type
from kernels.cuda.runtime.sizes import launch_each
from kernels.runtime.dtypes import BFLOAT16, BITS, FLOAT16, FLOAT64, is_half
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, float64, int64, types, uint16, uint32, void

#: Elements that one thread converts: 128 bits of the 16-bit array.
EIGHT = 2 * VECTOR


def as_bits(array: Any) -> Any:
    """View a device array of 16-bit numbers as uint16; return any other array unchanged."""
    if not is_half(array.dtype):
        return array
    bits = vars(array).get("_bits")
    if bits is None:  # kept, for every operation on the array asks
        bits = device_view(array, tuple(array.shape), element_strides(array), dtype=BITS)
        array._bits = bits
    return bits


class Bits(NamedTuple):
    """Conversions between 16-bit and wider floats that use only integer arithmetic."""

    widen_bfloat16: Any  # 16 bits → the float32 that they represent
    #: A float32 → the bits of the nearest bfloat16, ties to the even one; NaN stays NaN.
    narrow_bfloat16: Any
    rounded_to_odd: Any  # A float64 → a float32 that has the same nearest number of 16 bits


def make_bits(compile: Callable[[Any], Any], bits_of: Any, float_of: Any) -> Bits:
    """Compile the conversions.

    ``bits_of`` returns the bits of a float32, uint32, and ``float_of`` is its inverse.
    """

    @compile
    def widen_bfloat16(bits):
        return float_of(uint32(uint32(bits) << uint32(16)))

    @compile
    def narrow_bfloat16(x):
        # cc 8.0 has an instruction for it; this is as right on 7.5, and memory is slower than either.
        bits = bits_of(x)
        if x != x:  # the upper half alone could be an infinity
            return uint16((bits >> uint32(16)) | uint32(0x40))
        odd = (bits >> uint32(16)) & uint32(1)  # ties go to the even one
        return uint16((bits + uint32(0x7FFF) + odd) >> uint32(16))

    @compile
    def rounded_to_odd(x):
        # See kernels.runtime.dtypes: a nearest float32 could fall on the middle between two
        # numbers of 16 bits.
        near = float32(x)
        back = float64(near)
        bits = bits_of(near)
        if back != x and x == x:
            if abs(back) > abs(x):
                bits = uint32(bits - uint32(1))
            bits = uint32(bits | uint32(1))
        return float_of(bits)

    return Bits(widen_bfloat16, narrow_bfloat16, rounded_to_odd)


#: The same functions in plain Python, on NumPy's numbers.
PLAIN = make_bits(same, lambda x: np.float32(x).view(np.uint32), lambda x: x.view(np.float32))


_bits = make_bits(
    device_function,
    reinterpreted(float32, uint32),
    reinterpreted(uint32, float32),
)


_CONVERSIONS = {
    FLOAT16: (widen_float16, narrow_float16),
    BFLOAT16: (_bits.widen_bfloat16, _bits.narrow_bfloat16),
}


class ElementForm(NamedTuple):
    """The functions with which a kernel reads and writes elements of one dtype."""

    stored: np.dtype[Any]  # Dtype of the storage as the kernel sees it
    widen: Any  # Stored element → the number to compute with
    narrow: Any  # A float32 → stored element, rounded once
    narrow_double: Any  # A float64 → stored element, rounded once


@cache
def form(dtype: np.dtype[Any]) -> ElementForm:
    """Return the functions with which a kernel reads and writes elements of a floating dtype."""
    if not is_half(dtype):
        return ElementForm(dtype, _unchanged, _unchanged, _unchanged)
    widen, narrow = _CONVERSIONS[dtype]
    to_odd = _bits.rounded_to_odd

    @device_function
    def narrow_double(x):
        return narrow(to_odd(x))

    return ElementForm(BITS, widen, narrow, narrow_double)


@device_function
def _unchanged(x):
    return x


def make_read_eight(dtype: np.dtype[Any]) -> Any:
    """Return the function ``(a, i)`` → eight neighbouring numbers, widened."""
    widen = form(dtype).widen
    if not is_half(dtype):

        @device_function
        def read_eight(a, i):
            return load_flat(a, i) + load_flat(a, i + VECTOR)

        return read_eight

    @device_function
    def low(word):
        return widen(uint16(word & uint32(0xFFFF)))

    @device_function
    def high(word):
        return widen(uint16(word >> uint32(16)))

    @device_function
    def read_eight_halves(a, i):
        w, x, y, z = load_words(a, i)
        return low(w), high(w), low(x), high(x), low(y), high(y), low(z), high(z)

    return read_eight_halves


def make_write_eight(dtype: np.dtype[Any], narrow: Any) -> Any:
    """Return the function ``(a, i, values)`` that writes eight neighbouring numbers."""
    if not is_half(dtype):

        @device_function
        def write_eight(a, i, values):
            store_flat(a, i, values[0], values[1], values[2], values[3])
            store_flat(a, i + VECTOR, values[4], values[5], values[6], values[7])

        return write_eight

    @device_function
    def pair(low, high):
        return uint32(uint32(narrow(low)) | (uint32(narrow(high)) << uint32(16)))

    @device_function
    def write_eight_halves(a, i, values):
        store_words(
            a, i, pair(values[0], values[1]), pair(values[2], values[3]),
            pair(values[4], values[5]), pair(values[6], values[7]),
        )  # fmt: skip

    return write_eight_halves


@cache
def convert_kernel(source_dtype: np.dtype[Any], dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that converts a flat array from ``source_dtype`` to ``dtype``."""
    source_form, out_form = form(source_dtype), form(dtype)
    widen = source_form.widen
    narrow = out_form.narrow_double if source_dtype == FLOAT64 else out_form.narrow
    read_eight, write_eight = make_read_eight(source_dtype), make_write_eight(dtype, narrow)

    def convert(source, out, in_vectors):
        """Convert element by element, each rounded once, to nearest even.

        Computes: out[i] = source[i]
        One thread does: eight neighbouring elements, by vectors of 128 bits where both arrays are aligned
            and there are eight
        Registers: eight elements
        Global traffic: each element read once and written once
        Needs: source and out contiguous
        """
        first = cuda.grid(1) * EIGHT
        stop = min(first + EIGHT, source.shape[0])
        if in_vectors and first + EIGHT <= source.shape[0]:
            write_eight(out, first, read_eight(source, first))
        else:
            for i in range(first, stop):
                out[i] = narrow(widen(source[i]))

    source_type = types.Array(scalar_type(source_form.stored), 1, "C")
    out_type = types.Array(scalar_type(out_form.stored), 1, "C")
    return Kernel(convert, void(source_type, out_type, int64))


def convert_flat(source: Any, out: Any) -> None:
    """Convert a flat device array to the dtype of ``out``, and write it there."""
    in_vectors = all(device_pointer(array) % ALIGNMENT == 0 for array in (source, out))
    kernel, pieces = convert_kernel(source.dtype, out.dtype), ceil_div(source.shape[0], EIGHT)
    launch_each(kernel, pieces, as_bits(source), as_bits(out), int(in_vectors))
