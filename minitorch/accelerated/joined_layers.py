"""Transformer layers whose residual connections, dropout and following norms are one kernel, on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kernels.runtime.dtypes import is_floating

from ..backends.operations import Operations
from ..layers.residual_layer_norm import residual_layer_norm
from ..layers.rms_norm import RMSNorm
from ..models.feed_forward import FeedForward, GatedFeedForward
from ..models.variants import NORMS
from ..modules_basic import LayerNorm1d
from ..scalars.modes import modes, without_dropout
from ..tensor import Tensor
from ..training.recompute import checkpoint
from ..transformer import DecoderLM, MultiHeadAttention, TransformerLayer


def layer_forward(layer: TransformerLayer, x: Tensor) -> Tensor:
    """Apply a layer to x; see :meth:`TransformerLayer.forward`."""
    if not layer.norm_first:
        _, x = joined(layer.attention, x, x, layer.ln_1)
        return joined(layer.ff, x, x, layer.ln_2)[1]
    has_cache = modes.context is not None and modes.context.cache is not None
    if not has_cache and is_joined(layer, x):
        hidden, normed = joined(layer.attention, x, layer.ln_1(x), layer.ln_2)
        return hidden + layer.ff(normed)
    return Operations.plain["TransformerLayer.forward"](layer, x)


def through_layers(model: DecoderLM, x: Tensor) -> Tensor:
    """Apply the layers and the last norm of a model to x; see :meth:`DecoderLM.through_layers`."""
    layers = [getattr(model, name) for name in model.layer_names]
    if type(model.ln) in NORMS.values() and all(is_joined(layer, x) for layer in layers):
        return run_joined(layers, model.ln, x, model.recompute)
    return Operations.plain["DecoderLM.through_layers"](model, x)


def is_joined(layer: TransformerLayer, x: Tensor) -> bool:
    """Tell whether one kernel computes a residual connection, dropout and the following norm of a layer."""
    parts = layer, layer.attention, layer.ff
    return (
        type(layer) is TransformerLayer
        and layer.norm_first
        and type(layer.attention) is MultiHeadAttention
        and type(layer.ff) in (FeedForward, GatedFeedForward)
        and is_floating(x.dtype)
        and not any("forward" in part.__dict__ for part in parts)
        and type(layer.ln_1) is type(layer.ln_2) in NORMS.values()
    )


def joined(
    branch: MultiHeadAttention | FeedForward | GatedFeedForward, hidden: Tensor, normed: Tensor,
    norm: LayerNorm1d | RMSNorm,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return hidden + dropout(branch(normed)) and its norm, in one kernel after the branch.

    Args:
        branch: The branch, whose dropout is applied by the kernel.
        hidden: The residual stream, (batch, seq, n_embd).
        normed: The input of the branch, (batch, seq, n_embd).
        norm: The norm of the next branch.
    """
    own = branch.dropout
    with without_dropout():
        x = branch(normed)
    rate = own.p_dropout if own.training else 0.0
    beta = None if norm.bias is None else norm.bias.value
    return residual_layer_norm(x, hidden, norm.weights.value, beta, norm.eps, rate)


def run_joined(
    layers: Sequence[TransformerLayer], last: LayerNorm1d | RMSNorm, x: Tensor, recompute: bool
) -> Tensor:  # fmt: skip
    """Apply layers and the norm after them to x, with :func:`joined` throughout.

    Args:
        layers: One or more layers.
        last: The norm that follows them.
        x: (batch, seq, n_embd).
        recompute: Call each layer by :func:`minitorch.checkpoint`.

    Returns:
        (batch, seq, n_embd).
    """
    hidden, normed = x, layers[0].ln_1(x)
    for layer, norm in zip(layers, [*(layer.ln_1 for layer in layers[1:]), last], strict=True):

        def one(hidden: Tensor, normed: Tensor, layer: Any = layer, norm: Any = norm) -> Any:
            hidden, normed = joined(layer.attention, hidden, normed, layer.ln_2)
            return joined(layer.ff, hidden, normed, norm)

        call = partial(checkpoint, one) if recompute else one
        hidden, normed = call(hidden, normed)
    return normed
