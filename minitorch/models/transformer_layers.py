"""The layers of a transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.problem.options import Options

from ..attention.approximate.choices import make_attention  # beyond module 5
from ..attention.approximate.support import Masked, key_mask_array, key_penalty
from ..attention.naive import naive_attention
from ..backends.operations import operation
from ..functions.base import check_tensor
from ..module import Module, Parameter
from ..modules_basic import Dropout, Linear
from ..tensor import Tensor
from ..tensors.extras import Methods
from ..tensors.factories import zeros
from .config import Config, configured
from .feed_forward import FeedForward, GatedFeedForward
from .kv_cache import LayerCache, check_cache
from .rotary import Rotate


class MultiHeadAttention(Module):
    """Multi-head self-attention; the options are those of :class:`minitorch.Config`.

    Raises:
        TypeError: For an unknown option, or if a required option is missing.
        ValueError: If the options do not fit each other, or the attention cannot be causal or drop
            weights.

    Source: Vaswani et al. (2017), section 3.2.2; Ainslie et al. (2023), GQA, for groups of heads; Jiang et
    al. (2023), Mistral 7B, for the window; the model card of gpt-oss (OpenAI, 2025) for the sinks.
    """

    @configured(
        "n_embd n_head", "causal p_dropout bias backend use_fused_kernel use_flash_attention",
        "attention attention_dropout attention_options n_kv_head head_dim rotary window sinks dtype",
    )  # fmt: skip
    def __init__(self, config: Config):
        super().__init__()
        c = config
        self.n_embd, self.n_head, self.n_kv_head = c.n_embd, c.n_head, c.kv_heads
        self.attn_hidden_dim, self.causal, self.window = c.head_size, c.causal, c.window
        self.attention_dropout, self.rotary = c.attention_dropout, c.rotary
        self.places: Callable[[int], Any] | None = None  # as of the model
        self.is_exact, self.shares_keys = c.is_exact, c.attention == "reformer"
        self.has_sinks = c.sinks
        # Zero: as if each position could also attend to a key that is orthogonal to its query.
        self.sink = Parameter(zeros((c.n_head,), c.backend, dtype=c.dtype)) if c.sinks else None
        self.attend: Any = Methods.flash_attention if c.attention == "flash" else naive_attention
        if not c.is_exact:  # beyond module 5
            masked = Masked(dropout_p=c.attention_dropout, is_causal=c.causal)
            options = c.attention_options or {}
            self.attend = make_attention(c.attention, options, masked, c.backend, c.dtype)
        q_width, kv_width = (heads * c.head_size for heads in (c.n_head, c.kv_heads))
        self.q_projection = Linear(c.n_embd, q_width, c.bias, c.backend, c.dtype)
        if not self.shares_keys:
            self.k_projection = Linear(c.n_embd, kv_width, c.bias, c.backend, c.dtype)
        self.v_projection = Linear(c.n_embd, kv_width, c.bias, c.backend, c.dtype)
        self.out_projection = Linear(q_width, c.n_embd, c.bias, c.backend, c.dtype)
        self.dropout = Dropout(c.p_dropout)

    def split_heads(self, x: Tensor) -> Tensor:
        """View (batch, seq, heads · head_dim) as (batch, heads, seq, head_dim)."""
        # TASK 5.10: View the width as (heads, head_dim); bring the heads before seq.
        batch, seq, width = x.shape
        heads = width // self.attn_hidden_dim  # of queries, or of keys and values
        return x.view(batch, seq, heads, self.attn_hidden_dim).permute(0, 2, 1, 3)
        # END TASK 5.10

    def turned(self, x: Tensor, cache: LayerCache | None) -> Tensor:
        """Rotate projected queries or keys, (batch, seq, heads · head_dim), if positions are rotary."""
        if self.rotary is None:
            return x
        batch, seq, width = x.shape
        heads = x.view(batch, seq, width // self.attn_hidden_dim, self.attn_hidden_dim)
        if self.places is not None:
            return Rotate.apply(heads, *self.rotary.turns(self.places(seq), x)).view(*x.shape)
        if cache is not None and cache.spot is not None and cache.spot.turns is not None:
            return Rotate.apply(heads, *cache.spot.turns).view(*x.shape)
        return self.rotary(heads, 0 if cache is None else cache.length).view(*x.shape)

    def packed(self, x: Tensor, cu_seqlens: Any) -> Tensor:  # beyond module 5
        """Attend within each of several packed sequences; see ``Tensor.flash_attention_varlen``."""
        if self.attend is not Methods.flash_attention or self.rotary is not None:
            raise ValueError(
                "packed sequences need flash attention and positions that the model adds; build the layer "
                "with attention='flash' and without rotary, or pad the sequences and pass key_mask"
            )
        total = x.shape[0] * x.shape[1]
        q, k, v = (
            project(x).view(total, project.out_size // self.attn_hidden_dim, self.attn_hidden_dim)
            for project in (self.q_projection, self.k_projection, self.v_projection)
        )  # (total, heads, head_dim)
        options: Options = {
            "is_causal": self.causal,
            "enable_gqa": self.n_kv_head != self.n_head,
            "dropout_p": self.attention_dropout if self.training else 0.0,
            "sink": None if self.sink is None else self.sink.value,
            "window_size": None if self.window is None else (self.window - 1, 0),
        }
        is_pair = isinstance(cu_seqlens, (tuple, list)) and np.ndim(cu_seqlens[0]) == 1
        sums = cu_seqlens if is_pair else (cu_seqlens, cu_seqlens)
        out = q.flash_attention_varlen(k, v, *sums, **options)
        joined = out.contiguous().view(*x.shape[:2], self.n_head * self.attn_hidden_dim)
        return self.dropout(self.out_projection(joined))

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, key_mask: Any = None, cu_seqlens: Any = None
    ) -> Tensor:  # fmt: skip
        """Compute self-attention over x; the result is (batch, seq, n_embd).

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
        check_tensor("input", x)
        if x.dims != 3 or x.shape[2] != self.n_embd:
            raise ValueError(
                f"attention needs (batch, seq, {self.n_embd}), got shape {x.shape}; change it with view"
            )
        check_cache(cache, LayerCache)
        if cu_seqlens is not None:  # beyond module 5
            if cache is not None or key_mask is not None or x.shape[0] != 1:
                raise ValueError(
                    "packed sequences need x of shape (1, total, n_embd), no cache and no key_mask, got "
                    f"shape {x.shape}; put the sequences one after the other, without padding"
                )
            return self.packed(x, cu_seqlens)
        # TASK 5.10: Project, split heads, attend, join heads, project; dropout_p only in training.
        q = self.split_heads(
            self.turned(self.q_projection(x), cache)
        )  # (batch, n_head, seq, head_dim)
        k = q  # (batch, n_kv_head, seq, head_dim)
        if not self.shares_keys:
            k = self.split_heads(self.turned(self.k_projection(x), cache))
        v = self.split_heads(self.v_projection(x))  # (batch, n_kv_head, seq, head_dim)
        options: Options = {"is_causal": self.causal}
        if self.n_kv_head != self.n_head:
            options["enable_gqa"] = True
        if self.sink is not None:
            options["sink"] = self.sink.value
        if self.window is not None and (cache is None or cache.spot is None):
            options["window_size"] = self.window - 1, 0  # else it is part of the mask at the spot
        if self.training:
            options["dropout_p"] = self.attention_dropout
        if key_mask is not None and self.is_exact:
            # A boolean mask makes naive attention build a matrix of penalties on the host.
            is_naive = self.attend is naive_attention
            options["attn_mask"] = (
                key_penalty(key_mask, k) if is_naive else key_mask_array(key_mask, k)[:, None, None]
            )  # (batch, 1, 1, seq)
        masked: dict[str, Any] = {} if self.is_exact else {"key_mask": key_mask}
        if cache is not None:
            if not self.is_exact or key_mask is not None:
                raise ValueError(
                    "a cache needs flash or naive attention, and no key_mask; build the layer with "
                    "attention='flash'"
                )
            if not self.causal:
                raise ValueError("a cache needs causal attention; build the layer with causal=True")
            options.update(cache.visible())
            q, (k, v) = q.detach(), cache.append(k, v)  # (batch, n_head, all so far, head_dim)
        out = self.attend(q, k, v, **options, **masked)  # (batch, n_head, seq, head_dim)
        width = self.n_head * self.attn_hidden_dim
        joined = out.permute(0, 2, 1, 3).contiguous().view(*x.shape[:2], width)
        result = self.dropout(self.out_projection(joined))
        return result if cache is None else result.detach()
        # END TASK 5.10


class TransformerLayer(Module):
    """Attention and a feed-forward network, each with a norm and a residual connection.

    The options are those of :class:`minitorch.Config`.
    """

    @configured(
        "n_embd n_head", "p_dropout ln_eps bias backend use_fused_kernel use_flash_attention",
        "attention attention_dropout attention_options causal middle_dim n_kv_head head_dim rotary window "
        "sinks norm feed_forward dtype norm_dtype norm_first",
    )  # fmt: skip
    def __init__(self, config: Config):
        super().__init__()
        self.norm_first = config.norm_first
        self.ln_1, self.ln_2 = config.make_norm(), config.make_norm()
        self.attention = MultiHeadAttention(config)
        make = GatedFeedForward if config.feed_forward == "swiglu" else FeedForward
        self.ff = make(config)

    @operation
    def forward(
        self, x: Tensor, cache: LayerCache | None = None, key_mask: Any = None, cu_seqlens: Any = None
    ) -> Tensor:  # fmt: skip
        """Apply the layer to x, (batch, seq, n_embd); arguments as in :class:`MultiHeadAttention`."""
        check_tensor("x", x)
        given = {"key_mask": key_mask, "cu_seqlens": cu_seqlens}
        masked = {name: value for name, value in given.items() if value is not None}
        if not self.norm_first:
            x = self.ln_1(x + self.attention(x, cache, **masked))
            x = self.ln_2(x + self.ff(x))
            return x if cache is None else x.detach()
        # TASK 5.10: Pre-norm: x + attention(ln_1(x)), then + ff(ln_2(x)).
        x = x + self.attention(self.ln_1(x), cache, **masked)
        x = x + self.ff(self.ln_2(x))
        return x if cache is None else x.detach()
        # END TASK 5.10
