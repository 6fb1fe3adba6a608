"""All numbers of float16 and bfloat16, the ties between them, and their comparison bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernels.runtime.dtypes import BITS, HALF_DTYPES

Array = npt.NDArray[Any]
on_halves = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)


def every_number(dtype: np.dtype[Any]) -> Array:
    """Return all numbers of 16 bits, (65536,): infinities and NaN too."""
    return np.arange(1 << 16).astype(BITS).view(dtype)


def beside_the_ties(dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return float64 numbers in and right beside the middle between two neighbours of a dtype.

    Returns:
        The numbers, and what each is in the dtype.
    """
    # Positive ones count upwards with their bits; the last pair is the largest number and infinity.
    count = int(np.array(np.inf, dtype).view(BITS))
    bits = np.arange(count, dtype=BITS)
    below, above = (x.view(dtype).astype(np.float64) for x in (bits, bits + 1))
    above[-1] = 2 * below[-1] - below[-2]  # where it would be if there were one
    middle = (below + above) / 2
    even = bits + bits % 2
    numbers = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)])
    nearest = np.concatenate([even, bits, bits + 1]).view(dtype)
    return np.concatenate([numbers, -numbers]), np.concatenate([nearest, -nearest])


def same_bits(actual: Array, expected: Array) -> None:
    """Assert that two arrays of one 16-bit dtype are equal bit for bit, any NaN like another."""
    assert actual.dtype == expected.dtype
    with np.errstate(invalid="ignore"):  # bfloat16 has NaNs that signal
        both = np.isnan(actual) & np.isnan(expected)
    differ = (actual.view(BITS) != expected.view(BITS)) & ~both
    where = np.flatnonzero(differ)
    assert not len(where), f"at {where[:5]}: {actual[where[:5]]}, not {expected[where[:5]]}"
