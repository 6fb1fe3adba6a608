"""Online softmax: fold one tile of scores into the running maximum, sum and output.

Source: Milakov and Gimelshein (2018), Algorithm 3; FlashAttention-2, Algorithm 1, lines 9-10 and 12.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .geometry import same

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
MINUS_INF = -math.inf
#: Powers of two by which a row's maximum may grow on tensor cores before its sums are rescaled.  A value of
#: 8 would not overflow 16 bits, but a row's largest probability is exactly 1, and not rounded, only
#: relative to its own maximum.  Measured, docs/notes-cuda.md.  Source: FlashAttention-4.
PATIENCE = 3
#: Largest |m| in base 2, for which tensor cores compute 2^(s - m) as the exponential of a product less a
#: rounded product.  The error of the exponent is up to 2⁻²⁴ of m, here less than 2⁻¹³.
LARGE = 1024.0


class OnlineSoftmax(NamedTuple):
    """The functions of the online softmax; ``make_online_softmax`` returns them."""

    shift_of: Callable[[Any], Any]
    inverse_sum: Callable[[Any], Any]
    log_sum_exp: Callable[[Any, Any], Any]
    merge_weight: Callable[[Any, Any, Any], Any]


def _reciprocal(x):
    return 1.0 / x


def _logarithm(x):
    return math.log(x)


def make_online_softmax(
    compile_: Callable[[Any], Any],
    reciprocal: Callable[[Any], Any] | None = None,
    logarithm: Callable[[Any], Any] | None = None,
) -> OnlineSoftmax:
    """Return the scalar steps of the online softmax for one compiler.

    Let m be the running maximum of a row.  After each tile, ``shift = shift_of(m_new)`` and P = exp(S
    - shift), and the old sum and output are multiplied by exp(m_old - shift).  At the end, O = acc *
    inverse_sum(sum) and L = log_sum_exp(shift, sum).

    L is a pair of numbers, lse and the rest that lse loses by rounding: where m is large, log(sum) is
    less than a unit in its last place, and exp(S - lse) is not a probability.

    These three functions test for a fully masked row by equality, so that NaN in a row, from an
    operand or an overflow, stays NaN; ``>`` would treat such a row as fully masked.  The compiled
    reciprocal and natural logarithm may be approximate.
    """
    inverse, log = reciprocal or compile_(_reciprocal), logarithm or compile_(_logarithm)

    @compile_
    def shift_of(row_max):
        # A fully masked row has maximum -inf; -inf - (-inf) would be NaN, -inf - 0 is not.
        return 0.0 if row_max == MINUS_INF else row_max

    @compile_
    def inverse_sum(row_sum):
        # A fully masked row has sum 0 and output 0.
        return 0.0 if row_sum == 0.0 else inverse(row_sum)

    @compile_
    def log_sum_exp(shift, row_sum):
        term = row_sum if row_sum == 0.0 else log(row_sum)
        lse = shift + term
        rest = (shift - lse) + term  # in this order, which no compiler may change
        return (MINUS_INF if row_sum == 0.0 else lse), rest

    @compile_
    def merge_weight(lse, rest, shift):
        """Return the weight of the output of one part of the keys, with shift = shift_of(largest lse).

        The whole is O = Σ weight O_part * inverse_sum(Σ weight), L = log_sum_exp(shift, Σ weight).
        """
        return math.exp((lse - shift) + rest)

    return OnlineSoftmax(shift_of, inverse_sum, log_sum_exp, merge_weight)


def make_softmax_step(
    compile_: Callable[[Any], Any], shift_of: Callable[[Any], Any], exp2: Any, minus: Any
) -> tuple[Callable[[Any, Any, Any], Any], Callable[[Any, Any, Any], tuple[Any, Any]]]:
    """Return ``power`` and ``grown``, lines 9 and 10; a kernel adds how its lanes share a row.

    m_new = max(m, rowmax S), P = e^(S - m_new), l = e^(m - m_new) l + rowsum P, and O like l.  In
    base 2, the maximum is subtracted first: S · log2 e could overflow, and a product less a rounded
    product is not 0 where both factors are the same.  Tensor-core kernels compute 2^(S · unit -
    shift) by one multiply-add, and large rows apart; ``reference.lines.add_tile`` is the same step in
    NumPy.

    ``minus`` is the difference of a score and a shift, which no compiler may fuse with a product.
    """

    @compile_
    def power(score, shift, log2_e):
        return exp2(minus(score, shift) * log2_e)

    @compile_
    def grown(row_max, new_max, log2_e):
        """Return the shift of the new maximum, and the factor of the earlier sums."""
        shift = shift_of(new_max)
        return shift, exp2((row_max - shift) * log2_e)

    return power, grown


PLAIN = make_online_softmax(same)
