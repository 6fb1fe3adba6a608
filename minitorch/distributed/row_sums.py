"""Results for some of the rows of a part, put together in one tensor, without history.

The storage of such a tensor is that of (seq, …, heads, dim), where consecutive rows are one piece.  It is
changed in place, on a GPU by one kernel and elsewhere a few rows at a time, so that nothing else of its
size is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from kernels.cuda.backend import device_view, merge_rows

from ..attention.approximate.rounds import shares_with_lse
from ..functions.subscripts import piece, sliced
from ..tensor import Tensor
from ..tensor_data import strides_from_shape
from .local_attention import heads_first, sequence_first

#: Rows that are changed at a time at least; otherwise an eighth of them, as every piece costs launches.
ROWS = 512


def _pieces(rows: range) -> Iterator[tuple[range, range]]:
    """Yield ranges of some rows, and where they lie among them."""
    count = max(ROWS, -(-len(rows) // 8))
    for start in range(0, len(rows), count):
        few = rows[start : start + count]
        yield few, range(start, start + len(few))


def _laid_out(a: Tensor, shape: tuple[int, ...]) -> Any:
    """Return the elements of a tensor on a device as an array of another shape."""
    return device_view(a.contiguous()._tensor._storage, shape, strides_from_shape(shape))


class RowSums:
    """Sums of tensors over ranges of rows.

    Args:
        like: (…, heads, seq, dim), on the backend of the sums.
        dtype: Of the sums.
        dim: Of the sums; that of ``like`` when None.
    """

    def __init__(self, like: Tensor, dtype: Any, dim: int | None = None):
        *lead, rows, last = like.shape
        self._total = like.empty((rows, *lead, last if dim is None else dim), dtype)
        self._written: set[range] = set()

    def add(self, rows: range, values: Tensor, shares: Sequence[Tensor] | None = None) -> None:
        """Add (…, heads, rows, dim) to a range, which is the same as an earlier one or apart from it.

        Args:
            rows: The range.
            values: What is added.
            shares: Of what is there and of the values, by which both are multiplied, (…, heads, rows).
        """
        is_new = rows not in self._written
        self._written.add(rows)
        if self._total.backend.cuda:
            self._merge(rows, values, shares, is_new)
            return
        values = sequence_first(values.to(self._total.dtype))
        if shares is not None:
            shares = [sequence_first(x.view(*x.shape, 1)) for x in shares]
        for few, here in _pieces(rows):
            own: Any = piece(self._total, 0, few)
            new = sliced(values, 0, here)
            if shares is not None:
                before, after = (sliced(x, 0, here) for x in shares)
                new = own * before + new * after
            elif not is_new:
                new = own + new
            own.f.id_map(new, own)

    def _merge(
        self, rows: range, values: Tensor, shares: Sequence[Tensor] | None, is_new: bool
    ) -> None:
        """Add by one kernel, which reads values of any dtype and order."""
        *lead, count, dim = values.shape
        heads = math.prod(lead)
        factors = None
        if shares is not None:
            before, after = (_laid_out(x, (heads, count)) for x in shares)
            factors = before, after
        total = _laid_out(self._total, (self._total.shape[0], heads, dim))
        merge_rows(total, _laid_out(values, (heads, count, dim)), factors, rows.start, is_new)

    def add_all(self, values: Tensor) -> None:
        """Add (seq, …, heads, dim), once every range has been finished."""
        for few, _ in _pieces(range(self._total.shape[0])):
            own: Any = piece(self._total, 0, few)
            own.f.id_map(own + piece(values, 0, few), own)

    def finished(self, every: Sequence[range]) -> Tensor:
        """Return the sums, (seq, …, heads, dim); those of ranges to which nothing was added are 0."""
        for rows in every:
            if rows not in self._written:
                own: Any = piece(self._total, 0, rows)
                own.f.id_map(own.zeros(), own)
        return self._total


class RowMerge:
    """Attention of ranges of rows to several sets of keys, merged by their log-sum-exp.

    Args:
        q: (…, heads, seq, head_dim).
        dtype: Of the sums.
        dim: Of the values.

    Attributes:
        lses: Of the sets so far, (…, heads, rows), by range.
    """

    def __init__(self, q: Tensor, dtype: Any, dim: int):
        self._sums = RowSums(q, dtype, dim)
        self.lses: dict[range, Tensor] = {}

    def add(self, rows: range, out: Tensor, lse: Tensor) -> None:
        """Merge attention to another set, out (…, heads, rows, dim) and lse (…, heads, rows)."""
        shares = None
        if rows in self.lses:
            shares, lse = shares_with_lse([self.lses[rows], lse])
        self._sums.add(rows, out, shares)
        self.lses[rows] = lse

    def finished(self, every: Sequence[range]) -> Tensor:
        """Return the result, (…, heads, seq, dim)."""
        return heads_first(self._sums.finished(every))
