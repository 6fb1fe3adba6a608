"""The steps of the backward pass on a piece of a tile, and the layout of a key tile.

Piece      (rows, lanes), in the cache; rows are query rows and lanes are keys.
Source     FlashAttention-2, Algorithm 2, lines 6 and 7, 10 to 14, 18.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from kernels.common.online_softmax import LARGE, LOG2_E
from kernels.cpu.attention.tile_scores import rows_of
from kernels.cpu.attention.tiles import (
    add_rows,
    as_tile,
    empty_tile,
    hide_out_of_bounds,
    is_visible,
    lanes_for,
    multiply,
    pack_rows,
    pack_transposed,
    shift_of,
    transpose,
    zero_tile,
)
from kernels.cpu.matmul.tile_product import add_product, exp2, set_product
from kernels.cpu.matmul.vector_registers import LANES
from kernels.cpu.runtime.function_pointers import call, contiguous
from kernels.cpu.runtime.vector_math import multiply_add
from kernels.runtime.jit import FASTMATH

#: Rows of a piece of a partly masked tile.
PIECE_ROWS = 32


class KeyTile(NamedTuple):
    """A tile of keys and values with their gradients; a lane is a key."""

    k_t: Any  #: (head_dim, lanes), times the scale.
    v_t: Any  #: (value_dim, lanes).
    k_rows: Any  #: (cols, columns), times the scale; rows are contiguous.
    dk: Any  #: (head_dim, lanes), a sum.
    dv: Any  #: (value_dim, lanes), a sum.


class QueryRows(NamedTuple):
    """Query rows of a head: q, dout, dq are (rows, dim); lse, its rounding error, delta are (rows, 1)."""

    q: Any
    dout: Any
    dq: Any
    lse: Any
    rest: Any
    delta: Any


class ScorePiece(NamedTuple):
    """A piece of a tile of scores, each array (rows, lanes), or the buffers from which it is made."""

    s: Any  #: S, then P.
    dp: Any  #: dP, then dS.
    #: Derivatives of the scores by scale · q · k, and below them, where needed, the second ones; without
    #: rows if the scores are not modified.
    slope: Any
    z: Any  #: Factors of dropout; without rows if there is none.


@njit
def query_rows(o, b, h, first, count, dtype):
    """Return the ``QueryRows`` of one head, from a record of ``SETTINGS``."""
    return QueryRows(
        rows_of(o.q, b, h, first, count, dtype), rows_of(o.dout, b, h, first, count, dtype),
        rows_of(o.dq, b, h, first, count, dtype), rows_of(o.lse, b, h, first, count, dtype),
        rows_of(o.lse_rest, b, h, first, count, dtype), rows_of(o.delta, b, h, first, count, dtype),
    )  # fmt: skip


@njit
def buffers_for(o, lanes, dtype):
    """Return the buffers of the pieces of a tile."""
    size = o.block_q
    return ScorePiece(
        empty_tile(size, lanes, dtype), empty_tile(size, lanes, dtype),
        zero_tile(size * o.modifies_scores, lanes, dtype),
        zero_tile(size if o.keep_pass != 0 else 0, lanes, dtype),
    )  # fmt: skip


@njit
def shaped(buffers, rows, lanes):
    """Return the beginning of buffers as a ``ScorePiece`` of rows and lanes."""
    orders = len(buffers.slope) // len(buffers.s)
    return ScorePiece(
        as_tile(buffers.s, rows, lanes), as_tile(buffers.dp, rows, lanes),
        as_tile(buffers.slope, rows * orders, lanes), as_tile(buffers.z, rows, lanes),
    )  # fmt: skip


@njit(fastmath=FASTMATH)
def load_keys(k, v, scale):
    """Return a ``KeyTile`` of rows of k, times the scale, and v, with gradients of zero."""
    real, (cols, head_dim), value_dim = k.dtype, k.shape, v.shape[1]
    lanes = lanes_for(cols)
    tile = KeyTile(
        empty_tile(head_dim, lanes, real), empty_tile(value_dim, lanes, real),
        empty_tile(cols, lanes_for(head_dim), real),
        zero_tile(head_dim, lanes, real), zero_tile(value_dim, lanes, real),
    )  # fmt: skip
    pack_transposed(k, scale, tile.k_t)
    pack_transposed(v, real.type(1), tile.v_t)
    pack_rows(k, scale, tile.k_rows)
    return tile


@njit(fastmath=FASTMATH)
def add_key_gradients(tile, scale, dk, dv):
    """Add the gradients of a ``KeyTile`` to rows of dk, times the scale, and dv, of any strides."""
    real, lanes = dk.dtype, tile.dk.shape[1]
    dk_t = empty_tile(lanes, dk.shape[1], real)  # (lanes, head_dim)
    dv_t = empty_tile(lanes, dv.shape[1], real)  # (lanes, value_dim)
    transpose(tile.dk, dk_t)
    transpose(tile.dv, dv_t)
    add_rows(dk_t, scale, dk)
    add_rows(dv_t, real.type(1), dv)


@njit(fastmath=FASTMATH)
def is_bounded(row, last_row, col, last_col, lower, upper):
    """Tell whether the bounds mask anything in half-open ranges of rows and columns."""
    first_sees_last = is_visible(row, last_col - 1, lower, upper)
    return not (first_sees_last and is_visible(last_row - 1, col, lower, upper))


@njit(fastmath=FASTMATH)
def piece_of(row, stop, col, cols, lower, upper):
    """Return the next piece of a tile up to the row ``stop``: rows, lanes, and whether it may be masked.

    Partly masked rows are taken a few at a time, with the lanes that are visible to any of them,
    because half of a tile on the causal diagonal is masked.  All other rows are one piece.  The first
    lane is aligned to a vector, and the second number of the lanes is one past the last.
    """
    bounded = is_bounded(row, stop, col, col + cols, lower, upper)
    if not bounded:
        return stop - row, 0, cols, bounded
    rows = min(stop - row, PIECE_ROWS)
    first = max(row + lower - col, 0) // LANES * LANES
    return rows, first, min(row + rows + upper - col, cols), bounded


@njit(fastmath=FASTMATH)
def fill_scores(piece, q_tile, k_t, settings, place, bounded):
    """Fill S of a piece, and its derivatives by scale · q · k if they are needed.

    ``q_tile`` (rows, head_dim) or ``k_t`` (head_dim, lanes) is scaled; ``bounded`` tells whether the
    bounds may mask anything at the ``TilePosition``.
    """
    o, s = settings[0], piece.s
    # 10: S = Q_i K_jᵀ
    set_product(o.product, s, q_tile, k_t)
    if o.score_pass != 0:
        call(o.score_pass, (s, piece.slope, settings, place))
    if bounded:
        hide_out_of_bounds(s, place.line, place.lane, o.lower, o.upper)


@njit(fastmath=FASTMATH)
def has_large(lse):
    """Tell whether the scores of some row are large, from lse (rows, 1)."""
    found = False
    for r in range(len(lse)):
        found |= abs(shift_of(lse[r, 0])) > LARGE
    return found


@njit(fastmath=FASTMATH)
def fill_large_scores(piece, q, k, scale, settings, place, bounded):
    """Fill S of a piece with the numbers of the forward pass, which multiplies q by the scale, not k.

    Where scores are large, exp(S - L) is not a probability if S and L are rounded differently.  The other
    arguments are those of :func:`fill_scores`; q is (rows, head_dim) and k (cols, head_dim).
    """
    q_tile = empty_tile(q.shape[0], q.shape[1], q.dtype)  # (rows, head_dim)
    k_t = empty_tile(q.shape[1], piece.s.shape[1], q.dtype)  # (head_dim, lanes)
    pack_rows(q, scale, q_tile)
    pack_transposed(k, q.dtype.type(1), k_t)
    fill_scores(piece, q_tile, k_t, settings, place, bounded)


@njit(fastmath=FASTMATH)
def multiply_by_slope(ds, slope):
    """Multiply dS by the derivative of S; 0 stays 0, as a masked score's slope may be infinite."""
    zero = ds.dtype.type(0)
    for r in range(ds.shape[0]):
        ds_row, slope_row = ds[r], slope[r]  # (lanes,)
        for lane in range(ds.shape[1]):
            product = ds_row[lane] * slope_row[lane]
            ds_row[lane] = zero if ds_row[lane] == zero else product


@njit(fastmath=FASTMATH)
def exponent_of(s_row, lse, rest):
    """Return the number that is subtracted from S · log2(e) of a row, which gives log2(P).

    A large lse is subtracted from S itself, and the number is what it loses by rounding.
    """
    real = s_row.dtype.type
    shift, less = real(shift_of(lse)), rest * real(LOG2_E)
    if abs(shift) <= real(LARGE):
        return less + shift * real(LOG2_E)
    for lane in range(len(s_row)):
        s_row[lane] -= shift
    return less


@njit(fastmath=FASTMATH)
def fill_gradient(piece, rows, v_t, settings, place):
    """Turn S of a piece into P ∘ Z, Z the dropout, and fill dS, the gradient of scale · q · k.

    ``rows`` are its ``QueryRows``, and ``v_t`` is (value_dim, lanes).
    """
    (s, dp, slope, z), (_, dout_tile, _, lse, rest, delta) = piece, rows
    o = settings[0]
    log2_e = s.dtype.type(LOG2_E)
    # 13: dP = dO_i V_jᵀ
    set_product(o.product, dp, dout_tile, v_t)
    if o.keep_pass != 0:
        # O = (P ∘ Z) V, Z the dropout
        call(o.keep_pass, (z, settings, place))
        multiply(dp, z)
    p, ds = s, dp
    # 11: P = exp(S - L_i)     14: dS = P ∘ (dP - D_i)
    for r in range(s.shape[0]):
        less, delta_r = exponent_of(s[r], lse[r, 0], rest[r, 0]), delta[r, 0]
        s_row, p_row, dp_row, ds_row = s[r], p[r], dp[r], ds[r]  # (lanes,)
        for lane in range(s.shape[1]):
            p_row[lane] = exp2(multiply_add(s_row[lane], log2_e, -less))
            ds_row[lane] = p_row[lane] * (dp_row[lane] - delta_r)
    if o.modifies_scores != 0:
        multiply_by_slope(ds, slope)
    if o.keep_pass != 0:
        multiply(p, z)


@njit(fastmath=FASTMATH)
def add_row_products(a, b, total):
    """Add the sums of a ∘ b over each row of (rows, dim) to (rows, 1), by vectors of partial sums."""
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
def add_dq(product, ds, k_rows, buffer, dq):
    """Add dS K to rows of dq, by way of a buffer where they are not whole vectors.

    ``ds`` is (rows, cols), ``k_rows`` (cols, columns) times the scale, and the buffer (rows or more,
    columns).
    """
    if k_rows.shape[1] == dq.shape[1] and dq.strides[1] == dq.itemsize:
        add_product(product, dq, ds, k_rows)
    else:
        set_product(product, buffer[: len(ds)], ds, k_rows)
        add_rows(buffer, dq.dtype.type(1), dq)
