"""Softmax of one vector in three forms for learning: naive, safe and online.

FlashAttention extends the online form: it also accumulates the weighted sum of the values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import one_of

Vector = npt.NDArray[Any]

#: How many times the kernels of each step read an element from memory.  Each is written once.
READS = {"naive": 2, "safe": 3, "online": 2}


def check_rows(step: str, x: Any, out: Any) -> None:
    """Check the arguments of the softmax kernels of this ladder: a step of READS, x and out (rows, length).

    Raises:
        ValueError: If there is no such step, or x and out differ in shape or dtype.
        TypeError: If they are neither float32 nor float64.
    """
    one_of("step", step, READS)
    shapes = [(tuple(a.shape), np.dtype(a.dtype).name) for a in (x, out)]
    if x.ndim != 2 or shapes[0] != shapes[1]:
        raise ValueError(
            f"x and out must have the same shape (rows, length) and dtype, got {shapes[0]} and {shapes[1]}"
        )
    if shapes[0][1] not in ("float32", "float64"):
        raise TypeError(f"x must be float32 or float64, got {shapes[0][1]}; convert it")


def naive_softmax(x: Vector) -> Vector:
    """Return e^x over its sum, with two passes over x, (size,) floating.

    It overflows if an element is above 709 (float64) or 88 (float32).
    """
    # TASK 5.1: The exponentials over their sum.
    powers = np.exp(x)  # (size,)
    return powers / powers.sum()
    # END TASK 5.1


def safe_softmax(x: Vector) -> Vector:
    """Return softmax after subtracting the largest element, with three passes over x, (size,) floating.

    Any numbers are allowed, but not all of them minus infinity.

    Source: Milakov and Gimelshein (2018), Algorithm 2.
    """
    # TASK 5.1: e^(x - c) / Σ e^(x - c) is the same for each c; which c keeps exp from overflowing?
    powers = np.exp(x - x.max())  # (size,)
    return powers / powers.sum()
    # END TASK 5.1


def online_softmax(x: Vector, block: int = 4) -> Vector:
    """Return softmax of x, (size,) floating, finding maximum and sum together, with two passes by blocks.

    Any numbers are allowed, but not all of them minus infinity.

    Source: Milakov and Gimelshein (2018), Algorithm 3.
    """
    maximum, total = online_statistics(x, block)
    return np.exp(x - maximum) / total


def online_statistics(x: Vector, block: int) -> tuple[Any, Any]:
    """Return the largest element m and Σ e^(x - m), of x's dtype, in one pass over blocks of x, (size,).

    It may begin with minus infinities.
    """
    # TASK 5.1: When the maximum grows from m to m_new, what is summed so far shrinks by e^(m - m_new).
    maximum, total = x.dtype.type(-np.inf), x.dtype.type(0)
    for start in range(0, len(x), block):
        part = x[start : start + block]  # (block,), the last one may be short
        new_maximum = max(maximum, part.max())
        if new_maximum == -np.inf:
            continue  # nothing yet: -inf - (-inf) would be NaN
        total = total * np.exp(maximum - new_maximum) + np.exp(part - new_maximum).sum()
        maximum = new_maximum
    return maximum, total
    # END TASK 5.1
