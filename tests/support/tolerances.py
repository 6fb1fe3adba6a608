"""How close is close: the one place that knows the tolerance of each dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

#: Relative to the size of the numbers: some hundred roundings of what is computed in, and of 16 bits, in
#: which results are stored and nothing is computed, eight.
TOLERANCES = {FLOAT16: 8 * 2**-11, BFLOAT16: 8 * 2**-8, FLOAT32: 3e-5, FLOAT64: 1e-11}


def tolerance(dtype: npt.DTypeLike) -> float:
    """Return the tolerance of a floating dtype, relative to the size of the numbers."""
    return TOLERANCES[np.dtype(dtype)]


def assert_close_arrays(
    actual: Any, expected: Any, dtype: npt.DTypeLike, what: str = "result", size: float = 1.0
) -> None:
    """Assert that a result has the dtype it should have, and the values.

    Args:
        actual: What the library returned: an array, or a tensor.
        expected: What it should have returned, best computed in float64.
        dtype: Of ``actual``; it sets the tolerance.
        what: Names the result in the error text.
        size: The size of the numbers that were added up to make the result. Where large ones
            cancel, the error is small beside them and not beside what is left.

    Raises:
        AssertionError: It names the shape, the worst element and its two values.
    """
    __tracebackhide__ = True  # a failure is shown at the call
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == np.dtype(dtype), f"{what} is {actual.dtype}, not {np.dtype(dtype)}"
    assert actual.shape == expected.shape, (
        f"{what} has shape {actual.shape}, not {expected.shape} as expected"
    )
    # Rounded to the same dtype, so that a number that overflows there is expected to.
    with np.errstate(over="ignore", invalid="ignore"):
        expected = expected.astype(dtype).astype(np.float64)
        error = np.abs(actual.astype(np.float64) - expected)
        allowed = tolerance(dtype) * (size + np.abs(expected))
    # Infinite and NaN elements must be the same; their difference is no number.
    special = ~(np.isfinite(actual) & np.isfinite(expected))
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    excess = np.where(special, np.where(same, 0.0, np.inf), error / np.where(special, 1.0, allowed))
    if excess.size == 0 or excess.max() <= 1.0:
        return
    worst = tuple(int(i) for i in np.unravel_index(excess.argmax(), excess.shape))
    raise AssertionError(
        f"{what}, {np.dtype(dtype)} of shape {actual.shape}: worst at {worst}, got "
        f"{actual[worst]!r}, expected {expected[worst]!r}; {int((excess > 1.0).sum())} of "
        f"{excess.size} elements are off, this one by {excess[worst]:.3g} times what is allowed"
    )
