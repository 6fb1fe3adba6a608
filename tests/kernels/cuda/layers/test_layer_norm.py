"""Layer norm on CUDA, alone and of residual + dropout(x): values and gradients, storage of 16 bits."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import DataObject, booleans, composite, data, integers, sampled_from

import minitorch
from kernels.common.philox import PLAIN, drop_threshold
from kernels.runtime.dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FLOAT_DTYPES,
    acc_dtype,
    rounded,
)
from kernels.runtime.targets import EMULATED
from minitorch import CudaBackend, FastBackend, from_numpy, residual_layer_norm
from minitorch.layers.rms_norm import rms_norm
from minitorch.modules_basic import layer_norm

from ....minitorch.functions.test_fused import EPS, norm_gradient, norm_of
from ....support.examples import at_most
from ....support.tolerances import assert_close_arrays
from ....tensor_strategies import Array, laid_out

in_every_storage = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def composed(
    x: Any, residual: Any, gamma: Any, beta: Any, eps: float, rate: float = 0.0
) -> tuple[Any, Any]:
    """Return residual + dropout(x) and its norm by three operations."""
    hidden = residual + minitorch.Dropout(rate)(x)
    if beta is None:
        return hidden, rms_norm(hidden, gamma, eps)
    return hidden, layer_norm(hidden, gamma, beta, eps)


def on_device(test: Any) -> Any:
    """Run a test on a GPU or on the emulated one."""
    return pytest.mark.emulated(test)


def kept(seed: int, rate: float, shape: tuple[int, ...]) -> Array:
    """Return by what dropout multiplies each element: 0, or 1 / (1 - rate)."""
    size = math.prod(shape)
    words = [PLAIN.element_words(seed, block) for block in range(-(-size // 4))]
    keep = np.array(words).reshape(-1)[:size] >= drop_threshold(rate)
    return keep.reshape(shape) / (1.0 - rate)


@composite
def operands(draw: Any, dtype: np.dtype[Any]) -> list[Array]:
    """Draw x, residual, gamma, beta and two gradients; weights of the rows' dtype or of their sums'."""
    shape = (
        *draw(sampled_from([(), (1,), (5,), (2, 3)])),
        draw(sampled_from([1, 2, 7, 8, 16, 33, 40])),
    )
    rng = np.random.default_rng(draw(integers(0, 2**32 - 1)))
    weights = dtype if draw(booleans()) else acc_dtype(dtype)
    # A row whose numbers are nearly equal would be stretched, and its rounding with it.
    base = np.linspace(-3.0, 3.0, shape[-1])
    x, residual, dhidden, dout = (rng.standard_normal(shape) * 0.5 for _ in range(4))
    gamma, beta = (rounded(rng.standard_normal(shape[-1:]), weights) for _ in range(2))
    x, residual, dhidden, dout = (rounded(a, dtype) for a in (x, residual + base, dhidden, dout))
    return [x, residual, gamma, beta, dhidden, dout]


def ran(
    function: Any, arrays: list[Array], rate: float, place: Any, centred: bool = True
) -> tuple[list[Any], list[Any]]:
    """Run the function, or its composed form; return its results and the gradients of all operands."""
    *inputs, dhidden, dout = map(place, arrays)
    inputs = inputs if centred else inputs[:3]  # an RMS norm has no shift
    for t in inputs:
        t.requires_grad_(True)
    minitorch.manual_seed(3)
    hidden, out = function(*inputs, *[None] * (4 - len(inputs)), EPS, rate)
    ((hidden * dhidden).sum() + (out * dout).sum()).backward()
    return [hidden, out], [t.grad for t in inputs]


def check_textbook(arrays: list[Array], rate: float, place: Any, centred: bool = True) -> None:
    """Compare the function on the device with float64, value and gradients."""
    dtype = arrays[0].dtype
    (hidden, out), grads = ran(residual_layer_norm, arrays, rate, place, centred)
    x, residual, gamma, beta, dhidden, dout = (array.astype(np.float64) for array in arrays)
    minitorch.manual_seed(3)
    factor = kept(random.getrandbits(63), rate, x.shape) if rate else np.ones(x.shape)
    expected = rounded(residual + x * factor, dtype).astype(np.float64)
    assert_close_arrays(hidden, expected, dtype, "the sum", 4.0)
    wanted_norm = norm_of(expected, gamma, beta if centred else None)
    assert_close_arrays(out, wanted_norm, dtype, "its norm", 4.0)
    through, *of_weights = norm_gradient(dout, expected, gamma, beta if centred else None)
    wanted = [(through + dhidden) * factor, through + dhidden, *of_weights]
    names = "x", "residual", "gamma", "beta"
    for name, found, gradient, operand in zip(names, grads, wanted, arrays, strict=False):
        size = 4.0 + math.sqrt(x.size // x.shape[-1])
        assert_close_arrays(found, gradient, operand.dtype, f"gradient of {name}", size)


@on_device
@in_every_storage
@pytest.mark.parametrize("rate", [0.0, 0.4])
@at_most(5 if EMULATED else 25)
@given(data=data())
def test_the_sum_and_its_norm_are_the_textbooks(
    dtype: np.dtype[Any], rate: float, data: DataObject
) -> None:
    arrays, centred = data.draw(operands(dtype)), data.draw(booleans())
    check_textbook(arrays, rate, lambda array: data.draw(laid_out(array, CudaBackend)), centred)


@pytest.mark.parametrize("centred", [True, False])
def test_other_backends_compose_it(centred: bool) -> None:
    arrays = [np.arange(6.0).reshape(2, 3), np.ones((2, 3)), np.ones(3), np.zeros(3)]
    x, residual, gamma, shift = (from_numpy(a, FastBackend) for a in arrays)
    beta = shift if centred else None
    results = [
        residual_layer_norm(x, residual, gamma, beta, EPS, 0.0),
        composed(x, residual, gamma, beta, EPS),
    ]
    for found, expected in zip(*results, strict=True):
        assert_close_arrays(found, expected.to_numpy(), FLOAT64)


@on_device
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_layer_norm_of_16_bits_keeps_weights_of_float32(dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(0)
    rows, grad = (rounded(rng.standard_normal((6, 16)), dtype) for _ in range(2))
    gamma, beta = (rng.standard_normal(16).astype(np.float32) for _ in range(2))
    x, weights, bias = (from_numpy(a, CudaBackend, True) for a in (rows, gamma, beta))
    out = layer_norm(x, weights, bias, EPS)
    out.backward(from_numpy(grad, CudaBackend))
    wide_grad, wide_rows = (a.astype(np.float64) for a in (grad, rows))
    assert_close_arrays(out, norm_of(wide_rows, gamma, beta), dtype, "out", 4.0)
    dx, dgamma, dbeta = norm_gradient(wide_grad, wide_rows, gamma.astype(np.float64), beta)
    assert_close_arrays(x.grad, dx, dtype, "dx", 4.0)
    # Sums of float32 are rounded to no 16 bits on their way.
    assert_close_arrays(weights.grad, dgamma, FLOAT32, "dgamma", 10.0)
    assert_close_arrays(bias.grad, dbeta, FLOAT32, "dbeta", 10.0)


@on_device
def test_a_gradient_of_one_result_alone() -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((3, 9)) for _ in range(2)] + [np.ones(9), np.zeros(9)]
    for which in (0, 1):
        grads = []
        for function in (residual_layer_norm, composed):
            x, residual, gamma, beta = (from_numpy(a, CudaBackend, True) for a in arrays)
            minitorch.manual_seed(5)
            results = function(x, residual, gamma, beta, EPS, 0.25)
            (results[which] ** 2.0).sum().backward()
            grads.append([x.grad, residual.grad])
        for found, expected in zip(*grads, strict=True):
            assert_close_arrays(found, expected.to_numpy(), FLOAT64, "gradient", 10.0)


# -- what only a GPU runs ----------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("shape", "dtype", "rate"),
    [
        ((1, 1), FLOAT16, 0.0),
        ((65, 33), FLOAT32, 0.1),
        ((5, 257), BFLOAT16, 0.1),
        ((4099, 768), BFLOAT16, 0.1),
        ((4099, 768), FLOAT32, 0.0),
        ((300, 1600), FLOAT16, 0.1),
        ((7, 20_000), BFLOAT16, 0.0),
        ((129, 96), FLOAT64, 0.1),
    ],
    ids=str,
)
def test_sizes_that_no_block_divides(
    shape: tuple[int, int], dtype: np.dtype[Any], rate: float
) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal(shape) for _ in range(4)]
    rows[1] += np.linspace(-3.0, 3.0, shape[1])
    x, residual, dhidden, dout = (rounded(a, dtype) for a in rows)
    gamma, beta = (rounded(rng.standard_normal(shape[1]), dtype) for _ in range(2))
    arrays = [x, residual, gamma, beta, dhidden, dout]
    for centred in (True, False):
        check_textbook(arrays, rate, lambda array: from_numpy(array, CudaBackend), centred)
