"""Packed sequences: several of unequal length one after the other in one array, and no padding."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import as_host_array

Ints = npt.NDArray[np.int64]


class Tile(NamedTuple):
    """The columns of :meth:`Sequences.tiles`.

    Attributes:
        sequence: Number of the sequence.
        first_q: First of its query rows in the packed array.
        seq_q: Its query rows.
        first_k: First of its key columns in the packed array.
        seq_k: Its key columns.
        start: First row (or column) of the tile, counted from the start of the sequence.
    """

    sequence: Any
    first_q: Any
    seq_q: Any
    first_k: Any
    seq_k: Any
    start: Any


class Sequences:
    """Where each sequence begins and ends; equal to another one that says the same.

    Its arrays are its own, and cannot be written to: what is worked out of them is kept.

    Args:
        cu_seqlens_q: Sums of the lengths, (count + 1,): sequence i has the query rows from
            ``cu_seqlens_q[i]`` up to ``cu_seqlens_q[i + 1]``.
        cu_seqlens_k: Likewise of key columns.
        total_q: Query rows of all sequences together.
        total_k: Key columns.

    Raises:
        TypeError: If one of them is no vector of whole numbers.
        ValueError: If one does not begin with 0, decreases, or does not end with its total, or if the
            two have different lengths.
    """

    def __init__(self, cu_seqlens_q: Any, cu_seqlens_k: Any, total_q: int, total_k: int):
        self.cu_seqlens_q = _sums("cu_seqlens_q", cu_seqlens_q, total_q, "query rows")
        self.cu_seqlens_k = _sums("cu_seqlens_k", cu_seqlens_k, total_k, "key columns")
        counts = [len(sums) - 1 for sums in (self.cu_seqlens_q, self.cu_seqlens_k)]
        if counts[0] != counts[1]:
            raise ValueError(
                f"cu_seqlens_q and cu_seqlens_k describe the same sequences, got {counts[0]} and "
                f"{counts[1]} of them; give both the same length"
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
        """How many sequences there are."""
        return len(self.cu_seqlens_q) - 1

    @cached_property
    def lengths(self) -> tuple[Ints, Ints]:
        """Query rows and key columns of each sequence."""
        return np.diff(self.cu_seqlens_q), np.diff(self.cu_seqlens_k)

    def tiles(self, block: int, of_keys: bool = False) -> Ints:
        """Return the tiles of all sequences; none reaches over the end of one.

        Args:
            block: Rows (or columns) a tile.
            of_keys: Tiles of key columns, not of query rows.

        Returns:
            (tiles, 6): the columns are those of :class:`Tile`.
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
        return np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.int64)


def sequences_of(cu_seqlens_q: Any, cu_seqlens_k: Any, total_q: int, total_k: int) -> Sequences:
    """Return where sequences begin and end; sums that have been seen before are not checked again.

    They are compared number by number, so that an array may be written to between two calls.

    Args:
        cu_seqlens_q: See :class:`Sequences`.
        cu_seqlens_k: Likewise.
        total_q: Likewise.
        total_k: Likewise.

    Raises:
        TypeError: See :class:`Sequences`.
        ValueError: Likewise.
    """
    sums_q = as_host_array("cu_seqlens_q", cu_seqlens_q)
    sums_k = as_host_array("cu_seqlens_k", cu_seqlens_k)
    if any(sums.dtype.kind not in "iu" or sums.ndim != 1 for sums in (sums_q, sums_k)):
        return Sequences(sums_q, sums_k, total_q, total_k)  # says what is wrong
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
            f"{name} must be a vector of whole numbers, 0 and the sums of the lengths; got shape "
            f"{array.shape} of {array.dtype}; lengths of 2 and 3 are numpy.array([0, 2, 5])"
        )
    if array[0] != 0 or array[-1] != total or (np.diff(array.astype(np.int64)) < 0).any():
        raise ValueError(
            f"{name} must begin with 0, never decrease and end with the {total} {what}, got "
            f"{np.array2string(array, threshold=8)}; it holds the sums of the lengths"
        )
    own = array.astype(np.int64)
    own.flags.writeable = False
    return own
