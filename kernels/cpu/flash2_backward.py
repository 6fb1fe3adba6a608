"""FlashAttention-2 on the CPU, backward: key tiles outside, one vector lane for each key.

Computes   dq, dk and dv.
Source     FlashAttention-2, Algorithm 2.
Work item  a hand of key tiles and a part of the query rows of one head; threads take the next item.
           There are as many hands as parts, and as many phases: in phase n hand i meets part i - n.  So
           no two items of a phase add to the same rows of dq, dk or dv, every sum has one order however
           many threads there are, and there is one dq.
One lane   keeps dk and dv for one key.  S, P, dP and dS are stored as (rows, lanes).
Buffers    per work item, in the first- and second-level cache; nothing of size seq_q x seq_k.
Units      as in the forward kernel.
Options    likewise.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from kernels.compiled import FASTMATH, njit_cached
from kernels.cpu.call_options import ITEM_SIGNATURE, CallOptions
from kernels.cpu.calls import address_of, call
from kernels.cpu.products import add_product, exp2, set_product
from kernels.cpu.tile_scores import Place, rows_of
from kernels.cpu.tiles import (
    add_rows,
    ceil_div,
    copy_seen,
    entries,
    first_tile,
    is_visible,
    lanes_for,
    pack_transposed,
    shift_of,
    tile_in_table,
    tile_of,
    tiles_stop,
    transpose,
)
from kernels.geometry import PLAIN
from kernels.online_softmax import LOG2_E
from kernels.operands import Operands
from kernels.problem import Problem

#: Work items that the backward pass aims for; a fixed number, so that no sum depends on how many threads
#: there are.
ITEMS = 8


@njit(fastmath=FASTMATH)
def fill_scores(p, slope, q_tile, k_t, settings, place, lower, upper):
    """Fill a tile of S; tell whether bounds, and whether an option, may hide anything in it.

    Args:
        p: (rows, lanes), written.
        slope: (rows, lanes), the derivative of S by scale · q · k, written; or (0, lanes).
        q_tile: (rows, head_dim).
        k_t: (head_dim, lanes), scaled.
        settings: (1,) of ``SETTINGS``.
        place: A ``Place``.
        lower: See ``Problem``.
        upper: Likewise.
    """
    o = settings[0]
    rows, row, col = p.shape[0], place.line, place.lane
    minus_inf = p.dtype.type(-np.inf)
    # 10: S = Q_i K_jᵀ
    set_product(o.product, p, q_tile, k_t)
    if o.score_pass != 0:
        call(o.score_pass, (p, slope, settings, place))
    first_sees_last = is_visible(row, col + place.width - 1, lower, upper)
    bounded = not (first_sees_last and is_visible(row + rows - 1, col, lower, upper))
    if bounded:
        for r in range(rows):
            s_row = p[r]  # (lanes,)
            for lane in range(p.shape[1]):
                visible = is_visible(row + r, col + lane, lower, upper)
                s_row[lane] = s_row[lane] if visible else minus_inf
    return bounded, place.partial != 0 or o.hides != 0


@njit(fastmath=FASTMATH)
def fill_gradient(p, ds, z, dout_tile, v_t, lse, delta, settings, place, bounded, hides):
    """Turn a tile of S into P, and fill dS.

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
        bounded: As :func:`fill_scores` told.
        hides: Likewise.
    """
    o = settings[0]
    real = p.dtype.type
    lower, upper = o.lower, o.upper
    lanes, unit, lse_factor = p.shape[1], real(o.unit), real(LOG2_E / o.unit)
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
        shift = real(shift_of(lse[r]) * lse_factor)
        delta_r, p_row, ds_row = delta[r], p[r], ds[r]
        # dS is 0 where nothing is seen, whatever is there: 0 · NaN is no zero.
        if hides:
            for lane in range(lanes):
                hidden = p_row[lane] == minus_inf
                p_row[lane] = exp2((p_row[lane] - shift) * unit)
                ds_row[lane] = zero if hidden else p_row[lane] * (ds_row[lane] - delta_r)
        else:
            for lane in range(lanes):
                p_row[lane] = exp2((p_row[lane] - shift) * unit)
                ds_row[lane] = p_row[lane] * (ds_row[lane] - delta_r)
        if bounded:
            row, col = place.line + r, place.lane
            for lane in range(lanes):
                visible = is_visible(row, col + lane, lower, upper)
                ds_row[lane] = ds_row[lane] if visible else zero


def make_backward(real):
    """Return the backward kernel for one dtype."""

    @njit_cached(fastmath=FASTMATH)
    def backward_item(settings, item):
        """Add what a hand of key tiles and a part of the query rows give each other to dq, dk and dv.

        Args:
            settings: (1,) of ``SETTINGS``.
            item: Number of the part times the (batch, head)s, plus the number of (batch, head); the
                last part, of which a causal call sees the most keys, comes first.
        """
        o = settings[0]
        # by value: a store to a tile might change the record, as far as LLVM knows
        lower, upper, block_q, block_k = o.lower, o.upper, o.block_q, o.block_k
        batch_heads = o.q.shape[0] * o.q.shape[1]
        flat, part = item % batch_heads, o.parts - 1 - item // batch_heads
        b, h = flat // o.q.shape[1], flat % o.q.shape[1]
        zero, one, minus_inf, tau = real(0), real(1), real(-np.inf), real(o.scale)
        part_start, part_stop = part * o.part_rows, min((part + 1) * o.part_rows, o.q.shape[2])
        if o.phase == 0:
            rows_of(o.dq, b, h, part_start, part_stop - part_start, real)[:] = zero
        # 5: for 1 <= j <= T_c, every parts-th
        for number in range((part + o.phase) % o.parts, o.tiles, o.parts):
            sequence, first_q, seq_q, first_k, seq_k, col = tile_in_table(o, number)
            cols = min(block_k, seq_k - col)
            dout = rows_of(o.dout, b, h, first_q, seq_q, real)  # (seq_q, value_dim)
            q = rows_of(o.q, b, h, first_q, seq_q, real)  # (seq_q, head_dim)
            k = rows_of(o.k, b, h, first_k + col, cols, real)  # (cols, head_dim)
            v = rows_of(o.v, b, h, first_k + col, cols, real)  # (cols, value_dim)
            lse = rows_of(o.lse, b, h, first_q, seq_q, real)  # (seq_q, 1)
            delta = rows_of(o.delta, b, h, first_q, seq_q, real)  # (seq_q, 1)
            dk = rows_of(o.dk, b, h, first_k + col, cols, real)  # (cols, head_dim)
            dv = rows_of(o.dv, b, h, first_k + col, cols, real)  # (cols, value_dim)
            dq = rows_of(o.dq, b, h, first_q, seq_q, real)  # (seq_q, head_dim)
            head_dim, value_dim = q.shape[1], v.shape[1]
            lanes = lanes_for(cols)
            if o.phase == 0:
                dk[:] = zero
                dv[:] = zero
            # of the part, counted in the sequence
            start_row, stop_row = max(part_start - first_q, 0), min(part_stop - first_q, seq_q)
            first = max(first_tile(col, block_q, seq_q, -upper), start_row // block_q)
            stop = min(tiles_stop(col + cols, block_q, seq_q, -lower), ceil_div(stop_row, block_q))
            begin, end = entries(o, flat, col // block_k, ceil_div(seq_k, block_k), first, stop)
            if begin >= end or start_row >= stop_row:
                continue
            # 6: load K_j, V_j
            k_t = np.empty((head_dim, lanes), real)  # (head_dim, lanes)
            pack_transposed(k, real(o.factor), k_t)
            v_t = np.empty((value_dim, lanes), real)  # (value_dim, lanes)
            pack_transposed(v, one, v_t)
            seen_cols = np.ones(lanes, np.bool_)  # (lanes,)
            columns = lanes_for(head_dim)
            k_tile = np.zeros((cols, columns), real)  # rows contiguous, for dS K
            copy_seen(k, seen_cols, k_tile)
            k_whole = True  # k_tile has no zeros for hidden keys
            # 7: dK_j = 0, dV_j = 0
            dk_acc = np.zeros((head_dim, lanes), real)  # (head_dim, lanes)
            dv_acc = np.zeros((value_dim, lanes), real)  # (value_dim, lanes)
            p_tile = np.empty((block_q, lanes), real)  # (block_q, lanes)
            ds_tile = np.empty((block_q, lanes), real)  # (block_q, lanes)
            slope_tile = np.zeros((block_q if o.bends != 0 else 0, lanes), real)  # (block_q, lanes)
            z_tile = np.zeros((block_q if o.keep_pass != 0 else 0, lanes), real)  # (block_q, lanes)
            dq_tile = np.empty((block_q, columns), real)  # (block_q, columns)
            seen_rows = np.empty(block_q, np.bool_)  # (block_q,)
            q_seen = np.empty((block_q, head_dim), real)  # (block_q, head_dim)
            dout_seen = np.empty((block_q, value_dim), real)  # (block_q, value_dim)
            # 8: for 1 <= i <= T_r, but only those that see a column of the tile
            for entry in range(begin, end):
                i, partial = tile_of(o, entry)
                # 9: load Q_i, dO_i, L_i, D_i, but only the rows that may see a column
                row = max(max(i * block_q, start_row), col - upper)
                rows = min(min((i + 1) * block_q, stop_row), col + cols - lower) - row
                if rows <= 0:
                    continue
                q_tile, dout_tile = q[row : row + rows], dout[row : row + rows]  # (rows, dim)
                p, ds = p_tile[:rows], ds_tile[:rows]  # (rows, lanes)
                slope, z = slope_tile[:rows], z_tile[:rows]  # (rows, lanes)
                here = Place(b, h, flat, sequence, row, col, cols, partial)
                bounded, hides = fill_scores(p, slope, q_tile, k_t, settings, here, lower, upper)
                if hides:
                    seen_cols[:] = False
                    all_rows_seen = True
                    for r in range(rows):
                        s_row, some = p[r], False  # (lanes,)
                        for lane in range(cols):
                            some |= s_row[lane] != minus_inf
                            seen_cols[lane] |= s_row[lane] != minus_inf
                        seen_rows[r] = some
                        all_rows_seen &= some
                    if not all_rows_seen:
                        copy_seen(q_tile, seen_rows, q_seen)
                        copy_seen(dout_tile, seen_rows, dout_seen)
                        q_tile, dout_tile = q_seen[:rows], dout_seen[:rows]
                elif not k_whole:
                    seen_cols[:] = True
                if hides or not k_whole:
                    all_cols_seen = True
                    for c in range(cols):
                        all_cols_seen &= seen_cols[c]
                    if not (all_cols_seen and k_whole):
                        copy_seen(k, seen_cols, k_tile)
                    k_whole = all_cols_seen
                own_lse, own_delta = lse[row : row + rows, 0], delta[row : row + rows, 0]  # (rows,)
                fill_gradient(
                    p, ds, z, dout_tile, v_t, own_lse, own_delta, settings, here, bounded, hides
                )
                if o.bends != 0:
                    for r in range(rows):
                        slope_row, ds_row = slope[r], ds[r]  # (lanes,)
                        for lane in range(lanes):
                            bent = ds_row[lane] * slope_row[lane]
                            ds_row[lane] = zero if ds_row[lane] == zero else bent
                if o.keep_pass != 0:
                    for r in range(rows):
                        p_row, z_row = p[r], z[r]  # (lanes,)
                        for lane in range(lanes):
                            p_row[lane] *= z_row[lane]
                # 12: dV_j += (P ∘ Z)ᵀ dO_i
                add_product(o.product, dv_acc, dout_tile.T, p)
                # 15: dQ_i += dS K_j
                left, right = max(row + lower - col, 0), min(row + rows + upper - col, cols)
                dq_own = dq_tile[:rows]  # (rows, columns)
                set_product(o.product, dq_own, ds[:, left:right], k_tile[left:right])
                add_rows(dq_own, tau, dq[row : row + rows])
                # 16: dK_j += dSᵀ Q_i
                add_product(o.product, dk_acc, q_tile.T, ds)
            # 18: write dK_j, dV_j
            dk_t = np.empty((lanes, head_dim), real)  # (lanes, head_dim)
            dv_t = np.empty((lanes, value_dim), real)  # (lanes, value_dim)
            transpose(dk_acc, dk_t)
            transpose(dv_acc, dv_t)
            add_rows(dk_t, tau, dk)
            add_rows(dv_t, one, dv)

    return backward_item


@cache
def _address(dtype: np.dtype[Any]) -> int:
    """Return the address of the kernel for one dtype, compiled or loaded from disk."""
    return address_of(make_backward(dtype.type), ITEM_SIGNATURE)


def row_delta(operands: Operands) -> Any:
    """Return D = rowsum(dO ∘ O), less the gradient of lse: (batch, heads, seq_q)."""
    delta = np.einsum("bhrd,bhrd->bhr", operands.dout, operands.out)
    return delta if operands.dlse is None else delta - operands.dlse


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv.

    Memory beside the gradients is delta.

    Args:
        problem: The checked call.
        tile: (block_q, block_k).
        operands: As kernels take them, any strides; dq, dk and dv written.
    """
    o = operands
    batch_heads, seq_q = o.q.shape[0] * o.q.shape[1], o.q.shape[2]
    options = CallOptions(problem, o, tile, by_keys=True, backward=True)
    most = PLAIN.ceil_div(ITEMS, max(batch_heads, 1))
    part_rows = PLAIN.ceil_div(max(seq_q, 1), most * tile[0]) * tile[0]  # whole tiles
    parts = PLAIN.ceil_div(max(seq_q, 1), part_rows)
    options.tile_table(True, parts)
    # 4: D = rowsum(dO ∘ O)
    delta = row_delta(o)
    options.name(
        dout=o.dout, q=o.q, k=o.k, v=o.v, lse=o.lse[..., None], delta=delta[..., None],
        dq=o.dq, dk=o.dk, dv=o.dv,
    )  # fmt: skip
    options.settings["parts"], options.settings["part_rows"] = parts, part_rows
    for phase in range(parts):
        options.settings["phase"] = phase
        options.run(_address(problem.dtype), parts * batch_heads)
