"""Gather, scatter-add, sort, cumulative sum, ELU and where on every backend; NumPy is the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import minitorch
from minitorch import CudaBackend, FastBackend, SimpleBackend, Tensor, TensorBackend, from_numpy

from ...support.examples import at_most
from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import Array, laid_out, lattice, shapes

pytestmark = pytest.mark.usefixtures("quick_barriers")

DTYPES = (np.float16, np.float32, np.float64)
on_backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(SimpleBackend, id="simple"),
        pytest.param(FastBackend, id="fast"),
        pytest.param(CudaBackend, id="cuda", marks=pytest.mark.simulator),
    ],
)


@st.composite
def operands(draw: st.DrawFn, backend: TensorBackend) -> tuple[Array, Tensor, int]:
    """Draw an array, a tensor of its elements in some layout, and a dimension."""
    array = draw(lattice(draw(shapes())))
    return array, draw(laid_out(array, backend)), draw(st.integers(-array.ndim, array.ndim - 1))


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...], dim: int, count: int | None = None) -> Array:
    """Draw an index along ``dim``: each other size is that of the shape, or 1."""
    dim %= len(shape)
    sizes = [draw(st.sampled_from([1, size])) for size in shape]
    sizes[dim] = draw(st.integers(0, 4)) if count is None else count
    return draw(arrays(np.int64, tuple(sizes), elements=st.integers(0, shape[dim] - 1)))


def taken(array: Array, index: Array, dim: int) -> Array:
    dim %= array.ndim
    shape = (*array.shape[:dim], index.shape[dim], *array.shape[dim + 1 :])
    return np.take_along_axis(array, np.broadcast_to(index, shape), dim)


def scattered(zeros: Array, index: Array, source: Array, dim: int) -> Array:
    out = np.moveaxis(zeros.copy(), dim, -1)
    index = np.moveaxis(np.broadcast_to(index, source.shape), dim, -1)
    for place in np.ndindex(*out.shape[:-1]):
        np.add.at(out[place], index[place], np.moveaxis(source, dim, -1)[place])
    return np.moveaxis(out, -1, dim)


def weights_like(t: Tensor) -> Array:
    return np.linspace(-1.0, 2.0, max(t.size, 1))[: t.size].reshape(t.shape)


def gradient(out: Tensor, *leaves: Tensor) -> list[Array]:
    out.backward(from_numpy(weights_like(out).astype(out.dtype), out.backend))
    grads = [leaf.grad for leaf in leaves]
    return [grad.to_numpy() for grad in grads if grad is not None]


@on_backends
@at_most(12)
@given(data=st.data())
def test_gather_picks_what_numpy_takes(backend: TensorBackend, data: st.DataObject) -> None:
    array, a, dim = data.draw(operands(backend))
    index = data.draw(indices(array.shape, dim))
    a.requires_grad_(True)
    out = a.gather(dim, index)
    expected = taken(array, index, dim)
    np.testing.assert_array_equal(out.to_numpy(), expected)
    (grad,) = gradient(out, a)
    assert_close_arrays(grad, scattered(0 * array, index, weights_like(out), dim), np.float64)


@on_backends
@at_most(12)
@given(data=st.data())
def test_scatter_add_adds_what_numpy_adds(backend: TensorBackend, data: st.DataObject) -> None:
    array, a, dim = data.draw(operands(backend))
    count = data.draw(st.integers(0, 4))
    shape = list(array.shape)
    shape[dim] = count
    source_array = data.draw(lattice(shape))
    source = data.draw(laid_out(source_array, backend))
    places = data.draw(indices(array.shape, dim, count))
    a.requires_grad_(True)
    source.requires_grad_(True)
    out = a.scatter_add(dim, places, source)
    assert_close_arrays(out, scattered(array, places, source_array, dim), np.float64)
    own, added = gradient(out, a, source)
    np.testing.assert_array_equal(own, weights_like(out))
    np.testing.assert_array_equal(added, taken(weights_like(out), places, dim))


@on_backends
@at_most(12)
@given(data=st.data())
def test_sort_is_stable_and_differentiable(backend: TensorBackend, data: st.DataObject) -> None:
    array, a, dim = data.draw(operands(backend))
    few = np.round(array)  # so that many are equal
    a = from_numpy(few, backend, requires_grad=True)
    values, order = a.sort(dim)
    expected = np.argsort(few, axis=dim, kind="stable")
    np.testing.assert_array_equal(order.to_numpy(), expected)
    np.testing.assert_array_equal(a.argsort(dim).to_numpy(), expected)
    np.testing.assert_array_equal(values.to_numpy(), np.sort(few, axis=dim))
    assert order.dtype == np.int64 and not order.requires_grad()
    (grad,) = gradient(values, a)
    np.testing.assert_array_equal(grad, scattered(0 * few, expected, weights_like(values), dim))


@on_backends
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 21])
def test_rows_that_are_longer_than_a_tile_are_sorted(backend: TensorBackend, size: int) -> None:
    rows = np.random.default_rng(size).integers(-3, 4, (3, size))
    for array in (rows, rows.astype(np.float32), np.where(rows == 1, np.nan, rows)):
        order = from_numpy(array, backend).argsort()
        np.testing.assert_array_equal(order.to_numpy(), np.argsort(array, 1, kind="stable"))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("rows", [1, 3])
def test_large_tensors_are_indexed_in_parallel(rows: int, dtype: Any) -> None:
    random = np.random.default_rng(0)
    array = random.integers(-9, 9, (3, 5000, 3)).astype(dtype)
    index = random.integers(0, 5000, (rows, 6001, 1))
    a = from_numpy(array, FastBackend)
    picked = a.gather(1, index)
    np.testing.assert_array_equal(picked.to_numpy(), taken(array, index, 1))
    if dtype is not np.int64:
        added = a.scatter_add(1, index, picked).to_numpy()
        np.testing.assert_array_equal(added, scattered(array, index, picked.to_numpy(), 1))
        np.testing.assert_array_equal(a.cumsum(1).to_numpy(), array.cumsum(1))


@on_backends
@at_most(12)
@given(data=st.data(), exclusive=st.booleans(), reverse=st.booleans())
def test_cumulative_sums(
    backend: TensorBackend, data: st.DataObject, exclusive: bool, reverse: bool
) -> None:
    array, a, dim = data.draw(operands(backend))
    a.requires_grad_(True)

    def expected(x: Array, reverse: bool) -> Array:
        x = np.flip(x, dim) if reverse else x
        total = x.cumsum(dim) - (x if exclusive else 0.0)
        return np.flip(total, dim) if reverse else total

    out = a.cumsum(dim, exclusive, reverse)
    assert_close_arrays(out, expected(array, reverse), np.float64, size=15.0)
    (grad,) = gradient(out, a)
    assert_close_arrays(grad, expected(weights_like(out), not reverse), np.float64, size=6.0)


@on_backends
@at_most(12)
@given(data=st.data())
def test_elu(backend: TensorBackend, data: st.DataObject) -> None:
    array, a, _ = data.draw(operands(backend))
    a.requires_grad_(True)
    out = a.elu()
    assert_close_arrays(out, np.where(array > 0, array, np.expm1(array)), np.float64)
    (grad,) = gradient(out, a)
    assert_close_arrays(grad, weights_like(out) * np.minimum(np.exp(array), 1.0), np.float64)


@on_backends
@at_most(12)
@given(data=st.data())
def test_where_chooses(backend: TensorBackend, data: st.DataObject) -> None:
    array, a, dim = data.draw(operands(backend))
    condition = data.draw(arrays(np.bool_, array.shape))
    other_shape = list(array.shape)
    other_shape[dim] = 1
    other = data.draw(lattice(other_shape, first=0.06))
    b = data.draw(laid_out(other, backend))
    a.requires_grad_(True)
    b.requires_grad_(True)
    given_as = data.draw(st.sampled_from([condition, from_numpy(1.0 * condition, backend)]))
    out = a.where(given_as, b)
    np.testing.assert_array_equal(out.to_numpy(), np.where(condition, array, other))
    own, others = gradient(out, a, b)
    weights = weights_like(out)
    np.testing.assert_array_equal(own, np.where(condition, weights, 0.0))
    expected = np.where(condition, 0.0, weights).sum(dim, keepdims=True)
    assert_close_arrays(others, expected, np.float64)


@on_backends
def test_where_hides_infinity_and_nan(backend: TensorBackend) -> None:
    a = from_numpy(np.array([1.0, np.inf, np.nan], np.float32), backend, requires_grad=True)
    out = a.where(np.array([True, False, False]), -2.0)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out.to_numpy(), [1.0, -2.0, -2.0])
    out.sum().backward()
    assert a.grad is not None
    np.testing.assert_array_equal(a.grad.to_numpy(), [1.0, 0.0, 0.0])


@on_backends
def test_gradients_agree_with_finite_differences(backend: TensorBackend) -> None:
    x = minitorch.rand((2, 5), backend)
    places = np.array([[0, 0, 3], [4, 1, 4]])
    minitorch.grad_check(lambda x: (x.gather(1, places) * 3.0).exp(), x)
    minitorch.grad_check(lambda x: (x * x).scatter_add(1, places, x.gather(1, places)), x)
    minitorch.grad_check(lambda x: x.cumsum(1).exp(), x)
    minitorch.grad_check(lambda x: (x - 0.5).elu(), x)
    minitorch.grad_check(lambda x: x.sort(1)[0].cumsum(1, exclusive=True), x)
    minitorch.grad_check(lambda x: x.where(np.arange(5) < 2, x * x), x)


@on_backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_are_kept(backend: TensorBackend, dtype: Any) -> None:
    array = np.array([[2.0, 0.5, -1.0], [0.25, 4.0, 0.25]], dtype)
    a = from_numpy(array, backend, requires_grad=True)
    index = np.array([[2], [1]])
    results = {
        "gather": (a.gather(1, index), taken(array, index, 1)),
        "scatter_add": (
            a.scatter_add(1, index, a.gather(1, index)),
            array * [[1, 1, 2], [1, 2, 1]],
        ),
        "sort": (a.sort(1)[0], np.sort(array, 1)),
        "cumsum": (a.cumsum(0), array.cumsum(0)),
        "where": (a.where(array > 0, -a), np.abs(array)),
    }
    for name, (result, expected) in results.items():
        assert result.dtype == dtype, name
        np.testing.assert_array_equal(result.to_numpy(), expected, name)


@on_backends
@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int32, np.int64])
def test_integers_are_moved_and_added_up(backend: TensorBackend, dtype: Any) -> None:
    array = np.array([[1, 0, 1, 1], [0, 0, 1, 0]], dtype)
    a = from_numpy(array, backend)
    picked = a.gather(1, [[3], [2]])
    assert picked.dtype == dtype
    np.testing.assert_array_equal(picked.to_numpy(), [[1], [1]])
    np.testing.assert_array_equal(a.cumsum(1).to_numpy(), array.astype(int).cumsum(1))
    np.testing.assert_array_equal(a.argsort().to_numpy(), np.argsort(array, 1, kind="stable"))


@on_backends
def test_empty_tensors(backend: TensorBackend) -> None:
    a = minitorch.zeros((2, 0, 3), backend)
    assert a.sort(1)[0].shape == a.cumsum(0).shape == a.elu().shape == (2, 0, 3)
    assert a.gather(1, np.zeros((2, 0, 1), int)).shape == (2, 0, 3)
    b = minitorch.ones((2, 4, 3), backend).scatter_add(1, np.zeros((1, 0, 1), int), a)
    np.testing.assert_array_equal(b.to_numpy(), np.ones((2, 4, 3)))
