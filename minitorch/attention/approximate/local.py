"""Local attention: each position attends only to its neighbours."""

from __future__ import annotations

from typing import Any

from kernels.common.arguments import whole

from ...tensor import Tensor
from .support import Masked, check_operands, check_options, one_mask


def local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    key_mask: Any = None,
    window: int = 64,
) -> Tensor:
    """Compute exact attention to keys at most ``window`` positions away; other tiles are never read.

    o_i = Σ_j softmax_j(scale q_i·k_j) v_j over the j with |i - j| <= window.

    Args:
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        attn_mask: As in ``Tensor.flash_attention``; not together with ``key_mask``.
        dropout_p: Probability of dropping an attention weight.
        is_causal: Position i attends only to positions j <= i.
        scale: Factor of the scores; 1 / sqrt(head_dim) when None.
        key_mask: (…, seq_k); False or 0 masks a key.
        window: Number of positions on either side.

    Returns:
        (…, heads, seq_q, value_dim); 0 for a query whose keys are all masked.

    Raises:
        TypeError: If an operand is not a tensor, or the operands differ in dtype or backend.
        ValueError: If a shape does not fit, or both masks are given.

    Source: Child et al., Generating long sequences with sparse transformers (2019), section 4; the window
    of Beltagy, Peters and Cohan, Longformer (2020), section 3.1.
    """
    check_options("local", Masked(attn_mask, dropout_p, is_causal, scale))
    check_operands("local", q, k, v)
    size = whole("window", window, 0)
    attn_mask = one_mask(attn_mask, key_mask, k)
    return q.flash_attention(
        k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        window_size=(size, size),
    )  # fmt: skip
