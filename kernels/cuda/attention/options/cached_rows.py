"""Calls on a cache of keys and values: where the keys of each sequence are, and the elements of masks.

The query rows of a call are the last rows of its sequences.  Masks have these rows alone, and a boolean one
has the last columns alone, so both are counted from the ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.types import int32, int64, types
from kernels.scores.program import Place


class CachedRows(NamedTuple):
    """The location of the keys of a call on a key/value cache.

    Attributes:
        lengths: (batch,) int32, the keys of each sequence, but for those that the call has added.
        added: How many those are.
        table: (batch, pages) int32, the pages of each sequence; 0 where the cache has none.
        page: Keys of a page; 0 where the cache has none.
    """

    lengths: Any
    added: Any = 0
    table: Any = 0
    page: Any = 0


def cached_rows_type(is_paged: bool) -> Any:
    """Return numba's type of :class:`CachedRows`."""
    table = types.Array(int32, 2, "C") if is_paged else int64
    return types.NamedTuple([types.Array(int32, 1, "C"), int64, table, int64], CachedRows)


def make_cached_masks(mask_at: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return ``bias`` and ``in_mask`` of a ``ScoreTarget`` for calls on a cache.

    A place is a record with the fields of a ``TilePlace``; ``mask_at`` reads an element of the mask.
    """

    @device_function
    def element(place, col, extras):
        row = place.row - place.seq_q + extras.mask.shape[2]
        return mask_at(Place(place.b, place.h, place.batch, place.head, row, col), extras)

    @device_function
    def bias(place, extras):
        return element(place, place.col, extras)

    @device_function
    def in_mask(place, extras):
        col = place.col - place.seq_k + extras.mask.shape[3]
        return True if col < 0 else bool(element(place, col, extras))

    return {"bias": bias, "in_mask": in_mask}
