"""The layers of a transformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import flag, not_negative, one_of, shown, whole
from kernels.problem.options import Options

from ..attention.approximate.choices import APPROXIMATIONS, make_attention
from ..attention.approximate.support import Masked, key_mask_array, key_penalty
from ..attention.naive import naive_attention
from ..backends.operations import operation
from ..functions.base import check_tensor
from ..module import Module, Parameter
from ..modules_basic import Dropout, LayerNorm1d, Linear, RMSNorm
from ..nn import switch
from ..tensor import Tensor
from ..tensor_ops import SimpleBackend, TensorBackend
from ..tensors.factories import zeros
from .feed_forward import FeedForward, GatedFeedForward
from .kv_cache import LayerCache, check_cache
from .rotary import Rotary, Rotate

ATTENTIONS = ("flash", "naive", *APPROXIMATIONS)
#: Norms by name, GPT-2's and Llama's.
NORMS: dict[str, type[LayerNorm1d] | type[RMSNorm]] = {"layer": LayerNorm1d, "rms": RMSNorm}
FEED_FORWARDS = ("gelu", "swiglu")


class MultiHeadAttention(Module):
    """Multi-head self-attention.

    Args:
        n_embd: Width of the model, a multiple of n_head unless ``head_dim`` is given.
        n_head: Number of heads.
        causal: Whether a position attends only to itself and earlier positions.
        p_dropout: Dropout probability of the projected output.
        bias: Whether the projections have a bias.
        backend: Backend of the parameters.
        attention: "flash", the fused kernel; "naive", composed of tensor operations; or an approximation:
            "linformer", "linear", "performer", "local", "reformer", "smyrf" or "block_sparse"; see
            :mod:`minitorch.attention`.
        use_flash_attention: The published course's flag; True selects "flash".
        use_fused_kernel: Ignored; for code of the published course.  Softmax is fused if possible.
        attention_dropout: Dropout probability of the attention weights, in training.
        attention_options: Options of an approximation, by name, such as ``{"num_features": 128}``.
        n_kv_head: Number of heads of keys and values, a divisor of n_head; each of them is used by
            a group of query heads. n_head when None. A smaller number needs flash or naive
            attention.
        head_dim: Size of a head; n_embd / n_head when None.
        rotary: Rotary positions, which rotate queries and keys; None if the model adds position
            embeddings.
        window: Number of positions that a position attends to, itself and those just before it; None for
            no limit.
        sinks: Whether each head learns a logit that only the softmax's denominator contains, so that a
            position may attend to nothing.
        dtype: Dtype of the parameters; the default dtype when None.

    Raises:
        TypeError: For an unknown option, or if a required option is missing.
        ValueError: If n_head does not divide n_embd, n_kv_head does not divide n_head, or the attention
            cannot be causal, drop attention weights, or have groups of heads; also for a window or sinks
            with an approximation, and for a window without ``causal``.

    Source: Vaswani et al. (2017), section 3.2.2; Ainslie et al. (2023), GQA, for groups of heads; Jiang et
    al. (2023), Mistral 7B, for the window; the model card of gpt-oss (OpenAI, 2025) for the sinks.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        causal: bool = True,
        p_dropout: float = 0.1,
        bias: bool = True,
        backend: TensorBackend | None = None,
        use_fused_kernel: bool = False,
        use_flash_attention: bool = False,
        *,
        attention: str = "flash",
        attention_dropout: float = 0.0,
        attention_options: Mapping[str, Any] | None = None,
        n_kv_head: int | None = None,
        head_dim: int | None = None,
        rotary: Rotary | None = None,
        window: int | None = None,
        sinks: bool = False,
        dtype: npt.DTypeLike | None = None,
    ):
        super().__init__()
        backend = backend or SimpleBackend
        uneven = whole("n_embd", n_embd, 1) % whole("n_head", n_head, 1) != 0
        if head_dim is None and uneven:
            raise ValueError(
                f"n_embd must be a multiple of n_head, got {n_embd} and {n_head}; each head has an "
                "equal share of the width"
            )
        one_of("attention", attention, ATTENTIONS)
        self.n_embd, self.n_head, self.causal = n_embd, n_head, switch("causal", causal)
        self.attention_dropout = not_negative(
            "attention_dropout", attention_dropout, 1.0, "; 0 turns dropout off"
        )
        self.attn_hidden_dim = whole(
            "head_dim", n_embd // n_head if head_dim is None else head_dim, 1
        )
        self.n_kv_head = whole("n_kv_head", n_head if n_kv_head is None else n_kv_head, 1)
        if n_head % self.n_kv_head:
            raise ValueError(
                f"n_kv_head must divide n_head, got {n_kv_head} and {n_head}; each head of keys and values "
                "serves equally many query heads"
            )
        self.rotary = rotary
        self.places: Callable[[int], Any] | None = None  # as of the model
        flash = use_flash_attention or attention == "flash"
        options = {} if attention_options is None else attention_options
        if not isinstance(options, Mapping):
            raise TypeError(f"attention_options must be a dict or None, got {shown(options)}")
        self.is_exact = flash or attention == "naive"
        self.shares_keys = not flash and attention == "reformer"
        if not self.is_exact and self.n_kv_head != n_head:
            raise ValueError(
                f"groups of heads need attention 'flash' or 'naive', got {attention!r} and n_kv_head "
                f"{n_kv_head}; leave n_kv_head out"
            )
        self.window = None if window is None else whole("window", window, 1)
        if not self.is_exact and (sinks or window is not None):
            raise ValueError(
                f"window and sinks need attention 'flash' or 'naive', got {attention!r}; leave them out "
                "(the window of 'local' is one of its attention_options)"
            )
        if window is not None and not causal:
            raise ValueError("a window needs causal attention; build the layer with causal=True")
        # Zero: as if each position could also attend to a key that is orthogonal to its query.
        self.sink = (
            Parameter(zeros((n_head,), backend, dtype=dtype)) if flag("sinks", sinks) else None
        )
        self.attend: Any
        if not self.is_exact:
            masked = Masked(dropout_p=attention_dropout, is_causal=causal)
            self.attend = make_attention(attention, options, masked, backend, dtype)
        elif options:
            raise TypeError(
                f"attention_options belong to the approximations {APPROXIMATIONS}, and this attention is "
                f"{'flash' if flash else attention}; leave them out"
            )
        else:
            self.attend = Tensor.flash_attention if flash else naive_attention
        q_width, kv_width = (heads * self.attn_hidden_dim for heads in (n_head, self.n_kv_head))
        self.q_projection = Linear(n_embd, q_width, bias, backend, dtype)
        if not self.shares_keys:
            self.k_projection = Linear(n_embd, kv_width, bias, backend, dtype)
        self.v_projection = Linear(n_embd, kv_width, bias, backend, dtype)
        self.out_projection = Linear(q_width, n_embd, bias, backend, dtype)
        self.dropout = Dropout(p_dropout)

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

    def packed(self, x: Tensor, cu_seqlens: Any) -> Tensor:
        """Attend within each of several packed sequences; see ``Tensor.flash_attention_varlen``."""
        if self.attend is not Tensor.flash_attention or self.rotary is not None:
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
        if cu_seqlens is not None:
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

    Args:
        n_embd: Width of the model.
        n_head: Number of heads.
        p_dropout: Dropout probability of the output of both branches.
        ln_eps: Added to the variance, or to the mean square, by the norms.
        bias: Whether the linear layers have a bias.
        backend: Backend of the parameters.
        use_fused_kernel: Accepted for code of the published course and ignored.
        use_flash_attention: The published course's flag; True selects "flash".
        attention: "flash", "naive" or an approximation; see :class:`MultiHeadAttention`.
        attention_dropout: Dropout probability of the attention weights, in training.
        attention_options: Options of an approximation, by name.
        causal: Whether a position attends only to itself and earlier positions.
        middle_dim: Width of the feed-forward network.
        n_kv_head: Number of heads of keys and values; see :class:`MultiHeadAttention`.
        head_dim: Size of a head; see :class:`MultiHeadAttention`.
        rotary: Rotary positions, or None.
        window: Number of positions that a position attends to; see :class:`MultiHeadAttention`.
        sinks: Whether each head learns a sink; see :class:`MultiHeadAttention`.
        norm: "layer", :class:`minitorch.LayerNorm1d`; or "rms", :class:`minitorch.RMSNorm`.
        feed_forward: "gelu", :class:`FeedForward`; or "swiglu", :class:`GatedFeedForward`.
        dtype: Dtype of the parameters; the default dtype when None.
        norm_dtype: Dtype of the parameters of the norms; ``dtype`` when None.
        norm_first: True places the norms before the two branches, as in GPT-2; False places them
            after the residual connections, as in BERT.

    Raises:
        ValueError: For an unknown norm or feed-forward network; see also :class:`MultiHeadAttention`.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        p_dropout: float = 0.1,
        ln_eps: float = 1e-5,
        bias: bool = True,
        backend: TensorBackend | None = None,
        use_fused_kernel: bool = False,
        use_flash_attention: bool = False,
        *,
        attention: str = "flash",
        attention_dropout: float = 0.0,
        attention_options: Mapping[str, Any] | None = None,
        causal: bool = True,
        middle_dim: int = 256,
        n_kv_head: int | None = None,
        head_dim: int | None = None,
        rotary: Rotary | None = None,
        window: int | None = None,
        sinks: bool = False,
        norm: str = "layer",
        feed_forward: str = "gelu",
        dtype: npt.DTypeLike | None = None,
        norm_dtype: npt.DTypeLike | None = None,
        norm_first: bool = True,
    ):
        super().__init__()
        backend = backend or SimpleBackend
        self.norm_first = flag("norm_first", norm_first)
        make_norm = NORMS[one_of("norm", norm, NORMS)]
        self.ln_1 = make_norm(n_embd, ln_eps, backend, dtype if norm_dtype is None else norm_dtype)
        self.ln_2 = make_norm(n_embd, ln_eps, backend, dtype if norm_dtype is None else norm_dtype)
        self.attention = MultiHeadAttention(
            n_embd, n_head, causal, p_dropout, bias, backend, use_fused_kernel, use_flash_attention,
            attention=attention, attention_dropout=attention_dropout,
            attention_options=attention_options, n_kv_head=n_kv_head, head_dim=head_dim, rotary=rotary,
            window=window, sinks=sinks, dtype=dtype,
        )  # fmt: skip
        is_gated = one_of("feed_forward", feed_forward, FEED_FORWARDS) == "swiglu"
        make = GatedFeedForward if is_gated else FeedForward
        self.ff = make(n_embd, middle_dim, p_dropout, bias, backend, dtype)

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
