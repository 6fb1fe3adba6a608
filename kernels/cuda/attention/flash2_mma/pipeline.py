"""What a tensor-core kernel is compiled for, and the copies of the tiles that its blocks visit.

Shared memory has two stages of the visited tiles: while one is multiplied, the next is copied to the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.attention.flash2_mma.arithmetic import Arithmetic
from kernels.cuda.attention.flash2_mma.large_rows import lse_and_shift
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.attention.options.visits import (
    TileLoop,
    make_load_units,
    make_tile_loop,
    rows_from,
)
from kernels.cuda.attention.tile_bits import TileBits, make_tile_bits
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.ptx.copies import cp_async_commit_group
from kernels.cuda.runtime.kernel import WORD, array_type, device_function
from kernels.runtime.dtypes import BITS, FLOAT32
from kernels.runtime.types import types, void
from kernels.scores.program import PLAIN, Features


class MmaVariant(NamedTuple):
    """The compile-time parameters of a flash2_mma kernel.

    Attributes:
        layout: Tiles and warps, an ``MmaLayout`` or an ``MmaKeyLayout``.
        head_width: head_dim rounded up to a multiple of 16 · parts, or more.
        value_width: value_dim, rounded up in the same way.
        numbers: The representation of operands.
        vectors: Whether rows of all tensors are aligned for pieces of 16 bytes and are whole pieces.
        features: Options of the call.
    """

    layout: Any
    head_width: int
    value_width: int
    numbers: Arithmetic
    vectors: bool
    features: Features = PLAIN

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of keys and values."""
        return self.head_width, self.value_width

    @property
    def result_type(self) -> Any:
        """Numba's type of a result."""
        return array_type(FLOAT32 if self.numbers.is_wide else BITS, 4)

    def loop(self, by_keys: bool = False) -> TileLoop:
        """Return the loop over the tiles that a block visits."""
        return make_tile_loop(self.features, self.layout.block_q, self.layout.block_k, by_keys)

    def bits(self, tiles: SharedTiles) -> TileBits:
        """Return the tile bits, which lie behind the tiles."""
        return make_tile_bits(self.features, self.layout, FLOAT32, tiles.elements)

    def copies(self, rows: int) -> tuple[Callable[..., None], ...]:
        """Return the functions that copy tiles of ``rows`` rows, as wide as keys and as wide as values."""
        copy, threads = self.numbers.copy, self.layout.threads
        return tuple(copy(threads, rows, width, self.vectors) for width in self.widths)

    def signature(self, *arrays: Any, is_backward: bool = True) -> Any:
        """Return the types of a kernel whose last arguments are the scale and the extras."""
        rest = self.numbers.scale_type(is_backward), extras_type(self.features, FLOAT32)
        return void(*arrays, *rest)


def make_load_keys(variant: MmaVariant, tiles: SharedTiles, of: str = "") -> Callable[..., None]:
    """Return ``load_keys(thread, k, v, item, visit, memory, stage, extras)``.

    It starts the copies of K and V of a ``Visit`` to a stage of their tiles, if it is no visit too many.
    ``of`` ends the names of these tiles.
    """
    block_k, loop = variant.layout.block_k, variant.loop()
    copy_k, copy_v = variant.copies(loop.unit)
    k_line, v_line = (variant.numbers.size * width for width in variant.widths)
    tile_of, k_bytes, v_bytes = loop.tile_of, block_k * k_line, block_k * v_line

    def make_load(n: int) -> Callable[..., None]:
        k_offset, v_offset = tiles[f"k{of}"] + n * k_line, tiles[f"v{of}"] + n * v_line

        @device_function
        def load(thread, k, v, rows, memory, stage):
            copy_k(thread, k, rows, memory + k_offset + stage * k_bytes)
            copy_v(thread, v, rows, memory + v_offset + stage * v_bytes)

        return load

    load_tile = make_load_units(loop, make_load, 0, block_k)

    @device_function
    def load_keys(thread, k, v, item, visit, memory, stage, extras):
        if visit.entry < visit.stop:
            col = tile_of(visit.entry, extras) * block_k
            load_tile(thread, k, v, item, col, memory, stage, extras)
        cp_async_commit_group()

    return load_keys


class GradientInputs(NamedTuple):
    """The arrays that a backward kernel reads: 16-bit operands, and float32 numbers of each row."""

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
    """L and D of one row, in the form in which a backward kernel uses them.

    For L, see ``large_rows.lse_and_shift``; D is in the unit of dS.  The shift is infinite for a row beyond
    the sequence, so that its probabilities are 0.
    """

    large: Any
    shift: Any
    delta: Any


_ZERO, _INF = np.float32(0), np.float32(math.inf)


@device_function
def values_of_row(read, rows, number, units):
    """Return the ``LseAndDelta`` of a row of ``HeadRows``, for the ``backward_units`` of the head."""
    (b, h, first, stop), (_, top, _, delta_unit) = rows, units
    row = first + number
    if row >= stop:
        return LseAndDelta(_ZERO, _INF, _ZERO)
    large_lse, shift = lse_and_shift(read.lse[b, h, row], read.lse_rest[b, h, row], top)
    return LseAndDelta(large_lse, shift, read.delta[b, h, row] * delta_unit)


def make_load_queries(
    variant: MmaVariant, tiles: SharedTiles
) -> tuple[Callable[..., LseAndDelta], Callable[..., None]]:
    """Return the functions that load the query rows of a visit, and keep their values.

    ``load_queries(thread, read, item, visit, memory, stage, units, extras)`` starts the copies of Q and dO
    of a ``Visit`` to a stage of their tiles, if it is no visit too many, and returns the ``LseAndDelta`` of
    the row ``thread``.  ``keep_values(thread, floats, stage, values)`` writes it to shared memory.
    """
    threads, block_q, size = variant.layout.threads, variant.layout.block_q, variant.numbers.size
    large, shift, delta = (tiles[name] // WORD for name in LseAndDelta._fields)
    (copy_q, copy_dout), q_offset, dout_offset = variant.copies(block_q), tiles["q"], tiles["dout"]
    q_bytes, dout_bytes = (size * block_q * width for width in variant.widths)
    tile_of = variant.loop(by_keys=True).tile_of
    if threads < block_q:
        raise ValueError(f"{threads} threads cannot load L and D of {block_q} rows; use more warps")

    @device_function
    def load_queries(thread, read, item, visit, memory, stage, units, extras):
        values = LseAndDelta(_ZERO, _ZERO, _ZERO)
        if visit.entry < visit.stop:
            rows = rows_from(item.q, tile_of(visit.entry, extras) * block_q)
            copy_q(thread, read.q, rows, memory + q_offset + stage * q_bytes)
            copy_dout(thread, read.dout, rows, memory + dout_offset + stage * dout_bytes)
            if threads == block_q or thread < block_q:
                values = values_of_row(read, rows, thread, units)
        cp_async_commit_group()
        return values

    @device_function
    def keep_values(thread, floats, stage, values):
        if thread < block_q:
            at = stage * block_q + thread
            floats[large + at], floats[shift + at] = values.large, values.shift
            floats[delta + at] = values.delta

    return load_queries, keep_values
