"""What the backward pass computes on a piece of a tile: S, P and dS, and what the bounds leave of it.

Piece      (rows, lanes), in the cache; rows are query rows and lanes are keys.
Source     FlashAttention-2, Algorithm 2, lines 10 to 14.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from kernels.common.online_softmax import LOG2_E
from kernels.cpu.attention.tiles import copy_seen, is_visible, shift_of
from kernels.cpu.matmul.tile_product import exp2, set_product
from kernels.cpu.matmul.vector_registers import LANES
from kernels.cpu.runtime.function_pointers import call, contiguous
from kernels.cpu.runtime.vector_math import multiply_add
from kernels.runtime.jit import FASTMATH

#: Rows of a piece of a tile that the bounds cut through.
PIECE_ROWS = 32


class KeyTile(NamedTuple):
    """A tile of keys, from its loading to its gradients; lanes are keys.

    Attributes:
        k: (cols, head_dim), any strides.
        k_t: (head_dim, lanes), scaled.
        v_t: (value_dim, lanes).
        rows: (cols, columns), scale · k with its rows contiguous, and zeros for keys that are hidden.
        seen: (lanes,), which keys those are not.
        dk: (head_dim, lanes), a sum.
        dv: (value_dim, lanes), a sum.
    """

    k: Any
    k_t: Any
    v_t: Any
    rows: Any
    seen: Any
    dk: Any
    dv: Any


class Buffers(NamedTuple):
    """Where a piece of S and what comes of it is stored; flat, for a piece has any number of lanes.

    Attributes:
        p: (block_q · lanes,).
        ds: Likewise.
        slope: Likewise, or empty.
        z: Likewise.
        dq: (block_q, columns).
        seen: (block_q,), which rows see anything.
        q: (block_q, head_dim), with zeros for those that do not.
        dout: (block_q, value_dim), likewise.
    """

    p: Any
    ds: Any
    slope: Any
    z: Any
    dq: Any
    seen: Any
    q: Any
    dout: Any


@njit(fastmath=FASTMATH)
def is_bounded(row, last_row, col, last_col, lower, upper):
    """Tell whether the bounds hide anything in rows and columns, the last ones not counted."""
    first_sees_last = is_visible(row, last_col - 1, lower, upper)
    return not (first_sees_last and is_visible(last_row - 1, col, lower, upper))


@njit(fastmath=FASTMATH)
def piece_of(row, stop, col, cols, hides, lower, upper):
    """Return what of a tile to compute next: rows, lanes, and whether the bounds may hide anything there.

    Rows that the bounds cut through are taken a few at a time, each few with the lanes that one of them
    sees: half of what lies in a tile on a causal diagonal is hidden.  All others are one piece.

    Args:
        row: The first one left.
        stop: Where the tile's rows end.
        col: First column of the tile.
        cols: Its columns.
        hides: An option may hide anything in it: then it is one piece.
        lower: See ``Problem``.
        upper: Likewise.

    Returns:
        How many rows; the first lane, at which a vector begins; the lane after the last; whether they
        are bounded.
    """
    bounded = is_bounded(row, stop, col, col + cols, lower, upper)
    if hides or not bounded:
        return stop - row, 0, cols, bounded
    rows = min(stop - row, PIECE_ROWS)
    first = max(row + lower - col, 0) // LANES * LANES
    return rows, first, min(row + rows + upper - col, cols), bounded


@njit(fastmath=FASTMATH)
def fill_scores(p, slope, q_tile, k_t, settings, place, bounded):
    """Fill a piece of S.

    Args:
        p: (rows, lanes), written.
        slope: (rows, lanes), the derivative of S by scale · q · k, written; or (0, lanes).
        q_tile: (rows, head_dim).
        k_t: (head_dim, lanes), scaled.
        settings: (1,) of ``SETTINGS``.
        place: A ``Place``.
        bounded: The bounds may hide anything in it.
    """
    o = settings[0]
    lower, upper, minus_inf = o.lower, o.upper, p.dtype.type(-np.inf)
    # 10: S = Q_i K_jᵀ
    set_product(o.product, p, q_tile, k_t)
    if o.score_pass != 0:
        call(o.score_pass, (p, slope, settings, place))
    if bounded:
        for r in range(p.shape[0]):
            row, col, s_row = place.line + r, place.lane, p[r]  # (lanes,)
            for lane in range(p.shape[1]):
                visible = is_visible(row, col + lane, lower, upper)
                s_row[lane] = s_row[lane] if visible else minus_inf


@njit(fastmath=FASTMATH)
def fill_gradient(p, ds, z, dout_tile, v_t, lse, delta, settings, place, bounded, hides):
    """Turn a piece of S into P, and fill dS.

    Args:
        p: (rows, lanes), read and written.
        ds: (rows, lanes), written.
        z: (rows, lanes), the factors of dropout, written; or (0, lanes) without it.
        dout_tile: (rows, value_dim).
        v_t: (value_dim, lanes).
        lse: (rows,).
        delta: (rows,).
        settings: (1,) of ``SETTINGS``.
        place: A ``Place``.
        bounded: The bounds may hide anything in it.
        hides: An option may.
    """
    o = settings[0]
    real = p.dtype.type
    lower, upper = o.lower, o.upper
    lanes, unit = p.shape[1], real(o.unit)
    zero, minus_inf = real(0), real(-np.inf)
    # 13: dP = dO_i V_jᵀ
    set_product(o.product, ds, dout_tile, v_t)
    if o.keep_pass != 0:
        # O = (P ∘ Z) V, Z the dropout
        call(o.keep_pass, (z, settings, place))
        for r in range(p.shape[0]):
            dp_row, z_row = ds[r], z[r]  # (lanes,)
            for lane in range(lanes):
                dp_row[lane] *= z_row[lane]
    # 11: P = exp(S - L_i)     14: dS = P ∘ (dP - D_i)
    for r in range(p.shape[0]):
        shift = real(shift_of(lse[r]) * LOG2_E)
        delta_r, p_row, ds_row = delta[r], p[r], ds[r]
        # dS is 0 where nothing is seen, whatever is there: 0 · NaN is no zero.
        if hides:
            for lane in range(lanes):
                hidden = p_row[lane] == minus_inf
                p_row[lane] = exp2(multiply_add(p_row[lane], unit, -shift))
                ds_row[lane] = zero if hidden else p_row[lane] * (ds_row[lane] - delta_r)
        else:
            for lane in range(lanes):
                p_row[lane] = exp2(multiply_add(p_row[lane], unit, -shift))
                ds_row[lane] = p_row[lane] * (ds_row[lane] - delta_r)
        if bounded:
            row, col = place.line + r, place.lane
            for lane in range(lanes):
                visible = is_visible(row, col + lane, lower, upper)
                ds_row[lane] = ds_row[lane] if visible else zero


@njit(fastmath=FASTMATH)
def add_row_products(a, b, total):
    """Add the sums of a ∘ b over each row, a vector of partial sums at a time.

    Args:
        a: (rows, dim), any strides.
        b: Likewise.
        total: (rows, 1).
    """
    rows, dim = a.shape
    parts = np.zeros(LANES, a.dtype)
    whole = dim // LANES * LANES if a.strides[1] == a.itemsize == b.strides[1] else 0
    for r in range(rows):
        parts[:] = 0
        near_a, near_b = contiguous(a[r]), contiguous(b[r])  # (dim,)
        for i in range(0, whole, LANES):
            for lane in range(LANES):
                parts[lane] += near_a[i + lane] * near_b[i + lane]
        sum_ = total[r, 0]
        for lane in range(LANES):
            sum_ += parts[lane]
        for i in range(whole, dim):
            sum_ += a[r, i] * b[r, i]
        total[r, 0] = sum_


@njit(fastmath=FASTMATH)
def mark_in_bounds(seen, col, rows, lower, upper):
    """Fill which keys some row sees, as far as the bounds decide: a window may begin after the first key.

    Args:
        seen: (lanes,), written.
        col: Column of the first one.
        rows: Of the sequence.
        lower: See ``Problem``.
        upper: Likewise.
    """
    for lane in range(seen.shape[0]):
        seen[lane] = lower <= col + lane < rows + upper


@njit(fastmath=FASTMATH)
def leave_hidden(p, q_tile, dout_tile, tile, buffers, tau, whole):
    """Put zeros for rows that see nothing and for keys that nobody sees: 0 · NaN is no zero.

    Args:
        p: (rows, lanes), S.
        q_tile: (rows, head_dim).
        dout_tile: (rows, value_dim).
        tile: A ``KeyTile``; its keys in rows are written.
        buffers: ``Buffers``.
        tau: The scale, by which those keys are multiplied.
        whole: ``tile.rows`` has no zeros for hidden keys yet.

    Returns:
        ``q_tile``, ``dout_tile`` and ``whole``, as they are now.
    """
    seen, all_rows, cols = tile.seen, True, tile.k.shape[0]
    minus_inf, one = p.dtype.type(-np.inf), p.dtype.type(1)
    seen[:] = False
    for r in range(p.shape[0]):
        s_row, some = p[r], False  # (lanes,)
        for lane in range(cols):
            some |= s_row[lane] != minus_inf
            seen[lane] |= s_row[lane] != minus_inf
        buffers.seen[r] = some
        all_rows &= some
    if not all_rows:
        copy_seen(q_tile, buffers.seen, buffers.q, one)
        copy_seen(dout_tile, buffers.seen, buffers.dout, one)
        q_tile, dout_tile = buffers.q[: p.shape[0]], buffers.dout[: p.shape[0]]
    all_cols = True
    for c in range(cols):
        all_cols &= seen[c]
    if not (all_cols and whole):
        copy_seen(tile.k, seen, tile.rows, tau)
    return q_tile, dout_tile, all_cols
