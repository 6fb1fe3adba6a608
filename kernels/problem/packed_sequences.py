"""Packed sequences: several sequences of unequal length in one array, without padding."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import as_host_array

Ints = npt.NDArray[np.int64]


class Tile(NamedTuple):
    """A tile of packed sequences; ``Sequences.tiles`` returns a table with these columns."""

    sequence: Any  #: Index of the sequence.
    first_q: Any  #: Its first query row in the packed array.
    seq_q: Any  #: Number of its query rows.
    first_k: Any  #: Its first key column in the packed array.
    seq_k: Any  #: Number of its key columns.
    start: Any  #: First row (or column) of the tile, relative to the start of the sequence.


class Sequences:
    """The bounds of packed sequences, compared by value.

    Sequence i has the query rows from ``cu_seqlens_q[i]`` up to, but excluding, ``cu_seqlens_q[i +
    1]``, and the key columns that ``cu_seqlens_k`` names in the same way.  The arrays, (count + 1,), are
    read-only copies, so that derived values can be cached.

    Raises:
        TypeError: If one of them is not a vector of whole numbers.
        ValueError: If one does not begin with 0, decreases, or does not end with its total, or if the
            two have different lengths.
    """

    def __init__(self, cu_seqlens_q: Any, cu_seqlens_k: Any, total_q: int, total_k: int):
        self.cu_seqlens_q = _sums("cu_seqlens_q", cu_seqlens_q, total_q, "query rows")
        self.cu_seqlens_k = _sums("cu_seqlens_k", cu_seqlens_k, total_k, "key columns")
        counts = [len(sums) - 1 for sums in (self.cu_seqlens_q, self.cu_seqlens_k)]
        if counts[0] != counts[1]:
            raise ValueError(
                f"cu_seqlens_q and cu_seqlens_k must describe the same number of sequences, got "
                f"{counts[0]} and {counts[1]}; give both the same length"
            )

    @cached_property
    def _content(self) -> tuple[bytes, bytes]:
        return self.cu_seqlens_q.tobytes(), self.cu_seqlens_k.tobytes()

    def __eq__(self, other: object) -> bool:
        """Tell whether two have the same sequences."""
        if not isinstance(other, Sequences):
            return NotImplemented
        return self is other or self._content == other._content

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._content)

    @property
    def count(self) -> int:
        """The number of sequences."""
        return len(self.cu_seqlens_q) - 1

    @cached_property
    def lengths(self) -> tuple[Ints, Ints]:
        """Query rows and key columns of each sequence."""
        return np.diff(self.cu_seqlens_q), np.diff(self.cu_seqlens_k)

    def tiles(self, block: int, of_keys: bool = False, fixed: bool = False) -> Ints:
        """Return the tiles of all sequences, none of which spans two: (tiles, 6), a :class:`Tile` each.

        Args:
            block: Rows (or columns) per tile.
            of_keys: Return tiles of key columns instead of query rows.
            fixed: Append tiles of an empty sequence behind the last one, so that the number of tiles
                depends on the number of sequences and their total length only.
        """
        counts: Ints = -(-self.lengths[of_keys] // block)  # (count,), rounded up
        sequence = np.repeat(np.arange(self.count), counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        start = (np.arange(len(sequence)) - before) * block
        columns = Tile(
            sequence,
            self.cu_seqlens_q[sequence],
            self.lengths[0][sequence],
            self.cu_seqlens_k[sequence],
            self.lengths[1][sequence],
            start,
        )
        found = np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.int64)
        if not fixed:
            return found
        ends = int(self.cu_seqlens_q[-1]), int(self.cu_seqlens_k[-1])
        # As if each length were 1 more than whole tiles.
        most = (ends[of_keys] + self.count * (block - 1)) // block
        empty = Tile(self.count, ends[0], 0, ends[1], 0, 0)
        return np.concatenate([found, np.tile(np.array(empty), (most - len(found), 1))])


def sequences_of(cu_seqlens_q: Any, cu_seqlens_k: Any, total_q: int, total_k: int) -> Sequences:
    """Return the cached bounds of packed sequences; known values are not checked again.

    The cache compares values, so that the caller may change its arrays between calls.  Arguments and errors
    are those of :class:`Sequences`.
    """
    sums_q = as_host_array("cu_seqlens_q", cu_seqlens_q)
    sums_k = as_host_array("cu_seqlens_k", cu_seqlens_k)
    if any(sums.dtype.kind not in "iu" or sums.ndim != 1 for sums in (sums_q, sums_k)):
        return Sequences(sums_q, sums_k, total_q, total_k)  # raises the error
    kinds = sums_q.dtype, sums_k.dtype
    return _sequences_of(sums_q.tobytes(), sums_k.tobytes(), *kinds, int(total_q), int(total_k))


@lru_cache(maxsize=64)
def _sequences_of(
    sums_q: bytes,
    sums_k: bytes,
    dtype_q: np.dtype[Any],
    dtype_k: np.dtype[Any],
    total_q: int,
    total_k: int,
) -> Sequences:
    sums = np.frombuffer(sums_q, dtype_q), np.frombuffer(sums_k, dtype_k)
    return Sequences(*sums, total_q, total_k)


def _sums(name: str, sums: Any, total: int, what: str) -> Ints:
    array = as_host_array(name, sums)
    if array.dtype.kind not in "iu" or array.ndim != 1 or len(array) < 2:
        raise TypeError(
            f"{name} must be a vector of whole numbers, 0 and the cumulative lengths; got shape "
            f"{array.shape} of {array.dtype}; for lengths of 2 and 3 pass numpy.array([0, 2, 5])"
        )
    if array[0] != 0 or array[-1] != total or (np.diff(array.astype(np.int64)) < 0).any():
        raise ValueError(
            f"{name} must begin with 0, never decrease and end with the {total} {what}, got "
            f"{np.array2string(array, threshold=8)}; pass the cumulative lengths"
        )
    own = array.astype(np.int64)
    own.flags.writeable = False
    return own
