"""Tasks 3.1 and 3.2: each loop by itself, on operands in any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from course.kernel_text import faults

from minitorch import TensorData, fast_ops, operators

from ..support.mistakes import assert_close_or_explain, filled
from .test_loops import by_columns, by_rows, check_map, check_reduce, check_zip, weighted

ROOT = Path(__file__).parents[2]
LARGE = np.arange(400.0 * 300.0).reshape(400, 300)


def check_large(loop: Callable[..., Any], fn: Callable[..., float], *operands: Any) -> None:
    """Compare where several threads share the work; the same loop is right for few elements."""
    a, *others = (by_rows(x) for x in operands)  # and out lies by columns
    shape = np.broadcast_shapes(*(x.shape for x in operands))
    expected, dim = (fn(*operands), ()) if fn is not operators.add else (a.to_array().sum(0), (0,))
    out = by_columns(np.zeros((1, shape[1]) if dim else shape))
    triples = (x for t in (a, *others) for x in t.tuple())
    loop(fn)(*out.tuple(), *triples, *dim)
    if not np.allclose(out.to_array(), expected):
        pytest.fail(
            "wrong for many elements, and right for few: threads share an index buffer or a sum; make "
            "it inside the prange loop"
        )


@pytest.mark.parametrize(
    "task",
    [
        pytest.param("3.1", marks=pytest.mark.task3_1),
        pytest.param("3.2", marks=pytest.mark.task3_2),
    ],
)
def test_a_loop_is_parallel_and_each_thread_has_its_own_index(task: str) -> None:
    """Judged by its text: a result may be right on one core, or by chance."""
    for fault in faults(ROOT, task).values():
        assert not fault, fault


@pytest.mark.task3_1
def test_map_of_the_fast_backend() -> None:
    check_map(fast_ops.tensor_map)
    check_large(fast_ops.tensor_map, operators.neg, LARGE)


@pytest.mark.task3_1
def test_zip_of_the_fast_backend() -> None:
    check_zip(fast_ops.tensor_zip)
    check_large(fast_ops.tensor_zip, weighted, LARGE, LARGE[:1])


@pytest.mark.task3_1
def test_reduce_of_the_fast_backend() -> None:
    check_reduce(fast_ops.tensor_reduce)
    check_large(fast_ops.tensor_reduce, operators.add, LARGE)


@pytest.mark.task3_2
@pytest.mark.parametrize("batches", [(2, 2), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(3, 3, 3), (2, 5, 3)], ids=str)
def test_the_product_of_the_fast_backend(
    sizes: tuple[int, int, int], batches: tuple[int, int]
) -> None:
    rng, (rows, depth, cols) = np.random.default_rng(1), sizes
    x = rng.uniform(0.5, 2.0, (batches[0], rows, depth))
    y = rng.uniform(0.5, 2.0, (batches[1], depth, cols))
    expected = x @ y
    for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0)):

        def laid_out(array: Any, order: tuple[int, ...] = order) -> TensorData:
            stored = np.ascontiguousarray(array.transpose(order))
            return TensorData(stored.reshape(-1), stored.shape).permute(*np.argsort(order).tolist())

        out, a, b = laid_out(np.zeros((2, rows, cols))), laid_out(x), laid_out(y)
        what = f"{x.shape} @ {y.shape}, out of strides {out.strides}"
        got = filled(
            what,
            lambda out, a, b: fast_ops.tensor_matrix_multiply(
                *out.tuple(), *a.tuple(), *b.tuple()
            ),
            out, a, b,
        )  # fmt: skip
        flat = TensorData(expected.reshape(-1).copy(), out.shape, out.strides).to_array()
        first = np.full_like(expected, np.nan)
        first[0] = expected[0]
        mistakes = {
            "out is written in its own order: positions come from out_strides": flat,
            "the sum over k ends too early: it has a_shape[2] terms": x[..., :rows] @ y[:, :rows],
        }
        if rows == depth == cols:
            mistakes |= {
                "the right operand is transposed: its rows go with k": x @ y.swapaxes(1, 2),
                "the left operand is transposed: its columns go with k": x.swapaxes(1, 2) @ y,
            }
        if 1 in batches and not np.allclose(got, expected) and np.allclose(got[0], expected[0]):
            mistakes = {"an operand with batch size 1 repeats: its batch stride counts as 0": first}
        assert_close_or_explain(got, expected, what, mistakes)
