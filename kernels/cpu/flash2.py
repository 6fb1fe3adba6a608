"""FlashAttention-2 on the CPU: the paper's loops, a vector lane where CUDA has a thread.

Computes   out and lse; dq, dk and dv.
Source     FlashAttention-2, Algorithms 1 and 2.
Work item  forward: one query tile of one head; backward: every n-th key tile of one head.
One lane   forward: keeps row_max, row_sum and acc for one query row; backward: dk and dv for one key.
           Tiles are therefore stored with the lanes along the contiguous axis: S is (cols, lanes)
           forward and (rows, lanes) backward, and no maximum or sum runs across lanes.
Buffers    per work item, in the first- and second-level cache; nothing of size seq_q x seq_k.
Units      scores are multiplied by scale * log2(e), so that exp becomes exp2; lse is natural.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import float64, int64, njit, prange, void

from kernels.compiled import FASTMATH, array_types, compile_signature, njit_cached
from kernels.cpu.products import add_product, exp2
from kernels.geometry import PLAIN, make_geometry
from kernels.masks import make_masks
from kernels.online_softmax import LN_2, LOG2_E, make_online_softmax
from kernels.problem import Problem

_GEOMETRY = make_geometry(njit)
ceil_div, tile_stop = _GEOMETRY.ceil_div, _GEOMETRY.tile_stop
visited_key_tiles, full_key_tiles = _GEOMETRY.visited_key_tiles, _GEOMETRY.full_key_tiles
first_query_tile, zigzag = _GEOMETRY.first_query_tile, _GEOMETRY.zigzag
is_visible = make_masks(njit).is_visible
_SOFTMAX = make_online_softmax(njit)
shift_of, inverse_sum, log_sum_exp = _SOFTMAX.shift_of, _SOFTMAX.inverse_sum, _SOFTMAX.log_sum_exp

#: Work items that the backward pass aims for; a fixed number, so that dq does not depend on how many
#: threads there are.
BACKWARD_ITEMS = 8


@njit(fastmath=FASTMATH)
def pack_transposed(source, factor, target):
    """Write factor * sourceᵀ to target and zero the lanes beyond the source's rows.

    Args:
        source: (rows, dim), any strides.
        factor: Scalar of the same dtype.
        target: (dim, lanes), lanes >= rows.
    """
    rows, dim = source.shape
    for i in range(dim):
        lane = target[i]  # (lanes,)
        for row in range(rows):
            lane[row] = source[row, i] * factor
        lane[rows:] = 0


@njit(fastmath=FASTMATH)
def forward_tile(q, k, v, out, lse, scale, diagonal, row, block_q, block_k):
    """Fill one query tile of out and lse: loop over the key tiles that it visits.

    Args:
        q: (rows, head_dim), the rows of one head from ``row`` on.
        k: (seq_k, head_dim).
        v: (seq_k, value_dim).
        out: (rows, value_dim), written.
        lse: (rows,), written.
        scale: Multiplies the scores.
        diagonal: See ``Problem``.
        row: Number of the first row.
        block_q: Lanes, at least rows.
        block_k: Key columns a tile.
    """
    rows, seq_k, value_dim = q.shape[0], k.shape[0], v.shape[1]
    zero, minus_inf = lse.dtype.type(0), lse.dtype.type(-np.inf)
    # 4: load Q_i, transposed and scaled
    q_t = np.empty((q.shape[1], block_q), lse.dtype)  # (head_dim, lanes)
    pack_transposed(q, lse.dtype.type(scale * LOG2_E), q_t)
    # 5: O = 0, l = 0, m = -inf
    acc = np.zeros((value_dim, block_q), lse.dtype)  # (value_dim, lanes)
    row_sum = np.zeros(block_q, lse.dtype)  # (lanes,)
    row_max = np.full(block_q, -np.inf, lse.dtype)  # (lanes,)
    shift = np.zeros(block_q, lse.dtype)  # (lanes,)
    s = np.empty((block_k, block_q), lse.dtype)  # (block_k, lanes)
    visited = visited_key_tiles(row + rows, seq_k, block_k, ceil_div(seq_k, block_k), diagonal)
    full = full_key_tiles(row, seq_k, block_k, diagonal)
    # 6: for 1 <= j <= T_c
    for j in range(visited):
        # 7: load K_j, V_j
        col = j * block_k
        stop = tile_stop(j, block_k, seq_k)
        p = s[: stop - col]  # (cols, lanes)
        # 8: S = Q_i K_jᵀ
        p[:] = zero
        add_product(p, k[col:stop], q_t)
        if j >= full:
            for c in range(stop - col):
                s_row = p[c]  # (lanes,)
                for lane in range(block_q):
                    visible = is_visible(row + lane, col + c, diagonal)
                    s_row[lane] = s_row[lane] if visible else minus_inf
        # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = e^(m - m_new) l + rowsum P
        new_max = row_max.copy()  # (lanes,)
        for c in range(stop - col):
            s_row = p[c]  # (lanes,)
            for lane in range(block_q):
                new_max[lane] = max(new_max[lane], s_row[lane])
        for lane in range(block_q):
            shift[lane] = shift_of(new_max[lane])
            row_max[lane] = exp2(row_max[lane] - shift[lane])
        rescale, row_max = row_max, new_max  # (lanes,)
        for lane in range(block_q):
            row_sum[lane] *= rescale[lane]
        for c in range(stop - col):
            p_row = p[c]  # (lanes,)
            for lane in range(block_q):
                p_row[lane] = exp2(p_row[lane] - shift[lane])
                row_sum[lane] += p_row[lane]
        # 10: O = diag(e^(m - m_new)) O + P V_j
        for i in range(value_dim):
            acc_row = acc[i]  # (lanes,)
            for lane in range(block_q):
                acc_row[lane] *= rescale[lane]
        add_product(acc, v[col:stop].T, p)
    # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
    for r in range(rows):
        inverse = inverse_sum(row_sum[r])
        for i in range(value_dim):
            out[r, i] = acc[i, r] * inverse
        lse[r] = log_sum_exp(shift[r] * LN_2, row_sum[r])


@njit(fastmath=FASTMATH)
def backward_tile(dout, q, k, v, lse, delta, dq, dk, dv, scale, diagonal, col, block_q, block_k):
    """Fill one key tile of dk and dv, and add to dq: loop over the query tiles that see it.

    Args:
        dout: (seq_q, value_dim).
        q: (seq_q, head_dim).
        k: (cols, head_dim), the columns of one head from ``col`` on.
        v: (cols, value_dim).
        lse: (seq_q,).
        delta: (seq_q,).
        dq: (seq_q, head_dim), added to, without the factor ``scale``.
        dk: (cols, head_dim), written.
        dv: (cols, value_dim), written.
        scale: Multiplies the scores.
        diagonal: See ``Problem``.
        col: Number of the first column.
        block_q: Query rows a tile.
        block_k: Lanes, at least cols.
    """
    cols, seq_q = k.shape[0], q.shape[0]
    head_dim, value_dim = q.shape[1], v.shape[1]
    # 6: load K_j, V_j
    zero, one, minus_inf = lse.dtype.type(0), lse.dtype.type(1), lse.dtype.type(-np.inf)
    k_t = np.empty((head_dim, block_k), lse.dtype)  # (head_dim, lanes)
    pack_transposed(k, lse.dtype.type(scale * LOG2_E), k_t)
    v_t = np.empty((value_dim, block_k), lse.dtype)  # (value_dim, lanes)
    pack_transposed(v, one, v_t)
    k_tile = np.empty((cols, head_dim), lse.dtype)  # rows contiguous, for dS K
    for c in range(cols):  # not k_tile[:] = k, whose check of shapes takes seconds to compile
        for d in range(head_dim):
            k_tile[c, d] = k[c, d]
    # 7: dK_j = 0, dV_j = 0
    dk_acc = np.zeros((head_dim, block_k), lse.dtype)  # (head_dim, lanes)
    dv_acc = np.zeros((value_dim, block_k), lse.dtype)  # (value_dim, lanes)
    p_tile = np.empty((block_q, block_k), lse.dtype)  # (block_q, lanes)
    ds_tile = np.empty((block_q, block_k), lse.dtype)  # (block_q, lanes)
    num_q_tiles = ceil_div(seq_q, block_q)
    # 8: for 1 <= i <= T_r, but only those that see a column of the tile
    for i in range(first_query_tile(col, block_q, num_q_tiles, diagonal), num_q_tiles):
        # 9: load Q_i, dO_i, L_i, D_i
        row, stop = i * block_q, tile_stop(i, block_q, seq_q)
        q_tile, dout_tile = q[row:stop], dout[row:stop]  # (rows, dim)
        p, ds = p_tile[: stop - row], ds_tile[: stop - row]  # (rows, lanes)
        # 10: S = Q_i K_jᵀ
        p[:] = zero
        add_product(p, q_tile, k_t)
        if not is_visible(row, col + cols - 1, diagonal):
            for r in range(stop - row):
                s_row = p[r]  # (lanes,)
                for lane in range(block_k):
                    visible = is_visible(row + r, col + lane, diagonal)
                    s_row[lane] = s_row[lane] if visible else minus_inf
        # 13: dP = dO_i V_jᵀ
        ds[:] = zero
        add_product(ds, dout_tile, v_t)
        # 11: P = exp(S - L_i)     14: dS = P ∘ (dP - D_i)
        for r in range(stop - row):
            shift = lse.dtype.type(shift_of(lse[row + r]) * LOG2_E)
            delta_r, p_row, ds_row = delta[row + r], p[r], ds[r]
            for lane in range(block_k):
                p_row[lane] = exp2(p_row[lane] - shift)
                ds_row[lane] = p_row[lane] * (ds_row[lane] - delta_r)
        # 12: dV_j += Pᵀ dO_i
        add_product(dv_acc, dout_tile.T, p)
        # 15: dQ_i += dS K_j
        add_product(dq[row:stop], ds[:, :cols], k_tile)
        # 16: dK_j += dSᵀ Q_i
        add_product(dk_acc, q_tile.T, ds)
    # 18: write dK_j, dV_j
    tau = lse.dtype.type(scale)
    for c in range(cols):
        for d in range(head_dim):
            dk[c, d] = dk_acc[d, c] * tau
        for d in range(value_dim):
            dv[c, d] = dv_acc[d, c]


@njit_cached(parallel=True, fastmath=FASTMATH)
def forward_kernel(q, k, v, out, lse, scale, diagonal, block_q, block_k):
    """Run one work item per query tile and head; arguments as in :func:`forward`."""
    batch, heads, seq_q, _ = q.shape
    num_q_tiles = ceil_div(seq_q, block_q)
    # 3: for 1 <= i <= T_r, every head at once.  Each thread gets a run of neighbouring items; under
    # a causal mask the last tiles are the longest, and in plain order one thread would get them all.
    for item in prange(batch * heads * num_q_tiles):
        b, h = item // (heads * num_q_tiles), item // num_q_tiles % heads
        row = zigzag(item % num_q_tiles, num_q_tiles) * block_q
        stop = min(row + block_q, seq_q)
        forward_tile(
            q[b, h, row:stop], k[b, h], v[b, h], out[b, h, row:stop], lse[b, h, row:stop],
            scale, diagonal, row, block_q, block_k,
        )  # fmt: skip


@njit_cached(parallel=True, fastmath=FASTMATH)
def backward_kernel(dout, q, k, v, lse, delta, dq_parts, dk, dv, scale, diagonal, block_q, block_k):
    """Run one work item per part and head: every parts-th key tile, with a dq of its own."""
    parts = dq_parts.shape[0]
    batch, heads, _, _ = q.shape
    seq_k = k.shape[2]
    # 5: for 1 <= j <= T_c
    for item in prange(parts * batch * heads):
        part, b, h = item // (batch * heads), item % (batch * heads) // heads, item % heads
        for col in range(part * block_k, seq_k, parts * block_k):
            stop = min(col + block_k, seq_k)
            backward_tile(
                dout[b, h], q[b, h], k[b, h, col:stop], v[b, h, col:stop], lse[b, h],
                delta[b, h], dq_parts[part, b, h], dk[b, h, col:stop], dv[b, h, col:stop],
                scale, diagonal, col, block_q, block_k,
            )  # fmt: skip


@cache
def _forward_for(dtype: np.dtype[Any]) -> Any:
    """Compile (or load from disk) the forward kernel for one dtype, whatever the strides."""
    read, write = array_types(dtype)
    sizes = (float64, int64, int64, int64)  # scale, diagonal, block_q, block_k
    signature = void(read(4), read(4), read(4), write(4), write(3), *sizes)
    return compile_signature(forward_kernel, signature)


@cache
def _backward_for(dtype: np.dtype[Any]) -> Any:
    """Compile (or load from disk) the backward kernel for one dtype, whatever the strides."""
    read, write = array_types(dtype)
    sizes = (float64, int64, int64, int64)  # scale, diagonal, block_q, block_k
    inputs = (read(4), read(4), read(4), read(4), read(3), read(3))
    signature = void(*inputs, write(5), write(4), write(4), *sizes)
    return compile_signature(backward_kernel, signature)


def forward(
    problem: Problem, tile: tuple[int, int], q: Any, k: Any, v: Any, out: Any, lse: Any
) -> None:
    """Fill out and lse.

    Args:
        problem: The checked call.
        tile: (block_q, block_k).
        q: (batch, heads, seq_q, head_dim), any strides.
        k: (batch, heads, seq_k, head_dim), any strides.
        v: (batch, heads, seq_k, value_dim), any strides.
        out: (batch, heads, seq_q, value_dim), contiguous, written.
        lse: (batch, heads, seq_q), contiguous, written.
    """
    kernel = _forward_for(problem.dtype)
    kernel(q, k, v, out, lse, problem.scale, problem.diagonal, *tile)


def backward(
    problem: Problem,
    tile: tuple[int, int],
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
) -> None:
    """Fill dq, dk and dv (contiguous, four dimensions); the other arguments as in the forward pass.

    Memory beside the gradients is delta and up to ``BACKWARD_ITEMS`` copies of dq: linear in seq_q.
    """
    batch, heads = q.shape[:2]
    parts = min(
        PLAIN.ceil_div(problem.seq_k, tile[1]), PLAIN.ceil_div(BACKWARD_ITEMS, batch * heads)
    )
    # 4: D = rowsum(dO ∘ O)
    delta = np.einsum("bhrd,bhrd->bhr", dout, out)  # (batch, heads, seq_q)
    dq_parts = np.zeros((parts, *dq.shape), dq.dtype)
    kernel = _backward_for(problem.dtype)
    kernel(dout, q, k, v, lse, delta, dq_parts, dk, dv, problem.scale, problem.diagonal, *tile)
    # A fixed order of summation: equal bit for bit from run to run.
    np.multiply(dq_parts.sum(axis=0), problem.scale, out=dq)
