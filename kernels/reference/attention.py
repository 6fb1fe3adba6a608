"""NumPy: the textbook formula of attention and its gradient, and the paper's tile loop.

The textbook functions, run in float64, are the reference of all tests.  The tile loops run in the dtype of
their input and are the readable form of every compiled kernel.  All of them take the operands of a kernel,
(batch, heads, seq, dim), and fill its results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..common.geometry import PLAIN as GEOMETRY
from ..problem.operands import Operands
from ..problem.question import Problem
from ..scores.mods import add_read_gradients  # beyond module 5
from . import lines
from .scores import Scores, packed_parts

Array = npt.NDArray[Any]


def _delta(operands: Operands) -> Array:
    return lines.delta_of(operands.dout, operands.out, operands.dlse)


def attention(problem: Problem, tile: Any, operands: Operands) -> None:
    """Fill out, lse and lse_rest by the textbook formula, with all scores at once; ``tile`` is not used.

    Source: FlashAttention, Algorithm 0.
    """
    for scores, own in packed_parts(problem, operands):
        rows, cols = slice(0, own.q.shape[2]), slice(0, own.k.shape[2])
        s, *_ = scores.tile(rows, cols)  # (…, seq_q, seq_k)
        out, lse = lines.softmax_times(s, scores.kept(rows, cols), own.v)
        near = lines.shift_of(lse)  # (…, seq_q)
        rest = lines.rest_of(lse, near, np.exp(s - near[..., None]).sum(axis=-1))
        own.out[...], own.lse[...], own.lse_rest[...] = scores.with_sink(out, lse, rest)


class _Tile(NamedTuple):
    """Matrices of one tile for the backward pass, each (…, rows, cols)."""

    p: Array  #: Probabilities, after dropout.
    ds: Array  #: Gradient of the scores.
    dqk: Array  #: Gradient of scale · q · k.


def probabilities(own: Operands, rows: slice, s: Array) -> Array:
    """Return P = exp(S - L), (…, rows, cols), from the scores of some rows and their lse."""
    shift, rest = lines.shift_of(own.lse[..., rows]), own.lse_rest[..., rows]
    return np.exp((s - shift[..., None]) - rest[..., None])


def _backward_of(scores: Scores, own: Operands, rows: slice, cols: slice, delta: Array) -> _Tile:
    # S = τ Q Kᵀ     P = exp(S - L)
    s, derivative, _ = scores.tile(rows, cols)  # (…, rows, cols)
    p = probabilities(own, rows, s)
    # O = (P ∘ Z) V
    z = scores.kept(rows, cols)
    dp = (own.dout[..., rows, :] @ np.swapaxes(own.v[..., cols, :], -1, -2)) * z
    # P = softmax(S)
    ds = lines.softmax_gradient(p, dp, delta[..., rows])
    return _Tile(p * z, ds, ds * derivative)


def attention_backward(problem: Problem, tile: Any, operands: Operands) -> None:
    """Fill dq, dk and dv by the textbook formula; ``tile`` is not used.

    Source: FlashAttention, Appendix B.2; FlashAttention-2, section 2.3.
    """
    for scores, own in packed_parts(problem, operands):
        rows, cols = slice(0, own.q.shape[2]), slice(0, own.k.shape[2])
        whole = _backward_of(scores, own, rows, cols, _delta(own))
        own.dq[...], own.dk[...], own.dv[...] = lines.product_gradients(
            whole.p, whole.dqk, own.q, own.k, own.dout, problem.scale
        )


def mask_gradient(problem: Problem, operands: Operands, gradient: Array) -> None:
    """Add up the gradient of an array that is added to scores, one tile of rows at a time.

    See ``Target.mask_gradient``.
    """
    scores, delta = Scores(problem, operands), _delta(operands)
    gradient[...] = 0
    batches = range(len(operands.q)) if len(operands.q) == len(gradient) else operands.mask_batch
    cols = slice(0, problem.seq_k)
    for start in range(0, problem.seq_q, 64):
        rows = slice(start, min(start + 64, problem.seq_q))
        ds = _backward_of(scores, operands, rows, cols, delta).ds  # (batch, heads, rows, seq_k)
        own = gradient[:, :, rows if gradient.shape[2] > 1 else slice(0, 1)]
        for axis in (1, 2, 3):
            if own.shape[axis] == 1:
                ds = ds.sum(axis=axis, keepdims=True)
        for batch, part in zip(batches, ds, strict=True):
            own[batch] += part


def table_gradient(  # beyond module 5
    problem: Problem, operands: Operands, gradient: Array
) -> None:
    """Fill the gradient of the table that a ``score_mod`` reads, one tile of rows at a time."""
    before = Scores(
        replace(problem, score_mod=None, score_table=0, slopes=False, mask=""), operands
    )
    scores, delta = Scores(problem, operands), _delta(operands)
    mod: Any = problem.score_mod
    total, cols = np.zeros(gradient.shape), slice(0, problem.seq_k)
    for start in range(0, problem.seq_q, 64):
        rows = slice(start, min(start + 64, problem.seq_q))
        ds = _backward_of(scores, operands, rows, cols, delta).ds  # (batch, heads, rows, seq_k)
        # A masked score is no number to read an element for.
        s = np.where(ds == 0, 0.0, before.tile(rows, cols)[0])
        row, col = np.arange(rows.start, rows.stop)[:, None], np.arange(problem.seq_k)
        place = scores.batch, scores.head, row, col
        add_read_gradients(mod, ds, s, place, operands.score_table, total)
    gradient[...] = total


def sink_gradient(problem: Problem, operands: Operands, dsink: Array) -> None:
    """Fill the gradient of the sinks, (batch * heads,).

    It is the sum over the rows of dS of a key whose value, and so dP, is 0.
    """
    sums = operands.lse.dtype
    wide = operands.having(dout=operands.dout.astype(sums), out=operands.out.astype(sums))
    apart = operands.extra_logits() - lines.shift_of(operands.lse)  # (batch, heads, seq_q)
    p = np.exp(apart - operands.lse_rest)
    dsink[...] = -(p * _delta(wide)).sum(axis=-1).reshape(-1)


def tiled_attention(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out, lse and lse_rest tile by tile, (block_q, block_k).

    Source: FlashAttention-2, Algorithm 1, lines 3-15.
    """
    for scores, own in packed_parts(problem, operands):
        # 3: for 1 <= i <= T_r
        for row in range(0, own.q.shape[2], tile[0]):
            _forward_tile(problem, tile, scores, own, row)


def _forward_tile(
    problem: Problem, tile: tuple[int, int], scores: Scores, own: Operands, row: int
) -> None:
    block_q, block_k = tile
    seq_q, seq_k = own.q.shape[2], own.k.shape[2]
    rows = slice(row, min(row + block_q, seq_q))
    # 4: load Q_i     5: m = -inf, l = 0, O = 0
    row_max = np.full_like(own.lse[..., rows], -np.inf)  # (…, block_q)
    acc = np.zeros_like(own.out[..., rows, :])  # (…, block_q, value_dim)
    known = lines.Rows(row_max, np.zeros_like(row_max), acc)
    first = GEOMETRY.first_tile(row, block_k, seq_k, problem.lower)
    stop = GEOMETRY.tiles_stop(rows.stop, block_k, seq_k, problem.upper)
    # 6: for 1 <= j <= T_c
    for j in range(first, stop):
        # 7: load K_j, V_j
        cols = slice(j * block_k, min((j + 1) * block_k, seq_k))
        # 8: S = Q_i K_jᵀ
        s, *_ = scores.tile(rows, cols)  # (…, block_q, block_k)
        # 9, 10: the new m, then l and O
        known = lines.add_tile(known, s, scores.kept(rows, cols), own.v[..., cols, :])
    # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
    out, lse = lines.finished(known)  # (…, block_q, value_dim), (…, block_q)
    rest = lines.rest_of(lse, lines.shift_of(known.row_max), known.row_sum)
    out, lse, rest = scores.with_sink(out, lse, rest)
    own.out[..., rows, :], own.lse[..., rows], own.lse_rest[..., rows] = out, lse, rest


def tiled_attention_backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv tile by tile, with the outer loop over key tiles.

    Source: FlashAttention-2, Algorithm 2.
    """
    for scores, own in packed_parts(problem, operands):
        # 4: D = rowsum(dO ∘ O)
        delta = _delta(own)  # (…, seq_q)
        own.dq[...] = 0
        # 5: for 1 <= j <= T_c
        for col in range(0, own.k.shape[2], tile[1]):
            _backward_tile(problem, tile, scores, own, delta, col)


def _backward_tile(
    problem: Problem,
    tile: tuple[int, int],
    scores: Scores,
    own: Operands,
    delta: Array,
    col: int,
) -> None:
    block_q, block_k = tile
    seq_q, seq_k = own.q.shape[2], own.k.shape[2]
    # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
    cols = slice(col, min(col + block_k, seq_k))
    dk_acc = np.zeros_like(own.k[..., cols, :])  # (…, block_k, head_dim)
    dv_acc = np.zeros_like(own.v[..., cols, :])  # (…, block_k, value_dim)
    # 8: for 1 <= i <= T_r, but only those that see a column of the tile
    first = GEOMETRY.first_tile(col, block_q, seq_q, -problem.upper)
    stop = GEOMETRY.tiles_stop(cols.stop, block_q, seq_q, -problem.lower)
    for row in range(first * block_q, stop * block_q, block_q):
        rows = slice(row, min(row + block_q, seq_q))
        # 10, 11, 13, 14: S, P, dP and dS, as in the textbook
        one = _backward_of(scores, own, rows, cols, delta)  # (…, block_q, block_k)
        # 12: dV_j += Pᵀ dO_i     15: dQ_i += dS K_j     16: dK_j += dSᵀ Q_i
        q, k, dout = own.q[..., rows, :], own.k[..., cols, :], own.dout[..., rows, :]
        dq, dk, dv = lines.product_gradients(one.p, one.dqk, q, k, dout, problem.scale)
        own.dq[..., rows, :] += dq
        dk_acc += dk
        dv_acc += dv
    # 18: write dK_j, dV_j
    own.dk[..., cols, :], own.dv[..., cols, :] = dk_acc, dv_acc
