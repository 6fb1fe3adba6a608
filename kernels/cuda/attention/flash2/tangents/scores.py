"""Scores, probabilities and gradients with their tangents, in the registers of a thread.

A dot above a letter is the derivative along the tangents of q, k and v, which are Q̇, K̇ and V̇.
``docs/guides/attention-derivatives.md`` derives the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.attention.flash2.register_scores import backward_types, make_each, make_terms
from kernels.cuda.attention.options.tile_scores import make_tile_scores
from kernels.cuda.attention.register_tiles import Variant
from kernels.cuda.attention.tile_bits import TileBits
from kernels.cuda.device.shared_tiles import SharedTiles
from kernels.cuda.device.vector import EXP2, MINUS
from kernels.cuda.runtime.kernel import array_type, device_function
from kernels.runtime.types import types
from kernels.scores.program import Features


class Inputs(NamedTuple):
    """The arrays q, k and v, or their tangents, each (batch, heads, seq, dim)."""

    q: Any
    k: Any
    v: Any


class RowTangents(NamedTuple):
    """The tangents of L and of D of all rows, (batch, heads, seq_q)."""

    lse: Any
    delta: Any


def inputs_type(variant: Variant) -> Any:
    """Return numba's type of :class:`Inputs`."""
    return types.NamedTuple([array_type(variant.dtype, 4)] * len(Inputs._fields), Inputs)


def gradient_types(variant: Variant, results: int) -> list[Any]:
    """Return numba's types of the arrays of a backward kernel with tangents."""
    inputs, values, *written = backward_types(variant.dtype, results)
    rows = [array_type(variant.dtype, 3)] * len(RowTangents._fields)
    return [inputs, inputs_type(variant), values, types.NamedTuple(rows, RowTangents), *written]


@cache
def make_score_tangents(variant: Variant, tile_bits: TileBits) -> Callable[..., None]:
    """Return ``to_tangents(lane, (x, x_tangent), tile, extras)``: replaces X by S, and Ẋ by Ṡ."""
    dtype = variant.dtype
    derived = make_tile_scores(variant.features, dtype).derived

    @device_function
    def to_tangent(own, at, registers, element, bits, extras):
        x, x_tangent = registers
        # S = f(X)     Ṡ = f'(X) ∘ Ẋ
        x[own], slope, _ = derived(x[own], element, extras)
        x_tangent[own] *= slope

    return make_each(variant, tile_bits, to_tangent)


@cache
def make_tangents_of(
    features: Features, dtype: np.dtype[Any], by_keys: bool = False, exp2: Any = None
) -> Callable[..., Any]:
    """Return ``tangents_of(products, row, (lse_tangent, delta_tangent), keep, element, extras)``.

    It returns Ṗ ∘ Z, dX and ḋX of an element, from X = τ q·k, Ẋ, dO·v and dO·v̇, the ``RowTerms`` of its row
    and their tangents, and the factor of dropout.  See ``make_tile_scores`` for ``exp2``.
    """
    derived = make_tile_scores(features, dtype, by_keys=by_keys, order=2).derived
    exp2, minus = exp2 or EXP2[dtype], MINUS[dtype]
    zero, minus_inf = dtype.type(0), dtype.type(-math.inf)

    @device_function
    def tangents_of(products, row, row_tangents, keep, element, extras):
        (x, x_tangent, dp, dp_tangent), (lse_tangent, delta_tangent) = products, row_tangents
        score, slope, bend = derived(x, element, extras)
        p = exp2(minus(score, row.top) * row.unit - row.shift)
        # P = exp(S - L)     Ṗ = P ∘ (Ṡ - L̇)
        p_tangent = p * (slope * x_tangent - lse_tangent)
        # dS = P ∘ (dP ∘ Z - D)     ḋS = Ṗ ∘ (dP ∘ Z - D) + P ∘ (ḋP ∘ Z - Ḋ)
        apart = dp * keep - row.delta
        ds, ds_tangent = p * apart, p_tangent * apart + p * (dp_tangent * keep - delta_tangent)
        # dX = f'(X) ∘ dS     ḋX = f'(X) ∘ ḋS + f''(X) ∘ Ẋ ∘ dS
        dx, dx_tangent = slope * ds, slope * ds_tangent + bend * x_tangent * ds
        # Masked elements are 0 whatever the numbers of a row and the derivatives of a score are.
        is_seen = score != minus_inf
        seen = p_tangent * keep if is_seen else zero
        return seen, (dx if is_seen else zero), (dx_tangent if is_seen else zero)

    return tangents_of


@cache
def make_gradient_tangents(
    variant: Variant, tile_bits: TileBits, tiles: SharedTiles | None = None
) -> Callable[..., None]:
    """Return ``to_tangents(lane, ((x, x_tangent, dp, dp_tangent), values, rows), tile, extras)``.

    It replaces X by Ṗ ∘ Z, dP by dX, and ḋP by ḋX; the products are X = τ Q Kᵀ, Ẋ, dO Vᵀ and dO V̇ᵀ.
    ``values`` are those of ``make_terms``, and ``rows`` the :class:`RowTangents` of the thread's rows.
    With ``tiles``, the offsets of a kernel by keys, registers are transposed, and both are shared memory.
    """
    by_keys, kept = tiles is not None, tile_bits.kept
    tangents_of = make_tangents_of(variant.features, variant.dtype, by_keys)
    terms_of = make_terms(variant, tiles)
    lse, delta = (tiles[f"{x}_tangent"] for x in ("lse", "delta")) if tiles else (0, 0)

    @device_function
    def to_tangent(own, at, registers, element, bits, extras):
        (x, x_tangent, dp, dp_tangent), values, rows = registers
        row, keep = terms_of(values, own, at), kept(bits, at[0], at[1], extras)
        if by_keys:
            row_tangents = rows[lse + at[0]], rows[delta + at[0]]
        else:
            row_tangents = rows.lse[own[0]], rows.delta[own[0]]
        products = x[own], x_tangent[own], dp[own], dp_tangent[own]
        found = tangents_of(products, row, row_tangents, keep, element, extras)
        x[own], dp[own], dp_tangent[own] = found

    return make_each(variant, tile_bits, to_tangent, by_keys)


@cache
def make_row_tangents(dtype: np.dtype[Any]) -> Callable[..., Any]:
    """Return ``tangents_at(tangents, rows, r)``: of row ``r`` of a ``HeadRows``, 0 beyond the last."""
    zero = dtype.type(0)

    @device_function
    def tangents_at(tangents, rows, r):
        b, h, row = rows.b, rows.h, rows.first + r
        if row >= rows.stop:
            return zero, zero
        return tangents.lse[b, h, row], tangents.delta[b, h, row]

    return tangents_at
