"""Scores and their gradients in the registers of a thread, between the products of flash2.

A thread owns the elements ty, ty + rows_of_threads, … along one side of a tile and tx, tx + lanes, … along
the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.options.score_functions import extras_type
from kernels.cuda.attention.options.tile_scores import (
    RowTerms,
    TileElement,
    edge_of,
    make_tile_scores,
    moved,
)
from kernels.cuda.attention.options.visits import TileLoop, make_tile_loop
from kernels.cuda.attention.register_tiles import (
    BackwardInputs,
    Variant,
    make_load_pair,
    make_multiply,
)
from kernels.cuda.attention.tile_bits import TileBits, make_tile_bits
from kernels.cuda.device.one_source import shift_of
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.runtime.kernel import Kernel, array_type, device_function, scalar_type
from kernels.runtime.types import float64, types, void


class RowValues(NamedTuple):
    """lse, the rounding error of lse, and D of all rows, each (batch, heads, seq_q)."""

    lse: Any
    lse_rest: Any
    delta: Any


def bits_of(variant: Variant, tiles: SharedTiles) -> TileBits:
    """Return the tile bits of a kernel, which lie behind its tiles."""
    dtype = variant.dtype
    return make_tile_bits(variant.features, variant.layout, dtype, dtype.itemsize * tiles.elements)


def kernel_of(
    variant: Variant, source: Callable[..., None], arrays: list[Any], tiles: SharedTiles
) -> Kernel:
    """Return a kernel whose arguments are ``arrays``, by their numba types, the scale and the extras."""
    layout, dtype = variant.layout, variant.dtype
    signature = void(*arrays, float64, extras_type(variant.features, dtype))
    shared_bytes = dtype.itemsize * tiles.elements + bits_of(variant, tiles).bytes
    return Kernel(source, signature, layout.threads, shared_bytes, layout.resident)


def array_types(dtype: np.dtype[Any], *dims: int) -> list[Any]:
    """Return numba's types of arrays."""
    return [array_type(dtype, one) for one in dims]


def backward_types(dtype: np.dtype[Any], results: int) -> list[Any]:
    """Return numba's types of the inputs, the row values and a number of results of a backward kernel."""
    four, three = array_type(dtype, 4), array_type(dtype, 3)
    inputs = types.NamedTuple([four] * len(BackwardInputs._fields), BackwardInputs)
    values = types.NamedTuple([three] * len(RowValues._fields), RowValues)
    return [inputs, values, *[four] * results]


def make_loop(variant: Variant, by_keys: bool = False) -> TileLoop:
    """Return the loop of a kernel over the tiles that a block visits."""
    layout = variant.layout
    return make_tile_loop(variant.features, layout.block_q, layout.block_k, by_keys)


def make_each(
    variant: Variant, tile_bits: TileBits, act: Callable[..., None], by_keys: bool = False
) -> Callable[..., None]:
    """Return ``each(lane, registers, tile, extras)``, which calls ``act`` for each element of a thread.

    ``act(own, at, registers, element, bits, extras)`` receives the indices of the element in the thread's
    registers and in the tile, and its ``TileElement``.  ``by_keys``, the registers are transposed.
    """
    layout, listed = variant.layout, tile_bits.listed
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    sides = (layout.block_k, layout.block_q) if by_keys else (layout.block_q, layout.block_k)
    own_rows, own_cols = sides[0] // rows_of_threads, sides[1] // lanes

    @device_function
    def each(lane, registers, tile, extras):
        place, whole, bits = tile
        row, col = (lane.tx, lane.ty) if by_keys else (lane.ty, lane.tx)
        first = moved(place, row, col)
        edge = edge_of(first, extras)
        for i in range(own_rows):
            for j in range(own_cols):
                along, across = i * rows_of_threads, j * lanes
                r, c = (across, along) if by_keys else (along, across)
                element = TileElement(r, c, whole, listed(bits, row + r, col + c), edge, first)
                act((i, j), (row + r, col + c), registers, element, bits, extras)

    return each


@cache
def make_scores(variant: Variant, tile_bits: TileBits) -> Callable[..., None]:
    """Return ``to_scores(lane, s, tile, extras)``: replaces products by scores."""
    score_of = make_tile_scores(variant.features, variant.dtype, order=0).score

    @device_function
    def to_score(own, at, s, element, bits, extras):
        s[own] = score_of(s[own], element, extras)

    return make_each(variant, tile_bits, to_score)


@cache
def make_terms(variant: Variant, tiles: SharedTiles | None) -> Callable[..., RowTerms]:
    """Return ``terms_of(values, own, at)``: the terms of the row of an element.

    ``values`` are what ``load_row_values`` fills, or the shared memory that ``share_row_values`` fills at
    the offsets in ``tiles``, those of a kernel by keys.
    """
    log2_e, one = variant.dtype.type(LOG2_E), variant.dtype.type(1)
    lse, rest, delta = (tiles[name] for name in ("lse", "rest", "delta")) if tiles else (0, 0, 0)

    @device_function
    def terms_in_registers(values, own, at):
        i, _ = own
        return RowTerms(log2_e, values.lse[i], values.lse_rest[i], values.delta[i], one)

    @device_function
    def terms_in_shared(shared, own, at):
        r, _ = at
        return RowTerms(log2_e, shared[lse + r], shared[rest + r], shared[delta + r], one)

    return terms_in_shared if tiles else terms_in_registers


@cache
def make_gradients(
    variant: Variant,
    tile_bits: TileBits,
    of_bias: bool = False,
    tiles: SharedTiles | None = None,
) -> Callable[..., None]:
    """Return ``to_gradients(lane, (s, dp, values), tile, extras)``, which replaces dP by dS.

    ``s`` and ``dp`` are the products, and ``values`` those of :func:`make_terms`.  With ``tiles``, the
    offsets of a kernel by keys, ``s`` and ``dp`` are transposed, and S becomes P ∘ Z, where Z is the
    dropout.  See ``make_tile_scores`` for ``of_bias``.
    """
    by_keys, kept = tiles is not None, tile_bits.kept
    gradient_of = make_tile_scores(variant.features, variant.dtype, of_bias, by_keys).gradient
    terms_of = make_terms(variant, tiles)

    @device_function
    def to_gradient(own, at, registers, element, bits, extras):
        s, dp, values = registers
        keep = kept(bits, at[0], at[1], extras)
        terms = terms_of(values, own, at)
        p, dp[own] = gradient_of(s[own], dp[own], terms, keep, element, extras)
        if by_keys:
            s[own] = p * keep

    return make_each(variant, tile_bits, to_gradient, by_keys)


def make_steps(
    variant: Variant, tiles: SharedTiles, by_keys: bool = False, of_bias: bool = False
) -> tuple[Callable[..., Any], ...]:
    """Return the functions of a backward kernel, which load Q and dO, K and V, and compute S, dP and dS.

    They are two of ``make_load_pair``, ``draw`` of ``tile_bits``, two products, which ``by_keys`` are
    transposed, and ``to_gradients``.
    """
    layout, tile_bits = variant.layout, bits_of(variant, tiles)
    load_queries = make_load_pair(variant, layout.block_q, tiles["q"], tiles["dout"])
    load_keys = make_load_pair(variant, layout.block_k, tiles["k"], tiles["v"])
    sides = (layout.block_k, layout.block_q) if by_keys else (layout.block_q, layout.block_k)
    products = [
        make_multiply(layout, *sides, width, variant.dtype)
        for width in (variant.head_width, variant.value_width)
    ]
    to_gradients = make_gradients(variant, tile_bits, of_bias, tiles if by_keys else None)
    return load_queries, load_keys, tile_bits.draw, *products, to_gradients


@cache
def make_row_values(variant: Variant) -> Callable[..., Any]:
    """Return ``values_of(values, rows, r)``: lse, its rest in base 2, and D of row ``r`` of a ``HeadRows``.

    Beyond the last row, the rest is infinite, so that probabilities are 0.
    """
    dtype = variant.dtype
    real, zero, inf = scalar_type(dtype), dtype.type(0), dtype.type(math.inf)
    log2_e = dtype.type(LOG2_E)

    @device_function
    def values_of(values, rows, r):
        b, h, row = rows.b, rows.h, rows.first + r
        if row >= rows.stop:
            return zero, inf, zero
        top, rest = real(shift_of(values.lse[b, h, row])), values.lse_rest[b, h, row] * log2_e
        return top, rest, values.delta[b, h, row]

    return values_of


@cache
def make_load_row_values(variant: Variant) -> Callable[..., None]:
    """Return ``load_row_values(ty, row_values, values, rows)``: fill arrays for a thread's rows."""
    rows_of_threads, values_of = variant.layout.rows_of_threads, make_row_values(variant)
    own_rows = variant.layout.block_q // rows_of_threads

    @device_function
    def load_row_values(ty, row_values, values, rows):
        for i in range(own_rows):
            of_row = values_of(values, rows, ty + i * rows_of_threads)
            row_values.lse[i], row_values.lse_rest[i], row_values.delta[i] = of_row

    return load_row_values


@cache
def make_share_row_values(variant: Variant, tiles: SharedTiles) -> Callable[..., None]:
    """Return ``share_row_values(thread, shared, values, rows)``: load those of a tile to shared memory."""
    values_of, layout = make_row_values(variant), variant.layout
    threads, block_q = layout.threads, layout.block_q
    lse, rest, delta = (tiles[name] for name in ("lse", "rest", "delta"))

    @device_function
    def share_row_values(thread, shared, values, rows):
        for r in range(thread, block_q, threads):
            of_row = values_of(values, rows, r)
            shared[lse + r], shared[rest + r], shared[delta + r] = of_row

    return share_row_values
