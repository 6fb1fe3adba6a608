"""A step of decoding through a whole layer in one kernel, where that is what the layer computes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kernels.cpu.layers import decoding_step as decoding
from kernels.problem.question import RUNG_VARIABLE
from kernels.runtime.dtypes import COMPUTE_DTYPES
from kernels.runtime.jit import SERIAL_BELOW

from ..fast_ops import FastOps
from ..functions.fused import dense
from ..module import changes
from ..modules_basic import LayerNorm1d, Linear
from ..tensor import Tensor
from .kv_cache import LayerCache

if TYPE_CHECKING:
    from .transformer_layers import TransformerLayer


class StepWeights:
    """The weights of a layer as the kernel takes them, collected once for many steps.

    Args:
        layer: Any.

    Attributes:
        weights: None where the layer is not made of the modules that the kernel knows.
        middle: Width of the feed-forward.
        eps: Of the layer norms.
        dtype: Of all weights.
    """

    def __init__(self, layer: TransformerLayer):
        self.layer, self.changes = layer, changes()
        self.boxes = layer.parameters()
        self.seen = [box.value._tensor for box in self.boxes]
        self.weights: decoding.LayerWeights | None = None
        self.dtype, self.middle, self.eps = self.seen[0].dtype, 0, 0.0
        if not _is_known(layer):
            return
        attention, ff = layer.attention, layer.ff
        self.middle, self.eps = ff.linear_in.out_size, layer.ln_1.eps
        none = dense(layer.ln_1.weights.value)[:0]

        def arrays(module: Any) -> tuple[Any, Any]:
            bias = module.bias
            return dense(module.weights.value), none if bias is None else dense(bias.value)

        self.weights = decoding.LayerWeights(
            norm_1=arrays(layer.ln_1),
            q=arrays(attention.q_projection),
            k=arrays(attention.k_projection),
            v=arrays(attention.v_projection),
            out=arrays(attention.out_projection),
            norm_2=arrays(layer.ln_2),
            widen=arrays(ff.linear_in),
            narrow=arrays(ff.linear_out),
        )

    def are_those_of(self, layer: TransformerLayer) -> bool:
        """Tell whether these are still the weights of a layer: training replaces the values."""
        if layer is not self.layer or self.changes != changes():
            return False
        pairs = zip(self.boxes, self.seen, strict=True)
        return all(box.value._tensor is seen for box, seen in pairs)


def _is_known(layer: TransformerLayer) -> bool:
    """Tell whether a layer computes what the kernel does, on the fast backend."""
    attention, ff = layer.attention, layer.ff
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
        and all(v.backend.ops is FastOps and v.dtype == values[0].dtype for v in values)
        and values[0].dtype in COMPUTE_DTYPES
    )


def summed(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y of a step, a constant: to wake a loop's threads takes longer than to add few numbers.

    Args:
        x: (batch, count, n_embd).
        y: (count, n_embd).
    """
    small = x.size < SERIAL_BELOW and x.dtype == y.dtype in COMPUTE_DTYPES
    if not (small and x.backend.ops is FastOps and y.backend.ops is FastOps):
        return x + y
    return x.wrap(dense(x) + dense(y))


def step(layer: TransformerLayer, x: Tensor, cache: LayerCache) -> Tensor | None:
    """Return what a layer makes of the newest positions, or None where its own modules must compute it.

    Args:
        layer: Any; in evaluation, or there is no such step.
        x: (batch, count, n_embd), of few numbers.
        cache: Of what stands before, on the fast backend; it gets the new keys and values.

    Returns:
        (batch, count, n_embd), a constant, or None; then the cache is as it was.
    """
    if layer.training or x.dims != 3 or x.backend.ops is not FastOps:
        return None
    known = cache.known
    if known is None or not known.are_those_of(layer):
        known = cache.known = StepWeights(layer)
    batch, count, width = x.shape
    length = cache.length + count
    weights = known.weights
    serves = (
        x.dtype == known.dtype == cache.dtype
        and cache.backend.ops is FastOps
        and (batch, width) == (cache.batch, cache.heads * cache.head_dim)
        and layer.attention.n_head == cache.heads
        and length <= cache.capacity
        and decoding.pays(batch * count, length, width, known.middle)
        and not os.environ.get(RUNG_VARIABLE)  # which names a kernel for all attention
    )
    if weights is None or not serves:
        return None
    keys, values = cache.extended(count)
    return x.wrap(decoding.layer_step(dense(x), weights, keys, values, known.eps))
