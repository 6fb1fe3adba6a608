"""Module 4: pooling, maxima, softmax, losses and dropout, as functions, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, data, integers

import minitorch
from minitorch import (
    Tensor,
    TensorBackend,
    argmax,
    avgpool2d,
    from_numpy,
    grad_check,
    logsoftmax,
    logsumexp,
    maxpool2d,
    one_hot,
    softmax,
    softmax_loss,
    tensor,
    tile,
)

from ..support.tolerances import assert_close_arrays
from ..tensor_strategies import Array, laid_out, lattice, on_backends, on_dtypes, shapes

few = settings(max_examples=15)
pooling = pytest.mark.task4_3
softmaxes = pytest.mark.task4_4
KERNELS = [(1, 2), (2, 1), (2, 2), (3, 2)]


def tiles_of(images: Array, kernel: tuple[int, int]) -> Array:
    """Cut (batch, channel, h, w) into (batch, channel, h / kh, w / kw, kh * kw)."""
    (kh, kw), (batch, channel, h, w) = kernel, images.shape
    split = images.reshape(batch, channel, h // kh, kh, w // kw, kw)
    return split.swapaxes(3, 4).reshape(batch, channel, h // kh, w // kw, kh * kw)


def drawn(data: DataObject, backend: TensorBackend, dtype: npt.DTypeLike) -> tuple[Array, Tensor]:
    """Draw an array and a tensor of the same elements, no two of which are equal."""
    array = data.draw(lattice(data.draw(shapes()))).astype(dtype)
    array += np.linspace(0.0, 0.01, array.size).reshape(array.shape).astype(dtype)
    return array.astype(np.float64), data.draw(laid_out(array, backend))


def softmax_of(x: Array, dim: int) -> Array:
    powers = np.exp(x - x.max(dim, keepdims=True))
    return powers / powers.sum(dim, keepdims=True)


# --- task 4.3: pooling -----------------------------------------------------------------------


@on_backends()
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize(
    ("pool", "of_tiles"),
    [
        pytest.param(lambda a, kernel: tile(a, kernel)[0], lambda tiles: tiles, marks=pooling),
        pytest.param(avgpool2d, lambda tiles: tiles.mean(4), marks=pooling),
        pytest.param(maxpool2d, lambda tiles: tiles.max(4), marks=softmaxes),
    ],
    ids=["tile", "average", "maximum"],
)
@few
@given(data())
def test_pooling(
    pool: Any, of_tiles: Any, kernel: tuple[int, int], backend: TensorBackend, data: DataObject
) -> None:
    batch, channel, rows, cols = (data.draw(integers(1, 3)) for _ in range(4))
    images = data.draw(lattice((batch, channel, rows * kernel[0], cols * kernel[1])))
    images = images + np.linspace(0.0, 0.01, images.size).reshape(images.shape)
    a = data.draw(laid_out(images, backend))
    assert_close_arrays(pool(a, kernel), of_tiles(tiles_of(images, kernel)), np.float64)
    grad_check(lambda x: pool(x, kernel), a)


# --- task 4.4: functions over a dimension ------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[Array, int], Array]]] = {
    "max": (minitorch.max, lambda x, dim: x.max(dim, keepdims=True)),
    "argmax": (argmax, lambda x, dim: 1.0 * (x == x.max(dim, keepdims=True))),
    "softmax": (softmax, softmax_of),
    "logsoftmax": (logsoftmax, lambda x, dim: np.log(softmax_of(x, dim))),
    "logsumexp": (logsumexp, lambda x, dim: np.log(np.exp(x).sum(dim, keepdims=True))),
}


@softmaxes
@on_backends()
@on_dtypes
@pytest.mark.parametrize("name", FUNCTIONS)
@few
@given(data())
def test_a_function_over_any_dimension(
    name: str, dtype: npt.DTypeLike, backend: TensorBackend, data: DataObject
) -> None:
    function, expected = FUNCTIONS[name]
    array, a = drawn(data, backend, dtype)
    dim = data.draw(integers(-a.dims, a.dims - 1))
    assert_close_arrays(function(a, dim), expected(array, dim), dtype, name, size=10.0)
    if dtype == np.float64 and name != "argmax":
        weights = from_numpy(np.linspace(-1.0, 2.0, a.size).reshape(a.shape), backend)
        grad_check(lambda x: function(x, dim) * weights, a)


@softmaxes
@on_backends()
def test_the_gradient_of_max_goes_to_every_maximum(backend: TensorBackend) -> None:
    a = from_numpy(np.array([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), backend, requires_grad=True)
    minitorch.max(a, tensor([1])).backward(from_numpy(np.array([[2.0], [5.0]]), backend))
    expected = np.array([[0.0, 2.0, 2.0], [5.0, 0.0, 0.0]])
    assert_close_arrays(a.grad, expected, np.float64, "gradient")


@softmaxes
@on_backends()
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_of_minus_infinity_weigh_nothing(dim: int, backend: TensorBackend) -> None:
    # A masked score is minus infinity: it weighs nothing, and a row of them weighs nothing at all.
    array = np.array([[0.0, -np.inf, 1.0], [-np.inf] * 3, [-np.inf, -np.inf, 4.0]])
    expected = softmax_of(array[::2], 1)[[0, 0, 1]] * [[1.0], [0.0], [1.0]]
    seen = array if dim == 1 else array.T
    a = from_numpy(seen, backend, requires_grad=True)
    probs = softmax(a, dim)
    assert_close_arrays(probs, expected if dim == 1 else expected.T, np.float64)
    largest = minitorch.max(a, dim).to_numpy().reshape(-1)
    assert largest.tolist() == [1.0, -np.inf, 4.0]
    assert logsumexp(a, dim).to_numpy().reshape(-1)[1:].tolist() == [-np.inf, 4.0]
    assert np.array_equal(np.isneginf(logsoftmax(a, dim).to_numpy()), np.isneginf(seen))
    weights = from_numpy(np.arange(9.0).reshape(3, 3), backend)
    (probs * weights + logsumexp(a, dim)).sum().backward()
    assert a.grad is not None
    assert np.isfinite(a.grad.to_numpy()).all()
    assert (a.grad.to_numpy()[np.isinf(seen)] == 0.0).all()


@softmaxes
@on_backends()
@on_dtypes
def test_softmax_of_large_numbers(dtype: npt.DTypeLike, backend: TensorBackend) -> None:
    a = from_numpy(np.array([[1e4, 1e4 - 1.0, -1e4], [3e30, -3e30, 0.0]], dtype), backend)
    e = np.exp(-1.0)
    expected = np.array([[1 / (1 + e), e / (1 + e), 0.0], [1.0, 0.0, 0.0]])
    assert_close_arrays(softmax(a, 1), expected, dtype)
    total = np.array([[1e4 + np.log(1 + e)], [3e30]])
    assert_close_arrays(logsumexp(a, 1), total, dtype, "logsumexp")


# --- dropout and losses ------------------------------------------------------------------------


@on_backends()
@few
@given(data())
def test_cross_entropy(backend: TensorBackend, data: DataObject) -> None:
    rows, classes = data.draw(integers(1, 4)), data.draw(integers(1, 4))
    array = data.draw(lattice((rows, classes)))
    logits = data.draw(laid_out(array, backend))
    target = np.array([data.draw(integers(0, classes - 1)) for _ in range(rows)])
    expected = -np.log(softmax_of(array, 1))[np.arange(rows), target]
    for as_given in (target, tensor(target.tolist(), backend)):
        assert_close_arrays(softmax_loss(logits, as_given), expected, np.float64, size=10.0)
    grad_check(lambda x: softmax_loss(x, target), logits)
    coded = one_hot(tensor(target.tolist(), backend), classes)
    np.testing.assert_array_equal(coded.to_numpy(), np.eye(classes)[target])
