"""Rows of partial results on CUDA: sums, and merges by log-sum-exp, of every dtype and memory order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels.cuda.backend import merge_rows
from kernels.cuda.runtime.arrays import device_view, to_device, to_host
from kernels.runtime.dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    HALF_DTYPES,
    acc_dtype,
    rounded,
)

from ....support.tolerances import assert_close_arrays

pytestmark = pytest.mark.emulated

HEADS, SEQ, COUNT = 3, 7, 4
#: Rows of the sums that are written, and the row of the values that belongs to the first of them.
ROWS, PLACE = range(2, 5), 1
#: Dtypes of the sums before, of the values and of the sums after.
DTYPES = [
    *((x, x, x) for x in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)),
    *(
        (a, half, b)
        for half in HALF_DTYPES
        for a, b in product((half, FLOAT32), repeat=2)
        if a != b
    ),
    (FLOAT32, BFLOAT16, FLOAT32),
]
#: Leading dimensions, and the order of all dimensions in memory.
LAYOUTS = [((), (0, 1, 2)), ((), (1, 0, 2)), ((2,), (0, 1, 2, 3)), ((2,), (0, 2, 1, 3))]


def placed(array: Any, order: Sequence[int]) -> Any:
    """Return a copy on the device whose dimensions have an order in memory."""
    moved = to_device(np.ascontiguousarray(array.transpose(order)))
    steps = np.ascontiguousarray(array.transpose(order)).strides
    strides = [0] * array.ndim
    for axis, step in zip(order, steps, strict=True):
        strides[axis] = step // array.itemsize
    return device_view(moved, array.shape, tuple(strides))


class Rows:
    """Sums, values and their log-sum-exps; in one row of each, and in one of both, there are no keys."""

    def __init__(self, lead: tuple[int, ...], dim: int, dtypes: Any):
        random = np.random.default_rng(dim)
        before, values, self.out_dtype = dtypes

        def drawn(rows: int, dtype: Any) -> tuple[Any, Any]:
            lse = 9 * random.standard_normal((*lead, HEADS, rows)).astype(acc_dtype(values))
            return rounded(random.standard_normal((*lead, HEADS, rows, dim)), dtype), lse

        self.before, self.lse = drawn(SEQ, before)
        self.values, self.added = drawn(COUNT, values)
        for array, lse, rows in (
            (self.before, self.lse, (2, 3)),
            (self.values, self.added, (PLACE, PLACE + 2)),
        ):
            for row in rows:
                array[..., row, :], lse[..., row] = 0, -np.inf
        # What the logarithms lose where they are large: here of 2 and of 6 equal scores.
        self.rest, self.added_rest = np.zeros_like(self.lse), np.zeros_like(self.added)
        self.lse[..., 4] = self.added[..., PLACE + 2] = -1e9
        self.rest[..., 4], self.added_rest[..., PLACE + 2] = np.log(2), np.log(6)

    def merged(self, order: Sequence[int], is_new: bool, is_weighed: bool) -> tuple[Any, Any]:
        """Return sums and log-sum-exps by the kernel, in place where the dtype stays."""
        before, values = placed(self.before, order), placed(self.values, range(len(order)))
        out = before
        if self.before.dtype != self.out_dtype:
            out = placed(rounded(self.before, self.out_dtype), range(len(order)))
        logs = self.lse, self.rest, self.added, self.added_rest
        lse, *others = (to_device(x) for x in logs)
        own = (lse, *others) if is_weighed else ()
        merge_rows(out, values, ROWS, PLACE, None if is_new else before, *own)
        return out, lse

    def wanted(self, is_weighed: bool) -> tuple[Any, Any]:
        """Return the same in float64."""
        whole, lse = self.before.astype(np.float64), self.lse.astype(np.float64)
        rows, here = slice(ROWS.start, ROWS.stop), slice(PLACE, PLACE + len(ROWS))
        old, new = whole[..., rows, :], self.values[..., here, :].astype(np.float64)
        if is_weighed:
            logs = lse[..., rows], self.added[..., here].astype(np.float64)
            rests = self.rest[..., rows], self.added_rest[..., here]
            top = np.maximum(*logs)
            top = np.where(top == -np.inf, 0, top)
            weights = [np.exp((x - top) + rest) for x, rest in zip(logs, rests, strict=True)]
            total = weights[0] + weights[1]
            shares = [np.where(total > 0, w / np.where(total > 0, total, 1), 0.0) for w in weights]
            old, new = old * shares[0][..., None], new * shares[1][..., None]
            with np.errstate(divide="ignore"):
                lse[..., rows] = top + np.log(total)
        whole[..., rows, :] = old + new
        return whole, lse


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("is_weighed", [False, True])
def test_rows_are_added_or_merged_by_their_log_sum_exp(dtypes: Any, is_weighed: bool) -> None:
    for (lead, order), dim in product(LAYOUTS, (5, 16)):
        rows = Rows(lead, dim, dtypes)
        out, lse = (to_host(x) for x in rows.merged(order, False, is_weighed))
        wanted, wanted_lse = rows.wanted(is_weighed)
        assert_close_arrays(out, wanted, dtypes[2])
        assert_close_arrays(lse, wanted_lse, acc_dtype(dtypes[1]))
        for x, again in zip((out, lse), rows.merged(order, False, is_weighed), strict=True):
            np.testing.assert_array_equal(x, to_host(again))


@pytest.mark.parametrize(
    ("values", "out"),
    [(BFLOAT16, BFLOAT16), (FLOAT64, FLOAT64), (FLOAT16, FLOAT32), (FLOAT32, FLOAT16)],
    ids=str,
)
def test_rows_without_sums_are_written(values: Any, out: Any) -> None:
    for lead, order in LAYOUTS:
        rows = Rows(lead, 16, (out, values, out))
        rows.before[..., ROWS.start : ROWS.stop, :] = np.nan
        found, _ = rows.merged(order, True, False)
        wanted = rows.before.copy()
        new = rows.values[..., PLACE : PLACE + len(ROWS), :]
        wanted[..., ROWS.start : ROWS.stop, :] = rounded(new, out)
        np.testing.assert_array_equal(to_host(found), wanted)
