"""What a rung with float8 products must return: in float64, with operands rounded to e4m3."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kernels.problem.float8 import SIGNS

from ..tolerances import tolerance

PRECISIONS = (
    "float8_e4m3", "float8_e4m3+blocks", "float8_e4m3+hadamard", "float8_e4m3+blocks+hadamard"
)  # fmt: skip
BLOCK = 128
#: Relative rounding error of e4m3, and the absolute one of a subnormal number.
ROUNDING, LEAST = 2.0**-4, 2.0**-10
#: By how much tensor cores round the sums of products of e4m3: they keep fewer bits than float32 has.
SUMS = 2.0**-10


def numbers() -> Any:
    """Return the finite numbers of e4m3 that are not negative, by the bits of each."""
    return np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def rounded(x: Any) -> Any:
    """Return numbers rounded to e4m3, to nearest even, and 448 where they are larger."""
    with np.errstate(invalid="ignore"):
        return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def dequantised(x: Any, has_blocks: bool) -> Any:
    """Return rows (…, rows, width) rounded in units of a power of two, of all rows or of blocks."""
    result = np.empty(x.shape)
    step = BLOCK if has_blocks else x.shape[-2]
    for first in range(0, x.shape[-2], step):
        block = x[..., first : first + step, :]
        most = np.abs(block).max((-1, -2), keepdims=True)
        # The least power of two that is no less than most / 448.
        unit = np.vectorize(lambda size: 2.0 ** math.ceil(math.log2(max(size, 1e-30) / 448)))(most)
        result[..., first : first + step, :] = rounded(block / unit) * unit
    return result


def hadamard(width: int) -> Any:
    """Return the signed Hadamard matrix of ones; over sqrt(width) it is orthogonal."""
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    bits = [int(SIGNS[c // 16]) >> c % 16 & 1 for c in range(width)]
    return np.where(bits, -1.0, 1.0)[:, None] * matrix


class Wanted(NamedTuple):
    """What a rung with float8 products must return.

    Attributes:
        out: With probabilities that are not rounded.
        lse: Of the rounded operands.
        bound: By how much rounding the probabilities may move out.
        exact: Out of the operands as they are.
    """

    out: Any
    lse: Any
    bound: Any
    exact: Any


def wanted(
    q: Any, k: Any, v: Any, precision: str, scale: float | None = None, visible: Any = None
) -> Wanted:
    """Return the results for operands (…, seq, dim) of the same leading dimensions.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        precision: One of :data:`PRECISIONS`.
        scale: Of the scores.
        visible: (seq_q, seq_k) bool, or None.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    factor = scale or q.shape[-1] ** -0.5

    def softmax(q: Any, k: Any) -> tuple[Any, Any]:
        scores = factor * q @ np.swapaxes(k, -1, -2)
        if visible is not None:
            scores = np.where(visible, scores, -np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            lse = (
                np.log(np.exp(scores - (top := scores.max(-1, keepdims=True))).sum(-1))
                + top[..., 0]
            )
        lse = np.where(np.isnan(lse) & ~np.isnan(scores).any(-1), -np.inf, lse)
        with np.errstate(invalid="ignore"):
            p = np.exp(scores - np.where(np.isinf(lse), 0.0, lse)[..., None])
        return p, lse

    exact, _ = softmax(q, k)
    if "hadamard" in precision:
        width = 64 if q.shape[-1] <= 64 else 128
        padding = [(0, 0)] * (q.ndim - 1) + [(0, width - q.shape[-1])]
        q, k = (np.pad(x, padding) @ hadamard(width) for x in (q, k))
        factor /= width
    q, k = (dequantised(x, "blocks" in precision) for x in (q, k))
    exact, v = exact @ v, dequantised(v, False)
    p, lse = softmax(q, k)
    # Probabilities are multiplied by 2⁶ of their largest, or more; smaller ones are subnormal.
    size = np.abs(v)
    bound = (ROUNDING + SUMS) * (p @ size) + LEAST / 2**6 * p.max(-1, keepdims=True) * size.sum(
        -2, keepdims=True
    )
    return Wanted(p @ v, lse, bound, exact)


def assert_near(out: Any, lse: Any, right: Wanted, dtype: Any, lse_error: float = 0.05) -> None:
    """Assert that out and lse are what a rung with float8 products must return.

    Args:
        out: The out that the rung returned.
        lse: The lse that the rung returned.
        right: What it must return.
        dtype: Of out.
        lse_error: Tolerance of lse: numbers next to a midpoint may be rounded to the other side.

    Raises:
        AssertionError: It says how far off the worst element is.
    """
    __tracebackhide__ = True  # a failure is shown at the call
    with np.errstate(invalid="ignore"):
        away = np.where(lse == right.lse, 0.0, np.abs(lse - right.lse))
    assert away.max() <= lse_error, f"lse is {away.max():.3g} away"
    error = np.abs(out.astype(np.float64) - right.out)
    allowed = 1.1 * right.bound + tolerance(dtype) * (1 + np.abs(right.out))
    assert (error <= allowed).all(), (
        f"out is off by {(error / allowed).max():.3g} of what is allowed"
    )
    # Most roundings are far from the largest one.
    assert root_mean_square(error) <= 0.3 * root_mean_square(right.bound) + tolerance(dtype)


def root_mean_square(x: Any) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(x))))


def with_outliers(rng: np.random.Generator, *shape: int) -> Any:
    """Return numbers of which one in a thousand is ten times as large, as in FlashAttention-3."""
    return rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * (rng.random(shape) < 1e-3)
