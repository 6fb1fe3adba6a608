"""Operators, methods and factories under PyTorch's names, on every backend; NumPy is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import minitorch
from minitorch import FastBackend, Tensor, TensorBackend, from_numpy

from ...tensor_strategies import Array, laid_out, on_every_backend, shapes

#: Few values, so that they are often equal, and NaN.
values = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0, np.nan])


def same(found: Tensor, expected: Any) -> None:
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found.to_numpy(), expected, 1e-12)


@st.composite
def pairs(draw: st.DrawFn, backend: TensorBackend) -> tuple[Array, Tensor]:
    """Draw an array with equal elements and NaN, and the tensor of it, in any layout."""
    array = draw(shapes().flatmap(lambda shape: arrays(np.float64, shape, elements=values)))
    return array, draw(laid_out(array, backend))


ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    ">=": lambda x: x >= 0.5,
    "<=": lambda x: x <= 0.5,
    "!=": lambda x: x != 0.5,
    "reflected >=": lambda x: np.float64(0.5) >= x,
    "&": lambda x: (x > -1.0) & (x < 1.0),
    "|": lambda x: (x < 0.0) | (x > 0.5),
    "~": lambda x: ~(x > 0.0),
    "abs": lambda x: abs(x),
    "sqrt": lambda x: x.sqrt() if isinstance(x, Tensor) else np.sqrt(x),
    "clamp": lambda x: x.clamp(-1.0, 0.5) if isinstance(x, Tensor) else x.clip(-1.0, 0.5),
    "clamp from below": lambda x: x.clamp(min=0.5) if isinstance(x, Tensor) else x.clip(0.5),
    "clamp to a tensor": lambda x: (
        x.clamp(max=-x) if isinstance(x, Tensor) else np.minimum(x, -x)
    ),
    "masked_fill": lambda x: (
        x.masked_fill(x > 0.0, -np.inf) if isinstance(x, Tensor) else np.where(x > 0.0, -np.inf, x)
    ),
    "clone": lambda x: x.clone() if isinstance(x, Tensor) else x,
}  # fmt: skip


@on_every_backend
@pytest.mark.parametrize("f", ELEMENTWISE.values(), ids=[*ELEMENTWISE])
@given(st.data())
@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_operation_on_elements_is_that_of_numpy(
    backend: TensorBackend, f: Callable[[Any], Any], data: st.DataObject
) -> None:
    array, x = data.draw(pairs(backend))
    same(f(x), f(array))


REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (lambda x, d, k: x.sum(d, k), np.sum),
    "mean": (lambda x, d, k: x.mean(d, keepdim=k), np.mean),
    "var": (lambda x, d, k: x.var(d, keepdim=k), np.var),
    "all": (lambda x, d, k: x.all(d, k), np.all),
    "any": (lambda x, d, k: x.any(d, k), np.any),
}


@on_every_backend
@pytest.mark.parametrize(("f", "oracle"), REDUCTIONS.values(), ids=[*REDUCTIONS])
@given(st.data())
def test_a_reduction_of_any_dimensions_keeps_them_on_request(
    backend: TensorBackend, f: Any, oracle: Any, data: st.DataObject
) -> None:
    array, x = data.draw(pairs(backend))
    dims = data.draw(st.sets(st.integers(0, array.ndim - 1), min_size=1))
    own = data.draw(st.sampled_from([None, min(dims), tuple(d - array.ndim for d in dims)]))
    axis = own if own is None or isinstance(own, tuple) else int(own)
    for keepdim in (True, False):
        same(f(x, own, keepdim), oracle(array, axis=axis, keepdims=keepdim))


@given(st.data())
def test_without_keepdim_the_course_keeps_the_dimension(data: st.DataObject) -> None:
    array, x = data.draw(pairs(FastBackend))
    for f in (lambda *own: x.sum(*own), lambda *own: x.mean(*own), lambda *own: x.var(*own)):
        assert f(0).shape == (1, *array.shape[1:]) and f().shape == (1,)
    same(x.any(0), array.any(0))
    same(x.max(0).values, array.max(0))


@given(st.data())
@pytest.mark.filterwarnings("ignore:Degrees of freedom", "ignore:invalid value")
def test_an_unbiased_variance_divides_by_the_count_less_one(data: st.DataObject) -> None:
    array, x = data.draw(pairs(FastBackend))
    dim = data.draw(st.sampled_from([None, 0, -1]))
    expected = np.var(array, axis=dim, ddof=1) if array.size else np.nan
    found = x.var(dim, keepdim=False, unbiased=True)
    np.testing.assert_allclose(found.to_numpy(), expected, 1e-12)


@on_every_backend
@given(st.data())
def test_extrema_and_their_indices_are_those_of_numpy(
    backend: TensorBackend, data: st.DataObject
) -> None:
    array, x = data.draw(pairs(backend))
    dim = data.draw(st.integers(-array.ndim, array.ndim - 1))
    keepdim = data.draw(st.booleans())
    for extreme, index in (("max", "argmax"), ("min", "argmin")):
        found = getattr(x, extreme)(dim, keepdim)
        same(found.values, getattr(array, extreme)(dim, keepdims=keepdim))
        expected = getattr(array, index)(dim, keepdims=keepdim)
        for indices in (found.indices, getattr(x, index)(dim, keepdim)):
            same(indices, expected)
            assert indices.dtype == np.int64
        same(getattr(x, extreme)(), getattr(array, extreme)())
        same(getattr(x, index)(), getattr(array, index)())


@on_every_backend
@given(st.data())
def test_topk_finds_the_first_of_the_sorted_elements(
    backend: TensorBackend, data: st.DataObject
) -> None:
    array, x = data.draw(pairs(backend))
    dim = data.draw(st.integers(-array.ndim, array.ndim - 1))
    k, largest = data.draw(st.integers(0, array.shape[dim])), data.draw(st.booleans())
    ranks = np.sort(array, dim)
    expected = np.take(np.flip(ranks, dim) if largest else ranks, range(k), dim)
    found = x.topk(k, dim, largest)
    same(found.values, expected)
    same(found.values, np.take_along_axis(array, found.indices.to_numpy(), dim))


@given(st.data())
def test_transpose_exchanges_two_dimensions(data: st.DataObject) -> None:
    array, x = data.draw(pairs(FastBackend))
    first, second = (data.draw(st.integers(-array.ndim, array.ndim - 1)) for _ in range(2))
    same(x.transpose(first, second), array.swapaxes(first, second))
    assert x.ndim == array.ndim and np.shares_memory(x.numpy(), x.to_numpy())


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_a_narrow_dtype_stays(name: str) -> None:
    x = from_numpy(np.arange(-3.0, 3.0)).to(name)
    results = x >= 1, (x > 0) | ~(x < 0), abs(x), x.clamp(0, 1), x.masked_fill(x > 0, 7.0), x.max()
    assert {y.dtype for y in (*results, x.sum(0, False), x.var(unbiased=True), x.any())} == {
        x.dtype
    }
    assert minitorch.einsum("i,i->", x, x).dtype == x.dtype


def test_a_maximum_passes_its_gradient_to_the_first() -> None:
    x = from_numpy(np.array([1.0, 2.0, 2.0]), requires_grad=True)
    (3.0 * x.max()).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, 3.0, 0.0]
    (x * x).sum(keepdim=False).backward()  # of shape ()
    assert x.grad.tolist() == [2.0, 7.0, 4.0]


# -- einsum --------------------------------------------------------------------------------------


@st.composite
def equations(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """Draw an equation of up to three operands, and their shapes."""
    sizes = {name: draw(st.integers(0, 3)) for name in "abcd"}
    inputs = draw(st.lists(st.text("abcd", max_size=3), min_size=1, max_size=3))
    free = draw(st.lists(st.integers(1, 2), max_size=2))  # the dimensions of "..."
    dots = free and draw(st.booleans())
    shapes = [(*(free if dots else ()), *(sizes[name] for name in names)) for names in inputs]
    left = ",".join(f"{'...' * bool(dots)}{names}" for names in inputs)
    known = sorted({*"".join(inputs)})
    output = "".join(draw(st.permutations(known))[: draw(st.integers(0, len(known)))])
    return draw(st.sampled_from([left, f"{left}->{'...' * bool(dots)}{output}"])), shapes


@on_every_backend
@given(equations(), st.integers(0, 1 << 32))
def test_einsum_is_that_of_numpy(
    backend: TensorBackend, equation: tuple[str, list[tuple[int, ...]]], seed: int
) -> None:
    text, shapes = equation
    operands = [np.random.default_rng(seed).uniform(-1.0, 1.0, shape) for shape in shapes]
    same(
        minitorch.einsum(text, *(from_numpy(each, backend) for each in operands)),
        np.einsum(text, *operands),
    )


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bhqd,bhkd->bhqk", [(2, 1, 3, 5), (1, 4, 2, 5)]),
        ("...ij,...jk->...ik", [(2, 1, 3, 5), (4, 5, 2)]),
        ("ab,a...->b...", [(3, 2), (1, 4)]),
    ],
)
def test_einsum_repeats_dimensions_of_size_one(equation: str, shapes: Any) -> None:
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=shape) for shape in shapes]
    same(minitorch.einsum(equation, *map(from_numpy, operands)), np.einsum(equation, *operands))


# -- factories -----------------------------------------------------------------------------------


@given(st.integers(-5, 5), st.integers(-5, 5), st.sampled_from([-2, -1, 1, 3, 0.25, -0.5]))
def test_arange_counts_as_numpy_does(start: int, end: int, step: float) -> None:
    for bounds in ((start, end, step), (start, end), (start,)):
        expected = np.arange(*bounds)
        found = minitorch.arange(*bounds, backend=FastBackend)
        same(found, expected)
        assert found.dtype == expected.dtype and found.backend is FastBackend


@on_every_backend
@given(st.data())
def test_a_tensor_like_another_has_its_shape_backend_and_dtype(
    backend: TensorBackend, data: st.DataObject
) -> None:
    x = data.draw(pairs(backend))[1].to(data.draw(st.sampled_from(["float16", "float32"])))
    found = {
        name: getattr(minitorch, f"{name}_like")(x) for name in ("zeros", "ones", "rand", "randn")
    }
    found["full"] = minitorch.full_like(x, 3.0)
    for each in found.values():
        assert (each.shape, each.backend, each.dtype) == (x.shape, x.backend, x.dtype)
    assert {name: {*found[name].to_numpy().flat} for name in ("zeros", "ones", "full")} == {
        "zeros": {0.0}, "ones": {1.0}, "full": {3.0},
    }  # fmt: skip
    assert minitorch.ones_like(x, True, "float64").requires_grad()
