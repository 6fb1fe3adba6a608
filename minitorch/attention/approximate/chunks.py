"""Cut a sequence into chunks, or into groups of its sorted positions, and put the results together."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div

from ...functions.indexing import Gather, table_like
from ...tensor import Tensor
from .support import shared_constant


def swap(t: Tensor) -> Tensor:
    """Return a view with the last two dimensions exchanged."""
    return t.permute(*range(t.dims - 2), t.dims - 1, t.dims - 2)


def _placed(t: Tensor, dim: int, places: Any) -> Tensor:
    """Pick elements along a dimension at places that are equal for all others."""
    shape = [1] * t.dims
    shape[dim] = len(places)
    return Gather.apply(t, dim, table_like(t, places.reshape(shape)))


def in_chunks(t: Tensor, chunk: int) -> Tensor:
    """Cut (…, seq, dim) into (…, chunks, chunk, dim); the last chunk is filled up with zeros."""
    *lead, seq, dim = t.shape
    chunks = ceil_div(seq, chunk)
    if chunks * chunk != seq:
        slots = np.arange(chunks * chunk)
        filled = _placed(t, t.dims - 2, np.minimum(slots, seq - 1))
        t = filled * shared_constant(t, (slots < seq)[:, None])
    return t.contiguous().view(*lead, chunks, chunk, dim)


def in_sequence(t: Tensor, seq: int) -> Tensor:
    """Join (…, chunks, chunk, dim) to (…, seq, dim); undo :func:`in_chunks`."""
    *lead, chunks, chunk, dim = t.shape
    t = t.contiguous().view(*lead, chunks * chunk, dim)
    return t if chunks * chunk == seq else _placed(t, t.dims - 2, np.arange(seq))


class Groups(NamedTuple):
    """Groups of consecutive places of a sorted sequence.

    Attributes:
        places: (groups, width): the places of each group; behind its last one they repeat.
        shown: (groups, width): whether a place is one of the group.
        found: (seq,): where each place lies among the groups x width, if the groups do not overlap.
    """

    places: Any
    shown: Any
    found: Any


@lru_cache(maxsize=256)
def consecutive(seq: int, size: int, back: int = 0) -> Groups:
    """Return the groups of ``size`` places, each with the ``back`` places before it in front."""
    starts = np.arange(0, seq, size)
    return _groups(np.maximum(starts - back, 0), np.minimum(starts + size, seq), seq)


@lru_cache(maxsize=256)
def balanced(seq: int, count: int) -> Groups:
    """Return ``count`` groups whose sizes differ by 1 at most."""
    bounds = np.arange(count + 1) * seq // count
    return _groups(bounds[:-1], bounds[1:], seq)


def _groups(starts: Any, stops: Any, seq: int) -> Groups:
    width = int((stops - starts).max())
    places = starts[:, None] + np.arange(width)
    shown = places < stops[:, None]
    found = np.zeros(seq, np.int64)
    found[places[shown]] = np.flatnonzero(shown)
    return Groups(np.minimum(places, stops[:, None] - 1), shown, found)


def grouped_positions(order: Tensor, groups: Groups) -> Tensor:
    """Return the positions in each group.

    Args:
        order: (…, seq) int64: the positions in sorted order.
        groups: Of its places.

    Returns:
        (…, groups x width), int64.
    """
    return _placed(order, order.dims - 1, groups.places.reshape(-1))


def grouped(t: Tensor, positions: Tensor, groups: Groups) -> Tensor:
    """Return the rows of each group: (…, groups, width, dim) for (…, seq, dim)."""
    *lead, _, dim = t.shape
    rows = Gather.apply(t, t.dims - 2, positions.view(*positions.shape, 1))
    return rows.view(*lead, *groups.places.shape, dim)


def places_in_groups(order: Tensor, groups: Groups) -> Tensor:
    """Return where each position lies among groups x width that do not overlap: (…, seq) int64."""
    places = order.argsort()  # the place of each position, (…, seq)
    # A table of where each place lies: one row, repeated for every head.
    table = table_like(order, groups.found.reshape(*[1] * (order.dims - 1), -1))
    return Gather.apply(order.f.id_map(table, order.empty(order.shape)), order.dims - 1, places)


def ungrouped_results(
    out: Tensor, lse: Tensor, order: Tensor, groups: Groups
) -> tuple[Tensor, Tensor]:
    """Return out (…, seq, dim) and lse (…, seq) at their positions, given those of attention in groups."""
    places = places_in_groups(order, groups)
    lse = ungrouped(lse.contiguous().view(*lse.shape, 1), places)
    return ungrouped(out, places), lse.view(*lse.shape[:-1])


def ungrouped(t: Tensor, places: Tensor) -> Tensor:
    """Return the rows of groups at their positions: (…, seq, dim) for (…, groups, width, dim)."""
    *lead, count, width, dim = t.shape
    rows = t.contiguous().view(*lead, count * width, dim)
    return Gather.apply(rows, rows.dims - 2, places.view(*places.shape, 1))
