"""Tasks 3.3 and 3.4: the course's own kernels, launched by themselves on operands in any layout.

The backend has kernels of its own for what lies in order, and for products.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from course.kernel_text import faults

from minitorch import CudaBackend, Tensor, cuda_ops, from_numpy, operators

from ..support.mistakes import assert_close_or_explain, filled

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.emulated

THREADS = 8
#: A power of two above any sum here, so that sums that hold it once too often differ by a multiple of it.
START = 1024.0


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


@pytest.mark.parametrize(
    "task",
    [
        pytest.param("3.3", marks=pytest.mark.task3_3),
        pytest.param("3.4", marks=pytest.mark.task3_4),
    ],
)
def test_a_kernel_has_its_barriers_and_tiles(task: str) -> None:
    """Judged by their text: a result may be right without them."""
    for fault in faults(ROOT, task).values():
        assert not fault, fault


@pytest.mark.task3_3
@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((3, 5), (3, 5), (3, 5)),
        ((3, 1), (1, 4), (3, 4)),
        ((1, 4), (3, 1), (3, 4)),
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
    blocks = -(-result.size // THREADS) + 1  # one more than needed
    expected = x - 2.0 * y
    mistakes = {
        "the operands are exchanged: fn(a, b)": y - 2.0 * x,
        "an ordinal of out is used as a position: to_index, then index_to_position": (
            expected.reshape(out[::-1]).transpose(range(len(out))[::-1])
        ),
    }
    what = f"zip of {a} and {b}: broadcast_index finds the index in each operand"
    run = cuda_ops.tensor_zip(weighted)[blocks, THREADS]
    got = filled(
        what,
        lambda out, a, b: run(*out.tuple(), out.size, *a.tuple(), *b.tuple()),
        result, left, right,
    )  # fmt: skip
    assert_close_or_explain(got, expected, what, mistakes)
    for operand, array in ((left, x), (right, y)):
        what = f"map of {array.shape} to {out}"
        run = cuda_ops.tensor_map(operators.neg)[blocks, THREADS]
        got = filled(
            what, lambda out, a, run=run: run(*out.tuple(), out.size, *a.tuple()), result, operand
        )
        assert_close_or_explain(got, -np.broadcast_to(array, out), what, {})


@pytest.mark.task3_3
def test_threads_beyond_out_size_write_nothing() -> None:
    array = drawn((2, 5))
    a, out = on_device(array, (0, 1)), on_device(np.full((2, 5), 7.0), (0, 1))
    for name, kernel, operands in (
        ("map", cuda_ops.tensor_map(operators.neg), a.tuple()),
        ("zip", cuda_ops.tensor_zip(weighted), (*a.tuple(), *a.tuple())),
    ):
        kernel[2, THREADS](*out.tuple(), 9, *operands)
        assert out.to_numpy()[1, 4] == 7.0, (
            f"{name}: with out_size = 9, thread 9 has written element 9: guard by i < out_size"
        )


@pytest.mark.task3_3
@pytest.mark.parametrize("length", [1, 2, 5, 7, 8, 9, 21, 40])
def test_a_block_folds_a_dimension_of_any_length(length: int) -> None:
    array = drawn((3, length, 2))
    a, out = on_device(array), on_device(np.full((3, 1, 2), 7.0))  # what out held does not count
    for fn, start, expected in (
        (operators.add, START, START + array.sum(1, keepdims=True)),
        (operators.max, 0.0, array.max(1, keepdims=True)),
    ):
        run = cuda_ops.tensor_reduce(fn)[out.size, THREADS]
        what = f"{fn.__name__} of {length} elements by {THREADS} threads"
        got = filled(
            what,
            lambda out, a, run, start: run(*out.tuple(), out.size, *a.tuple(), 1, start),
            out, a, run, start,
        )  # fmt: skip
        mistakes = {}
        if fn is operators.add:
            power = 2 ** int(np.log2(length))
            mistakes = {
                "start is left out": expected - start,
                "what out held is added: start takes its place": expected - start + 7.0,
                f"only the first {THREADS} elements are folded: each thread takes every {THREADS}th": (
                    start + array[:, :THREADS].sum(1, keepdims=True)
                ),
                "the tree is right for powers of two only": (
                    start + array[:, :power].sum(1, keepdims=True)
                ),
            }
            extra = np.round((got - expected) / start)  # times that start is added too often
            if (extra > 0).all() and np.allclose(got - expected, extra * start, rtol=0.0):
                times = int(extra.max()) + 1
                mistakes = {f"start is folded in {times} times: fold it in once for a block": got}
            elif (got < expected + 1e-9).all():
                mistakes[
                    "elements are left out: does the tree work for any number, not only 2^k?"
                ] = got
        assert_close_or_explain(got, expected, what, mistakes, 50.0)


@pytest.mark.task3_4
@pytest.mark.parametrize(
    ("a", "b", "order"),
    [
        ((1, 33, 34), (1, 34, 3), (2, 1, 0)),
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
    grid = (-(-a[1] // tile), -(-b[2] // tile), out.shape[0])
    run = cuda_ops.tensor_matrix_multiply[grid, (tile, tile, 1)]
    what = f"{a} @ {b}"
    if a[0] != b[0]:
        what += ", where a batch of 1 repeats"
    got = filled(
        what,
        lambda out, a, b: run(*out.tuple(), out.size, *a.tuple(), *b.tuple()),
        out, left, right,
    )  # fmt: skip
    whole = a[2] // tile * tile
    mistakes = {
        "the last tile of k, which is short, is left out": x[..., :whole] @ y[..., :whole, :],
        "the first tile of k is left out": x[..., tile:] @ y[..., tile:, :],
        "blockIdx.x counts tiles of rows, blockIdx.y tiles of columns: they are exchanged": (
            np.where(np.arange(a[1])[:, None] < tile, x @ y, 0.0)
        ),
    }
    if a[0] != b[0] and not np.allclose(got[1], (x @ y)[1]) and np.allclose(got[0], (x @ y)[0]):
        mistakes = {"an operand with fewer matrices repeats: take z modulo its number": got}
    assert_close_or_explain(got, x @ y, what, mistakes, 50.0)
