"""One decoding step through a whole transformer layer in one kernel, for layers of the known structure."""

from __future__ import annotations

import os
from typing import Any

from kernels.cpu.layers import decoding_step
from kernels.problem.rungs import RUNG_VARIABLE
from kernels.runtime.dtypes import COMPUTE_DTYPES

from ..backends.operations import Operations
from ..fast_ops import FastOps
from ..functions.kernel_arrays import dense
from ..models.feed_forward import FeedForward
from ..models.kv_cache import LayerCache
from ..module import Module, changes
from ..modules_basic import LayerNorm1d, Linear
from ..scalars.modes import modes
from ..tensor import Tensor
from ..transformer import TransformerLayer

LayerWeights = decoding_step.LayerWeights


class StepWeights:
    """The weights of a layer as arguments of the kernel, collected once for many steps.

    Args:
        layer: Any layer.
        weights: The weights, or None if the kernel does not support the modules of the layer.
        middle: Width of the feed-forward network.
        eps: Added to the variance by the layer norms.

    Attributes:
        dtype: Dtype of all weights.
    """

    def __init__(
        self, layer: Module, weights: LayerWeights | None, middle: int = 0, eps: float = 0.0
    ):
        self.layer, self.changes = layer, changes()
        self.boxes = layer.parameters()
        self.seen = [box.value._tensor for box in self.boxes]
        self.weights, self.middle, self.eps = weights, middle, eps
        self.dtype = self.seen[0].dtype

    def are_those_of(self, layer: Module) -> bool:
        """Tell whether these are still the weights of a layer, as training replaces them."""
        if layer is not self.layer or self.changes != changes():
            return False
        pairs = zip(self.boxes, self.seen, strict=True)
        return all(box.value._tensor is seen for box, seen in pairs)


def fused_step(known: StepWeights, heads: int, x: Tensor, cache: LayerCache) -> Tensor | None:
    """Return the layer's output for the newest positions, or None where its modules must compute it.

    Args:
        known: The weights of the layer.
        heads: Number of heads of the layer.
        x: (batch, count, n_embd), a small tensor on the fast backend.
        cache: Keys and values of the previous positions, on the fast backend; the new ones are appended.

    Returns:
        (batch, count, n_embd), a constant; or None, with the cache unchanged.
    """
    batch, count, width = x.shape
    part = cache.part(batch, count)
    if known.weights is None or part is None:
        return None
    length = int(part.before.max()) + part.new
    serves = (
        x.dtype == known.dtype == cache.dtype
        and cache.backend.kind is FastOps
        and width == heads * cache.head_dim
        and heads == cache.heads
        and decoding_step.pays(batch * count, length, width, known.middle)
        and not os.environ.get(RUNG_VARIABLE)  # it selects a kernel for all attention
    )
    if not serves:
        return None
    pages = decoding_step.Pages(cache.keys.array(), cache.values.array(), part.table, part.before)
    out = decoding_step.layer_step(dense(x), known.weights, pages, length, known.eps)
    cache.grow(count)
    return x.wrap(out)


def step_weights(layer: Any) -> StepWeights:
    """Return the weights of a layer as arguments of the decoding kernel.

    Args:
        layer: Any layer; the weights are None unless the kernel can compute it, on the fast backend.
    """
    if not _has_kernel(layer):
        return StepWeights(layer, None)
    attention, ff = layer.attention, layer.ff
    none = dense(layer.ln_1.weights.value)[:0]

    def arrays(module: Any) -> tuple[Any, Any]:
        bias = module.bias
        return dense(module.weights.value), none if bias is None else dense(bias.value)

    weights = LayerWeights(
        norm_1=arrays(layer.ln_1),
        q=arrays(attention.q_projection),
        k=arrays(attention.k_projection),
        v=arrays(attention.v_projection),
        out=arrays(attention.out_projection),
        norm_2=arrays(layer.ln_2),
        widen=arrays(ff.linear_in),
        narrow=arrays(ff.linear_out),
    )
    return StepWeights(layer, weights, ff.linear_in.out_size, layer.ln_1.eps)


def _has_kernel(layer: Any) -> bool:
    """Tell whether the decoding kernel computes the same function as a layer, on the fast backend."""
    attention, ff = layer.attention, layer.ff
    if type(ff) is not FeedForward or not (attention.is_plain and layer.norm_first):
        return False
    linears = [attention.q_projection, attention.k_projection, attention.v_projection]
    linears += [attention.out_projection, ff.linear_in, ff.linear_out]
    values = [box.value for box in layer.parameters()]
    return (
        attention.causal
        and attention.attend is Tensor.flash_attention
        and not any("forward" in module.__dict__ for module in (attention, ff))
        and all(type(norm) is LayerNorm1d for norm in (layer.ln_1, layer.ln_2))
        and all(type(linear) is Linear for linear in linears)
        and layer.ln_1.eps == layer.ln_2.eps
        and all(v.backend.kind is FastOps and v.dtype == values[0].dtype for v in values)
        and values[0].dtype in COMPUTE_DTYPES
    )


def layer_forward(layer: TransformerLayer, x: Tensor) -> Tensor:
    """Apply a layer to x, in one kernel if x has few positions, and those before it are cached."""
    context = modes.context
    if context is not None and context.cache is not None and context.key_mask is None:
        stepped = step(layer, x, context.cache)
        if stepped is not None:
            return stepped
    return Operations.plain["TransformerLayer.forward"](layer, x)


def step(layer: Any, x: Tensor, cache: LayerCache) -> Tensor | None:
    """Return the layer's output for the newest positions, or None where its modules must compute it.

    Args:
        layer: Any layer; the result is None in training mode.
        x: (batch, count, n_embd), a small tensor.
        cache: Keys and values of the previous positions, on the fast backend; the new ones are appended.

    Returns:
        (batch, count, n_embd), a constant; or None, with the cache unchanged.
    """
    if layer.training or x.dims != 3 or x.backend.kind is not FastOps:
        return None
    known = cache.known
    if known is None or not known.are_those_of(layer):
        known = cache.known = step_weights(layer)
    return fused_step(known, layer.attention.n_head, x, cache)
