"""Sums of the results of several calls, each for some rows of a part, without history.

They are changed in place, on a GPU by one kernel and elsewhere a few rows at a time, so that no other array
of their size is in memory.  Sums of 16-bit results are computed in float32, and are stored in float32 if
more is to be added.  A first result and a finished sum stay in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from kernels.cuda.backend import merge_rows
from kernels.runtime.dtypes import acc_dtype, is_half, rounded

from ..tensor import Tensor
from .local_attention import Lse

#: Number of rows that are changed at a time on the host.
ROWS = 512


def _merge_on_host(
    out: Any, values: Any, rows: range, place: int, before: Any, shares: Sequence[Any]
) -> None:
    """Do the work of ``merge_rows``, given the shares of old and new values, (…, heads, rows)."""
    wide = acc_dtype(values.dtype)
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        here = slice(place + start, place + start + len(some))
        total = values[..., here, :].astype(wide)
        if shares:
            total *= shares[1][..., start : start + len(some), None]
        if before is not None:
            old = before[..., some.start : some.stop, :].astype(wide)
            if shares:
                old *= shares[0][..., start : start + len(some), None]
            total += old
        out[..., some.start : some.stop, :] = rounded(total, out.dtype)


def _merge_lse_on_host(lse: Lse, added: Lse, rows: range, place: int) -> list[Any]:
    """Merge log-sum-exps of some rows in place; return the shares of both."""
    own, own_rest = (x.array()[..., rows.start : rows.stop] for x in lse)
    new, new_rest = (x.array()[..., place : place + len(rows)] for x in added)
    top = np.maximum(own, new)
    top = np.where(top == -np.inf, 0, top)  # of rows that see no key
    weights = np.exp((own - top) + own_rest), np.exp((new - top) + new_rest)
    row_sum = weights[0] + weights[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        log = np.log(row_sum)
        own[...] = top + log
        own_rest[...] = np.where(row_sum == 0, 0, (top - own) + log)
    inverse = 1 / np.where(row_sum == 0, 1, row_sum)
    return [weight * inverse for weight in weights]


class RowSums:
    """Sums of the results of calls, each for neighbouring segments of a part.

    Args:
        segments: The rows of each segment.
        counts: Number of results that will be added to each.
        like: A tensor (…, heads, seq, dim) with the dtype and the backend of the results.
        dim: Last size of the results; that of ``like`` when None.
        is_wide: Whether sums of 16-bit results are float32 when they are finished.
        start: Sums so far, (…, heads, seq, dim), which are changed; None if there are none.

    Attributes:
        lse: The log-sum-exp of the keys so far, of (…, heads, seq), if results are weighted by theirs.
    """

    def __init__(
        self,
        segments: Sequence[range],
        counts: Sequence[int],
        like: Tensor,
        dim: int | None = None,
        is_wide: bool = False,
        start: Tensor | None = None,
    ):
        self._segments, self._left, self._like = segments, [*counts], like
        self._shape = (*like.shape[:-1], like.shape[-1] if dim is None else dim)
        self._may_widen = is_half(like.dtype)
        self._is_wide = is_wide and self._may_widen
        # By whether they are float32 instead of 16 bits.
        self._sums: dict[bool, Tensor] = {}
        # In which of them a segment is; None before its first result.
        self._places: list[bool | None] = [None] * len(segments)
        self.lse: Any = None
        if start is not None:
            self._take(start)

    def _take(self, sums: Tensor) -> None:
        """Make a tensor the sums of all segments."""
        is_wide = sums.dtype != self._like.dtype
        self._sums[is_wide] = sums
        self._places = [is_wide] * len(self._segments)

    def add(self, numbers: range, values: Tensor, lse: Lse | None = None) -> None:
        """Add the result of a call; the first result is kept and later changed if it has all rows.

        Args:
            numbers: Numbers of its segments.
            values: (…, heads, rows, dim).
            lse: Log-sum-exp of its keys, for the weights of the values and the sums.
        """
        if values.dims > 4 or values._tensor.strides[-1] != 1:
            values = values.contiguous()  # the kernel steps through batches by one stride
        for number in numbers:
            self._left[number] -= 1
        if not self._sums and len(numbers) == len(self._segments):
            self._take(values)
            self.lse = lse
            return
        if lse is not None and self.lse is None:
            self.lse = tuple(lse[0].full(self._shape[:-1], x) for x in (-math.inf, 0.0))

        def move(number: int) -> tuple[bool | None, bool]:
            before = self._places[number]
            if not self._left[number]:
                return before, self._is_wide
            return before, self._may_widen and before is not None

        self._write(numbers, move, values, self._segments[numbers.start].start, lse)

    def finished(self) -> Tensor:
        """Return the sums, (…, heads, seq, dim), once each segment has all of its results."""
        every = range(len(self._segments))
        for place, group in groupby(every, self._places.__getitem__):
            if place is not None and place != self._is_wide:
                self._write([*group], lambda number: (None, self._is_wide), self._sums[place], 0)
        return self._sums[self._is_wide]

    def _write(
        self,
        numbers: Sequence[int],
        move: Callable[[int], tuple[bool | None, bool]],
        values: Tensor,
        first: int,
        lse: Lse | None = None,
    ) -> None:
        """Merge values into the sums of neighbouring segments.

        Args:
            numbers: Numbers of the segments.
            move: Number of a segment → where its sum is before, None for nowhere, and where it is after.
            values: (…, heads, rows, dim), of the rows of the part from ``first`` on.
            first: The row of the part to which the first row of the values belongs.
            lse: See :meth:`add`.
        """
        for (before, after), group in groupby(numbers, move):
            own = [*group]
            rows = range(self._segments[own[0]].start, self._segments[own[-1]].stop)
            old = None if before is None else self._sums[before]
            self._merge(self._sum(after), old, rows, values, rows.start - first, lse)
            for number in own:
                self._places[number] = after

    def _sum(self, is_wide: bool) -> Tensor:
        if is_wide not in self._sums:
            dtype = acc_dtype(self._like.dtype) if is_wide else self._like.dtype
            self._sums[is_wide] = self._like.empty(self._shape, dtype)
        return self._sums[is_wide]

    def _merge(
        self,
        out: Tensor,
        before: Tensor | None,
        rows: range,
        values: Tensor,
        place: int,
        lse: Lse | None,
    ) -> None:
        """Merge some rows of sums and of values, whose row ``place`` belongs to the first of them."""
        old = None if before is None else before.array()
        own = out.array(), values.array(), rows, place, old
        if out.backend.cuda:
            merge_rows(*own, *() if lse is None else [x.array() for x in (*self.lse, *lse)])
        else:
            shares = () if lse is None else _merge_lse_on_host(self.lse, lse, rows, place)
            _merge_on_host(*own, shares)
