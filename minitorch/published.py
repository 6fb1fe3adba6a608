"""Methods of the published transformer course's tensors (CMU 11-868), for its code to run unchanged.

Its Functions and backend entries (``Flash_Attn``, ``flash_attn_fw``) have none of that name here: attention
is one Function, and the kernels are those of ``kernels``.

Its tensors have methods for its fused kernels.  Here the fused form of a layer is chosen by the backend,
and the layers stand on a higher floor than the tensor; so the methods are added to it from here.
"""

from __future__ import annotations

from .modules_basic import LayerNorm1d, layer_norm
from .nn import softmax
from .tensor import Tensor

#: The published kernel has this constant inside.
LAYER_NORM_EPS = 1e-8

LayerNorm1dFused = LayerNorm1d


def attn_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Return softmax over the last dimension of scores + mask.

    Args:
        scores: (batch, heads, seq_q, seq_k).
        mask: Added to the scores, -inf where a key is hidden; it broadcasts to their shape.

    Returns:
        (batch, heads, seq_q, seq_k).
    """
    return softmax(scores + mask, scores.dims - 1)


def layernorm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Normalise the last dimension, then scale and shift it."""
    return layer_norm(x, gamma, beta, LAYER_NORM_EPS)


def flash_attn(q: Tensor, k: Tensor, v: Tensor, causal_mask: bool = False) -> Tensor:
    """Attend; the published name of ``Tensor.flash_attention``, for each of its three kernels."""
    return q.flash_attention(k, v, is_causal=bool(causal_mask))


METHODS = {
    "attn_softmax": attn_softmax,
    "layernorm": layernorm,
    "flash_attn": flash_attn,
    "flash_attn2": flash_attn,
    "flash_attn_causal": flash_attn,
}
for _name, _method in METHODS.items():
    setattr(Tensor, _name, _method)
