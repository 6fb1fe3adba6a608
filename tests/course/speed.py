"""Whether what is right is fast too: the grader runs these after every other test of a task has passed.

A time says something about the machine. A ratio of two times, measured in turn, says something about the
code: what slows the machine down for a moment slows both. Each bound is far below what a plain solution
reaches, and far above what a solution reaches that walks element by element where it should not.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from numba import njit, prange

import kernels  # beyond module 4
from kernels import launch  # beyond module 4
from kernels.problem.operands import make_operands  # beyond module 4
from minitorch import fast_ops, operators

PAIRS, ROUNDS = 7, 3
Run = Callable[[], Any]


def time_of(run: Run) -> float:
    begin = perf_counter()
    run()
    return perf_counter() - begin


def assert_faster(mine: Run, other: Run, times: float, record: Any, than: str) -> None:
    """Assert that ``mine`` is so many times as fast as ``other``, by the median of interleaved pairs.

    A round that fails is measured again, up to three in all: a busy machine may spoil one of them. What is
    slower than a fifth of what it should be is slow on any machine.
    """
    mine()  # compiled, and warm
    other()
    reached = 0.0
    for _ in range(ROUNDS):
        reached = max(reached, median(time_of(other) / time_of(mine) for _ in range(PAIRS)))
        if not times / 5.0 <= reached < times:
            break
    text = f"{reached:.3g} × the speed of {than}; required: {times:g} ×"
    record("speed", text)
    assert reached >= times, text


def triple(array: Any) -> tuple[Any, Any, Any]:
    """Return storage, shape and strides of a contiguous array, as the loops of module 3 take them."""
    strides = np.array(array.strides, np.int64) // array.itemsize
    return array.reshape(-1), np.array(array.shape, np.int64), strides


# --- module 3: what the loops are measured by computes an index wherever one could be saved -------


@njit
def position(ordinal, shape, strides):
    place = 0
    for dim in range(len(shape) - 1, -1, -1):
        place += ordinal % shape[dim] * strides[dim]
        ordinal //= shape[dim]
    return place


@njit(parallel=True)
def negated_by_index(out, out_shape, out_strides, a, a_shape, a_strides):
    for n in prange(len(out)):
        i = np.int64(n)
        out[position(i, out_shape, out_strides)] = -a[position(i, a_shape, a_strides)]


@njit(parallel=True)
def summed_by_index(out, out_shape, out_strides, a, a_shape, a_strides):
    length = a_shape[-1]
    for row in prange(len(out)):
        for i in range(length):
            out[row] += a[position(row * length + i, a_shape, a_strides)]


@njit(parallel=True)
def multiplied_by_index(
    out, out_shape, out_strides, a, a_shape, a_strides, b, b_shape, b_strides
):  # fmt: skip
    rows, cols, depth = out_shape[1], out_shape[2], a_shape[2]
    for row in prange(rows):
        for col in range(cols):
            for i in range(depth):
                left = position(row * depth + i, a_shape, a_strides)
                out[row * cols + col] += a[left] * b[position(i * cols + col, b_shape, b_strides)]


@pytest.mark.task3_1
def test_a_map_of_tensors_that_lie_alike_computes_no_index(record_property: Any) -> None:
    a = np.random.default_rng(0).standard_normal((20, 50, 200))
    operands = (*triple(np.empty_like(a)), *triple(a))
    mine = fast_ops.tensor_map(operators.neg)
    assert_faster(
        lambda: mine(*operands), lambda: negated_by_index(*operands), 2.0, record_property,
        "a parallel loop that computes every index",
    )  # fmt: skip


@pytest.mark.task3_1
def test_the_inner_loop_of_a_reduction_computes_no_index(record_property: Any) -> None:
    a = np.random.default_rng(0).standard_normal((20, 20, 500))
    operands = (*triple(np.zeros((20, 20, 1))), *triple(a))
    mine = fast_ops.tensor_reduce(operators.add)
    assert_faster(
        lambda: mine(*operands, 2), lambda: summed_by_index(*operands), 2.0, record_property,
        "a parallel loop that computes every index",
    )  # fmt: skip


@pytest.mark.task3_2
def test_the_inner_loop_of_a_product_computes_no_index(record_property: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((1, 80, 100)), rng.standard_normal((1, 100, 90))
    operands = (*triple(np.zeros((1, 80, 90))), *triple(a), *triple(b))
    mine = fast_ops.tensor_matrix_multiply
    assert_faster(
        lambda: mine(*operands), lambda: multiplied_by_index(*operands), 2.0, record_property,
        "a parallel loop that computes every index",
    )  # fmt: skip


@pytest.mark.task5_3  # beyond module 4
def test_a_tile_is_a_few_products_of_matrices(record_property: Any) -> None:  # beyond module 4
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 256, 32)) for _ in range(3))
    problem = kernels.make_problem(q, k, v, rung="flash2")
    operands = make_operands(launch.NUMPY.memory, problem, q, k, v)

    scores = rng.standard_normal((2, 256, 256))
    assert_faster(
        lambda: launch.forward(launch.NUMPY, problem, operands, (64, 64)),
        lambda: np.exp(scores - scores.max(-1, keepdims=True)).sum(-1), 0.05,
        record_property, "the exponentials alone, all at once",
    )  # fmt: skip
