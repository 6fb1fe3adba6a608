"""NumPy: the derivatives of attention and of its gradients along a direction, by the textbook formula.

A dot above a letter is the derivative along the tangents of q, k and v, which are Q̇, K̇ and V̇.
``docs/guides/attention-derivatives.md`` derives the formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..problem.operands import Operands
from ..problem.question import Problem
from . import lines
from .attention import attention, probabilities
from .scores import Scores, packed_parts

Array = npt.NDArray[Any]


class _Whole(NamedTuple):
    """Matrices of all scores, each (…, seq_q, seq_k)."""

    p: Array  #: P.
    x_tangent: Array  #: The tangent of X = τ Q Kᵀ.
    slope: Array  #: The derivative of S by X.
    bend: Array  #: The derivative of that.
    z: Any  #: The dropout factors, or 1.


def _transposed(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def _whole_of(problem: Problem, scores: Scores, own: Operands) -> _Whole:
    rows, cols = slice(0, own.q.shape[2]), slice(0, own.k.shape[2])
    # X = τ Q Kᵀ, S = f(X)     Ẋ = τ (Q̇ Kᵀ + Q K̇ᵀ)
    s, slope, bend = scores.tile(rows, cols)
    product = own.q_tangent @ _transposed(own.k) + own.q @ _transposed(own.k_tangent)
    p = probabilities(own, rows, s)
    return _Whole(p, problem.scale * product, slope, bend, scores.kept(rows, cols))


def jvp(problem: Problem, tile: Any, operands: Operands) -> None:
    """Fill out, lse, lse_rest and the tangents of out and lse; ``tile`` is not used."""
    attention(problem, tile, operands)
    for scores, own in packed_parts(problem, operands):
        p, x_tangent, slope, _, z = _whole_of(problem, scores, own)
        # S = f(X)     Ṡ = f'(X) ∘ Ẋ
        p_tangent, own.lse_tangent[...] = lines.softmax_tangent(p, slope * x_tangent)
        # O = (P ∘ Z) V     Ȯ = (Ṗ ∘ Z) V + (P ∘ Z) V̇
        own.out_tangent[...] = (p_tangent * z) @ own.v + (p * z) @ own.v_tangent


def double_backward(problem: Problem, tile: Any, operands: Operands) -> None:
    """Fill dq, dk and dv with the tangents of these gradients; ``tile`` is not used."""
    for scores, own in packed_parts(problem, operands, order=2):
        p, x_tangent, slope, bend, z = _whole_of(problem, scores, own)
        p_tangent, _ = lines.softmax_tangent(p, slope * x_tangent)
        # dP = dO Vᵀ ∘ Z - D     ḋP = dO V̇ᵀ ∘ Z - Ḋ, where Ḋ = rowsum(dO ∘ Ȯ)
        delta = lines.delta_of(own.dout, own.out, own.dlse)
        delta_tangent = lines.delta_of(own.dout, own.out_tangent, None)
        dp = (own.dout @ _transposed(own.v)) * z - delta[..., None]
        dp_tangent = (own.dout @ _transposed(own.v_tangent)) * z - delta_tangent[..., None]
        # dS = P ∘ dP     ḋS = Ṗ ∘ dP + P ∘ ḋP
        ds, ds_tangent = p * dp, p_tangent * dp + p * dp_tangent
        # dX = f'(X) ∘ dS     ḋX = f'(X) ∘ ḋS + f''(X) ∘ Ẋ ∘ dS
        dx, dx_tangent = slope * ds, slope * ds_tangent + bend * x_tangent * ds
        # dQ = τ dX K     ḋQ = τ (ḋX K + dX K̇)
        own.dq[...] = problem.scale * (dx_tangent @ own.k + dx @ own.k_tangent)
        # dK = τ dXᵀ Q     ḋK = τ (ḋXᵀ Q + dXᵀ Q̇)
        own.dk[...] = problem.scale * (
            _transposed(dx_tangent) @ own.q + _transposed(dx) @ own.q_tangent
        )
        # dV = (P ∘ Z)ᵀ dO     ḋV = (Ṗ ∘ Z)ᵀ dO
        own.dv[...] = _transposed(p_tangent * z) @ own.dout
