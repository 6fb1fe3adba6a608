"""Module 3: every operation, on every backend, through the same tests; NumPy is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays, mutually_broadcastable_shapes
from hypothesis.strategies import DataObject, data, integers, sampled_from

from minitorch import FastBackend, Tensor, TensorBackend, fast_ops, from_numpy, operators, zeros

from ..support.tolerances import assert_close_arrays
from ..tensor_strategies import (
    Array,
    backends,
    laid_out,
    lattice,
    on_backends,
    on_dtypes,
    shapes,
    sum_to,
)

MAP_BACKENDS = backends(pytest.mark.task3_1, pytest.mark.task3_3)
on_map_backends = pytest.mark.parametrize("backend", MAP_BACKENDS)
on_matmul_backends = on_backends(pytest.mark.task3_2, pytest.mark.task3_4)
few = settings(max_examples=8)


class Operation(NamedTuple):
    """An operation on tensors, and what NumPy says of its value and its slopes."""

    name: str
    on_tensors: Callable[..., Tensor]
    on_arrays: Callable[..., Any]
    slopes: tuple[Callable[..., Any], ...]
    low: int = -50  # in tenths: the numbers that it is tried on


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def step(*operands: Array) -> Array:
    return np.zeros(np.broadcast_shapes(*(x.shape for x in operands)))


EPS = operators.EPS
# The slopes stand in the order of the operands.
UNARY = [
    Operation("neg", lambda a: -a, lambda x: -x, (lambda x: -1.0 + 0 * x,)),
    Operation("sigmoid", lambda a: a.sigmoid(), sigmoid, (lambda x: sigmoid(x) * sigmoid(-x),)),
    Operation("relu", lambda a: a.relu(), lambda x: np.maximum(x, 0.0), (lambda x: 1.0 * (x > 0),)),
    Operation(
        "log", lambda a: a.log(), lambda x: np.log(x + EPS), (lambda x: 1.0 / (x + EPS),), low=0
    ),
    Operation("exp", lambda a: a.exp(), np.exp, (np.exp,)),
    Operation("tanh", lambda a: a.tanh(), np.tanh, (lambda x: 1.0 - np.tanh(x) ** 2,)),
    Operation("inverse", lambda a: 2.0 / a, lambda x: 2.0 / x, (lambda x: -2.0 / x**2,)),
    Operation("cube", lambda a: a**3, lambda x: x**3, (lambda x: 3.0 * x**2,)),
    Operation("root", lambda a: a**0.5, np.sqrt, (lambda x: 0.5 / np.sqrt(x),), low=0),
    Operation("affine", lambda a: 5 - a * 3, lambda x: 5 - 3 * x, (lambda x: -3.0 + 0 * x,)),
    Operation("variance", lambda a: a.var(0), lambda x: x.var(0, keepdims=True), (
        lambda x: 2.0 * (x - x.mean(0)) / len(x),)),
]  # fmt: skip
BINARY = [
    Operation("add", lambda a, b: a + b, np.add, (lambda x, y: 1.0, lambda x, y: 1.0)),
    Operation("sub", lambda a, b: a - b, np.subtract, (lambda x, y: 1.0, lambda x, y: -1.0)),
    Operation("mul", lambda a, b: a * b, np.multiply, (lambda x, y: y, lambda x, y: x)),
    Operation("div", lambda a, b: a / b, np.divide, (lambda x, y: 1.0 / y, lambda x, y: -x / y**2)),
    Operation("lt", lambda a, b: a < b, lambda x, y: 1.0 * (x < y), (step, step)),
    Operation("gt", lambda a, b: a > b, lambda x, y: 1.0 * (x > y), (step, step)),
    Operation("eq", lambda a, b: a == b, lambda x, y: 1.0 * (x == y), (step, step)),
    Operation("ne", lambda a, b: a != b, lambda x, y: 1.0 * (x != y), (step, step)),
]
REDUCTIONS = [
    Operation("sum", lambda a, dim: a.sum(dim), np.sum, (lambda x, dim: 1.0 + 0 * x,)),
    Operation("mean", lambda a, dim: a.mean(dim), np.mean, (lambda x, dim: 0 * x + 1 / x.shape[dim],)),
]  # fmt: skip


#: Task 3.1 asks for these in float32, for all in float64: each further function is a loop to compile,
#: and what is in the loop is the same.
IN_FLOAT32 = {"neg", "add", "sub", "mul", "sum", "mean"}


def on_operations(operations: list[Operation]) -> Any:
    """Run a test on operations, in both dtypes, on every backend."""
    cases = []
    for backend, dtype, op in product(MAP_BACKENDS, (np.float32, np.float64), operations):
        counts = backend.id != "fast" or dtype == np.float64 or op.name in IN_FLOAT32
        name = f"{op.name}-{dtype.__name__}-{backend.id}"
        marks = backend.marks if counts else ()
        cases.append(pytest.param(op, dtype, *backend.values, id=name, marks=marks))
    return pytest.mark.parametrize(("op", "dtype", "backend"), cases)


def drawn(
    data: DataObject,
    backend: TensorBackend,
    dtype: npt.DTypeLike,
    shape: tuple[int, ...] | None = None,
    low: int = -50,
) -> tuple[Array, Tensor]:
    """Draw a float64 array, and a tensor of the same elements in some dtype and some layout."""
    numbers = data.draw(lattice(data.draw(shapes()) if shape is None else shape, low=low))
    rounded = numbers.astype(dtype)
    return rounded.astype(np.float64), data.draw(laid_out(rounded, backend))


def check_gradients(
    op: Operation, operands: list[tuple[Array, Tensor]], dtype: npt.DTypeLike, *options: Any
) -> None:
    """Compare the gradient of each operand with the slope, times a gradient that differs by place."""
    arrays_, tensors_ = zip(*operands, strict=True)
    for a in tensors_:
        a.requires_grad_(True)
    out = op.on_tensors(*tensors_, *options)
    weights = np.linspace(-1.0, 2.0, out.size).reshape(out.shape)
    out.backward(from_numpy(weights.astype(dtype), out.backend))
    for i, (a, slope) in enumerate(zip(tensors_, op.slopes, strict=True)):
        expected = sum_to(weights * slope(*arrays_, *options) + np.zeros(out.shape), a.shape)
        size = 100.0 if len(arrays_) == 2 else 10.0
        assert_close_arrays(a.grad, expected, dtype, f"gradient {i} of {op.name}", size)


# --- task 3.1: map, zip, reduce --------------------------------------------------------------


@on_operations(UNARY)
@few
@given(data())
def test_operations_on_one_tensor(
    op: Operation, dtype: npt.DTypeLike, backend: TensorBackend, data: DataObject
) -> None:
    array, a = drawn(data, backend, dtype, low=op.low)
    assert_close_arrays(op.on_tensors(a), op.on_arrays(array), dtype, op.name)
    check_gradients(op, [(array, a)], dtype)


@on_operations(BINARY)
@few
@given(data(), mutually_broadcastable_shapes(num_shapes=2, min_dims=1, max_dims=4, max_side=3))
def test_operations_on_two_tensors_that_broadcast(
    op: Operation, dtype: npt.DTypeLike, backend: TensorBackend, data: DataObject, drawn_shapes: Any
) -> None:
    operands = [drawn(data, backend, dtype, shape) for shape in drawn_shapes.input_shapes]
    (array_a, a), (array_b, b) = operands
    assert_close_arrays(op.on_tensors(a, b), op.on_arrays(array_a, array_b), dtype, op.name)
    check_gradients(op, operands, dtype)


@on_operations(REDUCTIONS)
@few
@given(data())
def test_reductions_keep_the_dimension(
    op: Operation, dtype: npt.DTypeLike, backend: TensorBackend, data: DataObject
) -> None:
    array, a = drawn(data, backend, dtype)
    dim = data.draw(integers(-a.dims, a.dims - 1))
    expected = op.on_arrays(array, axis=dim, keepdims=True)
    assert_close_arrays(op.on_tensors(a, dim), expected, dtype, op.name, 15.0)
    total = op.on_tensors(a, None)
    assert_close_arrays(total, op.on_arrays(array).reshape(1), dtype, op.name, 400.0)
    check_gradients(op, [(array, a)], dtype, dim)


@on_map_backends
@on_dtypes
@few
@given(data())
def test_products_and_maxima(
    dtype: npt.DTypeLike, backend: TensorBackend, data: DataObject
) -> None:
    array, a = drawn(data, backend, dtype)
    dim = data.draw(integers(-a.dims, a.dims - 1))
    product = backend.mul_reduce(a, dim)
    assert_close_arrays(product, array.prod(dim, keepdims=True), dtype, "product")
    largest = backend.max_reduce(a, dim)
    assert_close_arrays(largest, array.max(dim, keepdims=True), dtype, "maximum")


@on_map_backends
@on_dtypes
@pytest.mark.parametrize("size", [31, 32, 33, 100, 1025])
def test_reductions_of_sizes_that_divide_nothing(
    size: int, dtype: npt.DTypeLike, backend: TensorBackend
) -> None:
    # Blocks, runs and vectors end in the middle of these.
    array = np.random.default_rng(size).standard_normal((3, size)).astype(dtype)
    for seen, dim in ((array, 1), (array.T, 0), (array, 0), (array.T, 1)):
        expected = seen.astype(np.float64).sum(dim, keepdims=True)
        assert_close_arrays(from_numpy(seen, backend).sum(dim), expected, dtype, "sum", size)
    everything = np.full(1, array.astype(np.float64).sum())
    assert_close_arrays(from_numpy(array, backend).sum(), everything, dtype, "sum", size)


@on_map_backends
def test_an_empty_tensor(backend: TensorBackend) -> None:
    empty = zeros((2, 0, 3), backend)
    for mapped in (-empty, empty + 1.0, empty * empty):
        assert mapped.shape == (2, 0, 3)
    assert empty.sum(1).to_numpy().tolist() == [[[0.0] * 3], [[0.0] * 3]]
    assert empty.sum(0).shape == (1, 0, 3)
    assert zeros((2, 0), backend).sum(0).shape == (1, 0)
    assert zeros((0, 2), backend).sum(1).shape == (0, 1)
    assert empty.sum().to_numpy().tolist() == [0.0]


@on_map_backends
@few
@given(data())
def test_all_of_a_tensor(backend: TensorBackend, data: DataObject) -> None:
    numbers = data.draw(
        arrays(np.float64, data.draw(shapes()), elements=sampled_from([0.0, 1.0, -2.5]))
    )
    truth = numbers != 0
    a = data.draw(laid_out(numbers, backend))
    dim = data.draw(integers(-a.dims, a.dims - 1))
    assert_close_arrays(a.all(dim), 1.0 * truth.all(dim, keepdims=True), np.float64)
    assert_close_arrays(a.contiguous().all(), np.full(1, 1.0 * truth.all()), np.float64)


@on_map_backends
@few
@given(data(), mutually_broadcastable_shapes(num_shapes=2, min_dims=1, max_dims=4, max_side=3))
def test_map_fills_a_given_tensor(
    backend: TensorBackend, data: DataObject, drawn_shapes: Any
) -> None:
    array, a = drawn(data, backend, np.float64, drawn_shapes.input_shapes[0])
    out = data.draw(laid_out(np.zeros(drawn_shapes.result_shape), backend))
    assert backend.neg_map(a, out) is out
    assert_close_arrays(out, -np.broadcast_to(array, out.shape), np.float64)


@on_map_backends
def test_operands_far_from_zero(backend: TensorBackend) -> None:
    a = from_numpy(np.array([-1e4, -800.0, 0.0, 800.0, 1e4]), backend, requires_grad=True)
    assert a.sigmoid().to_numpy().tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert a.tanh().to_numpy().tolist() == [-1.0, -1.0, 0.0, 1.0, 1.0]
    assert (a - 1e4).exp().to_numpy().tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    (a.sigmoid() + a.tanh()).sum().backward()
    assert a.grad is not None
    assert a.grad.to_numpy().tolist() == [0.0, 0.0, 1.25, 0.0, 0.0]


# --- task 3.2: matrix multiply ---------------------------------------------------------------


def matrices(
    data: DataObject, backend: TensorBackend, dtype: npt.DTypeLike, dims: tuple[int, int]
) -> tuple[tuple[Array, Tensor], tuple[Array, Tensor]]:
    """Draw two operands of a product whose batch dimensions broadcast."""
    rows, depth, cols = (data.draw(integers(1, 5)) for _ in range(3))
    batch = data.draw(
        mutually_broadcastable_shapes(num_shapes=2, min_dims=0, max_dims=max(dims) - 2, max_side=3)
    ).input_shapes
    return (
        drawn(data, backend, dtype, (*batch[0], rows, depth)),
        drawn(data, backend, dtype, (*batch[1], depth, cols)),
    )


@on_matmul_backends
@on_dtypes
@pytest.mark.parametrize("dims", [2, 3, 4])
@few
@given(data())
def test_products_of_matrices(
    dims: int, dtype: npt.DTypeLike, backend: TensorBackend, data: DataObject
) -> None:
    (array_a, a), (array_b, b) = matrices(data, backend, dtype, (dims, dims))
    assert_close_arrays(a @ b, array_a @ array_b, dtype, "product", 125.0)
    a.requires_grad_(True)
    b.requires_grad_(True)
    out = a @ b
    weights = np.linspace(-1.0, 2.0, out.size).reshape(out.shape)
    out.backward(from_numpy(weights.astype(dtype), backend))
    d_a = sum_to(weights @ array_b.swapaxes(-1, -2), a.shape)
    d_b = sum_to(array_a.swapaxes(-1, -2) @ weights, b.shape)
    assert_close_arrays(a.grad, d_a, dtype, "gradient of the left", 500.0)
    assert_close_arrays(b.grad, d_b, dtype, "gradient of the right", 500.0)


@on_matmul_backends
@on_dtypes
@pytest.mark.parametrize(
    ("rows", "depth", "cols"), [(33, 17, 31), (1, 65, 3), (32, 1, 32), (64, 40, 1), (3, 0, 2)]
)
def test_products_whose_sizes_divide_nothing(
    rows: int, depth: int, cols: int, dtype: npt.DTypeLike, backend: TensorBackend
) -> None:
    rng = np.random.default_rng(rows)
    a, b = rng.standard_normal((2, rows, depth)), rng.standard_normal((depth, cols))
    a, b = a.astype(dtype), b.astype(dtype)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    transposed = np.ascontiguousarray(b.T).T
    for left, right in (
        (a, b),
        (a, transposed),
        (a.transpose(1, 2, 0).copy().transpose(2, 0, 1), b),
    ):
        product = from_numpy(left, backend) @ from_numpy(right, backend)
        assert_close_arrays(product, expected, dtype, "product", depth + 1.0)


# --- a backend of one's own ------------------------------------------------------------------


@pytest.mark.task3_1
def test_the_backend_of_a_result_is_that_of_its_operands() -> None:
    a = from_numpy(np.ones((2, 2)), FastBackend, requires_grad=True)
    result = ((a * a).relu() + 1.0).sum(1).permute(1, 0)
    assert result.backend is result.f is FastBackend
    result.sum().backward()
    assert a.grad is not None
    assert a.grad.backend is FastBackend


@pytest.mark.parametrize(
    ("kernel", "fn"),
    [
        (fast_ops.tensor_map, operators.neg),
        (fast_ops.tensor_zip, operators.add),
        (fast_ops.tensor_reduce, operators.add),
    ],
)
def test_a_loop_is_compiled_once_for_each_function(
    kernel: Callable[..., Any], fn: Callable[..., float]
) -> None:
    assert kernel(fn) is kernel(fn)
