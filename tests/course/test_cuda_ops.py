"""The CUDA backend against NumPy and the simple backend, on the emulated GPU or a real one.

On the emulated GPU the threads of a block run one at a time: shapes are tiny, and chosen so that they
divide no block and no tile. A test has a task's mark if a kernel of the course runs in it: the backend
multiplies, and folds what lies in order, with kernels of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minitorch
from kernels.runtime.targets import EMULATED, cuda
from minitorch import CudaBackend, SimpleBackend, SimpleOps, cuda_ops, operators

from ..support.cuda_tensors import DTYPES, assert_equal, draw, on_cuda, permuted

pytestmark = pytest.mark.emulated

#: A function of one number, and a NumPy function that it must agree with.
MAPS: list[tuple[Any, Any]] = [
    (operators.neg, np.negative),
    (operators.sigmoid, lambda x: 1.0 / (1.0 + np.exp(-x))),
    (operators.relu, lambda x: np.maximum(x, 0.0)),
    (operators.exp, np.exp),
    (operators.tanh, np.tanh),
    (operators.inv, lambda x: 1.0 / x),
    (operators.log, lambda x: np.log(x + operators.EPS)),
]


# -- map, zip and reduce ----------------------------------------------------------------------


@pytest.mark.task3_3
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fn", "expected"), MAPS, ids=lambda f: getattr(f, "__name__", ""))
def test_map_agrees_with_numpy_and_the_simple_backend(fn: Any, expected: Any, dtype: Any) -> None:
    mapped = cuda_ops.CudaOps.map(fn)
    shapes = (), (33,), (3, 5, 2), (2, 2, 3, 2)  # the last is too much for a kernel of our own
    for x in (permuted(draw(shape, dtype)) for shape in shapes):
        result = mapped(on_cuda(x))
        assert result.dtype == dtype
        assert_equal(result, expected(x), f"{fn.__name__} of shape {x.shape}")
        simple = SimpleOps.map(fn)(minitorch.from_numpy(x, backend=SimpleBackend))
        assert_equal(result, simple.to_numpy(), f"{fn.__name__} against SimpleOps")


@pytest.mark.task3_3
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 1, 4), (5, 1)),
        ((2, 1, 3, 1), (2, 1, 3)),  # of four dimensions, none of which join
        ((), (3,)),
        ((33,), (1,)),
        ((2, 1), (1, 3)),
        ((1, 1, 1), (2,)),
        ((5, 3), (3,)),  # a row
        ((5, 3), (5, 1)),  # a column
        ((5, 1), (3,)),  # a column and a row
        ((4, 2, 3), (2, 3)),  # two dimensions that join
        ((4, 2, 3), (4, 1, 1)),
        ((2, 3, 2), (2, 1, 2)),  # three that do not
        ((3, 2, 5, 4), (3, 1, 5, 1)),  # four
        ((2, 2, 2, 2, 2), (2, 1, 2, 1, 2)),
    ],
)
def test_zip_broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = draw(a), draw(b, seed=1)
    assert_equal(on_cuda(x) + on_cuda(y), x + y, f"shapes {a} and {b}")
    x, y = x.astype(np.float32), y.astype(np.float32)
    assert_equal(on_cuda(y) * on_cuda(permuted(x)), x * y, f"shapes {b} and {a}, in reverse")


@st.composite
def layouts(draw_from: st.DrawFn) -> tuple[Any, int]:
    """Draw an array of up to four dimensions in any layout, and one of the dimensions."""
    shape = draw_from(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    order = draw_from(st.permutations(range(len(shape))))
    array = draw(tuple(shape[dim] for dim in order)).transpose(np.argsort(order).astype(int))
    return array, draw_from(st.integers(0, len(shape) - 1))


@pytest.mark.task3_3
@settings(max_examples=15)
@given(layout=layouts())
def test_any_dimension_of_any_layout_is_folded_as_in_numpy(layout: tuple[Any, int]) -> None:
    x, dim = layout
    assert_equal(on_cuda(x).sum(dim), x.sum(dim, keepdims=True), f"{x.shape}, dim {dim}")
    largest = CudaBackend.max_reduce(on_cuda(x), dim)
    assert_equal(largest, x.max(dim, keepdims=True), f"{x.shape}, largest over {dim}")


# -- the published launch protocol ------------------------------------------------------------


@pytest.mark.task3_3
def test_raw_reduce_writes_one_partial_fold_for_each_1024_elements() -> None:
    length = 1025
    x = on_cuda(draw((1, length)))
    out = x.full((1, -(-length // 1024)), 7.0)  # what out held does not count
    kernel = cuda_ops.tensor_reduce(operators.add)
    kernel[out.size, 1024](*out.tuple(), out.size, *x.tuple(), 1, 0.0)
    values = x.to_numpy()
    assert_equal(out, [[values[0, :1024].sum(), values[0, 1024:].sum()]])


# -- practice kernels ---------------------------------------------------------------------------


@pytest.mark.task3_3
@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 65])
def test_sum_practice_sums_each_run_of_32_elements(size: int) -> None:
    x = draw((size,))
    result = minitorch.sum_practice(on_cuda(x))
    runs = [x[start : start + 32].sum() for start in range(0, size, 32)]
    assert_equal(result, runs + [0.0] * (2 - len(runs)))
    assert float(result._storage[0]) == pytest.approx(runs[0])


@pytest.mark.task3_4
@pytest.mark.parametrize("size", [*range(1, 10), 15, 16, 17, 31, 32] if EMULATED else range(1, 33))
def test_mm_practice_multiplies_square_matrices_of_one_block(size: int) -> None:
    x, y = draw((size, size), DTYPES[size % 2]), draw((size, size), DTYPES[size % 2], seed=1)
    result = minitorch.mm_practice(on_cuda(x), on_cuda(permuted(y)))
    assert_equal(result, x @ y)


# -- what only a GPU runs -----------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.task3_3
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_maps_and_reductions(dtype: Any) -> None:
    x = draw((3, 100_003), dtype)
    device = on_cuda(x)
    assert_equal((device * 2.0).exp(), np.exp(x * 2))
    for dim in (0, 1):
        exact = x.sum(dim, keepdims=True, dtype=np.float64)
        assert_equal(device.sum(dim), exact, f"sum over {dim}")


@pytest.mark.cuda
@pytest.mark.task3_3
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_of_everything_is_equal_from_run_to_run(dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal(3_000_001).astype(dtype)
    device = on_cuda(x)
    first = device.sum(0).to_numpy()
    scale = np.abs(x).sum(dtype=np.float64)
    assert abs(first[0] - x.sum(dtype=np.float64)) < 1e-7 * scale
    for _ in range(20):
        assert np.array_equal(first, device.sum(0).to_numpy())


@pytest.mark.cuda
@pytest.mark.task3_3
@pytest.mark.parametrize("shape", [(7, 300, 65), (300, 1, 1027), (2, 70_001, 3)])
def test_every_dimension_of_a_large_tensor_is_folded(shape: tuple[int, ...]) -> None:
    x = draw(shape, np.float32)
    for dim in range(3):
        exact = x.sum(dim, keepdims=True, dtype=np.float64)
        assert_equal(on_cuda(x).sum(dim), exact, f"sum of {shape} over {dim}")


@pytest.mark.cuda
@pytest.mark.task3_3
def test_more_elements_than_32_bits_count_in_bytes_are_mapped() -> None:
    if cuda.current_context().get_memory_info().free < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    ones = on_cuda(np.zeros(1, np.float32)).full(((1 << 30) + 3,), 1.0)
    assert (ones + ones).sum(0).item() == pytest.approx(2.0 * ones.size, rel=1e-6)


@pytest.mark.cuda
@pytest.mark.task3_4
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((257, 129), (129, 65)),
        ((70_000, 1, 3), (3, 2)),
        ((3, 33, 65), (3, 65, 31)),
        ((1500, 300), (300, 1700)),
        ((96, 5000), (5000, 80)),
        ((2, 3, 300, 70), (3, 70, 130)),
    ],
)
def test_large_products(a: tuple[int, ...], b: tuple[int, ...], dtype: Any) -> None:
    x, y = draw(a, dtype), draw(b, dtype, seed=1)
    assert_equal(on_cuda(x) @ on_cuda(y), x.astype(np.float64) @ y, f"{a} @ {b}")


@pytest.mark.cuda
@pytest.mark.task3_3
def test_a_division_by_zero_is_infinite() -> None:
    assert CudaBackend.inv_map(on_cuda(np.zeros(1))).item() == np.inf
