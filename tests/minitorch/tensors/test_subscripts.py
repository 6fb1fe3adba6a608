"""Subscripts, shapes and joins of tensors on every backend, against NumPy and finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays, basic_indices, integer_array_indices

import minitorch
from minitorch import Tensor, TensorBackend, from_numpy, grad_check, tensor

from ...support.examples import at_most
from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import Array, laid_out, lattice, on_every_backend, shapes


@st.composite
def operands(draw: st.DrawFn, backend: TensorBackend) -> tuple[Array, Tensor]:
    """Draw an array and a tensor of its elements in some layout, which requires a gradient."""
    array = draw(lattice(draw(shapes())))
    a = draw(laid_out(array, backend))
    a.requires_grad_(True)
    return array, a


def keys(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Draw what NumPy takes between square brackets."""
    basic = basic_indices(shape, allow_newaxis=True, max_dims=6)
    entries = st.one_of(
        *(basic_indices((n,), allow_ellipsis=False, min_dims=0) for n in shape[:1]),
        arrays(np.int64, st.integers(0, 3), elements=st.integers(-shape[0], shape[0] - 1)),
        arrays(bool, shape[0]),
    )
    rest = [
        st.one_of(
            st.just(slice(None)), st.slices(n), st.integers(-n, n - 1),
            arrays(np.int64, 2, elements=st.integers(-n, n - 1)),
        )
        for n in shape[1:]
    ]  # fmt: skip
    mixed = st.tuples(entries.map(lambda e: e[0] if isinstance(e, tuple) and e else e), *rest)
    masks = arrays(bool, shape)
    return st.one_of(basic, integer_array_indices(shape), masks, mixed.filter(_broadcasts(shape)))


def _broadcasts(shape: tuple[int, ...]) -> Any:
    def holds(key: Any) -> bool:
        try:
            np.empty(shape)[key]
        except IndexError:
            return False
        return True

    return holds


def weights_like(out: Tensor) -> Array:
    return np.linspace(-1.0, 2.0, max(out.size, 1))[: out.size].reshape(out.shape)


def check_gradient(out: Tensor, a: Tensor, expected: Array) -> None:
    out.backward(from_numpy(weights_like(out), out.backend))
    assert a.grad is not None
    assert_close_arrays(a.grad, expected, np.float64)


@on_every_backend
@at_most(60)
@given(data=st.data())
def test_a_part_is_what_numpy_returns_and_its_gradient_goes_back_to_its_place(
    backend: TensorBackend, data: st.DataObject
) -> None:
    array, a = data.draw(operands(backend))
    key = data.draw(keys(array.shape))
    part, expected = a[key], array[key]
    if not isinstance(part, Tensor):
        assert part == expected
        a[key] = 7.0
        assert a.to_numpy()[key] == 7.0
        return
    assert part.shape == expected.shape
    np.testing.assert_array_equal(part.to_numpy(), expected)
    slopes = np.zeros(array.shape)
    np.add.at(slopes, key, weights_like(part))
    check_gradient(part, a, slopes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", np.int64, np.bool_])
@on_every_backend
def test_parts_keep_the_dtype(backend: TensorBackend, dtype: Any) -> None:
    x = from_numpy(np.arange(24).reshape(2, 3, 4) % 2, backend).to(dtype)
    array = x.to_numpy()
    for key in (
        1,
        (slice(None), slice(1, 3)),
        (..., -1),
        [1, 0],
        array == 1,
        slice(None, None, -1),
    ):
        part = x[key]
        assert part.dtype == x.dtype
        np.testing.assert_array_equal(part.to_numpy(), array[key])


@on_every_backend
def test_an_index_of_a_tensor_may_be_a_tensor(backend: TensorBackend) -> None:
    x = from_numpy(np.array([[1.0, -2.0], [-3.0, 4.0]]), backend)
    assert x[x > 0.0].tolist() == [1.0, 4.0]
    assert x[from_numpy(np.array([1, 1]), backend)].tolist() == [[-3.0, 4.0]] * 2


@on_every_backend
def test_a_part_that_is_one_piece_of_the_storage_shares_it(backend: TensorBackend) -> None:
    x = from_numpy(np.arange(24.0).reshape(4, 6), backend)
    row, rows, column = x[2], x[1:3], x[:, 1]
    x[2, 1] = 50.0
    assert row[1] == rows[1, 1] == 50.0
    assert column[2] == 13.0


def test_a_tensor_has_a_length_and_rows() -> None:
    x = tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    assert len(x) == 2
    first, second = x
    (first * second).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[3.0, 4.0], [1.0, 2.0]]
    with pytest.raises(TypeError, match="no length"):
        len(tensor(1.0))
    with pytest.raises(TypeError, match="no length"):
        iter(tensor(1.0))


def test_only_a_single_element_is_true_or_false() -> None:
    x = tensor([0.5, -1.0])
    assert tensor(2.0) and not tensor([[0.0]]) and 0 < x[:1] < 1 and not 0 < x[1:] < 1
    for ambiguous in (x, minitorch.zeros((0, 2))):
        with pytest.raises(ValueError, match=r"neither true nor false.*all\(\)"):
            bool(ambiguous)
    with pytest.raises(ValueError, match=r"\(0 < x\) \* \(x < 1\)"):
        0 < x < 1  # noqa: B015  # pyright: ignore[reportUnusedExpression]


@on_every_backend
@at_most(20)
@given(data=st.data())
def test_shapes_change_as_in_numpy(backend: TensorBackend, data: st.DataObject) -> None:
    array, a = data.draw(operands(backend))
    dim = data.draw(st.integers(0, array.ndim - 1))
    cases = [
        (a.T, array.T),
        (a.reshape(-1), array.reshape(-1)),
        (a.reshape((array.shape[0], -1)), array.reshape(array.shape[0], -1)),
        (a.flatten(), array.reshape(-1)),
        (a.flatten(dim), array.reshape(*array.shape[:dim], -1)),
        (a.squeeze(), array.squeeze()),
        (a.unsqueeze(dim), np.expand_dims(array, dim)),
        (a.unsqueeze(-1), array[..., None]),
        (a.unsqueeze(dim).squeeze(dim), array),
    ]
    for out, expected in cases:
        np.testing.assert_array_equal(out.to_numpy(), expected)
    grad_check(lambda x: (x.reshape(-1) * x.T.flatten()).unsqueeze(0), a)


@on_every_backend
@at_most(20)
@given(data=st.data())
def test_parts_that_are_split_off_join_again(backend: TensorBackend, data: st.DataObject) -> None:
    array, a = data.draw(operands(backend))
    dim = data.draw(st.integers(-array.ndim, array.ndim - 1))
    size = data.draw(st.integers(1, 4))
    parts = a.split(size, dim)
    assert [part.shape[dim] for part in parts[:-1]] == [size] * (len(parts) - 1)
    joined = minitorch.cat(parts, dim)
    np.testing.assert_array_equal(joined.to_numpy(), array)
    assert joined._tensor.is_contiguous()
    check_gradient(joined, a, weights_like(joined))


@on_every_backend
@at_most(20)
@given(data=st.data())
def test_tensors_are_stacked_as_in_numpy(backend: TensorBackend, data: st.DataObject) -> None:
    array, a = data.draw(operands(backend))
    dim = data.draw(st.integers(-array.ndim - 1, array.ndim))
    out = minitorch.stack([a, a * 2.0], dim)
    np.testing.assert_array_equal(out.to_numpy(), np.stack([array, array * 2.0], dim))
    grad_check(lambda x: minitorch.stack([x, x * x], dim), a)


def test_cat_takes_the_widest_dtype() -> None:
    parts = [tensor([1.0], dtype=dtype, requires_grad=True) for dtype in ("float16", "float64")]
    out = minitorch.cat(parts)
    assert out.dtype == np.float64
    out.sum().backward()
    assert [part.grad.dtype for part in parts if part.grad is not None] == [np.float16, np.float64]


@on_every_backend
@at_most(20)
@given(data=st.data())
def test_powers_have_gradients_for_base_and_exponent(
    backend: TensorBackend, data: st.DataObject
) -> None:
    base = data.draw(lattice((2, 3), low=1, high=20))
    exponent = data.draw(lattice((3,), low=-10, high=20))
    a, b = from_numpy(base, backend), from_numpy(exponent, backend)
    assert_close_arrays(a**b, base**exponent, np.float64)
    assert_close_arrays(2.0**b, 2.0**exponent, np.float64)
    grad_check(lambda x, y: x**y, a, b)
    grad_check(lambda y: 2.0**y, b)
