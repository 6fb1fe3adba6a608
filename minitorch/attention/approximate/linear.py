"""Linear attention: the feature map elu(x) + 1 in place of the softmax."""

from __future__ import annotations

from typing import Any

from kernels.common.arguments import whole

from ...tensor import Tensor
from .kernel_sums import attend_by_features
from .support import Masked, check_operands, check_options, check_same_length, kept_keys, widened

#: Added to the denominator.
EPS = 1e-6


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    key_mask: Any = None,
    chunk: int = 64,
) -> Tensor:
    """Compute linear attention, in which φ(x) = elu(x) + 1 replaces the softmax.

    o_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / (φ(q_i)ᵀ Σ_j φ(k_j) + 1e-6), over all keys or, if causal, over j <= i.

    Args:
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        attn_mask: Not supported.
        dropout_p: Not supported: there are no probabilities to drop.
        is_causal: Position i attends only to positions j <= i; seq_k must be seq_q.
        scale: Not supported: the formula has none.
        key_mask: (…, seq_k); False or 0 masks a key.
        chunk: Number of positions in a chunk of the causal scan.

    Returns:
        (…, heads, seq_q, value_dim).

    Raises:
        TypeError: If an operand is not a tensor, or the operands differ in dtype or backend.
        ValueError: If a shape does not fit, or for an option that the method does not support.

    Source: Katharopoulos, Vyas, Pappas and Fleuret, Transformers are RNNs (2020), section 3.2.
    """
    check_options("linear", Masked(attn_mask, dropout_p, is_causal, scale))
    check_operands("linear", q, k, v)
    check_same_length("linear", q, k, is_causal)
    keep = kept_keys(key_mask, k)
    phi_q, phi_k = (widened(t).elu() + 1.0 for t in (q, k))  # (…, seq, head_dim)
    phi_k = phi_k if keep is None else phi_k * keep
    size = whole("chunk", chunk, 1)
    return attend_by_features(phi_q, phi_k, widened(v), is_causal, size, EPS).to(q.dtype)
