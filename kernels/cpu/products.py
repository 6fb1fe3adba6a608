"""C += A·B on tiles that lie in the first-level cache, and exp2, in forms that LLVM vectorises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from kernels.compiled import FASTMATH


@njit(fastmath=FASTMATH)
def add_product(c, a, b):
    """Add A·B to C.

    Four rows of C and two of B at a time: eight multiply-adds for each pair of loaded vectors, and
    the eight elements of A stay in registers.  The loop over columns is the one that vectorises.

    Args:
        c: (m, n), rows contiguous.
        a: (m, k), any strides: it is read element by element, so a transpose costs nothing.
        b: (k, n), rows contiguous.
    """
    m, depth, n = a.shape[0], a.shape[1], b.shape[1]
    even_depth = depth - depth % 2
    row = 0
    while row + 4 <= m:
        c0, c1, c2, c3 = c[row], c[row + 1], c[row + 2], c[row + 3]  # (n,) each
        for i in range(0, even_depth, 2):
            b0, b1 = b[i], b[i + 1]  # (n,) each
            a00, a01 = a[row, i], a[row, i + 1]
            a10, a11 = a[row + 1, i], a[row + 1, i + 1]
            a20, a21 = a[row + 2, i], a[row + 2, i + 1]
            a30, a31 = a[row + 3, i], a[row + 3, i + 1]
            for col in range(n):
                x, y = b0[col], b1[col]
                c0[col] += a00 * x + a01 * y
                c1[col] += a10 * x + a11 * y
                c2[col] += a20 * x + a21 * y
                c3[col] += a30 * x + a31 * y
        if even_depth < depth:
            last = b[even_depth]  # (n,)
            a0, a1 = a[row, even_depth], a[row + 1, even_depth]
            a2, a3 = a[row + 2, even_depth], a[row + 3, even_depth]
            for col in range(n):
                c0[col] += a0 * last[col]
                c1[col] += a1 * last[col]
                c2[col] += a2 * last[col]
                c3[col] += a3 * last[col]
        row += 4
    while row < m:
        c0 = c[row]  # (n,)
        for i in range(depth):
            b0, a00 = b[i], a[row, i]
            for col in range(n):
                c0[col] += a00 * b0[col]
        row += 1


def _bitcast(float_type: Any, int_type: Any, bits: int) -> tuple[Any, Any]:
    """Return intrinsics that read the bits of a float as an int, and back."""
    ir_float = ir.FloatType() if bits == 32 else ir.DoubleType()

    @intrinsic
    def float_to_bits(_context, x):
        def generate(_cg_context, builder, _signature, args):
            return builder.bitcast(args[0], ir.IntType(bits))

        return int_type(float_type), generate

    @intrinsic
    def bits_to_float(_context, x):
        def generate(_cg_context, builder, _signature, args):
            return builder.bitcast(args[0], ir_float)

        return float_type(int_type), generate

    return float_to_bits, bits_to_float


_float32_to_bits, _bits_to_float32 = _bitcast(types.float32, types.int32, 32)
_float64_to_bits, _bits_to_float64 = _bitcast(types.float64, types.int64, 64)

# 2**f = sum (f ln 2)^k / k! for |f| <= 1/2.  The first term left out is below half a unit in the
# last place: 5e-9 after k = 7 (float32: 6e-8), 4e-18 after k = 13 (float64: 1.1e-16).
_TERMS = [math.log(2.0) ** k / math.factorial(k) for k in range(14)]
(_F1, _F2, _F3, _F4, _F5, _F6, _F7) = (np.float32(term) for term in _TERMS[1:8])
(_D1, _D2, _D3, _D4, _D5, _D6, _D7, _D8, _D9, _D10, _D11, _D12, _D13) = _TERMS[1:]
_ONE32, _HALF32, _LOWEST32 = np.float32(1.0), np.float32(0.5), np.float32(-126.0)
_MANTISSA32, _MANTISSA64 = np.int32(23), np.int64(52)


@njit(fastmath=FASTMATH)
def exp2_float32(x):
    """Return 2**x for float32 x <= 126, 0 below -126 (minus infinity included), NaN for NaN."""
    clamped = _LOWEST32 if x < _LOWEST32 else x  # not max: a NaN must stay one
    whole = np.floor(clamped + _HALF32)
    f = clamped - whole  # in [-1/2, 1/2]
    p = _F7 * f + _F6
    p = p * f + _F5
    p = p * f + _F4
    p = p * f + _F3
    p = p * f + _F2
    p = p * f + _F1
    p = p * f + _ONE32
    # Adding to the exponent field multiplies by a power of two.
    value = _bits_to_float32(np.int32(_float32_to_bits(p) + (np.int32(whole) << _MANTISSA32)))
    return np.float32(0.0) if x < _LOWEST32 else value


@njit(fastmath=FASTMATH)
def exp2_float64(x):
    """Return 2**x for float64 x <= 1022, 0 below -1022 (minus infinity included), NaN for NaN."""
    clamped = -1022.0 if x < -1022.0 else x  # not max: a NaN must stay one
    whole = np.floor(clamped + 0.5)
    f = clamped - whole  # in [-1/2, 1/2]
    p = _D13 * f + _D12
    p = p * f + _D11
    p = p * f + _D10
    p = p * f + _D9
    p = p * f + _D8
    p = p * f + _D7
    p = p * f + _D6
    p = p * f + _D5
    p = p * f + _D4
    p = p * f + _D3
    p = p * f + _D2
    p = p * f + _D1
    p = p * f + 1.0
    value = _bits_to_float64(np.int64(_float64_to_bits(p) + (np.int64(whole) << _MANTISSA64)))
    return 0.0 if x < -1022.0 else value


def exp2(x):
    """Return 2**x for x <= 0 or a little above, 0 for minus infinity, NaN for NaN; for kernels."""
    return 2.0**x


#: What the overload below puts in its place; a kernel's fingerprint looks here.
exp2.implementations = (exp2_float32, exp2_float64)  # type: ignore[attr-defined]


@overload(exp2)
def _exp2_of_its_dtype(x):
    return exp2_float32.py_func if x == types.float32 else exp2_float64.py_func


_CLAMP32, _CLAMP64 = np.float32(60.0), 120.0
_TWO_LOG2_E32, _TWO_LOG2_E64 = np.float32(2.0 / math.log(2.0)), 2.0 / math.log(2.0)
_TWO32, _BIAS32, _BIAS64 = np.float32(2.0), np.int32(127), np.int64(1023)


@njit(fastmath=FASTMATH)
def tanh_float32(x):
    """Return the tanh of x, e / (e + 2) with e = exp(2x) - 1: precise near 0 too; NaN for NaN."""
    y = x * _TWO_LOG2_E32
    y = _CLAMP32 if y > _CLAMP32 else y  # not min: a NaN must stay one
    y = -_CLAMP32 if y < -_CLAMP32 else y
    whole = np.floor(y + _HALF32)
    f = y - whole  # in [-1/2, 1/2]
    p = _F7 * f + _F6
    p = p * f + _F5
    p = p * f + _F4
    p = p * f + _F3
    p = p * f + _F2
    p = p * f + _F1
    power = _bits_to_float32(np.int32((np.int32(whole) + _BIAS32) << _MANTISSA32))
    # 2^y - 1 = 2^whole (2^f - 1) + (2^whole - 1), and 2^f - 1 has no 1 to round away against
    e = power * (p * f) + (power - _ONE32)
    return e / (e + _TWO32)


@njit(fastmath=FASTMATH)
def tanh_float64(x):
    """Return the tanh of x, e / (e + 2) with e = exp(2x) - 1: precise near 0 too; NaN for NaN."""
    y = x * _TWO_LOG2_E64
    y = _CLAMP64 if y > _CLAMP64 else y  # not min: a NaN must stay one
    y = -_CLAMP64 if y < -_CLAMP64 else y
    whole = np.floor(y + 0.5)
    f = y - whole  # in [-1/2, 1/2]
    p = _D13 * f + _D12
    p = p * f + _D11
    p = p * f + _D10
    p = p * f + _D9
    p = p * f + _D8
    p = p * f + _D7
    p = p * f + _D6
    p = p * f + _D5
    p = p * f + _D4
    p = p * f + _D3
    p = p * f + _D2
    p = p * f + _D1
    power = _bits_to_float64(np.int64((np.int64(whole) + _BIAS64) << _MANTISSA64))
    e = power * (p * f) + (power - 1.0)
    return e / (e + 2.0)


def tanh(x):
    """Return the tanh of x, precise near 0 too; for kernels."""
    return math.tanh(x)


tanh.implementations = (tanh_float32, tanh_float64)  # type: ignore[attr-defined]


@overload(tanh)
def _tanh_of_its_dtype(x):
    return tanh_float32.py_func if x == types.float32 else tanh_float64.py_func
