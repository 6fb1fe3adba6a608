"""Attention in a context: a cache of keys and values, masked keys, or several packed sequences.

A layer is called as ``layer(x, cache)``, ``layer(x, key_mask=…)`` or ``layer(x, cu_seqlens=…)``.  While it
runs, its attention finds these arguments in ``modes.context``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from kernels.common.arguments import shown

from ..attention.approximate.support import key_mask_array, key_penalty
from ..attention.naive import naive_attention
from ..layers.checks import check_hidden
from ..module import Module
from ..scalars.modes import modes, no_grad
from ..tensor import Tensor
from .kv_cache import KVCache, LayerCache
from .rotary import Rotate


class CallContext(NamedTuple):
    """What a layer is given beside its input; see :meth:`InContext.__call__`."""

    cache: LayerCache | None = None
    key_mask: Any = None
    cu_seqlens: Any = None


class InContext(Module):
    """The base class of layers with attention, which may be called in a context."""

    def __call__(
        self, x: Tensor, cache: LayerCache | None = None, key_mask: Any = None, cu_seqlens: Any = None
    ) -> Tensor:  # fmt: skip
        """Apply the layer to x.

        Args:
            x: (batch, seq, n_embd).
            cache: Keys and values of the positions before x, which are attended to; those of x are
                appended.  The result is then a constant, because a cache has no gradient.
            key_mask: (batch, seq), or (1, seq) for all; False or 0 masks a position as a key.
            cu_seqlens: Cumulative lengths, (count + 1,), of the sequences that are packed in x, which is
                then (1, total, n_embd): a position attends within its own sequence.  A pair gives separate
                cumulative lengths for queries and for keys.

        Raises:
            ValueError: If the shape of x does not fit, the cache is full, or the layer with a cache is not
                causal: earlier positions would have to attend to x.  Also for a cache together with an
                approximation or a mask, and for packed sequences with a cache or a mask.
        """
        check_hidden(x, (self.attention or self).n_embd)
        if cache is None and key_mask is None and cu_seqlens is None:
            return super().__call__(x)
        check_cache(cache, LayerCache)
        if cu_seqlens is not None and (
            cache is not None or key_mask is not None or x.shape[0] != 1
        ):
            raise ValueError(
                "packed sequences need x of shape (1, total, n_embd), no cache and no key_mask, got "
                f"shape {x.shape}; put the sequences one after the other, without padding"
            )
        before, modes.context = modes.context, CallContext(cache, key_mask, cu_seqlens)
        try:
            with nullcontext() if cache is None else no_grad():
                return super().__call__(x)
        finally:
            modes.context = before


def check_cache(cache: Any, kind: type[Any]) -> None:
    """Check that ``cache`` is None or a cache of a given class.

    Raises:
        TypeError: If it is something else.
    """
    if cache is not None and not isinstance(cache, kind):
        raise TypeError(
            f"cache must be a {kind.__name__} or None, got {shown(cache)}; use DecoderLM.make_cache"
        )


def attended(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention in each head as a layer's variant and the context say.

    Args:
        layer: A :class:`minitorch.MultiHeadAttention`.
        q: (batch, n_head, seq, head_dim).
        k: (batch, n_kv_head, seq, head_dim); ``q`` itself if the layer shares them.
        v: (batch, n_kv_head, seq, head_dim).
    """
    cache, key_mask, cu_seqlens = modes.context or CallContext()
    options: dict[str, Any] = {"is_causal": layer.causal}
    if layer.n_kv_head != layer.n_head:
        options["enable_gqa"] = True
    if layer.sink is not None:
        options["sink"] = layer.sink.value
    if layer.window is not None:
        options["window_size"] = layer.window - 1, 0
    if layer.training:
        options["dropout_p"] = layer.attention_dropout
    if cu_seqlens is not None:
        return _packed(layer, (q, k, v), cu_seqlens, options)
    if layer.rotary is not None:
        own = _rotated(layer, q, cache)
        q, k = own, own if k is q else _rotated(layer, k, cache)
    if key_mask is not None and not layer.is_exact:
        options["key_mask"] = key_mask
    elif key_mask is not None:
        # A boolean mask makes naive attention build a matrix of penalties on the host.
        is_naive = layer.attend is naive_attention
        options["attn_mask"] = (
            key_penalty(key_mask, k) if is_naive else key_mask_array(key_mask, k)[:, None, None]
        )  # (batch, 1, 1, seq)
    if cache is not None:
        if not layer.is_exact or key_mask is not None:
            raise ValueError(
                "a cache needs flash or naive attention, and no key_mask; build the layer with "
                "attention='flash'"
            )
        if not layer.causal:
            raise ValueError("a cache needs causal attention; build the layer with causal=True")
        return cache.attend(layer.attend, q, k, v, options)
    return layer.attend(q, k, v, **options)


def _rotated(layer: Any, x: Tensor, cache: LayerCache | None) -> Tensor:
    """Rotate queries or keys, (batch, heads, seq, head_dim), by their positions."""
    x = x.permute(0, 2, 1, 3)  # the layout that the projection has written
    if layer.places is not None:
        x = Rotate.apply(x, *layer.rotary.turns(layer.places(x.shape[1]), x))
    else:
        x = layer.rotary(x, 0) if cache is None else cache.rotated(layer.rotary, x)
    return x.permute(0, 2, 1, 3)


def _packed(layer: Any, operands: tuple[Tensor, ...], cu_seqlens: Any, options: Any) -> Tensor:
    """Attend within each of several packed sequences; see ``Tensor.flash_attention_varlen``."""
    if layer.attend is not Tensor.flash_attention or layer.rotary is not None:
        raise ValueError(
            "packed sequences need flash attention and positions that the model adds; build the layer "
            "with attention='flash' and without rotary, or pad the sequences and pass key_mask"
        )
    q, k, v = (x.permute(0, 2, 1, 3).view(x.shape[2], x.shape[1], x.shape[3]) for x in operands)
    is_pair = isinstance(cu_seqlens, (tuple, list)) and np.ndim(cu_seqlens[0]) == 1
    sums = cu_seqlens if is_pair else (cu_seqlens, cu_seqlens)
    out = q.flash_attention_varlen(k, v, *sums, **options).contiguous()
    return out.view(1, *out.shape).permute(0, 2, 1, 3)


def hidden_after(model: Any, idx: Any, cache: KVCache) -> Tensor:
    """Return ``DecoderLM.hidden`` of tokens whose keys and values are appended to a cache, a constant.

    Raises:
        ValueError: If the ids exceed the context or the cache, or the cache is another model's.
    """
    check_cache(cache, KVCache)
    count = cache.start(model, idx)
    with no_grad():
        x = model.embedded(idx, cache.layers[0].positions(count))
        for name, layer_cache in zip(model.layer_names, cache.layers, strict=True):
            x = getattr(model, name)(x, layer_cache)  # (batch, seq, n_embd)
        return model.ln(x)
