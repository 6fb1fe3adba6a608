"""The rows of a sequence that a rank holds, and the rows of other ranks to which they attend.

The sequence is cut into chunks.  In the zigzag layout a rank holds two chunks, one from each end.  All
ranks then have the same work under a causal mask, where later rows attend to more keys:

    chunk   0 1 2 3 4 5
    rank    0 1 2 2 1 0

If several sequences are packed, a chunk is cut further into at most three segments: the rest of a sequence
that began before the chunk, the sequences that lie within it, and the beginning of one that ends after it.
Two segments of different chunks then either are parts of one sequence, at known offsets, or share no
sequence.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .group import Group

LAYOUTS = ("zigzag", "contiguous")
Bounds = tuple[int, int]


def chunks(seq: int, rank: int, size: int, layout: str) -> list[range]:
    """Return the rows that a rank holds, in their order on the rank.

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
        ValueError: If the layout is unknown, or the sequence cannot be divided equally.
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
    """Return where the whole sequences within a chunk begin and end, without the bounds of the chunk."""
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
    """Return how a segment attends to another, or None if it sees none of its rows.

    Args:
        queries: A segment of this rank.
        keys: A segment of any rank.
        left: Columns that a row sees before its own position, -1 for all.
        right: Columns that a row sees after its own position, -1 for all.
    """
    if queries.sequence != keys.sequence or bool(queries.sums) != bool(keys.sums):
        return None
    if queries.sums:
        return Pair(queries.sums, 0, 0, queries.sequence)
    first, last = queries.first, queries.first + queries.rows - 1
    too_late = right >= 0 and keys.first > last + right
    too_early = left >= 0 and keys.first + keys.rows - 1 < first - left
    return None if too_late or too_early else Pair((), queries.first, keys.first, queries.sequence)
