"""Which segments of two ranks share an attention call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from .sequence_parts import Bounds, Pair, Segment, pair


class CallBlock(NamedTuple):
    """Neighbouring segments of rows that attend to neighbouring segments of keys in one call.

    Attributes:
        queries: Numbers of the segments of rows.
        keys: Numbers of the segments of keys.
        rows: The rows, in the part of this rank.
        cols: The keys, in the part of their rank.
        pair: How the rows attend to the keys, from the first row and the first key.
    """

    queries: range
    keys: range
    rows: range
    cols: range
    pair: Pair


#: Number of a segment of rows, and of one of keys.
Cell = tuple[int, int]


@lru_cache(maxsize=1024)
def blocks(
    queries: tuple[Segment, ...],
    keys: tuple[Segment, ...],
    left: int,
    right: int,
    keeps_places: bool,
) -> tuple[CallBlock, ...]:
    """Return the fewest calls in which the segments of this rank attend to those of a rank.

    Neighbouring segments share a call where one band of columns describes what all of their rows see.
    Causal attention of a rank to its own keys is one such call, because its chunks keep their order.

    Args:
        queries: All segments of this rank.
        keys: All segments of a rank.
        left: See :func:`pair`.
        right: See :func:`pair`.
        keeps_places: Whether only segments that are consecutive in their sequence share a call.  Dropout
            needs this, because its bits depend on the places of rows and columns.
    """
    found: dict[Cell, Pair] = {}
    for i, a in enumerate(queries):
        for j, b in enumerate(keys):
            if (own := pair(a, b, left, right)) is not None:
                found[i, j] = own

    def joined(cells: list[Cell]) -> list[CallBlock]:
        if len(cells) == 1:
            ((i, j),) = cells
            numbers = range(i, i + 1), range(j, j + 1)
            return [CallBlock(*numbers, queries[i].here, keys[j].here, found[i, j])]
        if (one := _as_one(queries, keys, cells, (left, right), keeps_places)) is not None:
            return [one]
        parts = [[*x] for _, x in groupby(cells, lambda cell: cell[0])]
        if len(parts) == 1:
            parts = [[cell] for cell in cells]
        return [block for part in parts for block in joined(part)]

    by_sequence: dict[int, list[Cell]] = {}
    for cell, own in found.items():
        by_sequence.setdefault(own.sequence, []).append(cell)
    return tuple(block for cells in by_sequence.values() for block in joined(cells))


def _as_one(
    queries: Sequence[Segment],
    keys: Sequence[Segment],
    cells: Sequence[Cell],
    window: Bounds,
    keeps_places: bool,
) -> CallBlock | None:
    """Return the call for pairs of segments of one sequence, or None if one call cannot cover them all."""
    (i, last), (j, end) = ((min(x), max(x)) for x in zip(*cells, strict=True))
    rows, cols = queries[i : last + 1], keys[j : end + 1]
    if any(x.sums or x.sequence != rows[0].sequence for x in (*rows, *cols)):
        return None
    if keeps_places and any(len({x.shift for x in some}) > 1 for some in (rows, cols)):
        return None
    # The greatest one first: later columns are then unbounded where all of them are seen.
    for offset in sorted({queries[a].shift - keys[b].shift for a, b in cells}, reverse=True):
        if all(_same_seen(a, b, offset, window) for a in rows for b in cols):
            col = cols[0].first
            row = col + rows[0].start - cols[0].start + offset
            numbers = range(i, last + 1), range(j, end + 1)
            places = _places(rows), _places(cols)
            return CallBlock(*numbers, *places, Pair((), row, col, rows[0].sequence))
    return None


def _places(neighbours: Sequence[Segment]) -> range:
    """Return the rows of neighbouring segments, in the part of their rank."""
    return range(neighbours[0].start, neighbours[-1].here.stop)


def _same_seen(rows: Segment, cols: Segment, offset: int, window: Bounds) -> bool:
    """Tell whether rows still see the same columns if the shifts of the two differ by ``offset``.

    Args:
        rows: A segment of rows.
        cols: A segment of keys.
        offset: The assumed shift of the rows minus that of the columns.
        window: Columns that a row sees on either side of its own, -1 for all.
    """
    own = rows.shift - cols.shift
    # From a row to a column, in the parts of their ranks.
    least = cols.start - (rows.start + rows.rows - 1)
    most = cols.start + cols.rows - 1 - rows.start
    (left, right), distances = window, [(least - x, most - x) for x in (own, offset)]
    every = [(left < 0 or a >= -left) and (right < 0 or b <= right) for a, b in distances]
    none = [(left >= 0 and b < -left) or (right >= 0 and a > right) for a, b in distances]
    return own == offset or all(every) or all(none)
