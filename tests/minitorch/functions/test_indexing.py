"""Gather, scatter-add, sort, cumulative sum, ELU and where on every backend; NumPy is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import minitorch
from minitorch import FastBackend, Tensor, TensorBackend, from_numpy, grad_check

from ...support.examples import at_most
from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import Array, laid_out, lattice, on_every_backend, shapes


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


#: What a row of the table returns: the operation on tensors, on arrays, and the operands after the first.
Drawn = tuple[Callable[..., Tensor], Callable[..., Array], list[Array]]


def gather(draw: Any, array: Array, dim: int, backend: TensorBackend) -> Drawn:
    index = draw(indices(array.shape, dim))
    return lambda a: a.gather(dim, index), lambda x: taken(x, index, dim), []


def scatter_add(draw: Any, array: Array, dim: int, backend: TensorBackend) -> Drawn:
    shape = list(array.shape)
    shape[dim] = draw(st.integers(1, 4))
    places, source = draw(indices(array.shape, dim, shape[dim])), draw(lattice(shape))
    return (
        lambda a, b: a.scatter_add(dim, places, b),
        lambda x, y: scattered(x, places, y, dim),
        [source],
    )


def cumsum(draw: Any, array: Array, dim: int, backend: TensorBackend) -> Drawn:
    exclusive, reverse = draw(st.booleans()), draw(st.booleans())

    def expected(x: Array) -> Array:
        x = np.flip(x, dim) if reverse else x
        total = x.cumsum(dim) - (x if exclusive else 0.0)
        return np.flip(total, dim) if reverse else total

    return lambda a: a.cumsum(dim, exclusive, reverse), expected, []


def where(draw: Any, array: Array, dim: int, backend: TensorBackend) -> Drawn:
    condition = draw(arrays(np.bool_, array.shape))
    given = draw(st.sampled_from([condition, from_numpy(1.0 * condition, backend)]))
    shape = list(array.shape)
    shape[dim] = 1
    other = draw(lattice(shape, first=0.06))
    return lambda a, b: a.where(given, b), lambda x, y: np.where(condition, x, y), [other]


OPERATIONS: dict[str, Callable[..., Drawn]] = {
    "gather": gather,
    "scatter_add": scatter_add,
    "cumsum": cumsum,
    "where": where,
    "sort": lambda draw, array, dim, backend: (
        lambda a: a.sort(dim)[0], lambda x: np.sort(x, dim), [],
    ),
    "elu": lambda draw, array, dim, backend: (
        lambda a: a.elu(), lambda x: np.where(x > 0, x, np.expm1(x)), [],
    ),
}  # fmt: skip


@on_every_backend
@pytest.mark.parametrize("name", OPERATIONS)
@at_most(12)
@given(data=st.data())
def test_an_operation_is_numpys_and_its_gradient_is_its_slope(
    name: str, backend: TensorBackend, data: st.DataObject
) -> None:
    array = data.draw(lattice(data.draw(shapes())))
    array += np.linspace(0.0, 0.01, array.size).reshape(array.shape)  # no two are equal
    dim = data.draw(st.integers(-array.ndim, array.ndim - 1))
    on_tensors, on_arrays, others = OPERATIONS[name](data.draw, array, dim, backend)
    operands = [data.draw(laid_out(x, backend)) for x in (array, *others)]
    out = on_tensors(*operands)
    assert_close_arrays(out, on_arrays(array, *others), np.float64, name, 15.0)
    weights = np.linspace(-1.0, 2.0, max(out.size, 1))[: out.size].reshape(out.shape)
    grad_check(lambda *own: on_tensors(*own) * from_numpy(weights, backend), *operands, tol=1e-4)


@on_every_backend
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 21])
def test_rows_that_are_longer_than_a_tile_are_sorted(backend: TensorBackend, size: int) -> None:
    rows = np.random.default_rng(size).integers(-3, 4, (3, size))
    for array in (rows, rows.astype(np.float32), np.where(rows == 1, np.nan, rows)):
        order = from_numpy(array, backend).argsort()
        assert order.dtype == np.int64 and not order.requires_grad()
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


@on_every_backend
def test_where_hides_infinity_and_nan(backend: TensorBackend) -> None:
    a = from_numpy(np.array([1.0, np.inf, np.nan], np.float32), backend, requires_grad=True)
    out = a.where(np.array([True, False, False]), -2.0)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out.to_numpy(), [1.0, -2.0, -2.0])
    out.sum().backward()
    assert a.grad is not None
    np.testing.assert_array_equal(a.grad.to_numpy(), [1.0, 0.0, 0.0])


@on_every_backend
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.bool_, np.int8, np.int64])
def test_dtypes_are_kept(backend: TensorBackend, dtype: Any) -> None:
    array = np.array([[1, 0, 1, 1], [0, 0, 1, 0]], dtype)
    a, index = from_numpy(array, backend), np.array([[3], [2]])
    picked, (values, order) = a.gather(1, index), a.sort(1)
    assert picked.dtype == values.dtype == dtype
    np.testing.assert_array_equal(picked.to_numpy(), [[1], [1]])
    np.testing.assert_array_equal(values.to_numpy(), np.sort(array, 1))
    np.testing.assert_array_equal(order.to_numpy(), np.argsort(array, 1, kind="stable"))
    np.testing.assert_array_equal(a.cumsum(1).to_numpy(), array.astype(float).cumsum(1))
    if np.dtype(dtype).kind == "f":
        added, kept = a.scatter_add(1, index, picked), a.where(array > 0, -a)
        assert added.dtype == kept.dtype == a.cumsum(1).dtype == dtype
        np.testing.assert_array_equal(added.to_numpy(), [[1, 0, 1, 2], [0, 0, 2, 0]])
        np.testing.assert_array_equal(kept.to_numpy(), np.abs(array))


@on_every_backend
def test_empty_tensors(backend: TensorBackend) -> None:
    a = minitorch.zeros((2, 0, 3), backend)
    assert a.sort(1)[0].shape == a.cumsum(0).shape == a.elu().shape == (2, 0, 3)
    assert a.gather(1, np.zeros((2, 0, 1), int)).shape == (2, 0, 3)
    b = minitorch.ones((2, 4, 3), backend).scatter_add(1, np.zeros((1, 0, 1), int), a)
    np.testing.assert_array_equal(b.to_numpy(), np.ones((2, 4, 3)))
