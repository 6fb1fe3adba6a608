"""The work item of a block, and what the backward kernels read of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types

from kernels.cuda.attention.flash2_mma.large_rows import lse_and_shift
from kernels.cuda.attention.flash2_mma.tiles import MmaKeyLayout
from kernels.cuda.attention.options.mods import numbers_of_mods
from kernels.cuda.attention.options.tile_scores import TilePlace
from kernels.cuda.attention.options.visits import Visits
from kernels.cuda.attention.register_tiles import HeadRows
from kernels.cuda.device.one_source import batch_and_head
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.runtime.kernel import WORD, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32


class BlockItem(NamedTuple):
    """The tile of a block: the flat index of (batch, head), and where tile and sequences begin.

    ``start`` is a :class:`TilePlace`, with 0 on the other side; ``q`` and ``k`` are :class:`HeadRows`.
    """

    flat: Any
    start: Any
    q: Any
    k: Any


@cache
def make_item(visits: Visits, by_keys: bool = False) -> Callable[..., BlockItem]:
    """Return ``item_of(x, y, q, k, extras)``: the :class:`BlockItem` of block (x, y) of the grid."""
    place = visits.place

    @device_function
    def item_of(x, y, q, k, extras):
        b, h = batch_and_head(y, q.shape[1])
        flat, first, first_q, seq_q, first_k, seq_k = place(x, y, q.shape[2], k.shape[2], extras)
        batch, head = numbers_of_mods(flat, extras)
        row, col = 0 if by_keys else first, first if by_keys else 0
        start = TilePlace(b, h, batch, head, row, col, seq_q, seq_k)
        q_rows = HeadRows(b, h, first_q, first_q + seq_q)
        return BlockItem(flat, start, q_rows, HeadRows(b, h, first_k, first_k + seq_k))

    return item_of


class GradientInputs(NamedTuple):
    """The arrays that a backward kernel reads: operands as 16-bit numbers, and float32 for each row."""

    dout: Any
    q: Any
    k: Any
    v: Any
    lse: Any
    lse_rest: Any
    delta: Any


#: Numba's type of :class:`GradientInputs`.
INPUTS_TYPE = types.NamedTuple(
    [array_type(BITS, 4)] * 4 + [array_type(FLOAT32, 3)] * 3, GradientInputs
)


class LseAndDelta(NamedTuple):
    """L of a row, see ``large_rows.lse_and_shift``, and D in the unit of dS.

    The shift is infinite for a row beyond the sequence, so that its probabilities are 0.
    """

    large: Any
    shift: Any
    delta: Any


def make_row_values(
    layout: MmaKeyLayout, tiles: SharedTiles
) -> tuple[Callable[..., LseAndDelta], Callable[..., None]]:
    """Return the functions that load the values of the query row of a thread, and keep them.

    ``load_values(thread, read, span, top, delta_unit)`` returns those of the row ``thread`` of ``span``, a
    ``HeadRows``.  ``keep_values(thread, floats, stage, values)`` writes them to shared memory.
    """
    threads, block_q = layout.threads, layout.block_q
    large, shift, delta = (tiles[name] // WORD for name in LseAndDelta._fields)
    zero, inf = np.float32(0), np.float32(math.inf)
    if threads < block_q:
        raise ValueError(f"{threads} threads cannot load L and D of {block_q} rows; use more warps")

    @device_function
    def load_values(thread, read, span, top, delta_unit):
        b, h, first, stop = span
        row = first + thread
        inside = row < stop
        if threads > block_q:
            inside = inside and thread < block_q
        if not inside:
            return LseAndDelta(zero, inf, zero)
        large_lse, own_shift = lse_and_shift(read.lse[b, h, row], read.lse_rest[b, h, row], top)
        return LseAndDelta(large_lse, own_shift, read.delta[b, h, row] * delta_unit)

    @device_function
    def keep_values(thread, floats, stage, values):
        if thread < block_q:
            at = stage * block_q + thread
            floats[large + at], floats[shift + at] = values.large, values.shift
            floats[delta + at] = values.delta

    return load_values, keep_values
