"""The fused layers: kernel, composed form and float64 NumPy give the same values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, DrawFn, composite, data, integers

import minitorch
from minitorch import (
    Adam,
    Embedding,
    FastBackend,
    Parameter,
    SimpleBackend,
    Tensor,
    TensorBackend,
    from_numpy,
)
from minitorch.layers.rms_norm import rms_norm
from minitorch.modules_basic import layer_norm
from minitorch.nn import GELU, softmax, softmax_loss

from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import Array, laid_out, lattice, on_backends, on_dtypes
from ..training.test_adamw import Textbook

EPS = 1e-5
GELU_SCALE = math.sqrt(2.0 / math.pi)
few = settings(max_examples=15)

# -- the oracles: values and gradients in float64 ----------------------------------------------


def softmax_of(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def softmax_gradient(dout: Array, x: Array) -> tuple[Array]:
    probs = softmax_of(x)
    return (probs * (dout - (probs * dout).sum(-1, keepdims=True)),)


def normal_of(x: Array, centred: bool) -> tuple[Array, Array]:
    """Return rows divided by their deviation, or by their root mean square, and its reciprocal."""
    deviation = x - x.mean(-1, keepdims=True) * centred
    rstd = 1.0 / np.sqrt((deviation**2).mean(-1, keepdims=True) + EPS)
    return deviation * rstd, rstd


def norm_of(x: Array, gamma: Array, beta: Array | None = None) -> Array:
    """Return layer norm; without beta RMS norm."""
    return normal_of(x, beta is not None)[0] * gamma + (0.0 if beta is None else beta)


def norm_gradient(
    dout: Array, x: Array, gamma: Array, beta: Array | None = None
) -> tuple[Array, ...]:
    centred = beta is not None
    (normal, rstd), d_hat = normal_of(x, centred), dout * gamma
    mean = d_hat.mean(-1, keepdims=True) * centred
    along = (d_hat * normal).mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    of_weights = (dout * normal).sum(rows), dout.sum(rows)
    return (d_hat - mean - normal * along) * rstd, *of_weights[: 1 + centred]


def gelu_of(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(GELU_SCALE * (x + 0.044715 * x**3)))


def gelu_gradient(dout: Array, x: Array) -> tuple[Array]:
    t = np.tanh(GELU_SCALE * (x + 0.044715 * x**3))
    slope = GELU_SCALE * (1.0 + 3.0 * 0.044715 * x**2)
    return (dout * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t**2) * slope),)


def targets_for(logits: Any) -> npt.NDArray[np.int64]:
    rows, classes = logits.shape
    return (np.arange(rows) * 7 + 1) % classes


def cross_entropy_of(x: Array) -> Array:
    largest = x.max(-1)
    total = np.exp(x - largest[:, None]).sum(-1)
    return np.log(total) + (largest - x[np.arange(len(x)), targets_for(x)])


def cross_entropy_gradient(dout: Array, x: Array) -> tuple[Array]:
    return (dout[:, None] * (softmax_of(x) - np.eye(x.shape[1])[targets_for(x)]),)


class Layer(NamedTuple):
    """A layer in its three forms."""

    fused: Callable[..., Tensor]
    composed: Callable[..., Tensor]
    value: Callable[..., Array]
    gradient: Callable[..., tuple[Array, ...]]


def layer(function: Callable[..., Tensor], *more: Any) -> Layer:
    """Return a layer: as the table of the backend serves it, and as the course computes it."""
    return Layer(function, minitorch.plain()(function), *more)


LAYERS = {
    "softmax": layer(lambda x: softmax(x, x.dims - 1), softmax_of, softmax_gradient),
    "layer norm": layer(
        lambda x, gamma, beta: layer_norm(x, gamma, beta, EPS), norm_of, norm_gradient
    ),
    "RMS norm": layer(lambda x, gamma: rms_norm(x, gamma, EPS), norm_of, norm_gradient),
    "gelu": layer(GELU, gelu_of, gelu_gradient),
    "cross entropy": layer(
        lambda x: softmax_loss(x, targets_for(x)), cross_entropy_of, cross_entropy_gradient
    ),
}
in_every_form = pytest.mark.parametrize("form", ["fused", "composed"])
layers = pytest.mark.parametrize("name", list(LAYERS))


def check(
    name: str,
    form: str,
    dtype: npt.DTypeLike,
    data: DataObject,
    x: Array,
    backend: TensorBackend = FastBackend,
) -> None:
    """Compare one form of a layer, value and gradients, with NumPy; the layout in memory is drawn."""
    layer = LAYERS[name]
    arrays = [x.astype(dtype)]
    n = x.shape[-1]
    if "norm" in name:
        arrays.append(np.linspace(0.5, 1.5, n).astype(dtype))
    if name == "layer norm":
        arrays.append(np.linspace(-1, 1, n).astype(dtype))
    wide = [array.astype(np.float64) for array in arrays]
    operands = [data.draw(laid_out(array, backend)) for array in arrays]
    for operand in operands:
        operand.requires_grad_(True)
    out = getattr(layer, form)(*operands)
    expected = layer.value(*wide)
    assert_close_arrays(out, expected, dtype, f"{form} {name}", 5.0)
    dout = np.linspace(-1.0, 2.0, out.size).reshape(out.shape).astype(dtype)
    out.backward(data.draw(laid_out(dout, backend)))
    # A row of nearly equal numbers, which the norm stretches a hundredfold, has large gradients.
    size = 5.0 + (normal_of(wide[0], True)[1].max() * len(x) if "norm" in name else 0.0)
    gradients = layer.gradient(dout.astype(np.float64), *wide)
    for i, (operand, gradient) in enumerate(zip(operands, gradients, strict=True)):
        assert_close_arrays(operand.grad, gradient, dtype, f"gradient {i} of {form} {name}", size)


@composite
def small_inputs(draw: DrawFn, name: str, most: int = 5) -> Array:
    """Draw an input for a layer: one to four dimensions of up to ``most`` elements."""
    dims = 2 if name == "cross entropy" else draw(integers(1, 4))
    shape = tuple(draw(integers(1, most)) for _ in range(dims))
    x = draw(lattice(shape))
    # No row of equal numbers for layer norm: its variance would be rounding.
    return x + np.arange(shape[-1]) if "norm" in name else x


# -- softmax, layer norm, GELU, cross entropy --------------------------------------------------


@layers
@in_every_form
@on_dtypes
@few
@given(data())
def test_small_tensors_in_any_layout(
    dtype: npt.DTypeLike, form: str, name: str, data: DataObject
) -> None:
    check(name, form, dtype, data, data.draw(small_inputs(name)))


@layers
@in_every_form
@on_dtypes
@pytest.mark.parametrize("shape", [(1, 1), (65, 33), (129, 7), (3, 4099)], ids=str)
@settings(max_examples=1)
@given(data())
def test_sizes_that_no_block_or_vector_divides(
    shape: tuple[int, int], dtype: npt.DTypeLike, form: str, name: str, data: DataObject
) -> None:
    check(name, form, dtype, data, np.random.default_rng(0).standard_normal(shape))


@layers
@in_every_form
@on_dtypes
def test_extreme_numbers_do_not_overflow(dtype: npt.DTypeLike, form: str, name: str) -> None:
    check_extremes(dtype, form, name)


def check_extremes(
    dtype: npt.DTypeLike, form: str, name: str, backend: TensorBackend = FastBackend
) -> None:
    x = np.array(
        [[1e4, 0.0, -1e4, 3.0], [-1e9, -1e9, -1e9, -1e9 - 1e3], [80.0, 90.0, -88.0, 1e-30]]
    )
    if "norm" in name:
        x = np.array([[1e15, -1e15, 0.0, 1.0], [1e-20, 0.0, 0.0, 0.0]])
    x = x.astype(dtype)
    layer = LAYERS[name]
    operands = [from_numpy(x, backend, requires_grad=True)]
    weights = {"layer norm": (np.ones(4), np.zeros(4)), "RMS norm": (np.ones(4),)}
    operands += [from_numpy(y.astype(dtype), backend) for y in weights.get(name, ())]
    wide = [np.asarray(operand).astype(np.float64) for operand in operands]
    out = getattr(layer, form)(*operands)
    assert_close_arrays(out, layer.value(*wide), dtype, name)
    dout = np.linspace(-1.0, 1.0, out.size).reshape(out.shape)
    out.backward(from_numpy(dout.astype(dtype), backend))
    expected = layer.gradient(dout, *wide)[0]
    assert_close_arrays(operands[0].grad, expected, dtype, "gradient", np.abs(expected).max())


@in_every_form
@on_dtypes
def test_scores_of_minus_infinity_weigh_nothing(dtype: npt.DTypeLike, form: str) -> None:
    check_masked_scores(dtype, form)


def check_masked_scores(
    dtype: npt.DTypeLike, form: str, backend: TensorBackend = FastBackend
) -> None:
    inf = np.inf
    x = np.array([[0.0, -inf, np.log(3.0)], [-inf, 5.0, -inf], [-inf, -inf, -inf]], dtype)
    operand = from_numpy(x, backend, requires_grad=True)
    probs = getattr(LAYERS["softmax"], form)(operand)
    expected = np.array([[0.25, 0.0, 0.75], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert_close_arrays(probs, expected, dtype)
    probs.backward(from_numpy(np.arange(9.0).reshape(3, 3).astype(dtype), backend))
    d = 0.25 * 0.75 * 2.0
    gradient = np.array([[-d, 0.0, d], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert_close_arrays(operand.grad, gradient, dtype, "gradient")


@in_every_form
@on_dtypes
def test_a_class_of_minus_infinity_is_no_class(dtype: npt.DTypeLike, form: str) -> None:
    check_impossible_class(dtype, form)


def check_impossible_class(
    dtype: npt.DTypeLike, form: str, backend: TensorBackend = FastBackend
) -> None:
    operand = from_numpy(np.array([[0.0, -np.inf, 0.0]], dtype), backend, requires_grad=True)
    # Its target is class 1 % 3, the impossible one; the loss of another is log 2.
    loss = {"fused": softmax_loss, "composed": minitorch.plain()(softmax_loss)}[form]
    losses = loss(operand, np.array([2]))
    assert_close_arrays(losses, np.array([np.log(2.0)]), dtype)
    losses.sum().backward()
    assert_close_arrays(operand.grad, np.array([[0.5, 0.0, -0.5]]), dtype, "gradient")


# -- embedding ---------------------------------------------------------------------------------


@on_backends()
@on_dtypes
@few
@given(data())
def test_embedding(dtype: npt.DTypeLike, backend: TensorBackend, data: DataObject) -> None:
    check_embedding(dtype, backend, data)


def check_embedding(dtype: npt.DTypeLike, backend: TensorBackend, data: DataObject) -> None:
    rows, dim = data.draw(integers(1, 5)), data.draw(integers(1, 4))
    table = data.draw(lattice((rows, dim))).astype(dtype)
    shape = tuple(data.draw(integers(1, 3)) for _ in range(data.draw(integers(1, 3))))
    ids = data.draw(lattice(shape, 0.0, 0, rows - 1)) * 10.0
    layer = Embedding(rows, dim, backend, dtype)
    layer.weights.update(data.draw(laid_out(table, backend)))
    ids = ids.round().astype(np.int64)
    for as_given in (ids, from_numpy(ids, backend), from_numpy(ids.astype(dtype), backend)):
        out = layer(as_given)
        assert_close_arrays(out, table[ids], dtype)
    dout = np.linspace(-1.0, 2.0, out.size).reshape(out.shape).astype(dtype)
    out.backward(data.draw(laid_out(dout, backend)))
    expected = np.zeros((rows, dim))
    np.add.at(expected, ids, dout.astype(np.float64))  # a row that was looked up twice adds up
    assert_close_arrays(layer.weights.value.grad, expected, dtype, "gradient", 20.0)


# -- Adam --------------------------------------------------------------------------------------


@on_dtypes
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(3,), (5, 7), (2, 4099)], ids=str)
def test_adam(shape: tuple[int, ...], weight_decay: float, dtype: npt.DTypeLike) -> None:
    small = int(np.prod(shape)) < 100
    check_adam(shape, weight_decay, dtype, (FastBackend, SimpleBackend)[: 1 + small])


def check_adam(
    shape: tuple[int, ...],
    weight_decay: float,
    dtype: npt.DTypeLike,
    backends: tuple[TensorBackend, ...],
) -> None:
    rng = np.random.default_rng(0)
    start = rng.standard_normal(shape).astype(dtype)
    gradients = [(rng.standard_normal(shape) * 10.0 ** (i - 2)).astype(dtype) for i in range(5)]
    lr, beta1, beta2, eps = 0.01, 0.8, 0.95, 1e-8
    exact = Textbook([start], math.inf, (beta1, beta2), lr=lr, weight_decay=weight_decay)
    for gradient in gradients:
        exact.step([gradient])
    for backend in backends:
        parameter = Parameter(from_numpy(start.copy(), backend))
        optimiser = Adam([parameter], lr, beta1, beta2, eps, weight_decay)
        for gradient in gradients:
            parameter.value.grad = from_numpy(gradient, backend)
            optimiser.step()
        assert_close_arrays(parameter.value, exact.values[0], dtype)
