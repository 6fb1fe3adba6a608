"""Attention with a feature map in place of the softmax: sums of products, linear in the sequence."""

from __future__ import annotations

import numpy as np

from ...tensor import Tensor
from .chunks import in_chunks, in_sequence, swap
from .support import shared_constant

#: Number of 16-bit elements in the 16 bytes to which kernels align rows.
COPIES = 8


def attend_by_features(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, is_causal: bool, chunk: int, eps: float = 0.0
) -> Tensor:
    """Return o_i = φ(q_i)ᵀ S_i / (φ(q_i)ᵀ z_i + eps) with S_i = Σ_j φ(k_j) v_jᵀ and z_i = Σ_j φ(k_j).

    The sums run over all keys; if causal, over j <= i.  In the causal form, S and z before a chunk come
    from a cumulative sum over chunks, and scores within a chunk are computed and masked.  Memory thus holds
    a state for each chunk rather than for each position.

    Args:
        phi_q: (…, seq_q, features), not negative.
        phi_k: (…, seq_k, features), not negative; seq_k is seq_q if causal.
        v: (…, seq_k, value_dim).
        is_causal: Whether position i sees the positions j <= i only.
        chunk: Positions of a chunk of the causal form.
        eps: Added to the denominator; where it is 0, the result is 0.

    Returns:
        (…, seq_q, value_dim).

    Source: Katharopoulos et al., Transformers are RNNs (2020), sections 3.2 and 3.3.
    """
    seq = phi_q.shape[-2]
    if not is_causal:
        numerator = phi_q @ (swap(phi_k) @ v)  # (…, seq_q, value_dim)
        ones = shared_constant(v, np.ones((COPIES, 1)), v.dtype)
        # z several times, as columns: a product of rows of 16 bytes needs no copy of phi_q times z.
        z = ones * phi_k.sum(-2)  # (…, COPIES, features)
        denominator = (phi_q @ swap(z)).sum(-1) * (1.0 / COPIES)  # (…, seq_q, 1)
        return numerator / _positive(denominator, eps)
    chunk = min(chunk, seq)
    phi_q, phi_k, v = (in_chunks(t, chunk) for t in (phi_q, phi_k, v))  # (…, chunks, chunk, …)
    state = (swap(phi_k) @ v).cumsum(-3, exclusive=True)  # (…, chunks, features, value_dim)
    total = phi_k.sum(-2).cumsum(-3, exclusive=True)  # (…, chunks, 1, features)
    lower = shared_constant(v, np.tri(chunk), v.dtype)  # (chunk, chunk)
    scores = (phi_q @ swap(phi_k)) * lower  # (…, chunks, chunk, chunk)
    numerator = phi_q @ state + scores @ v  # (…, chunks, chunk, value_dim)
    denominator = (phi_q * total).sum(-1) + scores.sum(-1)  # (…, chunks, chunk, 1)
    return in_sequence(numerator / _positive(denominator, eps), seq)


def _positive(denominator: Tensor, eps: float) -> Tensor:
    denominator = denominator + eps if eps else denominator
    return denominator + (denominator.detach() == 0.0)
