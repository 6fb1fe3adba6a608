"""Functions without a branch for scores, beside those of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import float32, types, void

from kernels.cuda.device.branchless import divide, tanh
from kernels.cuda.runtime.arrays import empty_device, to_device, to_host
from kernels.cuda.runtime.kernel import WARP, Kernel
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import cuda

pytestmark = pytest.mark.emulated
VECTOR = types.Array(float32, 1, "C")


def _tanh(x, y, out):
    lane = cuda.threadIdx.x
    out[lane] = tanh(x[lane])


def _divide(x, y, out):
    lane = cuda.threadIdx.x
    out[lane] = divide(x[lane], y[lane])


def _run(source: Any, x: Any, y: Any) -> Any:
    """Return what a kernel of one warp writes."""
    out = empty_device((WARP,), FLOAT32)
    Kernel(source, void(VECTOR, VECTOR, VECTOR), WARP)[1, WARP](to_device(x), to_device(y), out)
    return to_host(out)


def test_tanh_is_exact_to_some_units_in_the_last_place() -> None:
    sizes = np.geomspace(1e-6, 90, WARP - 3)
    x = np.array([0, np.inf, np.nan, *sizes], np.float32)
    for sign in (1, -1):
        np.testing.assert_allclose(
            _run(_tanh, sign * x, x), np.tanh(sign * x.astype(np.float64)), 2e-6
        )


def test_a_quotient_is_rounded_as_by_ieee_754() -> None:
    rng = np.random.default_rng(0)
    for size in (1e-12, 1.0, 1e12):
        x, y = (rng.standard_normal((2, WARP)) * [[size], [1.0]]).astype(np.float32)
        x[:8] = y[:8] * np.arange(8)  # whole numbers remain whole
        np.testing.assert_array_equal(_run(_divide, x, y), x / y)


def test_quotients_of_zeros_and_infinities() -> None:
    found = [0.0, 1.0, -2.0, np.inf, -np.inf]
    x, y = np.zeros((2, WARP), np.float32)
    x[:25], y[:25] = (each.ravel() for each in np.meshgrid(found, found))
    y[25:] = 1
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_array_equal(_run(_divide, x, y), x / y)
