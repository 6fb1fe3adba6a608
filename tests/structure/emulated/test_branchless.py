"""Functions without a branch for scores, beside those of NumPy, on the emulated GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import float32, types, void

from kernels.cuda.device.branchless import divide, tanh
from kernels.cuda.emulator.gpu import launch as emulate
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.cuda.runtime.kernel import WARP, Kernel
from kernels.runtime.targets import cuda

VECTOR = types.Array(float32, 1, "C")


def _tanh(x, y, out):
    lane = cuda.threadIdx.x
    out[lane] = tanh(x[lane])


def _divide(x, y, out):
    lane = cuda.threadIdx.x
    out[lane] = divide(x[lane], y[lane])


def _on_gpu(kernel: Kernel, x: Any, y: Any, out: Any) -> None:
    there = to_device(out)
    kernel[1, WARP](to_device(x), to_device(y), there)
    out[:] = to_host(there)


def _emulated(kernel: Kernel, x: Any, y: Any, out: Any) -> None:
    emulate(kernel, (1, 1), x, y, out)


both = pytest.mark.parametrize(
    "run", [_emulated, pytest.param(_on_gpu, marks=pytest.mark.cuda)], ids=["emulated", "gpu"]
)


@both
def test_tanh_is_exact_to_some_units_in_the_last_place(run: Any) -> None:
    sizes = np.geomspace(1e-6, 90, WARP - 3)
    x = np.array([0, np.inf, np.nan, *sizes], np.float32)
    for sign in (1, -1):
        out = np.zeros(WARP, np.float32)
        run(Kernel(_tanh, void(VECTOR, VECTOR, VECTOR), WARP), sign * x, x, out)
        np.testing.assert_allclose(out, np.tanh(sign * x.astype(np.float64)), 2e-6)


@both
def test_a_quotient_is_rounded_as_by_ieee_754(run: Any) -> None:
    rng = np.random.default_rng(0)
    kernel = Kernel(_divide, void(VECTOR, VECTOR, VECTOR), WARP)
    for size in (1e-12, 1.0, 1e12):
        x, y = (rng.standard_normal((2, WARP)) * [[size], [1.0]]).astype(np.float32)
        x[:8] = y[:8] * np.arange(8)  # whole numbers remain whole
        out = np.zeros(WARP, np.float32)
        run(kernel, x, y, out)
        np.testing.assert_array_equal(out, x / y)


@both
def test_quotients_of_zeros_and_infinities(run: Any) -> None:
    found = [0.0, 1.0, -2.0, np.inf, -np.inf]
    x, y = np.zeros((2, WARP), np.float32)
    x[:25], y[:25] = (each.ravel() for each in np.meshgrid(found, found))
    y[25:] = 1
    out = np.zeros(WARP, np.float32)
    run(Kernel(_divide, void(VECTOR, VECTOR, VECTOR), WARP), x, y, out)
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_array_equal(out, x / y)
