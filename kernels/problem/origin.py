"""The place of a call in the dropout mask of a larger attention."""

from __future__ import annotations

from typing import NamedTuple


class DropoutOrigin(NamedTuple):
    """Where the scores of a call begin among those of an attention that several calls compute.

    Element (batch, head, row, col) of the call takes the dropout bit of batch_head
    ``batch * heads + head + batch_head``, row ``row + self.row`` and column ``col + self.col``.  For packed
    sequences ``batch`` is the index of the sequence.

    Attributes:
        heads: Number of query heads of the whole attention.
        batch_head: Flat index, batch * heads + head, of the first head of the call.
        row: First query row.
        col: First key column.
    """

    heads: int
    batch_head: int = 0
    row: int = 0
    col: int = 0
