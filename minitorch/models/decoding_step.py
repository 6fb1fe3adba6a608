"""A step of decoding through a whole layer in one kernel, where that is what the layer computes."""

from __future__ import annotations

import os

from kernels.cpu.backend import decoding_step
from kernels.problem.rungs import RUNG_VARIABLE
from kernels.runtime.dtypes import COMPUTE_DTYPES
from kernels.runtime.jit import SERIAL_BELOW

from ..fast_ops import FastOps
from ..functions.fused import dense
from ..module import Module, changes
from ..tensor import Tensor
from .kv_cache import LayerCache

LayerWeights = decoding_step.LayerWeights


class StepWeights:
    """The weights of a layer as the kernel takes them, collected once for many steps.

    Args:
        layer: Any.
        weights: None where the layer is not made of the modules that the kernel knows.
        middle: Width of the feed-forward.
        eps: Of the layer norms.

    Attributes:
        dtype: Of all weights.
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
        """Tell whether these are still the weights of a layer: training replaces the values."""
        if layer is not self.layer or self.changes != changes():
            return False
        pairs = zip(self.boxes, self.seen, strict=True)
        return all(box.value._tensor is seen for box, seen in pairs)


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


def fused_step(known: StepWeights, heads: int, x: Tensor, cache: LayerCache) -> Tensor | None:
    """Return the layer's output for the newest positions, or None where its modules must compute it.

    Args:
        known: The weights of the layer.
        heads: Of the layer.
        x: (batch, count, n_embd), of few numbers, on the fast backend.
        cache: Of what stands before, on the fast backend; it gets the new keys and values.

    Returns:
        (batch, count, n_embd), a constant, or None; then the cache is as it was.
    """
    batch, count, width = x.shape
    length = cache.length + count
    weights = known.weights
    serves = (
        x.dtype == known.dtype == cache.dtype
        and cache.backend.ops is FastOps
        and (batch, width) == (cache.batch, cache.heads * cache.head_dim)
        and heads == cache.heads
        and length <= cache.capacity
        and decoding_step.pays(batch * count, length, width, known.middle)
        and not os.environ.get(RUNG_VARIABLE)  # which names a kernel for all attention
    )
    if weights is None or not serves:
        return None
    keys, values = cache.extended(count)
    return x.wrap(decoding_step.layer_step(dense(x), weights, keys, values, known.eps))
