"""Float8 e4m3 in NumPy: the rounding of operands, and attention on rounded operands.

A unit is the scale by which a rounded number is multiplied.  Hopper's kernels round q, k and v in the
same way, with the same units.  They also round the probabilities to e4m3, but the functions of this module
do not.

Source: Shah and others, FlashAttention-3, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernels.problem.float8 import BLOCK, FLOAT8, SIGNS, padded
from kernels.problem.operands import Operands
from kernels.problem.question import Problem

Array = npt.NDArray[Any]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
#: The largest number of e4m3, which has no infinity.
MOST = 448.0


def unit_of(most: Array) -> Array:
    """Return the unit for numbers up to ``most``: the smallest power of two u with most ≤ 448 · u, float32.

    Scaling by a power of two is exact, so only the rounding to e4m3 loses accuracy.
    """
    exponent = (np.asarray(most, np.float32).view(np.uint32) + np.uint32(0x1FFFFF)) >> np.uint32(23)
    return ((np.clip(exponent, 9, 254) - 8).astype(np.uint32) << np.uint32(23)).view(np.float32)


def rotated(x: Array) -> Array:
    """Multiply rows by random signs and a Hadamard matrix, without its factor 1/sqrt(width).

    ``x`` is (…, rows, width) float32; the width is a power of two.
    """
    width = x.shape[-1]
    bits = SIGNS[np.arange(width) // 16] >> (np.arange(width) % 16).astype(np.uint32) & 1
    x = np.where(bits, -x, x)
    step = 1
    while step < width:
        pairs = x.reshape(*x.shape[:-1], width // (2 * step), 2, step)
        above, below = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([above + below, above - below], -2).reshape(x.shape)
        step *= 2
    return x


def quantised(x: Array, has_blocks: bool = False) -> tuple[Array, Array]:
    """Return (…, rows, width) numbers rounded to e4m3, and the unit (…, rows, 1) of each, float32.

    A number is NaN where x is not finite.  All rows have one unit, or each block of 128 rows with
    ``has_blocks``.
    """
    rows = x.shape[-2]
    firsts = np.arange(0, rows, BLOCK if has_blocks else rows)
    size = np.where(np.isfinite(x), np.abs(x), np.float32(0)).max(-1, keepdims=True)
    most = np.maximum.reduceat(size, firsts, axis=-2)
    unit = np.repeat(unit_of(most), np.diff([*firsts, rows]), axis=-2)
    with np.errstate(invalid="ignore"):
        return (np.clip(x / unit, -MOST, MOST) + (x - x)).astype(E4M3), unit


def rounding(forward: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that computes attention on rounded operands by ``forward``, in float32 or float64.

    Both are functions of ``(problem, tile, operands)`` that fill out and lse.
    """

    def forward_float8(problem: Problem, tile: Any, operands: Operands) -> None:
        how, width = FLOAT8[problem.precision], padded(problem.head_dim)

        def rounded(x: Array, has_blocks: bool) -> Array:
            numbers, unit = quantised(x, has_blocks)
            return (numbers.astype(np.float32) * unit).astype(x.dtype)

        q, k, v = operands.q, operands.k, rounded(operands.v, False)
        if how.has_hadamard:
            padding = [(0, 0)] * (q.ndim - 1) + [(0, width - problem.head_dim)]
            q, k = (rotated(np.pad(x, padding)) for x in (q, k))
            problem = replace(problem, head_dim=width, scale=problem.scale / width)
        q, k = rounded(q, how.has_blocks), rounded(k, how.has_blocks)
        forward(problem, tile, operands.having(q=q, k=k, v=v))

    return forward_float8
