"""Tasks 3.3 and 3.4: the course's own kernels, launched by themselves on operands in any layout.

The backend has kernels of its own for what lies in order, and for products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.common.geometry import ceil_div
from minitorch import CudaBackend, Tensor, cuda_ops, from_numpy, operators

from ..support.missing_barriers import missing_barriers as missing_barriers
from ..support.tolerances import assert_close_arrays

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("quick_barriers")]

THREADS = 8


def drawn(shape: tuple[int, ...], seed: int = 1) -> Any:
    return np.random.default_rng(seed).uniform(0.5, 2.0, shape)


def on_device(array: Any, order: tuple[int, ...] | None = None) -> Tensor:
    """Return a tensor whose dimensions lie in memory in this order; None: reversed."""
    order = order or tuple(range(array.ndim))[::-1]
    stored = np.ascontiguousarray(array.transpose(order))
    return from_numpy(stored.transpose(np.argsort(order)), CudaBackend)


def weighted(x: float, y: float) -> float:
    """Tell the operands apart."""
    return x - 2.0 * y


@pytest.mark.task3_3
@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((3, 5), (3, 5), (3, 5)),
        ((3, 1), (1, 4), (3, 4)),
        ((5,), (2, 3, 5), (2, 3, 5)),
        ((2, 3, 1), (3, 4), (2, 3, 4)),
    ],
    ids=str,
)
def test_map_and_zip_of_any_layouts_and_shapes(
    a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...]
) -> None:
    x, y = drawn(a), drawn(b, seed=2)
    left, right = on_device(x), on_device(y, tuple(range(len(b))))
    result = on_device(np.zeros(out))
    blocks = ceil_div(result.size, THREADS) + 1  # one more than needed
    cuda_ops.tensor_zip(weighted)[blocks, THREADS](
        *result.tuple(), result.size, *left.tuple(), *right.tuple()
    )
    assert_close_arrays(result, x - 2.0 * y, np.float64, f"zip of {a} and {b}")
    for operand, array in ((left, x), (right, y)):
        cuda_ops.tensor_map(operators.neg)[blocks, THREADS](
            *result.tuple(), result.size, *operand.tuple()
        )
        expected = -np.broadcast_to(array, out)
        assert_close_arrays(result, expected, np.float64, f"map of {array.shape}")


@pytest.mark.task3_3
@pytest.mark.parametrize("length", [1, 2, 5, 7, 8, 9, 21, 40])
def test_a_block_folds_a_dimension_of_any_length(length: int) -> None:
    array = drawn((3, length, 2))
    a, out = on_device(array), on_device(np.full((3, 1, 2), 7.0))  # what out held does not count
    for fn, start, expected in (
        (operators.add, 10.0, 10.0 + array.sum(1, keepdims=True)),
        (operators.max, 0.0, array.max(1, keepdims=True)),
    ):
        cuda_ops.tensor_reduce(fn)[out.size, THREADS](*out.tuple(), out.size, *a.tuple(), 1, start)
        assert_close_arrays(out, expected, np.float64, f"{fn.__name__} of {length}", 50.0)


@pytest.mark.task3_4
@pytest.mark.parametrize(
    ("a", "b", "order"),
    [
        ((1, 3, 2), (1, 2, 4), (0, 1, 2)),
        ((2, 5, 33), (2, 33, 3), (2, 1, 0)),
        ((2, 3, 4), (1, 4, 2), (0, 1, 2)),
        ((1, 2, 3), (2, 3, 1), (1, 2, 0)),
    ],
    ids=str,
)
def test_the_tiled_product_of_batches_in_any_layout(
    a: tuple[int, ...], b: tuple[int, ...], order: tuple[int, ...]
) -> None:
    x, y = drawn(a), drawn(b, seed=2)
    left, right = on_device(x, order), on_device(y, order)
    out = on_device(np.zeros((max(a[0], b[0]), a[1], b[2])), order)
    tile = cuda_ops.THREADS_PER_BLOCK
    grid = (ceil_div(a[1], tile), ceil_div(b[2], tile), out.shape[0])
    cuda_ops.tensor_matrix_multiply[grid, (tile, tile, 1)](
        *out.tuple(), out.size, *left.tuple(), *right.tuple()
    )
    assert_close_arrays(out, x @ y, np.float64, f"{a} @ {b}", 50.0)


@pytest.mark.task3_3
@pytest.mark.usefixtures("missing_barriers")
def test_no_barrier_of_a_reduction_is_missing() -> None:
    a, out = on_device(drawn((2, 7, 1))), on_device(np.zeros((2, 1, 1)))
    cuda_ops.tensor_reduce(operators.add)[out.size, 8](*out.tuple(), out.size, *a.tuple(), 1, 0.0)
    total = on_device(np.zeros(1))
    cuda_ops.jit_sum_practice[1, 32](total._tensor._storage, a._tensor._storage, 14)
    assert_close_arrays(total, drawn((2, 7, 1)).sum(keepdims=True)[0, 0], np.float64, "sum", 50.0)


@pytest.mark.task3_4
@pytest.mark.usefixtures("missing_barriers")
def test_no_barrier_of_a_product_is_missing() -> None:
    a, b = on_device(drawn((1, 2, 33))), on_device(drawn((1, 33, 2), seed=2))
    out = on_device(np.zeros((1, 2, 2)))
    tile = cuda_ops.THREADS_PER_BLOCK
    cuda_ops.tensor_matrix_multiply[(1, 1, 1), (tile, tile, 1)](
        *out.tuple(), out.size, *a.tuple(), *b.tuple()
    )
    small = on_device(np.zeros((1, 2, 2)))
    operands = (on_device(drawn((2, 2)))._tensor._storage for _ in range(2))
    cuda_ops.jit_mm_practice[1, (2, 2)](small._tensor._storage, *operands, 2)
