"""Branch-free float32 functions for options that modify every score of a tile.

CUDA's own functions branch to a slower path for numbers outside the usual range.  There the lanes of a warp
diverge, and the compiler cannot interleave the elements of a tile.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.ptx.numbers import ex2, fma, rcp
from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.types import float32

#: Coefficients of the Taylor series of tanh(x) / x in x², from the last to the first.
_SERIES = tuple(np.float32(x) for x in (-17 / 315, 2 / 15, -1 / 3, 1.0))
#: Below this the series is used, where its truncation error is as small as a rounding error.
_SMALL, _TWICE_LOG2_E = np.float32(0.25), np.float32(2 * LOG2_E)
_INFINITY = np.float32(math.inf)


@device_function
def tanh(x):
    """Return the hyperbolic tangent, accurate to a few units in the last place."""
    last, third, second, first = _SERIES
    square = x * x
    small = x * (((last * square + third) * square + second) * square + first)
    large = float32(1) - float32(2) * rcp(ex2(x * _TWICE_LOG2_E) + float32(1))
    return small if abs(x) < _SMALL else large


@device_function
def divide(x, y):
    """Return x / y, rounded as in IEEE 754 if y, 1 / y and the quotient are normal numbers.

    Source: Markstein 1990, *Computation of elementary functions on the IBM RISC System/6000 processor*
    """
    near = rcp(y)
    inverse = fma(fma(-y, near, float32(1)), near, near)
    quotient = x * inverse
    corrected = fma(fma(-quotient, y, x), inverse, quotient)
    # Zero and infinity as y make NaN of the correction.
    return corrected if abs(corrected) < _INFINITY else x * near
