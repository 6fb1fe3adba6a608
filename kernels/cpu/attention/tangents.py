"""The steps of the JVP and of the double backward on a tile, for the loops of the two passes.

A dot is the derivative along the tangents of q, k and v: Q̇, K̇ and V̇.  X = τ Q Kᵀ is what options modify to
scores, S = f(X).  ``docs/guides/attention-derivatives.md`` derives the formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from kernels.common.online_softmax import LOG2_E
from kernels.cpu.attention.gradient_tiles import (
    add_dq,
    add_row_products,
    exponent_of,
    multiply_by_slope,
)
from kernels.cpu.attention.tile_scores import rows_of
from kernels.cpu.attention.tiles import (
    as_tile,
    empty_tile,
    lanes_for,
    multiply,
    pack_rows,
    pack_transposed,
    rescale_rows,
    transpose,
    zero_tile,
)
from kernels.cpu.matmul.tile_product import add_product, exp2, set_product
from kernels.cpu.runtime.function_pointers import call
from kernels.cpu.runtime.vector_math import multiply_add
from kernels.runtime.jit import FASTMATH


class LineTangents(NamedTuple):
    """The tangents of a query tile, of its keys and of its sums; a lane is a query row."""

    k: Any  #: K̇, (seq_k, head_dim).
    v: Any  #: V̇, (seq_k, value_dim).
    out: Any  #: Ȯ, (rows, value_dim).
    lse: Any  #: L̇, (rows, 1).
    q_t: Any  #: τ Qᵀ, (head_dim, lanes).
    q_tangent_t: Any  #: τ Q̇ᵀ, (head_dim, lanes).
    s: Any  #: Ẋ, then Ṡ, then P ∘ Z ∘ Ṡ, (block_k, lanes).
    row_sum: Any  #: rowsum(P ∘ Ṡ), (lanes,).
    acc: Any  #: (P ∘ Z ∘ Ṡ) V + (P ∘ Z) V̇, transposed, (value_dim, lanes).


@njit
def row_tangents(o, b, h, first_row, rows, first_k, seq_k, q_t):
    """Return the ``LineTangents`` of a query tile before its first key tile."""
    (dim, lanes), dtype = q_t.shape, q_t.dtype.type
    k = rows_of(o.k_tangent, b, h, first_k, seq_k, dtype)
    v = rows_of(o.v_tangent, b, h, first_k, seq_k, dtype)
    q_tangent_t = empty_tile(dim, lanes, dtype)
    pack_transposed(rows_of(o.q_tangent, b, h, first_row, rows, dtype), dtype(o.scale), q_tangent_t)
    return LineTangents(
        k, v,
        rows_of(o.out_tangent, b, h, first_row, rows, dtype),
        rows_of(o.lse_tangent, b, h, first_row, rows, dtype),
        q_t, q_tangent_t, empty_tile(o.block_k, lanes, dtype), np.zeros(lanes, dtype),
        zero_tile(v.shape[1], lanes, dtype),
    )  # fmt: skip


@njit(fastmath=FASTMATH)
def add_score_tangents(product, moved, k_tile, col, p, slope, running, grows):
    """Fill Ṡ = f'(X) ∘ Ẋ of a tile whose keys begin at ``col``, and add rowsum(P ∘ Ṡ) to the sums.

    P is that of ``softmax_step``; if ``grows``, sums are rescaled first, as O is.
    """
    # Ẋ = τ (Q̇ Kᵀ + Q K̇ᵀ)
    x = moved.s[: len(p)]  # (cols, lanes)
    set_product(product, x, k_tile, moved.q_tangent_t)
    add_product(product, x, moved.k[col : col + len(p)], moved.q_t)
    if grows:
        rescale_rows(moved.acc, running.rescale)
        for lane in range(len(moved.row_sum)):
            moved.row_sum[lane] *= running.rescale[lane]
    zero = p.dtype.type(0)
    for c in range(p.shape[0]):
        s, p_row, total = moved.s[c], p[c], moved.row_sum  # (lanes,)
        if slope.shape[0] > 0:
            factor = slope[c]  # (lanes,)
            for lane in range(p.shape[1]):
                # The slope of a masked score may be infinite.
                s[lane] = zero if p_row[lane] == zero else s[lane] * factor[lane]
        for lane in range(p.shape[1]):
            total[lane] += p_row[lane] * s[lane]


@njit(fastmath=FASTMATH)
def add_value_tangents(product, moved, p, v_tile, col):
    """Add (P ∘ Ṡ) V + P V̇ of a tile to the sums, P after dropout."""
    cols = len(v_tile)
    weights = moved.s[:cols]  # (cols, lanes)
    multiply(weights, p)
    add_product(product, moved.acc, v_tile.T, weights)
    add_product(product, moved.acc, moved.v[col : col + cols].T, p)


@njit(fastmath=FASTMATH)
def write_row_tangents(moved, out, inverses):
    """Write L̇ = rowsum(P ∘ Ṡ) / l and Ȯ = (P ∘ Z ∘ Ṡ) V / l + (P ∘ Z) V̇ / l - L̇ O, given 1 / l."""
    acc_t = empty_tile(moved.acc.shape[1], moved.acc.shape[0], out.dtype)  # (lanes, value_dim)
    transpose(moved.acc, acc_t)
    for r in range(len(out)):
        own, inverse = acc_t[r], inverses[r]  # (value_dim,)
        moved.lse[r, 0] = lse = moved.row_sum[r] * inverse
        for i in range(len(own)):
            moved.out[r, i] = own[i] * inverse - lse * out[r, i]


class KeyTangents(NamedTuple):
    """The tangents of a key tile, and the buffers for pieces of the tile; a lane is a key."""

    k_t: Any  #: τ K̇ᵀ, (head_dim, lanes).
    v_t: Any  #: V̇ᵀ, (value_dim, lanes).
    k_rows: Any  #: τ K̇, (cols, columns); rows are contiguous.
    x: Any  #: Ẋ, then Ṡ, then dX, (block_q, lanes).
    dp: Any  #: ḋP, (block_q, lanes).


@njit
def key_tangents(o, b, h, first, cols, dtype):
    """Return the ``KeyTangents`` of a tile of keys of one head."""
    k = rows_of(o.k_tangent, b, h, first, cols, dtype)
    v = rows_of(o.v_tangent, b, h, first, cols, dtype)
    lanes, (head_dim, value_dim) = lanes_for(cols), (k.shape[1], v.shape[1])
    tile = KeyTangents(
        empty_tile(head_dim, lanes, dtype), empty_tile(value_dim, lanes, dtype),
        empty_tile(cols, lanes_for(head_dim), dtype),
        empty_tile(o.block_q, lanes, dtype), empty_tile(o.block_q, lanes, dtype),
    )  # fmt: skip
    pack_transposed(k, dtype(o.scale), tile.k_t)
    pack_transposed(v, dtype(1), tile.v_t)
    pack_rows(k, dtype(o.scale), tile.k_rows)
    return tile


class PieceOfKeys(NamedTuple):
    """The lanes of a ``KeyTile`` and of its ``KeyTangents`` that belong to one piece of the tile."""

    k_t: Any  #: τ Kᵀ, (head_dim, lanes).
    v_t: Any  #: Vᵀ, (value_dim, lanes).
    dk: Any  #: dKᵀ, a sum, (head_dim, lanes).
    tangents: Any  #: Their ``KeyTangents``, whose buffers are (rows, lanes).


@njit
def piece_of_keys(tile, tangents, left, right, rows):
    """Return the ``PieceOfKeys`` of keys from ``left`` up to ``right``, for some query rows."""
    lanes = lanes_for(right - left)
    stop = left + lanes
    own = KeyTangents(
        tangents.k_t[:, left:stop], tangents.v_t[:, left:stop], tangents.k_rows[left:right],
        as_tile(tangents.x, rows, lanes), as_tile(tangents.dp, rows, lanes),
    )  # fmt: skip
    k_t, v_t, dk = tile.k_t[:, left:stop], tile.v_t[:, left:stop], tile.dk[:, left:stop]
    return PieceOfKeys(k_t, v_t, dk, own)


class MovedRows(NamedTuple):
    """The tangents of query rows of a head: q is (rows, head_dim), lse and delta are (rows, 1)."""

    q: Any  #: Q̇.
    lse: Any  #: L̇.
    delta: Any  #: Ḋ = rowsum(dO ∘ Ȯ).


@njit
def moved_rows(o, b, h, first, count, dtype):
    """Return the ``MovedRows`` of one head."""
    return MovedRows(
        rows_of(o.q_tangent, b, h, first, count, dtype),
        rows_of(o.lse_tangent, b, h, first, count, dtype),
        rows_of(o.delta_tangent, b, h, first, count, dtype),
    )


@njit(fastmath=FASTMATH)
def add_delta_tangents(o, b, h, first, count, dout):
    """Add Ḋ = rowsum(dO ∘ Ȯ) of rows of dO, (count, value_dim), to the zeros in its array."""
    out = rows_of(o.out_tangent, b, h, first, count, dout.dtype.type)
    add_row_products(dout, out, moved_rows(o, b, h, first, count, dout.dtype.type).delta)


@njit(fastmath=FASTMATH)
def fill_gradient_tangents(piece, rows, moved, keys, buffer, settings, place):
    """Turn S of a piece into Ṗ ∘ Z, Z the dropout, and dP into ḋX; add dX K̇ to dQ and dXᵀ Q̇ to dK.

    ``rows`` are its ``QueryRows``, ``moved`` its ``MovedRows``, ``keys`` its ``PieceOfKeys``, and the
    buffer is that of ``add_dq``.
    """
    o, s, dp, tangents = settings[0], piece.s, piece.dp, keys.tangents
    x = tangents.x
    lines, lanes, zero = s.shape[0], s.shape[1], s.dtype.type(0)
    # Ẋ = τ (Q̇ Kᵀ + Q K̇ᵀ), dP = dO Vᵀ ∘ Z, ḋP = dO V̇ᵀ ∘ Z
    set_product(o.product, x, moved.q, keys.k_t)
    add_product(o.product, x, rows.q, tangents.k_t)
    set_product(o.product, dp, rows.dout, keys.v_t)
    set_product(o.product, tangents.dp, rows.dout, tangents.v_t)
    if o.keep_pass != 0:
        call(o.keep_pass, (piece.z, settings, place))
        multiply(dp, piece.z)
        multiply(tangents.dp, piece.z)
    slope, bend = piece.slope[:lines], piece.slope[lines:]
    if o.modifies_scores != 0:
        multiply(bend, x)  # f''(X) ∘ Ẋ
        multiply(x, slope)
    # P = exp(S - L), Ṗ = P ∘ (Ṡ - L̇), dS = P ∘ (dP - D), ḋS = Ṗ ∘ (dP - D) + P ∘ (ḋP - Ḋ)
    log2_e = s.dtype.type(LOG2_E)
    for r in range(lines):
        less = exponent_of(s[r], rows.lse[r, 0], rows.rest[r, 0])
        p_row, ds_row, x_row, dp_row = s[r], dp[r], x[r], tangents.dp[r]  # (lanes,)
        delta, lse_tangent, delta_tangent = rows.delta[r, 0], moved.lse[r, 0], moved.delta[r, 0]
        for lane in range(lanes):
            p = exp2(multiply_add(p_row[lane], log2_e, -less))
            # The slope of a masked score may be infinite.
            p_tangent = zero if p == zero else p * (x_row[lane] - lse_tangent)
            dp_less, p_row[lane] = ds_row[lane] - delta, p_tangent
            ds_row[lane] = p_tangent * dp_less + p * (dp_row[lane] - delta_tangent)
            x_row[lane] = p * dp_less
    if o.modifies_scores != 0:
        # dX = f'(X) ∘ dS, ḋX = f'(X) ∘ ḋS + f''(X) ∘ Ẋ ∘ dS
        multiply_by_slope(dp, slope)
        for r in range(lines):
            ds_row, bend_row, x_row = dp[r], bend[r], x[r]  # (lanes,)
            for lane in range(lanes):
                added = bend_row[lane] * x_row[lane]
                ds_row[lane] += zero if x_row[lane] == zero else added
        multiply_by_slope(x, slope)
    if o.keep_pass != 0:
        multiply(s, piece.z)
    add_dq(o.product, x[:, : len(tangents.k_rows)], tangents.k_rows, buffer, rows.dq)
    add_product(o.product, keys.dk, moved.q.T, x)
