"""Results for some of the rows of a part, put together in one tensor, without history.

The storage of such a tensor is that of (seq, …, heads, dim), where consecutive rows are one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..functions.subscripts import piece
from ..tensor import Tensor
from .local_attention import heads_first, sequence_first


class RowSums:
    """Sums of tensors over ranges of rows.

    Args:
        like: (…, heads, seq, dim), on the backend of the sums.
        dtype: Of the sums.
    """

    def __init__(self, like: Tensor, dtype: Any):
        self._total = like.empty(sequence_first(like).shape, dtype)
        self._written: set[range] = set()

    def _rows(self, rows: range) -> Any:
        return piece(self._total, 0, rows)

    def add(self, rows: range, values: Tensor) -> None:
        """Add (…, heads, rows, dim) to a range, which is the same as an earlier one or apart from it."""
        own, values = self._rows(rows), sequence_first(values)
        self._total.f.id_map(own + values if rows in self._written else values, own)
        self._written.add(rows)

    def finished(self, every: Sequence[range]) -> Tensor:
        """Return the sums, (seq, …, heads, dim); those of ranges to which nothing was added are 0."""
        for rows in every:
            if rows not in self._written:
                own = self._rows(rows)
                self._total.f.id_map(own.zeros(), own)
        return self._total


def joined(parts: Sequence[tuple[range, Tensor]], like: Tensor) -> Tensor:
    """Join ranges of rows and their (…, heads, rows, dim), in the dtype of another tensor."""
    first = parts[0][1]
    out = like.empty((sum(len(rows) for rows, _ in parts), *first.shape[:-2], first.shape[-1]))
    for rows, values in parts:
        out.f.id_map(sequence_first(values), piece(out, 0, rows))
    return heads_first(out)
