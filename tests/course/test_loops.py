"""Task 2.3: each loop by itself, on operands in any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minitorch import TensorData, operators, tensor_ops

from ..support.mistakes import assert_close_or_explain, filled

X = np.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])  # (2, 3)
OPERANDS = {"(2, 3)": X, "(3,)": X[1], "(2, 1)": X[:, 2:], "(1, 3)": X[:1]}
BY_ORDINAL = "an ordinal of {} is used as a position: find the index, then index_to_position"


def by_columns(array: Any) -> TensorData:
    """Return data whose first dimension is the fastest in memory."""
    stored = np.ascontiguousarray(array.T)
    return TensorData(stored.reshape(-1), stored.shape).permute(1, 0)


def by_rows(array: Any) -> TensorData:
    return TensorData(array.reshape(-1).copy(), array.shape)


def weighted(x: float, y: float) -> float:
    """Tell the operands apart."""
    return x - 2.0 * y


def in_order_of_columns(array: Any) -> Any:
    """Return what is seen where the elements of (2, 3) are written to ``by_columns`` one by one."""
    return array.reshape(3, 2).T


def check_map(tensor_map: Callable[..., Any]) -> None:
    """Negate operands that broadcast, into an output that lies by columns."""
    run = tensor_map(operators.neg)
    for shape, array in OPERANDS.items():
        expected = -np.broadcast_to(array, (2, 3))
        for a in (by_rows(array), by_columns(array) if array.ndim == 2 else by_rows(array)):
            what = f"map of {shape}, strides {a.strides}, to (2, 3), strides (1, 2)"
            out = by_columns(np.zeros((2, 3)))
            got = filled(what, lambda out, a: run(*out.tuple(), *a.tuple()), out, a)
            mistakes = {BY_ORDINAL.format("out"): in_order_of_columns(expected)}
            if array.ndim == 1:
                rows = np.broadcast_to(-array[:2, None], (2, 3))
                mistakes["an index of out is used for the input: broadcast_index"] = rows
            if shape == "(2, 3)":
                stored = -a._storage.reshape(2, 3)
                mistakes[BY_ORDINAL.format("the input")] = stored
                mistakes["storages are read one by one, and not by strides"] = in_order_of_columns(
                    stored
                )
            assert_close_or_explain(got, expected, what, mistakes)


def check_zip(tensor_zip: Callable[..., Any]) -> None:
    """Combine operands that broadcast on either side, into an output that lies by columns."""
    run = tensor_zip(weighted)
    for left, x in OPERANDS.items():
        for right, y in OPERANDS.items():
            if np.broadcast_shapes(x.shape, y.shape) != (2, 3):
                continue
            what = f"zip of {left} and {right} to (2, 3): broadcast_index finds the index in each operand"
            out = by_columns(np.zeros((2, 3)))
            a = by_columns(x) if left == "(2, 3)" else by_rows(x)  # as out lies
            b = by_rows(y)
            got = filled(
                what, lambda out, a, b: run(*out.tuple(), *a.tuple(), *b.tuple()), out, a, b
            )
            expected = x - 2.0 * y
            mistakes = {
                BY_ORDINAL.format("out"): in_order_of_columns(expected),
                "the operands are exchanged: fn(a, b)": np.broadcast_to(y - 2.0 * x, (2, 3)),
            }
            if left == right == "(2, 3)":
                mistakes[
                    "storages are read one by one, where only one operand lies as out does"
                ] = x - 2.0 * in_order_of_columns(y)
            assert_close_or_explain(got, expected, what, mistakes)


def check_reduce(tensor_reduce: Callable[..., Any]) -> None:
    """Fold either dimension onto what the output holds."""
    run = tensor_reduce(operators.add)
    for array in (X, X.T.copy()):
        for dim in (0, 1):
            held = 100.0 * np.arange(1.0, 1 + array.shape[1 - dim])
            held = np.expand_dims(held, dim)
            sums = array.sum(dim, keepdims=True)
            what = f"sum over dimension {dim} of {array.shape} onto an output that holds {held.tolist()}"
            for a in (by_rows(array), by_columns(array)):
                got = filled(
                    what,
                    lambda out, a, dim: run(*out.tuple(), *a.tuple(), dim),
                    by_rows(held), a, dim,
                )  # fmt: skip
                first, last = array.take([0], dim), array.take([-1], dim)
                other = a.strides[1 - dim]
                starts = np.arange(array.shape[1 - dim]) * other
                places = starts[:, None] + np.arange(array.shape[dim]) * other
                along = np.where(places < a.size, a._storage[places % a.size], np.nan).sum(1)
                mistakes = {
                    "the step is the stride of another dimension: take that of reduce_dim": (
                        held + np.expand_dims(along, dim)
                    ),
                    "what out held is lost: fold onto it, for it is the start": sums,
                    "the first element is left out": held + sums - first,
                    "the last element is left out": held + sums - last,
                    "only one element is folded": held + first,
                }
                assert_close_or_explain(got, held + sums, what, mistakes, 1e3)


@pytest.mark.task2_3
def test_map_of_the_simple_backend() -> None:
    check_map(tensor_ops.tensor_map)


@pytest.mark.task2_3
def test_zip_of_the_simple_backend() -> None:
    check_zip(tensor_ops.tensor_zip)


@pytest.mark.task2_3
def test_reduce_of_the_simple_backend() -> None:
    check_reduce(tensor_ops.tensor_reduce)
