"""Sums as tensor cores make them, on NumPy arrays: what does not fit is cut off towards zero.

Of compute capability 9.0, float16 to float32: the products of one step of 16, which are exact, and the sum
so far are aligned to the largest exponent of all, with two bits more than float32 has; what is below is cut
off, each by itself; so is what is below float32's last bit of their sum.

Source: Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021; Khattak and
Mikaitis, "Accurate Models of NVIDIA Tensor Cores", 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from kernels.cuda.ptx.emulated.warp import gather_accumulators, scatter_accumulators

#: Bits of float32 behind the point, and more than that in a sum.
FRACTION, MORE = 23, 2


def _exponent(x: Any) -> Any:
    """Return the exponent of each number, and the least of all for zero."""
    return np.where(x == 0, -(1 << 12), np.frexp(x)[1] - 1)


def _cut(x: Any, exponent: Any) -> Any:
    """Return numbers cut off towards zero, to multiples of two to the power of ``exponent``."""
    return np.ldexp(np.trunc(np.ldexp(x, -exponent)), exponent)


def cut_sum(acc: Any, left: Any, right: Any) -> Any:
    """Return acc + left · right as tensor cores add.

    Args:
        acc: (rows, cols) float32.
        left: (rows, 16), numbers of float16.
        right: (16, cols), numbers of float16.
    """
    acc, left, right = (np.asarray(x, np.float64) for x in (acc, left, right))
    products = left[:, :, None] * right[None]
    # Those of the factors: a product of two may be twice as large.
    exponents = _exponent(left)[:, :, None] + _exponent(right)[None]
    last = np.maximum(exponents.max(axis=1), _exponent(acc)) - FRACTION - MORE
    total = _cut(acc, last) + _cut(products, last[:, None]).sum(axis=1)
    return _cut(total, _exponent(total) - FRACTION).astype(np.float32)


@contextmanager
def sums_cut_off() -> Iterator[None]:
    """Let the tensor cores of the emulated GPU add as those of a GPU do."""

    def multiply(acc: Any, left: Any, right: Any) -> Any:
        return gather_accumulators(cut_sum(scatter_accumulators(acc), left, right))

    with patch("kernels.cuda.ptx.emulated.warp._multiply", multiply):
        yield
