"""float32 operands on float16 tensor cores, as scaled sums of one or two float16 terms.

A float16 has 11 bits of significand, as many as TF32, and tensor cores multiply it at twice the rate.  Two
of them have 22, and the sign of the second adds one: x = high + low.  The three larger parts of a product,

    x·y ≈ high·high' + high·low' + low·high'

omit 2⁻²² of the product, less than float32 sums lose.  But float16 lacks range.  Each head of a tensor is
therefore multiplied by the power of two that brings its largest number to 2¹⁴ … 2¹⁵.  The error of a second
term is then at most 2⁻²⁵, that is 2⁻³⁹ of the largest number.  Powers of two cause no rounding, and they
are undone where a kernel multiplies by a number anyway.

Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the
FP32 theoretical peak performance", 2022; there the second term has its own scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import float32, float64, int64, types

from kernels.cuda.ptx.numbers import PACK, UNPACK, ex2
from kernels.cuda.runtime.kernel import array_type, device_function
from kernels.runtime.dtypes import FLOAT32


class Numbers(NamedTuple):
    """The representation of operands on tensor cores.

    Attributes:
        dtype: Dtype of the multiplied numbers: "float16" or "bfloat16".
        terms: Number of terms whose sum is a number of an operand.
        is_scaled: Whether operands, which ``split_operands`` splits, and results are float32.
    """

    dtype: str
    terms: int = 1
    is_scaled: bool = False


#: Representations by the dtype of operands, or by the precision of float32.
NUMBERS = {
    "float16": Numbers("float16"),
    "bfloat16": Numbers("bfloat16"),
    "tf32": Numbers("float16", 1, True),
    "float32": Numbers("float16", 2, True),
}
#: The terms of the left and of the right operand whose products are added, by the number of terms.  Smaller
#: products come first, because tensor cores truncate the bits that do not fit the sum so far.
LEFT_TERMS, RIGHT_TERMS = {1: (0,), 2: (1, 0, 0)}, {1: (0,), 2: (0, 1, 0)}
#: The largest power of two of a scaled number, and so of a probability: float16 overflows at 2**16.
TOP = 15


@cache
def make_split(dtype: str) -> Callable[..., Any]:
    """Return ``split(x, y)``: two pairs of terms whose sum is the pair of float32, the larger terms first.

    If a number is not finite, its second term is 0.
    """
    pack, unpack, zero = PACK[dtype], UNPACK[dtype], np.float32(0)

    @device_function
    def split(x, y):
        high = pack(x, y)
        high_x, high_y = unpack(high)
        low_x, low_y = x - high_x, y - high_y
        # Infinity less infinity is NaN.
        low_x = low_x if low_x == low_x else zero
        low_y = low_y if low_y == low_y else zero
        return high, pack(low_x, low_y)

    return split


class SplitUnits(NamedTuple):
    """The units of scaled operands, which replace a kernel's argument ``scale``.

    A number of a head is the 16-bit number times the unit of the head.

    Attributes:
        scale: Scale of the scores.
        top: Probabilities are multiplied by 2**top before they become float16.
        keep_scale: Factor of the probabilities that dropout keeps.
        k: Units of k, (batch, heads) float32.
        v: Units of v, (batch, heads) float32.
        q: Units of q, (batch, heads) float32.
        dout: Units of dout, (batch, heads) float32; this and the following are 0 in the forward pass.
        delta: Units of delta; 2**TOP of them exceed any delta of the head.
        v_norm: The largest norm of a row of v of the head, in its unit.
        dout_norm: The largest norm of a row of dout of the head, in its unit.
    """

    scale: Any
    top: Any
    keep_scale: Any
    k: Any
    v: Any
    q: Any
    dout: Any = 0
    delta: Any = 0
    v_norm: Any = 0
    dout_norm: Any = 0


def scale_type(numbers: Numbers, is_backward: bool = False) -> Any:
    """Return numba's type of a kernel's argument ``scale``."""
    if not numbers.is_scaled:
        return float64
    heads = array_type(FLOAT32, 2)
    rest = [heads if is_backward else int64] * 4
    return types.NamedTuple((float64, float32, float32, *[heads] * 3, *rest), SplitUnits)


class UnitFunctions(NamedTuple):
    """The functions of ``(scale, b, h)`` that :func:`make_units` returns, which return factors.

    Attributes:
        split_q: Factor of q before it is split, 1 / its unit.
        scores: Factor of products of q and k, for scale · q · k.
        top: Not a factor: the power of two of probabilities.
        out: Factor of products of probabilities and v, for P · v.
        dp: Factor of products of dout and v, for dP in the unit of dS.
        delta: Factor of delta, for the unit of dS.
        dq: Factor of products of dS and k, for scale · dS · k.
        dk: Factor of products of dS and q, for scale · dS · q.
        dv: Factor of products of probabilities and dout.
    """

    split_q: Callable[..., Any]
    scores: Callable[..., Any]
    top: Callable[..., Any]
    out: Callable[..., Any]
    dp: Callable[..., Any]
    delta: Callable[..., Any]
    dq: Callable[..., Any]
    dk: Callable[..., Any]
    dv: Callable[..., Any]


@cache
def make_units(numbers: Numbers) -> UnitFunctions:
    """Return the functions of units; without units, only the scale of the scores remains."""
    zero, one, top = np.float32(0), np.float32(1), np.float32(2.0**TOP)
    largest = np.finfo(np.float32).max

    @device_function
    def plain_scale(scale, b, h):
        return float32(scale)

    @device_function
    def nothing(scale, b, h):
        return one

    @device_function
    def no_top(scale, b, h):
        return zero

    @device_function
    def split_q(scale, b, h):
        return one / scale.q[b, h]

    @device_function
    def scores(scale, b, h):
        return float32(scale.scale) * scale.k[b, h] * scale.q[b, h]

    @device_function
    def top_of(scale, b, h):
        return scale.top

    @device_function
    def out(scale, b, h):
        return scale.v[b, h]

    @device_function
    def bound(scale, b, h):
        """Return an upper bound of |dP ∘ Z - D|; ∥dO∥·∥V∥ bounds dP."""
        dp = scale.v_norm[b, h] * scale.v[b, h] * (scale.dout_norm[b, h] * scale.dout[b, h])
        return scale.keep_scale * dp + top * scale.delta[b, h]

    @device_function
    def delta(scale, b, h):
        # dS is P times at most 1: no float16 overflows.
        most = bound(scale, b, h)
        return min(one / most, largest) if most > zero else zero

    @device_function
    def dp(scale, b, h):
        return delta(scale, b, h) * scale.dout[b, h] * scale.v[b, h]

    @device_function
    def ds(scale, b, h):
        return float32(scale.scale) * bound(scale, b, h) * ex2(-scale.top)

    @device_function
    def dq(scale, b, h):
        return ds(scale, b, h) * scale.k[b, h]

    @device_function
    def dk(scale, b, h):
        return ds(scale, b, h) * scale.q[b, h]

    @device_function
    def dv(scale, b, h):
        return scale.dout[b, h] * ex2(-scale.top)

    if not numbers.is_scaled:
        one_each = nothing, plain_scale, no_top, nothing, nothing, nothing
        return UnitFunctions(*one_each, plain_scale, plain_scale, nothing)
    return UnitFunctions(split_q, scores, top_of, out, dp, delta, dq, dk, dv)
