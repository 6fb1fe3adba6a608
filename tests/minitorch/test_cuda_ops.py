"""The CUDA backend against NumPy and the simple backend, on the emulated GPU or a real one.

On the emulated GPU the threads of a block run one at a time: shapes are tiny, and chosen so that they
divide no block and no tile. A test has a task's mark if a kernel of the course runs in it: the backend
multiplies, and folds what lies in order, with kernels of its own.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import minitorch
from kernels.cuda.runtime.arrays import to_host
from minitorch import SimpleBackend, SimpleOps, cuda_ops, operators

from ..support.cuda_tensors import DTYPES, assert_equal, draw, on_cuda, permuted

pytestmark = pytest.mark.emulated

ZIPS: list[tuple[Any, Any]] = [
    (operators.add, np.add),
    (operators.mul, np.multiply),
    (operators.lt, np.less),
    (operators.eq, np.equal),
    (operators.relu_back, lambda x, d: np.where(x > 0.0, d, 0.0)),
    (operators.inv_back, lambda x, d: -d / (x * x)),
]
REDUCTIONS: list[tuple[Any, float, Any]] = [
    (operators.add, 0.0, np.sum),
    (operators.mul, 1.0, np.prod),
    (operators.max, -np.inf, np.max),
]


# -- map, zip and reduce ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fn", "expected"), ZIPS, ids=lambda f: getattr(f, "__name__", ""))
def test_zip_agrees_with_numpy_and_the_simple_backend(fn: Any, expected: Any, dtype: Any) -> None:
    zipped = cuda_ops.CudaOps.zip(fn)
    x, y = draw((3, 5), dtype), draw((3, 5), dtype, seed=1)
    pairs = [(x, y), (x, x), (permuted(x), y), (permuted(x), permuted(y)), (x, y[:1, :1])]
    for a, b in pairs:
        result = zipped(on_cuda(a), on_cuda(b))
        assert result.dtype == dtype
        assert_equal(result, expected(a, b), f"{fn.__name__} of {a.strides} and {b.strides}")
        simple = SimpleOps.zip(fn)(
            *(minitorch.from_numpy(t, backend=SimpleBackend) for t in (a, b))
        )
        assert_equal(result, simple.to_numpy(), f"{fn.__name__} against SimpleOps")


@pytest.mark.parametrize("value", [0.0, 1.5, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_filled_tensors_are_made_on_the_device(value: float, dtype: Any) -> None:
    for shape in [(), (1,), (33,), (2, 3), (0, 3)]:
        result = on_cuda(draw((2,), dtype)).full(shape, value)
        assert result.dtype == dtype
        assert_equal(result, np.full(shape, value), f"{shape} of {value}")


def test_integers_and_booleans_are_filled_too() -> None:
    for dtype in (np.int64, np.uint8, np.bool_):
        storage = cuda_ops.CudaOps.filled(5, 1.0, np.dtype(dtype))
        assert to_host(storage).tolist() == [1] * 5, dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fn", "start", "expected"), REDUCTIONS, ids=["add", "mul", "max"])
def test_reduce_agrees_with_numpy(fn: Any, start: float, expected: Any, dtype: Any) -> None:
    reduced = cuda_ops.CudaOps.reduce(fn, start)
    for x in (draw((5,), dtype), permuted(draw((3, 7, 2), dtype)), draw((2, 33), dtype)):
        for dim in range(x.ndim):
            result = reduced(on_cuda(x), dim)
            assert result.dtype == dtype
            assert_equal(result, expected(x, axis=dim, keepdims=True), f"{x.shape}, dim {dim}")


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 1023, 1024, 1025, 2049])
def test_reduce_folds_every_element_of_a_dimension_of_any_length(length: int) -> None:
    x = draw((2, length))
    assert_equal(on_cuda(x).sum(1), x.sum(1, keepdims=True), f"{length}, innermost")
    if length > 1024:
        assert_equal(on_cuda(permuted(x)).sum(1), x.sum(1, keepdims=True), f"{length}, strided")


def test_reduce_starts_from_its_start() -> None:
    ten = cuda_ops.CudaOps.reduce(operators.add, 10.0)
    for length in (0, 1, 5, 70):  # the last is folded in two passes where blocks are small
        x = draw((3, length))
        assert_equal(ten(on_cuda(x), 1), x.sum(1, keepdims=True) + 10.0, f"{length} elements")


def test_a_function_compiled_for_the_device_can_be_lifted_too() -> None:
    triple = cuda_ops.device_jit(_triple)
    x = draw((5,))
    assert_equal(cuda_ops.CudaOps.map(triple)(on_cuda(x)), 3.0 * x)


def _triple(x: float) -> float:
    return 3.0 * x


# -- matrix products ----------------------------------------------------------------------------


@st.composite
def products(draw_from: st.DrawFn) -> tuple[Any, Any]:
    """Draw two batches of matrices in any layout that multiply, broadcast in up to three dimensions."""
    rows, cols, depth = (draw_from(st.integers(least, 20)) for least in (1, 1, 0))
    batch = draw_from(st.lists(st.integers(1, 2), max_size=3))
    operands = []
    for seed, matrix in enumerate([(rows, depth), (depth, cols)]):
        ones = draw_from(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
        own = [1 if one else size for one, size in zip(ones, batch, strict=True)]
        shape = (*own[draw_from(st.integers(0, len(own))) :], *matrix)
        order = draw_from(st.permutations(range(len(shape))))
        array = draw(tuple(shape[dim] for dim in order), seed=seed)
        operands.append(array.transpose(np.argsort(order).astype(int)))
    return operands[0], operands[1]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12)
@given(operands=products())
@example(operands=(np.ones((3, 0)), np.ones((0, 2))))
def test_any_layouts_and_batches_multiply_as_in_numpy(
    operands: tuple[Any, Any], dtype: Any
) -> None:
    x, y = (operand.astype(dtype) for operand in operands)
    result = on_cuda(x) @ on_cuda(y)
    assert result.dtype == dtype
    assert_equal(result, x @ y, f"{x.shape} @ {y.shape}")


# -- tensors on the device ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f",
    [
        lambda a, b: (a * b).sigmoid() + a.exp(),
        lambda a, b: (a @ b.permute(1, 0)).log().sum(1),
        lambda a, b: (a / b.sum(0)).tanh().mean(1) * 2.0,
        lambda a, b: (a - b.mean()).permute(1, 0).contiguous().view(6).relu(),
    ],
    ids=["element-wise", "product", "broadcast", "layout"],
)
def test_gradients_agree_with_central_differences(f: Any) -> None:
    random.seed(0)
    minitorch.grad_check(f, on_cuda(draw((2, 3))), on_cuda(draw((2, 3), seed=1)))
