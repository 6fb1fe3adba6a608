"""Cut a sequence into chunks, or into groups of its sorted positions, and put the results together."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div

from ...functions.indexing import Regroup, gathered, table_like
from ...tensor import Tensor


def swap(t: Tensor) -> Tensor:
    """Return a view with the last two dimensions exchanged."""
    return t.permute(*range(t.dims - 2), t.dims - 1, t.dims - 2)


def _table(like: Tensor, dim: int, places: Any) -> Tensor:
    """Return places that are equal for all other dimensions, as an index along one."""
    shape = [1] * like.dims
    shape[dim] = len(places)
    return table_like(like, places.reshape(shape))


def in_chunks(t: Tensor, chunk: int) -> Tensor:
    """Cut (…, seq, dim) into (…, chunks, chunk, dim); the last chunk is filled up with zeros."""
    *lead, seq, dim = t.shape
    chunks = ceil_div(seq, chunk)
    if chunks * chunk != seq:
        t = _resized(t, seq, chunks * chunk)
    return t.contiguous().view(*lead, chunks, chunk, dim)


def in_sequence(t: Tensor, seq: int) -> Tensor:
    """Join (…, chunks, chunk, dim) to (…, seq, dim); undo :func:`in_chunks`."""
    *lead, chunks, chunk, dim = t.shape
    t = t.contiguous().view(*lead, chunks * chunk, dim)
    return t if chunks * chunk == seq else _resized(t, chunks * chunk, seq)


def _resized(t: Tensor, old: int, new: int) -> Tensor:
    """Cut the last rows off, or append rows of zeros."""
    rows = t.dims - 2
    to, back = (
        _table(t, rows, np.where(np.arange(size) < other, np.arange(size), -1))
        for size, other in ((new, old), (old, new))
    )
    return Regroup.apply(t, rows, to, (back,))


class Groups(NamedTuple):
    """Groups of consecutive places of a sorted sequence.

    Attributes:
        places: (groups, width): the places of each group; behind its last one they repeat.
        shown: (groups, width): whether a place is one of the group.
        found: Arrays (seq,): where each place lies among the groups x width, as often as it does; -1 for no
            further time.
    """

    places: Any
    shown: Any
    found: tuple[Any, ...]


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
    where, slots = places[shown], np.flatnonzero(shown)
    # A slot's number among those of its place: the slots are in order.
    order = np.argsort(where, kind="stable")
    firsts = np.searchsorted(where[order], where[order])
    number = np.arange(len(order)) - firsts
    found = np.full((int(number.max()) + 1, seq), -1)
    found[number, where[order]] = slots[order]
    return Groups(np.minimum(places, stops[:, None] - 1), shown, tuple(found))


class Grouping(NamedTuple):
    """Groups of the positions of a sequence.

    Attributes:
        groups: Of its sorted places.
        order: (…, seq) int64: the positions in sorted order.
        positions: (…, groups x width) int64: the position in each slot; behind the last one of a group they
            repeat.
        uses: Each (…, seq) int64: the slots of each position; -1 for none.
    """

    groups: Groups
    order: Tensor
    positions: Tensor
    uses: tuple[Tensor, ...]


def grouping(order: Tensor, places: Tensor, groups: Groups) -> Grouping:
    """Return the positions in each group.

    Args:
        order: (…, seq) int64: the positions in sorted order.
        places: (…, seq): its inverse, the place of each position.
        groups: Of the places.
    """
    last = order.dims - 1

    def uses(found: Any) -> Tensor:
        table = _table(order, last, found)
        return gathered(order.f.id_map(table, order.empty(order.shape)), last, places)

    positions = gathered(order, last, _table(order, last, groups.places.reshape(-1)))
    return Grouping(groups, order, positions, tuple(map(uses, groups.found)))


def grouped(t: Tensor, own: Grouping) -> Tensor:
    """Return the rows of each group: (…, groups, width, dim) for (…, seq, dim).

    The gradient leaves the repeated rows out: they must be masked as keys, and not be read as queries.
    """
    *lead, _, dim = t.shape
    rows = Regroup.apply(t, t.dims - 2, _rows(own.positions), tuple(map(_rows, own.uses)))
    return rows.view(*lead, *own.groups.places.shape, dim)


def ungrouped_results(out: Tensor, lse: Tensor, own: Grouping) -> tuple[Tensor, Tensor]:
    """Return out (…, seq, dim) and lse (…, seq) at their positions, given those of attention in groups.

    Args:
        out: (…, groups, width, dim).
        lse: (…, groups, width).
        own: The groups, which do not overlap.
    """
    last, groups = own.order.dims - 1, own.groups
    filled = np.where(groups.shown, groups.places, -1).reshape(-1)
    # The position in each slot, and -1 behind the last one of a group.
    known = gathered(own.order, last, _table(own.order, last, filled), missing=-1)
    (uses,) = own.uses

    def ungrouped(t: Tensor) -> Tensor:
        *lead, count, width, dim = t.shape
        rows = t.contiguous().view(*lead, count * width, dim)
        return Regroup.apply(rows, rows.dims - 2, _rows(uses), (_rows(known),))

    lse = ungrouped(lse.contiguous().view(*lse.shape, 1))
    return ungrouped(out), lse.view(*lse.shape[:-1])


def _rows(index: Tensor) -> Tensor:
    """Return (…, count) as an index of whole rows."""
    return index.view(*index.shape, 1)
