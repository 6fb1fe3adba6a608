"""Which rows of a sequence a rank holds, and which rows of another rank they attend to.

The sequence is cut into chunks.  In the zigzag layout a rank holds two, one from each end, so that under a
causal mask, where later rows see more keys, all ranks have the same work:

    chunk   0 1 2 3 4 5
    rank    0 1 2 2 1 0

Where several sequences are packed, a chunk is cut further into at most three segments: the rest of a
sequence that began before the chunk, sequences that lie within it, and the beginning of one that does not
end there.  Two segments then either belong to one sequence, at known places, or to none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .group import Group

LAYOUTS = ("zigzag", "contiguous")
Bounds = tuple[int, int]


def chunks(seq: int, rank: int, size: int, layout: str) -> list[range]:
    """Return the rows that a rank holds, in their order there.

    Args:
        seq: Length of the whole sequence.
        rank: The rank.
        size: Number of ranks.
        layout: "zigzag" or "contiguous".

    Raises:
        ValueError: If the layout is unknown, or the sequence cannot be cut into equal chunks.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    per_rank = 2 if layout == "zigzag" else 1
    count = per_rank * size
    if seq % count:
        raise ValueError(
            f"a sequence of {seq} does not divide into {count} equal chunks, {per_rank} for each of {size} "
            f"ranks; pad it to {-(-seq // count) * count}"
        )
    rows = seq // count
    numbers = (rank, count - 1 - rank) if layout == "zigzag" else (rank,)
    return [range(number * rows, (number + 1) * rows) for number in numbers]


def positions(seq: int, group: Group, layout: str = "zigzag") -> npt.NDArray[np.int64]:
    """Return the positions in the whole sequence of the rows that this rank holds, (seq / size,).

    ``tokens[:, positions(seq, group)]`` is the part of this rank.

    Args:
        seq: Length of the whole sequence.
        group: The ranks that share the sequence.
        layout: "zigzag", two chunks from the two ends of the sequence, so that all ranks have the same work
            under a causal mask; or "contiguous", one chunk.

    Raises:
        ValueError: If the layout is unknown, or the sequence does not divide.
    """
    return np.concatenate(
        [np.arange(c.start, c.stop) for c in chunks(seq, group.rank, group.size, layout)]
    )


class Segment(NamedTuple):
    """Consecutive rows of a chunk: a piece of one sequence, or several whole sequences.

    Attributes:
        start: First row, in the part of its rank.
        rows: Number of rows.
        place: First row, in the whole (packed) sequence.
        sequence: Index of the sequence, or of the first of several.
        begin: Where that sequence begins in the packed sequence.
        sums: Cumulative lengths of several sequences, or () for a piece of one.
    """

    start: int
    rows: int
    place: int
    sequence: int
    begin: int
    sums: tuple[int, ...] = ()

    @property
    def first(self) -> int:
        """The first row, in its own sequence."""
        return self.place - self.begin

    @property
    def here(self) -> range:
        """The rows, in the part of the rank."""
        return range(self.start, self.start + self.rows)

    @property
    def shift(self) -> int:
        """The distance from a row's place in the part of the rank to that in its own sequence."""
        return self.first - self.start


@lru_cache(maxsize=1024)
def segments(
    seq: int, rank: int, size: int, layout: str, sums: tuple[int, ...]
) -> tuple[Segment, ...]:
    """Return the segments of a rank's part.

    Args:
        seq: Length of the whole (packed) sequence.
        rank: The rank.
        size: Number of ranks.
        layout: See :func:`chunks`.
        sums: Cumulative lengths of the packed sequences; (0, seq) for one.
    """
    starts, found, start = np.asarray(sums), list[Segment](), 0
    for chunk in chunks(seq, rank, size, layout):
        inner = np.unique(starts[(starts > chunk.start) & (starts < chunk.stop)])
        bounds = [chunk.start, chunk.stop]
        if len(inner):
            # Whole sequences at either end of the chunk join those in its middle.
            bounds[1:1] = sorted({*_inner_end(starts, chunk, inner)})
        for first, stop in pairwise(bounds):
            found.append(_segment(starts, start + first - chunk.start, first, stop))
        start += len(chunk)
    return tuple(found)


def _inner_end(starts: Any, chunk: range, inner: Any) -> set[int]:
    """Return where the whole sequences within a chunk begin and end, those bounds of the chunk aside."""
    begin = chunk.start if chunk.start in starts else int(inner[0])
    end = chunk.stop if chunk.stop in starts else int(inner[-1])
    return {begin, end} - {chunk.start, chunk.stop}


def _segment(starts: Any, start: int, place: int, stop: int) -> Segment:
    sequence = int(np.searchsorted(starts, place, side="right")) - 1
    end = int(np.searchsorted(starts, stop, side="left"))
    begin = int(starts[sequence])
    whole = begin == place and int(starts[end]) == stop
    own = tuple(int(x) for x in starts[sequence : end + 1] - begin) if whole else ()
    return Segment(start, stop - place, place, sequence, begin, own)


class Pair(NamedTuple):
    """How the rows of one segment attend to another.

    Attributes:
        sums: Cumulative lengths of both where they are the same whole sequences, else ().
        row: First row of the queries in their sequence, 0 for whole sequences.
        col: First row of the keys.
        sequence: Index of their sequence, or of the first.
    """

    sums: tuple[int, ...]
    row: int
    col: int
    sequence: int


def pair(queries: Segment, keys: Segment, left: int, right: int) -> Pair | None:
    """Return how a segment attends to another, or None where it sees none of its rows.

    Args:
        queries: A segment of this rank.
        keys: A segment of any rank.
        left: Columns that a row sees before its own position, -1 for all.
        right: Columns that it sees behind, -1 for all.
    """
    if queries.sequence != keys.sequence or bool(queries.sums) != bool(keys.sums):
        return None
    if queries.sums:
        return Pair(queries.sums, 0, 0, queries.sequence)
    first, last = queries.first, queries.first + queries.rows - 1
    too_late = right >= 0 and keys.first > last + right
    too_early = left >= 0 and keys.first + keys.rows - 1 < first - left
    return None if too_late or too_early else Pair((), queries.first, keys.first, queries.sequence)


class Block(NamedTuple):
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
) -> tuple[Block, ...]:
    """Return the fewest calls in which the segments of this rank attend to those of another.

    Neighbours share a call where one band of columns describes what all of their rows see.  The causal
    part of a rank is such a call, as later chunks come later there, too.

    Args:
        queries: All segments of this rank.
        keys: All segments of a rank.
        left: See :func:`pair`.
        right: See :func:`pair`.
        keeps_places: Only segments that are consecutive in their sequence share a call: for dropout, whose
            bits depend on the places of rows and columns.
    """
    found: dict[Cell, Pair] = {}
    for i, a in enumerate(queries):
        for j, b in enumerate(keys):
            if (own := pair(a, b, left, right)) is not None:
                found[i, j] = own

    def joined(cells: list[Cell]) -> list[Block]:
        if len(cells) == 1:
            ((i, j),) = cells
            numbers = range(i, i + 1), range(j, j + 1)
            return [Block(*numbers, queries[i].here, keys[j].here, found[i, j])]
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
) -> Block | None:
    """Return the call for pairs of segments of one sequence, or None if one call cannot have them all."""
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
            return Block(*numbers, *places, Pair((), row, col, rows[0].sequence))
    return None


def _places(neighbours: Sequence[Segment]) -> range:
    """Return the rows of neighbouring segments, in the part of their rank."""
    return range(neighbours[0].start, neighbours[-1].here.stop)


def _same_seen(rows: Segment, cols: Segment, offset: int, window: Bounds) -> bool:
    """Tell whether rows see the same columns if the shifts of the two differ by another number.

    Args:
        rows: A segment of rows.
        cols: A segment of keys.
        offset: Shift of the rows, less that of the columns.
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
