"""Options of layers that GPT-2 does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from kernels.common.arguments import flag, one_of, shown, whole

from ..attention.approximate.choices import APPROXIMATIONS, make_attention
from ..attention.approximate.support import Masked
from ..backends.matmul_precision import Precision, find_precision
from ..layers.rms_norm import RMSNorm
from ..module import Parameter
from ..modules_basic import LayerNorm1d
from ..tensors.factories import zeros
from .rotary import Rotary

#: Norms by name, GPT-2's and Llama's.
NORMS: dict[str, type[LayerNorm1d] | type[RMSNorm]] = {"layer": LayerNorm1d, "rms": RMSNorm}
FEED_FORWARDS = ("gelu", "swiglu")


@dataclass(frozen=True, kw_only=True)
class Variants:
    """Options of a :class:`minitorch.Config`, given by name, of models that differ from GPT-2.

    Args:
        attention_options: Options of an approximation, by name, such as ``{"num_features": 128}``.
        n_kv_head: Number of heads of keys and values, a divisor of n_head; each of them is used by
            a group of query heads. n_head when None. A smaller number needs flash or naive
            attention.
        head_dim: Size of a head; n_embd / n_head when None.
        rotary: Rotary positions, which rotate queries and keys; None if the model adds position
            embeddings.
        window: Number of positions that a position attends to, itself and those just before it, as in
            Mistral; None for no limit.
        sinks: Whether each head learns a logit that only the softmax's denominator contains, so that a
            position may attend to nothing, as in gpt-oss.
        norm: "layer", :class:`minitorch.LayerNorm1d`; or "rms", :class:`minitorch.RMSNorm`.
        feed_forward: "gelu", :class:`FeedForward`; or "swiglu", :class:`GatedFeedForward`.
        norm_first: True places the norms before the two branches, as in GPT-2; False places them
            after the residual connections, as in BERT.
        norm_dtype: Dtype of the parameters of the norms; ``dtype`` when None.
        precision: "float32", "tf32" or "bfloat16", instead of a dtype: the formats in which a whole model
            stores, multiplies and sums; see :class:`minitorch.Precision`.
        recompute: Keep only the inputs of the layers for the backward pass, and recompute the rest; see
            :func:`minitorch.checkpoint`.

    Raises:
        TypeError: If an option has the wrong type, or there are ``attention_options`` without an
            approximation.
        ValueError: If a size is below 1, n_kv_head does not divide n_head, there is no such norm,
            feed-forward network or precision, or a dtype is given besides a precision; also for groups of
            heads, a window or sinks with an approximation, and for a window without ``causal``.

    Source: Ainslie et al. (2023), GQA, for groups of heads; Jiang et al. (2023), Mistral 7B, for the
    window; the model card of gpt-oss (OpenAI, 2025) for the sinks.
    """

    attention_options: Mapping[str, Any] | None = None
    n_kv_head: int | None = None
    head_dim: int | None = None
    rotary: Rotary | None = None
    window: int | None = None
    sinks: bool = False
    norm: str = "layer"
    feed_forward: str = "gelu"
    norm_first: bool = True
    norm_dtype: npt.DTypeLike | None = None
    precision: str | None = None
    recompute: bool = False

    def checked_variants(self, attention: str) -> dict[str, Any]:
        """Check these options beside those of the Config, and return their values."""
        c: Any = self
        sizes = (
            name for name in ("n_kv_head", "head_dim", "window") if vars(self)[name] is not None
        )
        kept: dict[str, Any] = {name: whole(name, vars(self)[name], 1) for name in sizes}
        for name in ("sinks", "norm_first", "recompute"):
            kept[name] = flag(name, vars(self)[name])
        kept["norm"] = one_of("norm", self.norm, NORMS)
        kept["feed_forward"] = one_of("feed_forward", self.feed_forward, FEED_FORWARDS)
        if (own := self.policy) is not None:
            is_own = c.dtype is own.dtype and self.norm_dtype is own.norms  # of a copy
            if c.dtype is not None and not is_own:
                raise ValueError(
                    f"precision={self.precision!r} determines the dtype of the parameters, got "
                    f"dtype={shown(c.dtype)} as well; leave one of them out"
                )
            kept |= {"dtype": own.dtype, "norm_dtype": own.norms}
        groups = c.n_head if self.n_kv_head is None else self.n_kv_head
        if c.n_head % groups:
            raise ValueError(
                f"n_kv_head must divide n_head, got {groups} and {c.n_head}; each head of keys and values "
                "serves equally many query heads"
            )
        if not isinstance(self.attention_options, (Mapping, type(None))):
            raise TypeError(
                f"attention_options must be a dict or None, got {shown(self.attention_options)}"
            )
        if self.window is not None and not c.causal:
            raise ValueError("a window needs causal attention; build the layer with causal=True")
        if attention not in APPROXIMATIONS:
            if self.attention_options:
                raise TypeError(
                    f"attention_options belong to the approximations {APPROXIMATIONS}, and this attention "
                    f"is {attention}; leave them out"
                )
        elif groups != c.n_head or self.sinks or self.window is not None:
            raise ValueError(
                f"groups of heads, window and sinks need attention 'flash' or 'naive', got {attention!r}; "
                "leave them out (the window of 'local' is one of its attention_options)"
            )
        return kept

    @property
    def policy(self) -> Precision | None:
        """The policy that ``precision`` names."""
        return None if self.precision is None else find_precision(self.precision)

    def make_other_norm(self) -> LayerNorm1d | RMSNorm:
        """Return a new norm of any kind and dtype."""
        c: Any = self
        dtype = c.dtype if self.norm_dtype is None else self.norm_dtype
        return NORMS[self.norm](c.n_embd, c.ln_eps, c.backend, dtype)


def set_variants(layer: Any, config: Any) -> None:
    """Give an attention layer the attributes of its variant.

    Args:
        layer: A :class:`minitorch.MultiHeadAttention` without its projections.
        config: A :class:`minitorch.Config`.
    """
    c = config
    layer.n_kv_head, layer.rotary, layer.window = c.kv_heads, c.rotary, c.window
    layer.is_exact, layer.shares_keys = c.attention not in APPROXIMATIONS, c.attention == "reformer"
    layer.places = None  # a function, as of DecoderLM
    layer.has_sinks = c.sinks
    # Zero: as if each position could also attend to a key that is orthogonal to its query.
    layer.sink = Parameter(zeros((c.n_head,), c.backend, dtype=c.dtype)) if c.sinks else None
    if not layer.is_exact:
        masked = Masked(dropout_p=c.attention_dropout, is_causal=c.causal)
        options = c.attention_options or {}
        layer.attend = make_attention(c.attention, options, masked, c.backend, c.dtype)
    layer.is_plain = (
        c.kv_heads == c.n_head and c.rotary is None and c.window is None and not c.sinks
    )
