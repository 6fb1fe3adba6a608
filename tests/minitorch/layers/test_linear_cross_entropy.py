"""The loss of a language model's head, chunk by chunk: the same as from all logits, whatever the chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, booleans, data, integers

import minitorch
from kernels.runtime.dtypes import BFLOAT16, FLOAT32, FLOAT64, FLOAT_DTYPES, acc_dtype, rounded
from kernels.runtime.targets import IS_SIMULATOR
from minitorch import CudaBackend, FastBackend, SimpleBackend, TensorBackend, from_numpy, no_grad
from minitorch.layers.linear_cross_entropy import (
    linear_cross_entropy,
)

from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import Array, laid_out

in_every_storage = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
on_backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(FastBackend, id="fast"),
        pytest.param(CudaBackend, id="cuda", marks=pytest.mark.simulator),
    ],
)
pytestmark = pytest.mark.usefixtures("quick_barriers")


def textbook(x: Array, weights: Array, bias: Array, targets: Array) -> tuple[Any, ...]:
    """Return the loss and the gradients of x, weights and bias in float64."""
    logits = x @ weights + bias
    shifted = logits - logits.max(-1, keepdims=True)
    lse = np.log(np.exp(shifted).sum(-1, keepdims=True))
    rows = np.arange(len(x))
    loss = (lse[:, 0] - shifted[rows, targets]).mean()
    dlogits = np.exp(shifted - lse)
    dlogits[rows, targets] -= 1.0
    dlogits /= len(x)
    return loss, dlogits @ weights.T, x.T @ dlogits, dlogits.sum(0)


def drawn(data: DataObject, dtype: np.dtype[Any]) -> tuple[list[Array], Array]:
    """Draw x, weights and bias, and targets."""
    n, width, classes = (data.draw(integers(1, most)) for most in (7, 4, 9))
    rng = np.random.default_rng(data.draw(integers(0, 2**32 - 1)))
    shapes = (n, width), (width, classes), (classes,)
    arrays = [rounded(rng.standard_normal(shape), dtype) for shape in shapes]
    return arrays, rng.integers(0, classes, n)


@on_backends
@in_every_storage
@settings(max_examples=4 if IS_SIMULATOR else 15)
@given(data=data(), has_bias=booleans())
def test_the_loss_and_its_gradients_are_the_textbooks(
    backend: TensorBackend, dtype: np.dtype[Any], data: DataObject, has_bias: bool
) -> None:
    arrays, targets = drawn(data, dtype)
    arrays[2] *= has_bias
    operands: list[Any] = [data.draw(laid_out(array, backend)) for array in arrays]
    x, weights, bias = operands
    for t in operands:
        t.requires_grad_(True)
    rows = data.draw(integers(1, len(targets)))
    loss = linear_cross_entropy(x, weights, targets, bias if has_bias else None, rows)
    (loss * 3.0).sum().backward()
    wide_x, wide_weights, wide_bias = (array.astype(np.float64) for array in arrays)
    expected, *gradients = textbook(wide_x, wide_weights, wide_bias, targets)
    # Logits of 16 bits are rounded before their exponentials are taken.
    assert_close_arrays(
        np.asarray(loss.to_numpy()).astype(dtype), np.array([expected]), dtype, "loss", 5.0
    )
    assert loss.dtype == acc_dtype(dtype)
    found = zip(("x", "weights", "bias"), operands[: 2 + has_bias], gradients, strict=False)
    for name, t, gradient in found:
        assert_close_arrays(t.grad, 3.0 * gradient, dtype, f"gradient of {name}", 5.0)


@on_backends
@settings(max_examples=4 if IS_SIMULATOR else 15)
@given(data=data())
def test_chunks_change_nothing(backend: TensorBackend, data: DataObject) -> None:
    arrays, targets = drawn(data, FLOAT64)
    results = []
    for rows in (data.draw(integers(1, len(targets))), None):
        operands = [from_numpy(array, backend, True) for array in arrays]
        x, weights, bias = operands
        loss = linear_cross_entropy(x, weights, targets, bias, rows)
        loss.backward()
        results.append([loss, *(t.grad for t in operands)])
    for found, expected in zip(*results, strict=True):
        assert_close_arrays(found, expected.to_numpy(), FLOAT64, "result", 5.0)


def test_a_backend_without_the_kernels_composes_it() -> None:
    rng = np.random.default_rng(0)
    x, weights = (from_numpy(rng.standard_normal(s), SimpleBackend) for s in ((3, 2), (2, 4)))
    targets = np.array([3, 0, 1])
    found = linear_cross_entropy(x, weights, targets)
    expected = minitorch.plain()(linear_cross_entropy)(x, weights, targets)
    np.testing.assert_array_equal(found.to_numpy(), expected.to_numpy())


def test_without_a_gradient_nothing_is_multiplied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, weights = (from_numpy(rng.standard_normal(s), FastBackend, True) for s in ((5, 2), (2, 4)))
    products = []
    multiply = FastBackend.matrix_multiply
    monkeypatch.setattr(
        FastBackend, "matrix_multiply", lambda a, b: products.append(a.shape) or multiply(a, b)
    )
    with no_grad():
        linear_cross_entropy(x, weights, np.zeros(5, int), rows=2)
    assert products == [(2, 2), (2, 2), (1, 2)]


def test_a_tied_table_is_read_as_it_lies() -> None:
    rng = np.random.default_rng(0)
    rows, table = rng.standard_normal((5, 3)), rng.standard_normal((7, 3))
    targets = np.array([0, 6, 2, 2, 5])
    t = from_numpy(table, FastBackend, True)
    loss = linear_cross_entropy(from_numpy(rows), t.permute(1, 0), targets, rows=2)
    loss.backward()
    expected, _, dweights, _ = textbook(rows, table.T, np.zeros(7), targets)
    assert loss.item() == pytest.approx(expected)
    assert_close_arrays(t.grad, dweights.T, FLOAT64, "gradient of the table", 5.0)


@on_backends
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_a_class_that_is_impossible_weighs_nothing(
    backend: TensorBackend, dtype: np.dtype[Any]
) -> None:
    logits = np.array([[0.0, -np.inf, 1.0], [2.0, 3.0, -np.inf]])
    t = from_numpy(rounded(logits, dtype), backend, True)
    losses = minitorch.softmax_loss(t, np.array([0, 1]))
    losses.sum().backward()
    with np.errstate(divide="ignore"):
        powers = np.exp(logits)
    probs = powers / powers.sum(-1, keepdims=True)
    assert_close_arrays(losses, -np.log(probs[[0, 1], [0, 1]]), dtype, "losses")
    probs[[0, 1], [0, 1]] -= 1.0
    assert_close_arrays(t.grad, probs, dtype, "gradient")


# -- what only a GPU runs ----------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("classes", [50_304, 50_257], ids=str)
def test_a_vocabulary(dtype: np.dtype[Any], classes: int) -> None:
    rng = np.random.default_rng(0)
    x = rounded(rng.standard_normal((300, 64)), dtype)
    weights = rounded(rng.standard_normal((64, classes)) * 0.1, dtype)
    targets = rng.integers(0, classes, 300)
    operands = [from_numpy(array, CudaBackend, True) for array in (x, weights)]
    loss = linear_cross_entropy(operands[0], operands[1], targets, rows=128)
    loss.backward()
    expected, dx, dweights, _ = textbook(
        x.astype(np.float64), weights.astype(np.float64), np.zeros(classes), targets
    )
    assert loss.item() == pytest.approx(expected, rel=1e-3)
    for t, gradient in zip(operands, (dx, dweights), strict=True):
        size = np.abs(gradient).max()
        assert_close_arrays(t.grad, gradient, dtype, "gradient", float(size))
