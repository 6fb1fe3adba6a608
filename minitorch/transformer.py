"""A decoder-only transformer language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kernels.common.arguments import flag, shape_of

from .backends.matmul_precision import in_own_precision
from .backends.operations import operation
from .layers.linear_cross_entropy import linear_cross_entropy
from .models.config import Config, configured
from .models.feed_forward import FeedForward as FeedForward
from .models.feed_forward import GatedFeedForward as GatedFeedForward
from .models.kv_cache import KVCache, LayerCache, check_cache
from .models.positions import kept_range
from .models.rotary import Rotary
from .models.text_generation import TextGeneration
from .models.transformer_layers import MultiHeadAttention as MultiHeadAttention
from .models.transformer_layers import TransformerLayer as TransformerLayer
from .modules_basic import Dropout, Embedding, Linear
from .scalars.modes import is_recording, no_grad
from .tensor import Tensor
from .training.recompute import checkpoint

#: Standard deviation of a language model's initial embeddings.  The character GPT learns later with GPT-2's
#: 0.02.  A table that also scores the tokens must not start with large scores.
EMBEDDING_STD, TIED_EMBEDDING_STD = 0.3, 0.02


class DecoderLM(TextGeneration):
    """A decoder-only language model: embeddings, transformer layers, and logits of the next token.

    Without options, it has the structure of GPT-2. For the structure of Llama, pass
    ``rotary_theta``, ``norm="rms"``, ``feed_forward="swiglu"``, ``bias=False`` and often
    ``n_kv_head``. Further options are those of :class:`minitorch.Config`.

    Args:
        tie_weights: Compute the logits with the embedding table instead of a separate layer.
        head_bias: Whether the separate layer has a bias, if the other linear layers have one.
        rotary_theta: Base of the frequencies of rotary positions, such as 10,000; None for learned position
            embeddings.
        rotary_scaling: Change of these frequencies for long contexts; see
            :class:`minitorch.Rotary`.

    Attributes:
        precision: The policy, or None.
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
        "n_layer attention attention_dropout attention_options middle_dim n_kv_head head_dim window sinks "
        "norm feed_forward dtype precision recompute",
    )
    def __init__(
        self, config: Config, tie_weights: bool = False, head_bias: bool = True,
        rotary_theta: float | None = None, rotary_scaling: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        super().__init__()
        c = config
        self.precision, self.recompute, self.backend = c.policy, c.recompute, c.backend
        self.n_vocab, self.n_embd, self.n_positions = c.n_vocab, c.n_embd, c.n_positions
        self.n_head, self.window = c.n_head, c.window
        std = TIED_EMBEDDING_STD if flag("tie_weights", tie_weights) else EMBEDDING_STD
        self.token_embeddings = Embedding(c.n_vocab, c.n_embd, c.backend, c.dtype, std)
        self.position_embeddings: Any = None  # an Embedding, unless positions are rotary
        self.rotary = c.rotary
        if rotary_theta is not None:
            self.rotary = Rotary(c.head_size, c.n_positions, rotary_theta, rotary_scaling)
            c = replace(c, rotary=self.rotary)
        elif rotary_scaling is not None:
            raise ValueError(
                "rotary_scaling needs rotary positions; pass rotary_theta as well, such as 10000.0"
            )
        elif c.rotary is None:
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
        self.places: Callable[[int], Any] | None = None

    def forward(self, idx: Any, cache: KVCache | None = None) -> Tensor:
        """Return the logits of the next token at every position.

        Args:
            idx: (batch, seq) token ids, a tensor or an integer array; seq <= n_positions.
            cache: Keys and values of the tokens before ``idx``; see :meth:`hidden`.

        Returns:
            (batch, seq, n_vocab) logits; a constant if there is a cache.
        """
        if cache is None:
            return self.score(self.hidden(idx))
        with no_grad():
            return self.score(self.hidden(idx, cache))

    @in_own_precision
    def hidden(self, idx: Any, cache: KVCache | None = None) -> Tensor:
        """Return the output of the last norm, (batch, seq, n_embd), for (batch, seq) token ids.

        Args:
            idx: Token ids, (batch, seq), a tensor or an integer array.
            cache: Keys and values of the tokens before ``idx``, from :meth:`make_cache`. Those of
                ``idx`` are appended, and the result is a constant.

        Raises:
            ValueError: If the ids do not have two dimensions, or exceed the context or the cache.
        """
        check_cache(cache, KVCache)
        if cache is not None and is_recording():
            with no_grad():
                return self.hidden(idx, cache)
        shape = shape_of("token ids", idx)
        if len(shape) != 2:
            raise ValueError(
                f"a language model needs ids of shape (batch, seq), got {shape}; pass one text as "
                "numpy.array([ids])"
            )
        batch, seq = shape
        if batch * seq == 0:
            raise ValueError(f"a language model needs at least one token, got ids of shape {shape}")
        start = 0 if cache is None else cache.length
        if start + seq > self.n_positions:
            before = f" after the {start} in the cache" if start else ""
            raise ValueError(
                f"the context holds {self.n_positions} tokens, got {seq}{before}; pass the last ones"
            )
        layers = self._layer_caches(cache)
        x = self.token_embeddings(idx)  # (batch, seq, n_embd)
        if self.position_embeddings is not None:
            places = self._places(start, seq, layers[0])
            positions = self.position_embeddings(places)  # (seq, n_embd)
            x = x + positions
        x = self.dropout(x)
        if cache is None:
            call = checkpoint if self.recompute else lambda fn, *inputs: fn(*inputs)
            return self.through_layers(x, call)
        for name, layer_cache in zip(self.layer_names, layers, strict=True):
            x = getattr(self, name)(x, layer_cache)  # (batch, seq, n_embd)
        return self.ln(x)  # (batch, seq, n_embd)

    def _places(self, start: int, seq: int, cache: LayerCache | None) -> Any:
        """Return the positions of tokens, of which there are ``start`` in the cache, (seq,)."""
        if self.places is not None:
            return self.places(seq)
        if cache is None and self.backend.cuda:
            return kept_range(0, seq)
        if cache is not None and cache.spot is not None:
            return cache.spot.places
        return np.arange(start, start + seq)

    @operation
    def through_layers(self, x: Tensor, call: Callable[..., Any]) -> Tensor:
        """Apply the layers and the last norm to (batch, seq, n_embd); ``call(layer, x)`` calls a layer."""
        for name in self.layer_names:
            x = call(getattr(self, name), x)  # (batch, seq, n_embd)
        return self.ln(x)

    def _layer_caches(self, cache: KVCache | None) -> list[LayerCache] | list[None]:
        if cache is None:
            return [None] * len(self.layer_names)
        if len(cache.layers) != len(self.layer_names):
            raise ValueError(
                f"the cache is for {len(cache.layers)} layers, the model has {len(self.layer_names)}; "
                "make it with make_cache of this model"
            )
        cache.truncate(cache.length)  # a step that failed halfway filled only some layers
        return cache.layers

    @in_own_precision
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

    @in_own_precision
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
