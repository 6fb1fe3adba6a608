"""The layouts and sizes that the fast backend's loops distinguish, and the memory pool of large results."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from hypothesis.strategies import DataObject, data, integers, permutations, sampled_from

from kernels.cpu.runtime import memory_pool as pool
from minitorch import FastBackend, from_numpy
from minitorch.accelerated import cpu_loops as fast_loops
from minitorch.accelerated.cpu_loops import (
    BLOCK,
    COLUMNS,
    LANES,
    ROWS,
    FoldLayout,
    fold_layout,
    row_layout,
)

from ...tensor_strategies import laid_out, on_dtypes

#: Name of the reduction, NumPy's, and numbers of which any order gives the same result.
FOLDS: list[tuple[str, Callable[..., Any], tuple[int, int]]] = [
    ("add_reduce", np.sum, (-8, 8)),
    ("max_reduce", np.max, (-1000, 1000)),
    ("mul_reduce", np.prod, (-1, 1)),
]
#: Around every size at which the loops change what they do.
LENGTHS = (
    1, 2, 3, LANES - 1, LANES, LANES + 1, ROWS - 1, ROWS, ROWS + 1, ROWS + 6, BLOCK - 1, BLOCK,
    BLOCK + 1, BLOCK + LANES, 3 * BLOCK + 7, COLUMNS - 1, COLUMNS, COLUMNS + 1,
)  # fmt: skip


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few elements go where many do."""
    monkeypatch.setattr(fast_loops, "LARGE", 1)


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize(("name", "fold", "bounds"), FOLDS, ids=[fold[0] for fold in FOLDS])
@on_dtypes
@given(data())
@settings(max_examples=40)
def test_a_fold_of_any_dimension_in_any_layout(
    name: str, fold: Any, bounds: tuple[int, int], dtype: Any, data: DataObject
) -> None:
    dims = data.draw(integers(1, 3))
    long = data.draw(integers(0, dims - 1))
    shape = [data.draw(integers(1, 3)) for _ in range(dims)]
    shape[long] = data.draw(sampled_from(LENGTHS))
    order = data.draw(permutations(range(dims)))
    dim = data.draw(integers(0, dims - 1))
    rng = np.random.default_rng(data.draw(integers(0, 1000)))
    stored = rng.integers(*bounds, shape, endpoint=True).astype(dtype)
    seen = stored.transpose(order)
    found = getattr(FastBackend, name)(from_numpy(seen), dim)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.to_numpy(), fold(seen, axis=dim, keepdims=True))


@pytest.mark.parametrize(
    ("shape", "order", "dim", "expected"),
    [
        ((5000,), (0,), 0, FoldLayout(1, 0, 5000, 1, 1)),
        ((40, 90), (0, 1), 1, FoldLayout(40, 90, 90, 1, 1)),
        ((40, 90), (0, 1), 0, FoldLayout(1, 0, 40, 90, 90)),
        ((40, 90), (1, 0), 0, FoldLayout(40, 90, 90, 1, 1)),
        ((40, 90), (1, 0), 1, FoldLayout(1, 0, 40, 90, 90)),
        ((4, 5, 90), (0, 1, 2), 2, FoldLayout(20, 90, 90, 1, 1)),
        ((4, 5, 90), (0, 1, 2), 1, FoldLayout(4, 450, 5, 90, 90)),
        ((4, 5, 90), (0, 1, 2), 0, FoldLayout(1, 0, 4, 450, 450)),
        ((40, 10), (0, 1), 1, None),  # too short a row
        ((4, 5, 90), (1, 0, 2), 2, None),  # rows that lie in another order
        ((4, 0), (0, 1), 1, None),
    ],
)
def test_the_layout_of_a_fold(
    shape: tuple[int, ...], order: tuple[int, ...], dim: int, expected: FoldLayout | None
) -> None:
    a = from_numpy(np.zeros(shape).transpose(order))
    assert fold_layout(a.shape, a._tensor.strides, dim) == expected


@pytest.mark.usefixtures("every_size")
@on_dtypes
@given(data(), mutually_broadcastable_shapes(num_shapes=2, min_dims=1, max_dims=4, max_side=3))
@settings(max_examples=60)
def test_an_operation_on_operands_that_broadcast(
    dtype: Any, data: DataObject, drawn_shapes: Any
) -> None:
    rng = np.random.default_rng(data.draw(integers(0, 1000)))
    arrays, tensors = [], []
    for shape in drawn_shapes.input_shapes:
        arrays.append(rng.integers(-50, 50, shape).astype(dtype))
        tensors.append(data.draw(laid_out(arrays[-1], FastBackend)))
    found = FastBackend.add_zip(*tensors)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.to_numpy(), np.add(*arrays))


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((40, 90), (1,), (3600, 0, 1, 0, 0)),
        ((1,), (40, 90), (3600, 0, 0, 0, 1)),
        ((40, 90), (90,), (90, 90, 1, 0, 1)),
        ((40, 90), (40, 1), (90, 90, 1, 1, 0)),
        ((40, 1), (1, 90), (90, 1, 0, 0, 1)),
        ((3, 4, 5), (4, 5), (20, 20, 1, 0, 1)),
        ((3, 4, 5), (3, 1, 5), None),  # three dimensions are left
    ],
)
def test_the_layout_of_operands_that_broadcast(
    left: tuple[int, ...], right: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    shapes = np.broadcast_shapes(left, right), left, right
    assert row_layout(*(from_numpy(np.zeros(shape))._tensor for shape in shapes)) == expected


def test_few_elements_go_to_the_loop_of_the_course(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("a small fold was taken from the student's loop")

    monkeypatch.setattr(fast_loops, "bind_fold", never)
    from_numpy(np.ones((3, 1025))).sum(1)
    with pytest.raises(AssertionError, match="taken from"):
        from_numpy(np.ones(fast_loops.FOLDED_FROM)).sum(0)


# --- memory of large results -----------------------------------------------------------------


FLOAT32 = np.dtype(np.float32)
LARGE = 2 * pool.KEPT_FROM // 4


@pytest.fixture
def no_memory_kept() -> Any:
    """Begin and end with an empty pool."""
    gc.collect()
    pool.release()
    yield
    pool.release()


def address(array: Any) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.usefixtures("no_memory_kept")
def test_memory_is_taken_again_when_nothing_lies_there() -> None:
    first = pool.empty(LARGE, FLOAT32)
    place = address(first)
    assert place % pool.ALIGNMENT == 0
    assert (first.dtype, first.shape) == (FLOAT32, (LARGE,))
    assert first.flags.writeable and first.flags.c_contiguous
    view = first[10:].reshape(2, -1)
    del first
    assert address(pool.empty(LARGE, FLOAT32)) != place, "a view was still there"
    del view
    assert address(pool.empty(LARGE, FLOAT32)) == place
    assert address(pool.empty(LARGE // 2, np.dtype(np.float64))) == place, "of as many bytes"


@pytest.mark.usefixtures("no_memory_kept")
def test_no_more_memory_is_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    size = LARGE * 4
    monkeypatch.setattr(pool, "KEPT_MOST", 3 * size)
    arrays = [pool.empty(LARGE + i, FLOAT32) for i in (0, 0, 1, 2, 3)]
    assert pool.unused_bytes() == 0
    while arrays:
        arrays.pop(0)
        assert pool.unused_bytes() <= 3 * size
    assert pool.unused_bytes() > size
    pool.release()
    assert pool.unused_bytes() == 0
