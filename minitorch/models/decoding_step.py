"""One decoding step through a whole transformer layer in one kernel, for layers of the known structure."""

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


def summed(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y as a constant, on the calling thread: waking others takes longer than so small a sum.

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
        heads: Number of heads of the layer.
        x: (batch, count, n_embd), a small tensor on the fast backend.
        cache: Keys and values of the previous positions, on the fast backend; the new ones are appended.

    Returns:
        (batch, count, n_embd), a constant; or None, with the cache unchanged.
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
        and not os.environ.get(RUNG_VARIABLE)  # it selects a kernel for all attention
    )
    if weights is None or not serves:
        return None
    keys, values = cache.extended(count)
    return x.wrap(decoding_step.layer_step(dense(x), weights, keys, values, known.eps))
