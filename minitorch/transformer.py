"""The transformer as the papers draw it: attention, a layer, and a decoder-only language model.

Variants and further ways to call a model are in ``models``: options of layers in ``variants``, caches,
masks and packed sequences in ``contexts``, and ``text_generation``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial  # beyond module 5
from typing import Any

import numpy as np

from kernels.common.arguments import flag

from .attention.naive import naive_attention
from .backends.matmul_precision import in_own_precision  # beyond module 5
from .backends.operations import operation  # beyond module 5
from .layers.checks import check_hidden, check_ids
from .layers.indices import kept_range
from .layers.linear_cross_entropy import linear_cross_entropy
from .models.config import Config, configured
from .models.contexts import InContext, attended, hidden_after  # beyond module 5
from .models.feed_forward import FeedForward as FeedForward
from .models.feed_forward import GatedFeedForward as GatedFeedForward  # beyond module 5
from .models.feed_forward import make_feed_forward
from .models.kv_cache import KVCache  # beyond module 5
from .models.rotary import with_rotary  # beyond module 5
from .models.text_generation import TextGeneration
from .models.variants import set_variants  # beyond module 5
from .module import Module
from .modules_basic import Dropout, Embedding, Linear
from .scalars.modes import modes, no_grad  # beyond module 5
from .tensor import Tensor
from .training.recompute import checkpoint  # beyond module 5

#: Standard deviation of a language model's initial embeddings.  The character GPT learns later with GPT-2's
#: 0.02.  A table that also scores the tokens must not start with large scores.
EMBEDDING_STD, TIED_EMBEDDING_STD = 0.3, 0.02


class MultiHeadAttention(
    InContext,  # beyond module 5
    Module,
):
    """Multi-head self-attention; the options are those of :class:`minitorch.Config`.

    Source: Vaswani et al. (2017), section 3.2.2.
    """

    @configured(
        "n_embd n_head", "causal p_dropout bias backend use_fused_kernel use_flash_attention",
        "attention attention_dropout dtype "
        "attention_options n_kv_head head_dim rotary window sinks",  # beyond module 5
    )  # fmt: skip
    def __init__(self, config: Config):
        super().__init__()
        c = config
        self.n_embd, self.n_head, self.attn_hidden_dim = c.n_embd, c.n_head, c.head_size
        self.causal, self.attention_dropout = c.causal, c.attention_dropout
        self.attend: Any = Tensor.flash_attention if c.attention == "flash" else naive_attention
        set_variants(self, c)  # beyond module 5
        q_width, kv_width = c.n_head * c.head_size, c.kv_heads * c.head_size
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

    @operation  # beyond module 5
    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each (batch, heads, seq, head_dim), of x, (batch, seq, n_embd)."""
        # TASK 5.10: Apply the three projections and split_heads; without a k_projection, k is q.
        q = self.split_heads(self.q_projection(x))
        k = q if self.k_projection is None else self.split_heads(self.k_projection(x))
        return q, k, self.split_heads(self.v_projection(x))
        # END TASK 5.10

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention in each head, for operands (batch, heads, seq, head_dim)."""
        if modes.context is not None or not self.is_plain:  # beyond module 5
            return attended(self, q, k, v)
        dropout_p = self.attention_dropout if self.training else 0.0
        return self.attend(q, k, v, is_causal=self.causal, dropout_p=dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        """Compute self-attention over x, (batch, seq, n_embd); the result has the same shape."""
        check_hidden(x, self.n_embd)
        # TASK 5.10: Call projected and attended, join heads, project; dropout.
        out = self.attended(*self.projected(x))  # (batch, heads, seq, head_dim)
        width = self.n_head * self.attn_hidden_dim
        joined = out.permute(0, 2, 1, 3).contiguous().view(*x.shape[:2], width)
        return self.dropout(self.out_projection(joined))
        # END TASK 5.10


class TransformerLayer(
    InContext,  # beyond module 5
    Module,
):
    """Attention and a feed-forward network, each with a norm and a residual connection.

    The options are those of :class:`minitorch.Config`.
    """

    @configured(
        "n_embd n_head", "p_dropout ln_eps bias backend use_fused_kernel use_flash_attention",
        "attention attention_dropout causal middle_dim dtype "
        "attention_options n_kv_head head_dim rotary window sinks "  # beyond module 5
        "norm feed_forward norm_dtype norm_first",  # beyond module 5
    )  # fmt: skip
    def __init__(self, config: Config):
        super().__init__()
        self.norm_first = config.norm_first  # beyond module 5
        self.ln_1, self.ln_2 = config.make_norm(), config.make_norm()
        self.attention = MultiHeadAttention(config)
        self.ff = make_feed_forward(config)

    @operation  # beyond module 5
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x, (batch, seq, n_embd); the result has the same shape."""
        if not self.norm_first:  # beyond module 5
            x = self.ln_1(x + self.attention(x))
            return self.ln_2(x + self.ff(x))
        # TASK 5.10: Pre-norm: x + attention(ln_1(x)), then + ff(ln_2(x)).
        x = x + self.attention(self.ln_1(x))
        return x + self.ff(self.ln_2(x))
        # END TASK 5.10


class DecoderLM(TextGeneration):
    """A decoder-only language model: embeddings, transformer layers, and logits of the next token.

    The default structure is that of GPT-2.  For the structure of Llama, pass ``rotary_theta``,
    ``norm="rms"``, ``feed_forward="swiglu"``, ``bias=False`` and often ``n_kv_head``. Further options are
    those of :class:`minitorch.Config`.

    Args:
        tie_weights: Compute the logits with the embedding table instead of a separate layer.
        head_bias: Whether the separate layer has a bias, if the other linear layers have one.
        rotary_theta: Base of the frequencies of rotary positions, such as 10,000; None for learned position
            embeddings.
        rotary_scaling: Change of these frequencies for long contexts; see
            :class:`minitorch.Rotary`.

    Attributes:
        precision: The :class:`minitorch.Precision` of the model, or None.
        rotary: The rotary positions of all layers, or None.
        places: If the model reads only a part of each sequence, a function from the number of tokens to
            their positions in the whole sequence; None if the tokens start at position 0.
        eos_token_id: The token that ends a text, or None; :meth:`from_pretrained` sets it.

    Raises:
        ValueError: For a scaling without rotary positions, and as for the Config.
    """

    @configured(
        "n_vocab n_embd n_head n_positions",
        "p_dropout ln_eps bias backend use_fused_kernel use_flash_attention",
        "n_layer attention attention_dropout middle_dim dtype "
        "attention_options n_kv_head head_dim window sinks "  # beyond module 5
        "norm feed_forward precision recompute",  # beyond module 5
    )
    def __init__(
        self,
        config: Config,
        tie_weights: bool = False,
        head_bias: bool = True,
        rotary_theta: float | None = None,  # beyond module 5
        rotary_scaling: Mapping[str, Any] | None = None,  # beyond module 5
    ):
        super().__init__()
        c = config
        c = with_rotary(c, rotary_theta, rotary_scaling)  # beyond module 5
        self.rotary, self.window = c.rotary, c.window  # beyond module 5
        self.precision, self.recompute = c.policy, c.recompute  # beyond module 5
        self.places: Callable[[int], Any] | None = None  # beyond module 5
        self.n_vocab, self.n_embd, self.n_positions = c.n_vocab, c.n_embd, c.n_positions
        self.n_head, self.backend = c.n_head, c.backend
        std = TIED_EMBEDDING_STD if flag("tie_weights", tie_weights) else EMBEDDING_STD
        self.token_embeddings = Embedding(c.n_vocab, c.n_embd, c.backend, c.dtype, std)
        self.position_embeddings: Any = None  # an Embedding, unless positions are rotary
        if self.rotary is None:
            self.position_embeddings = Embedding(c.n_positions, c.n_embd, c.backend, c.dtype, std)
        self.layer_names = [f"t_layer_{i + 1}" for i in range(c.n_layer)]
        for name in self.layer_names:
            setattr(self, name, TransformerLayer(c))
        self.dropout = Dropout(c.p_dropout)
        self.ln = c.make_norm()
        self.lm_head = None
        if not tie_weights:
            has_bias = c.bias and flag("head_bias", head_bias)
            self.lm_head = Linear(c.n_embd, c.n_vocab, has_bias, c.backend, c.dtype)
        self.eos_token_id: int | None = None

    def forward(
        self,
        idx: Any,
        cache: KVCache | None = None,  # beyond module 5
    ) -> Tensor:
        """Return the logits of the next token at every position, (batch, seq, n_vocab).

        ``idx`` are (batch, seq) token ids, a tensor or an integer array; seq <= n_positions.
        """
        if cache is not None:  # beyond module 5
            with no_grad():
                return self.score(self.hidden(idx, cache))
        return self.score(self.hidden(idx))

    @in_own_precision  # beyond module 5
    def hidden(
        self,
        idx: Any,
        cache: KVCache | None = None,  # beyond module 5
    ) -> Tensor:
        """Return the output of the last norm, (batch, seq, n_embd), for (batch, seq) token ids."""
        if cache is not None:  # beyond module 5
            return hidden_after(self, idx, cache)
        x = self.embedded(idx, kept_range(0, check_ids(self, idx)))
        return self.through_layers(x)

    def embedded(self, idx: Any, places: Any) -> Tensor:
        """Return the embeddings of tokens at some positions, (batch, seq, n_embd), after dropout."""
        x = self.token_embeddings(idx)  # (batch, seq, n_embd)
        if self.places is not None:  # beyond module 5
            places = self.places(x.shape[1])
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(places)  # (seq, n_embd)
        return self.dropout(x)

    @operation  # beyond module 5
    def through_layers(self, x: Tensor) -> Tensor:
        """Apply the layers and the last norm to (batch, seq, n_embd)."""
        for name in self.layer_names:
            layer = getattr(self, name)
            if self.recompute:  # beyond module 5
                layer = partial(checkpoint, layer)
            x = layer(x)  # (batch, seq, n_embd)
        return self.ln(x)

    @in_own_precision  # beyond module 5
    def score(self, x: Tensor) -> Tensor:
        """Return the logits, (batch, seq, n_vocab), for a result of :meth:`hidden`."""
        if self.lm_head is not None:
            return self.lm_head(x)  # (batch, seq, n_vocab)
        batch, seq, _ = x.shape
        logits = x.view(batch * seq, self.n_embd) @ self.head_weights()[0]
        return logits.view(batch, seq, self.n_vocab)

    def head_weights(self) -> tuple[Tensor, Tensor | None]:
        """Return the weights of the logits, (n_embd, n_vocab), and their bias, (n_vocab,) or None."""
        head = self.lm_head
        if head is None:
            return self.token_embeddings.weights.value.permute(1, 0), None
        return head.weights.value, None if head.bias is None else head.bias.value

    @in_own_precision  # beyond module 5
    def loss(self, idx: Any, targets: Any) -> Tensor:
        """Return the mean cross entropy in nats per token, of shape (1,).

        Args:
            idx: (batch, seq) token ids.
            targets: (batch, seq) ids of the tokens that follow, an integer array.
        """
        # TASK 5.10: Hidden states as (batch · seq, n_embd); linear_cross_entropy scores and judges them.
        hidden = self.hidden(idx)
        rows = hidden.view(hidden.size // self.n_embd, self.n_embd)
        weights, bias = self.head_weights()
        return linear_cross_entropy(rows, weights, np.asarray(targets).reshape(-1), bias)
        # END TASK 5.10
