"""Module 4: pooling, maxima, softmax, losses and dropout, as functions."""

from __future__ import annotations

from collections.abc import Callable

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
    dropout,
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


def drawn_images(data: DataObject, kernel: tuple[int, int]) -> Array:
    """Draw images that tiles of this size divide; no two elements of an image are equal."""
    batch, channel, rows, cols = (data.draw(integers(1, 3)) for _ in range(4))
    images = data.draw(lattice((batch, channel, rows * kernel[0], cols * kernel[1])))
    return images + np.linspace(0.0, 0.01, images.size).reshape(images.shape)


def drawn(data: DataObject, backend: TensorBackend, dtype: npt.DTypeLike) -> tuple[Array, Tensor]:
    array = data.draw(lattice(data.draw(shapes()))).astype(dtype)
    return array.astype(np.float64), data.draw(laid_out(array, backend))


def softmax_of(x: Array, dim: int) -> Array:
    powers = np.exp(x - x.max(dim, keepdims=True))
    return powers / powers.sum(dim, keepdims=True)


# --- task 4.3: pooling -----------------------------------------------------------------------


@pooling
@on_backends()
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@few
@given(data())
def test_tile(kernel: tuple[int, int], backend: TensorBackend, data: DataObject) -> None:
    images = drawn_images(data, kernel)
    tiles, rows, cols = tile(data.draw(laid_out(images, backend)), kernel)
    np.testing.assert_array_equal(tiles.to_numpy(), tiles_of(images, kernel))
    assert (rows, cols) == tiles.shape[2:4]


@pooling
@on_backends()
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@few
@given(data())
def test_average_pooling(kernel: tuple[int, int], backend: TensorBackend, data: DataObject) -> None:
    images = drawn_images(data, kernel)
    a = data.draw(laid_out(images, backend))
    assert_close_arrays(avgpool2d(a, kernel), tiles_of(images, kernel).mean(4), np.float64)
    grad_check(lambda x: avgpool2d(x, kernel), a)


# --- task 4.4: max ---------------------------------------------------------------------------


@softmaxes
@on_backends()
@on_dtypes
@few
@given(data())
def test_max(dtype: npt.DTypeLike, backend: TensorBackend, data: DataObject) -> None:
    array, a = drawn(data, backend, dtype)
    dim = data.draw(integers(-a.dims, a.dims - 1))
    largest = array.max(dim, keepdims=True)
    assert_close_arrays(minitorch.max(a, dim), largest, dtype)
    assert_close_arrays(argmax(a, dim), 1.0 * (array == largest), dtype)


@softmaxes
@on_backends()
@few
@given(data())
def test_the_gradient_of_max_goes_to_every_maximum(
    backend: TensorBackend, data: DataObject
) -> None:
    array, a = drawn(data, backend, np.float64)
    dim = data.draw(integers(0, a.dims - 1))
    a.requires_grad_(True)
    out = minitorch.max(a, dim)
    dout = np.linspace(1.0, 2.0, out.size).reshape(out.shape)
    out.backward(from_numpy(dout, backend))
    is_max = array == array.max(dim, keepdims=True)
    assert_close_arrays(a.grad, is_max * dout, np.float64, "gradient")


@softmaxes
@few
@given(data())
def test_the_gradient_of_max_by_central_difference(data: DataObject) -> None:
    array = drawn_images(data, (1, 1))  # no two elements are equal
    dim = data.draw(integers(0, 3))
    grad_check(lambda x: minitorch.max(x, dim), data.draw(laid_out(array)))


@softmaxes
def test_the_dimension_of_max_may_be_a_tensor() -> None:
    a = tensor([[1.0, 5.0], [7.0, 2.0]])
    assert minitorch.max(a, tensor([1])).to_numpy().tolist() == [[5.0], [7.0]]
    assert argmax(a, tensor(1)).to_numpy().tolist() == [[0.0, 1.0], [1.0, 0.0]]


@softmaxes
def test_the_maximum_of_large_and_infinite_numbers() -> None:
    a = tensor([[-1e12, -np.inf], [-np.inf, -np.inf], [np.inf, 0.0]])
    assert minitorch.max(a, 1).to_numpy().tolist() == [[-1e12], [-np.inf], [np.inf]]


@softmaxes
@on_backends()
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@few
@given(data())
def test_max_pooling(kernel: tuple[int, int], backend: TensorBackend, data: DataObject) -> None:
    images = drawn_images(data, kernel)
    a = data.draw(laid_out(images, backend))
    a.requires_grad_(True)
    pooled = maxpool2d(a, kernel)
    assert_close_arrays(pooled, tiles_of(images, kernel).max(4), np.float64)
    # The gradient passes through two views and a permutation on its way back.
    dout = np.linspace(1.0, 2.0, pooled.size).reshape(pooled.shape)
    pooled.backward(from_numpy(dout, backend))
    spread = np.kron(dout, np.ones(kernel))
    maxima = np.kron(pooled.to_numpy(), np.ones(kernel))
    assert_close_arrays(a.grad, spread * (images == maxima), np.float64, "gradient")


# --- task 4.4: softmax -----------------------------------------------------------------------


@softmaxes
@on_backends()
@on_dtypes
@few
@given(data())
def test_softmax_over_any_dimension(
    dtype: npt.DTypeLike, backend: TensorBackend, data: DataObject
) -> None:
    array, a = drawn(data, backend, dtype)
    dim = data.draw(integers(-a.dims, a.dims - 1))
    probs = softmax(a, dim)
    assert_close_arrays(probs, softmax_of(array, dim), dtype)
    assert_close_arrays(probs.sum(dim), np.ones(probs.sum(dim).shape), dtype, "sum")


@softmaxes
@on_backends()
@on_dtypes
@few
@given(data())
def test_logarithms_of_softmax(
    dtype: npt.DTypeLike, backend: TensorBackend, data: DataObject
) -> None:
    array, a = drawn(data, backend, dtype)
    dim = data.draw(integers(-a.dims, a.dims - 1))
    assert_close_arrays(logsoftmax(a, dim), np.log(softmax_of(array, dim)), dtype, size=10.0)
    expected = np.log(np.exp(array).sum(dim, keepdims=True))
    assert_close_arrays(logsumexp(a, dim), expected, dtype, size=10.0)


@softmaxes
@on_backends()
@pytest.mark.parametrize("function", [softmax, logsoftmax, logsumexp])
@few
@given(data())
def test_gradients_of_softmax(
    function: Callable[..., Tensor], backend: TensorBackend, data: DataObject
) -> None:
    _, a = drawn(data, backend, np.float64)
    dim = data.draw(integers(0, a.dims - 1))
    weights = from_numpy(np.linspace(-1.0, 2.0, a.size).reshape(a.shape), backend)
    grad_check(lambda x: function(x, dim) * weights, a)


@softmaxes
@on_backends()
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_of_rows_of_minus_infinity(dim: int, backend: TensorBackend) -> None:
    # A masked score is minus infinity: it weighs nothing, and a row of them weighs nothing at all.
    array = np.array([[0.0, -np.inf, 1.0], [-np.inf] * 3, [-np.inf, -np.inf, 4.0]])
    expected = softmax_of(array[::2], 1)[[0, 0, 1]] * [[1.0], [0.0], [1.0]]
    seen = array if dim == 1 else array.T
    a = from_numpy(seen, backend, requires_grad=True)
    probs = softmax(a, dim)
    assert_close_arrays(probs, expected if dim == 1 else expected.T, np.float64)
    (probs * from_numpy(np.arange(9.0).reshape(3, 3), backend)).sum().backward()
    assert a.grad is not None
    assert np.isfinite(a.grad.to_numpy()).all()
    assert (a.grad.to_numpy()[np.isinf(seen)] == 0.0).all()


@softmaxes
@on_backends()
def test_logarithms_of_rows_of_minus_infinity(backend: TensorBackend) -> None:
    array = np.array([[0.0, -np.inf], [-np.inf, -np.inf]])
    a = from_numpy(array, backend, requires_grad=True)
    total = logsumexp(a, 1)
    assert total.to_numpy().tolist() == [[0.0], [-np.inf]]
    assert logsoftmax(a, 1).to_numpy().tolist() == array.tolist()
    total.backward(from_numpy(np.ones((2, 1)), backend))
    assert_close_arrays(a.grad, np.array([[1.0, 0.0], [0.0, 0.0]]), np.float64)


@softmaxes
@on_backends()
@on_dtypes
def test_softmax_of_large_numbers(dtype: npt.DTypeLike, backend: TensorBackend) -> None:
    a = from_numpy(np.array([[1e4, 1e4 - 1.0, -1e4], [3e30, -3e30, 0.0]], dtype), backend)
    e = np.exp(-1.0)
    expected = np.array([[1 / (1 + e), e / (1 + e), 0.0], [1.0, 0.0, 0.0]])
    assert_close_arrays(softmax(a, 1), expected, dtype)
    assert_close_arrays(
        logsumexp(a, 1), np.array([[1e4 + np.log(1 + e)], [3e30]]), dtype, "logsumexp"
    )


# --- dropout ---------------------------------------------------------------------------------


@softmaxes
@on_backends()
@few
@given(data())
def test_dropout(backend: TensorBackend, data: DataObject) -> None:
    array, a = drawn(data, backend, np.float64)
    np.testing.assert_array_equal(dropout(a, 0.0).to_numpy(), array)
    np.testing.assert_array_equal(dropout(a, 0.5, ignore=True).to_numpy(), array)
    np.testing.assert_array_equal(dropout(a, 1.0).to_numpy(), 0.0 * array)
    half = dropout(a, 0.5).to_numpy()
    assert ((half == array) | (half == 0.0)).all()


@softmaxes
def test_dropout_drops_the_part_it_was_told_to() -> None:
    minitorch.manual_seed(1)
    a = from_numpy(np.ones((100, 100)), requires_grad=True)
    out = dropout(a, 0.3)
    assert abs(out.to_numpy().mean() - 0.7) < 0.02
    out.sum().backward()
    assert a.grad is not None
    np.testing.assert_array_equal(a.grad.to_numpy(), out.to_numpy())


# --- losses ----------------------------------------------------------------------------------


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


def test_one_hot() -> None:
    coded = one_hot(tensor([[0, 2], [1, 1]]), 3)
    assert coded.is_constant()
    np.testing.assert_array_equal(coded.to_numpy(), np.eye(3)[[[0, 2], [1, 1]]])
