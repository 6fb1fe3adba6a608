"""Scores and their gradients in the registers of a thread, between the products of flash2.

A thread owns the elements ty, ty + rows_of_threads, … along one side of a tile and tx, tx + lanes, … along
the other.  ``tile`` is the ``TilePlace`` of the tile's first element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.common.online_softmax import LOG2_E
from kernels.cuda.attention.options.tile_scores import (
    RowTerms,
    TileElement,
    edge_of,
    make_tile_scores,
    moved,
)
from kernels.cuda.attention.register_tiles import RegisterLayout
from kernels.cuda.attention.tile_bits import TileBits
from kernels.cuda.device.one_source import shift_of
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.runtime.kernel import device_function, scalar_type
from kernels.scores.program import Features


@cache
def make_scores(
    layout: RegisterLayout, features: Features, dtype: np.dtype[Any], tile_bits: TileBits
) -> Callable[..., None]:
    """Return ``to_scores(tx, ty, s, whole, bits, tile, extras)``: replaces products by scores."""
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    own_rows, own_cols = layout.block_q // rows_of_threads, layout.block_k // lanes
    score_of, listed = make_tile_scores(features, dtype).score, tile_bits.listed

    @device_function
    def to_scores(tx, ty, s, whole, bits, tile, extras):
        own = moved(tile, ty, tx)
        edge = edge_of(own, extras)
        for i in range(own_rows):
            for j in range(own_cols):
                r, c = i * rows_of_threads, j * lanes
                is_listed = listed(bits, ty + r, tx + c)
                element = TileElement(r, c, whole, is_listed, edge, own)
                s[i, j] = score_of(s[i, j], element, extras)

    return to_scores


@cache
def make_gradients_by_rows(
    layout: RegisterLayout,
    features: Features,
    dtype: np.dtype[Any],
    tile_bits: TileBits,
    of_bias: bool = False,
) -> Callable[..., None]:
    """Return the function that replaces dP by dS, given the products in ``s`` and ``dp``.

    In ``to_gradients(tx, ty, s, dp, top, shift, delta, whole, bits, tile, extras)``, ``top``, ``shift`` and
    ``delta`` are lse, its rest in base 2, and D of the thread's rows.

    Args:
        layout: Layout of the block.
        features: Options of the kernel.
        dtype: Dtype of its operands.
        tile_bits: The tile bits of the kernel.
        of_bias: See ``make_tile_scores``.
    """
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    own_rows, own_cols = layout.block_q // rows_of_threads, layout.block_k // lanes
    scores = make_tile_scores(features, dtype, of_bias=of_bias)
    gradient_of, kept, listed = scores.gradient, tile_bits.kept, tile_bits.listed
    log2_e = dtype.type(LOG2_E)

    @device_function
    def to_gradients(tx, ty, s, dp, top, shift, delta, whole, bits, tile, extras):
        own = moved(tile, ty, tx)
        edge = edge_of(own, extras)
        for i in range(own_rows):
            for j in range(own_cols):
                r, c = i * rows_of_threads, j * lanes
                keep, is_listed = kept(bits, ty + r, tx + c, extras), listed(bits, ty + r, tx + c)
                element = TileElement(r, c, whole, is_listed, edge, own)
                _, dp[i, j] = gradient_of(
                    s[i, j], dp[i, j], RowTerms(log2_e, top[i], shift[i], delta[i]), keep, element, extras
                )  # fmt: skip

    return to_gradients


@cache
def make_gradients_by_keys(
    layout: RegisterLayout,
    features: Features,
    dtype: np.dtype[Any],
    tile_bits: TileBits,
    tiles: SharedTiles,
) -> Callable[..., None]:
    """Return the function that replaces the products in ``s`` by (P ∘ Z)ᵀ, and those in ``dp`` by dSᵀ.

    The function is ``to_gradients(tx, ty, s, dp, shared, whole, bits, tile, extras)``; Z is the dropout.

    Args:
        layout: Layout of the block.
        features: Options of the kernel.
        dtype: Dtype of its operands.
        tile_bits: The tile bits of the kernel.
        tiles: Offsets in shared memory; "lse", "rest", in base 2, and "delta" are those of the tile's rows.
    """
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    own_keys, own_rows = layout.block_k // rows_of_threads, layout.block_q // lanes
    scores = make_tile_scores(features, dtype, by_keys=True)
    gradient_of, kept, listed = scores.gradient, tile_bits.kept, tile_bits.listed
    log2_e = dtype.type(LOG2_E)
    lse_tile, rest_tile, delta_tile = tiles["lse"], tiles["rest"], tiles["delta"]

    @device_function
    def to_gradients(tx, ty, s, dp, shared, whole, bits, tile, extras):
        own = moved(tile, tx, ty)
        edge = edge_of(own, extras)
        for i in range(own_keys):
            for j in range(own_rows):
                r, c = j * lanes, i * rows_of_threads
                keep, is_listed = kept(bits, tx + r, ty + c, extras), listed(bits, tx + r, ty + c)
                top, shift = shared[lse_tile + tx + r], shared[rest_tile + tx + r]
                row = RowTerms(log2_e, top, shift, shared[delta_tile + tx + r])
                element = TileElement(r, c, whole, is_listed, edge, own)
                p, dp[i, j] = gradient_of(s[i, j], dp[i, j], row, keep, element, extras)
                s[i, j] = p * keep

    return to_gradients


@cache
def _make_row_values_of(dtype: np.dtype[Any]) -> Callable[..., Any]:
    """Return ``row_values_of(lse, lse_rest, delta, b, h, row, stop)``.

    The values are lse, its rest in base 2, and D of a row.  For rows from ``stop`` on, the rest is
    infinite, so that their probabilities are 0.
    """
    real, zero, inf = scalar_type(dtype), dtype.type(0), dtype.type(math.inf)
    log2_e = dtype.type(LOG2_E)

    @device_function
    def row_values_of(lse, lse_rest, delta, b, h, row, stop):
        if row >= stop:
            return zero, inf, zero
        top, rest = real(shift_of(lse[b, h, row])), lse_rest[b, h, row] * log2_e
        return top, rest, delta[b, h, row]

    return row_values_of


@cache
def make_load_row_values(layout: RegisterLayout, dtype: np.dtype[Any]) -> Callable[..., None]:
    """Return ``load_row_values(ty, top, shift, own_delta, lse, lse_rest, delta, b, h, first, stop)``.

    It loads lse, its rest in base 2, and D of the thread's rows.
    """
    rows_of_threads, own_rows = layout.rows_of_threads, layout.block_q // layout.rows_of_threads
    row_values_of = _make_row_values_of(dtype)

    @device_function
    def load_row_values(ty, top, shift, own_delta, lse, lse_rest, delta, b, h, first, stop):
        for i in range(own_rows):
            row = first + ty + i * rows_of_threads
            values = row_values_of(lse, lse_rest, delta, b, h, row, stop)
            top[i], shift[i], own_delta[i] = values

    return load_row_values


@cache
def make_put_row_values(
    layout: RegisterLayout, dtype: np.dtype[Any], tiles: SharedTiles
) -> Callable[..., None]:
    """Return ``put_row_values(thread, shared, lse, lse_rest, delta, b, h, first, stop)``.

    It stores the values of a whole query tile in shared memory; ``tiles`` as for the gradients by keys.
    """
    block_q, threads, row_values_of = layout.block_q, layout.threads, _make_row_values_of(dtype)
    lse_tile, rest_tile, delta_tile = tiles["lse"], tiles["rest"], tiles["delta"]

    @device_function
    def put_row_values(thread, shared, lse, lse_rest, delta, b, h, first, stop):
        for r in range(thread, block_q, threads):
            top, rest, own_delta = row_values_of(lse, lse_rest, delta, b, h, first + r, stop)
            shared[lse_tile + r], shared[rest_tile + r] = top, rest
            shared[delta_tile + r] = own_delta

    return put_row_values
