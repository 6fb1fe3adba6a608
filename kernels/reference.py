"""NumPy: the textbook formula of attention and its gradient, and the paper's tile loop.

The textbook functions are the oracle of the whole project; they are run on float64.  The tile loops
run in the dtype of their input and are the readable form of every compiled kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .geometry import PLAIN as GEOMETRY
from .masks import is_visible
from .problem import Problem

Array = npt.NDArray[Any]


def _swap(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def _scores(problem: Problem, q: Array, k: Array, row: int = 0, col: int = 0) -> Array:
    """Return τ·Q·Kᵀ with what a row does not see at -inf; q and k begin at (row, col)."""
    s = (q @ _swap(k)) * problem.scale  # (…, rows, cols)
    rows = row + np.arange(s.shape[-2])[:, None]  # (rows, 1)
    cols = col + np.arange(s.shape[-1])  # (cols,)
    return np.where(is_visible(rows, cols, problem.diagonal), s, s.dtype.type(-np.inf))


def _shift_of(row_max: Array) -> Array:
    # -inf - (-inf) would be NaN in a row that sees no key; -inf - 0 is not.
    return np.where(row_max == -np.inf, row_max.dtype.type(0), row_max)


def _divisor(row_sum: Array) -> Array:
    # 0 / 1 in a row that sees no key; by equality, so that a NaN stays one.
    return np.where(row_sum == 0, 1, row_sum)[..., None]  # (…, rows, 1)


def _probs(s: Array, lse: Array) -> Array:
    return np.exp(s - _shift_of(lse)[..., None])  # (…, rows, cols)


def _log(x: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(x)  # log 0 = -inf is what an empty row needs


def attention(problem: Problem, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Compute attention by the textbook: all scores at once.

    Args:
        problem: The checked call.
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).

    Returns:
        out (…, heads, seq_q, value_dim) and lse (…, heads, seq_q), natural logarithm.

    Source: FlashAttention, Algorithm 0.
    """
    s = _scores(problem, q, k)  # (…, seq_q, seq_k)
    shift = _shift_of(s.max(axis=-1))  # (…, seq_q)
    p = np.exp(s - shift[..., None])  # (…, seq_q, seq_k)
    total = p.sum(axis=-1)  # (…, seq_q)
    out = (p @ v) / _divisor(total)  # (…, seq_q, value_dim)
    return out, shift + _log(total)


def attention_backward(
    problem: Problem, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array
) -> tuple[Array, Array, Array]:
    """Compute the gradients of attention by the textbook.

    Args:
        problem: The checked call.
        dout: As out.
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        out: As returned by :func:`attention`.
        lse: As returned by :func:`attention`.

    Returns:
        dq, dk and dv of the broadcast shapes of q, k and v.

    Source: FlashAttention, Appendix B.2; FlashAttention-2, section 2.3.
    """
    # S = τ Q Kᵀ and P = exp(S - L)
    p = _probs(_scores(problem, q, k), lse)  # (…, seq_q, seq_k)
    # O = P V
    dv = _swap(p) @ dout  # (…, seq_k, value_dim)
    dp = dout @ _swap(v)  # (…, seq_q, seq_k)
    # P = softmax(S)
    delta = (dout * out).sum(axis=-1)  # (…, seq_q)
    ds = p * (dp - delta[..., None])  # (…, seq_q, seq_k)
    # S = τ Q Kᵀ
    dq = (ds @ k) * problem.scale  # (…, seq_q, head_dim)
    dk = (_swap(ds) @ q) * problem.scale  # (…, seq_k, head_dim)
    return dq, dk, dv


def tiled_attention(
    problem: Problem, tile: tuple[int, int], q: Array, k: Array, v: Array, out: Array, lse: Array
) -> None:
    """Compute attention tile by tile; fill out and lse.

    Args:
        problem: The checked call.
        tile: (block_q, block_k).
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        out: (…, heads, seq_q, value_dim), written.
        lse: (…, heads, seq_q), written.

    Source: FlashAttention-2, Algorithm 1, lines 3-15.
    """
    block_q, block_k = tile
    num_k_tiles = GEOMETRY.ceil_div(problem.seq_k, block_k)
    # 3: for 1 <= i <= T_r
    for row in range(0, problem.seq_q, block_q):
        row_stop = min(row + block_q, problem.seq_q)
        visited = GEOMETRY.visited_key_tiles(
            row_stop, problem.seq_k, block_k, num_k_tiles, problem.diagonal
        )
        # 4: load Q_i     5: O = 0, l = 0, m = -inf
        q_tile = q[..., row:row_stop, :]  # (…, block_q, head_dim)
        acc = np.zeros_like(out[..., row:row_stop, :])  # (…, block_q, value_dim)
        row_max = np.full_like(lse[..., row:row_stop], -np.inf)  # (…, block_q)
        row_sum = np.zeros_like(row_max)  # (…, block_q)
        # 6: for 1 <= j <= T_c
        for j in range(visited):
            # 7: load K_j, V_j
            cols = slice(j * block_k, (j + 1) * block_k)
            k_tile, v_tile = k[..., cols, :], v[..., cols, :]  # (…, block_k, dim)
            # 8: S = Q_i K_jᵀ
            s = _scores(problem, q_tile, k_tile, row, j * block_k)  # (…, block_q, block_k)
            # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = e^(m - m_new) l + rowsum P
            row_max_new = np.maximum(row_max, s.max(axis=-1))  # (…, block_q)
            shift = _shift_of(row_max_new)
            p = np.exp(s - shift[..., None])  # (…, block_q, block_k)
            rescale = np.exp(row_max - shift)  # (…, block_q)
            row_sum = rescale * row_sum + p.sum(axis=-1)
            # 10: O = diag(e^(m - m_new)) O + P V_j
            acc = rescale[..., None] * acc + p @ v_tile
            row_max = row_max_new
        # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
        out[..., row:row_stop, :] = acc / _divisor(row_sum)
        lse[..., row:row_stop] = _shift_of(row_max) + _log(row_sum)


def tiled_attention_backward(
    problem: Problem,
    tile: tuple[int, int],
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """Compute the gradients tile by tile, key columns outside; fill dq, dk and dv.

    Args:
        problem: The checked call.
        tile: (block_q, block_k).
        dout: As out.
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        out: As the forward pass returned it.
        lse: As the forward pass returned it.
        dq: As q, written.
        dk: As k, written.
        dv: As v, written.

    Source: FlashAttention-2, Algorithm 2.
    """
    block_q, block_k = tile
    num_q_tiles = GEOMETRY.ceil_div(problem.seq_q, block_q)
    # 4: D = rowsum(dO ∘ O)
    delta = (dout * out).sum(axis=-1)  # (…, seq_q)
    dq[...] = 0
    # 5: for 1 <= j <= T_c
    for col in range(0, problem.seq_k, block_k):
        # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
        cols = slice(col, col + block_k)
        k_tile, v_tile = k[..., cols, :], v[..., cols, :]  # (…, block_k, dim)
        dk_acc, dv_acc = np.zeros_like(k_tile), np.zeros_like(v_tile)
        # 8: for 1 <= i <= T_r, but only those that see a column of the tile
        first = GEOMETRY.first_query_tile(col, block_q, num_q_tiles, problem.diagonal)
        for row in range(first * block_q, problem.seq_q, block_q):
            rows = slice(row, row + block_q)
            q_tile, dout_tile = q[..., rows, :], dout[..., rows, :]  # (…, block_q, dim)
            # 10: S = Q_i K_jᵀ     11: P = exp(S - L_i)
            s = _scores(problem, q_tile, k_tile, row, col)  # (…, block_q, block_k)
            p = _probs(s, lse[..., rows])  # (…, block_q, block_k)
            # 12: dV_j += Pᵀ dO_i
            dv_acc += _swap(p) @ dout_tile
            # 13: dP = dO_i V_jᵀ     14: dS = P ∘ (dP - D_i)
            dp = dout_tile @ _swap(v_tile)  # (…, block_q, block_k)
            ds = p * (dp - delta[..., rows, None])  # (…, block_q, block_k)
            # 15: dQ_i += dS K_j     16: dK_j += dSᵀ Q_i
            dq[..., rows, :] += (ds @ k_tile) * problem.scale
            dk_acc += (_swap(ds) @ q_tile) * problem.scale
        # 18: write dK_j, dV_j
        dk[..., cols, :], dv[..., cols, :] = dk_acc, dv_acc
